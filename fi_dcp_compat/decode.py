"""The call: `decode_mla`, which looks its prepared decoder up.

Dimensions
----------
B : requests. q_len : query tokens of each. num_tokens : query tokens of the batch.
H : query heads as the kernel gets them. D : kv_lora_rank + qk_rope_head_dim. W : DCP ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, overload

from torch import Tensor

from .dcp import DCP
from .features import LseBase
from .guards import Backend
from .inputs import require_cache
from .lse import MLAState, check_lse_base
from .plans import Settings, bind, check_settings
from .preparation import keep, preparation_for
from .prepared import MLADecoder
from .scales import skip_softmax_factor
from .validation import invalid

__all__ = ["decode_mla"]

_kind: Callable[[object], type] = type  # no type checker may say what a caller passes


if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .arguments import CallArguments


@overload
def decode_mla(
    query: Tensor,
    kv_cache: Tensor,
    *,
    dcp: DCP,
    return_lse: bool = False,
    **arguments: Unpack[CallArguments],
) -> MLAState: ...
@overload
def decode_mla(
    query: Tensor,
    kv_cache: Tensor,
    *,
    dcp: DCP | None = None,
    return_lse: Literal[True],
    **arguments: Unpack[CallArguments],
) -> MLAState: ...
@overload
def decode_mla(
    query: Tensor,
    kv_cache: Tensor,
    *,
    dcp: None = None,
    return_lse: Literal[False] = False,
    **arguments: Unpack[CallArguments],
) -> Tensor: ...
@overload
def decode_mla(
    query: Tensor,
    kv_cache: Tensor,
    *,
    dcp: DCP | None = None,
    return_lse: bool = False,
    **arguments: Unpack[CallArguments],
) -> Tensor | MLAState: ...
def decode_mla(
    query: Tensor,
    kv_cache: Tensor,
    *,
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: float | Tensor,
    bmm2_scale: float | Tensor | None = None,
    qk_nope_head_dim: int = 128,
    kv_lora_rank: int = 512,
    qk_rope_head_dim: int = 64,
    dcp: DCP | None = None,
    causal: bool = True,
    cum_seq_lens_q: Tensor | None = None,
    max_q_len: int | None = None,
    backend: Backend = "auto",
    return_lse: bool = False,
    lse_base: LseBase = "e",
    out: Tensor | None = None,
    lse: Tensor | None = None,
    sinks: Tensor | Sequence[Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
) -> Tensor | MLAState:
    """Decode MLA over a paged KV cache, on FlashInfer 0.6.12 or newer.

    Parameters
    ----------
    query : Tensor, [B, q_len, H, D] or flat [num_tokens, H, D], bf16, fp16 or fp8 e4m3
        A flat query is uniform, B = ``block_tables.shape[0]``, unless `cum_seq_lens_q` is given.
    kv_cache : Tensor, [num_pages, page_size, D] or [num_pages, 1, page_size, D]
        Of the query's dtype; this rank's pages under DCP.
    workspace_buffer : Tensor, [bytes], int8 or uint8
        At least `min_workspace_bytes`.
    block_tables : Tensor, [B, width], int32
        Page numbers; the tail past a request's length is not read. On cute-dsl the width is a
        multiple of ``128 / page_size``.
    seq_lens : Tensor, [B], int32, contiguous
        Keys of each request, rank-local under DCP. Without DCP 0 is undefined in FlashInfer.
    max_seq_len : int
        A bound on `seq_lens`; it may be 0 under DCP.
    bmm1_scale : float, or Tensor of one float32 (trtllm-gen)
        The whole fused softmax scale, natural; see `bmm_scales`.
    bmm2_scale : float, or Tensor of one float32 (trtllm-gen), optional
        Scale of the output: 1.0 if left out, but required with an fp8 cache.
    qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim : int
        The model's head dimensions.
    dcp : DCP, optional
        Native decode context parallelism, since FlashInfer 0.6.17 (#4178), on cute-dsl.
    causal : bool
        False lets every query token see the whole context: without DCP only.
    cum_seq_lens_q : Tensor, [B + 1], int32, optional
        Prefix sums of the query lengths of a flat query: requests of different lengths. Since
        0.6.14; with an LSE since 0.6.16; with DCP since 0.7.0 (#4719).
    max_q_len : int, optional
        The largest query length; required with `cum_seq_lens_q`. Without it, it asserts that a
        flat query has ``B * max_q_len`` tokens.
    backend : {"auto", "trtllm-gen", "cute-dsl", "xqa", "reference"}
        "reference" is plain torch, never picked by auto. DCP runs on cute-dsl.
    return_lse : bool
        Return an `MLAState`; so does any `dcp`.
    lse_base : {"e", "2"}
        Base of the LSE, the same on every release and backend.
    out, lse : Tensor, optional
        Written and returned; shaped and typed as the result, contiguous.
    sinks : Tensor, [H], float32, or a sequence of one, optional
        Attention sinks; without DCP.
    skip_softmax_threshold_scale_factor : float, optional
        trtllm-gen only; 0 means off.
    enable_pdl : bool, optional; None lets FlashInfer decide
    multi_ctas_kv_counter_buffer : Tensor, uint8, zeroed once, optional
        trtllm-gen's counters, `counter_bytes` long; forwarded only where they can be used.

    Returns
    -------
    Tensor or MLAState
        ``out`` in the query's layout, bf16, and with `dcp` or `return_lse` the LSE. Under DCP a
        row with no visible key is (0, -inf).

    Raises
    ------
    FlashInferNotFoundError, FlashInferImportError
        No FlashInfer, or one that cannot be imported.
    FlashInferVersionError, FlashInferSignatureError
        The release cannot do what was asked, or its function is not what its version promises.
    UnsupportedConfigError
        No kernel runs this configuration right; ``reasons`` has all of them, as `check` gives.
    InvalidInputError
        An argument has a wrong type, shape, dtype, device, layout or alignment.
    NotPreparedError
        Under CUDA-graph capture with a kernel that was never run eagerly (0.7.4).
    """
    if dcp is None:
        world_size, rank, interleave_size = 1, 0, 1
    elif isinstance(dcp, DCP):
        world_size, rank, interleave_size = dcp.world_size, dcp.rank, dcp.interleave_size
    else:
        invalid("dcp", "must be a DCP", dcp, "DCP(world_size, rank, lengths)", "build a DCP")
    binding = bind(backend)
    key: tuple[object, ...] = ()
    decoder = None
    try:
        key = (
            kv_cache.shape[-2],
            query.dtype,
            kv_cache.dtype,
            qk_nope_head_dim,
            kv_lora_rank,
            qk_rope_head_dim,
            world_size,
            rank,
            interleave_size,
            causal,
            backend,
            return_lse is True or dcp is not None,
            lse_base,
            bmm1_scale,
            bmm2_scale,
            skip_softmax_threshold_scale_factor,
            enable_pdl,
        )
        decoder = binding.decoders.get(key)
    except (AttributeError, IndexError, TypeError):
        pass  # no tensors, too few dimensions, or what has no hash: refused by name below
    # What only compares equal finds it too, as 1 does for True, but is refused.
    skip = skip_softmax_threshold_scale_factor
    exact = (
        _kind(causal) is _kind(return_lse) is bool
        and _kind(qk_nope_head_dim) is _kind(kv_lora_rank) is _kind(qk_rope_head_dim) is int
        and _kind(bmm1_scale) is float
        and (bmm2_scale is None or _kind(bmm2_scale) is float)
        and (enable_pdl is None or _kind(enable_pdl) is bool)
        and (skip is None or _kind(skip) is float)
    )
    if decoder is None or sinks is not None or not exact:
        if not isinstance(query, Tensor):
            invalid("query", "must be a tensor", query, "[B, q_len, H, D]", "pass a tensor")
        require_cache(kv_cache)
        check_lse_base(lse_base)
        check_settings(
            causal, return_lse, enable_pdl, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim
        )
        settings = Settings(
            page_size=kv_cache.shape[-2],
            dtype=query.dtype,
            kv_dtype=kv_cache.dtype,
            qk_nope_head_dim=qk_nope_head_dim,
            kv_lora_rank=kv_lora_rank,
            qk_rope_head_dim=qk_rope_head_dim,
            dcp_world_size=world_size,
            dcp_rank=rank,
            interleave_size=interleave_size,
            causal=causal,
            backend=backend,
            return_lse=return_lse or dcp is not None,
            lse_base=lse_base,
            sinks=sinks is not None,
            tensor_scales=isinstance(bmm1_scale, Tensor) or isinstance(bmm2_scale, Tensor),
            skip_softmax=skip_softmax_factor(skip_softmax_threshold_scale_factor),
            enable_pdl=enable_pdl,
        )
        decoder = MLADecoder(preparation_for(binding, settings), bmm1_scale, bmm2_scale, sinks)
        if decoder.plain:
            keep(binding.decoders, key, decoder)
    result = decoder.run(
        query,
        kv_cache,
        block_tables,
        seq_lens,
        max_seq_len,
        workspace_buffer,
        causal_seqlens_kv_global=None if dcp is None else dcp.causal_seqlens_kv_global,
        cum_seq_lens_q=cum_seq_lens_q,
        max_q_len=max_q_len,
        out=out,
        lse=lse,
        multi_ctas_kv_counter_buffer=multi_ctas_kv_counter_buffer,
    )
    # Two thirds of the time that MLAState(*result) takes.
    return result[0] if result[1] is None else tuple.__new__(MLAState, result)
