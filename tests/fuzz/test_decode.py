"""`decode_mla` and the prepared decoder, with anything in them."""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any, NamedTuple

from fi_dcp_compat import (
    FlashInferCompatError,
    InvalidInputError,
    check,
    decode_mla,
    prepare_decode_mla,
)
from fi_dcp_compat.limits import FEW_HEADS, XQA_HEADS
from tests.fuzz.batches import fuzz
from tests.fuzz.calls import VERSIONS, Given, any_call, changed, right, settled, shaped
from tests.fuzz.drawing import Choices
from tests.fuzz.judging import (
    Outcome,
    assert_refused,
    assert_result,
    mock,
    on_every_rank,
    outcome,
)


def judge_decode(given: Given) -> None:
    """One call to `decode_mla`."""

    def config() -> dict[str, Any]:
        cache, query = given.values["kv_cache"], given.values["query"]
        # Read off the tensors; and any group has the LSE returned, one of one rank too.
        read = {"page_size": cache.shape[-2], "dtype": query.dtype, "kv_dtype": cache.dtype}
        lse = given.values["return_lse"] or given.grouped
        interleave = given.values["interleave_size"] if given.grouped else 1
        values = given.values | read | {"return_lse": lse, "interleave_size": interleave}
        return settled(values) | shaped(values)

    alone = outcome(given, lambda: given.dcp(0)).error
    got = on_every_rank(given, lambda rank: decode_mla(**given.arguments(rank)))
    if alone is not None:
        assert got.said == f"{type(alone).__name__}: {alone}"
        assert_no_group(alone, given)
    elif got.error is not None:
        assert_refused(got.error, given.abi, config)
    else:
        assert check(given.abi, **config()) == ()
        assert_called(got, given)
        wanted: bool = config()["return_lse"]
        out, lse = got.result if wanted else (got.result, None)
        assert_result(given, out, lse, return_lse=wanted)


def assert_no_group(error: FlashInferCompatError, given: Given) -> None:
    """A group that cannot be is refused when it is built, before the rest is known."""
    if not isinstance(error, InvalidInputError):
        reasons = check(
            given.abi,
            num_heads=FEW_HEADS,
            q_len=1,
            page_size=64,
            dtype="bfloat16",
            dcp_world_size=given.values["world_size"],
            interleave_size=given.values["interleave_size"],
        )
        assert set(error.reasons) <= set(reasons)


def assert_called(got: Outcome, given: Given) -> None:
    """The kernel was called once, but for an empty batch, and where the reference runs."""
    empty = given.values["query"].shape[:-2].numel() == 0
    assert len(got.calls) == (given.values["backend"] != "reference" and not empty)


def judge_prepared(given: Given) -> None:
    """A decoder prepared for one call's settings, and run with its tensors."""
    values = given.values

    def config() -> dict[str, Any]:
        lse = values["return_lse"] or values["world_size"] > 1
        return at_start() | shaped(values) | {"return_lse": lse}

    def at_start() -> dict[str, Any]:
        heads = XQA_HEADS if values["backend"] == "xqa" else FEW_HEADS
        return settled(values) | {"num_heads": heads, "q_len": 1}

    prepared = on_every_rank(given, lambda rank: prepare_decode_mla(**given.settings(rank)))
    if prepared.error is not None:
        assert_refused(prepared.error, given.abi, at_start)
        return
    got = on_every_rank(
        given, lambda rank: prepare_decode_mla(**given.settings(rank)).run(**given.step())
    )
    if got.error is not None:
        assert_refused(got.error, given.abi, config)
    else:
        assert check(given.abi, **config()) == ()
        assert_called(got, given)
        assert_result(given, *got.result, return_lse=config()["return_lse"])


class Again(NamedTuple):
    """A right call, and the same with something wild in it."""

    before: Given
    after: Given


def twice(data: bytes) -> Again:
    choices = Choices(data)
    before = right(choices, VERSIONS)
    return Again(before, changed(choices, before))


def judge_again(again: Again) -> None:
    """A decoder that ran before says of the next step what a new one says.

    The tensors that both steps share passed their checks before and are not looked at again.
    """
    before, after = again
    prepared = functools.partial(prepare_decode_mla, **before.settings(0))

    def after_another() -> object:
        decoder = prepared()
        with suppress(FlashInferCompatError):  # what passed till then is kept nevertheless
            decoder.run(**before.step())
        mock(before.release).reset_mock()
        return decoder.run(**after.step())

    fresh = outcome(before, lambda: prepared().run(**after.step()))
    got = outcome(before, after_another)
    assert got.said == fresh.said
    assert [call.keys() for call in got.calls] == [call.keys() for call in fresh.calls]


def test_decode_mla_refuses_anything_as_check_does_or_calls_the_kernel() -> None:
    fuzz("decode_mla, wild", 6_000, 96, any_call, judge_decode)


def test_a_prepared_decoder_refuses_anything_as_check_does_or_calls_the_kernel() -> None:
    fuzz("MLADecoder.run, wild", 4_000, 96, any_call, judge_prepared)


def test_a_decoder_that_ran_before_says_the_same() -> None:
    fuzz("MLADecoder.run, again", 3_000, 96, twice, judge_again)
