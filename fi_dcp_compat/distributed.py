"""Across ranks: query heads gathered before the decode, partial states combined after it.

Collectives run on the caller's process group: gloo on CPU, NCCL on GPU. A rank that raises leaves
the others waiting in the collective until the group's timeout, so each check here looks at values
that must be equal on all ranks anyway; each docstring says which. Dimensions are those of `decode`;
"..": whatever stands in front of the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import all_gather, flat_bytes, reduce_scatter
from .features import LseBase
from .lse import MLAState, check_lse_base, merge_dcp_states, merge_weights
from .validation import invalid, is_tensor

__all__ = [
    "CombineMode",
    "combine",
    "combine_buffers",
    "gather_query_heads",
]

CombineMode = Literal["a2a", "ag_rs", "ag_ar"]
# Integers of their size: bits are carried, not numbers, so nothing is rounded or made quiet.
_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


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
    world_size = group_size(group)
    if world_size == 1:
        return query
    gathered = query.new_empty((world_size, *query.shape))
    # As bytes: not every backend has a collective for every dtype of a query.
    all_gather(flat_bytes(gathered), flat_bytes(query.contiguous()), group)
    return gathered.movedim(0, -3).flatten(-3, -2)


def group_size(group: dist.ProcessGroup | None) -> int:
    """Return how many ranks the group has; InvalidInputError if this process is none of them."""
    if not _is_group(group):
        needed = "a ProcessGroup, or None for the default group"
        invalid("group", f"must be {needed}", group, needed, "pass what new_group returns")
    size: int = dist.get_world_size(group)
    if size < 1:
        needed = "a group that this process belongs to"
        invalid("group", f"must be {needed}", group, needed, "call it on the group's ranks only")
    return size


def _is_group(value: object) -> bool:
    # new_group gives a process that is not in the group an int, whose size is -1.
    stranger = value == dist.GroupMember.NON_GROUP_MEMBER
    return value is None or stranger or isinstance(value, dist.ProcessGroup)


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
    packed = _Spec((world_size, *shape[:-1], dim + 4 // itemsize), _BITS[state.out.dtype])
    return packed, packed


def combine_buffers(
    state: MLAState, group: dist.ProcessGroup | None = None, mode: CombineMode = "a2a"
) -> tuple[Tensor, ...]:
    """Allocate what `combine` needs for such a state, to be passed to it again and again.

    A captured CUDA graph needs none: it keeps those of the call that it captured. Those made under
    ``torch.inference_mode`` are for calls under it.

    Parameters
    ----------
    state, group, mode
        As `combine` takes them; of the state the shapes, the dtype and the device count.

    Raises
    ------
    InvalidInputError
        As `combine`.
    """
    world_size = _check_state(state, group, mode)
    return _allocated(MLAState(*state), world_size, mode)


def _allocated(state: MLAState, world_size: int, mode: CombineMode) -> tuple[Tensor, ...]:
    return tuple(
        state.out.new_empty(s.shape, dtype=s.dtype) for s in _specs(state, world_size, mode)
    )


def combine(
    state: MLAState,
    group: dist.ProcessGroup | None = None,
    mode: CombineMode = "a2a",
    *,
    lse_base: LseBase = "e",
    buffers: Sequence[Tensor] | None = None,
) -> MLAState:
    """Merge the partial states of all ranks of a group into the whole context's.

    Parameters
    ----------
    state : MLAState, out [.., H, D] bf16, fp16 or float32, lse [.., H] float32
        This rank's state of all heads, of equal shape and dtype on all ranks. One whose LSE is NaN
        or infinite counts as empty, whatever its output holds. Gradients are not carried.
    group : ProcessGroup, optional
        The DCP group; None: the default group.
    mode : {"a2a", "ag_rs", "ag_ar"}
        "a2a": one all-to-all of ``T * H * (D * itemsize + 4)`` bytes a rank, T the product of
        "..". "ag_rs": the LSEs all-gathered, the weighted outputs reduce-scattered in float32.
        "ag_ar": the same, all-reduced. Equal on all ranks, as is `lse_base`.
    lse_base : {"e", "2"}
        Base of ``state.lse`` and of the result.
    buffers : sequence of Tensor, optional
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
    state = MLAState(*(part.detach() for part in state))
    if buffers is not None:
        _check_buffers(buffers, state, world_size, mode)
    if world_size == 1:
        return merge_dcp_states(state.out.unsqueeze(0), state.lse.unsqueeze(0), lse_base)
    if buffers is None:
        buffers = _allocated(state, world_size, mode)
    if mode == "a2a":
        return _exchange(state, group, lse_base, *buffers)
    return _reduce(state, group, lse_base, *buffers)


def _check_buffers(
    buffers: Sequence[Tensor], state: MLAState, world_size: int, mode: CombineMode
) -> None:
    specs, given = _specs(state, world_size, mode), list[object](buffers)
    fits = len(given) == len(specs) and all(
        isinstance(buffer, Tensor)
        and (buffer.shape, buffer.dtype, buffer.device) == (*spec, state.out.device)
        and buffer.is_contiguous()
        for buffer, spec in zip(given, specs, strict=True)
    )
    if not fits:
        needed = "those of combine_buffers for this state and mode"
        invalid("buffers", f"must be {needed}", tuple(given), needed, "allocate others")


def _check_state(state: MLAState, group: dist.ProcessGroup | None, mode: str) -> int:
    """Raise InvalidInputError unless the group can combine it, and return the group's size."""
    check_mode(mode)
    needed = "out [.., H, D] bf16, fp16 or float32, and lse [.., H] float32, on one device"
    given: object = state
    fix = "pass what decode_mla returns; FlashInfer's own LSE is flat: lse.view(out.shape[:-1])"
    if not isinstance(given, tuple) or len(given) != 2:
        invalid("state", f"must be {needed}", given, needed, fix)
    out, lse = state
    if (
        not is_tensor(out)
        or not is_tensor(lse)
        or out.ndim < 2
        or out.shape[:-1] != lse.shape
        or out.dtype not in _BITS
        or lse.dtype is not torch.float32
        or lse.device != out.device
    ):
        invalid("state", f"must be {needed}", state, needed, fix)
    world_size = group_size(group)
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


def check_mode(mode: str) -> None:
    """Raise InvalidInputError unless `mode` is one of the three."""
    if mode not in get_args(CombineMode):
        needed = f"one of {', '.join(get_args(CombineMode))}"
        invalid("mode", f"must be {needed}", mode, needed, "name one of those")


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
    # A copy: where there is no token, what is contiguous keeps its odd strides.
    lse_bits = receive[..., dim:].clone(memory_format=torch.contiguous_format)
    lses = lse_bits.view(torch.float32).squeeze(-1)
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
    weighted = torch.where(weight > 0, state.out, 0.0).float().mul_(weight)
    if not received:
        send.copy_(weighted)
        dist.all_reduce(send, group=group)
        return MLAState(send.to(state.out.dtype), lse)
    send.copy_(_split(weighted, 1, world_size))
    (receive,) = received
    reduce_scatter(receive.view(-1), send.view(-1), group)
    return MLAState(receive.to(state.out.dtype), _split(lse, 0, world_size)[rank].contiguous())
