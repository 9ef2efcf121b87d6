"""What is counted and not timed: tensor operations, synchronisations, memory."""

from __future__ import annotations

import gc
import itertools
import tracemalloc
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from fi_dcp_compat import recorded
from fi_dcp_compat.testing import use_kernel

from .calls import RELEASE, Step, decode, no_op, one_shot, prepared, prepared_decoder
from .rounds import Row

# What reads a value on the device makes the host wait for it.
SYNCHRONISING = ("_local_scalar_dense", "_to_copy", "nonzero", "equal", "is_nonzero")


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook
    """Counts the tensor operations: views, others, and those among them that synchronise."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.views: list[str] = []
        self.others: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        (self.views if func.is_view else self.others).append(str(func))
        return func(*args, **(kwargs or {}))

    @property
    def synchronising(self) -> list[str]:
        return [name for name in self.others if any(word in name for word in SYNCHRONISING)]


def operations(call: Callable[[], object]) -> Operations:
    """Count those of a call that was made before."""
    call()
    counted = Operations()
    with counted:
        call()
    return counted


def kept_between_calls(call: Callable[[], object], calls: int = 200) -> int:
    """Return the bytes that each of so many more calls leaves allocated."""
    for _ in range(10):
        call()
    gc.collect()
    tracemalloc.start()
    try:
        for _ in range(10):
            call()
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for _ in itertools.repeat(None, calls):
            call()
        gc.collect()
        return (tracemalloc.get_traced_memory()[0] - before) // calls
    finally:
        tracemalloc.stop()


def bytes_a_preparation(preparations: int = 100, steps: int = 1) -> float:
    """Return what one more cached preparation holds, after so many steps of other tensors."""
    step = Step()
    kernel = no_op(step.result(shaped=True))
    others = [Step() for _ in range(steps - 1)]

    with use_kernel(kernel, recorded(RELEASE)):
        decode(step, qk_nope_head_dim=0)
        gc.collect()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for number in range(1, preparations + 1):
                for each in (step, *others):
                    decode(each, qk_nope_head_dim=number)
            gc.collect()
            return (tracemalloc.get_traced_memory()[0] - before) / preparations
        finally:
            tracemalloc.stop()


def cost_rows() -> list[Row]:
    rows = []
    for label, step, shaped, views in (
        ("4-D, LSE in shape", Step(), True, 0),
        ("4-D, FlashInfer's flat LSE", Step(), False, 1),
        ("flat", Step(flat=True), False, 3),
    ):
        kernel = no_op(step.result(shaped=shaped))
        with use_kernel(kernel, recorded(RELEASE)):
            arms = {"prepared": prepared(prepared_decoder(), step), "decode_mla": one_shot(step)}
            for name, call in arms.items():
                counted = operations(call)
                rows += [
                    _count(f"{name}, {label}: views", len(counted.views), views),
                    _count(f"{name}, {label}: other operations", len(counted.others), 0),
                    _count(f"{name}, {label}: synchronisations", len(counted.synchronising), 0),
                    _count(f"{name}, {label}: bytes kept by a call", kept_between_calls(call), 0),
                ]
    held = bytes_a_preparation() / 1024
    rows.append(Row("a cached preparation holds", held, held, held, 8.0, "KiB"))
    held = bytes_a_preparation(steps=8) / 1024
    rows.append(Row("a cached preparation holds after 8 steps", held, held, held, 8.0, "KiB"))
    return rows


def _count(name: str, value: int, goal: int) -> Row:
    return Row(name, value, value, value, goal, "")
