"""All cases, and the file that holds what they say."""

from __future__ import annotations

import functools
from pathlib import Path

from tests.goldens import configurations, dropin, inputs, installations, ranks
from tests.goldens.message import Case, Message, provoke

FILE = Path(__file__).with_name("messages.txt")
HEAD = "# Written by `python -m tests.goldens --write`: a case, its class, and all that it says.\n"
MARK = "=== "


def _all() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for module in (configurations, dropin, inputs, installations, ranks):
        for name, case in module.cases():
            if name in found:
                raise ValueError(f"two cases are named {name!r}")
            found[name] = case
    return dict(sorted(found.items()))


CASES = _all()


@functools.cache
def message(name: str) -> Message:
    """Return what a case says; it is provoked once."""
    return provoke(name, CASES[name])


def block(name: str) -> str:
    """Write a case as the file has it."""
    kind, text, _ = message(name)
    return f"{MARK}{name} ({kind})\n{text}\n"


def written() -> dict[str, str]:
    """Return the blocks of the file by the names of their cases."""
    _, *blocks = FILE.read_text(encoding="utf-8").split(f"\n{MARK}")
    return {block.partition("\n")[0].rpartition(" (")[0]: f"{MARK}{block}" for block in blocks}


def write() -> None:
    """Replace the file."""
    blocks = "\n".join(block(name) for name in CASES)
    FILE.write_text(f"{HEAD}\n{blocks}", encoding="utf-8")
