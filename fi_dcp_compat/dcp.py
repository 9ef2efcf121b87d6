"""Who holds which token under decode context parallelism, and what each query row sees.

Dimensions are those of `decode`: B requests, W ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, overload

import torch
from torch import Tensor

from .config import interleave_reason
from .errors import InvalidInputError
from .validation import describe, invalid, is_tensor, kept

__all__ = [
    "DCP",
    "FlatRows",
    "TokenSlots",
    "causal_bounds",
    "flatten_query_rows",
    "local_seq_lens",
    "token_positions",
    "token_slots",
]


@dataclass(frozen=True, slots=True, eq=False)
class DCP:
    """One rank's part of a decode-context-parallel call.

    Rank ``r`` of ``W`` holds the global positions ``g`` with ``g % W == r``. Query token ``i`` of
    ``q_len`` sees local key ``k`` when ``W * k + r < causal_seqlens_kv_global[b] - (q_len-1-i)``.

    Parameters
    ----------
    world_size : int
        Ranks in the DCP group (FlashInfer: cp_world). 1 is the path without DCP.
    rank : int
        This rank (FlashInfer: cp_rank).
    causal_seqlens_kv_global : Tensor, [B], int32, contiguous, on the query's device
        Global KV length of each request, the newest query token's key included. The call checks
        it; the construction does not.
    interleave_size : int
        Consecutive tokens per rank (vLLM: cp_kv_cache_interleave_size).

    Raises
    ------
    InvalidInputError
        `world_size`, `rank` or `interleave_size` is not an int in its range.
    UnsupportedConfigError
        `interleave_size` is above 1 with more than one rank.
    """

    world_size: int
    rank: int
    causal_seqlens_kv_global: Tensor
    interleave_size: int = 1

    def __post_init__(self) -> None:
        check_ranks(self.world_size, self.rank, self.interleave_size)
        reason = interleave_reason(self.world_size, self.interleave_size)
        if reason is not None:
            raise reason.exception()


_NAMES = ("world_size (FlashInfer: cp_world)", "rank (FlashInfer: cp_rank)", "interleave_size")


def check_ranks(
    world_size: int, rank: int, interleave_size: int, names: tuple[str, str, str] = _NAMES
) -> None:
    """Raise InvalidInputError unless the three are ints in their ranges."""
    for name, value, low, high in (
        (names[0], world_size, 1, None),
        (names[1], rank, 0, world_size),
        (names[2], interleave_size, 1, None),
    ):
        if type(value) is int and value >= low and (high is None or value < high):
            continue
        bound = f"at least {low}" if high is None else f"in [{low}, {high})"
        raise InvalidInputError(
            f"{name} must be an int {bound}.",
            found=f"{describe(value)} (Tensor)." if is_tensor(value) else f"{describe(value)}.",
            needed=f"an int {bound}; bool and NumPy integers are not taken.",
            fix="pass the value of this process's own DCP group."
            if type(value) is int
            else "pass int(...) of the group's value.",
            argument=name.split()[0],
            value=kept(value),
        )


@overload
def local_seq_lens(
    global_seq_lens: int, world_size: int, rank: int, interleave_size: int = 1
) -> int: ...
@overload
def local_seq_lens(
    global_seq_lens: Tensor, world_size: int, rank: int, interleave_size: int = 1
) -> Tensor: ...
def local_seq_lens(
    global_seq_lens: int | Tensor, world_size: int, rank: int, interleave_size: int = 1
) -> int | Tensor:
    """Count the tokens of each request that `rank` holds.

    Parameters
    ----------
    global_seq_lens : int or Tensor of any shape, integer dtype
        Global lengths in tokens; negative ones count as 0.
    world_size, rank, interleave_size : int
        As in `DCP`; any interleave is counted, though only 1 can be decoded.

    Returns
    -------
    int or Tensor
        Of the type, shape, dtype and device given. The sum over the ranks is the global length.
    """
    check_ranks(world_size, rank, interleave_size)
    stripe = world_size * interleave_size
    offset = rank * interleave_size
    if isinstance(global_seq_lens, Tensor):
        lens = global_seq_lens.clamp(min=0)
        tail = (lens % stripe - offset).clamp(0, interleave_size)
        return lens // stripe * interleave_size + tail
    length = max(0, global_seq_lens)
    tail_len = min(max(length % stripe - offset, 0), interleave_size)
    return length // stripe * interleave_size + tail_len


class TokenSlots(NamedTuple):
    """Where tokens are held; see `token_slots`.

    Attributes
    ----------
    rank : Tensor
        The rank that holds each.
    local : Tensor
        Its local position on that rank: in page ``local // page_size`` of the request, at
        ``local % page_size``.
    """

    rank: Tensor
    local: Tensor


def token_slots(positions: Tensor, world_size: int, interleave_size: int = 1) -> TokenSlots:
    """Find the rank and the local position of tokens by their global positions.

    Parameters
    ----------
    positions : Tensor of any shape, integer dtype
        Global positions, from 0; what stands for padding comes out as no slot to use.
    world_size, interleave_size : int
        As in `DCP`; any interleave is placed, though only 1 can be decoded.

    Returns
    -------
    TokenSlots of the shape, dtype and device given

    Raises
    ------
    InvalidInputError
        A number is out of its range, or the positions are no integers.
    """
    check_ranks(world_size, 0, interleave_size)
    _require_integers("positions", positions)
    stripe = positions // interleave_size
    local = stripe // world_size * interleave_size + positions % interleave_size
    return TokenSlots(stripe % world_size, local)


def token_positions(
    local: Tensor, world_size: int, rank: int | Tensor, interleave_size: int = 1
) -> Tensor:
    """Find the global positions of tokens by rank and local position: `token_slots` undone.

    Parameters
    ----------
    local : Tensor of any shape, integer dtype
        Local positions on `rank`, from 0.
    world_size, interleave_size : int
        As in `token_slots`.
    rank : int, or Tensor that broadcasts with `local`; a tensor's values are not looked at

    Returns
    -------
    Tensor of the shape, dtype and device of `local`, which must hold the largest position

    Raises
    ------
    InvalidInputError
        As in `token_slots`.
    """
    check_ranks(world_size, 0 if isinstance(rank, Tensor) else rank, interleave_size)
    _require_integers("local", local)
    stripe = local // interleave_size * world_size + rank
    return stripe * interleave_size + local % interleave_size


def _require_integers(argument: str, tensor: Tensor) -> None:
    if not is_tensor(tensor) or tensor.is_floating_point() or tensor.dtype is torch.bool:
        needed = "a tensor of an integer dtype"
        fix = "pass positions as int32 or int64"
        invalid(argument, "must be an integer tensor", tensor, needed, fix)


def causal_bounds(
    causal_seqlens_kv_global: Tensor,
    q_len: int,
    world_size: int,
    rank: int,
    interleave_size: int = 1,
) -> Tensor:
    """Count the local keys that each query row sees.

    The bound is shifted globally first and made local after: a shifted local length is not the
    local length of a shifted bound.

    Parameters
    ----------
    causal_seqlens_kv_global : Tensor, [B], integer dtype
        As in `DCP`.
    q_len : int
        Query tokens of each request.

    Returns
    -------
    Tensor, [B, q_len], dtype and device of the lengths
    """
    newest = causal_seqlens_kv_global.unsqueeze(1)
    behind = torch.arange(q_len - 1, -1, -1, device=newest.device, dtype=newest.dtype)
    return local_seq_lens(newest - behind, world_size, rank, interleave_size)


class FlatRows(NamedTuple):
    """Per-request tensors repeated for one-token rows; see `flatten_query_rows`.

    Attributes
    ----------
    block_tables : Tensor, [num_rows, width], int32
    seq_lens : Tensor, [num_rows], int32
    causal_seqlens_kv_global : Tensor, [num_rows], int32, or None
    """

    block_tables: Tensor
    seq_lens: Tensor
    causal_seqlens_kv_global: Tensor | None


def flatten_query_rows(
    cum_seq_lens_q: Tensor,
    num_rows: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    causal_seqlens_kv_global: Tensor | None = None,
) -> FlatRows:
    """Repeat each request's tables and lengths for its query rows, once per step for all layers.

    Each row of the result is a request of one token that sees the whole context, so a causal call
    with the flat query computes a non-causal block: ``decode_mla(query, cache, block_tables=
    rows.block_tables, seq_lens=rows.seq_lens, dcp=DCP(W, r, rows.causal_seqlens_kv_global))``.

    Parameters
    ----------
    cum_seq_lens_q : Tensor, [B + 1], int32
        Prefix sums of the query lengths.
    num_rows : int
        Rows of the flat query; rows past ``cum_seq_lens_q[-1]`` repeat the last request, so a
        padded batch stays defined. Nothing is copied to the host.
    block_tables : Tensor, [B, width], int32
    seq_lens : Tensor, [B], int32, rank-local under DCP
    causal_seqlens_kv_global : Tensor, [B], int32, optional
    """
    rows = torch.arange(num_rows, device=cum_seq_lens_q.device, dtype=cum_seq_lens_q.dtype)
    request = torch.searchsorted(cum_seq_lens_q[1:].contiguous(), rows, right=True)
    request = request.clamp(max=block_tables.shape[0] - 1)
    return FlatRows(
        block_tables[request],
        seq_lens[request],
        None if causal_seqlens_kv_global is None else causal_seqlens_kv_global[request],
    )
