"""What a call may cost, as far as it can be counted; what is timed is in tests/benchmarks."""

from __future__ import annotations

import gc
import weakref
from unittest import mock

import pytest

from fi_dcp_compat import preparation, recorded
from fi_dcp_compat.inputs import check_shared
from fi_dcp_compat.passed import Passed
from fi_dcp_compat.probing import bind_kernel
from fi_dcp_compat.testing import use_kernel
from tests.benchmarks.calls import (
    RELEASE,
    Step,
    decode,
    no_op,
    one_shot,
    prepared,
    prepared_decoder,
)
from tests.benchmarks.costs import bytes_a_preparation, kept_between_calls, operations

LAYOUTS = {
    "4-D, the LSE in shape": (Step(), True, []),
    "4-D": (Step(), False, ["aten.view.default"]),
    "flat": (
        Step(flat=True),
        False,
        ["aten.view.default", "aten.unsqueeze.default", "aten.view.default"],
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["prepared", "one-shot"])
def test_a_dcp_call_adds_the_views_that_its_layout_needs_and_keeps_nothing(
    form: str, layout: str
) -> None:
    step, shaped, views = LAYOUTS[layout]
    with use_kernel(no_op(step.result(shaped=shaped)), recorded(RELEASE)):
        act = prepared(prepared_decoder(), step) if form == "prepared" else one_shot(step)
        counted = operations(act)
        assert counted.views == views
        assert counted.others == counted.synchronising == []
        assert kept_between_calls(act) == 0


@pytest.mark.parametrize("steps", [1, 8])
def test_a_cached_preparation_is_small(steps: int) -> None:
    assert 500 < bytes_a_preparation(steps=steps) < 8 * 1024


def test_the_caches_are_bounded() -> None:
    step = Step()
    most = preparation._MOST_KEPT
    with use_kernel(no_op(step.result(shaped=True)), recorded(RELEASE)):
        kept = bind_kernel()
        for number in range(most + 50):
            decode(step, qk_nope_head_dim=number)
        assert len(kept.preparations) == len(kept.decoders) == most
        # Of one preparation with ever other scales, only decoders are made.
        for number in range(most + 50):
            decode(step, bmm1_scale=1.0 + number)
        assert len(kept.decoders) == most
        one = next(reversed(kept.preparations.values()))
        for heads in (8, 16, 32, 64, 128, 24):
            for q_len in (1, 2):
                other = Step(heads=heads, q_len=q_len)
                kernel = no_op(other.result(shaped=True))
                one.kernel = kernel
                decode(other, qk_nope_head_dim=most + 49)
        assert len(one._plans) <= preparation._PLANS_KEPT
        assert len(one._older) <= preparation._STEPS_KEPT


def test_no_tensor_of_a_step_is_kept() -> None:
    step = Step()
    with use_kernel(no_op(step.result(shaped=True)), recorded(RELEASE)):
        decoder = prepared_decoder()
        for act in (prepared(decoder, step), one_shot(step)):
            act()
            act()
        del act
        gone = [
            weakref.ref(tensor)
            for tensor in (step.query, step.cache, step.tables, step.lens, step.bounds)
        ]
        del step
        gc.collect()
        assert [ref() for ref in gone] == [None] * 5


def test_two_halves_of_a_batch_that_alternate_are_looked_at_once_each() -> None:
    first, second = Step(), Step()
    with (
        use_kernel(no_op(first.result(shaped=True)), recorded(RELEASE)),
        mock.patch.object(preparation, "check_shared", wraps=check_shared) as looks,
    ):
        for _ in range(3):
            one_shot(first)()
            one_shot(second)()
        assert looks.call_count == 2
        # Another layer has a query and a cache of its own.
        second.query, second.cache = second.query.clone(), second.cache.clone()
        one_shot(second)()
        assert looks.call_count == 2
        second.lens = second.lens.clone()
        one_shot(second)()
        assert looks.call_count == 3


def test_a_decoder_looks_at_a_cache_that_is_not_the_one_it_saw() -> None:
    """Each layer's decoder knows its own cache; one that is shared looks at each layer's."""
    step = Step()
    caches = step.cache, step.cache.clone()
    with (
        use_kernel(no_op(step.result(shaped=True)), recorded(RELEASE)),
        mock.patch.object(Passed, "covers_cache", autospec=True, return_value=True) as looks,
    ):
        own, shared = prepared_decoder(), prepared_decoder()
        for _ in range(3):
            prepared(own, step)()
        assert looks.call_count == 0
        for _ in range(3):
            for cache in caches:
                step.cache = cache
                prepared(shared, step)()
        assert looks.call_count == 4
