"""The simulation, with FlashInfer's cute-dsl kernels really compiled, though never run.

CuTe DSL needs no GPU to compile. What FlashInfer would launch is handed to the compiled object,
whose own argument checks run before it looks for a CUDA driver; the emulation then does the work.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import inspect
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from .simulation import Simulation, simulated_flashinfer

MONOLITHIC = "flashinfer.cute_dsl.attention.monolithic.mla_decode"


@dataclass
class Compiled:
    """One compiled kernel: what it was asked for, what came out, and what it was called with."""

    key: dict[str, object]
    ptx: str
    cubin: bytes
    kernel: Callable[..., object]
    launches: list[tuple[object, ...]] = field(default_factory=list)

    def check(self, *values: object) -> None:
        """Call the compiled object; it raises for what it does not take, and else meets no driver.

        A driver would be given CPU memory to work on: ``has_cuda_driver`` has to be false.
        """
        try:
            self.kernel(*map(_as_cuda, values))
        except RuntimeError as error:
            if "cudaErrorInsufficientDriver" not in str(error):
                raise
        else:
            raise AssertionError("the kernel was launched")

    def parameters(self) -> dict[str, str]:
        """Return the name and type of each argument, which the object states in a refusal."""
        try:
            self.kernel(*self.launches[-1])
        except ValueError as error:
            (signature,) = re.findall(r"`__call__\((.*)\)`, expected device_type=cuda$", str(error))
            return dict(re.findall(r"(\w+): (Tensor\(\[.*?\], \w+\)|\w+)", signature))
        raise AssertionError("CPU tensors were accepted")


@dataclass
class Compilation:
    """The simulation that runs, and what was compiled in it so far."""

    simulation: Simulation
    kernels: list[Compiled] = field(default_factory=list)


def has_cuda_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@contextmanager
def compiling_flashinfer() -> Iterator[Compilation]:
    """Simulate FlashInfer on compute capability 10.0 and compile each key that it asks for once."""
    with simulated_flashinfer() as simulation:
        mono = importlib.import_module(MONOLITHIC)
        emulated = mono._get_compiled_mla_kernel
        compilation = Compilation(simulation)

        @functools.wraps(emulated)  # compile_kernel unwraps it
        def get_compiled_kernel(**key: object) -> Callable[..., None]:
            known = [compiled for compiled in compilation.kernels if compiled.key == key]
            if not known:
                known = [compile_kernel(**key)]
                compilation.kernels += known

            def launch(*values: object) -> None:
                known[0].check(*values)
                known[0].launches.append(values)
                emulated(**key)(*values)

            return launch

        with mock.patch.object(mono, "_get_compiled_mla_kernel", get_compiled_kernel):
            yield compilation


def compile_kernel(**key: object) -> Compiled:
    """Compile with the importable FlashInfer's own getter, past its memory of earlier calls."""
    cute, mono = (importlib.import_module(name) for name in ("cutlass.cute", MONOLITHIC))
    real_getter: Callable[..., Any] = inspect.unwrap(mono._get_compiled_mla_kernel)
    real_compile = cute.compile
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:

        def keeping_compile(*arguments: object, options: str, **keywords: object) -> object:
            options += f" --keep-ptx --keep-cubin --dump-dir {folder}"
            # Before 0.7.2 FlashInfer leaves the target to the driver.
            if "--gpu-arch" not in options:
                options += " --gpu-arch sm_100a"
            return real_compile(*arguments, options=options, **keywords)

        stack.enter_context(mock.patch.object(cute, "compile", keeping_compile))
        # The driver would be asked, and the answer remembered for the rest of the process.
        stack.enter_context(
            mock.patch.object(mono, "get_max_active_clusters", lambda size: 148 // size)
        )
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        kernel = real_getter(**key)
        # The folder was empty: a kernel from any cache would have left it so.
        (ptx,), (cubin,) = (list(Path(folder).glob(f"*.{kind}")) for kind in ("ptx", "cubin"))
        return Compiled(key, ptx.read_text(), cubin.read_bytes(), kernel)


class _DLTensorHead(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32)]


class _CudaTensor:
    """A CPU tensor that DLPack exports as a CUDA tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_: object) -> object:
        capsule = torch.utils.dlpack.to_dlpack(self._tensor)  # type: ignore[attr-defined]
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        _DLTensorHead.from_address(pointer(capsule, b"dltensor")).device_type = 2  # kDLCUDA
        return capsule


def _as_cuda(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    return importlib.import_module("tvm_ffi").from_dlpack(_CudaTensor(value))
