"""The package and its call sites, as mypy and basedpyright see them."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import fi_dcp_compat
from tests.fakes import REPOSITORY
from tests.typing.checkers import (
    CALL_SITES,
    FOLDER,
    MARK,
    basedpyright,
    copied,
    mypy,
    type_completeness,
    without_flashinfer,
)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment without FlashInfer."""
    python = without_flashinfer(tmp_path_factory.mktemp("bare"))
    command = [str(python), "-I", "-c", "import fi_dcp_compat, flashinfer"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'flashinfer'\n")
    return python


@pytest.fixture(scope="module")
def without_stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("without_stubs")
    return copied(folder, "fi_dcp_compat", str(FOLDER / "right.py"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """mypy's cache: most of a run is torch."""
    return tmp_path_factory.mktemp("mypy_cache")


@pytest.mark.parametrize("installed", [True, False], ids=["flashinfer", "no flashinfer"])
@pytest.mark.parametrize("stubs", [True, False], ids=["stubs", "no stubs"])
@pytest.mark.parametrize("checker", ["mypy", "basedpyright"])
def test_the_package_and_its_call_sites_type_check(
    checker: str, stubs: bool, installed: bool, bare: Path, without_stubs: Path, cache: Path
) -> None:
    folder = REPOSITORY if stubs else without_stubs
    python = Path(sys.executable) if installed else bare
    assert not installed or importlib.util.find_spec("flashinfer")
    found = mypy(folder, python, cache) if checker == "mypy" else basedpyright(folder, python)
    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize("checker", ["mypy", "basedpyright"])
def test_each_marked_line_is_an_error_of_the_code_it_names_and_no_other_line_is(
    checker: str, tmp_path: Path, cache: Path
) -> None:
    copied(tmp_path, "fi_dcp_compat", "typings", *(str(FOLDER / name) for name in CALL_SITES))
    wrong = tmp_path / FOLDER / "wrong.py"
    lines = wrong.read_text(encoding="utf-8").splitlines()
    marked: set[tuple[str, int, str]] = set()
    for number, line in enumerate(lines, 1):
        mark = MARK.search(line)
        # One mark alone would be for the other checker an error, or nothing.
        assert bool(mark) is ("ignore" in line), line
        if mark:
            marked |= {("wrong.py", number, code) for code in mark[checker].split(", ")}
    wrong.write_text("".join(MARK.sub("", line) + "\n" for line in lines), encoding="utf-8")
    python = Path(sys.executable)
    found = mypy(tmp_path, python, cache) if checker == "mypy" else basedpyright(tmp_path, python)
    errors = {(Path(one.file).name, one.line, one.code) for one in found}
    assert {error for error in errors if error[0] in CALL_SITES} == marked


def test_the_right_call_sites_use_every_public_name() -> None:
    tree = ast.parse((REPOSITORY / FOLDER / "right.py").read_text(encoding="utf-8"))
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert set(fi_dcp_compat.__all__) - used == set()


def test_every_public_symbol_has_a_known_type(bare: Path, tmp_path: Path) -> None:
    types = type_completeness("fi_dcp_compat", bare, tmp_path)
    unclear = [one for one in types["symbols"] if not one["isTypeKnown"] or one["isTypeAmbiguous"]]
    assert unclear == []
    assert types["completenessScore"] == 1
    # It looked at this checkout, and at what is public; it lists no dunder.
    assert Path(types["pyTypedPath"]).samefile(REPOSITORY / "fi_dcp_compat" / "py.typed")
    listed = {one["name"] for one in types["symbols"] if one["isExported"]}
    public = {f"fi_dcp_compat.{name}" for name in fi_dcp_compat.__all__ if name != "__version__"}
    assert public - listed == set()
