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
from .backends import Config
from .dcp import flatten_query_rows
from .errors import FlashInferSignatureError, NotPreparedError
from .features import LseBase
from .guards import Backend, dtype_name
from .inputs import (
    QueryLayout,
    Step,
    cache_view,
    check_step,
    describe,
    invalid,
    query_layout,
    require_sinks,
)
from .probing import Binding
from .routing import Route, route
from .scales import require_scales
from .sizes import check_workspace

__all__ = ["MLADecoder", "Settings"]

# The text of the RuntimeError that 0.7.4 raises (mla_decode.py:281).
_NOT_PREPARED = "must be prepared before CUDA graph capture"


class Settings(NamedTuple):
    """What is known before the step, and the key under which a preparation is kept."""

    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    qk_nope_head_dim: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    dcp_world_size: int
    dcp_rank: int
    interleave_size: int
    causal: bool
    backend: Backend
    return_lse: bool
    lse_base: LseBase
    sinks: bool
    tensor_scales: bool
    skip_softmax: float | None
    enable_pdl: bool | None

    def config(self) -> Config:
        """Return the configuration as far as it is known: one head, one query token."""
        return Config(
            num_heads=1,
            q_len=1,
            page_size=self.page_size,
            dtype=dtype_name(self.dtype),
            kv_dtype=dtype_name(self.kv_dtype),
            dcp_world_size=self.dcp_world_size,
            interleave_size=self.interleave_size,
            causal=self.causal,
            backend=self.backend,
            return_lse=self.return_lse,
            sinks=self.sinks,
            skip_softmax=self.skip_softmax is not None,
            tensor_scales=self.tensor_scales,
            kv_lora_rank=self.kv_lora_rank,
            qk_rope_head_dim=self.qk_rope_head_dim,
        )


class _Gpu(NamedTuple):
    capability: tuple[int, int]
    sm_count: int


@cache
def _gpu(device: torch.device) -> _Gpu:
    properties = torch.cuda.get_device_properties(device)
    return _Gpu(torch.cuda.get_device_capability(device), properties.multi_processor_count)


class MLADecoder:
    """A decode call, prepared: build it with `prepare_decode_mla`, call `run` each step."""

    __slots__ = ("_binding", "_bmm1_scale", "_bmm2_scale", "_routes", "_settings", "_sinks")

    def __init__(
        self,
        binding: Binding,
        settings: Settings,
        bmm1_scale: float | Tensor = 1.0,
        bmm2_scale: float | Tensor | None = None,
        sinks: Tensor | Sequence[Tensor] | None = None,
    ) -> None:
        self._binding = binding
        self._settings = settings
        self._bmm1_scale = bmm1_scale
        self._bmm2_scale = bmm2_scale
        self._sinks = sinks
        self._routes: dict[tuple[object, ...], Route] = {}

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
        settings, abi = self._settings, self._binding.abi
        query = step.query
        layout = query_layout(step, settings.kv_lora_rank + settings.qk_rope_head_dim)
        device = query.device
        gpu = _gpu(device) if query.is_cuda else None
        if gpu is None and self._binding.genuine:
            invalid(
                "query",
                f"is on {device}, where FlashInfer has no kernel",
                query,
                "CUDA tensors",
                "move the tensors to a GPU, or pass backend='reference'",
            )
        path = self._route(layout, step.block_tables.shape[1], gpu)
        head_dim = query.shape[-1]
        cache = cache_view(step.kv_cache, settings.page_size, head_dim, settings.kv_dtype, device)
        out_dtype = self._out_dtype(path)
        check_step(
            step,
            layout,
            kv_lora_rank=settings.kv_lora_rank,
            out_dtype=out_dtype,
            dcp=settings.dcp_world_size > 1,
            return_lse=settings.return_lse,
            strided_tables=path.may_run == ("cute-dsl",),
        )
        check_workspace(
            step,
            layout,
            abi,
            backend=path.may_run[0],
            return_lse=settings.return_lse,
            counter_buffer=path.counter_buffer,
            sm_count=None if gpu is None else gpu.sm_count,
        )
        require_scales(bmm1_scale, bmm2_scale, settings.kv_dtype, device)
        shape = query.shape[:-1]
        if not layout.num_tokens:
            empty = query.new_empty((*shape, settings.kv_lora_rank), dtype=out_dtype)
            states = query.new_empty(shape, dtype=torch.float32) if settings.return_lse else None
            return empty if step.out is None else step.out, states if step.lse is None else step.lse
        checking = debug.enabled(query)
        if checking:
            debug.check_values(
                step, layout, cache.shape, settings.dcp_world_size, settings.dcp_rank
            )
        arguments = self._arguments(step, layout, path, cache)
        bmm2_scale = 1.0 if bmm2_scale is None else bmm2_scale
        # xqa multiplies the scores by both (mla_sm120.cu:464); trtllm-gen and cute-dsl do not.
        arguments["bmm1_scale"] = bmm1_scale / bmm2_scale if path.backend == "xqa" else bmm1_scale
        arguments["bmm2_scale"] = bmm2_scale
        if sinks is not None:
            arguments["sinks"] = require_sinks(sinks, layout.num_heads, device)
        result = self._call(arguments)
        out, lse = result if isinstance(result, tuple) else (result, None)
        if settings.return_lse and lse is None:
            raise FlashInferSignatureError(
                "The kernel returned no LSE although it was asked for one.",
                found=f"{describe(result)} from {abi.entry_point}.",
                needed="(out, lse) with return_lse=True.",
                fix="give the mock a return value of that form, or report the release.",
                argument="return_lse",
            )
        # The kernel wrote into the caller's buffers, which are in the query's layout already.
        out = step.out if step.out is not None else out.view(*shape, settings.kv_lora_rank)
        if lse is not None:
            lse = step.lse if step.lse is not None else lse.view(shape)
            if path.lse_factor is not None:
                lse.mul_(path.lse_factor)
        if checking:
            debug.check_result(step, layout, out, lse)
        return out, lse

    def _route(self, layout: QueryLayout, width: int, gpu: _Gpu | None) -> Route:
        settings = self._settings
        # Width and batch are keys only where a rule may refuse them, so the cache stays small.
        odd_width = width if width % max(1, 128 // settings.page_size) else None
        large_batch = layout.batch if layout.batch * (layout.q_len + 1) > 65535 else None
        capability = None if gpu is None else gpu.capability
        key = (layout.num_heads, layout.q_len, layout.compact, odd_width, large_batch, capability)
        path = self._routes.get(key)
        if path is None:
            config = settings.config()._replace(
                num_heads=layout.num_heads,
                q_len=layout.q_len,
                varlen=layout.compact,
                compute_capability=capability,
                block_table_width=odd_width,
                batch=large_batch,
            )
            path = self._routes[key] = route(self._binding.abi, config, settings.lse_base)
        return path

    def _out_dtype(self, path: Route) -> torch.dtype:
        dtype: torch.dtype = self._settings.dtype
        if path.backend == "reference" and dtype is torch.float32:
            return torch.float32
        if path.backend == "cute-dsl" and not self._binding.abi.features.cute_dsl_bf16_out:
            return torch.float16 if dtype is torch.float16 else torch.bfloat16
        return torch.bfloat16

    def _arguments(
        self, step: Step, layout: QueryLayout, path: Route, cache: Tensor
    ) -> dict[str, object]:
        settings = self._settings
        query, block_tables, seq_lens = step.query, step.block_tables, step.seq_lens
        batch, q_len, compact = layout.batch, layout.q_len, layout.compact
        if not settings.causal and (compact or q_len > 1):
            # FlashInfer has no causal flag: a one-token row sees the whole context.
            if step.cum_seq_lens_q is not None:
                block_tables, seq_lens, _ = flatten_query_rows(
                    step.cum_seq_lens_q, layout.num_tokens, block_tables, seq_lens
                )
            else:
                block_tables = block_tables.repeat_interleave(q_len, dim=0)
                seq_lens = seq_lens.repeat_interleave(q_len)
            batch, q_len, compact = layout.num_tokens, 1, False
        if not compact and query.shape[:-2] != (batch, q_len):
            query = query.reshape(batch, q_len, layout.num_heads, query.shape[-1])
        arguments: dict[str, object] = {
            "query": query,
            "kv_cache": cache,
            "workspace_buffer": step.workspace_buffer,
            "qk_nope_head_dim": settings.qk_nope_head_dim,
            "kv_lora_rank": settings.kv_lora_rank,
            "qk_rope_head_dim": settings.qk_rope_head_dim,
            "block_tables": block_tables,
            "seq_lens": seq_lens,
            # FlashInfer refuses 0, and a rank may hold no key of its batch.
            "max_seq_len": step.max_seq_len or 1,
            "backend": path.backend,
        }
        if settings.return_lse:
            arguments["return_lse"] = True
            if step.lse is not None:
                arguments["lse"] = step.lse.view(layout.num_tokens, layout.num_heads)
            if path.return_lse_base is not None:
                arguments["return_lse_base"] = path.return_lse_base
        if step.out is not None:
            out = step.out
            shape = query.shape[:-1] if path.backend != "xqa" else (batch, layout.num_heads)
            arguments["out"] = out if compact else out.view(*shape, out.shape[-1])
        if compact:
            arguments["cum_seq_lens_q"] = step.cum_seq_lens_q
            arguments["max_q_len"] = step.max_q_len
        if settings.dcp_world_size > 1:
            arguments["enable_dcp"] = True
            arguments["cp_world"] = settings.dcp_world_size
            arguments["cp_rank"] = settings.dcp_rank
            arguments["causal_seqlens_kv_global"] = step.causal_seqlens_kv_global
        elif path.counter_buffer and step.multi_ctas_kv_counter_buffer is not None:
            arguments["multi_ctas_kv_counter_buffer"] = step.multi_ctas_kv_counter_buffer
        if settings.skip_softmax is not None:
            arguments["skip_softmax_threshold_scale_factor"] = settings.skip_softmax
        if settings.enable_pdl is not None:
            arguments["enable_pdl"] = settings.enable_pdl
        return arguments

    def _call(self, arguments: dict[str, object]) -> Tensor | tuple[Tensor, Tensor]:
        try:
            return self._binding.kernel(**arguments)
        except RuntimeError as exc:
            if _NOT_PREPARED not in str(exc):
                raise
            query = arguments["query"]
            grows = self._binding.abi.features.max_seq_len_compiles
            raise NotPreparedError(
                "FlashInfer would compile this kernel inside a CUDA-graph capture.",
                found=f"a first call of query {describe(query)}, page_size="
                f"{self._settings.page_size}, dcp_world_size={self._settings.dcp_world_size}, "
                f"max_seq_len={arguments['max_seq_len']} under capture.",
                needed="a kernel compiled before: one per batch, q_len, heads, page size, dtype, "
                "world size" + (" and range of max_seq_len." if grows else "."),
                fix="run the same call eagerly once before capturing"
                + (", and keep max_seq_len constant per captured batch." if grows else "."),
                argument="query",
                value=describe(query),
            ) from exc
