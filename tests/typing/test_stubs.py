"""The stubs under typings/ against the record of the release that they claim."""

from __future__ import annotations

import ast
from pathlib import Path

from fi_dcp_compat import recorded
from fi_dcp_compat.abi import FUNCTION

STUB = Path(__file__).parents[2] / "typings" / "flashinfer" / "decode.pyi"


def test_the_stub_has_the_recorded_parameters() -> None:
    overloads = [
        node
        for node in ast.parse(STUB.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name == FUNCTION
    ]
    assert len(overloads) == 2
    names = [parameter.name for parameter in recorded("0.7.4").parameters]
    for overload in overloads:
        arguments = [*overload.args.args, *overload.args.kwonlyargs]
        assert [argument.arg for argument in arguments] == names
