"""The stubs under typings/ against the records, and with stubtest against the real function."""

from __future__ import annotations

import ast
import shutil
import subprocess
from pathlib import Path

import pytest

from fi_dcp_compat import recorded
from fi_dcp_compat.abi import FUNCTION
from tests.fakes import REPOSITORY, run_python
from tests.wheels import unpacked

TYPINGS = REPOSITORY / "typings"
STUBBED = "0.7.4"
ALLOWLIST = Path(__file__).with_name("stubtest-0.6.17.txt")


def stubtest(
    release: str, *options: str, stubs: Path = TYPINGS, wheels: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run mypy's stubtest on the installed release, or on one from its wheel."""
    # Some releases cannot be imported without a GPU; the simulation leaves the function as it is.
    done = run_python(
        "import contextlib, sys\n"
        "from mypy.stubtest import parse_options, test_stubs\n"
        "from tests.hostsim.simulation import simulated_flashinfer\n"
        f"with {'contextlib.nullcontext' if wheels is None else 'simulated_flashinfer'}():\n"
        "    import flashinfer\n"
        # stubtest passes over what a stub imports.
        f"    assert flashinfer.mla.{FUNCTION} is flashinfer.decode.{FUNCTION}\n"
        f"    assert flashinfer.__version__ == {release!r}, flashinfer.__file__\n"
        f"    options = ['--concise', '--ignore-missing-stub', *{options!r}, 'flashinfer']\n"
        "    sys.exit(test_stubs(parse_options(options)))\n",
        path=[] if wheels is None else [unpacked(release, wheels)],
        environment={"MYPYPATH": str(stubs)},
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_each_overload_of_the_stub_has_the_recorded_parameters_and_defaults() -> None:
    tree = ast.parse((TYPINGS / "flashinfer" / "decode.pyi").read_text(encoding="utf-8"))
    overloads = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert [node.name for node in overloads] == [FUNCTION] * 3
    found = [defaults(overload.args) for overload in overloads]
    # stubtest sees neither what one overload alone lacks nor the value of a default.
    record = {parameter.name: parameter.default for parameter in recorded(STUBBED).parameters}
    assert [list(names) for names in found] == [list(record)] * 3
    differing = [{name for name in record if one[name] != record[name]} for one in found]
    assert differing == [set(), {"return_lse"}, set()]


def defaults(arguments: ast.arguments) -> dict[str, str | None]:
    """Map the parameters to their defaults, as a record has them; None: it is required."""
    names = [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]
    required = len(arguments.args) - len(arguments.defaults)
    values = [*[None] * required, *arguments.defaults, *arguments.kw_defaults]
    texts = (None if value is None else ast.unparse(value) for value in values)
    return dict(zip(names, texts, strict=True))


def test_stubtest_finds_nothing_but_what_is_planted_in_the_installed_release(
    tmp_path: Path,
) -> None:
    # Without its find it could have read FlashInfer's own files as the stubs.
    shutil.copytree(TYPINGS, tmp_path, dirs_exist_ok=True)
    with (tmp_path / "flashinfer" / "decode.pyi").open("a", encoding="utf-8") as stub:
        stub.write("planted: int\n")
    done = stubtest(STUBBED, stubs=tmp_path)
    assert done.stdout == "flashinfer.decode.planted is not present at runtime\n"


@pytest.mark.releases
def test_stubtest_finds_in_the_first_release_with_dcp_only_that_two_parameters_came_later(
    wheels_folder: Path,
) -> None:
    done = stubtest("0.6.17", wheels=wheels_folder)
    finding = f"flashinfer.decode.{FUNCTION} is inconsistent, runtime does not have parameter"
    later = ("use_fp16_softmax", "return_lse_base")
    assert done.stdout.splitlines() == [f'{finding} "{name}"' for name in later]


@pytest.mark.releases
def test_stubtest_finds_nothing_in_that_release_besides_its_allowlist(wheels_folder: Path) -> None:
    done = stubtest("0.6.17", f"--allowlist={ALLOWLIST}", wheels=wheels_folder)
    assert (done.returncode, done.stdout) == (0, "")
