"""The keywords of `decode_mla` for type checkers: those that do not decide the result's type."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from typing_extensions import Required

    from .features import LseBase
    from .guards import Backend

__all__ = ["CallArguments", "RankArguments"]

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
