"""The prepared decoder: what is known at start-up is bound once, each step is checked and run.

Dimensions are those of `decode`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from . import debug
from .describing import Binding
from .guards import drift_reason
from .inputs import (
    QueryLayout,
    Step,
    Vetted,
    cache_view,
    check_own,
    check_shared,
    query_layout,
    require_sinks,
)
from .known_issues import warn_of
from .launch import call_kernel, kernel_scales, step_arguments, wrong_result
from .limits import CUTE_DSL_TILE_ROWS, GRID_Y_MAX, TABLE_TOKENS
from .plans import Plan, Settings, make_plan
from .scales import require_scales
from .sizes import check_workspace
from .validation import invalid

__all__ = ["MLADecoder", "decoder_for"]


class _Gpu(NamedTuple):
    capability: tuple[int, int]
    sm_count: int


@cache
def _gpu(device: torch.device) -> _Gpu:
    properties = torch.cuda.get_device_properties(device)  # pyright: ignore[reportUnknownVariableType]
    return _Gpu(torch.cuda.get_device_capability(device), properties.multi_processor_count)


class MLADecoder:
    """A decode call, prepared: build it with `prepare_decode_mla`, call `run` each step."""

    __slots__ = (
        "_binding",
        "_bmm1_scale",
        "_bmm2_scale",
        "_checking",
        "_plans",
        "_settings",
        "_sinks",
        "_vetted",
    )

    def __init__(
        self,
        binding: Binding,
        settings: Settings,
        bmm1_scale: float | Tensor = 1.0,
        bmm2_scale: float | Tensor | None = None,
        sinks: Tensor | Sequence[Tensor] | None = None,
        *,
        checking: bool = False,
    ) -> None:
        self._binding = binding
        self._checking = checking
        self._vetted = Vetted()
        self._settings = settings
        self._bmm1_scale = bmm1_scale
        self._bmm2_scale = bmm2_scale
        self._sinks = sinks
        self._plans: dict[tuple[object, ...], Plan] = {}

    def run(
        self,
        query: Tensor,
        kv_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        max_seq_len: int,
        workspace_buffer: Tensor,
        *,
        causal_seqlens_kv_global: Tensor | None = None,
        cum_seq_lens_q: Tensor | None = None,
        max_q_len: int | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        multi_ctas_kv_counter_buffer: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Decode one step; arguments and errors are those of `decode_mla`.

        Returns
        -------
        (Tensor, Tensor or None)
            ``out`` and the LSE; None in its place without ``return_lse`` or DCP.
        """
        step = Step(
            query,
            kv_cache,
            block_tables,
            seq_lens,
            max_seq_len,
            workspace_buffer,
            causal_seqlens_kv_global,
            cum_seq_lens_q,
            max_q_len,
            out,
            lse,
            multi_ctas_kv_counter_buffer,
        )
        return self.decode(step, self._bmm1_scale, self._bmm2_scale, self._sinks)

    def decode(
        self,
        step: Step,
        bmm1_scale: float | Tensor,
        bmm2_scale: float | Tensor | None,
        sinks: Tensor | Sequence[Tensor] | None,
    ) -> tuple[Tensor, Tensor | None]:
        plan, layout, rows, cache, checking = self.vet(step, bmm1_scale, bmm2_scale, sinks)
        settings, query, shape = self._settings, step.query, step.query.shape[:-1]
        if not layout.num_tokens:
            empty = query.new_empty((*shape, settings.kv_lora_rank), dtype=plan.out_dtype)
            states = query.new_empty(shape, dtype=torch.float32) if settings.return_lse else None
            return empty if step.out is None else step.out, states if step.lse is None else step.lse
        arguments = step_arguments(step, layout, rows, plan)
        arguments["kv_cache"] = cache
        bmm2_scale = 1.0 if bmm2_scale is None else bmm2_scale
        arguments["bmm1_scale"], arguments["bmm2_scale"] = kernel_scales(
            plan, bmm1_scale, bmm2_scale
        )
        if sinks is not None:
            arguments["sinks"] = sinks if isinstance(sinks, Tensor) else sinks[0]
        if not plan.known >= arguments.keys():
            abi = self._binding.abi
            raise drift_reason(abi, abi.lacks(*arguments)).exception()
        out, lse = call_kernel(self._binding, arguments)
        # The kernel wrote into the caller's buffers, which are in the query's layout already.
        try:
            out = step.out if step.out is not None else out.view(*shape, settings.kv_lora_rank)
            if lse is not None:
                lse = step.lse if step.lse is not None else lse.view(shape)
        except RuntimeError as exc:
            shapes = f"out {[*shape, settings.kv_lora_rank]} and lse {list(shape)}, up to views"
            raise wrong_result((out, lse), shapes) from exc
        if lse is not None and plan.route.lse_factor is not None:
            lse.mul_(plan.route.lse_factor)
        if checking:
            debug.check_result(step, layout, settings.dcp_world_size, out, lse)
        return out, lse

    def vet(
        self,
        step: Step,
        bmm1_scale: float | Tensor,
        bmm2_scale: float | Tensor | None,
        sinks: Tensor | Sequence[Tensor] | None,
    ) -> tuple[Plan, QueryLayout, QueryLayout, Tensor, bool]:
        """Raise unless the step can run.

        Returns
        -------
        (Plan, QueryLayout, QueryLayout, Tensor, bool)
            The plan, the query's layout, the rows that are launched, the cache in 4-D, and
            whether values are checked.
        """
        settings, query = self._settings, step.query
        layout = query_layout(step, settings.kv_lora_rank + settings.qk_rope_head_dim)
        if query.dtype is not settings.dtype:
            needed = f"{settings.dtype}, which the decoder was prepared for"
            invalid("query", f"must be {needed}", query, needed, "prepare another decoder")
        device = query.device
        gpu = _gpu(device) if query.is_cuda else None
        # What no GPU would mend comes first.
        plan = self._plan(layout, step.block_tables.shape[1], gpu)
        if gpu is None and self._binding.genuine:
            invalid(
                "query",
                f"is on {device}, where FlashInfer has no kernel",
                query,
                "CUDA tensors",
                "move the tensors to a GPU, or pass backend='reference'",
            )
        cache, rows = self._checked(step, layout, plan, gpu)
        require_scales(bmm1_scale, bmm2_scale, settings.kv_dtype, device)
        if sinks is not None:
            require_sinks(sinks, layout.num_heads, device)
        world, rank = settings.dcp_world_size, settings.dcp_rank
        checking = layout.num_tokens > 0 and debug.enabled(query, requested=self._checking)
        if checking:
            debug.check_values(step, layout, cache.shape, world, rank)
        return plan, layout, rows, cache, checking

    def _checked(
        self, step: Step, layout: QueryLayout, plan: Plan, gpu: _Gpu | None
    ) -> tuple[Tensor, QueryLayout]:
        """Check the step's tensors; return the cache in 4-D and the query's rows to launch."""
        settings, path = self._settings, plan.route
        head_dim = step.query.shape[-1]
        cache = cache_view(
            step.kv_cache, settings.page_size, head_dim, settings.kv_dtype, step.query.device
        )
        query, dcp = step.query, settings.dcp_world_size > 1
        if plan.whole_heads and query.stride(-3) != layout.num_heads * query.stride(-2):
            # It folds query tokens into heads by this stride (known_issues, sliced_heads_folded).
            needed = "one query token's heads right behind the last one's"
            invalid("query", f"must have {needed}", query, needed, "pass query.contiguous()")
        check_own(
            step,
            kv_lora_rank=settings.kv_lora_rank,
            out_dtype=plan.out_dtype,
            dcp=dcp,
            return_lse=settings.return_lse,
        )
        rows = layout
        if not settings.causal and (layout.compact or layout.q_len > 1):
            # FlashInfer has no causal flag: a one-token row sees the whole context.
            rows = layout._replace(batch=layout.num_tokens, q_len=1, compact=False)
        if not self._vetted.covers(plan, layout, step):
            check_shared(step, layout, dcp=dcp, strided_tables=plan.strided_tables)
            check_workspace(
                step,
                rows,
                self._binding.abi,
                backends=path.may_run,
                return_lse=settings.return_lse,
                counter_buffer=path.counter_buffer,
                sm_count=None if gpu is None else gpu.sm_count,
            )
            self._vetted = Vetted(plan, layout, step)
        return cache, rows

    def _plan(self, layout: QueryLayout, width: int, gpu: _Gpu | None) -> Plan:
        settings = self._settings
        # Width and batch are keys only where a rule may refuse them, so the cache stays small.
        odd_width = width if width % max(1, TABLE_TOKENS // max(1, settings.page_size)) else None
        tiles = layout.batch * layout.q_len * (layout.num_heads // CUTE_DSL_TILE_ROWS + 1)
        large_batch = layout.batch if tiles > GRID_Y_MAX else None
        capability = None if gpu is None else gpu.capability
        key = (layout.num_heads, layout.q_len, layout.compact, odd_width, large_batch, capability)
        plan = self._plans.get(key)
        if plan is None:
            config = settings.config()._replace(
                num_heads=layout.num_heads,
                q_len=layout.q_len,
                varlen=layout.compact,
                compute_capability=capability,
                block_table_width=odd_width,
                batch=large_batch,
            )
            plan = make_plan(self._binding.abi, settings, config)
            if self._binding.genuine:  # a mock has none of FlashInfer's faults
                warn_of(self._binding.abi, plan.route.backend, compact=layout.compact)
            self._plans[key] = plan
        return plan


_MOST_KEPT = 256


def decoder_for(binding: Binding, settings: Settings, checking: bool) -> MLADecoder:
    """Return the decoder of these settings; each call brings its own scales and sinks."""
    key = (settings, checking)
    found = binding.decoders.get(key)
    if isinstance(found, MLADecoder):
        return found
    for oldest in list(binding.decoders)[: 1 - _MOST_KEPT]:
        binding.decoders.pop(oldest, None)
    decoder = MLADecoder(binding, settings, checking=checking)
    binding.decoders[key] = decoder
    return decoder
