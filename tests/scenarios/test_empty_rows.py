"""Ranks and rows without a key: S07, S08, S32; across ranks in tests/scenarios/test_ranks.py."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from fi_dcp_compat import (
    DCP,
    InvalidInputError,
    LseBase,
    MLAState,
    debug_checks,
    decode_mla,
    local_seq_lens,
    merge_dcp_states,
)
from fi_dcp_compat.testing import mock_kernel, use_kernel
from tests.contract.test_decode_call import Dispatched
from tests.hostsim.batches import random_batch
from tests.scenarios.inputs import lens
from tests.support import DCP_RELEASES, RELEASES, call

INF, NAN = math.inf, math.nan
WORLD = 8


def rank_states(*global_lens: int, lse_base: LseBase = "e") -> tuple[list[MLAState], MLAState]:
    """Decode a batch on each of 8 ranks, and on one that holds everything."""
    requests = random_batch([1] * len(global_lens), global_lens, num_heads=16)

    def decoded(rank: int, world_size: int) -> MLAState:
        shard: dict[str, Any] = requests.paged(rank, world_size)
        state: MLAState = decode_mla(
            requests.query(),
            **shard,
            workspace_buffer=torch.empty(0, dtype=torch.int8),
            bmm1_scale=0.05,
            dcp=DCP(world_size, rank, lens(*global_lens)),
            lse_base=lse_base,
            backend="reference",
        )
        return state

    return [decoded(rank, WORLD) for rank in range(WORLD)], decoded(0, 1)


def assert_merged(states: list[MLAState], alone: MLAState, lse_base: LseBase) -> None:
    merged = merge_dcp_states([s.out for s in states], [s.lse for s in states], lse_base)
    # bf16 rounds each rank's output and the merged one; the LSE stays float32.
    torch.testing.assert_close(merged.out, alone.out, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(merged.lse, alone.lse, rtol=1e-6, atol=1e-6)


def test_s07_three_keys_over_eight_ranks_leave_five_without_one() -> None:
    assert [local_seq_lens(3, WORLD, rank) for rank in range(WORLD)] == [1, 1, 1, 0, 0, 0, 0, 0]
    states, alone = rank_states(3)
    for empty in states[3:]:
        assert empty.out.eq(0).all()
        assert empty.lse.eq(-INF).all()
    assert_merged(states, alone, "e")


@pytest.mark.parametrize("lse_base", ["e", "2"])
@pytest.mark.parametrize("lse", [NAN, INF, -INF])
@pytest.mark.parametrize("garbage", [NAN, INF, 7.0])
def test_s07_what_ranks_without_keys_give_is_not_merged(
    garbage: float, lse: float, lse_base: LseBase
) -> None:
    states, alone = rank_states(3, lse_base=lse_base)
    for empty in states[3:]:
        empty.out.fill_(garbage)
        empty.lse.fill_(lse)
    assert_merged(states, alone, lse_base)


@pytest.mark.parametrize("lse", [NAN, INF, -INF])
def test_s07_a_row_that_is_empty_on_all_ranks_is_zero_and_minus_infinity(lse: float) -> None:
    states, _ = rank_states(3, 0)
    for state in states:
        assert state.out[1].eq(0).all()
        assert state.lse[1].eq(-INF).all()
        state.out[1], state.lse[1] = NAN, lse
    merged = merge_dcp_states([s.out for s in states], [s.lse for s in states])
    assert merged.out[1].eq(0).all()
    assert merged.lse[1].eq(-INF).all()
    assert merged.out[0].isfinite().all()


@pytest.mark.parametrize("version", DCP_RELEASES)
def test_s07_the_decode_hands_on_what_flashinfer_writes_there_and_adds_no_operation(
    version: str,
) -> None:
    kernel = mock_kernel(version)
    answer = (torch.zeros(2, 1, 16, 512).bfloat16(), torch.full((2, 16), -INF))
    kernel.side_effect, kernel.return_value = None, answer
    # The maximum is 0 as well on a rank without keys.
    given = call(seq_lens=lens(0, 0), max_seq_len=0)
    with use_kernel(kernel), Dispatched() as operations:
        state = decode_mla(**given, dcp=DCP(8, 3, lens(3, 2)))
    assert operations.names == []
    assert state.out.data_ptr() == answer[0].data_ptr()
    assert state.lse.data_ptr() == answer[1].data_ptr()
    assert kernel.call_args.kwargs["max_seq_len"] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dcp", [None, DCP(8, 3, lens(3, 30))], ids=["alone", "with DCP"])
def test_s08_an_empty_row_of_the_reference_is_zero_and_minus_infinity(
    dcp: DCP | None, dtype: torch.dtype
) -> None:
    given = call(dtype=dtype, seq_lens=lens(0, 4), backend="reference")
    state = decode_mla(**given, dcp=dcp, return_lse=True)
    assert state.out[0].eq(0).all()
    assert state.lse[0].eq(-INF).all()
    assert state.lse[1].isfinite().all()


def test_s08_the_docstring_says_that_it_is_undefined_without_dcp() -> None:
    text = " ".join((decode_mla.__doc__ or "").split())
    assert "Without DCP 0 is undefined in FlashInfer" in text
    assert "Under DCP a row with no visible key is (0, -inf)" in text


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("switch", ["environment", "context"])
def test_s08_a_length_of_0_without_dcp_is_refused_with_its_row_where_values_are_checked(
    switch: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = mock_kernel(version)
    if switch == "environment":
        monkeypatch.setenv("FI_DCP_COMPAT_DEBUG", "1")
    checks = nullcontext() if switch == "environment" else debug_checks()
    refused = pytest.raises(InvalidInputError, match="is 0 inside the batch")
    with use_kernel(kernel), checks, refused as raised:
        decode_mla(**call(batch=3, seq_lens=lens(7, 0, 7)))
    kernel.assert_not_called()
    assert str(raised.value) == (
        "seq_lens[1] is 0 inside the batch.\n"
        "Found: seq_lens[1] = 0.\n"
        "Needed: at least 1: FlashInfer leaves the row of an empty sequence undefined without "
        "DCP.\n"
        "Fix: look at how row 1 of the batch was built; this check is FI_DCP_COMPAT_DEBUG or "
        "debug_checks()."
    )


def test_s08_lengths_of_0_behind_the_batch_pass() -> None:
    """DESIGN.md: trailing ones are graph padding, whose rows nobody reads."""
    kernel = mock_kernel("0.7.4")
    with use_kernel(kernel), debug_checks():
        decode_mla(**call(batch=3, seq_lens=lens(7, 0, 0)))
        decode_mla(**call(batch=3, seq_lens=lens(0, 4, 0)), dcp=DCP(8, 3, lens(3, 30, 0)))
    assert kernel.call_count == 2


# S32: two states of one row.


def pair(outs: tuple[float, float], lses: tuple[float, float]) -> tuple[Tensor, Tensor]:
    return torch.tensor(outs).view(2, 1, 1), torch.tensor(lses).view(2, 1)


@pytest.mark.parametrize("lse_base", ["e", "2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("lses", "out", "lse"),
    [
        ((-INF, -INF), 0.0, -INF),
        ((-INF, 1.5), 3.0, 1.5),
        ((NAN, 1.5), 3.0, 1.5),
        ((INF, 1.5), 3.0, 1.5),
        ((NAN, INF), 0.0, -INF),
    ],
)
@pytest.mark.parametrize("empty_out", [5.0, NAN, INF])
def test_s32_an_lse_that_is_not_finite_is_an_empty_state_and_never_nan(
    empty_out: float,
    lses: tuple[float, float],
    out: float,
    lse: float,
    dtype: torch.dtype,
    lse_base: LseBase,
) -> None:
    outs, stacked = pair((empty_out, 3.0), lses)
    for order in ([0, 1], [1, 0]):
        merged = merge_dcp_states(outs.to(dtype)[order], stacked[order], lse_base)
        assert (merged.out.item(), merged.lse.item()) == (out, lse)
        assert merged.out.dtype is dtype


def test_s32_in_debug_mode_the_kernels_nan_is_refused_where_it_arises() -> None:
    """Design: by the decode; a merge takes NaN for an empty state in debug mode too."""
    kernel = mock_kernel("0.7.4")
    kernel.side_effect = None
    kernel.return_value = (torch.zeros(2, 1, 16, 512).bfloat16(), torch.zeros(2, 16))
    kernel.return_value[1][1] = NAN
    with (
        use_kernel(kernel),
        debug_checks(),
        pytest.raises(InvalidInputError, match=r"^out\[1\] holds NaN"),
    ):
        decode_mla(**call(), dcp=DCP(8, 3, lens(55, 55)))
