"""torch.distributed's collectives under one name, whatever the torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import UnsupportedConfigError

__all__ = ["all_gather", "flat_bytes", "reduce_scatter"]


def _named(name: str, older: str) -> Callable[..., object]:
    # torch 2.13 warns of the name that older ones alone have.
    found: Callable[..., object] = getattr(dist, name, None) or getattr(dist, older)
    return found


def all_gather(receive: Tensor, send: Tensor, group: dist.ProcessGroup | None) -> None:
    """Gather `send` of every rank into `receive`, [W * n]."""
    gather = _named("all_gather_single", "all_gather_into_tensor")
    gather(receive, send, group=group)


def reduce_scatter(receive: Tensor, send: Tensor, group: dist.ProcessGroup | None) -> None:
    """Sum `send`, [W * n], over the ranks, and receive this rank's n of it.

    Raises
    ------
    UnsupportedConfigError
        The group's backend has no such collective.
    """
    scatter = _named("reduce_scatter_single", "reduce_scatter_tensor")
    try:
        scatter(receive, send, group=group)
    except RuntimeError as exc:
        # Older gloo has none; it says so before anything is sent, on every rank alike.
        if "does not support" not in str(exc):
            raise
        raise UnsupportedConfigError(
            "mode='ag_rs' needs a reduce-scatter, which this process group has not.",
            found=f"{dist.get_backend(group)}: {exc}.",
            needed="a backend of torch.distributed with reduce-scatter.",
            fix="pass mode='a2a' or 'ag_ar', on all ranks.",
            argument="mode",
            value="ag_rs",
        ) from exc


def flat_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as bytes: not every backend has a collective for every dtype."""
    return tensor.view(-1).view(torch.uint8)
