"""Start gloo ranks in processes of their own and bring home what each found."""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

Job = Callable[[int, int], Any]


def run_ranks(
    job: Job, world_size: int, folder: Path, *, timeout: float = 120, collective: float = 60
) -> list[Any]:
    """Return what ``job(rank, world_size)`` returned on each rank, or the exception it raised.

    `timeout` bounds the whole, `collective` each collective, in seconds.
    """
    folder.mkdir(parents=True)
    context = start_processes(  # type: ignore[no-untyped-call]  # torch leaves it so
        _rank, (job, world_size, folder, collective), world_size, join=False, start_method="spawn"
    )
    deadline = time.monotonic() + timeout
    try:
        while not context.join(timeout=1):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{world_size} ranks did not end within {timeout} s")
    finally:
        for process in context.processes:
            process.kill()
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(world_size)]


def _rank(rank: int, job: Job, world_size: int, folder: Path, collective: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=collective),
    )
    try:
        result = job(rank, world_size)
        dist.barrier()
    except Exception as exc:
        traceback.print_exc()
        result = exc
    finally:
        dist.destroy_process_group()
    (folder / str(rank)).write_bytes(pickle.dumps(result))
