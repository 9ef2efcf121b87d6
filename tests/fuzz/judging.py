"""What a call may come to, and whether `check` says the same of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import torch
from torch import Tensor

from fi_dcp_compat import FlashInferABI, FlashInferCompatError, InvalidInputError, check
from fi_dcp_compat.testing import mock_kernel, use_kernel
from tests.fuzz.calls import REFERENCE, Given
from tests.fuzz.wild import CONTENTS
from tests.goldens.wording import complaints


class Died(Exception):
    """The kernel itself could not do anything with what it got."""


@functools.cache
def mock(release: str) -> MagicMock:
    """The release's mock, made once; it binds a call to the signature before it answers."""
    kernel = mock_kernel(release)
    answer = kernel.side_effect

    def tried(**call: object) -> object:
        try:
            return answer(**call)
        except Exception as exc:
            raise Died(str(exc)) from exc

    kernel.side_effect = tried
    return kernel


class Outcome(NamedTuple):
    """What came of a call: its error or its result, and the keywords of the kernel's calls."""

    error: FlashInferCompatError | None
    result: Any
    calls: tuple[dict[str, Any], ...]

    @property
    def said(self) -> str:
        return "" if self.error is None else f"{type(self.error).__name__}: {self.error}"


def outcome(given: Given, act: Callable[[], object]) -> Outcome:
    """Act on the release's mock; what is no error of the package gets through."""
    kernel = mock(given.release)
    kernel.reset_mock()
    error, result = None, None
    with use_kernel(kernel, given.abi):
        try:
            result = act()
        except FlashInferCompatError as refused:
            error = refused
            assert_well_put(error)
            assert not kernel.called
    return Outcome(error, result, tuple(dict(call.kwargs) for call in kernel.call_args_list))


def on_every_rank(given: Given, act: Callable[[int], object]) -> Outcome:
    """Act as each rank; return what came of it, which is the same for all."""
    first, *others = (outcome(given, functools.partial(act, rank)) for rank in given.ranks)
    for other in others:
        assert other.said == first.said
    return first


def assert_well_put(error: FlashInferCompatError) -> None:
    """Its text has the form of a message, and shows no contents."""
    assert not _wrong(str(error)), f"the message about {error.argument}"
    assert str(CONTENTS) not in str(error.value), f"the value of {error.argument}"


@functools.lru_cache(maxsize=4096)
def _wrong(text: str) -> tuple[str, ...]:
    shown = [f"contents: {text!r}"] if str(CONTENTS) in text else []
    return (*complaints(text), *shown)


def assert_refused(
    error: FlashInferCompatError, abi: FlashInferABI, config: Callable[[], Mapping[str, Any]]
) -> None:
    """What is no matter of one argument alone, `check` says too, in the same words."""
    if isinstance(error, InvalidInputError):
        return
    if not error.reasons:
        assert error.argument == "kv_cache"  # its shape, which no configuration has
        return
    said = [str(reason) for reason in check(abi, **config())]
    assert [str(reason) for reason in error.reasons] == said
    assert type(error) is error.reasons[0].error


def assert_result(given: Given, out: Tensor, lse: Tensor | None, *, return_lse: bool) -> None:
    """The result is in the query's layout, of the documented dtypes, or the caller's buffers."""
    query, buffer = given.values["query"], given.values["lse"]
    assert out.shape == (*query.shape[:-1], given.values["kv_lora_rank"])
    assert out.device == query.device
    assert out.dtype in out_dtypes(given)
    assert out is given.values["out"] or given.values["out"] is None
    assert (lse is not None) == return_lse
    if lse is not None:
        described = (lse.shape, lse.dtype, lse.device)
        assert described == (query.shape[:-1], torch.float32, query.device)
        assert lse is buffer or buffer is None


def out_dtypes(given: Given) -> set[torch.dtype]:
    dtype = given.values["query"].dtype
    if given.values["backend"] == REFERENCE:
        return {dtype if dtype is torch.float32 else torch.bfloat16}
    old = dtype is torch.float16 and not given.abi.features.cute_dsl_bf16_out
    return {torch.bfloat16, torch.float16} if old else {torch.bfloat16}
