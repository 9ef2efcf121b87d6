"""Global and rank-local lengths: S04, S09, S10, S36."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from fi_dcp_compat import (
    DCP,
    InvalidInputError,
    causal_bounds,
    debug_checks,
    decode_mla,
    local_seq_lens,
)
from fi_dcp_compat.dropin import trtllm_batch_decode_with_kv_cache_mla
from fi_dcp_compat.testing import mock_kernel, use_kernel
from tests.contract.test_decode_call import Dispatched
from tests.scenarios.inputs import dropin_dcp_call, keys_seen, lens
from tests.support import DCP_RELEASES, call

# S04: global length 10, three query tokens, four ranks.


@pytest.mark.parametrize(
    ("rank", "right", "naive"),
    [
        (0, [2, 3, 3], [1, 2, 3]),
        (1, [2, 2, 3], [1, 2, 3]),
        (2, [2, 2, 2], [0, 1, 2]),
        (3, [2, 2, 2], [0, 1, 2]),
    ],
)
def test_s04_a_row_sees_the_local_part_of_the_shifted_global_bound(
    rank: int, right: list[int], naive: list[int]
) -> None:
    assert causal_bounds(lens(10), 3, 4, rank).tolist() == [right]
    assert keys_seen(10, 3, 4, rank) == right
    # What a kernel without a DCP mask makes of the same shard.
    assert keys_seen(10, 3, 4, rank, masked=False) == naive


def test_s04_so_it_is_on_rank_1_of_2() -> None:
    assert causal_bounds(lens(10), 3, 2, 1).tolist() == [[4, 4, 5]]
    assert keys_seen(10, 3, 2, 1) == [4, 4, 5]
    assert keys_seen(10, 3, 2, 1, masked=False) == [3, 4, 5]


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize("q_len", [1, 2, 4])
def test_s04_the_ranks_together_see_each_key_up_to_the_row_once(
    q_len: int, world_size: int
) -> None:
    for length in (q_len, q_len + 1, 10, 17, 64):
        seen = [keys_seen(length, q_len, world_size, rank) for rank in range(world_size)]
        assert [sum(row) for row in zip(*seen, strict=True)] == [
            length - (q_len - 1 - token) for token in range(q_len)
        ]


@pytest.mark.parametrize("rank", range(4))
def test_s04_so_it_is_where_requests_have_different_query_lengths(rank: int) -> None:
    local = local_seq_lens(lens(10, 10), 4, rank)
    given = call(query=torch.zeros(4, 16, 576).bfloat16(), seq_lens=local, max_seq_len=3)
    given |= {"cum_seq_lens_q": lens(0, 1, 4), "max_q_len": 3, "backend": "reference"}
    state = decode_mla(**given, dcp=DCP(4, rank, lens(10, 10)))
    one, three = keys_seen(10, 1, 4, rank), keys_seen(10, 3, 4, rank)
    assert state.lse[:, 0].exp().round().tolist() == one + three


# S09: the two lengths swapped. The values alone do not tell which of them is the wrong one, so
# one text names both.


def swapped_call(local: Tensor, causal: Tensor, world_size: int, rank: int) -> dict[str, Any]:
    given = call(batch=len(local), seq_lens=local, max_seq_len=100)
    return given | {"dcp": DCP(world_size, rank, causal)}


@pytest.mark.parametrize(("length", "expected"), [(10, 3), (3, 1)], ids=["global", "local"])
@pytest.mark.parametrize("switch", ["environment", "context"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_s09_swapped_lengths_are_refused_where_values_are_checked(
    length: int, expected: int, switch: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = swapped_call(lens(length), lens(length), 4, 0) | {"backend": backend}
    kernel = mock_kernel("0.7.4")
    if switch == "environment":
        monkeypatch.setenv("FI_DCP_COMPAT_DEBUG", "1")
    checks = nullcontext() if switch == "environment" else debug_checks()
    looks_global = pytest.raises(InvalidInputError, match="looks global")
    with use_kernel(kernel), checks, looks_global as raised:
        decode_mla(**given)
    kernel.assert_not_called()
    assert str(raised.value) == (
        "seq_lens[0] looks global, or the causal lengths look local.\n"
        f"Found: seq_lens[0] = {length}.\n"
        f"Needed: the rank-local length of rank 0 of 4: expected {expected} for a global length "
        f"of {length}.\n"
        "Fix: look at how row 0 of the batch was built; this check is FI_DCP_COMPAT_DEBUG or "
        "debug_checks()."
    )


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_s09_so_they_are_on_each_rank_and_in_each_row(world_size: int) -> None:
    for rank in range(world_size):
        right = local_seq_lens(100, world_size, rank)
        given = swapped_call(lens(right, 100), lens(100, 100), world_size, rank)
        with (
            use_kernel(mock_kernel("0.7.4")),
            debug_checks(),
            pytest.raises(InvalidInputError, match=r"^seq_lens\[1\] looks global") as raised,
        ):
            decode_mla(**given)
        assert f"rank {rank} of {world_size}: expected {right} for" in raised.value.needed


@pytest.mark.parametrize("version", DCP_RELEASES)
def test_s09_the_check_is_off_by_default_and_then_nothing_is_read(version: str) -> None:
    kernel, given = mock_kernel(version), swapped_call(lens(10), lens(10), 4, 0)
    answer = (torch.zeros(1, 1, 16, 512).bfloat16(), torch.zeros(1, 16))
    kernel.side_effect, kernel.return_value = None, answer
    with use_kernel(kernel), Dispatched() as operations:
        decode_mla(**given)
    kernel.assert_called_once()
    assert operations.names == []


# S10: the rank left out of the bound.


def test_s10_rank_3_of_4_holds_2_of_9_keys() -> None:
    assert local_seq_lens(9, 4, 3) == 2
    assert local_seq_lens(9, world_size=4, rank=3) == 2
    assert keys_seen(9, 1, 4, 3) == [2]


@pytest.mark.parametrize("world_size", range(1, 17))
def test_s10_the_ranks_hold_each_key_once(world_size: int) -> None:
    lengths = torch.arange(258, dtype=torch.int32)
    held = [local_seq_lens(lengths, world_size, rank) for rank in range(world_size)]
    assert torch.stack(held).sum(dim=0).tolist() == list(range(258))
    for rank, local in enumerate(held):
        assert local.tolist() == [len(range(rank, length, world_size)) for length in range(258)]
        assert local.tolist() == [local_seq_lens(length, world_size, rank) for length in range(258)]


# S36: lengths of another dtype, or on another device.


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize(
    "argument", ["seq_lens", "causal_seqlens_kv_global", "block_tables", "cum_seq_lens_q"]
)
def test_s36_what_the_kernel_reads_as_int32_is_cast_by_the_caller_once_a_step(
    argument: str, dtype: torch.dtype
) -> None:
    given = call(query=torch.zeros(4, 16, 576).bfloat16(), max_q_len=3)
    given |= {"cum_seq_lens_q": lens(0, 1, 4), "causal_seqlens_kv_global": lens(55, 55)}
    given[argument] = given[argument].to(dtype)
    shape = list(given[argument].shape)
    dcp = DCP(8, 3, given.pop("causal_seqlens_kv_global"))
    kernel = mock_kernel("0.7.4")
    with use_kernel(kernel), pytest.raises(InvalidInputError, match="int32") as raised:
        decode_mla(**given, dcp=dcp)
    kernel.assert_not_called()
    assert raised.value.argument == argument
    assert str(raised.value) == (
        f"{argument} must be torch.int32, not {dtype}.\n"
        f"Found: {argument}: {shape} {dtype} on cpu.\n"
        f"Needed: {shape} torch.int32 on cpu; the kernel reads it through a raw pointer.\n"
        f"Fix: cast it once per step, not per layer: {argument}.to(torch.int32)."
    )


@pytest.mark.parametrize("argument", ["seq_lens", "causal_seqlens_kv_global"])
def test_s36_lengths_on_another_device_are_refused_with_both_devices(argument: str) -> None:
    given = {"seq_lens": lens(7, 7), "causal_seqlens_kv_global": lens(55, 55)}
    # "meta" stands for the other device: this machine need not have a GPU.
    given[argument] = given[argument].to("meta")
    words = f"^{argument} is on meta, but the query is on cpu"
    with use_kernel(mock_kernel("0.7.4")):
        dcp = DCP(8, 3, given["causal_seqlens_kv_global"])
        with pytest.raises(InvalidInputError, match=words) as raised:
            decode_mla(**call(seq_lens=given["seq_lens"]), dcp=dcp)
        assert raised.value.fix == "move it once per step to cpu."
        with pytest.raises(InvalidInputError, match=words):
            trtllm_batch_decode_with_kv_cache_mla(
                **dropin_dcp_call(
                    8, 3, given["causal_seqlens_kv_global"], seq_lens=given["seq_lens"]
                )
            )
