"""How arms are timed: shuffled slices, ratios within a round, medians over the rounds."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

Arms = Mapping[str, Callable[[], object]]
Times = dict[str, list[float]]


class Row(NamedTuple):
    """One line of the table: a median over the rounds, and its quartiles."""

    name: str
    median: float
    lower_quartile: float
    upper_quartile: float
    goal: float | None = None
    unit: str = "x"

    @property
    def verdict(self) -> str:
        """Whether the goal is met; where its quartiles say both, that this run cannot tell."""
        if self.goal is None:
            return ""
        if self.lower_quartile <= self.goal < self.upper_quartile:
            return (
                "met, within the noise" if self.median <= self.goal else "missed, within the noise"
            )
        return "met" if self.median <= self.goal else "MISSED"


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


def share(name: str, times: Times, arm: str, base: str, whole: Sequence[float], goal: float) -> Row:
    """Return what an arm takes more than the base, in per cent of the seconds of `whole`."""
    extra = zip(times[arm], times[base], whole, strict=True)
    return row(name, [100 * (a - b) / c for a, b, c in extra], goal, "%")


def row(name: str, values: list[float], goal: float | None = None, unit: str = "x") -> Row:
    low, median, high = statistics.quantiles(values, n=4)
    return Row(name, median, low, high, goal, unit)


def microseconds(name: str, times: Times, arm: str) -> Row:
    return row(name, [1e6 * taken for taken in times[arm]], unit="us")
