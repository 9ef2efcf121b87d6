"""This machine's GPUs and the build of its torch, without importing torch."""

from __future__ import annotations

import ctypes
import os
import re
from typing import NamedTuple

from .installed import find_distribution, read_text

__all__ = ["Gpu", "torch_is_cpu_only", "visible_gpus"]


class Gpu(NamedTuple):
    """One GPU as the driver names it."""

    name: str
    compute_capability: tuple[int, int]


def torch_is_cpu_only() -> bool:
    """Return whether the installed torch was built without CUDA."""
    folder = find_distribution("torch")
    if folder is None:
        return False
    text = read_text(os.path.dirname(folder), "torch", "version.py") or ""
    return bool(re.search(r"^cuda(?::.*)?\s*=\s*None", text, re.MULTILINE))


def visible_gpus() -> list[Gpu]:
    """Return the GPUs that the driver shows to this process."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return []
    found: list[Gpu] = []
    for index in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(128)
        cuda.cuDeviceGet(ctypes.byref(device), index)
        cuda.cuDeviceGetName(name, len(name), device)
        capability: list[int] = []
        # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
        for attribute in (75, 76):
            value = ctypes.c_int()
            cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            capability.append(value.value)
        found.append(Gpu(name.value.decode(), (capability[0], capability[1])))
    return found
