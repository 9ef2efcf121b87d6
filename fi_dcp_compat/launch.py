"""The launch: a step's keywords, the kernel's call, and what it may answer."""

from __future__ import annotations

from torch import Tensor

from .dcp import flatten_query_rows
from .describing import Binding
from .errors import FlashInferSignatureError, NotPreparedError
from .failures import import_failure
from .inputs import QueryLayout, Step
from .plans import Plan
from .validation import describe

__all__ = ["call_kernel", "kernel_scales", "step_arguments", "wrong_result"]

# The text of the RuntimeError that 0.7.4 raises (mla_decode.py:281).
_NOT_PREPARED = "must be prepared before CUDA graph capture"


def step_arguments(
    step: Step, layout: QueryLayout, rows: QueryLayout, plan: Plan
) -> dict[str, object]:
    """Return the keywords of one step; `rows` is `layout` as the kernel gets it."""
    query, block_tables, seq_lens = step.query, step.block_tables, step.seq_lens
    if rows is not layout:
        if step.cum_seq_lens_q is not None:
            block_tables, seq_lens, _ = flatten_query_rows(
                step.cum_seq_lens_q, layout.num_tokens, block_tables, seq_lens
            )
        else:
            block_tables = block_tables.repeat_interleave(layout.q_len, dim=0)
            seq_lens = seq_lens.repeat_interleave(layout.q_len)
    if not rows.compact and query.shape[:-2] != (rows.batch, rows.q_len):
        query = query.reshape(rows.batch, rows.q_len, layout.num_heads, query.shape[-1])
    arguments = plan.keywords | {
        "query": query,
        "workspace_buffer": step.workspace_buffer,
        "block_tables": block_tables,
        "seq_lens": seq_lens,
        # FlashInfer refuses 0, and a rank may hold no key of its batch.
        "max_seq_len": step.max_seq_len or 1,
    }
    if step.lse is not None:
        arguments["lse"] = step.lse.view(layout.num_tokens, layout.num_heads)
    if step.out is not None:
        shape = (rows.batch, layout.num_heads) if plan.xqa else query.shape[:-1]
        arguments["out"] = step.out.view(*shape, step.out.shape[-1])
    if rows.compact:
        arguments["cum_seq_lens_q"] = step.cum_seq_lens_q
        arguments["max_q_len"] = step.max_q_len
    if "enable_dcp" in plan.keywords:
        arguments["causal_seqlens_kv_global"] = step.causal_seqlens_kv_global
    elif plan.route.counter_buffer and step.multi_ctas_kv_counter_buffer is not None:
        arguments["multi_ctas_kv_counter_buffer"] = step.multi_ctas_kv_counter_buffer
    return arguments


def kernel_scales(
    plan: Plan, bmm1_scale: float | Tensor, bmm2_scale: float | Tensor
) -> tuple[float | Tensor, float | Tensor]:
    """Return the scales as the kernel means them."""
    if type(bmm1_scale) is int:
        bmm1_scale = _passed_on(bmm1_scale)
    if type(bmm2_scale) is int:
        bmm2_scale = _passed_on(bmm2_scale)
    if not plan.xqa:
        return bmm1_scale, bmm2_scale
    # It multiplies the scores by both (mla_sm120.cu:464), and takes an int for a tensor.
    bmm2_scale = float(bmm2_scale)
    return bmm1_scale / bmm2_scale, bmm2_scale


def _passed_on(scale: int) -> int | float:
    # torch's operations and ctypes take no int beyond 64 bits.
    return scale if scale < 2**63 else float(scale)


def call_kernel(binding: Binding, arguments: dict[str, object]) -> tuple[Tensor, Tensor | None]:
    """Call the kernel and return (out, lse or None), whatever form it answers in."""
    try:
        result = binding.kernel(**arguments)
    except RuntimeError as exc:
        if _NOT_PREPARED not in str(exc):
            raise
        raise _not_prepared(binding, arguments) from exc
    except (AttributeError, ImportError) as exc:
        # cute-dsl is imported by its first call, and may not fit the installed CuTe DSL.
        if "cutlass" not in str(exc):
            raise
        raise import_failure(exc) from exc
    if isinstance(result, tuple):
        return result if "return_lse" in arguments else (result[0], None)
    if "return_lse" not in arguments:
        return result, None
    raise wrong_result(result, "(out, lse) with return_lse=True")


def _not_prepared(binding: Binding, arguments: dict[str, object]) -> NotPreparedError:
    query, cache = describe(arguments["query"]), describe(arguments["kv_cache"])
    grows = binding.abi.features.max_seq_len_compiles
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
