"""For the tests of those who import this package: a kernel of their own in FlashInfer's place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .abi import FlashInferABI
from .probing import Binding, Kernel, describe_kernel, install_kernel

__all__ = ["use_kernel"]


@contextmanager
def use_kernel(kernel: Kernel, abi: FlashInferABI | None = None) -> Iterator[FlashInferABI]:
    """Let `decode_mla` call `kernel` instead of FlashInfer's function, inside the block.

    Parameters
    ----------
    kernel : callable
        Takes FlashInfer's keywords; a mock with a real signature, or the torch reference.
    abi : FlashInferABI, optional
        What the kernel stands for, for example ``recorded("0.6.17")``. Left out, it is read from
        the kernel's own signature, and its version counts as unknown.
    """
    described = describe_kernel(kernel, "unknown") if abi is None else abi
    previous = install_kernel(Binding(kernel, described))
    try:
        yield described
    finally:
        install_kernel(previous)
