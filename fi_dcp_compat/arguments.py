"""The keywords of the calls for type checkers: those that do not decide the result's type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from typing_extensions import Required

    from .features import LseBase
    from .guards import Backend

__all__ = ["CallArguments", "FlashInferArguments", "RankArguments"]

REQUIRED = ("workspace_buffer", "block_tables", "seq_lens", "max_seq_len", "bmm1_scale")


class RankArguments(TypedDict, total=False):
    """What `decode_mla_dcp` hands on to `decode_mla`."""

    workspace_buffer: Required[Tensor]
    block_tables: Required[Tensor]
    seq_lens: Required[Tensor]
    max_seq_len: Required[int]
    bmm1_scale: Required[float | Tensor]
    bmm2_scale: float | Tensor | None
    qk_nope_head_dim: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    causal: bool
    cum_seq_lens_q: Tensor | None
    max_q_len: int | None
    backend: Backend
    sinks: Tensor | Sequence[Tensor] | None
    skip_softmax_threshold_scale_factor: float | None
    enable_pdl: bool | None
    multi_ctas_kv_counter_buffer: Tensor | None


class CallArguments(RankArguments, total=False):
    """What the overloads of `decode_mla` have in common."""

    lse_base: LseBase
    out: Tensor | None
    lse: Tensor | None


class FlashInferArguments(TypedDict, total=False):
    """What the overloads of the drop-in have in common: FlashInfer 0.7.4's optional keywords."""

    sparse_mla_top_k: int
    out: Tensor | None
    bmm1_scale: float | Tensor
    bmm2_scale: float | Tensor
    sinks: Tensor | Sequence[Tensor] | None
    skip_softmax_threshold_scale_factor: float | None
    enable_pdl: bool | None
    backend: str
    is_var_seq: bool
    uses_shared_paged_kv_idx: bool
    lse: Tensor | None
    cute_dsl_impl: str
    kv_scale_format: str
    cum_seq_lens_q: Tensor | None
    max_q_len: int | None
    multi_ctas_kv_counter_buffer: Tensor | None
    sparse_mla_top_k_lens: Tensor | None
    enable_dcp: bool
    cp_world: int
    cp_rank: int
    causal_seqlens_kv_global: Tensor | None
    use_fp16_softmax: bool | None
    return_lse_base: Literal["basee", "base2"] | None
    interleave_size: int
