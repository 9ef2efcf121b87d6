"""The README's code runs, and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fi_dcp_compat

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_code_blocks_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 7
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out.strip()
    assert printed
    assert "\n".join(f"    {line}" for line in printed.splitlines()) in README


def test_ci_runs_the_test_command() -> None:
    command = re.search(r"<!-- test command -->\n```sh\n(.+)\n```", README)
    assert command is not None
    assert command[1] == 'pip install -e ".[test]" && pytest'


def test_the_table_of_names_is_the_public_one() -> None:
    table = README[README.index("## Names") : README.index("## Licence")]
    named = set(re.findall(r"`(\w+)`", table))
    errors = {name for name in fi_dcp_compat.__all__ if name.endswith(("Error", "Warning"))}
    assert named == set(fi_dcp_compat.__all__) - errors - {"__version__"}
    assert all(f"`{name}`" in README for name in errors)
