"""How one argument is looked at and refused: type, dtype, shape, device, strides, address."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, cast

import torch
from torch import Tensor

from .errors import InvalidInputError

__all__ = ["describe", "invalid", "is_tensor", "kept", "require_int", "require_tensor"]

# The compiled cute-dsl kernels assert these alignments of data_ptr, in bytes (facts, section 4).
POINTER_ALIGNMENT = 16
ADDRESS_FIX = "give the kernel a tensor of its own (clone once per step), not a view into another."


def is_tensor(value: object) -> bool:
    """Return whether it is a dense tensor, whatever its annotation promises."""
    return isinstance(value, Tensor) and value.layout is torch.strided


def describe(value: object) -> str:
    """Show a value in a message: a tensor by shape, dtype and device, never by contents."""
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {value.dtype} on {value.device}"
    if isinstance(value, (list, tuple)):
        parts = cast("Sequence[object]", value)
        return f"{type(parts).__name__} of {', '.join(map(describe, parts)) or 'nothing'}"
    shape = getattr(value, "shape", None)
    if shape:  # an array of another library
        return f"{type(value).__name__} of shape {list(shape)}"
    return f"{value!r} ({type(value).__name__})"


def kept(value: object) -> int | float | str | None:
    """Return what an error keeps of a value: a plain one itself, another's description."""
    return value if isinstance(value, (int, float, str, type(None))) else describe(value)


def invalid(argument: str, problem: str, value: object, needed: str, fix: str) -> NoReturn:
    """Raise InvalidInputError for `argument`."""
    shown = describe(value)
    raise InvalidInputError(
        f"{argument} {problem}.",
        found=f"{argument}: {shown}.",
        needed=f"{needed}.",
        fix=fix if fix.endswith(".") else f"{fix}.",
        argument=argument,
        value=kept(value),
    )


def require_tensor(
    argument: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    contiguous: bool = True,
    alignment: int = POINTER_ALIGNMENT,
) -> None:
    """Raise InvalidInputError unless the kernel can read `tensor` through its pointer."""
    if (
        is_tensor(tensor)
        and tensor.dtype is dtype
        and tensor.shape == shape
        and tensor.device == device
        and (tensor.is_contiguous() if contiguous else tensor.stride(-1) == 1)
        and tensor.data_ptr() % alignment == 0
    ):
        return
    needed = f"{list(shape)} {dtype} on {device}"
    if not is_tensor(tensor):
        invalid(argument, "must be a tensor", tensor, needed, "pass a tensor")
    if tensor.dtype is not dtype:
        invalid(
            argument,
            f"must be {dtype}, not {tensor.dtype}",
            tensor,
            f"{needed}; the kernel reads it through a raw pointer",
            f"cast it once per step, not per layer: {argument}.to({dtype})",
        )
    if tensor.shape != shape:
        problem = f"must have shape {list(shape)}, not {list(tensor.shape)}"
        invalid(argument, problem, tensor, needed, "pass the tensor of this batch")
    if tensor.device != device:
        problem = f"is on {tensor.device}, but the query is on {device}"
        invalid(argument, problem, tensor, needed, f"move it once per step to {device}")
    if tensor.data_ptr() % alignment:
        invalid(
            argument,
            f"must start at a multiple of {alignment} bytes",
            tensor,
            f"{needed}, {alignment}-byte aligned; this one is off by "
            f"{tensor.data_ptr() % alignment}",
            ADDRESS_FIX,
        )
    strides = f"strides {list(tensor.stride())}"
    invalid(argument, f"must be contiguous, not {strides}", tensor, needed, ADDRESS_FIX)


def require_int(argument: str, value: int, low: int) -> None:
    """Raise InvalidInputError unless `value` is an int, not a bool, of at least `low`."""
    if type(value) is not int or value < low:
        invalid(
            argument,
            f"must be an int of at least {low}",
            value,
            f"an int of at least {low}",
            "pass a host int, not a tensor; int(...) of it once per step",
        )
