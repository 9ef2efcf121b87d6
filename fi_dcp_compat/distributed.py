"""Across ranks: query heads gathered before the decode, partial states combined after it.

Collectives run on the caller's process group: gloo on CPU, NCCL on GPU. A rank that raises leaves
the others waiting in the collective until the group's timeout, so each check here looks at values
that must be equal on all ranks anyway; each docstring says which. Dimensions are those of `decode`;
"..": whatever stands in front of the heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import all_gather, flat_bytes, reduce_scatter
from .dcp import DCP
from .decode import decode_mla
from .features import LseBase
from .lse import MLAState, check_lse_base, merge_dcp_states, merge_weights
from .validation import describe, invalid, is_tensor

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .arguments import RankArguments

__all__ = [
    "CombineMode",
    "combine",
    "combine_buffers",
    "decode_mla_dcp",
    "gather_query_heads",
]

CombineMode = Literal["a2a", "ag_rs", "ag_ar"]
# An integer of each size: bits are carried, not numbers, so nothing is rounded or made quiet.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def gather_query_heads(query: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Gather the heads of every rank's query, rank 0's first.

    Parameters
    ----------
    query : Tensor, [.., H_local, D], any dtype
        Of equal shape and dtype on all ranks.
    group : ProcessGroup, optional
        The DCP group; None: the default group.

    Returns
    -------
    Tensor, [.., H_local * W, D], contiguous
        `query` itself in a group of one.

    Raises
    ------
    InvalidInputError
        `query` is no tensor of two dimensions or more.
    """
    if not is_tensor(query) or query.ndim < 2:
        invalid("query", "must be [.., H_local, D]", query, "[.., H_local, D]", "pass the query")
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return query
    gathered = query.new_empty((world_size, *query.shape))
    # As bytes: not every backend has a collective for every dtype of a query.
    all_gather(flat_bytes(gathered), flat_bytes(query.contiguous()), group)
    return gathered.movedim(0, -3).flatten(-3, -2)


class _Spec(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


def _specs(state: MLAState, world_size: int, mode: CombineMode) -> tuple[_Spec, ...]:
    """Say what `mode` sends, receives, and gathers of LSEs; "ag_ar" receives where it sends."""
    *front, heads, dim = state.out.shape
    lses = _Spec((world_size, *state.lse.shape), torch.float32)
    if mode == "ag_ar":
        return _Spec((*front, heads, dim), torch.float32), lses
    shape = (*front, heads // world_size, dim)
    if mode == "ag_rs":
        return _Spec((world_size, *shape), torch.float32), _Spec(shape, torch.float32), lses
    itemsize = state.out.element_size()
    packed = _Spec((world_size, *shape[:-1], dim + 4 // itemsize), _BITS[itemsize])
    return packed, packed


def combine_buffers(
    state: MLAState, group: dist.ProcessGroup | None = None, mode: CombineMode = "a2a"
) -> tuple[Tensor, ...]:
    """Allocate what `combine` needs for such a state, to be passed to it again and again.

    A captured CUDA graph needs none: it keeps those of the call that it captured.
    """
    world_size = _check_state(state, group, mode)
    return tuple(
        state.out.new_empty(s.shape, dtype=s.dtype) for s in _specs(state, world_size, mode)
    )


def combine(
    state: MLAState,
    group: dist.ProcessGroup | None = None,
    mode: CombineMode = "a2a",
    *,
    lse_base: LseBase = "e",
    buffers: tuple[Tensor, ...] | None = None,
) -> MLAState:
    """Merge the partial states of all ranks of a group into the whole context's.

    Parameters
    ----------
    state : MLAState, out [.., H, D], lse [.., H] float32
        This rank's state of all heads, of equal shape and dtype on all ranks. One whose LSE is NaN
        or infinite counts as empty, whatever its output holds.
    group : ProcessGroup, optional
        The DCP group; None: the default group.
    mode : {"a2a", "ag_rs", "ag_ar"}
        "a2a": one all-to-all of ``T * H * (D * itemsize + 4)`` bytes a rank, T the product of
        "..". "ag_rs": the LSEs all-gathered, the weighted outputs reduce-scattered in float32.
        "ag_ar": the same, all-reduced. Equal on all ranks, as is `lse_base`.
    lse_base : {"e", "2"}
        Base of ``state.lse`` and of the result.
    buffers : tuple of Tensor, optional
        Of `combine_buffers` for such a state and mode; left out, they are allocated. The result
        of "ag_rs" and "ag_ar" in float32 lies in them.

    Returns
    -------
    MLAState, out [.., H / W, D], lse [.., H / W] float32
        Of this rank's heads (``rank * H / W`` and on); of all H heads with "ag_ar". ``out`` has
        the dtype of ``state.out``, merged in float32. A row that is empty on every rank is
        (0, -inf).

    Raises
    ------
    InvalidInputError
        The mode or the base is none of those, or the shapes do not fit each other, the group or
        the buffers.
    """
    check_lse_base(lse_base)
    world_size = _check_state(state, group, mode)
    if world_size == 1:
        return merge_dcp_states([state.out], [state.lse], lse_base)
    if buffers is None:
        buffers = combine_buffers(state, group, mode)
    specs = [(buffer.shape, buffer.dtype) for buffer in buffers]
    if specs != list(_specs(state, world_size, mode)):
        found = ", ".join(describe(buffer) for buffer in buffers)
        needed = "those of combine_buffers for this state and mode"
        invalid("buffers", f"must be {needed}", found, needed, "allocate others")
    if mode == "a2a":
        return _exchange(state, group, lse_base, *buffers)
    return _reduce(state, group, lse_base, *buffers)


def _check_state(state: MLAState, group: dist.ProcessGroup | None, mode: str) -> int:
    """Raise InvalidInputError unless the group can combine it, and return the group's size."""
    if mode not in get_args(CombineMode):
        needed = f"one of {', '.join(get_args(CombineMode))}"
        invalid("mode", f"must be {needed}", mode, needed, "name one of those")
    out, lse = state
    fits = is_tensor(out) and is_tensor(lse) and out.ndim > 1 and out.shape[:-1] == lse.shape
    if not fits or lse.dtype is not torch.float32 or out.element_size() not in _BITS:
        needed = "out [.., H, D] and lse [.., H] float32"
        invalid("state", f"must be {needed}", state, needed, "pass what decode_mla returns")
    world_size = dist.get_world_size(group)
    heads = out.shape[-2]
    if mode != "ag_ar" and heads % world_size:
        invalid(
            "state",
            f"has {heads} heads, which {world_size} ranks cannot share",
            out,
            f"a multiple of {world_size} heads",
            "gather the heads of all ranks first, or pass mode='ag_ar'",
        )
    return world_size


def _split(tensor: Tensor, behind: int, world_size: int) -> Tensor:
    """View [.., H, ..] as [W, .., H / W, ..], each rank's heads; `behind` dimensions follow H."""
    at = tensor.ndim - 1 - behind
    share = tensor.shape[at] // world_size
    shape = (*tensor.shape[:at], world_size, share, *tensor.shape[at + 1 :])
    return tensor.reshape(shape).movedim(at, 0)


def _exchange(
    state: MLAState, group: dist.ProcessGroup | None, base: LseBase, send: Tensor, receive: Tensor
) -> MLAState:
    world_size, dim = send.shape[0], state.out.shape[-1]
    lse_bits = state.lse.unsqueeze(-1).contiguous().view(send.dtype)
    send[..., :dim] = _split(state.out.view(send.dtype), 1, world_size)
    send[..., dim:] = _split(lse_bits, 1, world_size)
    dist.all_to_all_single(flat_bytes(receive), flat_bytes(send), group=group)
    outs = receive[..., :dim].view(state.out.dtype)
    lses = receive[..., dim:].contiguous().view(torch.float32).squeeze(-1)
    return merge_dcp_states(outs, lses, base)


def _reduce(
    state: MLAState, group: dist.ProcessGroup | None, base: LseBase, send: Tensor, *rest: Tensor
) -> MLAState:
    *received, lses = rest
    all_gather(lses.view(-1), state.lse.contiguous().view(-1), group)
    weights, lse = merge_weights(lses, base)
    world_size, rank = lses.shape[0], dist.get_rank(group)
    weight = weights[rank].unsqueeze(-1)
    # An empty state's weight is 0, but its output may be NaN.
    weighted = torch.where(weight > 0, state.out.float(), 0.0) * weight
    if not received:
        send.copy_(weighted)
        dist.all_reduce(send, group=group)
        return MLAState(send.to(state.out.dtype), lse)
    send.copy_(_split(weighted, 1, world_size))
    (receive,) = received
    reduce_scatter(receive.view(-1), send.view(-1), group)
    return MLAState(receive.to(state.out.dtype), _split(lse, 0, world_size)[rank])


def decode_mla_dcp(
    query: Tensor,
    kv_cache: Tensor,
    *,
    causal_seqlens_kv_global: Tensor,
    group: dist.ProcessGroup | None = None,
    mode: CombineMode = "a2a",
    interleave_size: int = 1,
    lse_base: LseBase = "e",
    **arguments: Unpack[RankArguments],
) -> MLAState:
    """Gather the heads, decode this rank's keys, and combine: local heads in, local heads out.

    Parameters
    ----------
    query : Tensor, [B, q_len, H_local, D] or flat [num_tokens, H_local, D]
        This rank's heads of all requests. On all ranks alike: shape and dtype.
    kv_cache : Tensor
        This rank's pages; as `decode_mla` takes it.
    causal_seqlens_kv_global : Tensor, [B], int32
        Global lengths, equal on all ranks; as in `DCP`.
    group : ProcessGroup, optional
        The DCP group; None: the default group. World size and rank are the group's.
    mode : {"a2a", "ag_rs", "ag_ar"}
        As in `combine`, equal on all ranks.
    interleave_size : int
        As in `DCP`, equal on all ranks.
    **arguments
        Those of `decode_mla`, but for ``dcp``, ``return_lse``, ``out`` and ``lse``. Rank-local:
        ``workspace_buffer``, ``block_tables``, ``seq_lens``, ``max_seq_len``. The others are equal
        on all ranks.

    Returns
    -------
    MLAState
        In the query's layout: ``out`` [.., H_local, kv_lora_rank], ``lse`` [.., H_local]; of the
        heads of all ranks with "ag_ar".

    Raises
    ------
    FlashInferCompatError
        As `decode_mla` and `combine`. What only one rank can see (its cache, its tables) raises
        on that rank; the others learn of it from the group when it leaves.
    """
    for name in ("out", "lse", "return_lse", "dcp"):
        if name in arguments:
            raise TypeError(f"decode_mla_dcp() got an unexpected keyword argument {name!r}")
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    dcp = DCP(world_size, rank, causal_seqlens_kv_global, interleave_size)
    heads = gather_query_heads(query, group)
    state = decode_mla(heads, kv_cache, dcp=dcp, lse_base=lse_base, **arguments)
    return combine(state, group, mode, lse_base=lse_base)
