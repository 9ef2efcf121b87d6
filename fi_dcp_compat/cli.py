"""The command line: ``fi-dcp-compat doctor``, ``demo`` and ``releases``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="fi-dcp-compat",
        formatter_class=_Formatter,
        description="MLA decode over FlashInfer, with native decode context parallelism.",
    )
    commands = parser.add_subparsers(dest="command", required=True, prog=parser.prog)
    doctor = commands.add_parser(
        "doctor",
        formatter_class=_Formatter,
        help="say what is installed, whether native DCP can work, and what to fix",
        description="Exit status 0 only if native DCP can work on this machine.",
    )
    doctor.add_argument("--json", action="store_true", help="write JSON")
    doctor.add_argument("--live", action="store_true", help="import FlashInfer too")
    demo = commands.add_parser(
        "demo",
        formatter_class=_Formatter,
        help="decode over several ranks in plain torch and compare with full attention",
        description="Exit status 0 only if the merged result is full attention's up to bf16.",
    )
    ranks = demo.add_mutually_exclusive_group()
    ranks.add_argument("--world-size", type=_positive, default=8, metavar="W", help="ranks (8)")
    ranks.add_argument(
        "--processes", type=_positive, metavar="N", help="N gloo ranks in processes of their own"
    )
    demo.add_argument("--q-len", type=_positive, default=3, metavar="Q", help="query tokens (3)")
    releases = commands.add_parser(
        "releases",
        formatter_class=_Formatter,
        help="what each FlashInfer release can do; record a new one from its wheel",
        description="Prints the tables that guards, routes and messages read. Exit status 1 if "
        "--verify finds a difference, 2 if a wheel cannot be had.",
    )
    form = releases.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="write JSON, signatures included")
    form.add_argument("--markdown", action="store_true", help="write the README's tables")
    for option, what in (
        ("--verify", "hold the records against the wheels of these releases (all)"),
        ("--record", "record these releases from their wheels (the index's new ones)"),
    ):
        form.add_argument(option, nargs="*", type=_version, metavar="VERSION", help=what)
    releases.add_argument(
        "--wheels", type=_folder, metavar="DIR", help="keep the wheels there, and use what is there"
    )
    arguments = parser.parse_args(argv)
    if arguments.command == "doctor":
        return _doctor(as_json=arguments.json, live=arguments.live)
    if arguments.command == "releases":
        return _releases(arguments)
    if arguments.processes is not None:
        return _demo_ranks(arguments.processes, arguments.q_len)
    return _demo(arguments.world_size, arguments.q_len)


class _Formatter(argparse.HelpFormatter):
    """Asks for the terminal's width itself: argparse imports shutil for it, help or not."""

    def __init__(self, prog: str) -> None:
        try:
            width = int(os.environ["COLUMNS"])
        except (KeyError, ValueError):
            try:
                width = os.get_terminal_size().columns
            except OSError:
                width = 0
        super().__init__(prog, width=(width or 80) - 2)


def _positive(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an int of at least 1")
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _folder(text: str) -> Path:
    from pathlib import Path

    return Path(text)


def _version(text: str) -> str:
    from .abi import parse_version

    version = parse_version(text)
    if version is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a version")
    return version.public


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


def _demo_ranks(world_size: int, q_len: int) -> int:
    from .demo_ranks import render, run_ranks

    report = run_ranks(world_size, q_len)
    print(render(report, world_size, q_len))
    return 0 if report.passed else 1


def _releases(arguments: argparse.Namespace) -> int:
    from . import catalogue, wheels
    from .errors import FlashInferCompatError

    if arguments.wheels and arguments.verify is None and arguments.record is None:
        print("--wheels goes with --verify or --record", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(catalogue.as_dict(), indent=2))
        return 0
    if arguments.markdown or (arguments.verify is None and arguments.record is None):
        print(catalogue.markdown() if arguments.markdown else catalogue.text())
        return 0
    try:
        if arguments.record is not None:
            for line in wheels.record(arguments.record, arguments.wheels):
                print(line, flush=True)
            return 0
        releases = differences = 0
        for name, lines in wheels.verify(arguments.verify or (), arguments.wheels):
            releases, differences = releases + 1, differences + len(lines)
            for line in lines:
                print(f"{name}: {line}", flush=True)
    except (FlashInferCompatError, OSError) as exc:
        print(exc, file=sys.stderr)
        return 2
    print(f"{differences} differences in {releases} releases")
    return 1 if differences else 0
