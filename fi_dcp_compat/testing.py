"""For the tests of those who import this package: kernels in FlashInfer's place.

A mock of a release shows that release's parameters and refuses all others, so one parametrised
test locks what a call site needs of the kernel, on every release that it is meant for::

    @pytest.mark.parametrize("release", ["0.6.17", "0.7.0", "0.7.4"])
    def test_our_forward_pass_hands_flashinfer_what_it_takes(release):
        kernel = mock_kernel(release)
        with use_kernel(kernel):
            out, lse = our_forward_pass(...)
        given = kernel.call_args.kwargs
        assert given["backend"] == "cute-dsl"
        assert (given["cp_world"], given["cp_rank"]) == (8, 3)
        assert given["causal_seqlens_kv_global"].dtype == torch.int32

On ``mock_kernel("0.6.16")`` the same test ends in FlashInferVersionError, and with a keyword taken
out of ``recorded("0.6.17").parameters`` in FlashInferSignatureError. Code that calls FlashInfer
itself is locked alike: patch ``flashinfer.decode.trtllm_batch_decode_with_kv_cache_mla`` with the
mock. No cache needs clearing. `fi_dcp_compat.pytest_plugin` has `use_kernel` as a fixture.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Generator
from contextlib import contextmanager
from unittest.mock import MagicMock, create_autospec

import torch
from torch import Tensor

from .abi import FUNCTION, FlashInferABI, Parameter
from .describing import Binding, Kernel, describe_kernel
from .plans import out_dtype
from .probing import install_kernel
from .releases import recorded

__all__ = ["mock_kernel", "use_kernel"]


@contextmanager
def use_kernel(kernel: Kernel, abi: FlashInferABI | None = None) -> Generator[FlashInferABI]:
    """Let this package call `kernel` instead of FlashInfer's function, inside the block.

    It holds for the whole process: blocks may be nested, but not overlap in two threads.

    Parameters
    ----------
    kernel : callable
        Takes FlashInfer's keywords: `mock_kernel`, another mock, or the torch reference.
    abi : FlashInferABI, optional
        What the kernel stands for, for example ``recorded("0.6.17")``. Left out, it is read from
        the kernel's own signature; its version is what a `mock_kernel` was made for, or unknown.

    Yields
    ------
    FlashInferABI
        As `probe` gives it inside the block.
    """
    described = describe_kernel(kernel, "unknown") if abi is None else abi
    previous = install_kernel(Binding(kernel, described))
    try:
        yield described
    finally:
        install_kernel(previous)


def mock_kernel(release: str | FlashInferABI) -> MagicMock:
    """Return a MagicMock of one release's function, with its real signature.

    Parameters
    ----------
    release : str or FlashInferABI
        A recorded release, or the ABI of another: ``recorded("0.6.17")._replace(parameters=...)``.

    Returns
    -------
    MagicMock
        Called with a parameter that the release lacks, or without one that it requires, it raises
        TypeError as the release does. Otherwise it returns what the release would for these
        arguments, filled with ones: ``out`` in the query's layout, in bf16 (fp16 where a release
        follows the query), or the caller's buffer; with ``return_lse`` the LSE too, float32
        [B * q_len, H], or the caller's buffer, [B, q_len, H] only since 0.6.13. For another answer
        set ``side_effect``, or ``side_effect = None`` and ``return_value``.

    Raises
    ------
    FlashInferVersionError
        No such release is recorded.
    """
    abi = recorded(release) if isinstance(release, str) else release
    signature = inspect.Signature([_inspected(parameter) for parameter in abi.parameters])
    owner = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)

    def __call__(self: object, *args: object, **kwargs: object) -> None: ...

    # create_autospec reads a callable object's signature from its class, and then enforces it.
    shown = signature.replace(parameters=[owner, *signature.parameters.values()])
    __call__.__signature__ = shown  # type: ignore[attr-defined]  # what inspect looks for
    spec = type(FUNCTION, (), {"__call__": __call__})()
    kernel: MagicMock = create_autospec(spec, instance=True)

    def answer(*args: object, **kwargs: object) -> Tensor | tuple[Tensor, Tensor]:
        return _answer(abi, **signature.bind(*args, **kwargs).arguments)

    kernel.side_effect = answer
    kernel.flashinfer_version = abi.version
    return kernel


def _inspected(parameter: Parameter) -> inspect.Parameter:
    default: object = inspect.Parameter.empty
    if parameter.default is not None:
        try:
            default = ast.literal_eval(parameter.default)
        except (ValueError, SyntaxError):  # no literal: its text stands for it
            default = parameter.default
    return inspect.Parameter(
        parameter.name, getattr(inspect.Parameter, parameter.kind), default=default
    )


def _answer(
    abi: FlashInferABI,
    *,
    query: Tensor,
    kv_lora_rank: int = 512,
    backend: str = "auto",
    out: Tensor | None = None,
    return_lse: bool = False,
    lse: Tensor | None = None,
    **_: object,
) -> Tensor | tuple[Tensor, Tensor]:
    rows, heads = query.shape[:-1], query.shape[-2]
    if out is None:
        dtype = out_dtype(abi, backend, query.dtype)
        out = torch.ones(*rows, kv_lora_rank, dtype=dtype, device=query.device)
    else:
        out.fill_(1.0)
    if not return_lse:
        return out
    tokens = rows.numel() // max(heads, 1)
    if lse is None:
        return out, torch.ones(tokens, heads, device=query.device)
    if lse.shape != (tokens, heads) and not (abi.features.lse_3d and lse.shape == rows):
        raise ValueError(f"lse of shape {list(lse.shape)}, not {[tokens, heads]}")
    return out, lse.fill_(1.0)
