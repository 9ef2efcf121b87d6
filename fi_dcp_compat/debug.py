"""Checks of values, at the price of a synchronisation: lengths, tables, pages, results.

Off unless ``FI_DCP_COMPAT_DEBUG=1`` (read when a step's tensors are new) or inside `debug_checks`;
never during stream capture.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from .dcp import local_seq_lens
from .errors import InvalidInputError
from .inputs import QueryLayout, Step

__all__ = ["debug_checks"]

VARIABLE = "FI_DCP_COMPAT_DEBUG"
_switched_on: ContextVar[bool] = ContextVar("debug_checks", default=False)


@contextmanager
def debug_checks() -> Generator[None]:
    """Check the values of each call inside the block; each check synchronises.

    Rank-local lengths are held against the global ones, real lengths against the block table,
    page numbers against the pool, query offsets against the query; negative lengths, zero
    lengths inside a batch without DCP, and NaN in the result are refused.
    """
    token = _switched_on.set(True)
    try:
        yield
    finally:
        _switched_on.reset(token)


def requested() -> bool:
    """Return whether the environment asks for the checks."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


asked_here: Callable[[], bool] = _switched_on.get


def possible(query: Tensor) -> bool:
    """Return whether values can be looked at now: a graph's capture would break."""
    return not (query.is_cuda and torch.cuda.is_current_stream_capturing())


def check_values(
    step: Step, layout: QueryLayout, page_size: int, world_size: int, rank: int
) -> None:
    """Raise InvalidInputError for the first row whose values cannot be right."""
    num_pages = step.kv_cache.shape[0]
    lens = step.seq_lens.long().cpu()
    tables = step.block_tables.long().cpu()
    _refuse_rows(lens < 0, "seq_lens", "is negative", lens, "0 or more")
    if step.cum_seq_lens_q is not None and step.max_q_len is not None:
        _check_offsets(step.cum_seq_lens_q.long().cpu(), layout.num_tokens, step.max_q_len)
    if world_size > 1 and step.causal_seqlens_kv_global is not None:
        causal = step.causal_seqlens_kv_global.long().cpu()
        _refuse_rows(causal < 0, "causal_seqlens_kv_global", "is negative", causal, "0 or more")
        expected = local_seq_lens(causal, world_size, rank)
        swapped = (lens == causal) & (lens != expected)
        _refuse_rows(
            swapped,
            "seq_lens",
            "looks global, or the causal lengths look local",
            lens,
            f"the rank-local length of rank {rank} of {world_size}: expected "
            f"{_first(swapped, expected)} for a global length of {_first(swapped, causal)}",
        )
        wrong = lens != expected
        _refuse_rows(
            wrong,
            "seq_lens",
            "does not fit causal_seqlens_kv_global",
            lens,
            f"expected {_first(wrong, expected)}, what rank {rank} of {world_size} holds of "
            f"{_first(wrong, causal)} tokens (local_seq_lens)",
        )
    elif world_size == 1:
        # Zeros at the end are CUDA-graph padding; one inside leaves its row undefined.
        later = lens.flip(0).cummax(0).values.flip(0) if len(lens) else lens
        _refuse_rows(
            (lens == 0) & (later > 0),
            "seq_lens",
            "is 0 inside the batch",
            lens,
            "at least 1: FlashInfer leaves the row of an empty sequence undefined without DCP",
        )
    room = tables.shape[1] * page_size
    _refuse_rows(
        lens > room, "seq_lens", "is longer than its block table", lens, f"at most {room} tokens"
    )
    _refuse_rows(
        lens > step.max_seq_len,
        "seq_lens",
        "is longer than max_seq_len",
        lens,
        f"at most max_seq_len={step.max_seq_len}",
    )
    used = torch.arange(tables.shape[1]) < -(-lens // page_size).unsqueeze(1)
    strays = used & ((tables < 0) | (tables >= num_pages))
    if strays.numel():
        _refuse_rows(
            strays.any(dim=1),
            "block_tables",
            "names a page outside the cache",
            # The first such page: a whole row may be thousands wide.
            tables.gather(1, strays.long().argmax(dim=1, keepdim=True)).squeeze(1),
            f"page numbers of this rank's pool in [0, {num_pages}), not global pages or slots",
        )


def check_result(
    step: Step, layout: QueryLayout, world_size: int, out: Tensor, lse: Tensor | None
) -> None:
    """Raise InvalidInputError for the first request with NaN in its result."""
    bad = out.isnan().flatten(1 if layout.flat else 2).any(dim=-1)
    if lse is not None:
        bad |= lse.isnan().any(dim=-1)
    bad = bad.cpu()
    if layout.compact and step.cum_seq_lens_q is not None:
        ends = step.cum_seq_lens_q[1:].long().cpu()
        request = torch.searchsorted(ends, torch.arange(len(bad)), right=True)
        counts = torch.zeros(layout.batch + 1, dtype=torch.long)
        rows = counts.index_add_(0, request, bad.long())[:-1] > 0
    else:
        rows = bad.view(layout.batch, layout.q_len).any(dim=1)
    lens = step.seq_lens.long().cpu()
    if world_size == 1:
        # A padding row without keys is undefined without DCP, and nobody reads it.
        rows = rows & (lens > 0)
    needed = "a finite result: look for NaN in the cache's pages or the query"
    _refuse_rows(rows, "out", "holds NaN", lens, needed, shown="seq_lens")


def _check_offsets(offsets: Tensor, num_tokens: int, max_q_len: int) -> None:
    wrong = torch.zeros(len(offsets), dtype=torch.bool)
    wrong[0], wrong[-1] = offsets[0] != 0, offsets[-1] != num_tokens
    needed = f"first 0 and last {num_tokens}"
    _refuse_rows(wrong, "cum_seq_lens_q", "does not span the query", offsets, needed)
    counts = offsets.diff()
    _refuse_rows(
        (counts < 0) | (counts > max_q_len),
        "cum_seq_lens_q",
        "gives a query length out of range",
        counts,
        f"lengths in [0, max_q_len={max_q_len}]",
        shown="the query length at cum_seq_lens_q",
    )


def _first(rows: Tensor, values: Tensor) -> int:
    return int(values[int(rows.long().argmax())]) if rows.numel() else 0


def _refuse_rows(
    rows: Tensor,
    argument: str,
    problem: str,
    values: Tensor,
    needed: str,
    *,
    shown: str | None = None,
) -> None:
    if not bool(rows.any()):
        return
    row = int(rows.long().argmax())
    value = int(values[row])
    raise InvalidInputError(
        f"{argument}[{row}] {problem}.",
        found=f"{argument}[{row}] = {value}." if shown is None else f"{shown}[{row}] is {value}.",
        needed=f"{needed}.",
        fix=f"look at how row {row} of the batch was built; this check is "
        f"{VARIABLE} or debug_checks().",
        argument=argument,
        value=value,
    )
