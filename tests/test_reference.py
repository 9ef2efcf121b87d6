"""The torch kernel against float64 full attention, called with FlashInfer's own keywords."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fi_dcp_compat import InvalidInputError, merge_dcp_states, recorded
from fi_dcp_compat.reference import trtllm_batch_decode_with_kv_cache_mla as reference
from fi_dcp_compat.releases import recorded_versions
from tests.hostsim.batches import Batch, random_batch
from tests.support import signature

DTYPES = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32]


def run(requests: Batch, rank: int = 0, world: int = 1, **keywords: Any) -> Any:
    arguments: dict[str, Any] = {
        "query": requests.query(),
        "workspace_buffer": torch.empty(0),
        "qk_nope_head_dim": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "bmm1_scale": requests.scale,
        "bmm2_scale": requests.output_scale,
        **requests.paged(rank, world),
    }
    return reference(**(arguments | keywords))


def run_rank(requests: Batch, rank: int, world: int, **keywords: Any) -> Any:
    return run(
        requests,
        rank,
        world,
        enable_dcp=True,
        cp_world=world,
        cp_rank=rank,
        causal_seqlens_kv_global=requests.bounds(),
        return_lse=True,
        **keywords,
    )


def assert_close(got: Tensor, want: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(
        got.double().reshape(want.shape), want, rtol=tolerance, atol=tolerance
    )


def test_it_has_the_newest_recorded_signature() -> None:
    theirs = signature(recorded(recorded_versions()[-1]))
    ours = inspect.signature(reference)
    assert [(p.name, p.default, p.kind) for p in ours.parameters.values()] == [
        (p.name, p.default, p.kind) for p in theirs.parameters.values()
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [1, 32, 64])
@pytest.mark.parametrize("q_len", [1, 3])
def test_one_rank_is_full_attention(q_len: int, page_size: int, dtype: torch.dtype) -> None:
    requests = random_batch([q_len] * 2, [q_len, 70], page_size=page_size, dtype=dtype)
    out, lse = run(requests, return_lse=True, return_lse_base="basee")
    want_out, want_lse = requests.expected()
    exact = dtype is torch.float32
    assert out.dtype is (torch.float32 if exact else torch.bfloat16)
    assert_close(out, want_out, 1e-5 if exact else 2**-8)
    assert_close(lse, want_lse, 1e-5)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("q_len", [1, 2, 5])
def test_the_merged_ranks_are_full_attention(world: int, q_len: int) -> None:
    requests = random_batch([q_len] * 3, [q_len, 9, 140], dtype=torch.float32)
    states = [run_rank(requests, rank, world) for rank in range(world)]
    merged = merge_dcp_states(
        [out for out, _ in states], [lse.view(3, q_len, 4) for _, lse in states]
    )
    want_out, want_lse = requests.expected()
    assert_close(merged.out, want_out, 1e-5)
    assert_close(merged.lse, want_lse, 1e-5)


@pytest.mark.parametrize("world", [1, 4])
def test_compact_queries_are_full_attention(world: int) -> None:
    requests = random_batch([1, 3, 0, 2], [1, 50, 20, 140], dtype=torch.float32)
    states = [run_rank(requests, rank, world, **requests.varlen()) for rank in range(world)]
    merged = merge_dcp_states([out for out, _ in states], [lse for _, lse in states])
    want_out, want_lse = requests.expected()
    assert merged.lse.shape == (6, 4)
    assert_close(merged.out, want_out, 1e-5)
    assert_close(merged.lse, want_lse, 1e-5)


def test_the_visible_keys_are_those_of_scenario_s04() -> None:
    # Distinct values make the output tell which keys a row saw: G=10, q_len=3, W=4.
    requests = random_batch([3], [10], dtype=torch.float32)
    for rank, visible in enumerate(([2, 3, 3], [2, 2, 3], [2, 2, 2], [2, 2, 2])):
        out, lse = run_rank(requests, rank, 4)
        for token, count in enumerate(visible):
            keys = requests.keys[0][rank::4][:count]
            scores = requests.queries[0][token].double() @ keys.double().T * requests.scale
            want = torch.softmax(scores, -1) @ keys[:, :512].double() * requests.output_scale
            assert_close(out[0, token], want, 1e-5)
            assert_close(lse[token], torch.logsumexp(scores, -1), 1e-5)


@pytest.mark.parametrize("dcp", [False, True])
def test_an_empty_row_is_zero_and_minus_infinity(dcp: bool) -> None:
    requests = random_batch([2, 2], [0, 40])
    state = run_rank(requests, 1, 2) if dcp else run(requests, return_lse=True)
    out, lse = state
    assert (out[0] == 0).all()
    assert (lse[:2] == -torch.inf).all()
    assert out[1].isfinite().all()
    assert lse[2:].isfinite().all()


def test_nan_in_keys_that_no_length_reaches_stays_out() -> None:
    requests = random_batch([1], [40], page_size=32)
    given = requests.paged()
    cache, table = given["kv_cache"], given["block_tables"]
    assert isinstance(cache, Tensor)
    assert isinstance(table, Tensor)
    cache[int(table[0, 1]), 8:] = torch.nan
    out = run(requests, kv_cache=cache)
    assert_close(out, requests.expected()[0], 2**-8)


@pytest.mark.parametrize(
    ("keywords", "factor"),
    [
        ({"backend": "trtllm-gen"}, math.log2(math.e)),
        ({"backend": "auto"}, math.log2(math.e)),
        ({"backend": "cute-dsl"}, 1.0),
        ({"backend": "trtllm-gen", "return_lse_base": "basee"}, 1.0),
        ({"backend": "cute-dsl", "return_lse_base": "base2"}, math.log2(math.e)),
    ],
)
def test_the_lse_base_is_flashinfers(keywords: dict[str, Any], factor: float) -> None:
    requests = random_batch([2], [40])
    _, lse = run(requests, return_lse=True, **keywords)
    assert_close(lse, requests.expected()[1] * factor, 1e-5)


def test_sinks_take_weight_and_count_in_the_lse() -> None:
    requests, sinks = random_batch([2], [40]), torch.tensor([-1.0, 0.0, 1.0, 2.0])
    out, lse = run(requests, sinks=[sinks], return_lse=True, return_lse_base="basee")
    want_out, want_lse = requests.expected(sinks=sinks)
    assert_close(out, want_out, 2**-8)
    assert_close(lse, want_lse, 1e-5)


def test_buffers_and_tensor_scales_are_used() -> None:
    requests = random_batch([2, 2], [40, 41])
    out, lse = torch.empty(2, 2, 4, 512).bfloat16(), torch.empty(4, 4)
    state = run(
        requests,
        out=out,
        lse=lse,
        return_lse=True,
        return_lse_base="basee",
        bmm1_scale=torch.tensor([requests.scale]),
        bmm2_scale=torch.tensor([requests.output_scale]),
    )
    assert state[0] is out
    assert state[1] is lse
    assert_close(out, requests.expected()[0], 2**-8)
    assert_close(lse, requests.expected()[1], 1e-5)


@pytest.mark.parametrize(
    "keywords",
    [
        {"sparse_mla_top_k": 16},
        {"skip_softmax_threshold_scale_factor": 1e-3},
        {"cum_seq_lens_q": torch.tensor([0, 1], dtype=torch.int32)},
    ],
    ids=lambda keywords: next(iter(keywords)),
)
def test_what_it_does_not_compute_is_refused(keywords: dict[str, Any]) -> None:
    name = next(iter(keywords))
    with pytest.raises(InvalidInputError, match=f"torch reference does not take {name}"):
        run(random_batch([1], [40]), **keywords)


def test_with_dcp_it_needs_the_global_lengths() -> None:
    with pytest.raises(ValueError, match="causal_seqlens_kv_global is required"):
        run(random_batch([1], [40]), enable_dcp=True, cp_world=2, cp_rank=0)
