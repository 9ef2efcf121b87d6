"""Bytes of the workspace and of the counters: against FlashInfer's own numbers, and in a call."""

from __future__ import annotations

import importlib
import itertools
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from packaging.version import Version

from fi_dcp_compat import (
    FlashInferABI,
    InvalidInputError,
    counter_bytes,
    decode_mla,
    min_workspace_bytes,
    recorded,
)
from fi_dcp_compat.sizes import needed_bytes
from fi_dcp_compat.testing import mock_kernel, use_kernel
from tests.support import RELEASES, call, dcp_of
from tests.test_guards import gpu

MIB = 2**20


def sizes(version: str, changes: dict[str, Any]) -> dict[str, Any]:
    usual = {"batch": 1, "q_len": 1, "num_heads": 16, "return_lse": False, "sm_count": 148}
    return {"abi": recorded(version)} | usual | changes


def need(backend: Any, version: str = "0.7.4", **changes: Any) -> int:
    """The need of one batch, which a call is held to."""
    return needed_bytes("trtllm-gen" if backend == "auto" else backend, **sizes(version, changes))


def enough(backend: Any, version: str = "0.7.4", **changes: Any) -> int:
    """What suffices for all batches up to one."""
    return min_workspace_bytes(backend, **sizes(version, changes))


def flashinfer_0_7_4(module: str, function: str) -> Callable[..., Any]:
    """A function of the installed FlashInfer, if it is the release the numbers are of."""
    pytest.importorskip("flashinfer.version")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        version = importlib.import_module("flashinfer").__version__
        if version != "0.7.4":
            pytest.skip(f"FlashInfer {version} is installed, not 0.7.4")
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def test_the_cute_dsl_bound_is_the_most_that_flashinfer_0_7_4_wants_for_any_length() -> None:
    wanted = flashinfer_0_7_4(
        "flashinfer.cute_dsl.attention.monolithic.mla_decode", "_get_split_kv_and_workspace_size"
    )
    lengths = (1, 128, 129, 1000, 4096, 16384, 20000, 65536, 262144, 1 << 24)
    compared = 0
    for batch, q_len, heads, sms in itertools.product(
        (1, 2, 3, 8, 31, 37, 74, 148), (1, 2, 4, 5, 17), (1, 16, 24, 96, 128), (148, 160, 7, 1)
    ):
        tiles = batch * -(-q_len * heads // 128)
        for tokens in (None, batch, batch * q_len):
            units = None if tokens is None else max(1, min(tokens, tiles))
            most = max(
                wanted(batch, q_len, heads, 512, sms, length, occupancy_q_tiles=units)[1]
                for length in lengths
            )
            bound = need(
                "cute-dsl",
                batch=batch,
                q_len=q_len,
                num_heads=heads,
                sm_count=sms,
                num_tokens=tokens,
            )
            assert bound == most, (batch, q_len, heads, sms, tokens)
            compared += 1
    assert compared == 2400


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("varlen", [False, True])
def test_what_suffices_does_so_for_every_smaller_batch(version: str, varlen: bool) -> None:
    for batch, q_len, heads, sms in itertools.product(
        (1, 3, 37, 74, 200), (1, 2, 4, 9), (1, 24, 96, 128), (148, 160, 7, 1)
    ):
        shape = {"num_heads": heads, "sm_count": sms}
        bound = enough("cute-dsl", version, batch=batch, q_len=q_len, varlen=varlen, **shape)
        needs = [
            need("cute-dsl", version, batch=b, q_len=q, num_tokens=tokens, **shape)
            for b in range(1, batch + 1)
            for q in range(1, q_len + 1)
            for tokens in ((b + q - 1, b * q) if varlen else (None,))
        ]
        assert max(needs) <= bound
        # Not far above: some rounding, and what folding tokens saved up to 0.6.15.
        folded = 1 if Version(version) >= Version("0.6.16") else q_len
        assert sms < 100 or bound <= 2 * folded * max(needs)
        assert enough("auto", version, batch=batch, q_len=q_len, varlen=varlen, **shape) >= bound


def test_a_persistent_buffer_of_a_large_batch_takes_a_small_one() -> None:
    # 64 requests of 128 heads fill the GPU by themselves; one alone is split.
    assert need("cute-dsl", batch=64, num_heads=128) == 0
    assert need("cute-dsl", batch=1, num_heads=128) == 74 * 128 * 513 * 4
    assert enough("cute-dsl", batch=64, num_heads=128) == 74 * 128 * 513 * 4
    assert enough("auto", batch=64, num_heads=128) == 74 * 128 * 513 * 4


def test_a_block_that_is_not_causal_needs_what_its_rows_need() -> None:
    for backend in ("cute-dsl", "trtllm-gen", "auto"):
        rows = enough(backend, batch=32, return_lse=True)
        assert enough(backend, batch=8, q_len=4, return_lse=True, causal=False) == rows


@pytest.mark.parametrize("version", RELEASES)
def test_the_counters_of_old_lie_before_what_auto_gives_cute_dsl(version: str) -> None:
    inside = 8 * MIB if version in ("0.6.12", "0.6.13", "0.6.14") else 0
    assert enough("auto", version) == enough("cute-dsl", version) + inside


def test_the_counters_are_as_many_as_flashinfer_0_7_4_wants() -> None:
    wanted = flashinfer_0_7_4("flashinfer.utils", "get_trtllm_gen_multi_ctas_kv_counter_bytes")
    for batch, heads, sms in itertools.product((1, 2, 7, 64, 300), (1, 16, 96, 128), (1, 148, 160)):
        assert counter_bytes(batch, heads, sms) == wanted(batch, heads, sms)


@pytest.mark.parametrize("version", RELEASES)
def test_the_cute_dsl_bound_stays_within_what_stacks_allocate(version: str) -> None:
    for sms, most in ((148, 18.6), (160, 20.1)):
        for batch, q_len, heads in itertools.product(range(1, 80), (1, 2, 4, 5), (1, 24, 128)):
            got = need("cute-dsl", version, batch=batch, q_len=q_len, num_heads=heads, sm_count=sms)
            assert 0 <= got <= most * MIB
    assert need("cute-dsl", version, batch=148) == 0  # one split: nothing to reduce


def test_the_cap_on_splits_grew_in_0_7_2_and_its_post_release() -> None:
    def splits(version: str) -> float:
        return need("cute-dsl", version) / (128 * 513 * 4)

    assert [splits(version) for version in RELEASES] == [32] * 9 + [48, 74, 74]


def test_up_to_0_6_15_a_tile_holds_whole_query_tokens() -> None:
    tile = 128 * 513 * 4
    for version in ("0.6.13", "0.6.14", "0.6.15"):
        # 96 heads: no two tokens fit a tile. 32 heads: four do, if the number of tokens divides.
        assert need("cute-dsl", version, num_heads=96, q_len=4, batch=8) == 8 * 4 * 2 * tile
        assert need("cute-dsl", version, num_heads=32, q_len=4, batch=8) == 8 * 9 * tile
        assert need("cute-dsl", version, num_heads=32, q_len=3, batch=8) == 8 * 9 * tile
    # Without a causal mask between them, 0.6.12 never folded tokens.
    assert need("cute-dsl", "0.6.12", num_heads=32, q_len=4, batch=8) == 8 * 4 * 2 * tile
    # From 0.6.16 tokens and heads are one row space: 4 * 96 rows are three tiles.
    assert need("cute-dsl", "0.6.16", num_heads=96, q_len=4, batch=8) == 8 * 3 * 3 * tile


def test_the_other_backends() -> None:
    for version in RELEASES:
        for size in (need, enough):
            assert size("reference", version) == 0
            assert size("xqa", version, batch=3) == 8 * MIB + 3 * 18432


@pytest.mark.parametrize("name", ["batch", "q_len", "num_heads", "sm_count"])
@pytest.mark.parametrize("backend", ["auto", "trtllm-gen", "cute-dsl", "xqa"])
def test_an_integer_too_small_is_refused_with_what_is_needed(backend: str, name: str) -> None:
    values: tuple[Any, ...] = (0, -1, True, 1.0, None)
    for version, value in itertools.product(("0.6.12", "0.7.4"), values):
        with pytest.raises(InvalidInputError, match=f"{name} must be an int of at least 1") as got:
            enough(backend, version, **{name: value})
        assert got.value.argument == name
        assert got.value.value is value
        assert repr(value) in got.value.found
        assert "at least 1" in got.value.needed


@pytest.mark.parametrize("name", ["batch", "num_heads", "sm_count"])
def test_an_integer_too_small_has_no_counters(name: str) -> None:
    values: tuple[Any, ...] = (0, -1, True, 1.0, None)
    for value in values:
        numbers: dict[str, Any] = {"batch": 4, "num_heads": 16, "sm_count": 148}
        with pytest.raises(InvalidInputError, match=f"{name} must be an int of at least 1"):
            counter_bytes(**(numbers | {name: value}))


@pytest.mark.parametrize("backend", ["sparse", "", None])
def test_an_unknown_backend_has_no_size(backend: Any) -> None:
    with pytest.raises(InvalidInputError, match="backend"):
        enough(backend)


# In a call.


def run(
    given: dict[str, Any],
    *,
    abi: FlashInferABI | None = None,
    capability: tuple[int, int] | None = (10, 0),
) -> MagicMock:
    abi = recorded("0.7.4") if abi is None else abi
    kernel = mock_kernel(abi.version)
    with ExitStack() as stack:
        if capability is not None:
            stack.enter_context(gpu(capability))
        stack.enter_context(use_kernel(kernel, abi))
        decode_mla(**given)
    return kernel


def refused(given: dict[str, Any], **options: Any) -> InvalidInputError:
    with pytest.raises(InvalidInputError, match="is too small") as raised:
        run(given, **options)
    return raised.value


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("backend", ["cute-dsl", "trtllm-gen", "auto", "xqa"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_a_call_takes_a_workspace_of_the_bound_and_refuses_a_byte_less(
    version: str, backend: str, return_lse: bool
) -> None:
    if return_lse and (backend == "xqa" or (version, backend) == ("0.6.12", "cute-dsl")):
        return
    heads = 128 if backend == "xqa" else 16
    options: dict[str, Any] = {
        "abi": recorded(version),
        "capability": (12, 0) if backend == "xqa" else (10, 0),
    }
    # auto with an LSE names trtllm-gen; without one it is trtllm-gen unless it was tuned.
    bound = need(backend, version, batch=2, num_heads=heads, return_lse=return_lse)
    given = call(backend=backend, heads=heads, return_lse=return_lse)
    run(given | {"workspace_buffer": torch.zeros(bound, dtype=torch.int8)}, **options)
    if bound:
        small = torch.zeros(bound - 1, dtype=torch.int8)
        error = refused(given | {"workspace_buffer": small}, **options)
        assert f"{bound - 1} bytes" in error.found
        assert f"{bound} bytes" in error.needed


@pytest.mark.parametrize("rank", [0, 7])
def test_with_dcp_every_rank_needs_the_same_workspace(rank: int) -> None:
    bound = need("cute-dsl", batch=2, return_lse=True)
    for max_seq_len in (0, 7, 100000):
        given = call(max_seq_len=max_seq_len, dcp=dcp_of(rank=rank))
        run(given | {"workspace_buffer": torch.zeros(bound, dtype=torch.int8)})
        small = torch.zeros(bound - 1, dtype=torch.int8)
        assert f"{bound} bytes" in refused(given | {"workspace_buffer": small}).needed


def test_a_compact_batch_is_measured_by_its_tokens() -> None:
    compact = call(
        query=torch.zeros(4, 16, 576, dtype=torch.bfloat16),
        cum_seq_lens_q=torch.tensor([0, 1, 4], dtype=torch.int32),
        max_q_len=24,
        backend="cute-dsl",
    )
    bound = need("cute-dsl", batch=2, q_len=24, num_tokens=4)
    assert bound != need("cute-dsl", batch=2, q_len=24)
    run(compact | {"workspace_buffer": torch.zeros(bound, dtype=torch.int8)})
    refused(compact | {"workspace_buffer": torch.zeros(bound - 1, dtype=torch.int8)})


def test_a_workspace_is_measured_in_bytes_whatever_its_dtype() -> None:
    given = call(backend="trtllm-gen", return_lse=True)
    bound = need("trtllm-gen", batch=2, return_lse=True)
    run(given | {"workspace_buffer": torch.zeros(bound // 4, dtype=torch.float32)})
    refused(given | {"workspace_buffer": torch.zeros(bound // 4 - 1, dtype=torch.float32)})


def test_without_a_gpu_only_what_no_sm_count_changes_is_checked() -> None:
    empty = torch.zeros(0, dtype=torch.int8)
    run(call(backend="cute-dsl", workspace_buffer=empty), capability=None)
    run(call(workspace_buffer=empty), capability=None)
    refused(call(return_lse=True, workspace_buffer=empty), capability=None)
    run(call(backend="reference", return_lse=True, workspace_buffer=None), capability=None)


@pytest.mark.parametrize("flat", [False, True])
def test_a_non_causal_block_needs_the_workspace_of_its_rows(flat: bool) -> None:
    """The kernel gets a request a row, and keeps statistics of each."""
    batch, q_len, heads = 2, 32, 16
    query = torch.zeros(batch, q_len, heads, 576, dtype=torch.bfloat16)
    given = call(
        query=query.flatten(0, 1) if flat else query,
        causal=False,
        backend="trtllm-gen",
        return_lse=True,
    )
    bound = need("trtllm-gen", batch=batch * q_len, return_lse=True)
    assert bound == 8 * heads * batch * q_len * 256 + MIB
    kernel = run(given | {"workspace_buffer": torch.zeros(bound, dtype=torch.int8)})
    assert kernel.call_args.kwargs["query"].shape == (batch * q_len, 1, heads, 576)
    error = refused(given | {"workspace_buffer": torch.zeros(bound - 1, dtype=torch.int8)})
    assert f"{bound} bytes" in error.needed


def test_a_non_causal_compact_block_needs_the_workspace_of_its_tokens() -> None:
    given = call(
        query=torch.zeros(4, 16, 576, dtype=torch.bfloat16),
        cum_seq_lens_q=torch.tensor([0, 1, 4], dtype=torch.int32),
        max_q_len=3,
        causal=False,
        backend="trtllm-gen",
        return_lse=True,
    )
    bound = need("trtllm-gen", batch=4, return_lse=True)
    run(given | {"workspace_buffer": torch.zeros(bound, dtype=torch.int8)})
    refused(given | {"workspace_buffer": torch.zeros(bound - 1, dtype=torch.int8)})


@pytest.mark.parametrize("backend", ["auto", "trtllm-gen"])
def test_a_counter_buffer_too_small_is_refused_with_both_numbers(backend: str) -> None:
    given = call(batch=64, heads=96, width=2, backend=backend)
    if backend == "auto":  # 96 heads would go to cute-dsl
        given = call(batch=96, heads=64, width=2)
    counters = torch.zeros(24576, dtype=torch.uint8)
    if backend == "trtllm-gen":
        given = call(batch=48, heads=128, width=2, backend=backend)
    run(given | {"multi_ctas_kv_counter_buffer": counters})
    error = refused(given | {"multi_ctas_kv_counter_buffer": counters[:24575]})
    assert str(error) == (
        "multi_ctas_kv_counter_buffer is too small.\n"
        "Found: 24575 bytes ([24575] torch.uint8 on cpu).\n"
        "Needed: 24576 bytes for trtllm-gen's counters and this batch.\n"
        "Fix: allocate at least 24576 bytes once."
    )


def test_a_non_causal_block_needs_the_counters_of_its_rows() -> None:
    given = call(batch=2, q_len=4, heads=64, causal=False, backend="trtllm-gen")
    assert counter_bytes(8, 64, 148) == 2048
    run(given | {"multi_ctas_kv_counter_buffer": torch.zeros(2048, dtype=torch.uint8)})
    error = refused(given | {"multi_ctas_kv_counter_buffer": torch.zeros(2047, dtype=torch.uint8)})
    assert "2048 bytes" in error.needed


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("backend", ["cute-dsl", "trtllm-gen"])
def test_an_empty_batch_needs_no_workspace(version: str, backend: str) -> None:
    empty = call(
        query=torch.zeros(0, 1, 16, 576, dtype=torch.bfloat16),
        block_tables=torch.zeros(0, 2, dtype=torch.int32),
        seq_lens=torch.zeros(0, dtype=torch.int32),
        workspace_buffer=torch.zeros(0, dtype=torch.int8),
        backend=backend,
    )
    run(empty, abi=recorded(version)).assert_not_called()


@pytest.mark.parametrize(("version", "refused"), [("0.6.14", True), ("0.6.15", False)])
def test_more_pairs_than_there_are_counters_are_refused(version: str, refused: bool) -> None:
    batch = 8192 * 256 // 128 + 1
    # As wide as that without the memory: the kernel is a mock.
    query = torch.zeros(1, 1, 128, 576, dtype=torch.bfloat16).expand(batch, -1, -1, -1)
    given = call(batch=1, heads=128) | {
        "query": query,
        "block_tables": torch.zeros(batch, 2, dtype=torch.int32),
        "seq_lens": torch.full((batch,), 7, dtype=torch.int32),
        "backend": "trtllm-gen",
    }
    kernel = MagicMock(return_value=torch.zeros(1, dtype=torch.bfloat16).expand(batch * 128 * 512))
    with use_kernel(kernel, recorded(version)):
        if refused:
            with pytest.raises(InvalidInputError, match="at most 2097152") as raised:
                decode_mla(**given)
            assert raised.value.fix == "split the batch."
            kernel.assert_not_called()
        else:
            decode_mla(**given)
