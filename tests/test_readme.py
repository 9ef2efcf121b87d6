"""The README's code runs, and prints what it says."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

import fi_dcp_compat
from fi_dcp_compat import FlashInferVersionError

TESTS = Path(__file__).parent
README = (TESTS.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def section(title: str) -> str:
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_code_blocks_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(BLOCKS) == 9
    names: dict[str, object] = {}
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out.strip()
    assert printed
    assert "\n".join(f"    {line}" for line in printed.splitlines()) in README

    test = cast("Callable[[str], None]", names["test_our_call_hands_flashinfer_what_it_takes"])
    (mark,) = test.pytestmark  # type: ignore[attr-defined]  # parametrize leaves it there
    assert mark.args[0] == "release"
    for release in mark.args[1]:
        test(release)
    with pytest.raises(FlashInferVersionError, match=r"0\.6\.16, whose function lacks enable_dcp"):
        test("0.6.16")


def test_the_integration_shown_is_the_one_tested() -> None:
    source = (TESTS / "contract" / "integration.py").read_text(encoding="utf-8")
    _, code = source.split('"""\n\n', maxsplit=1)
    assert f"```python\n{code}```" in section("In a serving stack")
    assert code in BLOCKS


def test_ci_runs_the_test_command() -> None:
    command = re.search(r"<!-- test command -->\n```sh\n(.+)\n```", README)
    assert command is not None
    assert command[1] == 'pip install -e ".[test]" && pytest'


def test_the_table_of_names_is_the_public_one() -> None:
    table = section("Names")
    named = set(re.findall(r"`(\w+)`", table))
    errors = {name for name in fi_dcp_compat.__all__ if name.endswith(("Error", "Warning"))}
    assert named == set(fi_dcp_compat.__all__) - errors - {"__version__"}
    assert all(f"`{name}`" in README for name in errors)


def test_the_names_outside_the_package_itself_are_public_in_their_modules() -> None:
    named = re.findall(r"`(fi_dcp_compat\.\w+)\.(\w+)`", section("Names"))
    assert {module for module, _ in named} == {
        f"fi_dcp_compat.{name}" for name in ("dropin", "pytest_plugin", "testing")
    }
    for module, name in named:
        assert name in importlib.import_module(module).__all__
    testing = importlib.import_module("fi_dcp_compat.testing")
    assert set(testing.__all__) == {n for m, n in named if m == testing.__name__}
