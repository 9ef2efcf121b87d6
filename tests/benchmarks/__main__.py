"""All benchmarks in one run: ``python -m tests.benchmarks [--rounds N] [--json FILE] [PART ...]``.

No GPU. Arms alternate in shuffled slices, each ratio is to the base of the same round, and a null
arm (the base against itself) shows the noise. It prints medians with their quartiles as a table,
and writes it as JSON if asked.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
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
    goal = "" if row.goal is None else f"<= {row.goal:g}"
    low, high = row.lower_quartile, row.upper_quartile
    spread = "" if low == high else f"{low:8.2f} ..{high:8.2f}"
    return (
        f"{row.name:78} {row.median:8.2f} {row.unit:4} {spread:20} {goal:8} {row.verdict}".rstrip()
    )


def _machine(rounds: int) -> dict[str, object]:
    cpu = re.search(r"^model name\s*:\s*(.*)$", _text("/proc/cpuinfo"), re.MULTILINE)
    names = ("fi-dcp-compat", "torch", "flashinfer-python")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        **{name: version(name) for name in names},
        "cpu": cpu[1] if cpu else platform.machine(),
        "cpus": os.cpu_count(),
        "torch threads": torch.get_num_threads(),
        "rounds": rounds,
    }


def _text(path: str) -> str:
    return Path(path).read_text(encoding="utf-8") if os.path.exists(path) else ""


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
    torch.set_num_threads(1)
    machine = _machine(options.rounds)
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    kept: dict[str, list[Row]] = {}
    for line in _lines(options.part or list(PARTS), options.rounds, kept):
        print(line, flush=True)
    if options.json is not None:
        rows = {
            part: [row._asdict() | {"verdict": row.verdict} for row in found]
            for part, found in kept.items()
        }
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
