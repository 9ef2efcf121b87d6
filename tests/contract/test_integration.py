"""The worked integration on the torch reference, and on mocks of releases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fi_dcp_compat import FlashInferVersionError, InvalidInputError
from fi_dcp_compat.testing import mock_kernel, use_kernel
from tests.ranks.launch import run_ranks

from .integration import Config, MetadataBuilder, Step
from .integration_cases import (
    ALONE,
    CONFIG,
    DCP_RELEASES,
    FP8,
    RAGGED,
    RANK,
    RELEASES,
    UNIFORM,
    WORLD,
    assert_full_attention,
    assert_ranks_merge,
    attend_as_a_rank,
    cache,
    config_of,
    impl_of,
    layers_of,
    query,
    step_of,
)

# 31 and 36 keys in all: rank 3 of 8 holds 4 and 5.
STEP = Step(
    num_tokens=6,
    max_query_len=3,
    max_seq_len=36,
    seq_lens=torch.tensor([31, 36], dtype=torch.int32),
    query_start_loc=torch.tensor([0, 3, 6], dtype=torch.int32),
    block_tables=torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
)
RAGGED_STEP = replace(
    STEP, num_tokens=4, query_start_loc=torch.tensor([0, 1, 4], dtype=torch.int32)
)
PAGES = torch.zeros(4, 64, 576, dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("lengths", [*UNIFORM, RAGGED], ids=["1 token", "3 tokens", "ragged"])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_the_layers_of_a_step_merge_to_full_attention(
    world: int, lengths: tuple[list[int], list[int]], dtype: torch.dtype
) -> None:
    assert_ranks_merge(layers_of(*lengths, count=3, dtype=dtype), world, backend="reference")


def test_the_ranks_of_a_process_group_combine_to_full_attention(tmp_path: Path) -> None:
    assert run_ranks(attend_as_a_rank, 2, tmp_path / "group") == [None] * 2


def test_steps_of_other_sizes_share_a_builders_buffers() -> None:
    (large,), (small,) = (
        layers_of(q_lens, contexts, count=1)
        for q_lens, contexts in (([1] * 5, [9, 140, 3, 77, 31]), ([1, 1], [50, 129]))
    )
    config = config_of(large, backend="reference")
    builder, impl = MetadataBuilder(config), impl_of(config)
    addresses = set()
    for requests in (large, small, large):
        # Lengths that a stack keeps as int64 are cast; the kernel reads int32.
        step = replace(step_of(requests), seq_lens=requests.bounds().long())
        metadata = builder.build(step)
        lens = [metadata.seq_lens, metadata.global_seq_lens]
        assert [tensor.dtype for tensor in lens] == [torch.int32] * 2
        addresses.add(tuple(tensor.data_ptr() for tensor in lens))
        assert metadata.workspace is builder.workspace
        assert metadata.counters is builder.counters
        out, _ = impl.forward_mqa(query(requests), cache(requests, 0, 1), metadata)
        assert_full_attention(out, requests.expected()[0])
    assert len(addresses) == 1


@pytest.mark.parametrize("step", [STEP, RAGGED_STEP], ids=["uniform", "ragged"])
@pytest.mark.parametrize("config", [CONFIG, ALONE], ids=["DCP", "no DCP"])
def test_building_a_step_reads_no_value_of_a_tensor(config: Config, step: Step) -> None:
    # Tensors of the meta device have none.
    builder = MetadataBuilder(replace(config, backend="reference", device="meta"))
    tensors: dict[str, Any] = {
        name: value.to("meta") for name, value in vars(step).items() if isinstance(value, Tensor)
    }
    metadata = builder.build(replace(step, **tensors))
    assert metadata.seq_lens.shape == (2,)
    assert metadata.max_seq_len == (5 if config is CONFIG else 36)


def assert_called_with(given: Mapping[str, Any], expected: dict[str, Any]) -> None:
    assert given.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, Tensor):
            # The same memory: nothing was copied on the way.
            assert given[name].data_ptr() == value.data_ptr(), name
            assert (given[name].shape, given[name].dtype) == (value.shape, value.dtype), name
            assert given[name].equal(value), name
        else:
            assert given[name] == value, name


@pytest.mark.parametrize("ragged", [False, True], ids=["uniform", "ragged"])
@pytest.mark.parametrize("release", DCP_RELEASES)
def test_a_release_with_dcp_gets_exactly_these_keywords(release: str, ragged: bool) -> None:
    kernel, step = mock_kernel(release), RAGGED_STEP if ragged else STEP
    q = torch.zeros(step.num_tokens, 16, 576, dtype=torch.bfloat16)
    config = replace(CONFIG, ragged=ragged)
    with use_kernel(kernel):
        impl = impl_of(config)
        if ragged and release == "0.6.17":
            assert not impl.supports_dcp_compact_varlen
            with pytest.raises(FlashInferVersionError, match=r"Needed: 0\.7\.0 or newer"):
                MetadataBuilder(config)
            assert impl.supports_combination(config) is not None
            return
        metadata = MetadataBuilder(config).build(step)
        out, lse = impl.forward_mqa(q, PAGES, metadata)
    assert out.shape == (step.num_tokens, 16, 512)
    assert lse is not None
    assert lse.shape == (step.num_tokens, 16)
    assert kernel.call_args.args == ()
    expected = {
        "query": q if ragged else q.view(2, 3, 16, 576),
        "kv_cache": PAGES.unsqueeze(1),
        "workspace_buffer": metadata.workspace,
        "qk_nope_head_dim": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "block_tables": step.block_tables,
        "seq_lens": metadata.seq_lens,
        "max_seq_len": 5,
        "bmm1_scale": 0.1,
        "bmm2_scale": 1.0,
        "backend": "cute-dsl",
        "return_lse": True,
        "enable_dcp": True,
        "cp_world": WORLD,
        "cp_rank": RANK,
        "causal_seqlens_kv_global": metadata.global_seq_lens,
    }
    if ragged:
        expected |= {"cum_seq_lens_q": step.query_start_loc, "max_q_len": 3}
    if release == "0.7.4":
        expected["return_lse_base"] = "basee"
    assert_called_with(kernel.call_args.kwargs, expected)
    assert metadata.seq_lens.tolist() == [4, 5]
    assert metadata.global_seq_lens.tolist() == [31, 36]


def test_a_ragged_step_that_nobody_announced_is_refused_by_its_numbers() -> None:
    kernel, q = mock_kernel("0.7.4"), torch.zeros(4, 16, 576, dtype=torch.bfloat16)
    with use_kernel(kernel), pytest.raises(InvalidInputError, match="2 requests of max_q_len=3"):
        impl_of(CONFIG).forward_mqa(q, PAGES, MetadataBuilder(CONFIG).build(RAGGED_STEP))
    kernel.assert_not_called()


@pytest.mark.parametrize("release", RELEASES)
def test_without_dcp_every_release_runs(release: str) -> None:
    kernel, q = mock_kernel(release), torch.zeros(6, 16, 576, dtype=torch.bfloat16)
    with use_kernel(kernel):
        metadata = MetadataBuilder(ALONE).build(STEP)
        out, lse = impl_of(ALONE).forward_mqa(q, PAGES, metadata)
    assert out.shape == (6, 16, 512)
    assert lse is None
    expected = {
        "query": q.view(2, 3, 16, 576),
        "kv_cache": PAGES.unsqueeze(1),
        "workspace_buffer": metadata.workspace,
        "qk_nope_head_dim": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "block_tables": STEP.block_tables,
        "seq_lens": metadata.seq_lens,
        "max_seq_len": 36,
        "bmm1_scale": 0.1,
        "bmm2_scale": 1.0,
        # On 0.6.12 cute-dsl masks nothing between the query tokens.
        "backend": "trtllm-gen" if release == "0.6.12" else "auto",
    }
    if release != "0.6.12":
        expected["multi_ctas_kv_counter_buffer"] = metadata.counters
    assert_called_with(kernel.call_args.kwargs, expected)
    assert metadata.seq_lens.tolist() == [31, 36]
