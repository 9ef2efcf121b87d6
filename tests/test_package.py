"""The package as a whole: what importing it does, its names, its layers, and its wheel."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email import message_from_string
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import fi_dcp_compat
from fi_dcp_compat.features import FEATURES
from fi_dcp_compat.releases import recorded_versions
from tests.fakes import REPOSITORY, Site, answer_of, fake_site, run_python

PACKAGE = REPOSITORY / "fi_dcp_compat"
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py"))
TREES = {name: ast.parse((PACKAGE / f"{name}.py").read_text(encoding="utf-8")) for name in MODULES}

# Each layer may import those above it in this list, and its own without a circle.
LAYERS = (
    ("errors",),
    ("limits", "features", "config", "validation"),
    ("abi", "dcp", "lse"),
    (
        "known_issues",
        "installed",
        "machine",
        "failures",
        "releases",
        "describing",
        "probing",
        "reference",
        "backends",
    ),
    ("guards",),
    ("inputs", "scales", "sizes"),
    ("routing",),
    ("plans", "launch", "debug", "passed", "preparation", "prepared"),
    ("arguments",),
    ("dropin_guards",),
    ("forwarding",),
    ("decode", "dropin", "startup"),
    ("collectives",),
    ("distributed",),
    ("decode_dcp",),
    ("demo",),
    ("testing", "demo_ranks", "doctor", "wheels", "catalogue", "cli", "__main__"),
    ("pytest_plugin",),
)
TABLES = ("features", "limits", "known_issues")
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}
TORCH_FREE = (
    "errors",
    "limits",
    "features",
    "known_issues",
    "abi",
    "installed",
    "machine",
    "failures",
    "releases",
    "describing",
    "probing",
    "config",
    "backends",
    "guards",
    "startup",
    "doctor",
    "wheels",
    "catalogue",
    "cli",
)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imports(tree: ast.AST, *, nested: bool = True) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of each import that is run, those inside functions if `nested`."""
    for node in ast.iter_child_nodes(tree):
        if is_type_checking(node):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((module, alias.name) for alias in node.names)
        elif nested or not isinstance(node, ast.FunctionDef):
            yield from imports(node, nested=nested)


def siblings(name: str) -> set[str]:
    """The modules of this package that `name` imports."""
    return {
        (module[1:] or imported)
        for module, imported in imports(TREES[name])
        if module.startswith(".")
    }


# Importing it.


def test_importing_it_imports_neither_torch_nor_flashinfer_nor_reads_the_environment() -> None:
    answer = answer_of(
        "import json, os, sys\n"
        "asked = []\n"
        "read = os._Environ.__getitem__\n"
        "def spy(self, key):\n"
        "    asked.append(key)\n"
        "    return read(self, key)\n"
        "os._Environ.__getitem__ = spy\n"
        "before = set(sys.modules)\n"
        "import fi_dcp_compat\n"
        "came = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "alone = sorted(came - sys.stdlib_module_names)\n"
        "read_alone = len(asked)\n"
        f"for name in {TORCH_FREE!r}:\n"
        "    __import__(f'fi_dcp_compat.{name}')\n"
        "heavy = {name.split('.')[0] for name in sys.modules} & {'torch', 'flashinfer', 'numpy'}\n"
        "print(json.dumps([alone, sorted(heavy), asked[:read_alone], asked]))\n"
    )
    alone, heavy, asked_alone, asked = answer
    assert alone == ["fi_dcp_compat"]
    assert heavy == []
    assert asked_alone == []
    # The standard library asks for variables of its own.
    assert [name for name in asked if name.startswith(("FI_", "FLASHINFER"))] == []


@pytest.mark.parametrize(
    "code",
    [
        "raise RuntimeError('flashinfer-cubin version (1) does not match flashinfer version (2)')",
        "raise OSError('libcuda.so.1: cannot open shared object file')",
    ],
)
def test_a_broken_flashinfer_does_not_break_the_import(code: str, tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.write("flashinfer/__init__.py", f"{code}\n")
    answer = answer_of(
        "import json, sys\n"
        "sys.modules['torch'] = None\n"
        "import fi_dcp_compat\n"
        "imported = 'flashinfer' in sys.modules\n"
        "try:\n"
        "    fi_dcp_compat.probe()\n"
        "except fi_dcp_compat.FlashInferImportError as error:\n"
        "    print(json.dumps([imported, repr(error.__cause__)]))\n",
        path=[tmp_path],
    )
    assert answer == [False, code.removeprefix("raise ")]


def test_an_old_flashinfer_is_no_error_until_dcp_is_asked_of_it(tmp_path: Path) -> None:
    with fake_site(tmp_path / "site-packages") as site:
        site.flashinfer("0.6.16", like="0.6.16")
        abi = fi_dcp_compat.probe()
        configuration: dict[str, Any] = {
            "num_heads": 16,
            "q_len": 1,
            "page_size": 64,
            "dtype": "bf16",
        }
        assert fi_dcp_compat.check(abi, **configuration) == ()
        with pytest.raises(fi_dcp_compat.FlashInferVersionError, match=r"0\.6\.16"):
            abi.require_native_dcp()


# Names.


def isort_style(names: list[str]) -> list[str]:
    """Constants first, then classes, then the others: as ruff's RUF022 sorts."""
    return sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))


def exported(name: str) -> list[str] | None:
    for node in TREES[name].body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return None


def test_every_name_resolves_and_is_what_its_module_has() -> None:
    for name in fi_dcp_compat.__all__:
        value = getattr(fi_dcp_compat, name)
        if name != "__version__":
            module = importlib.import_module(f"fi_dcp_compat.{fi_dcp_compat._HOME[name]}")
            assert getattr(module, name) is value


def test_every_name_has_one_home_and_type_checkers_see_the_same() -> None:
    assert sorted([*fi_dcp_compat._HOME, "__version__"]) == sorted(fi_dcp_compat.__all__)
    (block,) = (node for node in TREES["__init__"].body if is_type_checking(node))
    seen: dict[str, str] = {}
    for node in ast.walk(block):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 1
            assert node.module is not None
            for alias in node.names:
                assert alias.asname is None
                seen[alias.name] = node.module
    assert seen == fi_dcp_compat._HOME


@pytest.mark.parametrize("name", MODULES)
def test_the_exported_names_are_sorted_and_there(name: str) -> None:
    names = exported(name)
    if names is None:
        assert name in ("__main__",)
        return
    assert names == isort_style(names)
    assert len(set(names)) == len(names)
    module = importlib.import_module("fi_dcp_compat" + ("" if name == "__init__" else f".{name}"))
    assert [one for one in names if not hasattr(module, one)] == []


def test_what_is_public_is_exported_by_its_own_module_too() -> None:
    for name, home in fi_dcp_compat._HOME.items():
        assert name in (exported(home) or []), f"{home}.__all__ lacks {name}"


def test_dir_lists_the_public_names_and_no_others() -> None:
    assert dir(fi_dcp_compat) == sorted(fi_dcp_compat.__all__)


def test_a_star_import_brings_them_all() -> None:
    namespace: dict[str, object] = {}
    exec("from fi_dcp_compat import *", namespace)
    assert set(fi_dcp_compat.__all__) == set(namespace) - {"__builtins__"}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'fi_dcp_compat' has no attribute 'decode_mlaa'"):
        fi_dcp_compat.decode_mlaa  # noqa: B018
    assert not hasattr(fi_dcp_compat, "nothing")


def test_a_public_function_is_not_shadowed_by_a_module() -> None:
    assert set(fi_dcp_compat.__all__).isdisjoint(MODULES)


def test_the_version_is_the_distributions() -> None:
    assert fi_dcp_compat.__version__ == version("fi-dcp-compat")
    pyproject = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nversion = "{fi_dcp_compat.__version__}"\n' in pyproject


# Layers.


def test_every_module_has_its_layer() -> None:
    assert sorted(LAYER) == [name for name in MODULES if name != "__init__"]


@pytest.mark.parametrize("name", sorted(LAYER))
def test_a_module_imports_only_what_lies_below_it(name: str) -> None:
    above = {other for other in siblings(name) if LAYER[other] > LAYER[name]}
    assert above == set()


def test_no_two_modules_import_each_other() -> None:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name not in done:
            for other in siblings(name):
                visit(other, (*path, name))
            done.add(name)

    for name in LAYER:
        visit(name, ())


@pytest.mark.parametrize("name", MODULES)
def test_nothing_but_the_probe_imports_flashinfer(name: str) -> None:
    asked = {module for module, _ in imports(TREES[name]) if module.split(".")[0] == "flashinfer"}
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            argument = str(node.args[0].value)
            function = ast.unparse(node.func).rpartition(".")[2]
            if argument.split(".")[0] != "flashinfer":
                continue
            if function in ("import_module", "__import__"):
                asked.add(argument)
            # Looking a submodule up imports its package.
            assert function != "find_spec" or argument == "flashinfer"
    assert asked == set() or name in ("probing", "testing")


@pytest.mark.parametrize("name", [*TORCH_FREE, "__init__", "__main__"])
def test_what_answers_without_torch_does_not_import_it_at_the_top(name: str) -> None:
    top = {module.split(".")[0] for module, _ in imports(TREES[name], nested=False)}
    assert "torch" not in top


def test_what_answers_without_torch_really_does() -> None:
    done = run_python(
        "import sys\n"
        "sys.modules['torch'] = sys.modules['flashinfer'] = None\n"
        f"for name in {TORCH_FREE!r}:\n"
        "    __import__(f'fi_dcp_compat.{name}')\n"
        "from fi_dcp_compat import check, recorded, capabilities\n"
        "config = dict(num_heads=16, q_len=1, page_size=64, dtype='bf16')\n"
        "assert not check(recorded('0.7.4'), **config)\n"
        "assert not check(recorded('0.7.4'), dcp_world_size=8, **config)\n"
        "assert capabilities(recorded('0.7.4')).supports_dcp\n"
    )
    assert done.stderr == ""
    assert done.returncode == 0


# Shape.


@pytest.mark.parametrize("name", MODULES)
def test_no_module_is_above_300_lines(name: str) -> None:
    assert len((PACKAGE / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 300


@pytest.mark.parametrize("name", MODULES)
def test_no_assert_guards_anything(name: str) -> None:
    lines = [node.lineno for node in ast.walk(TREES[name]) if isinstance(node, ast.Assert)]
    assert lines == []


def strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of the strings that can reach a user: no docstrings, no data tables."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(node.value)
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]).isupper():
            skipped.update(ast.walk(statement))
    for node in ast.walk(tree):
        if node not in skipped and isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


@pytest.mark.parametrize("name", [name for name in MODULES if name not in TABLES])
def test_messages_take_their_versions_from_the_feature_table(name: str) -> None:
    since = {row.since for row in FEATURES}
    named = [
        (line, text)
        for line, text in strings(TREES[name])
        if since & set(re.findall(r"\d+\.\d+\.\d+(?:\.post\d+)?", text))
    ]
    assert named == []


# The wheel.


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling, the build backend, is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, hatchling.build as b; b.build_wheel(sys.argv[1])",
            str(folder),
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_the_package_its_data_and_its_types(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {f"fi_dcp_compat/{name}.py" for name in MODULES}
    assert names == expected | {"fi_dcp_compat/py.typed", "fi_dcp_compat/releases.json"}


def test_the_wheel_needs_torch_and_packaging_only(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        (scripts,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
        headers = message_from_string(archive.read(metadata).decode())
        assert "fi-dcp-compat = fi_dcp_compat.cli:main" in archive.read(scripts).decode()
        assert any(".dist-info/" in name and name.endswith("LICENSE") for name in names)
    required = headers.get_all("Requires-Dist", [])
    hard = [re.split(r"[<>=~!\[ ;]", line)[0] for line in required if "extra ==" not in line]
    assert sorted(hard) == ["packaging", "torch"]
    assert [r for r in required if "flashinfer-python" in r and "extra == 'flashinfer'" in r]
    assert headers["Requires-Python"] == ">=3.10"


def test_the_wheel_works_where_it_is_unpacked(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import fi_dcp_compat, fi_dcp_compat.releases as releases\n"
            "print(fi_dcp_compat.__file__, *releases.recorded_versions())\n",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.split() == [
        str(tmp_path / "fi_dcp_compat/__init__.py"),
        *recorded_versions(),
    ]
