"""All benchmarks in one run: ``python -m tests.benchmarks [--rounds N] [--json FILE] [PART ...]``.

No GPU. Arms alternate in shuffled slices, each ratio is to the base of the same round, and a null
arm (the base against itself) shows the noise. It prints a table, and writes it as JSON if asked.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import torch

from .calls import no_op_rows
from .combine import combine_rows
from .costs import cost_rows
from .growth import growth_rows
from .host import host_rows
from .processes import process_rows
from .rounds import Row


def _calls(rounds: int) -> list[Row]:
    rows, no_op = no_op_rows(rounds)
    return [*rows, *host_rows(rounds, no_op)]


PARTS: dict[str, Callable[[int], list[Row]]] = {
    "calls": _calls,
    "growth": growth_rows,
    "costs": lambda rounds: cost_rows(),
    "processes": lambda rounds: process_rows(max(10, rounds // 4)),
    "combine": lambda rounds: combine_rows(),
}


def _line(row: Row) -> str:
    goal, met = "", ""
    if row.goal is not None:
        goal, met = f"<= {row.goal:g}", "" if row.met else "  MISSED"
    spread = "" if row.low == row.high else f"{row.low:8.2f} ..{row.high:8.2f}"
    return f"{row.name:72} {row.median:8.2f} {row.unit:4} {spread:20} {goal:8}{met}"


def _lines(names: list[str], rounds: int, kept: dict[str, list[Row]]) -> Iterator[str]:
    for name in names:
        yield f"{name}:"
        kept[name] = PARTS[name](rounds)
        yield from map(_line, kept[name])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", nargs="*", choices=[*PARTS, []], help="all if left out")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", type=Path, help="a file to write")
    options = parser.parse_args()
    machine = {
        "python": platform.python_version(),
        "torch": version("torch"),
        "flashinfer-python": version("flashinfer-python"),
        "cpus": os.cpu_count(),
        "rounds": options.rounds,
    }
    torch.set_num_threads(1)
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    kept: dict[str, list[Row]] = {}
    for line in _lines(options.part or list(PARTS), options.rounds, kept):
        print(line, flush=True)
    if options.json is not None:
        rows = {
            part: [row._asdict() | {"met": row.met} for row in found]
            for part, found in kept.items()
        }
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
