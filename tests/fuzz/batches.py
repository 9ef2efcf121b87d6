"""Thousands of random calls in a test, counted; all that escapes is told at the end."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

T = TypeVar("T")

# Calls in one example, which takes hypothesis a millisecond whatever is in it. They are one draw:
# of several, hypothesis makes copies of each other.
BATCH = 25
# The calls of this session by what they call, each counted once.
COUNTS: Counter[str] = Counter()
_SEEN: set[tuple[str, str]] = set()


def fuzz(
    kind: str, count: int, size: int, draw: Callable[[bytes], T], judge: Callable[[T], object]
) -> None:
    """Judge `count` calls, each drawn from `size` random bytes; they are the same in each run.

    Raises
    ------
    AssertionError
        With the smallest call for each way in which one failed.
    """
    failed: dict[str, bytes] = {}

    def fails(data: bytes) -> str:
        try:
            judge(draw(data))
        except Exception as error:
            return _way(error)
        return ""

    @settings(
        max_examples=count // BATCH,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.binary(min_size=BATCH * size, max_size=BATCH * size))
    def run(drawn: bytes) -> None:
        for start in range(0, len(drawn), size):
            data = drawn[start : start + size]
            _count(kind, repr(draw(data)))
            way = fails(data)
            if way:
                failed.setdefault(way, data)

    run()
    told = [f"{way}\n  {draw(smallest(data, way, fails))!r}" for way, data in failed.items()]
    assert told == [], "\n".join([f"{len(told)} ways to fail:", *told])


def _count(kind: str, call: str) -> None:
    if (kind, call) not in _SEEN:
        _SEEN.add((kind, call))
        COUNTS[kind] += 1


def _way(error: Exception) -> str:
    """What was raised, and where; of an assertion the first line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    said = str(error).partition("\n")[0] if isinstance(error, AssertionError) else ""
    return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno} {said}".rstrip()


def smallest(data: bytes, way: str, fails: Callable[[bytes], str]) -> bytes:
    """Set to zero, which is right, each byte that this way to fail does not need."""
    for at in reversed(range(len(data))):
        less = data[:at] + b"\0" + data[at + 1 :]
        if fails(less) == way:
            data = less
    return data
