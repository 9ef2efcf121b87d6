"""Across ranks: real gloo groups in processes of their own; the checks are in tests/ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fi_dcp_compat import (
    FlashInferCompatError,
    InvalidInputError,
    MLAState,
    combine,
    combine_buffers,
    gather_query_heads,
)
from fi_dcp_compat.collectives import reduce_scatter
from tests.ranks.checks import (
    CHECKS,
    MODES,
    all_checks,
    one_rank_errs,
    one_rank_has_another_cache,
)
from tests.ranks.launch import run_ranks

WORLDS = (2, 4, 8)


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"{world} ranks")
def group(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, list[Any]]:
    folder = tmp_path_factory.mktemp("ranks") / "group"
    return request.param, run_ranks(all_checks, request.param, folder)


def answers(group: tuple[int, list[Any]], name: str) -> list[Any]:
    """What each rank answered to one check; the first exception of a rank is raised here."""
    errors = [found for found in group[1] if isinstance(found, Exception)]
    # The others only lost their peer.
    for error in sorted(errors, key=lambda error: "closed by peer" in str(error)):
        raise error
    return [found[name] for found in group[1]]


@pytest.mark.parametrize("name", CHECKS)
def test_every_rank_passes(group: tuple[int, list[Any]], name: str) -> None:
    world_size, _ = group
    assert len(answers(group, name)) == world_size


@pytest.mark.parametrize("mode", [*MODES, "gather"])
def test_the_collectives_and_their_bytes(group: tuple[int, list[Any]], mode: str) -> None:
    tokens, heads, dim, itemsize = 6, 16, 512, 2
    lses = ("all_gather_single", tokens * heads * 4)
    outputs = tokens * heads * dim * 4  # reduced in float32
    expected = {
        "a2a": [("all_to_all_single", tokens * heads * (dim * itemsize + 4))],
        "ag_rs": [lses, ("reduce_scatter_single", outputs)],
        "ag_ar": [lses, ("all_reduce", outputs)],
        "gather": [("all_gather_single", tokens * 2 * 576 * itemsize)],
    }
    for found in answers(group, "collectives_and_bytes"):
        assert found[mode] == expected[mode]


def test_the_refusals_are_the_same_on_every_rank(group: tuple[int, list[Any]]) -> None:
    world_size, _ = group
    first, *others = answers(group, "what_does_not_fit_the_group_is_refused_on_every_rank")
    assert all(other == first for other in others)
    heads = world_size + 1
    assert first[0] == (
        f"state has {heads} heads, which {world_size} ranks cannot share.",
        f"a multiple of {world_size} heads.",
    )
    assert first[2][0] == "mode must be one of a2a, ag_rs, ag_ar."


def test_a_missing_collective_is_named_with_the_modes_that_do_without(
    group: tuple[int, list[Any]],
) -> None:
    for said in answers(group, "a_group_without_reduce_scatter_says_so"):
        assert said == (
            "mode='ag_rs' needs a reduce-scatter, which this process group has not.\n"
            "Found: gloo: ProcessGroupGloo does not support reduce_scatter.\n"
            "Needed: a backend of torch.distributed with reduce-scatter.\n"
            "Fix: pass mode='a2a' or 'ag_ar', on all ranks."
        )


@pytest.mark.parametrize("job", [one_rank_errs, one_rank_has_another_cache])
@pytest.mark.parametrize("world_size", [2, 4])
def test_no_rank_is_left_waiting_for_one_that_erred(
    world_size: int, job: Any, tmp_path: Path
) -> None:
    # The rank that raises leaves the group, as a worker that dies does; the others learn of it.
    found = run_ranks(job, world_size, tmp_path / "group", timeout=60, collective=20)
    assert isinstance(found.pop(1), FlashInferCompatError)
    assert [type(error) for error in found] == [RuntimeError] * (world_size - 1)
    assert all("by peer" in str(error) for error in found)


@pytest.mark.parametrize("group", ["dcp", 2, object()], ids=["a name", "a size", "an object"])
def test_a_group_that_is_none_is_refused(group: Any) -> None:
    state = MLAState(torch.zeros(2, 8, 4), torch.zeros(2, 8))
    for call in (combine, combine_buffers, lambda s, g: gather_query_heads(s.out, g)):
        with pytest.raises(InvalidInputError, match="group must be a ProcessGroup, or None"):
            call(state, group)


OUT, LSE = torch.zeros(2, 8, 4), torch.zeros(2, 8)


@pytest.mark.parametrize(
    "state",
    [
        (None, LSE),
        (OUT.to_sparse(), LSE),
        (OUT, None),
        (OUT, [[0.0] * 8] * 2),
        (OUT, LSE.to_sparse()),
        (torch.zeros(()), torch.zeros(())),
        (torch.zeros(8), torch.zeros(())),
        (OUT, LSE.to("meta")),
    ],
)
@pytest.mark.parametrize("call", [combine, combine_buffers])
def test_a_state_that_is_none_is_refused_before_the_group_is_asked(call: Any, state: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"state must be out \[\.\., H, D\] bf16") as raised:
        call(state)
    assert raised.value.argument == "state"


@pytest.mark.parametrize("query", [None, [[0.0]], torch.zeros(2, 8, 4).to_sparse(), torch.zeros(3)])
def test_a_query_without_heads_is_not_gathered(query: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"query must be \[\.\., H_local, D\]"):
        gather_query_heads(query)


def test_a_reduce_scatter_that_fails_says_why_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*tensors: Any, **options: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(torch.distributed, "reduce_scatter_single", failing, raising=False)
    with pytest.raises(RuntimeError, match=r"^Connection closed by peer$"):
        reduce_scatter(torch.zeros(2), torch.zeros(4), None)
