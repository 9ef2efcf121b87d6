"""The scales of the two products, and how a quantised cache's are fused into them."""

from __future__ import annotations

import math
import sys
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from .validation import invalid, is_tensor

__all__ = ["BmmScales", "are_plain", "bmm_scales", "require_scales", "skip_softmax_factor"]

FP8 = torch.float8_e4m3fn


def require_scales(
    bmm1_scale: float | Tensor,
    bmm2_scale: float | Tensor | None,
    kv_dtype: torch.dtype,
    device: torch.device | None = None,
) -> None:
    """Raise InvalidInputError unless both are scales, and an fp8 cache's is given."""
    _require_scale("bmm1_scale", bmm1_scale, device)
    if bmm2_scale is not None:
        _require_scale("bmm2_scale", bmm2_scale, device)
    elif kv_dtype is FP8:
        needed = "a scale for an fp8 cache, 1.0 if it was not scaled"
        invalid("bmm2_scale", "must be given", None, needed, "pass bmm_scales(...).bmm2_scale")


def are_plain(*scales: object) -> bool:
    """Return whether they are floats that any kernel takes."""
    return all(type(scale) is float and 0.0 < scale < math.inf for scale in scales)


def _require_scale(argument: str, scale: object, device: torch.device | None) -> None:
    if isinstance(scale, Tensor):
        at_home = device is None or scale.device == device
        if is_tensor(scale) and scale.dtype is torch.float32 and scale.numel() == 1 and at_home:
            return
    elif _is_number(scale) and 0 < scale < math.inf:
        return
    needed = "a positive finite float, or a float32 tensor of one element on the query's device"
    invalid(argument, f"must be {needed}", scale, needed, "pass float(...) of the scale")


def _is_number(value: object) -> TypeGuard[float]:
    if isinstance(value, int) and not isinstance(value, bool):
        # The kernel takes a float: an int beyond its range is none.
        return abs(value) <= sys.float_info.max
    return isinstance(value, float)


def skip_softmax_factor(factor: float | None) -> float | None:
    """Return what FlashInfer gets for the skip-softmax threshold; 0 means off."""
    if factor is None:
        return None
    if not _is_number(factor) or not 0 <= factor < math.inf:
        needed = "a finite float of at least 0, or None"
        name = "skip_softmax_threshold_scale_factor"
        invalid(name, f"must be {needed}", factor, needed, "leave it out to switch it off")
    # FlashInfer's other backends refuse anything that is not None.
    return float(factor) or None


class BmmScales(NamedTuple):
    """What the kernel multiplies: the scores by `bmm1_scale`, the output by `bmm2_scale`."""

    bmm1_scale: float
    bmm2_scale: float


def bmm_scales(
    softmax_scale: float,
    kv_dtype: torch.dtype,
    q_scale: float | None = None,
    k_scale: float | None = None,
) -> BmmScales:
    """Fuse the scales of a quantised cache into the kernel's two.

    Parameters
    ----------
    softmax_scale : float
        As for an unquantised model, for example ``head_dim ** -0.5``; natural, not times log2(e).
    kv_dtype : torch.dtype
        Of the cache. With fp8 both other scales must be given, 1.0 too; without, neither is
        anything but 1.0.
    q_scale, k_scale : float, optional
        What the stored query and cache are multiplied with to get the real ones. In MLA the
        cache is keys and values at once, so `k_scale` scales both products.

    Raises
    ------
    InvalidInputError
        A scale is missing for fp8, given for another dtype, or not a positive number.
    """
    if type(kv_dtype) is not torch.dtype:
        needed = "a torch.dtype"
        invalid("kv_dtype", f"must be {needed}", kv_dtype, needed, "pass the cache's dtype")
    scales: dict[str, float] = {"softmax_scale": softmax_scale}
    for name, scale in (("q_scale", q_scale), ("k_scale", k_scale)):
        if kv_dtype is FP8:
            if scale is None:
                needed = "a number for an fp8 cache, 1.0 if it was not scaled"
                invalid(name, "must be given", scale, needed, f"pass {name}=1.0 or what it is")
            scales[name] = scale
        elif scale is not None and not (_is_number(scale) and scale == 1.0):
            needed = f"no {name}: a {kv_dtype} cache is not scaled"
            invalid(name, "must be left out", scale, needed, f"drop {name}")
    for name, scale in scales.items():
        if isinstance(scale, Tensor):
            invalid(name, "must be a float", scale, "a host float", "pass float(...) once")
        _require_scale(name, scale, None)
    quantised = scales.get("k_scale", 1.0)
    return BmmScales(softmax_scale * scales.get("q_scale", 1.0) * quantised, quantised)
