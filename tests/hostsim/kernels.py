"""The two compiled MLA kernels of FlashInfer in plain torch, refusals included.

Arguments come in positionally, as FlashInfer passes them; their number tells the release's order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import SupportsFloat

import torch
from torch import Tensor

LOG2E = math.log2(math.e)

_CUTE_DSL = (
    "q_latent q_rope c_latent c_rope page_table o lse workspace split_kv cache_seqs "
    "block_split_kvs softmax_scale output_scale"
)

_TRTLLM_GEN = (
    "out out_scale_factor query key_cache value_cache workspace_buffer block_tables seq_lens "
    "max_q_len max_kv_len bmm1_scale bmm2_scale o_sf_scale o_sf_vec_size o_sf_start_index "
    "batch_size window_left sparse_mla_top_k sm_count enable_pdl workspace_size attention_sinks "
    "cum_seq_lens_q key_block_scales value_block_scales skip_softmax_threshold_scale_factor "
    "uses_shared_paged_kv_idx lse lse_stride_tokens lse_stride_heads"
)

# What FlashInfer may ask of trtllm-gen beyond dense MLA; each is off at one of these values.
_TRTLLM_GEN_EXTRAS: dict[str, tuple[object, ...]] = {
    "out_scale_factor": (None,),
    "key_block_scales": (None,),
    "value_block_scales": (None,),
    "window_left": (-1,),
    "sparse_mla_top_k": (0,),
    "skip_softmax_threshold_scale_factor": (None, 0.0),
    "uses_shared_paged_kv_idx": (None, True),
    "enable_block_sparse_attention": (False,),
    "sparse_mla_top_k_lens": (None,),
    "bf16q_fp8kv_transform_mode": (0,),
    "use_fp16_softmax": (None, False),
}


def cute_dsl_arguments(values: Sequence[object]) -> dict[str, object]:
    """Name what the monolithic cute-dsl kernel gets, 0.6.12 and up; DSL scalars become numbers."""
    names = _CUTE_DSL.split()
    after = names.index("cache_seqs") + 1
    if len(values) >= 16:
        names[after:after] = ["causal_seqlens_kv_global", "cp_rank"]
    if len(values) >= 14:
        names.insert(after, "cum_seq_lens_q")
    if len(values) >= 17:
        names.append("lse_scale")
    return _named("cute-dsl", names, [getattr(value, "value", value) for value in values])


def trtllm_gen_arguments(values: Sequence[object]) -> dict[str, object]:
    """Name what trtllm_paged_attention_decode gets, 0.6.12 and up."""
    names = _TRTLLM_GEN.split()
    if len(values) >= 31:
        names.insert(names.index("workspace_buffer") + 1, "multi_ctas_kv_counter_buffer")
    if len(values) >= 32:
        names.append("enable_block_sparse_attention")
    if len(values) >= 33:
        names.append("sparse_mla_top_k_lens")
    if len(values) >= 35:
        names += ["bf16q_fp8kv_transform_mode", "use_fp16_softmax"]
    if len(values) >= 36:
        names.insert(names.index("lse") + 1, "lse_scale")
    return _named("trtllm-gen", names, values)


def _named(kernel: str, names: list[str], values: Sequence[object]) -> dict[str, object]:
    if len(names) != len(values):
        raise TypeError(f"{kernel}: no release is known to pass {len(values)} arguments")
    return dict(zip(names, values, strict=True))


def check_cute_dsl(arguments: Mapping[str, object]) -> None:
    """Raise what tvm-ffi raises before the compiled kernel starts."""
    batch = tensor(arguments, "page_table").shape[0]
    for position, (name, value) in enumerate(arguments.items()):
        if not isinstance(value, Tensor):
            continue
        where = f"on argument #{position} ({name}), expected"
        alignment = {"workspace": 32, "causal_seqlens_kv_global": 4}.get(name, 16)
        if value.data_ptr() % alignment:
            raise ValueError(f"Misaligned Tensor data {where} data alignment={alignment} bytes")
        integers = ("page_table", "cache_seqs", "cum_seq_lens_q", "causal_seqlens_kv_global")
        if name in integers and value.dtype != torch.int32:
            raise ValueError(f"Mismatched Tensor {where} dtype=int32")
        if name == "lse" and value.dtype != torch.float32:
            raise ValueError(f"Mismatched Tensor {where} dtype=float32")
        if name in ("cache_seqs", "causal_seqlens_kv_global") and value.shape != (batch,):
            raise ValueError(f"Mismatched {name}.shape[0] {where} to match page_table.shape[0]")
        # A stride over a dimension of one element is not looked at.
        if value.shape[-1] != 1 and value.stride(-1) != 1:
            raise ValueError(f"Mismatched {name}.strides[{value.ndim - 1}] {where} to be 1")


def run_cute_dsl(
    arguments: Mapping[str, object], key: Mapping[str, object], *, causal: bool
) -> None:
    """Decode as the monolithic cute-dsl kernel does, in float32.

    ``causal`` is False for FlashInfer 0.6.12, whose kernel masks nothing between the query tokens
    and writes its LSE, which the host drops, in base 2.
    """
    cum, lengths = arguments.get("cum_seq_lens_q"), tensor(arguments, "cache_seqs")
    latents, ropes, outs, lses = (
        _by_request(tensor(arguments, name), cum) for name in ("q_latent", "q_rope", "o", "lse")
    )
    if causal and "cum_seq_lens_q" not in arguments:
        # Up to 0.6.15 tokens are folded into heads (0.6.13 mla_decode_fp16.py:423).
        latents, ropes = ([_folded(part) for part in parts] for parts in (latents, ropes))
    caches = tensor(arguments, "c_latent"), tensor(arguments, "c_rope")
    scale, output_scale = number(arguments, "softmax_scale"), number(arguments, "output_scale")
    # 0.7.1 turned the conversion of the kernel's base 2 into an argument.
    natural_to_stored = LOG2E * number(arguments, "lse_scale", 1 / LOG2E) if causal else LOG2E
    bounds, sinks = arguments.get("causal_seqlens_kv_global"), arguments.get("sinks")
    if sinks is not None:
        sinks = tensor(arguments, "sinks")
    for request, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        table, q_len = tensor(arguments, "page_table")[request], out.shape[0]
        query = torch.cat([latents[request].float(), ropes[request].float()], -1)
        keys = torch.cat([_gather(cache, table, lengths[request]) for cache in caches], -1)
        token, local = torch.arange(q_len)[:, None], torch.arange(keys.shape[0])
        if isinstance(bounds, Tensor):
            position = int(number(key, "cp_world")) * local + int(number(arguments, "cp_rank"))
            visible = position < bounds[request] - (q_len - 1) + token
        elif causal:
            visible = local < keys.shape[0] - (q_len - 1) + token
        else:
            visible = (local >= 0).expand(q_len, -1)
        part, part_lse = _attend(query, keys, visible, scale, out.shape[-1], sinks)
        # The compiled capacity bounds the rows that run. With DCP an empty row is defined; without,
        # the kernel leaves it as it was.
        written = torch.arange(q_len) < number(key, "seq_len_q", q_len)
        if bounds is None:
            written &= visible.any(-1)
        out[written] = (part * output_scale).to(out.dtype)[written]
        lse[written] = (part_lse * natural_to_stored)[written]
    workspace = arguments["workspace"]
    if isinstance(workspace, Tensor):
        # Partial sums stay behind: a trtllm-gen launch must not find its counters here.
        workspace.fill_(0x55)


def check_trtllm_gen(arguments: Mapping[str, object]) -> None:
    """Raise what the C++ launcher raises; it does not look at the integer tensors at all."""
    query, cache = tensor(arguments, "query"), tensor(arguments, "key_cache")
    if (query.shape[-1], tensor(arguments, "out").shape[-1]) not in ((576, 512), (320, 256)):
        raise RuntimeError("head_dim_v and head_dim_o must be (576, 512) or (320, 256) for MLA")
    # The MLA cubins of flashinfer-cubin 0.6.13 by name: pages of 16, 32 and 64 tokens.
    if cache.shape[-2] not in (16, 32, 64):
        raise RuntimeError(f"Missing TRTLLM-GEN kernel (decode): {cache.shape[-2]} tokens per page")
    sinks = arguments["attention_sinks"]
    if sinks is not None and tensor(arguments, "attention_sinks").dtype != torch.float32:
        raise RuntimeError("attention_sinks must be a float tensor")
    for name in ("query", "key_cache", "value_cache", "out"):
        if tensor(arguments, name).data_ptr() % 16:
            raise RuntimeError(f"{name}: a TMA address must be 16-byte aligned")
    _check_trtllm_gen_workspace(arguments)


def _check_trtllm_gen_workspace(arguments: Mapping[str, object]) -> None:
    batch, num_heads = int(number(arguments, "batch_size")), tensor(arguments, "query").shape[1]
    counters = arguments.get("multi_ctas_kv_counter_buffer")
    needed = 0
    if isinstance(counters, Tensor):
        slots = max(batch * num_heads, int(number(arguments, "sm_count")))
        if counters.data_ptr() % 16:
            raise RuntimeError("trtllm-gen multi-CTA KV counter buffer must be 16-byte aligned")
        if counters.numel() * counters.element_size() < 4 * (-(-slots // 8) * 8):
            raise RuntimeError("trtllm-gen multi-CTA KV counter buffer is too small")
    else:
        # Until 0.6.14 the counters are the first 8 MiB of the workspace.
        needed = 8 << 20
        counters = tensor(arguments, "workspace_buffer").view(torch.uint8)[:needed]
    if arguments["lse"] is not None:
        max_q_len = int(number(arguments, "max_q_len"))
        needed += 8 * num_heads * batch * (-(-max_q_len // 256) * 256) + (1 << 20)
    if int(number(arguments, "workspace_size")) < needed:
        raise RuntimeError(
            f"Buffer overflow when allocating memory: {needed} bytes. "
            "Increase the workspace buffer size."
        )
    if counters.view(torch.uint8).any():
        raise RuntimeError("multi-CTA KV counters are not zero: the kernel would hang")


def run_trtllm_gen(arguments: Mapping[str, object]) -> None:
    """Decode as trtllm-gen does, in float32: causal, LSE in base 2 times ``lse_scale``."""
    query, out, lse = _dense(arguments, "query"), tensor(arguments, "out"), arguments["lse"]
    _require_emulated(arguments)
    batch, capacity = int(number(arguments, "batch_size")), int(number(arguments, "max_q_len"))
    # The launcher takes bare int* and void*: int64 or strided tensors are misread, not refused.
    width = tensor(arguments, "block_tables").shape[-1]
    tables = _raw(tensor(arguments, "block_tables"), torch.int32, batch * width).view(batch, width)
    lengths = _raw(tensor(arguments, "seq_lens"), torch.int32, batch)
    out = _raw(out, out.dtype, out.numel()).view(*query.shape[:2], out.shape[-1])
    if arguments["cum_seq_lens_q"] is None:
        cum = torch.arange(batch + 1) * capacity
    else:
        cum = _raw(tensor(arguments, "cum_seq_lens_q"), torch.int32, batch + 1)
    scale, output_scale = number(arguments, "bmm1_scale"), number(arguments, "bmm2_scale")
    if isinstance(arguments["bmm1_scale"], Tensor):
        scale /= LOG2E  # the host has multiplied it in
    sinks = arguments["attention_sinks"]
    if sinks is not None:
        sinks = _raw(tensor(arguments, "attention_sinks"), torch.float32, query.shape[1])
    queries, outs = _by_request(query, cum), _by_request(out, cum)
    lses = _by_request(lse, cum) if isinstance(lse, Tensor) else [None] * batch
    for request, (chunk, rows, row_lses) in enumerate(zip(queries, outs, lses, strict=True)):
        keys = _gather(_dense(arguments, "key_cache").squeeze(1), tables[request], lengths[request])
        q_len = rows.shape[0]
        bound = keys.shape[0] - (q_len - 1) + torch.arange(q_len)[:, None]
        visible = torch.arange(keys.shape[0]) < bound
        part, part_lse = _attend(chunk.float(), keys, visible, scale, rows.shape[-1], sinks)
        launched, seen = torch.arange(q_len) < capacity, visible.any(-1)
        rows[launched & seen] = (part * output_scale).to(out.dtype)[launched & seen]
        if row_lses is not None:
            # A second kernel turns the statistics of every row into the LSE, empty ones too.
            stored = part_lse * LOG2E * number(arguments, "lse_scale", 1.0)
            row_lses[launched] = stored.masked_fill(~seen[:, None], -torch.inf)[launched]


def _require_emulated(arguments: Mapping[str, object]) -> None:
    for name, off in _TRTLLM_GEN_EXTRAS.items():
        if name in arguments and arguments[name] not in off:
            raise NotImplementedError(f"the trtllm-gen emulation has no {name}={arguments[name]!r}")
    query, cache = tensor(arguments, "query").dtype, tensor(arguments, "key_cache").dtype
    if query != cache or query not in (torch.bfloat16, torch.float8_e4m3fn):
        raise NotImplementedError(f"the trtllm-gen emulation has no {query}, {cache}")


def _attend(
    query: Tensor,
    keys: Tensor,
    visible: Tensor,
    scale: float,
    kv_lora_rank: int,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [q_len, H, kv_lora_rank] and natural LSE [q_len, H]; 0 and -inf for an empty row."""
    scores = torch.einsum("qhd,kd->qhk", query, keys) * scale
    scores = scores.masked_fill(~visible[:, None, :], -torch.inf)
    lse = torch.logsumexp(scores, -1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks)
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    return torch.exp(scores - finite[..., None]) @ keys[:, :kv_lora_rank], lse


def _folded(query: Tensor) -> Tensor:
    """Read [q_len, H, D] by the stride of the heads alone, as if tokens lay right behind them."""
    q_len, heads, dim = query.shape
    fits = (n for n in range(1, q_len + 1) if q_len % n == 0 and (n == 1 or heads * n <= 128))
    fold, strides = max(fits), query.stride()
    shape = (q_len // fold, fold * heads, dim)
    return query.as_strided(shape, (strides[0] * fold, *strides[1:])).reshape(query.shape)


def _by_request(value: Tensor, cum: object) -> list[Tensor]:
    """Split by the prefix sums of the query lengths, or along the batch where there are none."""
    if not isinstance(cum, Tensor):
        return list(value.unbind(0))
    return [value[first:end] for first, end in itertools.pairwise(cum.tolist())]


def _gather(cache: Tensor, table: Tensor, length: Tensor) -> Tensor:
    """Copy the first ``length`` keys of one request out of its pages, as float32."""
    num_keys, page_size = max(int(length), 0), cache.shape[1]
    pages = table[: -(-num_keys // page_size)].long()
    if pages.numel() * page_size < num_keys:
        raise IndexError(f"{num_keys} keys do not fit into a table of {table.numel()} pages")
    if ((pages < 0) | (pages >= cache.shape[0])).any():
        raise IndexError(f"page numbers {pages.tolist()} in a pool of {cache.shape[0]} pages")
    return cache[pages].flatten(0, 1)[:num_keys].float()


def _dense(arguments: Mapping[str, object], name: str) -> Tensor:
    """Read a tensor as its TMA descriptor does, which has no stride for the last dimension."""
    value = tensor(arguments, name)
    return value.as_strided(value.shape, (*value.stride()[:-1], 1))


def _raw(value: Tensor, dtype: torch.dtype, count: int) -> Tensor:
    """Read the memory behind a tensor as ``count`` contiguous elements, as a bare pointer does."""
    flat = torch.empty(0, dtype=dtype).set_(value.untyped_storage())
    start = value.storage_offset() * value.element_size() // flat.element_size()
    if start + count > flat.numel():
        raise IndexError(f"{count} elements of {dtype} read beyond the end of the tensor")
    return flat[start : start + count]


def tensor(arguments: Mapping[str, object], name: str) -> Tensor:
    value = arguments[name]
    if not isinstance(value, Tensor):
        raise TypeError(f"Mismatched type on {name}, expected Tensor, got {type(value).__name__}")
    return value


def number(arguments: Mapping[str, object], name: str, default: float | None = None) -> float:
    value = arguments[name] if default is None else arguments.get(name, default)
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"Mismatched type on {name}, expected a number, got {type(value).__name__}")
    return float(value)
