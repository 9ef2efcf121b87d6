"""Where the package builds its errors and reasons, and which of these places were passed."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import fi_dcp_compat
from fi_dcp_compat import FlashInferCompatError, Reason, errors

PACKAGE = Path(fi_dcp_compat.__file__).parent

# A function that gives an error or reasons, never returns, or is told which argument to name makes
# a message of what its caller says: each call of it is a place of its own.
_GIVES = re.compile(r"(NoReturn|Reason|Reason \| None|Iterator\[Reason\]|\w+Error)")
_TOLD = "argument"


class Site(NamedTuple):
    """One call that builds an error or a reason, from its first line to its last."""

    module: str
    function: str
    callee: str
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.module}.py:{self.first}, {self.callee} in {self.function}"


class Step(NamedTuple):
    """A line of the package that was on the stack, and what it had called."""

    module: str
    line: int
    callee: str


class Built(NamedTuple):
    """An error or a reason as it was made: what it says, and who said so."""

    summary: str
    found: str
    steps: frozenset[Step]

    def passed(self, site: Site) -> bool:
        return any(
            step.module == site.module
            and site.first <= step.line <= site.last
            and step.callee == site.callee
            for step in self.steps
        )


@functools.cache
def sites() -> tuple[Site, ...]:
    """Return every place; those of `errors` itself only copy a reason."""
    trees = {
        path.stem: ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.glob("*.py"))
        if path.stem != "errors"
    }
    builders = {name for name in errors.__all__ if name == "Reason" or name.endswith("Error")}
    for tree in trees.values():
        builders |= {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and _builds(node)
        }
    found = [site for name, tree in trees.items() for site in _calls(name, "", tree, builders)]
    return tuple(dict.fromkeys(found))


def _builds(function: ast.FunctionDef) -> bool:
    gives = function.returns is not None and _GIVES.fullmatch(ast.unparse(function.returns))
    return bool(gives) or any(parameter.arg == _TOLD for parameter in function.args.args)


def _calls(module: str, function: str, node: ast.AST, builders: set[str]) -> Iterator[Site]:
    for child in ast.iter_child_nodes(node):
        inside = child.name if isinstance(child, ast.FunctionDef) else function
        if isinstance(child, ast.Call):
            callee: str = getattr(child.func, "id", getattr(child.func, "attr", ""))
            if callee in builders:
                yield Site(module, function, callee, child.lineno, child.end_lineno or 0)
        yield from _calls(module, inside, child, builders)


@contextmanager
def traced() -> Iterator[list[Built]]:
    """Note every error and reason that is made inside the block."""
    built: list[Built] = []
    make_error, make_reason = FlashInferCompatError.__init__, Reason.__new__
    replace_in_reason = Reason._replace

    def error(self: FlashInferCompatError, summary: str, **parts: Any) -> None:
        built.append(Built(summary, parts["found"], _stack(type(self).__name__)))
        make_error(self, summary, **parts)

    def reason(cls: type[Reason], *parts: Any, **named: Any) -> Reason:
        made = make_reason(cls, *parts, **named)
        built.append(Built(made.summary, made.found, _stack("Reason")))
        return made

    def replaced(self: Reason, **parts: Any) -> Reason:
        made = replace_in_reason(self, **parts)
        built.append(Built(made.summary, made.found, _stack("_replace")))
        return made

    with (
        patch.object(FlashInferCompatError, "__init__", error),
        patch.object(Reason, "__new__", staticmethod(reason)),
        patch.object(Reason, "_replace", replaced),
    ):
        yield built


def _stack(callee: str) -> frozenset[Step]:
    steps: set[Step] = set()
    frame = sys._getframe(2)
    while frame.f_back is not None:
        path = Path(frame.f_code.co_filename)
        if path.parent == PACKAGE:
            steps.add(Step(path.stem, frame.f_lineno, callee))
        callee, frame = frame.f_code.co_name, frame.f_back
    return frozenset(steps)
