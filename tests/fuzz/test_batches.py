"""The fuzzing itself: what it draws, counts and tells."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from fi_dcp_compat.validation import describe
from tests.fuzz import batches
from tests.fuzz.batches import fuzz
from tests.fuzz.calls import VERSIONS, any_call, right
from tests.fuzz.drawing import Choices


@pytest.fixture(autouse=True)
def _own_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "COUNTS", Counter())


def test_calls_are_drawn_apart_and_counted_once() -> None:
    seen: list[bytes] = []
    fuzz("own", 500, 8, bytes, seen.append)
    assert len(seen) == 500
    # The first batch is of zeros.
    assert batches.COUNTS["own"] == len(set(seen)) > 470
    fuzz("own", 500, 8, bytes, seen.append)
    assert batches.COUNTS["own"] == len(set(seen))


def test_the_same_are_drawn_in_each_run() -> None:
    runs: list[list[bytes]] = [[], []]
    for run in runs:
        fuzz("own", 100, 8, bytes, run.append)
    assert runs[0] == runs[1]


def test_each_way_to_fail_is_told_once_with_the_smallest_call() -> None:
    def judge(call: bytes) -> None:
        if call[2] % 4 == 3:
            raise KeyError(call)
        assert call[5] < 128, "the sixth"

    with pytest.raises(AssertionError, match="2 ways to fail") as raised:
        fuzz("own", 500, 8, bytes, judge)
    lines = str(raised.value).splitlines()
    (second, sixth), (first, third) = sorted([(lines[1], lines[2]), (lines[3], lines[4])])
    assert first.startswith("KeyError at test_batches.py:")
    (byte,) = [byte for byte in eval(third) if byte]
    assert byte % 4 == 3
    assert second.startswith("AssertionError at test_batches.py:")
    assert "the sixth" in second
    (byte,) = [byte for byte in eval(sixth) if byte]
    assert byte >= 128


def test_a_choice_leans_to_the_first_and_zeros_are_the_first() -> None:
    zeros = Choices(b"")
    assert [zeros.pick("abc"), zeros.lean("abc"), zeros.lean("a")] == ["a", "a", "a"]
    drawn = [Choices(bytes([0, byte])).lean("abc") for byte in range(256)]
    assert drawn.count("a") == 240
    assert drawn.count("b") == drawn.count("c") == 8
    assert [Choices(bytes([0, byte])).pick("abc") for byte in range(3)] == ["a", "b", "c"]


def test_no_bytes_are_a_right_call_with_nothing_wild() -> None:
    call = any_call(b"")
    assert repr(call) == "0.7.4: the plainest call"
    assert call.wild == ()


def test_what_is_wild_is_named() -> None:
    draws = [random.Random(seed).randbytes(96) for seed in range(300)]
    assert {len(any_call(data).wild) for data in draws} == {0, 1, 2, 3}
    for data in draws:
        plain, call = right(Choices(data), VERSIONS), any_call(data)
        shown = {
            name for name in call.wild if f"{name}={describe(call.values[name])}" in repr(call)
        }
        assert shown == set(call.wild)
        for name in call.values.keys() - call.wild:
            assert describe(call.values[name]) == describe(plain.values[name])
