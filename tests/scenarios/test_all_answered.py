"""Each of the 45 cases has a test of its number, or a reason why it can have none."""

from __future__ import annotations

import ast
import re
from pathlib import Path

NUMBERS = {f"S{number:02d}" for number in range(1, 46)}
NOT_APPLICABLE: dict[str, str] = {}


def test_every_scenario_has_a_test_or_a_reason() -> None:
    tested = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                numbers = re.match(r"test_((?:s\d\d_)+)", node.name)
                tested |= set(numbers[1].upper().split("_")[:-1]) if numbers else set()
    assert tested | set(NOT_APPLICABLE) == NUMBERS
    assert tested & set(NOT_APPLICABLE) == set()
    assert all(NOT_APPLICABLE.values())
