"""A step that passed its checks: what the next one is held against, and how both are run.

Dimensions are those of `decode`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from .inputs import QueryLayout, Step
from .launch import pair, wrong_result
from .plans import Plan
from .validation import POINTER_ALIGNMENT

__all__ = ["Held", "Passed", "gone"]

# The keywords of a step, as far as each call has them.
_STEP = (
    *("query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_seq_len"),
    *("bmm1_scale", "bmm2_scale"),
)
_DCP = ("causal_seqlens_kv_global",)
_COMPACT = ("cum_seq_lens_q", "max_q_len")


# A weak reference, which gives None when its object is gone.
Held: TypeAlias = Callable[[], object]


class Passed:
    """What was found of a step that passed.

    The layers of a model pass the same tables, lengths and buffers, and a query and a cache of
    their own: a call with the same objects, and with a query and a cache of the same shapes,
    strides, dtypes and device, would pass again. Objects are held weakly; one that is resized in
    place is not noticed.
    """

    __slots__ = (
        "block_tables",
        "bounds",
        "cache_dtype",
        "cache_flat",
        "cache_form",
        "cache_shape",
        "cache_strides",
        "compact",
        "counted",
        "counters",
        "dcp",
        "debugging",
        "device",
        "kernel_out",
        "keywords",
        "layout",
        "lse_factor",
        "lse_shape",
        "max_q_len",
        "offsets",
        "out_shape",
        "plan",
        "query_dtype",
        "query_shape",
        "query_strides",
        "query_view",
        "return_lse",
        "rows",
        "seq_lens",
        "special",
        "workspace",
    )

    block_tables: Held
    bounds: Held | None
    cache_dtype: torch.dtype
    cache_flat: bool
    cache_form: object
    cache_shape: torch.Size
    cache_strides: tuple[int, ...] | None
    compact: bool
    counted: bool
    counters: Held | None
    dcp: bool
    debugging: bool
    device: torch.device
    kernel_out: tuple[int, ...]
    keywords: dict[str, object]
    layout: QueryLayout
    lse_factor: float | None
    lse_shape: torch.Size
    max_q_len: int | None
    offsets: Held | None
    out_shape: torch.Size
    plan: Plan
    query_dtype: torch.dtype
    query_shape: torch.Size
    query_strides: tuple[int, ...] | None
    query_view: tuple[int, ...] | None
    return_lse: bool
    rows: QueryLayout
    seq_lens: Held
    special: bool
    workspace: Held

    def __init__(
        self,
        step: Step,
        plan: Plan,
        layout: QueryLayout,
        rows: QueryLayout,
        kv_lora_rank: int,
        before: object,
        *,
        debugging: bool,
    ) -> None:
        query, cache = step.query, step.kv_cache
        self.plan, self.layout, self.rows = plan, layout, rows
        self.dcp = plan.dcp
        self.return_lse, self.lse_factor = plan.return_lse, plan.route.lse_factor
        self.debugging = debugging
        self.block_tables = _held(step.block_tables) or gone
        self.seq_lens = _held(step.seq_lens) or gone
        self.workspace = _held(step.workspace_buffer) or gone
        self.bounds = _held(step.causal_seqlens_kv_global)
        self.offsets = _held(step.cum_seq_lens_q)
        self.counters = _held(step.multi_ctas_kv_counter_buffer)
        self.max_q_len = step.max_q_len
        self.device = query.device
        self.query_shape, self.query_dtype = query.shape, query.dtype
        self.cache_shape, self.cache_dtype = cache.shape, cache.dtype
        # None where they follow from the shape, which is faster to see; those of one head or of a
        # page of one token do not.
        dense = query.is_contiguous() and layout.num_heads > 1
        self.query_strides = None if dense else query.stride()
        dense = cache.is_contiguous() and cache.shape[-2] > 1
        self.cache_strides = None if dense else cache.stride()
        form = (cache.shape, cache.dtype, cache.device, cache.stride())
        # The same object as before where it is equal, so that its identity tells.
        self.cache_form = before if form == before else form

        # With the keys that each call sets: to fill a copy is faster than to let it grow.
        set_later = (*_STEP, *(_DCP * plan.dcp), *(_COMPACT * rows.compact))
        self.keywords = plan.keywords | dict.fromkeys(set_later)
        self.cache_flat = cache.ndim == 3
        shape = (rows.batch, rows.q_len, layout.num_heads, query.shape[-1])
        # Rows that are flattened get another query altogether.
        same = rows.compact or query.shape == shape or rows is not layout
        self.query_view = None if same else shape
        self.lse_shape = query.shape[:-1]
        self.out_shape = torch.Size((*self.lse_shape, kv_lora_rank))
        # xqa knows no query tokens, and gives [B, H, D].
        front = shape[:1] if plan.xqa else shape[:2] if not rows.compact else query.shape[:1]
        self.kernel_out = (*front, layout.num_heads, kv_lora_rank)
        self.compact, self.counted = rows.compact, plan.route.counter_buffer
        self.special = plan.xqa or rows is not layout or not layout.num_tokens
        """Whether a call needs more than its arguments handed on."""

    def covers(
        self,
        query: Tensor,
        cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        workspace: Tensor,
        bounds: Tensor | None,
        offsets: Tensor | None,
        max_q_len: int | None,
        counters: Tensor | None,
        cache_known: bool = False,
    ) -> bool:
        """Return whether a step of these arguments would pass again.

        `cache_known` says that the cache was seen to be of `cache_form`.
        """
        try:
            # A dead reference gives None, which is not a tensor that was left out.
            return (
                block_tables is self.block_tables() is not None
                and seq_lens is self.seq_lens() is not None
                and workspace is self.workspace() is not None
                and (bounds is None if not self.bounds else bounds is self.bounds() is not None)
                and (offsets is None if not self.offsets else offsets is self.offsets() is not None)
                and (
                    counters is None
                    if not self.counters
                    else counters is self.counters() is not None
                )
                and (
                    max_q_len is self.max_q_len
                    or (type(max_q_len) is int and max_q_len == self.max_q_len)
                )
                and query.shape == self.query_shape
                and query.dtype is self.query_dtype
                and query.device == self.device
                and (
                    query.is_contiguous()
                    if self.query_strides is None
                    else query.stride() == self.query_strides
                )
                and not query.data_ptr() % POINTER_ALIGNMENT
                and (cache_known or self.covers_cache(cache))
            )
        except (AttributeError, RuntimeError):  # no tensor, or a sparse one
            return False

    def covers_cache(self, cache: Tensor) -> bool:
        """Return whether a cache is of the same form."""
        return (
            cache.shape == self.cache_shape
            and cache.dtype is self.cache_dtype
            and cache.device == self.device
            and (
                cache.is_contiguous()
                if self.cache_strides is None
                else cache.stride() == self.cache_strides
            )
            and not cache.data_ptr() % POINTER_ALIGNMENT
        )

    def shaped(
        self,
        answer: Tensor | tuple[Tensor, Tensor],
        out: Tensor | None,
        lse: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return a kernel's result in the query's layout, or raise.

        The kernel wrote into the caller's buffers, `out` and `lse`, if there are any: they are in
        the query's layout already.
        """
        found, state = pair(answer, return_lse=self.return_lse)
        try:
            out = found.view(*self.out_shape) if out is None else out
            lse = state.view(*self.lse_shape) if lse is None and state is not None else lse
        except RuntimeError as exc:
            shapes = f"out {[*self.out_shape]} and lse {[*self.lse_shape]}, up to views"
            raise wrong_result((found, state), shapes) from exc
        return out, lse


def _held(value: object) -> Held | None:
    return weakref.ref(value) if isinstance(value, Tensor) else None


def gone() -> None:
    """Stand for a reference whose object is gone."""
