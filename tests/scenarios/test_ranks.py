"""What the cases about merging say of real process groups: S01, S05, S07, S32, on 8 gloo ranks."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist

from fi_dcp_compat import (
    CombineMode,
    LseBase,
    MLAState,
    UnsupportedConfigError,
    combine,
    merge_dcp_states,
)
from tests.fakes import run_python
from tests.hostsim.batches import random_batch
from tests.ranks.checks import assert_full_attention, decode, share

INF, NAN = math.inf, math.nan
WORLD = 8
MODES: tuple[CombineMode, ...] = get_args(CombineMode)
BASES: tuple[LseBase, ...] = get_args(LseBase)


def of_one_row(out: float, lse: float) -> MLAState:
    return MLAState(torch.full((1, WORLD, 4), out), torch.full((1, WORLD), lse))


def natural_and_binary(rank: int) -> None:
    """S01: partition sums 2 and 8 on two ranks, outputs 0 and 10; the other ranks hold nothing."""
    out, natural = [(0.0, math.log(2)), (10.0, math.log(8))][rank] if rank < 2 else (5.0, -INF)
    binary = natural / math.log(2)
    cases: list[tuple[float, LseBase, float]] = [
        (natural, "e", 8.0),
        (binary, "2", 8.0),
        (natural, "2", 7.2330),
        (binary, "e", 8.8080),
    ]
    for mode in MODES:
        for lse, lse_base, merged in cases:
            state = combine(of_one_row(out, lse), mode=mode, lse_base=lse_base)
            torch.testing.assert_close(
                state.out, torch.full_like(state.out, merged), rtol=0, atol=1e-4
            )


def interleaved(rank: int) -> str:
    """S05: refused before anything is sent, and with the same words on every rank."""
    requests = random_batch([1], [28], num_heads=WORLD)
    with pytest.raises(UnsupportedConfigError, match="=64 cannot be masked natively") as raised:
        decode(requests, rank, WORLD, WORLD, interleave_size=64)
    return str(raised.value)


def three_keys(rank: int) -> None:
    """S07: ranks 3 to 7 hold nothing of request 0; nobody holds anything of request 1."""
    requests = random_batch([1, 1], [3, 0], num_heads=WORLD)
    for mode in MODES:
        state = decode(requests, rank, WORLD, WORLD, mode=mode)
        assert_full_attention(state, requests, share(rank, WORLD, WORLD, mode))
        assert state.out[1].eq(0).all()
        assert state.lse[1].eq(-INF).all()


def garbage_of_empty_ranks(rank: int) -> None:
    """S07: what ranks 3 to 7 give instead of nothing changes nothing."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        generator = torch.Generator().manual_seed(7)
        outs = torch.randn(WORLD, 2, WORLD, 16, generator=generator).to(dtype)
        lses = torch.randn(WORLD, 2, WORLD, generator=generator)
        expected = merge_dcp_states(outs[:3], lses[:3])
        for garbage, lse in ((NAN, NAN), (NAN, -INF), (INF, INF), (7.0, NAN)):
            outs[3:], lses[3:] = garbage, lse
            for mode in MODES:
                state = combine(MLAState(outs[rank], lses[rank]), mode=mode)
                heads = share(rank, WORLD, WORLD, mode)
                # The order of the sum may differ.
                rounding = WORLD * torch.finfo(dtype).eps
                torch.testing.assert_close(
                    state.out, expected.out[:, heads], rtol=rounding, atol=rounding
                )
                torch.testing.assert_close(state.lse, expected.lse[:, heads])


def empty_and_one(rank: int) -> None:
    """S32: of two ranks in a group of their own, one or both have an LSE that is not finite."""
    groups = [dist.new_group([first, first + 1]) for first in range(0, WORLD, 2)]
    group = groups[rank // 2]
    for first, second, out, merged in (
        (-INF, -INF, 0.0, -INF),
        (-INF, 1.5, 3.0, 1.5),
        (NAN, 1.5, 3.0, 1.5),
        (INF, 1.5, 3.0, 1.5),
    ):
        for mode in MODES:
            for lse_base in BASES:
                own = of_one_row(NAN, first) if rank % 2 == 0 else of_one_row(3.0, second)
                state = combine(own, group, mode, lse_base=lse_base)
                assert state.out.eq(out).all()
                assert state.lse.eq(merged).all()


CHECKS: tuple[Callable[[int], object], ...] = (
    natural_and_binary,
    interleaved,
    three_keys,
    garbage_of_empty_ranks,
    empty_and_one,
)


def on_each_rank(rank: int, world_size: int) -> dict[str, Any]:
    return {check.__name__: check(rank) for check in CHECKS}


# Forked where torch is imported already, but has no threads yet: 8 ranks start in the time of one.
FORKED = """
from pathlib import Path
from torch.multiprocessing.spawn import start_processes
from tests.ranks.launch import _rank
from tests.scenarios.test_ranks import on_each_rank
start_processes(_rank, (on_each_rank, {world}, Path({folder!r}), 60), {world}, start_method="fork")
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank answered; the exception of one that failed is raised here."""
    folder = tmp_path_factory.mktemp("ranks")
    done = run_python(FORKED.format(world=WORLD, folder=str(folder)))
    assert done.returncode == 0, done.stderr
    answers = [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(WORLD)]
    errors = [answer for answer in answers if isinstance(answer, Exception)]
    # The others only lost their peer.
    for error in sorted(errors, key=lambda error: "closed by peer" in str(error)):
        raise error
    return answers


def answers_of(found: list[dict[str, Any]], check: Callable[[int], object]) -> list[Any]:
    return [answer[check.__name__] for answer in found]


def test_s01_ranks_are_combined_in_the_base_that_is_named(found: list[dict[str, Any]]) -> None:
    assert answers_of(found, natural_and_binary) == [None] * WORLD


def test_s05_every_rank_refuses_an_interleave_with_the_same_words(
    found: list[dict[str, Any]],
) -> None:
    assert len(set(answers_of(found, interleaved))) == 1


def test_s07_ranks_without_keys_leave_the_result_that_of_one_rank(
    found: list[dict[str, Any]],
) -> None:
    assert answers_of(found, three_keys) == [None] * WORLD
    assert answers_of(found, garbage_of_empty_ranks) == [None] * WORLD


def test_s32_no_mode_makes_nan_of_an_lse_that_is_not_finite(found: list[dict[str, Any]]) -> None:
    assert answers_of(found, empty_and_one) == [None] * WORLD
