"""What each rank of a group does and is held against; run by tests/test_distributed.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fi_dcp_compat import (
    FlashInferCompatError,
    InvalidInputError,
    MLAState,
    UnsupportedConfigError,
    combine,
    combine_buffers,
    decode_mla_dcp,
    gather_query_heads,
    merge_dcp_states,
)
from tests.hostsim.batches import Batch, random_batch

BASES: tuple[Any, ...] = ("e", "2")
MODES: tuple[Any, ...] = ("a2a", "ag_rs", "ag_ar")
CHECKS: dict[str, Callable[[int, int], Any]] = {}


def check(job: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
    CHECKS[job.__name__] = job
    return job


def all_checks(rank: int, world_size: int) -> dict[str, Any]:
    return {name: job(rank, world_size) for name, job in CHECKS.items()}


def share(rank: int, world_size: int, heads: int, mode: str) -> slice:
    """The heads of the merged state that a rank gets."""
    if mode == "ag_ar":
        return slice(None)
    local = heads // world_size
    return slice(rank * local, (rank + 1) * local)


def decode(
    requests: Batch,
    rank: int,
    world_size: int,
    heads: int,
    *,
    flat: bool = False,
    changes: dict[str, Any] | None = None,
    **extra: Any,
) -> MLAState:
    local = share(rank, world_size, heads, "a2a")
    query = requests.query()[..., local, :]
    if flat:
        query = query.flatten(0, 1)
    given: dict[str, Any] = requests.paged(rank, world_size) | (changes or {})
    return decode_mla_dcp(
        query,
        **given,
        workspace_buffer=torch.empty(0, dtype=torch.int8),
        bmm1_scale=requests.scale,
        bmm2_scale=requests.output_scale,
        causal_seqlens_kv_global=requests.bounds(),
        backend="reference",
        **extra,
    )


def assert_full_attention(
    state: MLAState, requests: Batch, heads: slice, lse_factor: float = 1.0
) -> None:
    out, lse = (part[:, heads] for part in requests.expected())
    assert state.out.dtype is torch.bfloat16
    # bf16 rounds each rank's output and the merged one; the LSE stays float32.
    torch.testing.assert_close(
        state.out.double().reshape(out.shape), out, rtol=2**-7, atol=2**-7, equal_nan=False
    )
    torch.testing.assert_close(
        state.lse.double().reshape(lse.shape), lse * lse_factor, rtol=1e-5, atol=1e-5
    )


@check
def uniform_batches(rank: int, world_size: int) -> None:
    for heads in (8, 128):
        for q_len in (1, 3):
            # From q_len keys in all, of which most ranks hold none, to a page of each.
            requests = random_batch([q_len] * 3, [q_len, 9, 140], num_heads=heads)
            for mode, flat in itertools.product(MODES, (False, True)):
                state = decode(requests, rank, world_size, heads, mode=mode, flat=flat)
                local = share(rank, world_size, heads, mode)
                lead = (3 * q_len,) if flat else (3, q_len)
                assert state.lse.is_contiguous()
                assert state.lse.shape == (*lead, len(range(heads)[local]))
                assert_full_attention(state, requests, local)


@check
def base_2(rank: int, world_size: int) -> None:
    requests = random_batch([2, 2], [3, 60], num_heads=8)
    for mode in MODES:
        state = decode(requests, rank, world_size, 8, mode=mode, lse_base="2")
        factor = 1 / float(torch.tensor(2.0).double().log())
        assert_full_attention(state, requests, share(rank, world_size, 8, mode), factor)


@check
def different_query_lengths(rank: int, world_size: int) -> None:
    requests = random_batch([1, 3, 0, 2], [1, 50, 20, 300], page_size=64, num_heads=16)
    for mode in MODES:
        varlen: dict[str, Any] = {**requests.varlen()}
        state = decode(requests, rank, world_size, 16, mode=mode, **varlen)
        assert_full_attention(state, requests, share(rank, world_size, 16, mode))


@check
def the_default_group_and_a_subgroup(rank: int, world_size: int) -> None:
    # Every pair of ranks is a DCP group of its own.
    groups = [dist.new_group([first, first + 1]) for first in range(0, world_size, 2)]
    group = groups[rank // 2]
    requests = random_batch([2, 2], [3, 60], num_heads=8)
    for mode in MODES:
        state = decode(requests, rank % 2, 2, 8, mode=mode, group=group)
        assert_full_attention(state, requests, share(rank % 2, 2, 8, mode))


def random_states(
    world_size: int, front: tuple[int, ...], dtype: torch.dtype, dim: int = 16
) -> MLAState:
    """The states of all ranks, 8 heads, some of them empty in each of the ways."""
    random = torch.Generator().manual_seed(len(front))
    outs = torch.randn(world_size, *front, 8, dim, generator=random).to(dtype)
    lses = 3 * torch.randn(world_size, *front, 8, generator=random)
    if front[0] > 2:
        lses[:, 0] = -torch.inf  # on every rank
        outs[:, 0] = torch.nan
        lses[0, 1], outs[0, 1] = torch.nan, torch.nan
        lses[1, 2] = torch.inf
    return MLAState(outs, lses)


@check
def combining_is_merging(rank: int, world_size: int) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for front, dim in (((5,), 16), ((3, 2), 7), ((0,), 16), ((0,), 7), ((4,), 1)):
            outs, lses = random_states(world_size, front, dtype, dim)
            for base in BASES:
                merged = merge_dcp_states(outs, lses, base)
                for mode in MODES:
                    local = share(rank, world_size, 8, mode)
                    state = combine(
                        MLAState(outs[rank], lses[rank]),
                        mode=mode,
                        lse_base=base,
                    )
                    # The order of the sum may differ.
                    tolerance = world_size * torch.finfo(dtype).eps
                    torch.testing.assert_close(
                        state.out, merged.out[..., local, :], rtol=tolerance, atol=tolerance
                    )
                    torch.testing.assert_close(state.lse, merged.lse[..., local])


@check
def a2a_is_the_merge_bit_by_bit(rank: int, world_size: int) -> None:
    outs, lses = random_states(world_size, (6,), torch.bfloat16)
    merged = merge_dcp_states(outs, lses)
    local = share(rank, world_size, 8, "a2a")
    # Not contiguous, as a slice of a wider result is.
    mine = (outs.repeat(1, 1, 1, 2)[rank][..., :16], lses[rank])
    pair: Any = mine  # a decoder returns no MLAState
    for given in (MLAState(*mine), pair):
        state = combine(given, buffers=combine_buffers(given))
        assert state.out.equal(merged.out[:, local])
        assert state.lse.equal(merged.lse[:, local])


@check
def heads_are_gathered_in_order_of_the_ranks(rank: int, world_size: int) -> None:
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float32):
        for front in ((4,), (2, 3), (0,)):
            random = torch.Generator().manual_seed(5)
            whole = torch.randn(*front, 2 * world_size, 24, generator=random).to(dtype)
            gathered = gather_query_heads(whole[..., 2 * rank : 2 * rank + 2, :])
            assert gathered.is_contiguous()
            assert gathered.dtype is dtype
            assert gathered.view(torch.uint8).equal(whole.view(torch.uint8))


@check
def the_callers_buffers_are_used_again(rank: int, world_size: int) -> None:
    outs, lses = random_states(world_size, (3, 2), torch.bfloat16)
    state = MLAState(outs[rank], lses[rank])
    for mode in MODES:
        expected = combine(state, mode=mode)
        buffers = combine_buffers(state, mode=mode)
        at = [buffer.data_ptr() for buffer in buffers]
        for buffer in buffers:
            buffer.fill_(7)
        for _ in range(2):
            again = combine(state, mode=mode, buffers=buffers)
            assert again.out.equal(expected.out)
            assert again.lse.equal(expected.lse)
        assert [buffer.data_ptr() for buffer in buffers] == at
        wrong = combine_buffers(MLAState(outs[rank][:2], lses[rank][:2]), mode=mode)
        with pytest.raises(InvalidInputError, match="those of combine_buffers"):
            combine(state, mode=mode, buffers=wrong)


COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "gather",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)


@contextmanager
def counted() -> Iterator[list[tuple[str, int]]]:
    """Note each collective with the bytes that this rank gives to it."""
    calls: list[tuple[str, int]] = []

    def noting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def collective(*tensors: Tensor, **options: Any) -> Any:
            given = tensors[-1]
            calls.append((name, given.numel() * given.element_size()))
            return real(*tensors, **options)

        return collective

    with ExitStack() as stack:
        for name in COLLECTIVES:
            fake = noting(name, getattr(dist, name))
            stack.enter_context(patch.object(dist, name, fake))
        yield calls


@check
def collectives_and_bytes(rank: int, world_size: int) -> dict[str, list[tuple[str, int]]]:
    tokens, heads, dim = 6, 16, 512
    state = MLAState(
        torch.zeros(tokens, heads, dim, dtype=torch.bfloat16), torch.zeros(tokens, heads)
    )
    found = {}
    for mode in MODES:
        with counted() as calls:
            combine(state, mode=mode)
        found[mode] = calls
    with counted() as calls:
        gather_query_heads(torch.zeros(tokens, 2, 576, dtype=torch.bfloat16))
    found["gather"] = calls
    return found


@check
def what_does_not_fit_the_group_is_refused_on_every_rank(
    rank: int, world_size: int
) -> list[tuple[str, str]]:
    odd = world_size + 1
    state = MLAState(torch.zeros(2, odd, 16), torch.zeros(2, odd))
    requests = random_batch([2, 2], [3, 60], num_heads=8)
    calls: list[Callable[[], Any]] = [
        lambda: combine(state),
        lambda: combine(state, mode="ag_rs"),
        lambda: combine(state, mode="ring"),  # type: ignore[arg-type]  # no mode
        lambda: combine(state, lse_base="10"),  # type: ignore[arg-type]  # no base
        lambda: combine(MLAState(state.out, state.lse[:1]), mode="ag_ar"),
        lambda: combine(MLAState(state.out, state.lse.double()), mode="ag_ar"),
        lambda: combine(MLAState(state.out.double(), state.lse), mode="ag_ar"),
        lambda: combine(MLAState(state.out.int(), state.lse), mode="ag_ar"),
        lambda: combine(None),  # type: ignore[arg-type]  # no state
        lambda: combine((state.out,)),  # type: ignore[arg-type]  # half a state
        lambda: combine(state, mode="ag_ar", buffers=(None, 3)),  # type: ignore[arg-type]
        lambda: decode(requests, rank, world_size, 8, mode="ring"),
        lambda: decode(requests, rank, world_size, 8, lse_base="10"),
        lambda: decode(requests, rank, world_size, 8, interleave_size=64),
        lambda: gather_query_heads(torch.zeros(3)),
    ]
    said = []
    for call in calls:
        with counted() as collectives, pytest.raises(FlashInferCompatError) as raised:
            call()
        assert collectives == []
        said.append((raised.value.summary, raised.value.needed))
    assert combine(state, mode="ag_ar").out.shape == state.out.shape
    return said


@check
def a_group_of_others_is_refused(rank: int, world_size: int) -> None:
    group = dist.new_group([0])
    state = MLAState(torch.zeros(2, 8, 16), torch.zeros(2, 8))
    if rank == 0:
        # Alone it keeps what it has, to the bit, in either base.
        lse = torch.randn(2, 8)
        for base in BASES:
            alone = combine(MLAState(state.out, lse), group, lse_base=base)
            assert alone.lse.equal(lse)
        return
    calls: list[Callable[[], Any]] = [
        lambda: combine(state, group),
        lambda: combine_buffers(state, group),
        lambda: gather_query_heads(state.out, group),
        lambda: decode(random_batch([1], [3], num_heads=8), 0, 2, 8, group=group),
    ]
    for call in calls:
        with pytest.raises(InvalidInputError, match="a group that this process belongs to"):
            call()


@check
def keywords_are_checked_before_any_collective(rank: int, world_size: int) -> None:
    requests = random_batch([2, 2], [3, 60], num_heads=8)
    for name in ("out", "lse", "return_lse", "dcp", "query_len"):
        extra: dict[str, Any] = {name: None}
        with counted() as calls, pytest.raises(TypeError, match=rf"keyword argument '{name}'"):
            decode(requests, rank, world_size, 8, **extra)
        assert calls == []
    tensors: list[Any] = [torch.zeros(2, 1, 8, 576), torch.zeros(1, 64, 576)]
    bounds: dict[str, Any] = {"causal_seqlens_kv_global": requests.bounds()}
    with counted() as calls, pytest.raises(TypeError, match="lacks the keyword argument"):
        decode_mla_dcp(*tensors, **bounds)
    assert calls == []


@check
def gradients_are_not_carried(rank: int, world_size: int) -> None:
    outs, lses = random_states(world_size, (3, 2), torch.float32)
    for mode in MODES:
        state = MLAState(outs[rank].requires_grad_(), lses[rank])
        buffers = combine_buffers(state, mode=mode)
        for _ in range(2):
            assert not combine(state, mode=mode, buffers=buffers).out.requires_grad


@check
def a_group_without_reduce_scatter_says_so(rank: int, world_size: int) -> str:
    def lacking(*tensors: Tensor, **options: Any) -> None:
        raise RuntimeError("ProcessGroupGloo does not support reduce_scatter")

    state = MLAState(torch.zeros(2, 8, 16), torch.zeros(2, 8))
    with (
        patch.object(dist, "reduce_scatter_single", lacking),
        pytest.raises(UnsupportedConfigError, match="mode='ag_rs' needs") as raised,
    ):
        combine(state, mode="ag_rs")
    return str(raised.value)


def one_rank_errs(rank: int, world_size: int) -> None:
    """Not among the checks: the rank that raises leaves, and so ends the group."""
    state = MLAState(torch.zeros(2, 8, 16), torch.zeros(2, 8))
    combine(state)
    combine(MLAState(state.out, state.lse[:1]) if rank == 1 else state)


def one_rank_has_another_cache(rank: int, world_size: int) -> None:
    """Not among the checks either: between the gather of the heads and the combination."""
    requests = random_batch([2, 2], [3, 60], num_heads=8)
    decode(requests, rank, world_size, 8)
    given = requests.paged(rank, world_size)["kv_cache"]
    assert isinstance(given, Tensor)
    wrong = {"kv_cache": given[..., 1:].clone()} if rank == 1 else {}
    decode(requests, rank, world_size, 8, changes=wrong)
