"""FlashInfer's own function on every release: what it forwards, mends and refuses."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from fi_dcp_compat import (
    FlashInferVersionError,
    Parameter,
    recorded,
)
from fi_dcp_compat.abi import FUNCTION
from fi_dcp_compat.dropin import trtllm_batch_decode_with_kv_cache_mla as dropin
from fi_dcp_compat.releases import recorded_versions
from fi_dcp_compat.testing import mock_kernel, use_kernel
from tests.support import call

VERSIONS = recorded_versions()
OLD = VERSIONS[: VERSIONS.index("0.6.12")]


def arguments(**changes: Any) -> dict[str, Any]:
    """A call that every release takes: two requests, 16 heads, pages of 64."""
    changes = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64} | changes
    given = call(**changes)
    # 0.6.0 takes no other.
    given["kv_cache"] = given["kv_cache"].unsqueeze(1)
    return given


def dcp(world: int = 8, rank: int = 3, tokens: int = 55, batch: int = 2) -> dict[str, Any]:
    return {
        "enable_dcp": True,
        "cp_world": world,
        "cp_rank": rank,
        "causal_seqlens_kv_global": torch.full((batch,), tokens, dtype=torch.int32),
        "return_lse": True,
    }


def compact() -> dict[str, Any]:
    return {
        "query": torch.zeros(4, 16, 576, dtype=torch.bfloat16),
        "cum_seq_lens_q": torch.tensor([0, 1, 4], dtype=torch.int32),
        "max_q_len": 3,
    }


def received(version: str, given: dict[str, Any]) -> dict[str, Any]:
    """What the release's function gets from the drop-in."""
    kernel = mock_kernel(version)
    with use_kernel(kernel):
        dropin(**given)
    kernel.assert_called_once()
    assert kernel.call_args.args == ()
    return dict(kernel.call_args.kwargs)


def whole(version: str, given: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call on a release, defaults too."""
    bound = inspect.signature(mock_kernel(version)).bind(**given)
    bound.apply_defaults()
    return dict(bound.arguments)


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name] is value or (not isinstance(value, Tensor) and got[name] == value), name


# The signature.


def test_the_signature_is_0_7_4s_and_the_interleave() -> None:
    *shown, interleave = inspect.signature(dropin).parameters.values()
    assert [
        Parameter(p.name, None if p.default is p.empty else repr(p.default), p.kind.name)
        for p in shown
    ] == list(recorded("0.7.4").parameters)
    assert (interleave.name, interleave.default) == ("interleave_size", 1)
    assert interleave.kind is interleave.KEYWORD_ONLY


def test_no_release_has_another_default_for_a_parameter() -> None:
    defaults = {p.name: p.default for p in recorded("0.7.4").parameters}
    for version in VERSIONS:
        assert {p.name: p.default for p in recorded(version).parameters}.items() <= defaults.items()


def test_a_positional_call_is_bound_in_0_7_4s_order() -> None:
    given = arguments()
    order = [p.name for p in recorded("0.7.4").parameters if p.required]
    kernel = mock_kernel("0.6.0")
    with use_kernel(kernel):
        # In 0.6.0 the parameter before the backend is another.
        positional: Any = dropin  # typed by keyword: the order is not the same everywhere
        positional(*(given[n] for n in order), 0, None, 0.1, 1.0, None, None, True, "trtllm-gen")
    expected = {name: given[name] for name in order}
    expected |= {"bmm1_scale": 0.1, "enable_pdl": True, "backend": "trtllm-gen"}
    assert_same(dict(kernel.call_args.kwargs), expected)


# The call shapes of stacks.


def counters() -> Tensor:
    return torch.zeros(4096, dtype=torch.uint8)


def sglang() -> dict[str, Any]:
    given = arguments(skip_softmax_threshold_scale_factor=None)
    given["seq_lens"] = given["seq_lens"].long().to(torch.int32)
    return given


SHAPES: dict[str, Any] = {
    "dense DCP": lambda: arguments(backend="cute-dsl", bmm2_scale=1.0) | dcp(),
    "dense DCP, several tokens": lambda: arguments(q_len=3, backend="cute-dsl") | dcp(),
    "dense DCP, auto": lambda: arguments() | dcp(),
    "one DCP rank": lambda: arguments() | dcp(world=1, rank=0, tokens=7),
    "DCP with pages of 128": lambda: arguments(page_size=128, backend="cute-dsl") | dcp(),
    "dense": lambda: arguments(backend="trtllm-gen", bmm2_scale=1.0),
    "dense, auto": lambda: arguments(),
    "dense with counters": lambda: arguments(multi_ctas_kv_counter_buffer=counters()),
    "several tokens with an LSE": lambda: arguments(q_len=3, return_lse=True),
    "own buffers": lambda: arguments(
        q_len=2,
        return_lse=True,
        out=torch.zeros(2, 2, 16, 512, dtype=torch.bfloat16),
        lse=torch.zeros(4, 16),
    ),
    "an LSE buffer in three dimensions": lambda: arguments(
        q_len=2, return_lse=True, lse=torch.zeros(2, 2, 16)
    ),
    "odd heads": lambda: arguments(heads=24, backend="cute-dsl"),
    "96 heads": lambda: arguments(heads=96, backend="cute-dsl", return_lse=True),
    "compact": lambda: arguments() | compact(),
    "compact on trtllm-gen": lambda: arguments(backend="trtllm-gen") | compact(),
    "compact with an LSE": lambda: arguments(backend="cute-dsl", return_lse=True) | compact(),
    "compact DCP": lambda: arguments(backend="cute-dsl") | compact() | dcp(),
    "SGLang's": sglang,
    "fp8": lambda: arguments(dtype=torch.float8_e4m3fn, bmm1_scale=0.075, bmm2_scale=0.5),
    "sinks": lambda: arguments(backend="trtllm-gen", sinks=torch.zeros(16)),
    "equal lengths": lambda: arguments(is_var_seq=False, enable_pdl=False),
    "the monolithic kernel": lambda: arguments(backend="cute-dsl", cute_dsl_impl="monolithic"),
    "sparse MLA": lambda: arguments(
        sparse_mla_top_k=128, block_tables=torch.zeros(2, 1, 128, dtype=torch.int32)
    ),
    "sparse MLA with lengths": lambda: arguments(
        sparse_mla_top_k=128,
        sparse_mla_top_k_lens=torch.full((2,), 128, dtype=torch.int32),
        block_tables=torch.zeros(2, 1, 128, dtype=torch.int32),
        backend="trtllm-gen",
    ),
    "a packed cache": lambda: (
        arguments(backend="sparse", kv_scale_format="auto", sparse_mla_top_k=512, seq_lens=None)
        | {"kv_cache": torch.zeros(4, 64, 1, 656, dtype=torch.uint8)}
    ),
    "cake": lambda: arguments(backend="cake", return_lse=True),
    "keys and values apart": lambda: arguments(
        uses_shared_paged_kv_idx=False,
        backend="trtllm-gen",
        block_tables=torch.zeros(2, 2, 2, dtype=torch.int32),
    ),
}
# The first release whose host takes the call, and behaves; the rest is refused here.
SINCE = {
    "dense DCP": "0.6.17",
    "dense DCP, several tokens": "0.6.17",
    "dense DCP, auto": "0.6.17",
    "one DCP rank": "0.6.17",
    "DCP with pages of 128": "0.6.17",
    "dense with counters": "0.6.15",
    "several tokens with an LSE": "0.6.12",
    "own buffers": "0.6.12",
    "an LSE buffer in three dimensions": "0.6.13",
    "odd heads": "0.6.12",
    "96 heads": "0.6.13",
    "compact": "0.6.14",
    "compact on trtllm-gen": "0.6.14",
    "compact with an LSE": "0.6.16",
    "compact DCP": "0.7.0",
    "equal lengths": "0.6.8",
    "the monolithic kernel": "0.6.12",
    "SGLang's": "0.6.4",
    "sparse MLA with lengths": "0.6.17",
    "a packed cache": "0.6.14",
    "cake": "0.7.1",
    "keys and values apart": "0.6.7",
}
# 0.6.8 brought cute-dsl, for 128 heads; what is refused of it before 0.6.12 is FlashInfer's.
FLASHINFERS_OWN = {"odd heads": "0.6.8"}
# Taken on older releases too: without the counters or a None, or with a view of the buffer.
MENDED = {
    "dense with counters": "0.6.0",
    "an LSE buffer in three dimensions": "0.6.12",
    "SGLang's": "0.6.0",
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_stacks_call_reaches_the_release_as_it_was_given(shape: str, version: str) -> None:
    given = SHAPES[shape]()
    since = Version(SINCE.get(shape, "0.6.0"))
    if Version(version) >= since:
        got = received(version, given)
        mine, theirs = whole(version, got), whole(version, given)
        if mine["backend"] != theirs["backend"]:
            # What was checked is what runs, where FlashInfer's auto may take another.
            assert theirs.pop("backend") == "auto"
            assert mine.pop("backend") == "trtllm-gen"
            assert Version(version) < Version("0.7.1")
            assert given.get("return_lse") or shape in ("compact", "several tokens")
        assert_same(mine, theirs)
        defaults = {p.name: p.default for p in recorded(version).parameters}
        left_out = given.keys() - got.keys()
        assert all(repr(given[name]) == defaults[name] for name in left_out)
        return
    taken = MENDED | FLASHINFERS_OWN
    if shape in taken and Version(version) >= Version(taken[shape]):
        received(version, given)
        return
    kernel = mock_kernel(version)
    with use_kernel(kernel), pytest.raises(FlashInferVersionError) as raised:
        dropin(**given)
    kernel.assert_not_called()
    assert raised.value.summary.startswith((f"{FUNCTION}(", "backend='cute-dsl'"))
    assert raised.value.found.startswith(f"flashinfer-python {version}")
    needed = Version(raised.value.needed.partition(" or newer")[0])
    assert Version(version) < needed <= since
