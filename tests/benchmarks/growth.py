"""What the cost of a call does not depend on: the slowest size over the first, in one run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from unittest import mock

from fi_dcp_compat import recorded, releases
from fi_dcp_compat.describing import Binding
from fi_dcp_compat.probing import install_kernel
from fi_dcp_compat.testing import use_kernel

from .calls import RELEASE, Step, decode, no_op, prepared, prepared_decoder
from .rounds import Arms, Row, measure, ratio

GOAL = 1.1  # what a null arm may differ by here
MANY = 1000


def growth_rows(rounds: int) -> list[Row]:
    return [
        _grown("batch", {n: Step(batch=n) for n in (1, 8, 64, 512)}, rounds),
        _grown("heads", {n: Step(heads=n) for n in (8, 32, 128)}, rounds),
        _grown("width of the table", {n: Step(width=n) for n in (1, 64, 4096)}, rounds),
        *_preparations(rounds),
        _records(rounds),
    ]


def _slowest(what: str, arms: Arms, rounds: int) -> Row:
    """Return the row of the slowest size; the highest of several medians is above 1 by itself."""
    times = measure(arms, rounds)
    base, *others = arms
    rows = [ratio(f"{what} {name} / {base}", times, name, base, GOAL) for name in others]
    return max(rows, key=lambda row: row.median)


def _grown(what: str, steps: dict[int, Step], rounds: int) -> Row:
    arms: dict[str, Callable[[], object]] = {}
    for size, step in steps.items():
        # A decoder keeps the kernel that it was prepared with.
        with use_kernel(no_op(step.result(shaped=True)), recorded(RELEASE)):
            decoder = prepared_decoder()
        arms[str(size)] = prepared(decoder, step)
    return _slowest(f"prepared, {what}", arms, rounds)


def _preparations(rounds: int) -> list[Row]:
    """Call among 1 and among 1,000 cached preparations, and 1,000 in turn."""
    step = Step()
    kernel, abi = no_op(step.result(shaped=True)), recorded(RELEASE)
    few, many = Binding(kernel, abi), Binding(kernel, abi)
    turn = 0

    def in_turn() -> int:
        nonlocal turn
        turn = (turn + 1) % MANY
        return turn

    def among(binding: Binding, number: Callable[[], int]) -> Callable[[], object]:
        def call() -> object:
            install_kernel(binding)
            return decode(step, qk_nope_head_dim=number())

        return call

    with use_kernel(kernel, abi):
        for number in range(MANY):
            among(many, functools.partial(int, number))()
        arms: Arms = {
            "1": among(few, lambda: 0),
            "null": among(few, lambda: 0),
            "first": among(many, lambda: 0),
            "last": among(many, lambda: MANY - 1),
            "in turn": among(many, in_turn),
        }
        times = measure(arms, rounds)
    label = f"decode_mla, {MANY} preparations"
    return [
        ratio("null: decode_mla, 1 preparation", times, "null", "1"),
        ratio(f"{label}, the first / 1", times, "first", "1", GOAL),
        ratio(f"{label}, the last / 1", times, "last", "1", GOAL),
        ratio(f"{label}, all in turn / 1", times, "in turn", "1"),
    ]


def _records(rounds: int) -> Row:
    """Prepare and call with all releases on record, and with the newest alone."""
    step = Step()
    data = releases._data()
    arms: dict[str, Callable[[], object]] = {}
    for count in (1, len(data.releases)):
        kept = dict(list(data.releases.items())[-count:])
        with (
            mock.patch.object(releases, "_data", lambda kept=kept: data._replace(releases=kept)),
            use_kernel(no_op(step.result(shaped=True)), recorded(RELEASE)),
        ):
            decoder = prepared_decoder()
        arms[str(count)] = prepared(decoder, step)
    return _slowest("prepared, recorded releases", arms, rounds)
