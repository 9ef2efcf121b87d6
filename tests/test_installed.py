"""What is on disk: distributions by their folders, the package, its version, the header."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from fi_dcp_compat import Parameter, recorded
from fi_dcp_compat.abi import FUNCTION
from fi_dcp_compat.installed import (
    DEFINED_IN,
    find_distribution,
    installed_distributions,
    package_folder,
    read_parameters,
    written_version,
)
from tests.fakes import Site, fake_site, header

NAMES = ("flashinfer-python", "flashinfer-cubin", "torch")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with fake_site(tmp_path / "site-packages") as site:
        yield site


def parameters_of(text: str) -> tuple[Parameter, ...]:
    return read_parameters({"mla/_core.py": text})[0]


# Distributions.


def test_nothing_installed_is_an_empty_answer(site: Site) -> None:
    assert installed_distributions(NAMES) == {}
    assert find_distribution("torch") is None


@pytest.mark.parametrize(
    ("folder", "name", "version"),
    [
        ("flashinfer_python-0.7.4.dist-info", "flashinfer-python", "0.7.4"),
        ("flashinfer-python-0.7.4.dist-info", "flashinfer-python", "0.7.4"),
        ("Flashinfer.Python-0.7.4.dist-info", "flashinfer-python", "0.7.4"),
        ("flashinfer_python-0.7.2.post1+cu130.dist-info", "flashinfer-python", "0.7.2.post1+cu130"),
        ("torch-2.13.0+cpu.dist-info", "torch", "2.13.0+cpu"),
        ("torch-2.13.0.dev20261001+cu130.dist-info", "torch", "2.13.0.dev20261001+cu130"),
    ],
)
def test_a_distribution_is_found_by_its_folder(
    folder: str, name: str, version: str, site: Site
) -> None:
    (site.folder / folder).mkdir()
    assert installed_distributions(NAMES) == {name: version}
    assert find_distribution(name) == str(site.folder / folder)


@pytest.mark.parametrize(
    "folder",
    [
        "torch",
        "torch-2.13.0",
        "torch.dist-info",
        "torchvision-0.28.0.dist-info",
        "pytorch-2.13.0.dist-info",
        "nvidia_cutlass_dsl_libs_base-4.8.1.dist-info",
        "~orch-2.13.0.dist-info",
    ],
)
def test_a_folder_of_another_name_is_no_distribution_of_this_one(folder: str, site: Site) -> None:
    (site.folder / folder).mkdir()
    assert installed_distributions(("torch", "nvidia-cutlass-dsl")) == {}


def test_the_first_on_the_path_is_the_one_that_counts(site: Site, tmp_path: Path) -> None:
    first = Site(tmp_path / "first")
    first.distribution("torch", "2.12.0")
    site.distribution("torch", "2.13.0")
    site.distribution("flashinfer-cubin", "0.6.13")
    sys.path.insert(0, str(first.folder))
    assert installed_distributions(NAMES) == {"flashinfer-cubin": "0.6.13", "torch": "2.12.0"}
    found = find_distribution("torch")
    assert found is not None
    assert Path(found).parent == first.folder


def test_path_entries_that_are_no_folders_are_skipped(site: Site, tmp_path: Path) -> None:
    archive = tmp_path / "packages.zip"
    archive.write_bytes(b"")
    sys.path[:0] = [str(archive), str(tmp_path / "absent")]
    site.distribution("torch", "2.13.0")
    assert installed_distributions(NAMES) == {"torch": "2.13.0"}


def test_the_empty_path_entry_is_the_working_directory(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Site(tmp_path / "here").distribution("torch", "2.13.0")
    monkeypatch.chdir(tmp_path / "here")
    sys.path.insert(0, "")
    assert installed_distributions(NAMES) == {"torch": "2.13.0"}


# The package.


def test_the_package_is_found_without_importing_it(site: Site) -> None:
    assert package_folder() is None
    site.write("flashinfer/__init__.py", "raise RuntimeError('imported')\n")
    assert package_folder() == str(site.folder / "flashinfer")
    assert "flashinfer" not in sys.modules


def test_a_single_file_of_that_name_is_no_package(site: Site) -> None:
    site.write("flashinfer.py", "")
    assert package_folder() is None


def test_an_imported_package_is_where_it_was_imported_from(site: Site) -> None:
    site.flashinfer()
    importlib.import_module("flashinfer")
    assert package_folder() == str(site.folder / "flashinfer")


def test_a_fake_module_does_not_hide_the_package(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    assert package_folder() is None
    site.write("flashinfer/__init__.py", "")
    assert package_folder() == str(site.folder / "flashinfer")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("_build_meta.py", '"""Build metadata."""\n__version__ = "0.7.4"\n__git_commit__ = "7"\n'),
        ("_build_meta.py", "__version__: str = '0.7.4'\n"),
        ("version.py", '__version__ = "0.7.4"\n'),
    ],
)
def test_the_version_is_read_from_the_packages_files(name: str, text: str, site: Site) -> None:
    site.write(f"flashinfer/{name}", text)
    assert written_version(str(site.folder / "flashinfer")) == "0.7.4"


def test_the_generated_metadata_goes_before_the_version_module(site: Site) -> None:
    site.write("flashinfer/version.py", '__version__ = "0.1"\n')
    site.write("flashinfer/_build_meta.py", '__version__ = "0.7.4"\n')
    assert written_version(str(site.folder / "flashinfer")) == "0.7.4"


def test_a_version_that_is_not_written_is_none(site: Site) -> None:
    site.flashinfer(None)
    assert written_version(str(site.folder / "flashinfer")) is None
    assert written_version(str(site.folder / "absent")) is None


# The function's header.


@pytest.mark.parametrize("version", ["0.6.0", "0.6.11", "0.6.17", "0.7.4"])
def test_the_parameters_are_those_of_the_header(version: str) -> None:
    parameters = recorded(version).parameters
    assert parameters_of(header(parameters)) == parameters


FORMS = {
    "several lines": "def {f}(\n    query,\n    backend='auto',\n):\n    return query\n",
    "a return annotation": "def {f}(\n    query, backend='auto'\n) -> dict[str, int]:\n    ...\n",
    "an annotation of several lines": (
        "def {f}(\n    query,\n    backend='auto',\n) -> tuple[\n    int,\n]:\n    ...\n\n\n"
        "def later(\n    kv_cache,\n):\n    ...\n"
    ),
    "one line": "def {f}(query, backend='auto'): ...\n\n\ndef later(\n    kv_cache,\n):\n    ...\n",
    "a comment after the header": "def {f}(\n    query,\n    backend='auto',\n):  # x\n    ...\n",
    "a comment inside": "def {f}(\n    query,  # (a)\n    # :\n    backend='auto',\n):\n    ...\n",
    "a decorator": "@api(\n    1\n)\ndef {f}(\n    query,\n    backend='auto',\n):\n    ...\n",
    "others around it": (
        "def before(\n    kv_cache,\n):\n    ...\n\n\n"
        "def {f}(\n    query,\n    backend='auto',\n):\n    ...\n\n\n"
        "def {f}_inner(\n    kv_cache,\n):\n    ...\n"
    ),
    "one of a longer name before it": (
        "def {f}_inner(\n    kv_cache,\n):\n    ...\n\n\n"
        "def {f}(\n    query,\n    backend='auto',\n):\n    ...\n"
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_header_may_be_written_in_any_form(form: str) -> None:
    text = FORMS[form].replace("{f}", FUNCTION)
    assert parameters_of(text) == (Parameter("query", None), Parameter("backend", "'auto'"))


def test_kinds_are_named_as_inspect_names_them() -> None:
    text = f"def {FUNCTION}(\n    a, b=1, /, c=2, *rest, d, e='f', **more\n):\n    ...\n"
    assert parameters_of(text) == (
        Parameter("a", None, "POSITIONAL_ONLY"),
        Parameter("b", "1", "POSITIONAL_ONLY"),
        Parameter("c", "2", "POSITIONAL_OR_KEYWORD"),
        Parameter("rest", None, "VAR_POSITIONAL"),
        Parameter("d", None, "KEYWORD_ONLY"),
        Parameter("e", "'f'", "KEYWORD_ONLY"),
        Parameter("more", None, "VAR_KEYWORD"),
    )


@pytest.mark.parametrize(
    ("written", "default"),
    [
        ("None", "None"),
        ('"auto"', "'auto'"),
        ("1.0", "1.0"),
        ("1e-3", "0.001"),
        ("-1", "-1"),
        ("(1,2)", "(1, 2)"),
        ("torch.bfloat16", "torch.bfloat16"),
        ("1/math.log( 2 )", "1 / math.log(2)"),
    ],
)
def test_a_default_is_written_as_repr_writes_its_value(written: str, default: str) -> None:
    text = f"def {FUNCTION}(\n    query={written},\n):\n    ...\n"
    assert parameters_of(text) == (Parameter("query", default),)


def test_the_last_definition_counts_as_for_python() -> None:
    overload = f"@overload\ndef {FUNCTION}(\n    query: int,\n    old,\n): ...\n\n\n"
    real = header(recorded("0.7.4").parameters)
    assert parameters_of(overload + real) == recorded("0.7.4").parameters


def test_what_looks_like_the_end_of_a_header_is_no_end() -> None:
    text = f"def {FUNCTION}(\n    query,\n) -> tuple[\n    int,\n]:\n    ...\n\n\n"
    text += 'X = """\n) oops:\n"""\n'
    assert [p.name for p in parameters_of(text)] == ["query"]


def test_the_module_is_the_file_that_defines_it() -> None:
    source = header(recorded("0.7.4").parameters)
    star_import = "from ._core import *\n"
    assert DEFINED_IN == ("mla/_core.py", "mla.py")
    assert read_parameters({"mla/_core.py": source})[1] == f"flashinfer.mla._core:{FUNCTION}"
    assert read_parameters({"mla.py": source})[1] == f"flashinfer.mla:{FUNCTION}"
    assert read_parameters({"mla/_core.py": star_import, "mla.py": source})[1] == (
        f"flashinfer.mla:{FUNCTION}"
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "def another(\n    query,\n):\n    ...\n",
        f"from .elsewhere import {FUNCTION}\n",
        f"class Wrapper:\n    def {FUNCTION}(self, query): ...\n",
    ],
    ids=["an empty file", "another function", "an import", "a method"],
)
def test_a_file_without_the_function_gives_none(text: str) -> None:
    assert read_parameters({"mla/_core.py": text}) == ((), "")
