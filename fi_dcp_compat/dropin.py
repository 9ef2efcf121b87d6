"""FlashInfer's own function with 0.7.4's parameters, on every recorded release.

For stacks that change one import line. `decode_mla` is the typed call; this one keeps FlashInfer's
names and layouts, and goes on for what `decode_mla` leaves out: sparse MLA, packed caches, and
releases before 0.6.12.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, overload

from torch import Tensor

from .dropin_guards import Call
from .forwarding import forward

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .arguments import FlashInferArguments

__all__ = ["trtllm_batch_decode_with_kv_cache_mla"]


@overload
def trtllm_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor | None,
    max_seq_len: int,
    *,
    return_lse: Literal[False] = False,
    **arguments: Unpack[FlashInferArguments],
) -> Tensor: ...
@overload
def trtllm_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor | None,
    max_seq_len: int,
    *,
    return_lse: Literal[True],
    **arguments: Unpack[FlashInferArguments],
) -> tuple[Tensor, Tensor]: ...
@overload
def trtllm_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor | None,
    max_seq_len: int,
    *,
    return_lse: bool,
    **arguments: Unpack[FlashInferArguments],
) -> Tensor | tuple[Tensor, Tensor]: ...
def trtllm_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor | None,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: Tensor | None = None,
    bmm1_scale: float | Tensor = 1.0,
    bmm2_scale: float | Tensor = 1.0,
    sinks: Tensor | Sequence[Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto",
    cum_seq_lens_q: Tensor | None = None,
    max_q_len: int | None = None,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
    sparse_mla_top_k_lens: Tensor | None = None,
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    return_lse_base: Literal["basee", "base2"] | None = None,
    *,
    interleave_size: int = 1,
) -> Tensor | tuple[Tensor, Tensor]:
    """Call FlashInfer's function of the same name, on whatever release is installed.

    What the release knows is forwarded by keyword, as it is given; what is at its default is left
    out. Dense MLA on 0.6.12 or newer is first checked as `decode_mla` checks it. It differs from
    FlashInfer's own only where that would fail or leave something open:

    - ``backend="auto"`` becomes the backend that `decode_mla` would name where FlashInfer's own
      choice may be another, or leaves the base of the LSE open.
    - ``return_lse_base`` works on every release that has an LSE.
    - ``multi_ctas_kv_counter_buffer`` may always be given; it goes where trtllm-gen can run.
    - A skip-softmax threshold of 0, and an ``lse`` without ``return_lse``, are left out.
    - An empty batch is answered here.
    - ``max_seq_len=0`` with DCP, of a rank that holds no key, becomes 1.

    Parameters
    ----------
    query : Tensor, [B, q_len, H, D], or [num_tokens, H, D] with `cum_seq_lens_q`
    kv_cache : Tensor, [num_pages, page_size, D] or [num_pages, 1, page_size, D]
    block_tables, seq_lens : Tensor, [B, width] and [B], int32; rank-local with DCP
    out : Tensor, as `query` with kv_lora_rank in place of D, optional
    lse : Tensor, [B, q_len, H] or [B * q_len, H], float32, optional
    return_lse_base : {"basee", "base2"}, optional
        None is the backend's own: natural log on cute-dsl and the reference, log2 on the others.
    backend : str
        FlashInfer's, or "reference": plain torch, for tests without a GPU.
    enable_dcp, cp_world, cp_rank, causal_seqlens_kv_global
        As in `DCP`; needs ``return_lse=True``, and 0.6.17 (#4178).
    interleave_size : int
        The stack's ``cp_kv_cache_interleave_size``, which FlashInfer does not ask for: above 1 a
        KV layout cannot be masked natively.

    The other parameters are FlashInfer's.

    Returns
    -------
    Tensor, or (Tensor, Tensor) with ``return_lse``
        As FlashInfer returns them: a new LSE is [B * q_len, H].

    Raises
    ------
    FlashInferNotFoundError, FlashInferImportError
        No FlashInfer, or one that cannot be imported.
    FlashInferVersionError, FlashInferSignatureError
        The release lacks a parameter that is not at its default, or what it means.
    UnsupportedConfigError, InvalidInputError, NotPreparedError
        As `decode_mla`.
    """
    call = locals().copy()
    return forward(call, _DEFAULTS, call.pop("interleave_size"))


_DEFAULTS: Call = {
    parameter.name: parameter.default
    for parameter in inspect.signature(trtllm_batch_decode_with_kv_cache_mla).parameters.values()
    if parameter.default is not parameter.empty
}
