"""Calls to start from."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from fi_dcp_compat import DCP, FlashInferABI
from fi_dcp_compat.testing import mock_kernel

RELEASES = (
    "0.6.12",
    "0.6.13",
    "0.6.14",
    "0.6.15",
    "0.6.16",
    "0.6.17",
    "0.6.18",
    "0.7.0",
    "0.7.1",
    "0.7.2",
    "0.7.2.post1",
    "0.7.4",
)
DCP_RELEASES = RELEASES[RELEASES.index("0.6.17") :]
SCALE = 0.05


def signature(abi: FlashInferABI) -> inspect.Signature:
    return inspect.signature(mock_kernel(abi))


def stub_result(**call: Any) -> Tensor | tuple[Tensor, Tensor]:
    """Return what FlashInfer would, in shapes and dtypes, with ones in it."""
    query, rank = call["query"], call["kv_lora_rank"]
    out = call.get("out")
    if out is None:
        out = torch.ones(*query.shape[:-1], rank, dtype=torch.bfloat16)
    if not call.get("return_lse"):
        return out
    lse = call.get("lse")
    return out, torch.ones(query.shape[:-1].numel() // query.shape[-2], query.shape[-2]) if (
        lse is None
    ) else lse.fill_(1.0)


@functools.cache
def _workspace() -> Tensor:
    # No mock writes into it, and a new one would take most of a test's time.
    return torch.zeros(32 << 20, dtype=torch.int8)


def call(
    *,
    batch: int = 2,
    q_len: int = 1,
    heads: int = 16,
    page_size: int = 64,
    width: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    kv_lora_rank: int = 512,
    **changes: Any,
) -> dict[str, Any]:
    """Arguments of a `decode_mla` call that is right on every backend; `changes` go on top."""
    dim = kv_lora_rank + 64
    width = max(1, 128 // page_size) if width is None else width
    arguments: dict[str, Any] = {
        "query": torch.zeros(batch, q_len, heads, dim).to(dtype),
        "kv_cache": torch.zeros(batch * width, page_size, dim).to(dtype),
        "workspace_buffer": _workspace(),
        "block_tables": torch.arange(batch * width, dtype=torch.int32).view(batch, width),
        "seq_lens": torch.full((batch,), 7, dtype=torch.int32),
        "max_seq_len": 7,
        "bmm1_scale": SCALE,
        "kv_lora_rank": kv_lora_rank,
    }
    if dtype is torch.float8_e4m3fn:
        arguments["bmm2_scale"] = 1.0
    return arguments | changes


def dcp_of(world_size: int = 8, rank: int = 3, batch: int = 2, tokens: int = 55) -> DCP:
    """A DCP whose global lengths leave 7 local keys on rank 3 of 8."""
    return DCP(world_size, rank, torch.full((batch,), tokens, dtype=torch.int32))
