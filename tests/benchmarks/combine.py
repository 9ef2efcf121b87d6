"""Combining partial states over 4 gloo ranks, each arm timed on its slowest rank.

"written out" is the all-to-all with its packing and its merge, unchecked and in this file: what
`combine` takes more is its Python. "naive" gathers all outputs and LSEs whole.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fi_dcp_compat import MLAState, combine, combine_buffers, merge_dcp_states
from fi_dcp_compat.collectives import all_gather, flat_bytes
from tests.ranks.launch import run_ranks

from .rounds import Row, Times, microseconds, ratio

RANKS, HEADS, DIM = 4, 128, 512
TOKENS = (1, 64)
ROUNDS = 30


def _written_out(state: MLAState, send: Tensor, receive: Tensor) -> MLAState:
    tokens, share = state.out.shape[0], HEADS // RANKS
    bits = state.lse.unsqueeze(-1).view(torch.int16)
    send[..., :DIM] = state.out.view(torch.int16).view(tokens, RANKS, share, DIM).transpose(0, 1)
    send[..., DIM:] = bits.view(tokens, RANKS, share, 2).transpose(0, 1)
    dist.all_to_all_single(receive.view(-1).view(torch.uint8), send.view(-1).view(torch.uint8))
    lses = receive[..., DIM:].contiguous().view(torch.float32).squeeze(-1)
    lses = torch.where(lses.isfinite(), lses, -torch.inf)
    top = lses.amax(dim=0)
    top = torch.where(top.isfinite(), top, 0.0)
    weights = torch.exp(lses - top)
    total = weights.sum(dim=0)
    weights = (weights / total.clamp(min=1.0)).unsqueeze(-1)
    outs = receive[..., :DIM].view(torch.bfloat16)
    out = torch.where(weights > 0, outs, 0.0).float().mul_(weights).sum(dim=0)
    return MLAState(out.to(torch.bfloat16), top + torch.log(total))


def _arms(rank: int, tokens: int) -> dict[str, Callable[[], object]]:
    generator = torch.Generator().manual_seed(rank)
    out = torch.randn(tokens, HEADS, DIM, generator=generator).bfloat16()
    state = MLAState(out, torch.randn(tokens, HEADS, generator=generator))
    share = slice(rank * HEADS // RANKS, (rank + 1) * HEADS // RANKS)
    outs, lses = out.new_empty(RANKS, *out.shape), state.lse.new_empty(RANKS, *state.lse.shape)
    buffers = send, receive = combine_buffers(state)
    theirs = combine_buffers(state)

    def naive() -> MLAState:
        all_gather(outs.view(-1), out.view(-1), None)
        all_gather(lses.view(-1), state.lse.view(-1), None)
        return merge_dcp_states(outs[:, :, share], lses[:, :, share])

    whole, alone = _written_out(state, *theirs), combine(state)
    assert whole.out.equal(alone.out)
    assert whole.lse.equal(alone.lse)
    return {
        "written out": lambda: _written_out(state, *theirs),
        "null": lambda: _written_out(state, *theirs),
        "a2a": lambda: combine(state, buffers=buffers),
        "a2a, buffers allocated": lambda: combine(state),
        "collective": lambda: dist.all_to_all_single(flat_bytes(receive), flat_bytes(send)),
        "ag_rs": lambda: combine(state, mode="ag_rs"),
        "ag_ar": lambda: combine(state, mode="ag_ar"),
        "naive": naive,
    }


def _job(rank: int, world_size: int) -> dict[int, Times]:
    found: dict[int, Times] = {}
    for tokens in TOKENS:
        arms = _arms(rank, tokens)
        names, order = list(arms), random.Random(0)  # of one order on all ranks
        times: Times = {name: [] for name in arms}
        calls = 8 if tokens == 1 else 2
        for index in range(ROUNDS + 1):
            order.shuffle(names)
            for name in names:
                dist.barrier()
                start = time.perf_counter()
                for _ in range(calls):
                    arms[name]()
                if index:  # the first round warms up
                    times[name].append((time.perf_counter() - start) / calls)
        found[tokens] = times
    return found


def combine_rows() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(_job, RANKS, Path(folder, "group"), timeout=600)
    rows = []
    for tokens in TOKENS:
        slowest: Times = {
            name: [max(taken) for taken in zip(*(r[tokens][name] for r in ranks), strict=True)]
            for name in ranks[0][tokens]
        }
        label = f"{RANKS} ranks, {tokens} x {HEADS} heads"
        rows += [
            microseconds(f"a2a written out, {label}", slowest, "written out"),
            ratio(f"null: {label}", slowest, "null", "written out"),
            ratio(f"combine a2a / written out, {label}", slowest, "a2a", "written out", 1.3),
        ]
        rows += [
            ratio(f"{name} / written out, {label}", slowest, name, "written out")
            for name in ("a2a, buffers allocated", "collective", "ag_rs", "ag_ar", "naive")
        ]
    return rows
