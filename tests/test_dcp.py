from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fi_dcp_compat import (
    DCP,
    InvalidInputError,
    UnsupportedConfigError,
    causal_bounds,
    flatten_query_rows,
    local_seq_lens,
    token_positions,
    token_slots,
)

LENS = torch.tensor([31, 36], dtype=torch.int32)


@pytest.mark.parametrize(
    ("length", "world", "interleave", "local"),
    [
        (10, 4, 1, [3, 3, 2, 2]),
        (3, 8, 1, [1, 1, 1, 0, 0, 0, 0, 0]),
        (200, 4, 1, [50, 50, 50, 50]),
        (200, 4, 64, [64, 64, 64, 8]),
        (9, 4, 1, [3, 2, 2, 2]),
        (0, 3, 1, [0, 0, 0]),
        (-5, 2, 1, [0, 0]),
    ],
)
def test_local_lengths(length: int, world: int, interleave: int, local: list[int]) -> None:
    assert [local_seq_lens(length, world, rank, interleave) for rank in range(world)] == local
    many = torch.full((2, 3), length, dtype=torch.int32)
    for rank in range(world):
        got = local_seq_lens(many, world, rank, interleave)
        assert got.dtype is torch.int32
        assert got.tolist() == [[local[rank]] * 3] * 2


@given(st.integers(0, 2000), st.integers(1, 16), st.integers(1, 65))
def test_local_lengths_count_who_owns_which_token(length: int, world: int, stripe: int) -> None:
    owners = [token // stripe % world for token in range(length)]
    for rank in range(world):
        assert local_seq_lens(length, world, rank, stripe) == owners.count(rank)


@given(st.integers(1, 16), st.integers(1, 65), st.lists(st.integers(0, 5000), min_size=1))
def test_a_tokens_slot_is_its_own_and_can_be_undone(
    world: int, stripe: int, positions: list[int]
) -> None:
    tokens = torch.tensor(positions)
    slots = token_slots(tokens, world, stripe)
    assert slots.rank.tolist() == [p // stripe % world for p in positions]
    assert torch.equal(token_positions(slots.local, world, slots.rank, stripe), tokens)
    for rank in range(world):
        held = slots.rank == rank
        assert torch.equal(token_positions(slots.local[held], world, rank, stripe), tokens[held])


@given(st.integers(1, 16), st.integers(1, 65), st.integers(0, 500))
def test_the_slots_of_a_rank_are_filled_without_gaps(world: int, stripe: int, length: int) -> None:
    slots = token_slots(torch.arange(length, dtype=torch.int32), world, stripe)
    assert slots.rank.dtype is slots.local.dtype is torch.int32
    for rank in range(world):
        held = slots.local[slots.rank == rank].tolist()
        assert held == list(range(local_seq_lens(length, world, rank, stripe)))


def test_with_interleave_1_a_slot_is_a_remainder_and_a_quotient() -> None:
    slots = token_slots(torch.arange(10).view(2, 5), 4)
    assert slots.rank.tolist() == [[0, 1, 2, 3, 0], [1, 2, 3, 0, 1]]
    assert slots.local.tolist() == [[0, 0, 0, 0, 1], [1, 1, 1, 2, 2]]


@pytest.mark.parametrize(("world", "rank", "stripe"), [(0, 0, 1), (4, 4, 1), (4, 0, 0)])
def test_a_slot_needs_a_group(world: int, rank: int, stripe: int) -> None:
    with pytest.raises(InvalidInputError):
        token_positions(torch.arange(3), world, rank, stripe)


@pytest.mark.parametrize(
    "wrong", [torch.arange(3.0), torch.tensor([True]), [1, 2]], ids=lambda value: str(type(value))
)
def test_slots_and_positions_are_integers(wrong: Any) -> None:
    for call in (lambda: token_slots(wrong, 4), lambda: token_positions(wrong, 4, 0)):
        with pytest.raises(InvalidInputError, match="must be an integer tensor"):
            call()


@given(st.integers(1, 16), st.lists(st.integers(0, 300), min_size=1, max_size=5), st.integers(1, 6))
def test_the_visible_keys_of_all_ranks_are_the_causal_prefix_once(
    world: int, lengths: list[int], q_len: int
) -> None:
    bounds = torch.tensor(lengths, dtype=torch.int32)
    rows = [causal_bounds(bounds, q_len, world, rank) for rank in range(world)]
    for request, length in enumerate(lengths):
        assert sum(local_seq_lens(length, world, rank) for rank in range(world)) == length
        for token in range(q_len):
            seen = [
                position
                for rank in range(world)
                for position in token_positions(
                    torch.arange(int(rows[rank][request, token])), world, rank
                ).tolist()
            ]
            prefix = max(0, length - (q_len - 1 - token))
            assert sorted(seen) == list(range(prefix))
            assert all(
                int(rows[rank][request, token]) <= local_seq_lens(length, world, rank)
                for rank in range(world)
            )


@pytest.mark.parametrize("world", range(1, 17))
def test_the_ranks_lengths_sum_to_the_global_one(world: int) -> None:
    lengths = torch.arange(258, dtype=torch.int32)
    total = sum(local_seq_lens(lengths, world, rank) for rank in range(world))
    assert torch.equal(torch.as_tensor(total), lengths)


@pytest.mark.parametrize(
    ("world", "rank", "visible"),
    [
        (4, 0, [2, 3, 3]),
        (4, 1, [2, 2, 3]),
        (4, 2, [2, 2, 2]),
        (4, 3, [2, 2, 2]),
        (2, 1, [4, 4, 5]),
        (1, 0, [8, 9, 10]),
    ],
)
def test_the_bound_is_shifted_before_it_is_made_local(
    world: int, rank: int, visible: list[int]
) -> None:
    assert causal_bounds(torch.tensor([10]), 3, world, rank).tolist() == [visible]


def test_rows_before_the_first_key_see_none() -> None:
    bounds = causal_bounds(torch.tensor([2, 5], dtype=torch.int32), 4, 2, 0)
    assert bounds.dtype is torch.int32
    assert bounds.tolist() == [[0, 0, 1, 1], [1, 2, 2, 3]]


def test_rows_are_flattened_in_order_and_padding_repeats_the_last_request() -> None:
    rows = flatten_query_rows(
        torch.tensor([0, 1, 1, 4], dtype=torch.int32),
        6,
        torch.tensor([[10, 11], [20, 21], [30, 31]], dtype=torch.int32),
        torch.tensor([5, 6, 7], dtype=torch.int32),
        torch.tensor([50, 60, 70], dtype=torch.int32),
    )
    assert rows.seq_lens.tolist() == [5, 7, 7, 7, 7, 7]
    assert rows.block_tables[:, 0].tolist() == [10, 30, 30, 30, 30, 30]
    assert rows.causal_seqlens_kv_global is not None
    assert rows.causal_seqlens_kv_global.tolist() == [50, 70, 70, 70, 70, 70]
    assert {t.dtype for t in rows if t is not None} == {torch.int32}


def test_dcp_is_frozen_and_compares_by_identity() -> None:
    dcp = DCP(8, 3, LENS)
    with pytest.raises(dataclasses.FrozenInstanceError, match="rank"):
        dcp.rank = 4  # type: ignore[misc]  # the point
    assert dcp != DCP(8, 3, LENS)
    assert hash(dcp) == hash(dcp)


@pytest.mark.parametrize("interleave", [2, 16, 64])
def test_an_interleave_above_1_is_refused_and_the_flag_named(interleave: int) -> None:
    with pytest.raises(UnsupportedConfigError) as raised:
        DCP(4, 1, LENS, interleave)
    assert str(raised.value) == (
        f"cp_kv_cache_interleave_size={interleave} cannot be masked natively.\n"
        f"Found: interleave_size={interleave} with dcp_world_size=4.\n"
        "Needed: cp_kv_cache_interleave_size=1: FlashInfer's mask, in every known release, takes "
        "local key k of rank r for global position W*k + r.\n"
        "Fix: start with --cp-kv-cache-interleave-size 1; a KV connector or prefill/decode "
        "disaggregation may have raised it to the block size."
    )


def test_with_one_rank_nothing_is_interleaved() -> None:
    assert DCP(1, 0, LENS, 64).interleave_size == 64


@pytest.mark.parametrize("wrong", [-1, True, 2.0, None, "4", np.int64(1)], ids=repr)
@pytest.mark.parametrize("name", ["world_size", "rank", "interleave_size"])
def test_what_is_no_int_in_range_is_refused(name: str, wrong: object) -> None:
    values: dict[str, object] = {"world_size": 4, "rank": 1, "interleave_size": 1} | {name: wrong}
    with pytest.raises(InvalidInputError, match=name) as raised:
        DCP(causal_seqlens_kv_global=LENS, **values)  # type: ignore[arg-type]  # the point
    assert raised.value.argument == name
    assert repr(wrong) in raised.value.found


@pytest.mark.parametrize("rank", [4, 5, -1])
def test_a_rank_outside_the_group_is_refused(rank: int) -> None:
    with pytest.raises(InvalidInputError, match=r"rank .* must be an int in \[0, 4\)"):
        DCP(4, rank, LENS)


@pytest.mark.parametrize("wrong", [-1, 2.0, True], ids=repr)
@pytest.mark.parametrize("name", ["world_size", "rank", "interleave_size"])
def test_no_function_of_the_ranks_takes_a_number_out_of_its_range(name: str, wrong: Any) -> None:
    values: dict[str, Any] = {"world_size": 4, "rank": 1, "interleave_size": 1, name: wrong}
    with pytest.raises(InvalidInputError, match=name):
        local_seq_lens(LENS, **values)
    with pytest.raises(InvalidInputError, match=name):
        token_positions(LENS, **values)
    del values["rank"]
    if name in values:
        with pytest.raises(InvalidInputError, match=name):
            token_slots(LENS, **values)
