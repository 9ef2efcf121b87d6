"""The whole of a DCP decode on one rank: heads gathered, this rank's keys decoded, states combined.

Dimensions are those of `decode`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from .arguments import REQUIRED, RankArguments
from .dcp import DCP
from .decode import decode_mla
from .distributed import CombineMode, check_mode, combine, gather_query_heads, group_size
from .features import LseBase
from .lse import MLAState, check_lse_base

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["decode_mla_dcp"]


def decode_mla_dcp(
    query: Tensor,
    kv_cache: Tensor,
    *,
    causal_seqlens_kv_global: Tensor,
    group: dist.ProcessGroup | None = None,
    mode: CombineMode = "a2a",
    interleave_size: int = 1,
    lse_base: LseBase = "e",
    buffers: Sequence[Tensor] | None = None,
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
    buffers : sequence of Tensor, optional
        Of `combine_buffers`, for the state of all heads; as in `combine`.
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
        As `decode_mla` and `combine`. What only one rank can see (its cache, its tables, its first
        compilation) raises on that rank alone: it must leave the group, or the others wait for
        their timeout.
    ValueError
        torch.distributed is not initialised.
    """
    names = RankArguments.__annotations__.keys()
    for name in arguments.keys() - names:
        raise TypeError(f"decode_mla_dcp() got an unexpected keyword argument {name!r}")
    for name in REQUIRED:
        if name not in arguments:
            raise TypeError(f"decode_mla_dcp() lacks the keyword argument {name!r}")
    check_lse_base(lse_base)
    check_mode(mode)
    world_size = group_size(group)
    dcp = DCP(world_size, dist.get_rank(group), causal_seqlens_kv_global, interleave_size)
    heads = gather_query_heads(query, group)
    state = decode_mla(heads, kv_cache, dcp=dcp, lse_base=lse_base, **arguments)
    return combine(state, group, mode, lse_base=lse_base, buffers=buffers)
