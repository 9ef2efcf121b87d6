"""How arms are timed: shuffled slices, ratios within a round, medians over the rounds."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

Arms = Mapping[str, Callable[[], object]]
Times = dict[str, list[float]]


class Row(NamedTuple):
    """One line of the table."""

    name: str
    median: float
    low: float
    high: float
    goal: float | None = None
    unit: str = "x"

    @property
    def met(self) -> bool | None:
        return None if self.goal is None else self.median <= self.goal


def measure(arms: Arms, rounds: int, slice_seconds: float = 0.004, warm: int = 20) -> Times:
    """Time each arm once a round, as many calls as fit a slice; seconds a call, by round."""
    order, calls = random.Random(0), {}
    for name, arm in arms.items():
        start = time.perf_counter()
        for _ in range(warm):
            arm()
        calls[name] = max(1, int(warm * slice_seconds / (time.perf_counter() - start)))
    times: Times = {name: [] for name in arms}
    names = list(arms)
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            order.shuffle(names)
            for name in names:
                arm, count = arms[name], calls[name]
                start = time.perf_counter()
                for _ in range(count):
                    arm()
                times[name].append((time.perf_counter() - start) / count)
            gc.collect()
    finally:
        gc.enable()
    return times


def ratio(name: str, times: Times, arm: str, base: str, goal: float | None = None) -> Row:
    """Return an arm's time as a multiple of the base of the same round."""
    return row(name, [a / b for a, b in zip(times[arm], times[base], strict=True)], goal)


def share(name: str, times: Times, arm: str, base: str, whole: float, goal: float) -> Row:
    """Return what an arm takes more than the base, in per cent of `whole` seconds."""
    extra = zip(times[arm], times[base], strict=True)
    return row(name, [100 * (a - b) / whole for a, b in extra], goal, "%")


def row(name: str, values: list[float], goal: float | None = None, unit: str = "x") -> Row:
    low, median, high = statistics.quantiles(values, n=4)
    return Row(name, median, low, high, goal, unit)


def microseconds(name: str, times: Times, arm: str) -> Row:
    return row(name, [1e6 * taken for taken in times[arm]], unit="us")
