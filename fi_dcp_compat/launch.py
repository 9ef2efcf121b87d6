"""The launch: a step's keywords, the kernel's call, and what it may answer."""

from __future__ import annotations

from torch import Tensor

from .abi import FlashInferABI
from .dcp import flatten_query_rows
from .describing import Binding
from .errors import FlashInferSignatureError, NotPreparedError
from .failures import import_failure
from .inputs import QueryLayout, Step
from .plans import Plan
from .validation import describe

__all__ = [
    "EXPLAINED",
    "call_kernel",
    "flattened",
    "kernel_scales",
    "pair",
    "raise_explained",
    "wrong_result",
]

# The text of the RuntimeError that 0.7.4 raises (mla_decode.py:281).
_NOT_PREPARED = "must be prepared before CUDA graph capture"


def flattened(step: Step, layout: QueryLayout, rows: QueryLayout) -> dict[str, Tensor]:
    """Return the query, the tables and the lengths with each query token as a request."""
    query, block_tables, seq_lens = step.query, step.block_tables, step.seq_lens
    if step.cum_seq_lens_q is not None:
        block_tables, seq_lens, _ = flatten_query_rows(
            step.cum_seq_lens_q, layout.num_tokens, block_tables, seq_lens
        )
    else:
        block_tables = block_tables.repeat_interleave(layout.q_len, dim=0)
        seq_lens = seq_lens.repeat_interleave(layout.q_len)
    query = query.reshape(rows.batch, rows.q_len, *query.shape[-2:])
    return {"query": query, "block_tables": block_tables, "seq_lens": seq_lens}


def kernel_scales(
    plan: Plan, bmm1_scale: float | Tensor, bmm2_scale: float | Tensor
) -> tuple[float | Tensor, float | Tensor]:
    """Return the scales as the kernel means them."""
    # Neither torch's operations nor ctypes take an int beyond 64 bits, and 1 finds what 1.0 left.
    bmm1_scale = bmm1_scale if isinstance(bmm1_scale, Tensor) else float(bmm1_scale)
    bmm2_scale = bmm2_scale if isinstance(bmm2_scale, Tensor) else float(bmm2_scale)
    if not plan.xqa:
        return bmm1_scale, bmm2_scale
    # It multiplies the scores by both (mla_sm120.cu:464), and takes an int for a tensor.
    bmm2_scale = float(bmm2_scale)
    return bmm1_scale / bmm2_scale, bmm2_scale


def call_kernel(binding: Binding, arguments: dict[str, object]) -> tuple[Tensor, Tensor | None]:
    """Call the kernel and return (out, lse or None), whatever form it answers in."""
    try:
        answer = binding.kernel(**arguments)
    except EXPLAINED as exc:
        raise_explained(exc, binding.abi, arguments)
        raise
    return pair(answer, return_lse="return_lse" in arguments)


# What `raise_explained` knows of.
EXPLAINED = (RuntimeError, AttributeError, ImportError)


def raise_explained(exc: Exception, abi: FlashInferABI, arguments: dict[str, object]) -> None:
    """Raise what a kernel's failure means, if that is known."""
    text = str(exc)
    if isinstance(exc, RuntimeError):
        if _NOT_PREPARED in text:
            raise _not_prepared(abi, arguments) from exc
    elif "cutlass" in text:
        # cute-dsl is imported by its first call, and may not fit the installed CuTe DSL.
        raise import_failure(exc) from exc


def pair(
    answer: Tensor | tuple[Tensor, Tensor], *, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Return (out, lse or None), whatever form the kernel answered in."""
    parts = tuple(answer) if isinstance(answer, (tuple, list)) else (answer,)
    if not return_lse:
        parts = parts[:1]
    if len(parts) != 1 + return_lse or not all(isinstance(part, Tensor) for part in parts):
        raise wrong_result(answer, "(out, lse) with return_lse=True" if return_lse else "out")
    return parts[0], parts[-1] if return_lse else None


def _not_prepared(abi: FlashInferABI, arguments: dict[str, object]) -> NotPreparedError:
    query, cache = describe(arguments["query"]), describe(arguments["kv_cache"])
    grows = abi.features.max_seq_len_compiles
    return NotPreparedError(
        "FlashInfer would compile this kernel inside a CUDA-graph capture.",
        found=f"a first call under capture: query {query}, kv_cache {cache}, "
        f"cp_world={arguments.get('cp_world', 1)}, max_seq_len={arguments['max_seq_len']}.",
        needed="a kernel compiled before: one per batch, q_len, heads, page size, dtype, world size"
        + (" and range of max_seq_len." if grows else "."),
        fix="run the same call eagerly once before capturing"
        + (", and keep max_seq_len constant per captured batch." if grows else "."),
        argument="query",
        value=query,
    )


def wrong_result(result: object, needed: str) -> FlashInferSignatureError:
    """Build the error for an answer of another form or shape."""
    return FlashInferSignatureError(
        "The kernel returned something else than it was asked for.",
        found=f"{describe(result)}.",
        needed=f"{needed}.",
        fix="give the mock a return value of that form, or report the release.",
        argument="kernel",
    )
