"""The demo over real process groups: gloo ranks on this machine, each mode of combining."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes  # pyright: ignore[reportUnknownVariableType]

from .decode_dcp import decode_mla_dcp
from .demo import LSE_TOLERANCE, Batch
from .distributed import CombineMode
from .lse import MLAState

__all__ = ["RanksReport", "run_ranks"]


class RanksReport(NamedTuple):
    """What `run_ranks` found.

    Attributes
    ----------
    errors : dict of str to (float, float)
        For each mode, the largest absolute difference of output and LSE from full attention.
    allowed_error : float
        What bf16 explains of the output's.
    """

    errors: dict[str, tuple[float, float]]
    allowed_error: float

    @property
    def passed(self) -> bool:
        """Whether every mode's errors are what bf16 rounding explains."""
        return all(
            out <= self.allowed_error and lse <= LSE_TOLERANCE for out, lse in self.errors.values()
        )


def run_ranks(world_size: int, q_len: int, *, seed: int = 0) -> RanksReport:
    """Decode a small batch on `world_size` gloo ranks, each a process, through `decode_mla_dcp`."""
    batch = _batch(world_size, q_len, seed)
    with tempfile.TemporaryDirectory(prefix="fi-dcp-compat-") as folder:
        start_processes(  # type: ignore[no-untyped-call]  # torch leaves it so
            _rank, (world_size, q_len, seed, folder), world_size, start_method="spawn"
        )
        ranks = [
            torch.load(Path(folder, f"{rank}.pt"), weights_only=True) for rank in range(world_size)
        ]
    errors: dict[str, tuple[float, float]] = {}
    for mode in get_args(CombineMode):
        states: list[tuple[Tensor, Tensor]] = [found[mode] for found in ranks]
        if mode == "ag_ar":  # every rank has all heads
            merged = [batch.errors(MLAState(out, lse)) for out, lse in states]
        else:
            outs, lses = zip(*states, strict=True)
            merged = [batch.errors(MLAState(torch.cat(outs, -2), torch.cat(lses, -1)))]
        errors[mode] = max(out for out, _ in merged), max(lse for _, lse in merged)
    return RanksReport(errors, batch.allowed_error)


def _batch(world_size: int, q_len: int, seed: int) -> Batch:
    # At least two heads a rank.
    return Batch.drawn(
        world_size, q_len, seed, heads=max(16, 2 * world_size) // world_size * world_size
    )


def _rank(rank: int, world_size: int, q_len: int, seed: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size
    )
    batch = _batch(world_size, q_len, seed)
    local = batch.query.chunk(world_size, dim=-2)[rank]
    found = {
        mode: tuple(
            decode_mla_dcp(
                local,
                mode=mode,
                causal_seqlens_kv_global=batch.causal,
                **batch.arguments(world_size, rank),
            )
        )
        for mode in get_args(CombineMode)
    }
    torch.save(found, Path(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


def render(report: RanksReport, world_size: int, q_len: int) -> str:
    """Write the report as a small table."""
    lines = [
        f"{world_size} gloo ranks, q_len {q_len}, max error against full attention "
        f"(bf16 allows {report.allowed_error:.2e}):"
    ]
    lines += [
        f"  {mode:<6} out {out:.2e}, lse {lse:.2e}" for mode, (out, lse) in report.errors.items()
    ]
    return "\n".join([*lines, "ok" if report.passed else "WRONG"])
