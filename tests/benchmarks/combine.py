"""Combining partial states over gloo ranks: time and bytes of each mode, as ratios in one run.

``python -m tests.benchmarks.combine`` starts 4 ranks on this machine and alternates the arms; the
ratios are to the "a2a" of the same round, on the slowest rank. "bare" is its collective alone,
"null" is "a2a" again: its spread is the noise. "naive" gathers all outputs and LSEs whole.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from fi_dcp_compat import MLAState, combine, combine_buffers, merge_dcp_states
from fi_dcp_compat.collectives import all_gather, flat_bytes
from tests.ranks.launch import run_ranks

RANKS, TOKENS, HEADS, DIM = 4, 64, 128, 512
ROUNDS, CALLS = 40, 3


def sent() -> dict[str, int]:
    """Return the bytes that each mode sends from a rank to others.

    A gather sends all that a rank has to each other one; a reduction sends its float32 around once.
    """
    out, lse, others = TOKENS * HEADS * DIM * 2, TOKENS * HEADS * 4, RANKS - 1
    reduced = 2 * out * others // RANKS
    return {
        "a2a": (out + lse) * others // RANKS,
        "ag_rs": lse * others + reduced,
        "ag_ar": lse * others + 2 * reduced,
        "naive": (out + lse) * others,
    }


def arms(rank: int) -> dict[str, Callable[[], object]]:
    random = torch.Generator().manual_seed(rank)
    out = torch.randn(TOKENS, HEADS, DIM, generator=random).bfloat16()
    state = MLAState(out, torch.randn(TOKENS, HEADS, generator=random))
    share = slice(rank * HEADS // RANKS, (rank + 1) * HEADS // RANKS)
    outs, lses = out.new_empty(RANKS, *out.shape), state.lse.new_empty(RANKS, *state.lse.shape)
    send, receive = combine_buffers(state)

    def naive() -> MLAState:
        all_gather(outs.view(-1), out.view(-1), None)
        all_gather(lses.view(-1), state.lse.view(-1), None)
        return merge_dcp_states(outs[:, :, share], lses[:, :, share])

    def bare() -> None:
        dist.all_to_all_single(flat_bytes(receive), flat_bytes(send))

    buffers = combine_buffers(state)
    return {
        "a2a": lambda: combine(state),
        "null": lambda: combine(state),
        "a2a, buffers kept": lambda: combine(state, buffers=buffers),
        "bare": bare,
        "ag_rs": lambda: combine(state, mode="ag_rs"),
        "ag_ar": lambda: combine(state, mode="ag_ar"),
        "naive": naive,
    }


def run(rank: int, world_size: int) -> dict[str, list[float]]:
    calls = arms(rank)
    took: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(ROUNDS + 1):
        for name in sorted(calls, reverse=bool(index % 2)):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(CALLS):
                calls[name]()
            if index:  # the first round warms up
                took[name].append((time.perf_counter() - start) / CALLS)
    return took


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(run, RANKS, Path(folder, "group"), timeout=600)
    slowest = {
        name: [max(times) for times in zip(*(took[name] for took in ranks), strict=True)]
        for name in ranks[0]
    }
    base = slowest["a2a"]
    moved = sent()
    print(f"{RANKS} gloo ranks, T={TOKENS}, H={HEADS}: a2a {statistics.median(base) * 1e3:.2f} ms")
    for name, times in slowest.items():
        ratios = [arm / own for arm, own in zip(times, base, strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        bytes_sent = f", {moved[name] / 2**20:.2f} MiB a rank" if name in moved else ""
        print(f"{name}: {median:.2f} times a2a (quartiles {low:.2f} to {high:.2f}){bytes_sent}")


if __name__ == "__main__":
    main()
