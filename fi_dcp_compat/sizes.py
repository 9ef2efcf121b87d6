"""Bytes: the workspace that each backend needs, and trtllm-gen's counters."""

from __future__ import annotations

import torch
from torch import Tensor

from .abi import FlashInferABI
from .config import BACKENDS
from .errors import InvalidInputError
from .guards import Backend
from .inputs import QueryLayout, Step
from .limits import CUTE_DSL_TILE_ROWS, CUTE_DSL_WORKSPACE_DTYPES, TRTLLM_GEN_COUNTER_BYTES
from .validation import POINTER_ALIGNMENT, describe, invalid, is_tensor, require_int

__all__ = ["check_workspace", "counter_bytes", "min_workspace_bytes"]

_ROW_FLOATS = 512 + 1
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
    num_tokens: int | None = None,
) -> int:
    """Return the bytes below which FlashInfer refuses, or overruns, the workspace.

    On trtllm-gen the scratch for KV splits comes on top, of a size that no release tells: stacks
    allocate 128 MiB in all, 256 MiB with an LSE.

    On cute-dsl it is the need of the longest contexts, so that every rank of a DCP group, whose
    ``max_seq_len`` differ, needs the same.

    Parameters
    ----------
    backend : str
        "auto" is what auto picks untuned, trtllm-gen.
    abi : FlashInferABI
        The release: counters lie in the workspace up to 0.6.14, and the split cap grew in 0.7.2.
    batch, q_len, num_heads : int
        Requests, query tokens of each (``max_q_len`` for variable lengths) and query heads.
    sm_count : int
        Streaming multiprocessors of the GPU.
    num_tokens : int, optional
        Query tokens of a variable-length batch.

    Raises
    ------
    InvalidInputError
        A number is no int of at least 1, or the backend is none of decode_mla's.
    """
    if backend not in BACKENDS:
        needed = f"one of {', '.join(BACKENDS)}"
        invalid("backend", f"must be {needed}", backend, needed, "name one of those")
    _require_positive(batch=batch, q_len=q_len, num_heads=num_heads, sm_count=sm_count)
    return _needed_bytes(backend, abi, batch, q_len, num_heads, return_lse, sm_count, num_tokens)


def _needed_bytes(
    backend: str,
    abi: FlashInferABI,
    batch: int,
    q_len: int,
    num_heads: int,
    return_lse: bool,
    sm_count: int,
    num_tokens: int | None,
) -> int:
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
    features = abi.features
    if features.cute_dsl_compact_queries:
        tiles = -(-q_len * num_heads // CUTE_DSL_TILE_ROWS)
        busy = batch * tiles if tokens is None else max(1, min(tokens, batch * tiles))
        cap = 128 if features.splits_128 else 48 if features.splits_48 else 32
        splits = min(cap, max(1, sm_count // (2 * busy)))
    else:
        # Up to 0.6.15 a tile holds whole query tokens.
        tiles = q_len // (folded_tokens(num_heads, q_len) if features.cute_dsl_causal else 1)
        splits = min(32, max(1, sm_count // batch // (2 * tiles)))
    if splits == 1:
        return 0
    return batch * tiles * CUTE_DSL_TILE_ROWS * splits * _ROW_FLOATS * 4


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
        need = _needed_bytes(
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
