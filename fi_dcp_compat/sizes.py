"""Bytes: the workspace that each backend needs, and trtllm-gen's counters."""

from __future__ import annotations

import torch
from torch import Tensor

from .abi import FlashInferABI
from .config import BACKENDS
from .errors import InvalidInputError
from .guards import Backend
from .inputs import QueryLayout, Step
from .limits import (
    AUTO_BACKENDS,
    CUTE_DSL_TILE_ROWS,
    CUTE_DSL_WORKSPACE_DTYPES,
    TRTLLM_GEN_COUNTER_BYTES,
)
from .validation import POINTER_ALIGNMENT, describe, invalid, is_tensor, require_int

__all__ = ["check_workspace", "counter_bytes", "min_workspace_bytes", "needed_bytes"]

# A tile of partial sums in float32: kv_lora_rank of each row, and its LSE.
_TILE_BYTES = CUTE_DSL_TILE_ROWS * (512 + 1) * 4
_WORKSPACE_ALIGNMENT = 32


def min_workspace_bytes(
    backend: Backend,
    *,
    abi: FlashInferABI,
    batch: int,
    q_len: int,
    num_heads: int,
    return_lse: bool,
    sm_count: int,
    varlen: bool = False,
    causal: bool = True,
) -> int:
    """Return the bytes that suffice for every batch of up to `batch` requests.

    `decode_mla` refuses less than the batch at hand needs, which on cute-dsl is more for a small
    one: its keys are split over the idle multiprocessors. It is the need of the longest contexts,
    so every rank of a DCP group, whose ``max_seq_len`` differ, needs the same.

    On trtllm-gen the scratch for KV splits comes on top, of a size that no release tells: stacks
    allocate 128 MiB in all, 256 MiB with an LSE.

    Parameters
    ----------
    backend : str
        "auto" is whatever auto may run on compute capability 10.x, DCP's cute-dsl included.
    abi : FlashInferABI
        The release: counters lie in the workspace up to 0.6.14, and the split cap grew in 0.7.2.
    batch, q_len, num_heads : int
        Requests, query tokens of each and query heads, at most.
    sm_count : int
        Streaming multiprocessors of the GPU.
    varlen : bool
        Whether requests of different query lengths, 1 to `q_len`, share a batch
        (``cum_seq_lens_q``). Padding requests without a token take more than this.
    causal : bool
        False for blocks of ``causal=False``, which are launched as a request a row.

    Raises
    ------
    InvalidInputError
        A number is no int of at least 1, or the backend is none of decode_mla's.
    """
    if backend not in BACKENDS:
        needed = f"one of {', '.join(BACKENDS)}"
        invalid("backend", f"must be {needed}", backend, needed, "name one of those")
    _require_positive(batch=batch, q_len=q_len, num_heads=num_heads, sm_count=sm_count)
    if not causal:
        batch, q_len, varlen = batch * q_len, 1, False
    names: tuple[str, ...] = AUTO_BACKENDS[10] if backend == "auto" else (backend,)
    # 0.6.14's auto gives cute-dsl what is behind the counters (core:1968).
    shared = backend == "auto" and not abi.features.counters_apart
    behind = TRTLLM_GEN_COUNTER_BYTES if shared else 0
    return max(
        behind + _cute_dsl_bound(abi, batch, q_len, num_heads, sm_count, varlen)
        if name == "cute-dsl"
        else needed_bytes(name, abi, batch, q_len, num_heads, return_lse, sm_count)
        for name in names
    )


def needed_bytes(
    backend: str,
    abi: FlashInferABI,
    batch: int,
    q_len: int,
    num_heads: int,
    return_lse: bool,
    sm_count: int,
    num_tokens: int | None = None,
) -> int:
    """Return the bytes that one batch needs; `num_tokens` of query if they are compact."""
    if backend == "reference":
        return 0
    if backend == "xqa":
        return 8 * 2**20 + 18432 * batch
    if backend == "cute-dsl":
        return _cute_dsl_bytes(abi, batch, q_len, num_heads, sm_count, num_tokens)
    statistics = 8 * num_heads * batch * _round_up(q_len, 256) + 2**20 if return_lse else 0
    return statistics + (0 if abi.features.counters_apart else TRTLLM_GEN_COUNTER_BYTES)


def _cute_dsl_bytes(
    abi: FlashInferABI, batch: int, q_len: int, num_heads: int, sm_count: int, tokens: int | None
) -> int:
    if abi.features.cute_dsl_compact_queries:
        tiles = -(-q_len * num_heads // CUTE_DSL_TILE_ROWS)
        busy = batch * tiles if tokens is None else max(1, min(tokens, batch * tiles))
        splits = min(_split_cap(abi), max(1, sm_count // (2 * busy)))
    else:
        # Up to 0.6.15 a tile holds whole query tokens.
        tiles = q_len // (folded_tokens(num_heads, q_len) if abi.features.cute_dsl_causal else 1)
        splits = min(_split_cap(abi), max(1, sm_count // batch // (2 * tiles)))
    return 0 if splits == 1 else batch * tiles * splits * _TILE_BYTES


def _cute_dsl_bound(
    abi: FlashInferABI, batch: int, q_len: int, num_heads: int, sm_count: int, varlen: bool
) -> int:
    """Bound `_cute_dsl_bytes` over all smaller batches, which it may be the larger for."""
    compact = abi.features.cute_dsl_compact_queries
    tiles = [-(-q * num_heads // CUTE_DSL_TILE_ROWS) if compact else q for q in range(1, q_len + 1)]
    # The splits fill half of the multiprocessors. With different lengths each request's share of
    # the scratch is that of the longest, but the others have one token and keep fewer busy.
    filled = sm_count // 2
    if varlen and compact:
        filled = max(
            share * (batch * sm_count // (2 * (batch + others)))
            for others, share in enumerate(tiles)
        )
    return min(batch * tiles[-1] * _split_cap(abi), filled) * _TILE_BYTES


def _split_cap(abi: FlashInferABI) -> int:
    return 128 if abi.features.splits_128 else 48 if abi.features.splits_48 else 32


def folded_tokens(num_heads: int, q_len: int) -> int:
    """Return the query tokens in one tile of cute-dsl up to 0.6.15: as many as divide `q_len`."""
    fits = range(1, max(1, min(q_len, CUTE_DSL_TILE_ROWS // num_heads)) + 1)
    return max(n for n in fits if q_len % n == 0)


def counter_bytes(batch: int, num_heads: int, sm_count: int) -> int:
    """Return the bytes of trtllm-gen's ``multi_ctas_kv_counter_buffer``, since 0.6.15 (#3582).

    Zero it once; the kernel leaves it zeroed. One buffer per stream in flight.
    """
    _require_positive(batch=batch, num_heads=num_heads, sm_count=sm_count)
    return 4 * _round_up(max(batch * num_heads, sm_count), 8)


def _require_positive(**numbers: int) -> None:
    for name, value in numbers.items():
        require_int(name, value, 1)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def check_workspace(
    step: Step,
    layout: QueryLayout,
    abi: FlashInferABI,
    *,
    backends: tuple[str, ...],
    return_lse: bool,
    counter_buffer: bool,
    sm_count: int | None,
) -> None:
    """Raise InvalidInputError unless the scratch buffers fit what may run.

    The size is that of the first backend: a tuned auto leaves out one that has too little.
    """
    backend = backends[0]
    if backend == "reference":
        return
    buffer = step.workspace_buffer
    device = step.query.device
    cute_dsl = "cute-dsl" in backends
    dtypes = {getattr(torch, name) for name in CUTE_DSL_WORKSPACE_DTYPES}
    dtypes |= {torch.uint8} if abi.features.uint8_workspace else set()
    if (
        not is_tensor(buffer)
        or buffer.device != device
        or not buffer.is_contiguous()
        or buffer.data_ptr() % _WORKSPACE_ALIGNMENT
        or (cute_dsl and buffer.dtype not in dtypes)
    ):
        names = " or ".join(sorted(str(dtype) for dtype in dtypes))
        of_dtype = f" {names}" if cute_dsl else ""
        needed = f"a contiguous{of_dtype} tensor on {device}, {_WORKSPACE_ALIGNMENT}-byte aligned"
        fix = "allocate it once, zeroed: torch.zeros(bytes, dtype=torch.int8, device=...)"
        invalid("workspace_buffer", f"must be {needed}", buffer, needed, fix)
    counted = TRTLLM_GEN_COUNTER_BYTES // 4
    if (
        "trtllm-gen" in backends
        and not abi.features.counters_apart
        and layout.batch * layout.num_heads > counted
    ):
        needed = f"at most {counted} (request, head) pairs on {abi.describe()}"
        invalid("query", f"must have {needed}", step.query, needed, "split the batch")
    if layout.batch and (sm_count is not None or backend != "cute-dsl"):
        need = needed_bytes(
            backend,
            abi,
            layout.batch,
            layout.q_len,
            layout.num_heads,
            return_lse,
            sm_count or 1,
            layout.num_tokens if layout.compact else None,
        )
        _require_bytes("workspace_buffer", buffer, need, f"backend={backend!r}")
    counters = step.multi_ctas_kv_counter_buffer
    if counter_buffer and counters is not None:
        if (
            not is_tensor(counters)
            or counters.device != device
            or not counters.is_contiguous()
            or counters.data_ptr() % POINTER_ALIGNMENT
        ):
            needed = f"a contiguous tensor on {device}, {POINTER_ALIGNMENT}-byte aligned"
            fix = "allocate counter_bytes(...) once, zeroed, as uint8"
            invalid("multi_ctas_kv_counter_buffer", f"must be {needed}", counters, needed, fix)
        need = counter_bytes(max(layout.batch, 1), layout.num_heads, sm_count or 1)
        _require_bytes("multi_ctas_kv_counter_buffer", counters, need, "trtllm-gen's counters")


def _require_bytes(argument: str, buffer: Tensor, need: int, what: str) -> None:
    have = buffer.numel() * buffer.element_size()
    if have < need:
        raise InvalidInputError(
            f"{argument} is too small.",
            found=f"{have} bytes ({describe(buffer)}).",
            needed=f"{need} bytes for {what} and this batch.",
            fix=f"allocate at least {need} bytes once.",
            argument=argument,
            value=have,
        )
