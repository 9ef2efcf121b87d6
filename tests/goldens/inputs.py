"""Messages about what a call is given: tensors, numbers, scales, values, sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fi_dcp_compat import (
    DCP,
    MLADecoder,
    bmm_scales,
    counter_bytes,
    debug_checks,
    decode_mla,
    merge_dcp_states,
    min_workspace_bytes,
    prepare_decode_mla,
    recorded,
    token_positions,
    token_slots,
)
from fi_dcp_compat.reference import trtllm_batch_decode_with_kv_cache_mla as reference
from fi_dcp_compat.testing import mock_kernel, use_kernel
from tests import test_debug, test_inputs
from tests.goldens.message import Case, case
from tests.support import call, dcp_of, stub_result
from tests.test_debug import compact_call, lens

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16

# Of `test_inputs.FAULTS`: one of each kind, with the argument that it is told of.
FAULTS = (
    "block_tables in torch.int64",
    "block_tables of 1 dimension",
    "rows of a wide table without a stride",
    "bmm1_scale=nan",
    "bmm2_scale tensor, two elements",
    "causal='yes'",
    "causal_seqlens_kv_global on another device",
    "counters too small, 148 SMs",
    "counters with gaps",
    "cum_seq_lens_q with gaps",
    "cum_seq_lens_q without max_q_len",
    "dcp a number",
    "DCP without lengths",
    "kv_cache of 2 dimensions",
    "kv_cache with gaps in a page",
    "kv_cache with pages of no token",
    "kv_lora_rank=7.0 (float), plain",
    "lse of 2 dimensions for a query of 4",
    "lse without return_lse",
    "max_q_len=7.0 (float), plain",
    "max_seq_len=True (bool), plain",
    "more tokens than max_q_len allows",
    "out in torch.float16",
    "q_len is not max_q_len",
    "qk_nope_head_dim=None (NoneType), plain",
    "qk_rope_head_dim='7' (str), plain",
    "query=None",
    "query of 2 dimensions",
    "query of another batch",
    "query off its alignment",
    "query without its rope part",
    "a flat query that does not divide",
    "a query of 4 dimensions with cum_seq_lens_q",
    "1 and 4 tokens asserted to be 2 each",
    "s21 no output scale for an fp8 cache",
    "s31 lse_base in FlashInfer's words",
    "s42 kv_cache without its rope part",
    "seq_lens=[7, 7]",
    "seq_lens of another batch",
    "seq_lens off its alignment",
    "sinks a list of two",
    "sinks of another batch",
    "skip_softmax_threshold_scale_factor=-1",
    "backend=None",
    "workspace off by 16 bytes, dcp",
    "workspace too small for cute-dsl",
)


def _refused(name: str) -> object:
    fault = test_inputs.FAULTS[name]
    return test_inputs.refusal(fault, fault.where[0])[0]


def _called(kernel: Any = stub_result, **changes: Any) -> None:
    with use_kernel(kernel, recorded("0.7.4")):
        decode_mla(**call(**changes))


def _decoder(**settings: Any) -> MLADecoder:
    return prepare_decode_mla(page_size=64, dtype=BF16, bmm1_scale=0.1, **settings)


def _run(**changes: Any) -> None:
    names = ("query", "kv_cache", "block_tables", "seq_lens", "max_seq_len", "workspace_buffer")
    with use_kernel(mock_kernel("0.7.4")):
        given = call(**changes)
        _decoder().run(*(given[name] for name in names))


def _sliced_heads() -> None:
    wide = torch.zeros(2, 2, 32, 576, dtype=BF16)
    with use_kernel(mock_kernel("0.6.14")):
        decode_mla(**call(q_len=2, query=wide[:, :, :16], backend="cute-dsl"))


def _too_many_counters() -> None:
    given = call(
        batch=20000,
        query=torch.zeros(576, dtype=BF16).expand(20000, 1, 128, 576),
        kv_cache=torch.zeros(1, 64, 576, dtype=BF16),
        backend="trtllm-gen",
    )
    with use_kernel(mock_kernel("0.6.14")):
        decode_mla(**given)


def _not_prepared(**arguments: Any) -> Tensor:
    raise RuntimeError("CuTe DSL MLA must be prepared before CUDA graph capture")


def _with_nan(**arguments: Any) -> Tensor:
    return torch.full((2, 1, 16, 512), torch.nan)


def _debugged(given: Callable[[], dict[str, Any]], kernel: Any = stub_result) -> None:
    with debug_checks(), use_kernel(kernel, recorded("0.7.4")):
        decode_mla(**given())


def cases() -> Iterator[tuple[str, Case]]:
    for name in FAULTS:
        yield f"decode_mla: {name}", case(_refused, name)
    for name, (given, *_) in test_debug.WRONG.items():
        yield f"debug_checks: {name}", case(_debugged, given)
    yield from ONES.items()


LENS = torch.tensor([55, 55], dtype=torch.int32)
SIZES: dict[str, Any] = {
    "abi": recorded("0.7.4"),
    "batch": 1,
    "q_len": 1,
    "num_heads": 1,
    "return_lse": False,
    "sm_count": 148,
}

ONES: dict[str, Case] = {
    "DCP: rank 8 of 8": case(DCP, 8, 8, LENS),
    "DCP: rank True": case(DCP, 8, True, LENS),
    "DCP: rank a tensor": case(DCP, 8, torch.tensor(3), LENS),
    "DCP: interleave": case(DCP, 8, 3, LENS, 64),
    "MLADecoder.run: another dtype": case(_run, dtype=torch.float16),
    "MLADecoder.run: other pages": case(_run, page_size=32),
    "bmm_scales: a dtype by name": case(bmm_scales, 0.1, "float8_e4m3fn"),
    "bmm_scales: missing": case(bmm_scales, 0.1, FP8, 1.0),
    "bmm_scales: superfluous": case(bmm_scales, 0.1, BF16, k_scale=0.5),
    "bmm_scales: a tensor": case(bmm_scales, torch.tensor(0.1), BF16),
    "bmm_scales: a scale of 0": case(bmm_scales, 0.1, FP8, 1.0, 0),
    "counter_bytes: no request": case(counter_bytes, 0, 1, 148),
    "debug_checks: NaN": case(_debugged, call, _with_nan),
    "debug_checks: a page outside the cache": case(
        _debugged, lambda: call(block_tables=lens(0, 1, 4, 3).view(2, 2))
    ),
    "debug_checks: a query length out of range": case(
        _debugged, lambda: compact_call(0, 4, 4, max_q_len=3)
    ),
    "decode_mla: a first call in a capture": case(_called, _not_prepared, dcp=dcp_of()),
    "decode_mla: a result of another shape": case(_called, lambda **_: torch.zeros(3)),
    "decode_mla: an output that wants a gradient": case(
        _called, out=torch.zeros(2, 1, 16, 512, dtype=BF16, requires_grad=True)
    ),
    "decode_mla: counters of as many requests": case(_too_many_counters),
    "decode_mla: no LSE from the kernel": case(
        _called, lambda **_: torch.zeros(2, 1, 16, 512), dcp=dcp_of()
    ),
    "decode_mla: query of heads that are a slice": case(_sliced_heads),
    "merge_dcp_states: lses of other shapes": case(
        merge_dcp_states, torch.ones(2, 1, 4), torch.ones(3, 1)
    ),
    "merge_dcp_states: outs that cannot be stacked": case(
        merge_dcp_states, [torch.ones(1, 4), torch.ones(2, 4)], [torch.ones(1), torch.ones(1)]
    ),
    "min_workspace_bytes: no such backend": case(min_workspace_bytes, "fa3", **SIZES),
    "reference: a page outside the cache": case(
        _called, backend="reference", block_tables=torch.full((2, 2), 99, dtype=torch.int32)
    ),
    "reference: offsets outside the query": case(
        _called,
        backend="reference",
        query=torch.zeros(2, 16, 576, dtype=BF16),
        cum_seq_lens_q=torch.tensor([0, 9, 10], dtype=torch.int32),
        max_q_len=1,
    ),
    "reference: sparse MLA": case(reference, *[None] * 9, sparse_mla_top_k=128),
    "token_positions: no integers": case(token_positions, lens(1).float(), 8, 3),
    "token_slots: no tensor": case(token_slots, 7, 8),
}
