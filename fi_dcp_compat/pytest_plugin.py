"""`use_kernel` as a pytest fixture.

Bring it with ``pytest_plugins = ["fi_dcp_compat.pytest_plugin"]`` in the top ``conftest.py``, or
with ``from fi_dcp_compat.pytest_plugin import use_kernel`` in any.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Protocol

import pytest

from .abi import FlashInferABI
from .describing import Kernel
from .testing import use_kernel as installed

__all__ = ["UseKernel", "use_kernel"]


class UseKernel(Protocol):
    """What the fixture gives: `fi_dcp_compat.testing.use_kernel`, undone when the test ends."""

    def __call__(self, kernel: Kernel, abi: FlashInferABI | None = None) -> FlashInferABI: ...


@pytest.fixture
def use_kernel() -> Iterator[UseKernel]:
    """Put a kernel in FlashInfer's place until the test ends: ``abi = use_kernel(kernel)``."""
    with ExitStack() as stack:

        def use(kernel: Kernel, abi: FlashInferABI | None = None) -> FlashInferABI:
            return stack.enter_context(installed(kernel, abi))

        yield use
