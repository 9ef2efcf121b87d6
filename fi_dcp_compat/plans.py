"""The static half of a call: its kernel, its settings, and the plan for one shape of query."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from .abi import FlashInferABI
from .config import Config
from .describing import Binding, describe_kernel
from .features import LseBase
from .guards import Backend, dtype_name
from .limits import FEW_HEADS, XQA_HEADS
from .probing import bind_kernel
from .reference import trtllm_batch_decode_with_kv_cache_mla as reference_kernel
from .releases import newest
from .routing import Route, route
from .sizes import folded_tokens
from .validation import invalid, require_int

__all__ = [
    "Plan",
    "Settings",
    "bind",
    "check_dtypes",
    "check_settings",
    "make_plan",
    "out_dtype",
]


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
        """Return the configuration as far as it is known: heads the backend has, one token."""
        return Config(
            num_heads=XQA_HEADS if self.backend == "xqa" else FEW_HEADS,
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


def check_settings(
    causal: bool,
    return_lse: bool,
    enable_pdl: bool | None,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
) -> None:
    """Raise InvalidInputError unless each is of its type; True == 1, so equality does not tell."""
    switches = {"causal": causal, "return_lse": return_lse}
    if enable_pdl is not None:
        switches["enable_pdl"] = enable_pdl
    for name, value in switches.items():
        if type(value) is not bool:
            invalid(name, "must be a bool", value, "True or False", "pass one")
    require_int("qk_nope_head_dim", qk_nope_head_dim, 0)
    require_int("kv_lora_rank", kv_lora_rank, 1)
    require_int("qk_rope_head_dim", qk_rope_head_dim, 0)


def check_dtypes(**dtypes: torch.dtype) -> None:
    """Raise InvalidInputError unless each is a torch.dtype."""
    for name, dtype in dtypes.items():
        if type(dtype) is not torch.dtype:
            invalid(name, "must be a torch.dtype", dtype, "a torch.dtype", "pass torch.bfloat16")


class Plan(NamedTuple):
    """What one shape of call needs: its route, and the keywords that no step changes."""

    route: Route
    keywords: dict[str, object]
    dcp: bool
    return_lse: bool
    out_dtype: torch.dtype
    strided_tables: bool
    whole_heads: bool
    xqa: bool


def make_plan(abi: FlashInferABI, settings: Settings, config: Config) -> Plan:
    """Route `config`, or raise why it cannot run, and gather what no step changes."""
    path = route(abi, config, settings.lse_base)
    keywords: dict[str, object] = {
        "qk_nope_head_dim": settings.qk_nope_head_dim,
        "kv_lora_rank": settings.kv_lora_rank,
        "qk_rope_head_dim": settings.qk_rope_head_dim,
        "backend": path.backend,
    }
    if settings.return_lse:
        keywords["return_lse"] = True
    if path.return_lse_base is not None:
        keywords["return_lse_base"] = path.return_lse_base
    if settings.dcp_world_size > 1:
        keywords["enable_dcp"] = True
        keywords["cp_world"] = settings.dcp_world_size
        keywords["cp_rank"] = settings.dcp_rank
    if settings.skip_softmax is not None:
        keywords["skip_softmax_threshold_scale_factor"] = settings.skip_softmax
    if settings.enable_pdl is not None:
        keywords["enable_pdl"] = settings.enable_pdl
    return Plan(
        route=path,
        keywords=keywords,
        dcp=settings.dcp_world_size > 1,
        return_lse=settings.return_lse,
        out_dtype=out_dtype(abi, path.backend, settings.dtype),
        strided_tables=path.may_run == ("cute-dsl",),
        whole_heads="cute-dsl" in path.may_run
        and not abi.features.cute_dsl_sliced_heads
        and folded_tokens(config.num_heads, config.flattened().q_len) > 1,
        xqa=path.backend == "xqa",
    )


def out_dtype(abi: FlashInferABI, backend: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the output for a query of `dtype`: bf16, with two exceptions."""
    if backend == "reference" and dtype is torch.float32:
        return dtype
    if backend == "cute-dsl" and not abi.features.cute_dsl_bf16_out and dtype is torch.float16:
        return dtype
    return torch.bfloat16


@lru_cache(maxsize=1)
def _reference_binding() -> Binding:
    # By its own signature: a release that is recorded later may take other keywords.
    return Binding(reference_kernel, describe_kernel(reference_kernel, newest().version))


def bind(backend: str) -> Binding:
    """Return the kernel that `backend` names: the torch reference, or FlashInfer's function."""
    if not isinstance(backend, str):
        invalid("backend", "must be a string", backend, "a backend's name", "pass 'auto'")
    return _reference_binding() if backend == "reference" else bind_kernel()
