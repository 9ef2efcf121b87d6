"""Batches for the worked integration: each layer's requests, and a step's metadata on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fi_dcp_compat import MLAState, combine, gather_query_heads, merge_dcp_states
from tests.hostsim.batches import Batch, random_batch

from .integration import Config, MetadataBuilder, MLAImpl, ParallelConfig, Step

FP8 = torch.float8_e4m3fn
# What they come to is the scale of a Batch, so that its full attention is what is expected.
FP8_SCALES: dict[str, float] = {"q_scale": 0.8, "k_scale": 1.25}
SCALE = 0.05
UNIFORM = ([1, 1, 1], [1, 9, 140]), ([3, 3, 3], [3, 9, 140])
RAGGED = [1, 3, 0, 2], [1, 50, 20, 300]
RELEASES = ("0.6.12", "0.6.16", "0.6.17", "0.7.0", "0.7.4")
DCP_RELEASES = RELEASES[2:]
WORLD, RANK = 8, 3
CONFIG = Config(
    parallel=ParallelConfig(WORLD),
    dcp_rank=RANK,
    num_heads=16,
    softmax_scale=0.1,
    page_size=64,
    table_width=2,
    max_num_seqs=4,
    max_query_len=3,
    device="cpu",
)
ALONE = replace(CONFIG, parallel=ParallelConfig(), dcp_rank=0)


def layers_of(
    q_lens: Sequence[int], contexts: Sequence[int], count: int = 2, **draw: Any
) -> list[Batch]:
    """Requests of the same lengths for each layer, with keys of its own."""
    drawn = random_batch(q_lens, contexts, **draw)
    quantised = drawn.keys[0].dtype is FP8
    drawn = replace(drawn, scale=SCALE, output_scale=FP8_SCALES["k_scale"] if quantised else 1.0)
    return [
        replace(drawn, keys=[keys.float().roll(layer, -1).to(keys.dtype) for keys in drawn.keys])
        for layer in range(count)
    ]


def query(requests: Batch) -> Tensor:
    """[num_tokens, H, D], as a stack has it."""
    return torch.cat(requests.queries)


def cache(requests: Batch, rank: int, world: int) -> Tensor:
    pages = requests.paged(rank, world)["kv_cache"]
    assert isinstance(pages, Tensor)
    return pages


def step_of(requests: Batch, rank: int = 0, world: int = 1) -> Step:
    given: dict[str, Any] = requests.paged(rank, world) | requests.varlen()
    return Step(
        num_tokens=sum(map(len, requests.queries)),
        max_query_len=given["max_q_len"],
        max_seq_len=max(map(len, requests.keys)),
        seq_lens=requests.bounds(),
        query_start_loc=given["cum_seq_lens_q"],
        block_tables=given["block_tables"],
    )


def config_of(requests: Batch, rank: int = 0, world: int = 1, **changes: Any) -> Config:
    step = step_of(requests, rank, world)
    config = Config(
        parallel=ParallelConfig(world),
        dcp_rank=rank,
        num_heads=requests.queries[0].shape[1],
        softmax_scale=SCALE,
        page_size=requests.page_size,
        table_width=step.block_tables.shape[1],
        # Far more than the step has: that the buffers fit a full batch says nothing of a small one.
        max_num_seqs=128,
        max_query_len=step.max_query_len,
        ragged=len(set(map(len, requests.queries))) > 1,
        dtype=requests.keys[0].dtype,
        device="cpu",
    )
    return replace(config, **changes)


def impl_of(config: Config) -> MLAImpl:
    return MLAImpl(config, **FP8_SCALES if config.dtype is FP8 else {})


def states_of_ranks(layers: list[Batch], world: int, **changes: Any) -> list[list[MLAState]]:
    """Run one step on each rank: for each layer the states of the ranks; zeros where no LSE is."""
    states: list[list[MLAState]] = [[] for _ in layers]
    for rank in range(world):
        config = config_of(layers[0], rank, world, **changes)
        metadata = MetadataBuilder(config).build(step_of(layers[0], rank, world))
        for layer, requests in enumerate(layers):
            pages = cache(requests, rank, world)
            out, lse = impl_of(config).forward_mqa(query(requests), pages, metadata)
            assert (lse is None) == (world == 1)
            states[layer].append(MLAState(out, torch.zeros(out.shape[:-1]) if lse is None else lse))
    return states


def assert_full_attention(out: Tensor, expected: Tensor) -> None:
    assert out.shape == expected.shape
    assert out.dtype is torch.bfloat16
    # bf16 rounds each rank's output and the merged one.
    torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=2**-7, equal_nan=False)


def assert_ranks_merge(layers: list[Batch], world: int, **changes: Any) -> None:
    """Compare each layer's merged states with full attention over its keys."""
    for requests, states in zip(layers, states_of_ranks(layers, world, **changes), strict=True):
        merged = merge_dcp_states([s.out for s in states], [s.lse for s in states])
        out, lse = requests.expected()
        assert_full_attention(merged.out, out)
        if world > 1:
            torch.testing.assert_close(merged.lse.double(), lse, rtol=1e-5, atol=1e-5)


def attend_as_a_rank(rank: int, world: int) -> None:
    """Do what a stack does around `forward_mqa`: local heads in, local heads out."""
    for q_lens, contexts in (*UNIFORM, RAGGED):
        layers = layers_of(q_lens, contexts, num_heads=8)
        local = slice(rank * 8 // world, (rank + 1) * 8 // world)
        config = config_of(layers[0], rank, world, backend="reference")
        metadata = MetadataBuilder(config).build(step_of(layers[0], rank, world))
        for requests in layers:
            heads = gather_query_heads(query(requests)[:, local], dist.group.WORLD)
            pages = cache(requests, rank, world)
            out, lse = impl_of(config).forward_mqa(heads, pages, metadata)
            assert lse is not None
            merged = combine(MLAState(out, lse), dist.group.WORLD)
            assert_full_attention(merged.out, requests.expected()[0][:, local])
