"""The command line: what it prints, and the status it exits with."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
from torch import Tensor

from fi_dcp_compat import DCP, MLAState, demo, demo_ranks
from fi_dcp_compat.cli import main
from fi_dcp_compat.dcp import local_seq_lens
from fi_dcp_compat.decode import decode_mla
from fi_dcp_compat.lse import merge_dcp_states
from tests.fakes import REPOSITORY


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(["demo", *arguments])
    output = capsys.readouterr()
    assert output.err == ""
    return status, output.out


# The demo.


def test_the_demo_agrees_with_full_attention(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys)
    assert status == 0
    report = demo.run(8, 3)
    lines = text.splitlines()
    assert lines[0] == f"8 ranks, q_len 3, 16 heads, global lengths {report.global_lens}"
    assert len(report.states) == 8
    for rank, (line, lens) in enumerate(zip(lines[3:11], report.local_lens, strict=True)):
        assert line.split()[0] == str(rank)
        assert str(lens) in line
    assert "3 of 9" in lines[10]  # the last rank holds nothing of the first request
    assert lines[-1].startswith("merged against full attention, max error: out ")
    assert lines[-1].endswith(": ok")


@pytest.mark.parametrize(
    ("world_size", "q_len"),
    [(1, 1), (1, 3), (2, 1), (3, 5), (4, 4), (8, 1), (16, 2), (1, 10), (2, 14)],
)
def test_the_demo_holds_for_other_sizes(
    world_size: int, q_len: int, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = run(capsys, "--world-size", str(world_size), "--q-len", str(q_len))
    assert status == 0
    assert text.startswith(f"{world_size} ranks, q_len {q_len}, ")
    assert text.rstrip().endswith(": ok")


@pytest.mark.parametrize("world_size", [2, 5, 8])
def test_the_demo_has_ranks_that_hold_nothing_of_a_request(world_size: int) -> None:
    report = demo.run(world_size, 1)
    assert [sum(lens) for lens in zip(*report.local_lens, strict=True)] == report.global_lens
    assert any(0 in lens for lens in report.local_lens)
    for state, lens in zip(report.states, report.local_lens, strict=True):
        for request, length in enumerate(lens):
            empty = bool(torch.isneginf(state.lse[request]).all())
            assert empty is (length == 0)


def test_the_demo_repeats_itself() -> None:
    first, second = demo.run(4, 2), demo.run(4, 2)
    assert (first.max_error, first.max_lse_error) == (second.max_error, second.max_lse_error)
    assert demo.run(4, 2, seed=1).max_error != first.max_error


Merge = Callable[..., MLAState]


def plain_mean(outs: list[Tensor], lses: list[Tensor]) -> MLAState:
    return MLAState(torch.stack(outs).mean(0), merge_dcp_states(outs, lses).lse)


def as_base_2(outs: list[Tensor], lses: list[Tensor]) -> MLAState:
    return merge_dcp_states(outs, lses, lse_base="2")


def wrong_lse_only(outs: list[Tensor], lses: list[Tensor]) -> MLAState:
    state = merge_dcp_states(outs, lses)
    return MLAState(state.out, state.lse + 0.01)


def nothing_but_nan(outs: list[Tensor], lses: list[Tensor]) -> MLAState:
    state = merge_dcp_states(outs, lses)
    return MLAState(state.out * torch.nan, state.lse * torch.nan)


def nan_in_one_row(outs: list[Tensor], lses: list[Tensor]) -> MLAState:
    out = merge_dcp_states(outs, lses).out.clone()
    out[0, 0, 0, 0] = torch.nan
    return MLAState(out, merge_dcp_states(outs, lses).lse)


def without_a_rank(outs: list[Tensor], lses: list[Tensor]) -> MLAState:
    return merge_dcp_states(outs[1:], lses[1:])


def unmerged(outs: list[Tensor], lses: list[Tensor]) -> MLAState:
    return MLAState(outs[0], lses[0])


@pytest.mark.parametrize(
    "merge",
    [
        plain_mean,
        as_base_2,
        wrong_lse_only,
        nothing_but_nan,
        nan_in_one_row,
        without_a_rank,
        unmerged,
    ],
    ids=lambda merge: merge.__name__,
)
def test_the_demo_fails_when_the_merge_is_wrong(
    merge: Merge, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "merge_dcp_states", merge)
    status, text = run(capsys)
    assert status == 1
    assert text.rstrip().endswith(": WRONG")


def naive_local_bound(query: Tensor, kv_cache: Tensor, *, dcp: DCP, **call: Any) -> MLAState:
    """Mask each row by the local length less its distance, as a kernel without DCP would (S04)."""
    call.update(causal=True, return_lse=True)
    state: MLAState = decode_mla(query, kv_cache, **call)
    return state


def one_key_too_many(query: Tensor, kv_cache: Tensor, *, dcp: DCP, **call: Any) -> MLAState:
    seen = DCP(dcp.world_size, dcp.rank, dcp.causal_seqlens_kv_global + 1)
    state: MLAState = decode_mla(query, kv_cache, dcp=seen, **call)
    return state


def rank_0_everywhere(query: Tensor, kv_cache: Tensor, *, dcp: DCP, **call: Any) -> MLAState:
    seen = DCP(dcp.world_size, 0, dcp.causal_seqlens_kv_global)
    state: MLAState = decode_mla(query, kv_cache, dcp=seen, **call)
    return state


@pytest.mark.parametrize(
    "decode",
    [naive_local_bound, one_key_too_many, rank_0_everywhere],
    ids=lambda decode: decode.__name__,
)
def test_the_demo_fails_when_the_mask_is_wrong(
    decode: Callable[..., MLAState],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(demo, "decode_mla", decode)
    status, text = run(capsys)
    assert status == 1
    assert text.rstrip().endswith(": WRONG")


def test_the_demo_fails_when_a_rank_forgets_a_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def short(lens: Tensor, world_size: int, rank: int) -> Tensor:
        local = local_seq_lens(lens, world_size, rank)
        return (local - 1).clamp(min=0) if rank == 0 else local

    monkeypatch.setattr(demo, "local_seq_lens", short)
    status, text = run(capsys, "--q-len", "1")
    assert status == 1
    assert text.rstrip().endswith(": WRONG")


def test_the_demo_runs_on_real_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, "--processes", "3")
    assert status == 0
    lines = text.splitlines()
    assert lines[0].startswith("3 gloo ranks, q_len 3, max error against full attention")
    assert [line.split()[0] for line in lines[1:]] == ["a2a", "ag_rs", "ag_ar", "ok"]


@pytest.mark.parametrize("errors", [(1.0, 0.0), (0.0, 1.0), (math.inf, 0.0)])
def test_the_demo_on_ranks_fails_when_one_mode_is_wrong(errors: tuple[float, float]) -> None:
    report = demo_ranks.RanksReport({"a2a": (0.0, 0.0), "ag_rs": errors}, 0.01)
    assert not report.passed
    assert demo_ranks.render(report, 2, 1).endswith("WRONG")


# Arguments.


REFUSED: list[tuple[str, str]] = [
    ("", "arguments are required: command"),
    ("dance", "invalid choice: 'dance'"),
    ("demo --world-size 0", "argument --world-size: "),
    ("demo --world-size -2", "argument --world-size: "),
    ("demo --world-size many", "argument --world-size: "),
    ("demo --world-size 2.5", "argument --world-size: "),
    ("demo --world-size", "argument --world-size: expected one argument"),
    ("demo --q-len 0", "argument --q-len: "),
    ("demo --processes 0", "argument --processes: "),
    ("demo --processes 2 --world-size 2", "not allowed with argument"),
    ("demo --ranks 8", "unrecognized arguments: --ranks 8"),
    ("demo --json", "unrecognized arguments: --json"),
    ("doctor --verbose", "unrecognized arguments: --verbose"),
    ("doctor 0.7.4", "unrecognized arguments: 0.7.4"),
]


@pytest.mark.parametrize(
    ("line", "complaint"), REFUSED, ids=[line or "nothing" for line, _ in REFUSED]
)
def test_bad_arguments_are_refused_with_status_2(
    line: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(line.split())
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("usage: fi-dcp-compat")
    assert complaint in output.err
    assert "_positive" not in output.err  # a function of this package says nothing to a user


@pytest.mark.parametrize(
    ("line", "promise"),
    [
        ("--help", "doctor"),
        ("doctor --help", "Exit status 0 only if native DCP can work on this machine."),
        ("demo --help", "Exit status 0 only if the merged result is full attention's"),
    ],
)
def test_help_is_offered(line: str, promise: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(line.split())
    assert promise in " ".join(capsys.readouterr().out.split())


# How it is started.


def test_the_installed_command_is_main() -> None:
    (script,) = entry_points(group="console_scripts", name="fi-dcp-compat")
    assert script.value == "fi_dcp_compat.cli:main"
    assert script.load() is main


def test_it_starts_as_a_module_and_exits_with_the_status() -> None:
    command = [sys.executable, "-m", "fi_dcp_compat"]
    done = subprocess.run(
        [*command, "doctor"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.returncode == (0 if "Native DCP: can work\n" in done.stdout else 1)
    refused = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "usage: fi-dcp-compat" in refused.stderr
