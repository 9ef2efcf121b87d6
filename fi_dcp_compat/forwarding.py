"""The way of a drop-in's call: checked as `decode_mla` is, then forwarded as it was given."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from . import debug
from .abi import FUNCTION, FlashInferABI, missing_feature
from .dcp import check_ranks
from .describing import Binding
from .dropin_guards import (
    LSE_BASE_OF,
    Call,
    check_words,
    dense,
    keyword_reasons,
    release_reasons,
)
from .errors import raise_first
from .guards import Backend
from .inputs import QueryLayout, Step, require_cache
from .launch import call_kernel, kernel_scales
from .limits import DCP_BACKENDS, LSE_BASES
from .lse import lse_factor, scale_lse
from .plans import Plan, Settings, bind, check_settings
from .preparation import preparation_for
from .scales import skip_softmax_factor
from .validation import is_tensor, require_tensor

__all__ = ["forward"]


class _Vetted(NamedTuple):
    step: Step
    plan: Plan
    layout: QueryLayout
    checking: bool


def forward(call: Call, defaults: Call, interleave_size: int) -> Tensor | tuple[Tensor, Tensor]:
    """Call the kernel with what differs from the defaults, or raise why the release cannot."""
    check_words(call)
    names = ("cp_world", "cp_rank", "interleave_size")
    check_ranks(call["cp_world"], call["cp_rank"], interleave_size, names)
    binding = bind(call["backend"])
    abi, backend = binding.abi, call["backend"]
    asked = _asked(call, defaults)
    counters = asked.pop("multi_ctas_kv_counter_buffer", None)
    base = asked.pop("return_lse_base", None)
    _require(binding, call, asked)
    vetted = None
    if dense(call) and abi.features.return_lse:
        vetted = _vet(binding, call, asked["max_seq_len"], counters, interleave_size)
    raise_first(tuple(keyword_reasons(abi, call)))

    # cake takes the keyword and leaves it unread (0.7.1 core:3882).
    named = abi.features.return_lse_base and backend != "cake"
    factor = None
    if vetted is not None:
        route = vetted.plan.route
        if backend == "auto" and route.backend != "auto" and not call["enable_dcp"]:
            asked["backend"] = route.backend  # what was checked is what runs
        if base is not None:
            factor = route.lse_factor
        scales = kernel_scales(vetted.plan, call["bmm1_scale"], call["bmm2_scale"])
        for name, scale in zip(("bmm1_scale", "bmm2_scale"), scales, strict=True):
            if scale is not call[name]:
                asked[name] = scale
    elif base is not None and not named:
        # Sparse MLA: auto is trtllm-gen or sparse, which agree.
        factor = lse_factor(LSE_BASES.get(backend, LSE_BASES["sparse"]), LSE_BASE_OF[base])
    if base is not None and named:
        asked["return_lse_base"] = base
    if counters is not None and _counted(abi, call, vetted):
        asked["multi_ctas_kv_counter_buffer"] = counters
    asked |= _shaped(abi, call, vetted)
    if vetted is not None and not vetted.layout.num_tokens:
        return _empty(call, vetted.plan)

    out, lse = call_kernel(binding, asked)
    if vetted is not None and vetted.checking:
        rows = vetted.step.query.shape[:-1]
        states = None if lse is None else lse.view(rows)
        world = call["cp_world"]
        debug.check_result(vetted.step, vetted.layout, world, out.view(*rows, -1), states)
    # The kernel may have got another view of the caller's buffers.
    out = out if call["out"] is None else call["out"]
    if lse is None:
        return out
    lse = lse if call["lse"] is None else call["lse"]
    if factor is not None:
        scale_lse(lse, factor)
    return out, lse


def _require(binding: Binding, call: Call, asked: Call) -> None:
    """Raise why the release cannot take such a call; what passed is not looked at again."""
    compact = call["cum_seq_lens_q"] is not None
    kind = (frozenset(asked), call["backend"], call["enable_dcp"], compact, call["return_lse"])
    if kind not in binding.taken:
        names, backend, dcp, compact, lse = kind
        reasons = release_reasons(binding.abi, names, backend, dcp=dcp, compact=compact, lse=lse)
        raise_first(tuple(reasons))
        binding.taken.add(kind)


def _counted(abi: FlashInferABI, call: Call, vetted: _Vetted | None) -> bool:
    """Return whether trtllm-gen may run, whose counters other backends refuse."""
    if vetted is not None:
        return vetted.plan.route.counter_buffer
    if abi.lacks("multi_ctas_kv_counter_buffer") or call["backend"] not in ("auto", "trtllm-gen"):
        return False
    query: Tensor = call["query"]
    elsewhere = query.is_cuda and torch.cuda.get_device_capability(query.device)[0] != 10
    return call["backend"] == "trtllm-gen" or not elsewhere


def _asked(call: Call, defaults: Call) -> Call:
    """Return what has no default or differs from it, and means something."""
    asked = {name: value for name, value in call.items() if not _same(value, name, defaults)}
    # FlashInfer's other backends refuse any threshold, and 0 means off.
    if not skip_softmax_factor(call["skip_softmax_threshold_scale_factor"]):
        asked.pop("skip_softmax_threshold_scale_factor", None)
    if not call["return_lse"]:
        asked.pop("lse", None)
        asked.pop("return_lse_base", None)
    if call["cum_seq_lens_q"] is None:
        asked.pop("max_q_len", None)  # checked against the query, and refused by FlashInfer
    if call["enable_dcp"] and type(call["max_seq_len"]) is int and call["max_seq_len"] == 0:
        asked["max_seq_len"] = 1  # a rank without keys, which FlashInfer refuses
    return asked


def _same(value: object, name: str, defaults: Call) -> bool:
    if name not in defaults:
        return False
    default: object = defaults[name]
    return value is default or (type(value) is type(default) and value == default)


def _vet(
    binding: Binding,
    call: Call,
    max_seq_len: int,
    counters: Tensor | None,
    interleave_size: int,
) -> _Vetted:
    """Check a dense call as `decode_mla` would, on 0.6.12 or newer."""
    dcp, query, cache = call["enable_dcp"], call["query"], call["kv_cache"]
    dims = (call["qk_nope_head_dim"], call["kv_lora_rank"], call["qk_rope_head_dim"])
    check_settings(True, call["return_lse"], call["enable_pdl"], *dims)
    require_cache(cache)
    backend = call["backend"]
    settings = Settings(
        page_size=cache.shape[-2],
        dtype=query.dtype,
        kv_dtype=cache.dtype,
        qk_nope_head_dim=dims[0],
        kv_lora_rank=dims[1],
        qk_rope_head_dim=dims[2],
        dcp_world_size=call["cp_world"],
        dcp_rank=call["cp_rank"],
        interleave_size=interleave_size,
        causal=True,
        # One rank alone has no mask to set up, but runs where all of them do.
        backend=cast("Backend", DCP_BACKENDS[0] if dcp and backend == "auto" else backend),
        return_lse=call["return_lse"],
        lse_base=LSE_BASE_OF.get(call["return_lse_base"], "e"),
        sinks=call["sinks"] is not None,
        tensor_scales=any(isinstance(call[name], Tensor) for name in ("bmm1_scale", "bmm2_scale")),
        skip_softmax=skip_softmax_factor(call["skip_softmax_threshold_scale_factor"]),
        enable_pdl=call["enable_pdl"],
    )
    step = Step(
        query,
        cache,
        call["block_tables"],
        call["seq_lens"],
        max_seq_len,
        call["workspace_buffer"],
        call["causal_seqlens_kv_global"],
        call["cum_seq_lens_q"],
        _max_q_len(call),
        out=_in_layout(call["out"], query, 3),
        lse=_in_layout(call["lse"], query, 2) if call["return_lse"] else None,
        multi_ctas_kv_counter_buffer=counters,
    )
    preparation = preparation_for(binding, settings)
    passed = preparation.found(step)
    own = preparation.own(step, passed, call["bmm1_scale"], call["bmm2_scale"], call["sinks"])
    return _Vetted(step, passed.plan, passed.layout, own.checking)


def _max_q_len(call: Call) -> int | None:
    offsets, given = call["cum_seq_lens_q"], call["max_q_len"]
    if given is not None or not is_tensor(offsets) or not is_tensor(call["block_tables"]):
        return cast("int | None", given)
    shape = (call["block_tables"].shape[:1].numel() + 1,)
    device = call["query"].device
    require_tensor("cum_seq_lens_q", offsets, shape, torch.int32, device, alignment=4)
    if not shape[0] > 1 or device.type == "meta":
        return None
    # FlashInfer reads them on the host here too (0.7.4 core:3396).
    return max(1, int(offsets.diff().max()))


def _in_layout(buffer: object, query: Tensor, ndim: int) -> Tensor | None:
    """View FlashInfer's flat buffer, [B * q_len, H] or xqa's [B, H, D], in the query's layout."""
    requests, tokens = query.shape[:2]
    if not isinstance(buffer, Tensor) or query.ndim == 3 or buffer.ndim != ndim:
        return cast("Tensor | None", buffer)
    if buffer.shape[0] != requests * tokens or not buffer.is_contiguous():
        return buffer
    return buffer.view(requests, tokens, *buffer.shape[1:])


def _empty(call: Call, plan: Plan) -> Tensor | tuple[Tensor, Tensor]:
    """Return what there is for a batch without query tokens, which no kernel takes."""
    query, out, lse = call["query"], call["out"], call["lse"]
    if out is None:
        out = query.new_empty((*query.shape[:-1], call["kv_lora_rank"]), dtype=plan.out_dtype)
    if not call["return_lse"]:
        return cast("Tensor", out)
    return out, query.new_empty((0, query.shape[-2]), dtype=torch.float32) if lse is None else lse


def _shaped(abi: FlashInferABI, call: Call, vetted: _Vetted | None) -> dict[str, Tensor]:
    """Return the views that a kernel, or an older release, takes of the call's tensors."""
    shaped: dict[str, Tensor] = {}
    cache, out, lse, sinks = call["kv_cache"], call["out"], call["lse"], call["sinks"]
    if cache.ndim == 3 and not abi.features.kv_cache_3d:
        shaped["kv_cache"] = cache.unsqueeze(1)
    if out is not None and not abi.features.out_4d and call["query"].shape[1] > 1:
        # It is taken for one token a request, and written past its end.
        asked = f"{FUNCTION}(out=...) with several query tokens"
        reason = missing_feature(abi, "out_4d", asked=asked, instead="call without the buffer")
        raise_first(() if reason is None else (reason,))
    xqa = vetted is not None and vetted.plan.xqa
    whole = out if vetted is None else vetted.step.out
    if whole is not None and whole.ndim == 4 and (xqa or not abi.features.out_4d):
        shaped["out"] = whole.squeeze(1)
    elif whole is not None and whole is not out:
        shaped["out"] = whole
    flat = call["return_lse"] and is_tensor(lse) and lse.ndim == 3 and not abi.features.lse_3d
    if flat and lse.is_contiguous():
        shaped["lse"] = lse.view(-1, lse.shape[-1])
    if vetted is not None and isinstance(sinks, (list, tuple)):
        shaped["sinks"] = sinks[0]  # the launcher takes the tensor
    return shaped
