"""The prepared decoder, for what a stack knows at start-up, and its call.

Dimensions are those of `decode`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from . import debug
from .dcp import check_ranks
from .errors import raise_first
from .features import LseBase
from .guards import Backend, config_reasons
from .inputs import Step
from .launch import EXPLAINED, raise_explained
from .lse import check_lse_base, scale_lse
from .passed import Held, gone
from .plans import Settings, bind, check_dtypes, check_settings
from .preparation import Preparation, preparation_for
from .scales import are_plain, require_scales, skip_softmax_factor

__all__ = ["MLADecoder", "prepare_decode_mla"]


class MLADecoder:
    """A decode call, prepared: build it with `prepare_decode_mla`, call `run` each step."""

    __slots__ = ("_bmm1_scale", "_bmm2_scale", "_preparation", "_seen", "_sinks", "plain")

    def __init__(
        self,
        preparation: Preparation,
        bmm1_scale: float | Tensor,
        bmm2_scale: float | Tensor | None,
        sinks: Tensor | Sequence[Tensor] | None,
    ) -> None:
        self._preparation = preparation
        if bmm2_scale is None and not preparation.quantised:
            bmm2_scale = 1.0
        self._bmm1_scale = bmm1_scale
        self._bmm2_scale = bmm2_scale
        self._sinks = sinks
        self._seen: tuple[Held, object] = (gone, None)
        # Without a scale an fp8 cache's call is refused, when all else was looked at.
        self.plain: bool = sinks is None and are_plain(bmm1_scale, self._bmm2_scale)

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
        # Each layer of each step comes through here: a tenth of a microsecond counts.
        preparation = self._preparation
        passed = preparation.passed
        # A layer's own decoder need not look at its cache each time.
        seen, form = self._seen
        known = passed is not None and form is passed.cache_form and kv_cache is seen() is not None
        if passed is not None and not passed.covers(
            query,
            kv_cache,
            block_tables,
            seq_lens,
            workspace_buffer,
            causal_seqlens_kv_global,
            cum_seq_lens_q,
            max_q_len,
            multi_ctas_kv_counter_buffer,
            known,
        ):
            passed = None
        own = None
        if (
            passed is None
            or passed.special
            or not self.plain
            or out is not None
            or lse is not None
            or type(max_seq_len) is not int
            or max_seq_len < 1
            or debug.asked_here()
        ):
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
            if passed is None:
                passed = preparation.look_at(step)
            scales = (self._bmm1_scale, self._bmm2_scale)
            own = preparation.own(step, passed, *scales, self._sinks)
            if not passed.layout.num_tokens:
                return preparation.empty(step, passed)

        if not known and (seen() is None or seen() is kv_cache):
            self._seen = (weakref.ref(kv_cache), passed.cache_form)

        arguments = passed.keywords.copy()
        view = passed.query_view
        arguments["query"] = query if view is None else query.view(*view)
        arguments["kv_cache"] = kv_cache.unsqueeze(1) if passed.cache_flat else kv_cache
        arguments["workspace_buffer"] = workspace_buffer
        arguments["block_tables"] = block_tables
        arguments["seq_lens"] = seq_lens
        arguments["max_seq_len"] = max_seq_len
        arguments["bmm1_scale"] = self._bmm1_scale
        arguments["bmm2_scale"] = self._bmm2_scale
        if passed.dcp:
            arguments["causal_seqlens_kv_global"] = causal_seqlens_kv_global
        elif passed.counted and multi_ctas_kv_counter_buffer is not None:
            arguments["multi_ctas_kv_counter_buffer"] = multi_ctas_kv_counter_buffer
        if passed.compact:
            arguments["cum_seq_lens_q"] = cum_seq_lens_q
            arguments["max_q_len"] = max_q_len
        if own is not None:
            arguments.update(own.keywords)
        try:
            answer = preparation.kernel(**arguments)
        except EXPLAINED as exc:
            raise_explained(exc, preparation.binding.abi, arguments)
            raise

        if own is not None or not passed.return_lse:
            out, lse = passed.shaped(answer, out, lse)
        else:
            try:
                found, state = answer
                out = found if found.shape == passed.out_shape else found.view(*passed.out_shape)
                lse = state if state.shape == passed.lse_shape else state.view(*passed.lse_shape)
            except (AttributeError, RuntimeError, TypeError, ValueError):
                out, lse = passed.shaped(answer, None, None)  # which says what is wrong
        if lse is not None and passed.lse_factor is not None:
            scale_lse(lse, passed.lse_factor)
        if own is not None and own.checking:
            preparation.check_result(own.step, passed, out, lse)
        return out, lse


def prepare_decode_mla(
    *,
    page_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    qk_nope_head_dim: int = 128,
    kv_lora_rank: int = 512,
    qk_rope_head_dim: int = 64,
    dcp_world_size: int = 1,
    dcp_rank: int = 0,
    interleave_size: int = 1,
    causal: bool = True,
    backend: Backend = "auto",
    bmm1_scale: float | Tensor,
    bmm2_scale: float | Tensor | None = None,
    return_lse: bool = False,
    lse_base: LseBase = "e",
    sinks: Tensor | Sequence[Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
) -> MLADecoder:
    """Check, route and bind at start-up what does not change from step to step.

    The arguments and errors are those of `decode_mla`; the head count and the query length come
    with each step's query. The kernel is looked up now, once.

    Returns
    -------
    MLADecoder, whose ``run`` takes a step's tensors and returns (out, lse or None)
    """
    check_ranks(dcp_world_size, dcp_rank, interleave_size)
    check_lse_base(lse_base)
    check_settings(causal, return_lse, enable_pdl, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim)
    check_dtypes(dtype=dtype, kv_dtype=dtype if kv_dtype is None else kv_dtype)
    binding = bind(backend)
    settings = Settings(
        page_size=page_size,
        dtype=dtype,
        kv_dtype=dtype if kv_dtype is None else kv_dtype,
        qk_nope_head_dim=qk_nope_head_dim,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        dcp_world_size=dcp_world_size,
        dcp_rank=dcp_rank,
        interleave_size=interleave_size,
        causal=causal,
        backend=backend,
        return_lse=return_lse or dcp_world_size > 1,
        lse_base=lse_base,
        sinks=sinks is not None,
        tensor_scales=isinstance(bmm1_scale, Tensor) or isinstance(bmm2_scale, Tensor),
        skip_softmax=skip_softmax_factor(skip_softmax_threshold_scale_factor),
        enable_pdl=enable_pdl,
    )
    raise_first(config_reasons(binding.abi, settings.config()))
    require_scales(bmm1_scale, bmm2_scale, settings.kv_dtype)
    return MLADecoder(preparation_for(binding, settings), bmm1_scale, bmm2_scale, sinks)
