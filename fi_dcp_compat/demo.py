"""A DCP decode on this machine, rank by rank in plain torch, held against full attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .dcp import DCP, local_seq_lens
from .decode import decode_mla
from .lse import MLAState, merge_dcp_states

__all__ = ["Report", "run"]

# bf16 rounds by at most 2**-9 of a value: once each rank's output, once the merged one. The LSE
# stays float32.
BF16_ROUNDINGS = 2 * 2.0**-9
LSE_TOLERANCE = 1e-4

_HEADS, _RANK, _ROPE, _PAGE = 16, 512, 64, 64


class Report(NamedTuple):
    """What `run` did.

    Attributes
    ----------
    states : list of MLAState
        Each rank's partial state, out [B, q_len, H, kv_lora_rank], lse [B, q_len, H].
    local_lens : list of list of int
        Each rank's local lengths.
    max_error, max_lse_error : float
        Largest absolute difference of the merged state from full attention.
    allowed_error : float
        What bf16 explains: `BF16_ROUNDINGS` of the largest cached value.
    """

    global_lens: list[int]
    local_lens: list[list[int]]
    states: list[MLAState]
    max_error: float
    max_lse_error: float
    allowed_error: float

    @property
    def passed(self) -> bool:
        """Whether the error is what bf16 rounding explains."""
        return self.max_error <= self.allowed_error and self.max_lse_error <= LSE_TOLERANCE


def run(world_size: int, q_len: int, *, seed: int = 0) -> Report:
    """Decode a small batch over `world_size` ranks through `decode_mla`, and merge."""
    generator = torch.Generator().manual_seed(seed)
    # One request shorter than the world, so some ranks hold none of its keys.
    global_lens = [max(q_len, world_size // 2), q_len + 5 * world_size, q_len + 150]
    batch, dim = len(global_lens), _RANK + _ROPE
    scale = 192.0**-0.5
    query = torch.randn(batch, q_len, _HEADS, dim, generator=generator).bfloat16()
    contexts = [torch.randn(n, dim, generator=generator).bfloat16() for n in global_lens]
    causal = torch.tensor(global_lens, dtype=torch.int32)
    workspace = torch.empty(0, dtype=torch.int8)

    states, local_lens = [], []
    for rank in range(world_size):
        seq_lens = local_seq_lens(causal, world_size, rank)
        longest = int(seq_lens.max())
        cache, tables = _paged([context[rank::world_size] for context in contexts], longest)
        states.append(
            decode_mla(
                query,
                cache,
                workspace_buffer=workspace,
                block_tables=tables,
                seq_lens=seq_lens,
                max_seq_len=longest,
                bmm1_scale=scale,
                dcp=DCP(world_size, rank, causal),
                backend="reference",
            )
        )
        local_lens.append(seq_lens.tolist())
    merged = merge_dcp_states([s.out for s in states], [s.lse for s in states])
    errors = [0.0, 0.0]
    for row, context in enumerate(contexts):
        for token in range(q_len):
            seen = context[: len(context) - (q_len - 1 - token)]
            out, lse = _full_attention(query[row, token], seen, scale)
            for index, (got, want) in enumerate(
                ((merged.out[row, token], out), (merged.lse[row, token], lse))
            ):
                error = float((got.double() - want).abs().max())
                # NaN compares false with everything; it is the largest error there is.
                errors[index] = max(errors[index], error if error == error else torch.inf)
    largest = max(float(context[:, :_RANK].abs().max()) for context in contexts)
    return Report(global_lens, local_lens, states, errors[0], errors[1], BF16_ROUNDINGS * largest)


def _full_attention(query: Tensor, keys: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = query.double() @ keys.double().T * scale
    return torch.softmax(scores, dim=-1) @ keys[:, :_RANK].double(), torch.logsumexp(scores, -1)


def _paged(shards: list[Tensor], longest: int) -> tuple[Tensor, Tensor]:
    step = 128 // _PAGE
    width = -(-max(longest, 1) // (_PAGE * step)) * step
    cache = torch.zeros(len(shards) * width, _PAGE, shards[0].shape[1], dtype=torch.bfloat16)
    # Pages are handed out backwards, so a table that is not read shows.
    tables = torch.arange(len(cache) - 1, -1, -1, dtype=torch.int32).view(len(shards), width)
    for table, shard in zip(tables.tolist(), shards, strict=True):
        for start, page in zip(range(0, len(shard), _PAGE), table, strict=False):
            tokens = shard[start : start + _PAGE]
            cache[page, : len(tokens)] = tokens
    return cache, tables


def render(report: Report, q_len: int) -> str:
    """Write the report as a small table."""
    world_size = len(report.states)
    lines = [
        f"{world_size} ranks, q_len {q_len}, {_HEADS} heads, global lengths {report.global_lens}",
        "",
        f"{'rank':>4}  {'local lengths':<20}  {'empty rows':>10}  {'LSE range':>18}",
    ]
    for rank, (state, lens) in enumerate(zip(report.states, report.local_lens, strict=True)):
        # A row is one query token of one request; all its heads see the same keys.
        rows = state.lse.flatten(0, 1)
        empty = rows.isinf().all(dim=-1)
        seen = rows[~empty]
        span = f"{float(seen.min()):.3f} .. {float(seen.max()):.3f}" if seen.numel() else "none"
        count = f"{int(empty.sum())} of {len(rows)}"
        lines.append(f"{rank:>4}  {lens!s:<20}  {count:>10}  {span:>18}")
    verdict = "ok" if report.passed else "WRONG"
    lines += [
        "",
        f"merged against full attention, max error: out {report.max_error:.2e} (bf16 allows "
        f"{report.allowed_error:.2e}), lse {report.max_lse_error:.2e}: {verdict}",
    ]
    return "\n".join(lines)
