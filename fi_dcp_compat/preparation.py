"""The preparation: what is static is routed and bound once; each step is checked and run.

Dimensions are those of `decode`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from . import debug
from .describing import Binding, Kernel
from .guards import drift_reason
from .inputs import (
    QueryLayout,
    Step,
    check_cache,
    check_own,
    check_shared,
    query_layout,
    require_sinks,
)
from .known_issues import warn_of
from .launch import flattened, kernel_scales
from .limits import CUTE_DSL_TILE_ROWS, GRID_Y_MAX, TABLE_TOKENS
from .passed import Passed
from .plans import Plan, Settings, make_plan
from .scales import FP8, require_scales
from .sizes import check_workspace
from .validation import invalid

__all__ = ["Preparation", "preparation_for"]


class _Gpu(NamedTuple):
    capability: tuple[int, int]
    sm_count: int


@cache
def _gpu(device: torch.device) -> _Gpu:
    properties = torch.cuda.get_device_properties(device)  # pyright: ignore[reportUnknownVariableType]
    return _Gpu(torch.cuda.get_device_capability(device), properties.multi_processor_count)


class Own(NamedTuple):
    """What one call brings of its own."""

    step: Step
    keywords: dict[str, object]
    """Those that the kernel gets otherwise than they were given, or not in each call."""
    checking: bool
    """Whether the values of the result are checked, too."""


# Parts of a batch, or groups of caches, alternate in each layer.
_STEPS_KEPT = 4
# Query lengths and head counts that a model alternates between.
_PLANS_KEPT = 4
_MOST_KEPT = 1024
_Key = TypeVar("_Key")
_Kept = TypeVar("_Kept")


class Preparation:
    """What calls with the same settings have in common, whatever their scales; layers share it."""

    __slots__ = (
        "_cache_form",
        "_older",
        "_plans",
        "_settings",
        "binding",
        "kernel",
        "passed",
        "quantised",
    )

    def __init__(self, binding: Binding, settings: Settings) -> None:
        self.binding: Binding = binding
        self.kernel: Kernel = binding.kernel
        self.quantised: bool = settings.kv_dtype is FP8
        self.passed: Passed | None = None
        self._cache_form: object = None
        self._older: tuple[Passed, ...] = ()
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._settings = settings

    def look_at(self, step: Step) -> Passed:
        """Check what the calls of a step have in common, and remember it."""
        for older in self._older:
            if _covers(older, step):
                self.passed = older
                return older
        settings, binding, query = self._settings, self.binding, step.query
        head_dim = settings.kv_lora_rank + settings.qk_rope_head_dim
        layout = query_layout(step, head_dim)
        if query.dtype is not settings.dtype:
            needed = f"{settings.dtype}, which the decoder was prepared for"
            invalid("query", f"must be {needed}", query, needed, "prepare another decoder")
        device = query.device
        gpu = _gpu(device) if query.is_cuda else None
        # What no GPU would mend comes first.
        plan = self._plan(layout, step.block_tables.shape[1], gpu)
        if gpu is None and binding.genuine:
            invalid(
                "query",
                f"is on {device}, where FlashInfer has no kernel",
                query,
                "CUDA tensors",
                "move the tensors to a GPU, or pass backend='reference'",
            )
        check_cache(step.kv_cache, settings.page_size, head_dim, settings.kv_dtype, device)
        if plan.whole_heads and query.stride(-3) != layout.num_heads * query.stride(-2):
            # It folds query tokens into heads by this stride (known_issues, sliced_heads_folded).
            needed = "one query token's heads right behind the last one's"
            invalid("query", f"must have {needed}", query, needed, "pass query.contiguous()")
        check_shared(step, layout, dcp=plan.dcp, strided_tables=plan.strided_tables)
        rows = layout
        if not settings.causal and (layout.compact or layout.q_len > 1):
            # FlashInfer has no causal flag: a one-token row sees the whole context.
            rows = layout._replace(batch=layout.num_tokens, q_len=1, compact=False)
        check_workspace(
            step,
            rows,
            binding.abi,
            backends=plan.route.may_run,
            return_lse=settings.return_lse,
            counter_buffer=plan.route.counter_buffer,
            sm_count=None if gpu is None else gpu.sm_count,
        )
        debugging = debug.requested()
        passed = Passed(
            step, plan, layout, rows, settings.kv_lora_rank, self._cache_form, debugging=debugging
        )
        self._cache_form = passed.cache_form
        self._require(passed.keywords)
        # In debug mode the environment is asked again.
        self.passed = None if debugging else passed
        self._older = () if debugging else (passed, *self._older[: _STEPS_KEPT - 1])
        return passed

    def found(self, step: Step) -> Passed:
        """Return what was found of a step, after a look at what is new of it."""
        passed = self.passed
        return passed if passed is not None and _covers(passed, step) else self.look_at(step)

    def own(
        self,
        step: Step,
        passed: Passed,
        bmm1_scale: float | Tensor,
        bmm2_scale: float | Tensor | None,
        sinks: Tensor | Sequence[Tensor] | None,
    ) -> Own:
        """Check what a call brings of its own, and the values where that is asked for."""
        settings, plan = self._settings, passed.plan
        check_own(
            step,
            kv_lora_rank=settings.kv_lora_rank,
            out_dtype=plan.out_dtype,
            dcp=plan.dcp,
            return_lse=settings.return_lse,
        )
        require_scales(bmm1_scale, bmm2_scale, settings.kv_dtype, passed.device)
        if sinks is not None:
            require_sinks(sinks, passed.layout.num_heads, passed.device)
        # FlashInfer refuses 0, and a rank may hold no key of its batch.
        keywords: dict[str, object] = {"max_seq_len": step.max_seq_len or 1}
        keywords["bmm1_scale"], keywords["bmm2_scale"] = kernel_scales(
            plan, bmm1_scale, 1.0 if bmm2_scale is None else bmm2_scale
        )
        if step.out is not None:
            keywords["out"] = step.out.view(*passed.kernel_out)
        if step.lse is not None:
            keywords["lse"] = step.lse.view(passed.layout.num_tokens, passed.layout.num_heads)
        if sinks is not None:
            keywords["sinks"] = sinks if isinstance(sinks, Tensor) else sinks[0]
        if passed.rows is not passed.layout:
            keywords |= flattened(step, passed.layout, passed.rows)
        self._require(keywords)
        checking = passed.layout.num_tokens > 0 and (passed.debugging or debug.asked_here())
        return Own(step, keywords, checking and self._check_values(step, passed))

    def _require(self, keywords: dict[str, object]) -> None:
        """Raise where the release has lost a keyword that it should have."""
        if not self.binding.keywords.issuperset(keywords):
            abi = self.binding.abi
            raise drift_reason(abi, abi.lacks(*keywords)).exception()

    def _check_values(self, step: Step, passed: Passed) -> bool:
        """Check values where that is possible, and return whether it was."""
        if not debug.possible(step.query):
            return False
        settings = self._settings
        world, rank = settings.dcp_world_size, settings.dcp_rank
        debug.check_values(step, passed.layout, settings.page_size, world, rank)
        return True

    def check_result(self, step: Step, passed: Passed, out: Tensor, lse: Tensor | None) -> None:
        debug.check_result(step, passed.layout, self._settings.dcp_world_size, out, lse)

    def empty(self, step: Step, passed: Passed) -> tuple[Tensor, Tensor | None]:
        """Return what there is for a batch without query tokens, which no kernel takes."""
        settings, query, out, lse = self._settings, step.query, step.out, step.lse
        shape = query.shape[:-1]
        if out is None:
            out = query.new_empty((*shape, settings.kv_lora_rank), dtype=passed.plan.out_dtype)
        if lse is None and settings.return_lse:
            lse = query.new_empty(shape, dtype=torch.float32)
        return out, lse

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
            plan = make_plan(self.binding.abi, settings, config)
            if self.binding.genuine:  # a mock has none of FlashInfer's faults
                warn_of(self.binding.abi, plan.route.backend, compact=layout.compact)
            keep(self._plans, key, plan, _PLANS_KEPT)
        return plan


def _covers(passed: Passed, step: Step) -> bool:
    return passed.covers(
        step.query,
        step.kv_cache,
        step.block_tables,
        step.seq_lens,
        step.workspace_buffer,
        step.causal_seqlens_kv_global,
        step.cum_seq_lens_q,
        step.max_q_len,
        step.multi_ctas_kv_counter_buffer,
    )


def preparation_for(binding: Binding, settings: Settings) -> Preparation:
    """Return the preparation of these settings, the same as long as it is kept."""
    preparation = binding.preparations.get(settings)
    if preparation is None:
        preparation = Preparation(binding, settings)
        keep(binding.preparations, settings, preparation)
    return preparation


def keep(cache: dict[_Key, _Kept], key: _Key, value: _Kept, most: int = _MOST_KEPT) -> None:
    """Put `value` in, and the oldest out where there are too many."""
    for oldest in list(cache)[: 1 - most]:
        cache.pop(oldest, None)
    cache[key] = value
