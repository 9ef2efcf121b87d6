"""Inputs and readings that several scenarios share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fi_dcp_compat import DCP, decode_mla, local_seq_lens
from tests.support import call


def lens(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def dropin_call(**changes: Any) -> dict[str, Any]:
    """Arguments of the drop-in: FlashInfer's names, without defaults for the head dimensions."""
    return call(qk_nope_head_dim=128, qk_rope_head_dim=64, **changes)


def dropin_dcp_call(
    world_size: int, rank: int, global_lens: Tensor, **changes: Any
) -> dict[str, Any]:
    """The same with FlashInfer's DCP keywords."""
    split = {"enable_dcp": True, "cp_world": world_size, "cp_rank": rank, "return_lse": True}
    return dropin_call(**changes) | split | {"causal_seqlens_kv_global": global_lens}


def keys_seen(
    global_len: int,
    q_len: int,
    world_size: int,
    rank: int,
    *,
    masked: bool = True,
    causal: bool = True,
) -> list[int]:
    """Count the local keys that each query row of one request sees in a decode.

    With a query of zeros each key has the weight 1, so the LSE is the log of their number.
    `masked=False` decodes the rank's shard without telling that it is one.
    """
    local = local_seq_lens(global_len, world_size, rank)
    state = decode_mla(
        **call(batch=1, q_len=q_len, seq_lens=lens(local), max_seq_len=max(1, local)),
        dcp=DCP(world_size, rank, lens(global_len)) if masked else None,
        causal=causal,
        return_lse=True,
        backend="reference",
    )
    rows = state.lse[0].exp()
    assert rows.eq(rows[:, :1]).all()
    return [round(row) for row in rows[:, 0].tolist()]
