"""The buffers that a caller brings: S17, S33."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from fi_dcp_compat import (
    Backend,
    InvalidInputError,
    counter_bytes,
    decode_mla,
    min_workspace_bytes,
    recorded,
)
from fi_dcp_compat.testing import mock_kernel, use_kernel
from tests.support import DCP_RELEASES, RELEASES, call, dcp_of

MIB = 1 << 20
COUNTERS_APART = RELEASES[RELEASES.index("0.6.15") :]

# S17: 64 heads, 12288 requests of one query token.


def large_batch(backend: Backend, workspace_bytes: int) -> dict[str, Any]:
    """That batch; its query and its tables repeat one row, so they take no memory."""
    return call(
        query=torch.zeros(576).bfloat16().expand(12288, 1, 64, 576),
        block_tables=torch.zeros(12288, 2, dtype=torch.int32),
        seq_lens=torch.full((12288,), 7, dtype=torch.int32),
        # Untouched memory costs nothing.
        workspace_buffer=torch.empty(workspace_bytes, dtype=torch.int8),
        backend=backend,
    )


def repeats_one_row(**given: Any) -> tuple[Tensor, Tensor]:
    rows = given["query"].shape[:-1]
    return torch.ones(512).bfloat16().expand(*rows, 512), torch.ones(1).expand(rows)


def needed(version: str) -> int:
    # Up to 0.6.14 the counters lie in front of the same buffer.
    return 1611661312 + (0 if version in COUNTERS_APART else 8 * MIB)


@pytest.mark.parametrize("version", RELEASES)
def test_s17_an_lse_of_trtllm_gen_needs_8_bytes_a_head_and_256_rows_a_request(
    version: str,
) -> None:
    assert 8 * 64 * 12288 * 256 + MIB == 1611661312
    batch: dict[str, Any] = {"batch": 12288, "q_len": 1, "num_heads": 64, "sm_count": 148}
    abi = recorded(version)
    with_lse = min_workspace_bytes("trtllm-gen", abi=abi, **batch, return_lse=True)
    without = min_workspace_bytes("trtllm-gen", abi=abi, **batch, return_lse=False)
    assert (with_lse, without) == (needed(version), needed(version) - 1611661312)
    if version != "0.6.12":
        assert min_workspace_bytes("cute-dsl", abi=abi, **batch, return_lse=True) <= 256 * MIB


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("short_by", [1, None], ids=["by a byte", "256 MiB"])
def test_s17_a_smaller_workspace_is_refused_with_both_sizes(
    short_by: int | None, version: str
) -> None:
    have = 256 * MIB if short_by is None else needed(version) - short_by
    kernel = mock_kernel(version)
    with use_kernel(kernel), pytest.raises(InvalidInputError, match="is too small") as raised:
        decode_mla(**large_batch("trtllm-gen", have), return_lse=True)
    kernel.assert_not_called()
    assert raised.value.argument == "workspace_buffer"
    assert str(raised.value) == (
        "workspace_buffer is too small.\n"
        f"Found: {have} bytes ([{have}] torch.int8 on cpu).\n"
        f"Needed: {needed(version)} bytes for backend='trtllm-gen' and this batch.\n"
        f"Fix: allocate at least {needed(version)} bytes once."
    )


@pytest.mark.parametrize("version", RELEASES)
def test_s17_the_size_itself_passes_and_256_mib_do_for_cute_dsl(version: str) -> None:
    kernel = mock_kernel(version)
    kernel.side_effect = repeats_one_row
    with use_kernel(kernel):
        decode_mla(**large_batch("trtllm-gen", needed(version)), return_lse=True, lse_base="2")
        if version != "0.6.12":  # whose cute-dsl has no LSE
            decode_mla(**large_batch("cute-dsl", 256 * MIB), return_lse=True)
    assert kernel.call_count == (1 if version == "0.6.12" else 2)


# S33: trtllm-gen's counters.


def counters(size: int = 1 << 16) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8)


@pytest.mark.parametrize("version", DCP_RELEASES)
@pytest.mark.parametrize("backend", ["auto", "cute-dsl"])
@pytest.mark.parametrize("size", [1 << 16, 0])
def test_s33_with_dcp_the_counters_are_left_out(size: int, backend: Backend, version: str) -> None:
    kernel = mock_kernel(version)
    given = call(backend=backend, multi_ctas_kv_counter_buffer=counters(size))
    with use_kernel(kernel):
        decode_mla(**given, dcp=dcp_of())
    assert "multi_ctas_kv_counter_buffer" not in kernel.call_args.kwargs


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize(
    ("backend", "heads", "trtllm_gen_can_run"),
    [
        ("auto", 16, True),
        ("trtllm-gen", 16, True),
        ("cute-dsl", 16, False),
        # trtllm-gen tiles 96 heads in no release.
        ("auto", 96, False),
    ],
)
def test_s33_without_dcp_they_reach_the_kernel_where_trtllm_gen_can_run_and_takes_them(
    backend: Backend, heads: int, trtllm_gen_can_run: bool, version: str
) -> None:
    kernel, buffer = mock_kernel(version), counters()
    with use_kernel(kernel):
        decode_mla(**call(heads=heads, backend=backend, multi_ctas_kv_counter_buffer=buffer))
    takes_them = Version(version) >= Version("0.6.15")
    given = kernel.call_args.kwargs.get("multi_ctas_kv_counter_buffer")
    assert given is (buffer if trtllm_gen_can_run and takes_them else None)


@pytest.mark.parametrize(
    ("batch", "heads", "size"), [(1, 96, 608), (64, 96, 24576), (1, 128, 608), (3, 50, 608)]
)
def test_s33_the_helper_sizes_them_by_the_larger_of_heads_and_multiprocessors(
    batch: int, heads: int, size: int
) -> None:
    assert counter_bytes(batch, heads, 148) == size


@pytest.mark.parametrize("version", COUNTERS_APART)
def test_s33_a_counter_buffer_that_is_too_small_is_refused_with_both_sizes(version: str) -> None:
    # 2 requests of 16 heads; the number of multiprocessors is not known on this machine.
    need = counter_bytes(2, 16, 1)
    assert need == 128
    kernel = mock_kernel(version)
    with (
        use_kernel(kernel),
        pytest.raises(InvalidInputError, match=r"^multi_ctas_kv_counter_buffer is") as raised,
    ):
        decode_mla(**call(multi_ctas_kv_counter_buffer=counters(need - 1)))
    kernel.assert_not_called()
    assert str(raised.value) == (
        "multi_ctas_kv_counter_buffer is too small.\n"
        "Found: 127 bytes ([127] torch.uint8 on cpu).\n"
        "Needed: 128 bytes for trtllm-gen's counters and this batch.\n"
        "Fix: allocate at least 128 bytes once."
    )
    with use_kernel(kernel):
        decode_mla(**call(multi_ctas_kv_counter_buffer=counters(need)))
    kernel.assert_called_once()
