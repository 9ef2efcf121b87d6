from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fi_dcp_compat import InvalidInputError, MLAState, merge_dcp_states
from fi_dcp_compat.features import LseBase

INF, NAN = math.inf, math.nan


def states(values: list[float], lses: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(values).view(-1, 1, 1), torch.tensor(lses).view(-1, 1)


def test_scenario_s01_merges_by_the_base_named() -> None:
    # Partition sums 2 and 8, outputs 0 and 10: the merged output is 8.
    outs, lses = states([0.0, 10.0], [math.log(2), math.log(8)])
    merged = merge_dcp_states(outs, lses)
    assert merged.out.item() == pytest.approx(8.0)
    assert merged.lse.item() == pytest.approx(math.log(10))
    assert merge_dcp_states(outs, lses, "2").out.item() == pytest.approx(7.2330, abs=1e-4)
    binary = merge_dcp_states(outs, lses / math.log(2), "2")
    assert binary.out.item() == pytest.approx(8.0)
    assert binary.lse.item() == pytest.approx(math.log2(10))


@pytest.mark.parametrize("base", ["e", "2"])
@pytest.mark.parametrize("empty", [-INF, INF, NAN])
@pytest.mark.parametrize("content", [0.0, 5.0, NAN, INF])
def test_a_state_without_a_finite_lse_is_empty_whatever_it_holds(
    base: LseBase, empty: float, content: float
) -> None:
    merged = merge_dcp_states(*states([content, 3.0], [empty, 1.5]), base)
    assert merged.out.item() == 3.0
    assert merged.lse.item() == pytest.approx(1.5)


@pytest.mark.parametrize("base", ["e", "2"])
@pytest.mark.parametrize("empty", [-INF, INF, NAN])
def test_a_row_that_is_empty_everywhere_is_zero(base: LseBase, empty: float) -> None:
    merged = merge_dcp_states(*states([NAN, 7.0], [empty, -INF]), base)
    assert merged.out.item() == 0.0
    assert merged.lse.item() == -INF


@given(
    st.lists(st.floats(-50, 50), min_size=1, max_size=9),
    st.sampled_from(["e", "2"]),
)
def test_the_lse_of_a_merge_is_the_lse_of_the_lses(lses: list[float], base: LseBase) -> None:
    outs = torch.ones(len(lses), 1, 1)
    factor = math.log(2) if base == "2" else 1.0
    merged = merge_dcp_states(outs, torch.tensor(lses).view(-1, 1), base)
    want = torch.logsumexp(torch.tensor(lses, dtype=torch.float64) * factor, 0) / factor
    assert merged.lse.item() == pytest.approx(float(want), rel=1e-4, abs=1e-4)
    assert merged.out.item() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("far", [1e4, 3e38])
def test_states_that_lie_far_apart_do_not_overflow(far: float) -> None:
    merged = merge_dcp_states(*states([1.0, 2.0], [-far, far]))
    assert merged.out.item() == 2.0
    assert merged.lse.item() == pytest.approx(far)


def test_sequences_are_stacked_and_the_outputs_dtype_is_kept() -> None:
    outs = [torch.ones(3, 2, 4, 8, dtype=torch.bfloat16)] * 2
    merged = merge_dcp_states(outs, [torch.zeros(3, 2, 4)] * 2)
    assert isinstance(merged, MLAState)
    assert (merged.out.dtype, merged.out.shape) == (torch.bfloat16, (3, 2, 4, 8))
    assert (merged.lse.dtype, merged.lse.shape) == (torch.float32, (3, 2, 4))
    assert merged.lse[0, 0, 0].item() == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    ("outs", "lses"),
    [
        (torch.ones(2, 3, 8), torch.ones(2, 4)),
        (torch.ones(2, 3, 8), torch.ones(3, 2)),
        (torch.ones(0, 3, 8), torch.ones(0, 3)),
        (torch.ones(8), torch.tensor(1.0)),
    ],
)
def test_states_that_do_not_fit_are_refused(outs: torch.Tensor, lses: torch.Tensor) -> None:
    with pytest.raises(InvalidInputError, match="do not describe the same states") as raised:
        merge_dcp_states(outs, lses)
    assert str(list(outs.shape)) in raised.value.found


@pytest.mark.parametrize(
    ("outs", "lses"),
    [
        ([], []),
        ([torch.ones(2, 8), torch.ones(3, 8)], [torch.ones(2), torch.ones(3)]),
        (None, None),
        ([None], [None]),
    ],
    ids=["none", "unequal", "None", "of None"],
)
def test_what_cannot_be_stacked_is_refused(outs: Any, lses: Any) -> None:
    with pytest.raises(InvalidInputError, match="do not describe the same states"):
        merge_dcp_states(outs, lses)


def test_a_base_that_is_neither_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="'e' or '2'"):
        merge_dcp_states(torch.ones(1, 1, 1), torch.ones(1, 1), "base2")  # type: ignore[arg-type]  # the point


@given(
    st.integers(1, 8),
    st.lists(st.integers(0, 7), min_size=1, max_size=40),
    st.sampled_from(["e", "2"]),
    st.randoms(use_true_random=False),
)
def test_merging_any_partition_in_any_order_is_the_whole(
    world: int, owners: list[int], base: LseBase, random: Random
) -> None:
    # Keys of one head, given to ranks at will; ranks may hold none.
    generator = torch.Generator().manual_seed(len(owners))
    scores = 5 * torch.randn(len(owners), generator=generator, dtype=torch.float64)
    values = torch.randn(len(owners), 4, generator=generator, dtype=torch.float64)
    factor = 1.0 if base == "e" else 1 / math.log(2)
    states = []
    for rank in range(world):
        mine = torch.tensor([owner % world == rank for owner in owners])
        lse = torch.logsumexp(scores[mine], 0)
        out = torch.softmax(scores[mine], 0) @ values[mine]
        states.append((out.float()[None, None], (lse * factor).float()[None, None]))
    random.shuffle(states)
    merged = merge_dcp_states([out for out, _ in states], [lse for _, lse in states], base)
    expected = torch.softmax(scores, 0) @ values
    torch.testing.assert_close(merged.out[0, 0].double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        merged.lse[0, 0].double(), torch.logsumexp(scores, 0) * factor, rtol=1e-5, atol=1e-5
    )
