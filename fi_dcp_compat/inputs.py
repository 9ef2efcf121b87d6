"""The checks of a call's arguments: what kernels read as raw pointers is looked at first.

Shapes, dtypes, devices, strides and addresses only: nothing here reads a value on the device.
Dimensions are those of `decode`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import UnsupportedConfigError
from .validation import (
    ADDRESS_FIX,
    POINTER_ALIGNMENT,
    describe,
    invalid,
    is_tensor,
    require_int,
    require_tensor,
)

__all__ = [
    "QueryLayout",
    "Step",
    "check_cache",
    "check_own",
    "check_shared",
    "query_layout",
    "require_cache",
    "require_sinks",
]


class Step(NamedTuple):
    """One step's arguments, named and shaped as `decode_mla` documents them."""

    query: Tensor
    kv_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    max_seq_len: int
    workspace_buffer: Tensor
    causal_seqlens_kv_global: Tensor | None = None
    cum_seq_lens_q: Tensor | None = None
    max_q_len: int | None = None
    out: Tensor | None = None
    lse: Tensor | None = None
    multi_ctas_kv_counter_buffer: Tensor | None = None


class QueryLayout(NamedTuple):
    """How the query is laid out: flat or not, uniform or compact."""

    batch: int
    q_len: int
    num_heads: int
    num_tokens: int
    flat: bool
    compact: bool


def query_layout(step: Step, head_dim: int) -> QueryLayout:
    """Read the layout off the shapes, or raise InvalidInputError where they do not fit."""
    query, block_tables, max_q_len = step.query, step.block_tables, step.max_q_len
    shapes = "[B, q_len, H, D] or [num_tokens, H, D]"
    if not is_tensor(query) or query.ndim not in (3, 4):
        invalid("query", f"must be {shapes}", query, shapes, "reshape it")
    if query.shape[-1] != head_dim:
        needed = f"a last dimension of {head_dim} (kv_lora_rank + qk_rope_head_dim)"
        invalid("query", f"must have {needed}", query, needed, "join latent and rope parts")
    if query.stride(-1) != 1 or query.data_ptr() % POINTER_ALIGNMENT:
        needed = f"a unit stride in the last dimension and a {POINTER_ALIGNMENT}-byte aligned start"
        invalid("query", f"must have {needed}", query, needed, ADDRESS_FIX)
    if not is_tensor(block_tables) or block_tables.ndim != 2:
        invalid(
            "block_tables", "must be [B, width]", block_tables, "[B, width] int32", "reshape it"
        )
    batch = block_tables.shape[0]
    if max_q_len is not None:
        require_int("max_q_len", max_q_len, 1)
    if query.ndim == 4:
        return _rectangular(query, batch, step.cum_seq_lens_q, max_q_len)
    tokens, heads, _ = query.shape
    if step.cum_seq_lens_q is not None:
        if max_q_len is None:
            invalid(
                "max_q_len",
                "must be given with cum_seq_lens_q",
                max_q_len,
                "the largest query length, a host int: without it FlashInfer copies "
                "cum_seq_lens_q to the host",
                "pass max_q_len=...",
            )
        if tokens > batch * max_q_len:
            invalid(
                "query",
                f"has {tokens} tokens, more than {batch} requests of max_q_len={max_q_len} hold",
                query,
                f"at most {batch * max_q_len} tokens",
                "pass the largest query length of the batch as max_q_len",
            )
        return QueryLayout(batch, max_q_len, heads, tokens, flat=True, compact=True)
    q_len = max_q_len if max_q_len is not None else tokens // max(batch, 1)
    if tokens != batch * q_len:
        asserted = "" if max_q_len is None else f" of max_q_len={max_q_len}"
        invalid(
            "query",
            f"has {tokens} tokens, which {batch} requests{asserted} cannot share evenly",
            query,
            "num_tokens = B * q_len with B = block_tables.shape[0]",
            "pass cum_seq_lens_q and max_q_len for requests of different query lengths",
        )
    q_len = q_len if batch else 1
    return QueryLayout(batch, q_len, heads, tokens, flat=True, compact=False)


def _rectangular(
    query: Tensor, batch: int, cum_seq_lens_q: Tensor | None, max_q_len: int | None
) -> QueryLayout:
    _, q_len, heads, _ = query.shape
    if cum_seq_lens_q is not None:
        needed = "[num_tokens, H, D] with cum_seq_lens_q"
        invalid("query", f"must be {needed}", query, needed, "flatten it, or drop cum_seq_lens_q")
    if query.shape[0] != batch:
        problem = f"has {query.shape[0]} requests, but block_tables has {batch} rows"
        invalid("query", problem, query, f"{batch} requests", "pass the tensors of one batch")
    if max_q_len is not None and max_q_len != q_len:
        problem = f"has q_len={q_len}, but max_q_len={max_q_len}"
        invalid("query", problem, query, f"q_len={max_q_len}", "drop max_q_len")
    return QueryLayout(batch, q_len, heads, batch * q_len, flat=False, compact=False)


def require_cache(kv_cache: Tensor) -> None:
    """Raise InvalidInputError unless the cache has a page size to read off."""
    if not is_tensor(kv_cache) or kv_cache.ndim not in (3, 4):
        needed = "[num_pages, page_size, D] or [num_pages, 1, page_size, D]"
        invalid("kv_cache", f"must be {needed}", kv_cache, needed, "reshape it")


def check_cache(
    kv_cache: Tensor, page_size: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise where the cache cannot be read as [num_pages, 1, page_size, D]."""
    require_cache(kv_cache)
    cache = kv_cache.unsqueeze(1) if kv_cache.ndim == 3 else kv_cache
    if cache.shape[1:] == (1, cache.shape[2], head_dim) and cache.shape[2] != page_size:
        needed = f"pages of {page_size} tokens, which the decoder was prepared for"
        invalid("kv_cache", f"must have {needed}", kv_cache, needed, "prepare another decoder")
    if cache.shape[1:] != (1, page_size, head_dim):
        shapes = f"[num_pages, {page_size}, {head_dim}] or [num_pages, 1, {page_size}, {head_dim}]"
        parts = "kv_lora_rank + qk_rope_head_dim"
        raise UnsupportedConfigError(
            f"kv_cache must be {shapes}.",
            found=f"kv_cache: {describe(kv_cache)}.",
            needed=f"one head and a last dimension of {head_dim} ({parts}).",
            fix="pass the latent cache with its rope part, or the head dimensions that it has.",
            argument="kv_cache",
            value=describe(kv_cache),
        )
    # Pages may lie apart (one layer's view of a pool of layers); a page itself may not.
    if (
        cache.dtype is not dtype
        or cache.device != device
        or cache.stride()[2:] != (head_dim, 1)
        or cache.data_ptr() % POINTER_ALIGNMENT
    ):
        needed = f"{dtype} on {device}, each page contiguous, {POINTER_ALIGNMENT}-byte aligned"
        fix = "pass the cache as it was allocated"
        invalid("kv_cache", f"must be {needed}", kv_cache, needed, fix)


def check_shared(step: Step, layout: QueryLayout, *, dcp: bool, strided_tables: bool) -> None:
    """Raise InvalidInputError unless the kernel can read what a step's layers share.

    `strided_tables` says that the kernel knows a row stride; the others take the rows as dense.
    """
    device, tables = step.query.device, step.block_tables
    require_tensor(
        "block_tables", tables, tables.shape, torch.int32, device, contiguous=not strided_tables
    )
    require_tensor("seq_lens", step.seq_lens, (layout.batch,), torch.int32, device)
    if dcp and step.causal_seqlens_kv_global is None:
        needed = f"[{layout.batch}] int32 on {device}, the global KV lengths"
        fix = "pass the global lengths, the newest query token's key included"
        invalid("causal_seqlens_kv_global", "must be given with DCP", None, needed, fix)
    for name, lengths, rows in (
        ("causal_seqlens_kv_global", step.causal_seqlens_kv_global, layout.batch),
        ("cum_seq_lens_q", step.cum_seq_lens_q, layout.batch + 1),
    ):
        if lengths is not None:
            require_tensor(name, lengths, (rows,), torch.int32, device, alignment=4)


def check_own(
    step: Step, *, kv_lora_rank: int, out_dtype: torch.dtype, dcp: bool, return_lse: bool
) -> None:
    """Raise InvalidInputError unless a layer's own length bound and buffers fit."""
    device, shape = step.query.device, step.query.shape[:-1]
    require_int("max_seq_len", step.max_seq_len, 0 if dcp else 1)
    for name, buffer in (("out", step.out), ("lse", step.lse)):
        if buffer is not None and is_tensor(buffer) and buffer.requires_grad:
            needed = "a buffer without a gradient, which no kernel carries"
            invalid(name, "must not require a gradient", buffer, needed, "pass buffer.detach()")
    if step.out is not None:
        require_tensor("out", step.out, (*shape, kv_lora_rank), out_dtype, device)
    if step.lse is not None:
        if not return_lse:
            needed = "return_lse=True with an lse buffer"
            invalid("lse", "would not be written", step.lse, needed, "pass return_lse=True")
        require_tensor("lse", step.lse, shape, torch.float32, device)


def require_sinks(sinks: Tensor | Sequence[Tensor], num_heads: int, device: torch.device) -> None:
    """Raise InvalidInputError unless it is one tensor, [H] float32, or a sequence of one."""
    if not isinstance(sinks, Tensor):
        if type(sinks) not in (list, tuple) or len(sinks) != 1:
            needed = f"a tensor [{num_heads}] float32, or a list of one"
            invalid("sinks", f"must be {needed}", sinks, needed, "pass the one tensor")
        sinks = sinks[0]
    require_tensor("sinks", sinks, (num_heads,), torch.float32, device)
