"""A KV cache whose ranks hold more than one token in turn: S05, S06, S43."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fi_dcp_compat import (
    DCP,
    UnsupportedConfigError,
    check,
    decode_mla,
    local_seq_lens,
    prepare_decode_mla,
    raise_first,
    recorded,
    supports_combination,
    validate_dcp_config,
)
from fi_dcp_compat.dropin import trtllm_batch_decode_with_kv_cache_mla
from fi_dcp_compat.releases import recorded_versions
from fi_dcp_compat.testing import mock_kernel, use_kernel
from tests.scenarios.inputs import dropin_dcp_call, lens
from tests.support import DCP_RELEASES, call


@dataclass(frozen=True)
class ParallelConfig:
    """A stack's own, with vLLM's names."""

    decode_context_parallel_size: int
    cp_kv_cache_interleave_size: int


def by_construction(world_size: int, interleave: int) -> None:
    DCP(world_size, 0, lens(28, 28), interleave_size=interleave)


def by_the_stacks_configuration(world_size: int, interleave: int) -> None:
    validate_dcp_config(ParallelConfig(world_size, interleave))


def by_check(world_size: int, interleave: int) -> None:
    sizes: dict[str, Any] = {"dcp_world_size": world_size, "interleave_size": interleave}
    reasons = check(
        recorded("0.7.4"), num_heads=16, q_len=1, page_size=64, dtype="bfloat16", **sizes
    )
    raise_first(reasons)


def by_preparation(world_size: int, interleave: int) -> None:
    with use_kernel(mock_kernel("0.7.4")):
        prepare_decode_mla(
            page_size=64,
            dtype=torch.bfloat16,
            bmm1_scale=0.1,
            dcp_world_size=world_size,
            interleave_size=interleave,
        )


def by_the_drop_in(world_size: int, interleave: int) -> None:
    given = dropin_dcp_call(world_size, 0, lens(28, 28), interleave_size=interleave)
    with use_kernel(mock_kernel("0.7.4")):
        trtllm_batch_decode_with_kv_cache_mla(**given)


WAYS: list[Callable[[int, int], None]] = [
    by_construction,
    by_the_stacks_configuration,
    by_check,
    by_preparation,
    by_the_drop_in,
]
ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


def refusal(world_size: int, interleave: int) -> str:
    return (
        f"cp_kv_cache_interleave_size={interleave} cannot be masked natively.\n"
        f"Found: interleave_size={interleave} with dcp_world_size={world_size}.\n"
        "Needed: cp_kv_cache_interleave_size=1: FlashInfer's mask, in every known release, takes "
        "local key k of rank r for global position W*k + r.\n"
        "Fix: start with --cp-kv-cache-interleave-size 1; a KV connector or prefill/decode "
        "disaggregation may have raised it to the block size."
    )


@ways
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_s05_an_interleave_of_64_is_refused_with_the_flag_and_the_one_value(
    way: Callable[[int, int], None], world_size: int
) -> None:
    with pytest.raises(UnsupportedConfigError, match="64") as raised:
        way(world_size, 64)
    assert str(raised.value) == refusal(world_size, 64)


@ways
def test_s05_an_interleave_of_1_passes_and_so_does_any_where_nothing_is_split(
    way: Callable[[int, int], None],
) -> None:
    way(4, 1)
    way(1, 64)


@pytest.mark.parametrize("version", DCP_RELEASES)
def test_s05_what_passes_reaches_the_kernel(version: str) -> None:
    kernel = mock_kernel(version)
    with use_kernel(kernel):
        decode_mla(**call(), dcp=DCP(4, 0, lens(28, 28), interleave_size=1))
        decode_mla(**call(), dcp=DCP(1, 0, lens(7, 7), interleave_size=64))
    assert [made.kwargs.get("cp_world") for made in kernel.call_args_list] == [4, None]


def test_s05_the_interleave_decides_who_holds_which_keys() -> None:
    assert [local_seq_lens(200, 4, rank) for rank in range(4)] == [50, 50, 50, 50]
    assert [local_seq_lens(200, 4, rank, 64) for rank in range(4)] == [64, 64, 64, 8]


@ways
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_s06_the_refusal_of_a_block_size_names_what_raises_it_to_that(
    way: Callable[[int, int], None], block_size: int
) -> None:
    with pytest.raises(UnsupportedConfigError, match=f"={block_size} cannot be masked") as raised:
        way(8, block_size)
    for words in ("KV connector", "prefill/decode disaggregation", "to the block size"):
        assert words in raised.value.fix


@ways
def test_s43_an_interleave_of_16_is_refused_as_none_of_flashinfers(
    way: Callable[[int, int], None],
) -> None:
    with pytest.raises(UnsupportedConfigError, match="in every known release") as raised:
        way(4, 16)
    assert str(raised.value) == refusal(4, 16)


@pytest.mark.parametrize("version", recorded_versions())
def test_s43_no_recorded_release_says_that_it_has_one(version: str) -> None:
    """By the sizes that a release masks, not by its signature: no keyword for it is known yet."""
    features = recorded(version).features
    assert features.native_interleave is False
    assert features.interleave_sizes == (1,)
    reason = supports_combination(
        num_heads=16, dtype="bf16", dcp_world_size=4, interleave_size=16, abi=recorded(version)
    )
    assert reason is not None
    assert "cp_kv_cache_interleave_size=16 cannot be masked natively" in reason
