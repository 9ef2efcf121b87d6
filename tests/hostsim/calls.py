"""FlashInfer's own function, called by hand."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from .batches import Batch


def flashinfer_function() -> Callable[..., Any]:
    module = importlib.import_module("flashinfer.decode")
    function: Callable[..., Any] = module.trtllm_batch_decode_with_kv_cache_mla
    return function


def decode(requests: Batch, **keywords: object) -> Any:
    """Decode a batch with a workspace of its own; `keywords` go on top."""
    arguments: dict[str, object] = {
        "query": requests.query(),
        "workspace_buffer": torch.zeros(24 << 20, dtype=torch.int8),
        "qk_nope_head_dim": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "bmm1_scale": requests.scale,
        "bmm2_scale": requests.output_scale,
        **requests.paged(),
    }
    return flashinfer_function()(**(arguments | keywords))
