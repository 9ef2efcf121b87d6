"""The command line: ``fi-dcp-compat doctor`` and ``fi-dcp-compat demo``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="fi-dcp-compat",
        description="MLA decode over FlashInfer, with native decode context parallelism.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser(
        "doctor",
        help="say what is installed, whether native DCP can work, and what to fix",
        description="Exit status 0 only if native DCP can work on this machine.",
    )
    doctor.add_argument("--json", action="store_true", help="write JSON")
    doctor.add_argument("--live", action="store_true", help="import FlashInfer too")
    demo = commands.add_parser(
        "demo",
        help="decode over several ranks in plain torch and compare with full attention",
        description="Exit status 0 only if the merged result is full attention's up to bf16.",
    )
    demo.add_argument("--world-size", type=_positive, default=8, metavar="W", help="ranks (8)")
    demo.add_argument("--q-len", type=_positive, default=3, metavar="Q", help="query tokens (3)")
    arguments = parser.parse_args(argv)
    if arguments.command == "doctor":
        return _doctor(as_json=arguments.json, live=arguments.live)
    return _demo(arguments.world_size, arguments.q_len)


def _positive(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an int of at least 1")
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _doctor(*, as_json: bool, live: bool) -> int:
    from .doctor import diagnose, render

    diagnosis = diagnose(live=live)
    print(json.dumps(diagnosis.as_dict(), indent=2) if as_json else render(diagnosis))
    return 0 if diagnosis.native_dcp else 1


def _demo(world_size: int, q_len: int) -> int:
    from .demo import render, run

    report = run(world_size, q_len)
    print(render(report, q_len))
    return 0 if report.passed else 1
