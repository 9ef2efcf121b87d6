"""Messages about process groups, of one process that holds a group of two."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fi_dcp_compat import MLAState, combine, combine_buffers, gather_query_heads
from tests.goldens.message import Case, case

STATE = MLAState(torch.zeros(2, 4, 16), torch.zeros(2, 4))
ODD = MLAState(torch.zeros(2, 3, 16), torch.zeros(2, 3))
NO_STATE: Any = None
NO_GROUP: Any = "dcp"
NO_MODE: Any = "ring"
OTHERS: Any = dist.GroupMember.NON_GROUP_MEMBER


def _grouped(act: Callable[[], object]) -> Case:
    """Act as rank 0 of a group whose collectives do nothing."""

    def grouped() -> None:
        hook = sys.excepthook  # torch puts the rank before every line, and never takes it back
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        try:
            act()
        finally:
            dist.destroy_process_group()
            sys.excepthook = hook

    return case(grouped)


def _without_reduce_scatter() -> None:
    def lacking(*tensors: Tensor, **options: Any) -> None:
        raise RuntimeError("ProcessGroupGloo does not support reduce_scatter")

    # As older releases of torch have it.
    with patch.object(dist, "reduce_scatter_single", lacking):
        combine(STATE, mode="ag_rs")


def cases() -> Iterator[tuple[str, Case]]:
    yield from ONES.items()


ONES: dict[str, Case] = {
    "combine: buffers of another mode": _grouped(
        lambda: combine(STATE, mode="ag_rs", buffers=combine_buffers(STATE))
    ),
    "combine: heads that the ranks cannot share": _grouped(lambda: combine(ODD)),
    "combine: no reduce-scatter": _grouped(_without_reduce_scatter),
    "combine: no state": _grouped(lambda: combine(NO_STATE)),
    "combine: no such mode": _grouped(lambda: combine(STATE, mode=NO_MODE)),
    "combine: an LSE of another dtype": _grouped(
        lambda: combine(MLAState(STATE.out, STATE.lse.double()))
    ),
    "gather_query_heads: a group of others": _grouped(
        lambda: gather_query_heads(STATE.out, OTHERS)
    ),
    "gather_query_heads: no group": _grouped(lambda: gather_query_heads(STATE.out, NO_GROUP)),
    "gather_query_heads: one dimension": _grouped(lambda: gather_query_heads(torch.zeros(3))),
}
