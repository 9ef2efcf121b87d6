"""Values that nobody means to give, and tensors bent out of shape."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.fuzz.drawing import Choices

# What tensors and arrays hold: no message may show it.
CONTENTS = 123.25

NUMBERS: tuple[Any, ...] = (
    None,
    0,
    -1,
    True,
    False,
    1,
    3,
    10**6,
    2**31,
    2**63,
    -(2**63),
    2**200,
    0.5,
    0.0,
    -0.5,
    math.nan,
    math.inf,
    -math.inf,
    1e308,
    5e-324,
    np.int64(7),
    np.float64(0.5),
    Decimal("0.5"),
    3 + 4j,
)
OTHERS: tuple[Any, ...] = (
    "",
    "auto",
    "cute-dsl",
    "trtllm-gen",
    "xqa",
    "reference",
    "sparse",
    "fa3",
    "e",
    "2",
    "basee",
    b"auto",
    (),
    [],
    [7],
    (10, 0),
    ...,
    object,
    torch.bfloat16,
    torch.float8_e4m3fn,
    np.full(2, CONTENTS),
    torch.full((), CONTENTS),
    torch.full((2,), CONTENTS),
    torch.full((2, 2), int(CONTENTS), dtype=torch.int32),
    torch.zeros(0),
    torch.zeros(0, 3, 0),
    torch.zeros(2, device="meta"),
    torch.full((2,), CONTENTS).to_sparse(),
    [torch.full((2,), CONTENTS)],
)
SCALARS = NUMBERS + OTHERS

DTYPES = (
    torch.int64,
    torch.float32,
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.int32,
    torch.float64,
)
# What page numbers, lengths and offsets may hold by mistake.
FILLS = (-1, 0, 1, 9999, -(2**31), 2**31 - 1)
_SMALL = 1 << 20


def bent(choices: Choices, tensor: Tensor) -> Any:
    """A tensor like that one but for one property, or rarely that one."""
    if tensor.numel() > _SMALL:
        tensor = tensor.flatten()[:4096]
    ways = (
        lambda: tensor,
        lambda: tensor.to(choices.pick(DTYPES)),
        lambda: tensor.unsqueeze(0),
        lambda: tensor.squeeze(),
        lambda: tensor.flatten(),
        lambda: tensor[..., :-1],
        lambda: tensor[:0],
        lambda: tensor[1:],
        lambda: torch.cat((tensor, tensor)),
        lambda: torch.stack((tensor, tensor), dim=-1)[..., 0],
        lambda: torch.cat((tensor.flatten()[:1], tensor.flatten()))[1:].view(tensor.shape),
        lambda: tensor.movedim(0, -1),
        lambda: tensor.to("meta"),
        lambda: torch.full_like(tensor, choices.pick(FILLS)) if _is_int(tensor) else tensor,
        lambda: tensor.to_sparse(),
        lambda: tensor[..., None],
        lambda: tensor.expand(2, *tensor.shape),
        lambda: torch.nn.Parameter(tensor.clone(), requires_grad=tensor.is_floating_point()),
        lambda: list(tensor),
        lambda: torch.zeros((), dtype=tensor.dtype),
    )
    try:
        bend: Callable[[], Any] = choices.pick(ways)
        return bend()
    except (RuntimeError, IndexError, TypeError):  # torch itself cannot bend it so
        return tensor.to("meta")


def _is_int(tensor: Tensor) -> bool:
    return tensor.dtype is torch.int32


def wild(choices: Choices, right: object) -> Any:
    """Something else in place of a right value, or rarely that value."""
    if isinstance(right, Tensor) and choices.pick((True, True, False)):
        return bent(choices, right)
    return choices.pick((right, *SCALARS))
