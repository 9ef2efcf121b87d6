"""The kernel in plain torch: the oracle, and what runs without a GPU when asked for.

It takes FlashInfer's keywords and means what FlashInfer's cute-dsl and trtllm-gen kernels mean by
them, so it can stand in for the function anywhere, on any device, accumulating in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from .errors import InvalidInputError
from .lse import lse_factor

__all__ = ["trtllm_batch_decode_with_kv_cache_mla"]


def trtllm_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor,
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
    return_lse_base: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Decode MLA over a paged cache, as FlashInfer 0.7.4's function of this name does.

    Parameters
    ----------
    query : Tensor, [B, q_len, H, D_qk], or [num_tokens, H, D_qk] with `cum_seq_lens_q`
        bf16, fp16, fp8 e4m3 or float32.
    kv_cache : Tensor, [num_pages, page_size, D_qk] or [num_pages, 1, page_size, D_qk]
    block_tables : Tensor, [B, width], integer; entries past a request's length are not read
    seq_lens : Tensor, [B], integer; rank-local with `enable_dcp`
    max_seq_len : int
        At least the largest of `seq_lens`.
    cum_seq_lens_q : Tensor, [B + 1], integer
        Needs `max_q_len`.
    return_lse_base : {"basee", "base2"} or None
        None: the base of the backend named, 2 for trtllm-gen and for what auto picks untuned,
        e for cute-dsl and with `enable_dcp`.

    Returns
    -------
    Tensor or (Tensor, Tensor)
        ``out`` [.., H, kv_lora_rank], bf16 (float32 for a float32 query), and with `return_lse`
        an LSE [B * q_len, H] float32, or the caller's buffers. A row that sees no key is
        (0, -inf), with and without `enable_dcp`.

    Raises
    ------
    InvalidInputError
        An argument means something that only a device kernel does: sparse MLA, skip-softmax.
    """
    _refuse(
        sparse_mla_top_k=sparse_mla_top_k or None,
        sparse_mla_top_k_lens=sparse_mla_top_k_lens,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        cum_seq_lens_q_without_max_q_len=cum_seq_lens_q if max_q_len is None else None,
    )
    compact = cum_seq_lens_q is not None and max_q_len is not None
    slots = torch.arange(max_q_len or query.shape[1], device=query.device)
    if cum_seq_lens_q is not None and max_q_len is not None:
        starts = cum_seq_lens_q[:-1].long().unsqueeze(1)
        q_lens = cum_seq_lens_q[1:].long().unsqueeze(1) - starts
        real = slots < q_lens
        outside = real & ((starts + slots < 0) | (starts + slots >= query.shape[0]))
        if bool(outside.any()):
            shown = [int(offset) for offset in cum_seq_lens_q]
            needed = f"prefix sums from 0 to the query's {query.shape[0]} tokens"
            _unreadable("cum_seq_lens_q", f"{shown}", needed)
        # Requests are padded to rectangles here and the padding is dropped at the end.
        tokens = torch.where(real, starts + slots, 0)
        rows = query[tokens].float()
    else:
        real, tokens = None, None
        q_lens = torch.full_like(seq_lens, query.shape[1], dtype=torch.int64).unsqueeze(1)
        rows = query.float()

    page_size = kv_cache.shape[-2]
    pages = block_tables[:, : max(1, -(-max_seq_len // page_size))].long()
    cache = kv_cache[:, 0] if kv_cache.ndim == 4 else kv_cache
    reached = torch.arange(pages.shape[1], device=query.device) * page_size < seq_lens.unsqueeze(1)
    if bool((reached & ((pages < 0) | (pages >= len(cache)))).any()):
        pages_used = f"pages {sorted({int(page) for page in pages[reached]})}"
        _unreadable("block_tables", pages_used, f"page numbers in [0, {len(cache)})")
    if not len(cache):
        cache = cache.new_zeros(1, *cache.shape[1:])
    keys = cache[torch.where(reached, pages, 0)].flatten(1, 2).float()
    position = torch.arange(keys.shape[1], device=query.device)
    held = position < seq_lens.long().unsqueeze(1)
    # A page that no length reaches may hold anything, NaN too.
    keys = torch.where(held.unsqueeze(-1), keys, 0.0)

    if enable_dcp:
        if causal_seqlens_kv_global is None:
            raise ValueError("causal_seqlens_kv_global is required when enable_dcp=True")
        newest, position = causal_seqlens_kv_global.long(), cp_world * position + cp_rank
    else:
        newest = seq_lens.long()
    bound = newest.unsqueeze(1) - (q_lens - 1 - slots)
    visible = held.unsqueeze(1) & (position < bound.unsqueeze(-1))

    scores = torch.einsum("bqhd,bkd->bqhk", rows, keys) * bmm1_scale
    scores = scores.masked_fill(~visible.unsqueeze(2), -torch.inf)
    natural = torch.logsumexp(scores, dim=-1)
    if sinks is not None:
        # A sink is one more score that has no value: it only takes weight.
        natural = torch.logaddexp(
            natural, (sinks if isinstance(sinks, Tensor) else sinks[0]).float()
        )
    # -inf - (-inf) is NaN: a row without keys gets weight 0 everywhere instead.
    top = torch.where(natural.isfinite(), natural, 0.0)
    weights = torch.exp(scores - top.unsqueeze(-1))
    result = torch.einsum("bqhk,bkd->bqhd", weights, keys[..., :kv_lora_rank]) * bmm2_scale

    if real is not None and tokens is not None:
        flat = query.new_zeros(*query.shape[:-1], kv_lora_rank, dtype=torch.float32)
        result = flat.index_put((tokens[real],), result[real])
        empty = torch.full(query.shape[:-1], -torch.inf, device=query.device)
        natural = empty.index_put((tokens[real],), natural[real])
    dtype = torch.float32 if query.dtype == torch.float32 else torch.bfloat16
    out = result.to(dtype) if out is None else out.copy_(result)
    if not return_lse:
        return out
    base2 = return_lse_base == "base2" or (
        return_lse_base is None and not enable_dcp and backend in ("auto", "trtllm-gen")
    )
    found = natural * (lse_factor("e", "2") or 1.0) if base2 else natural
    if lse is not None:
        return out, lse.copy_(found.view(lse.shape))
    return out, found if compact else found.flatten(0, 1)


def _unreadable(argument: str, found: str, needed: str) -> NoReturn:
    raise InvalidInputError(
        f"{argument} points outside of what it indexes.",
        found=f"{found}.",
        needed=f"{needed}.",
        fix="pass the tensor of this batch.",
        argument=argument,
    )


def _refuse(**unsupported: object) -> None:
    for name, value in unsupported.items():
        if value is not None:
            raise InvalidInputError(
                f"The torch reference does not take {name}.",
                found=f"{name} given.",
                needed="dense MLA decode without it.",
                fix="leave it out, or use a FlashInfer backend.",
                argument=name,
            )
