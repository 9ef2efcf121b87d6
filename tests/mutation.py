"""Turn off each guard of the package in turn, and see that a test fails.

``python -m tests.mutation [MODULE ...]`` prints the survivors, and exits with 1 if there are any.
A guard is an ``if`` whose body refuses, one of the operands of its ``or``, a bare call of a check,
or one of the questions by which a call is found to be like an earlier one. Each is turned off in a
copy of the repository, in a forked process that already has torch.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[1]
PACKAGE = "fi_dcp_compat"
COPIED = (PACKAGE, "tests", "typings", "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE")
# Nothing here refuses a call: what they raise is told by their own tests, or they only print.
LEFT_OUT = {"__init__", "__main__", "errors", "demo", "demo_ranks", "catalogue", "cli"}
# What refuses by being called, and returns where nothing is wrong.
CHECKS = ("check_", "require_", "raise_first", "_require", "_check_", "_refuse", "warn_of")
REFUSES = ("invalid", "refused", "raise_first", "_refuse", "_refuse_rows", "arch_reason")
LOOKS = ("look_at", "own")
# What decides that a call needs no other look: what `covers` returns, and `exact`.
ALIKE = ("covers", "exact")
CACHING = ("passed", "preparation", "prepared", "decode")
SECONDS = 900


class Mutant(NamedTuple):
    """A module with one guard turned off."""

    module: str
    line: int
    guard: str
    source: str


def mutants(module: str) -> Iterator[Mutant]:
    """Yield a mutant for each guard of a module."""
    source = (REPOSITORY / PACKAGE / f"{module}.py").read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        for question in _questions(node):
            yield _mutant(module, source, question, "alike if ", "True")
        if isinstance(node, ast.If) and any(map(_refuses, node.body)):
            operands: Sequence[ast.expr] = [node.test]
            if isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.Or):
                operands = node.test.values
            for operand in operands:
                yield _mutant(module, source, operand, "if ", "False")
        elif isinstance(node, ast.Expr) and _is_check(node.value):
            # An empty `yield from` keeps a generator one.
            off = "yield from ()" if isinstance(node.value, ast.YieldFrom) else "None"
            yield _mutant(module, source, node.value, "", off)


def _questions(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.FunctionDef) and node.name in ALIKE:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Return) and isinstance(inner.value, ast.BoolOp):
                yield from inner.value.values
    elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ALIKE:
        yield from node.value.values if isinstance(node.value, ast.BoolOp) else [node.value]


def _refuses(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Raise):
        return True
    if isinstance(statement, ast.For):
        return any(map(_refuses, statement.body))
    value = statement.value if isinstance(statement, ast.Expr | ast.Assign) else None
    if isinstance(value, ast.Yield | ast.YieldFrom):
        return True
    return isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] in (
        *REFUSES,
        *LOOKS,
    )


def _is_check(value: ast.expr) -> bool:
    if not isinstance(value, ast.Call):
        return isinstance(value, ast.YieldFrom)
    return ast.unparse(value.func).split(".")[-1].startswith(CHECKS)


def _mutant(module: str, source: str, guard: ast.expr, before: str, off: str) -> Mutant:
    """Write `off` in the guard's place, as many lines as it has."""
    lines = source.splitlines(keepends=True)
    assert guard.end_lineno is not None
    first, last = guard.lineno - 1, guard.end_lineno - 1
    head = lines[first].encode()[: guard.col_offset].decode()
    tail = lines[last].encode()[guard.end_col_offset :].decode()
    lines[first : last + 1] = [head + "(" + off + "\n" * (last - first) + ")" + tail]
    text = before + " ".join(ast.unparse(guard).split())
    return Mutant(module, guard.lineno, text, "".join(lines))


def tests_for(module: str, folder: Path) -> list[str]:
    """Return the test files in the order in which they are likely to fail, the slow left out."""
    slow = {"test_wheels", "test_readme", "test_package", "test_catalogue", "test_optimised"}
    slow |= {"test_concurrency", "test_contexts", "test_forks", "test_testing", "test_ranks"}
    if module not in ("collectives", "decode_dcp", "distributed"):
        slow.add("test_distributed")
    files = sorted((folder / "tests").glob("test_*.py"))
    files += sorted((folder / "tests" / "goldens").glob("test_*.py"))
    files += sorted((folder / "tests" / "scenarios").glob("test_*.py"))
    files += [folder / "tests" / "contract" / "test_decode_call.py"]
    names = [path for path in files if path.stem not in slow or path.stem == f"test_{module}"]
    own = [path for path in names if path.stem == f"test_{module}"]
    goldens = [path for path in names if path.parent.name == "goldens"]
    alike = [path for path in names if path.stem == "test_history"]
    first = [*own, *(alike if module in CACHING else ()), *goldens]
    rest = [path for path in names if path not in first]
    return [str(path.relative_to(folder)) for path in (*first, *rest)]


class Worker:
    """A copy of the repository in which one mutant at a time is tested, in a forked process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in COPIED:
            path = REPOSITORY / name
            if path.is_dir():
                shutil.copytree(path, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(path, folder / name)
        self.process = 0
        self.mutant: Mutant | None = None

    def start(self, mutant: Mutant) -> None:
        self.mutant = mutant
        self._path().write_text(mutant.source, encoding="utf-8")
        self.process = os.fork()
        if not self.process:
            self._run(mutant)

    def _path(self) -> Path:
        assert self.mutant is not None
        return self.folder / PACKAGE / f"{self.mutant.module}.py"

    def _run(self, mutant: Mutant) -> None:
        import pytest

        status = 3
        try:
            signal.alarm(SECONDS)
            os.chdir(self.folder)
            sys.path.insert(0, str(self.folder))
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, 1)
            os.dup2(nothing, 2)
            options = ["-x", "-q", "-p", "no:cacheprovider"]
            status = int(pytest.main([*options, *tests_for(mutant.module, self.folder)]))
        finally:
            os._exit(status)

    def finish(self) -> None:
        assert self.mutant is not None
        source = (REPOSITORY / PACKAGE / f"{self.mutant.module}.py").read_text(encoding="utf-8")
        self._path().write_text(source, encoding="utf-8")


def run(chosen: Sequence[Mutant], jobs: int) -> list[Mutant]:
    """Test each mutant; print and return the survivors."""
    import torch  # noqa: F401  # the forked processes need not import it again

    survivors = []
    # A copy in which nothing is off must pass, or no test that fails says anything.
    module = chosen[0].module
    path = REPOSITORY / PACKAGE / f"{module}.py"
    nothing = Mutant(module, 0, "nothing", path.read_text(encoding="utf-8"))
    waiting = [nothing, *chosen]
    with tempfile.TemporaryDirectory() as folder:
        idle = [Worker(Path(folder) / str(number)) for number in range(jobs)]
        busy: dict[int, Worker] = {}
        while waiting or busy:
            while waiting and idle:
                worker = idle.pop()
                worker.start(waiting.pop(0))
                busy[worker.process] = worker
            process, status = os.wait()
            worker = busy.pop(process)
            worker.finish()
            idle.append(worker)
            mutant = worker.mutant
            assert mutant is not None
            if mutant is nothing:
                if status:
                    raise SystemExit("the tests fail with nothing turned off")
            elif status == 0:
                survivors.append(mutant)
                print(f"survives: {mutant.module}.py:{mutant.line}: {mutant.guard}", flush=True)
    return survivors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("module", nargs="*", help="of the package; all that guard if left out")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--list", action="store_true", help="only show the guards")
    options = parser.parse_args()
    names = sorted(path.stem for path in (REPOSITORY / PACKAGE).glob("*.py"))
    modules = options.module or [name for name in names if name not in LEFT_OUT]
    chosen = [mutant for module in modules for mutant in mutants(module)]
    if options.list:
        for mutant in chosen:
            print(f"{mutant.module}.py:{mutant.line}: {mutant.guard}")
        return 0
    begun = time.monotonic()
    survivors = run(chosen, options.jobs)
    minutes = (time.monotonic() - begun) / 60
    print(f"{len(chosen)} guards turned off, {len(survivors)} survive, {minutes:.0f} min")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
