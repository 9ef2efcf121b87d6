"""Host time of a DCP call, as a ratio to what a stack writes by hand; no GPU, no kernel.

``python -m tests.benchmarks.call_overhead`` alternates the arms and prints medians of the ratios
within a round. The null arm is the hand-written wrapper against itself: its spread is the noise.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fi_dcp_compat import DCP, decode_mla, prepare_decode_mla, recorded
from fi_dcp_compat.testing import use_kernel

ROUNDS, CALLS = 60, 300
WORLD, RANK, BATCH, Q_LEN, HEADS = 8, 3, 2, 3, 24

out = torch.zeros(BATCH, Q_LEN, HEADS, 512, dtype=torch.bfloat16)
lse = torch.zeros(BATCH * Q_LEN, HEADS)
query = torch.zeros(BATCH * Q_LEN, HEADS, 576, dtype=torch.bfloat16)
cache = torch.zeros(2, 128, 576, dtype=torch.bfloat16)
tables = torch.tensor([[0], [1]], dtype=torch.int32)
local_lens = torch.tensor([4, 5], dtype=torch.int32)
global_lens = torch.tensor([31, 36], dtype=torch.int32)
workspace = torch.zeros(1 << 20, dtype=torch.int8)


def kernel(**arguments: Any) -> tuple[Tensor, Tensor]:
    return out, lse


def by_hand() -> tuple[Tensor, Tensor]:
    """What a stack's backend does today: reshape, call, reshape; nothing is checked."""
    o, state = kernel(
        query=query.view(BATCH, Q_LEN, HEADS, 576),
        kv_cache=cache.unsqueeze(1),
        workspace_buffer=workspace,
        qk_nope_head_dim=128,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        block_tables=tables,
        seq_lens=local_lens,
        max_seq_len=9,
        bmm1_scale=0.1,
        bmm2_scale=1.0,
        backend="cute-dsl",
        return_lse=True,
        enable_dcp=True,
        cp_world=WORLD,
        cp_rank=RANK,
        causal_seqlens_kv_global=global_lens,
    )
    return o.view(-1, HEADS, 512), state


def one_shot() -> object:
    return decode_mla(
        query,
        cache,
        workspace_buffer=workspace,
        block_tables=tables,
        seq_lens=local_lens,
        max_seq_len=9,
        bmm1_scale=0.1,
        dcp=DCP(WORLD, RANK, global_lens),
    )


def main() -> None:
    with use_kernel(kernel, recorded("0.7.4")):
        decoder = prepare_decode_mla(
            page_size=128,
            dtype=torch.bfloat16,
            dcp_world_size=WORLD,
            dcp_rank=RANK,
            bmm1_scale=0.1,
        )

        def prepared() -> object:
            return decoder.run(
                query,
                cache,
                tables,
                local_lens,
                9,
                workspace,
                causal_seqlens_kv_global=global_lens,
            )

        arms: dict[str, Callable[[], object]] = {
            "by hand": by_hand,
            "null": by_hand,
            "prepared": prepared,
            "one-shot": one_shot,
        }
        rounds: dict[str, list[float]] = {name: [] for name in arms}
        for index in range(ROUNDS + 1):
            for name in sorted(arms, reverse=bool(index % 2)):
                start = time.perf_counter()
                for _ in range(CALLS):
                    arms[name]()
                if index:  # the first round warms up
                    rounds[name].append((time.perf_counter() - start) / CALLS * 1e6)
    base = rounds.pop("by hand")
    print(f"by hand: {statistics.median(base):.2f} us a call")
    for name, times in rounds.items():
        ratios = [arm / hand for arm, hand in zip(times, base, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        median = statistics.median(ratios)
        print(f"{name}: {median:.2f} times by hand (quartiles {low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
