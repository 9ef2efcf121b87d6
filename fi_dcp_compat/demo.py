"""A DCP decode on this machine, rank by rank in plain torch, held against full attention."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypedDict

import torch
from torch import Tensor

from .dcp import DCP, local_seq_lens
from .decode import decode_mla
from .lse import MLAState, merge_dcp_states

__all__ = ["Batch", "Report", "run"]

# bf16 rounds by at most 2**-8 of a value: once each rank's output, once the merged one. The LSE
# stays float32.
BF16_ROUNDINGS = 2 * 2.0**-8
LSE_TOLERANCE = 1e-4

_HEADS, _RANK, _ROPE, _PAGE = 16, 512, 64, 64
_SCALE = 192.0**-0.5


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
    batch = Batch.drawn(world_size, q_len, seed)
    states: list[MLAState] = []
    local_lens: list[list[int]] = []
    for rank in range(world_size):
        arguments = batch.arguments(world_size, rank)
        dcp = DCP(world_size, rank, batch.causal)
        states.append(decode_mla(batch.query, dcp=dcp, **arguments))
        local_lens.append([int(length) for length in arguments["seq_lens"]])
    merged = merge_dcp_states([s.out for s in states], [s.lse for s in states])
    out_error, lse_error = batch.errors(merged)
    return Report(
        batch.causal.tolist(), local_lens, states, out_error, lse_error, batch.allowed_error
    )


class _Arguments(TypedDict):
    kv_cache: Tensor
    workspace_buffer: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    max_seq_len: int
    bmm1_scale: float
    backend: Literal["reference"]


class Batch(NamedTuple):
    """Queries [B, q_len, H, D] and the unpaged keys of each request."""

    query: Tensor
    contexts: list[Tensor]
    causal: Tensor

    @classmethod
    def drawn(cls, world_size: int, q_len: int, seed: int, heads: int = _HEADS) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        # One request shorter than the world, so some ranks hold none of its keys.
        lens = [max(q_len, world_size // 2), q_len + 5 * world_size, q_len + 150]
        dim = _RANK + _ROPE
        query = torch.randn(len(lens), q_len, heads, dim, generator=generator).bfloat16()
        contexts = [torch.randn(n, dim, generator=generator).bfloat16() for n in lens]
        return cls(query, contexts, torch.tensor(lens, dtype=torch.int32))

    @property
    def allowed_error(self) -> float:
        largest = max(float(context[:, :_RANK].abs().max()) for context in self.contexts)
        return BF16_ROUNDINGS * largest

    def arguments(self, world_size: int, rank: int) -> _Arguments:
        seq_lens = local_seq_lens(self.causal, world_size, rank)
        longest = int(seq_lens.max())
        cache, tables = _paged([context[rank::world_size] for context in self.contexts], longest)
        return {
            "kv_cache": cache,
            "workspace_buffer": torch.empty(0, dtype=torch.int8),
            "block_tables": tables,
            "seq_lens": seq_lens,
            "max_seq_len": longest,
            "bmm1_scale": _SCALE,
            "backend": "reference",
        }

    def errors(self, merged: MLAState) -> tuple[float, float]:
        """Return the largest differences of output and LSE from full attention."""
        q_len = self.query.shape[1]
        errors = [0.0, 0.0]
        for row, context in enumerate(self.contexts):
            for token in range(q_len):
                seen = context[: len(context) - (q_len - 1 - token)]
                expected = _full_attention(self.query[row, token], seen, _SCALE)
                for index, (got, want) in enumerate(zip(merged, expected, strict=True)):
                    error = float((got[row, token].double() - want).abs().max())
                    # NaN compares false with everything; it is the largest error there is.
                    errors[index] = max(errors[index], error if error == error else torch.inf)
        return errors[0], errors[1]


def _full_attention(query: Tensor, keys: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = query.double() @ keys.double().T * scale
    return torch.softmax(scores, dim=-1) @ keys[:, :_RANK].double(), torch.logsumexp(scores, -1)


def _paged(shards: list[Tensor], longest: int) -> tuple[Tensor, Tensor]:
    step = 128 // _PAGE
    width = -(-max(longest, 1) // (_PAGE * step)) * step
    cache = torch.zeros(len(shards) * width, _PAGE, shards[0].shape[1], dtype=torch.bfloat16)
    # Pages are handed out backwards, so a table that is not read shows.
    tables = torch.arange(len(cache) - 1, -1, -1, dtype=torch.int32).view(len(shards), width)
    for table, shard in zip(tables, shards, strict=True):
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
