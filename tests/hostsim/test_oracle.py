"""The oracle against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from .oracle import full_attention


def test_causality_hides_the_newest_keys() -> None:
    query, keys = torch.zeros(2, 1, 3), torch.eye(3)
    out, lse = full_attention(query, keys, kv_lora_rank=2, scale=1.0, causal=False)
    assert torch.equal(out, torch.full((2, 1, 2), 1 / 3, dtype=torch.float64))
    assert lse.flatten().tolist() == pytest.approx([math.log(3)] * 2)
    _, lse = full_attention(query, keys, kv_lora_rank=2, scale=1.0)
    assert lse.flatten().tolist() == pytest.approx([math.log(2), math.log(3)])
