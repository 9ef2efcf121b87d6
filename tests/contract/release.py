"""The release under test, what it is expected to do, and how a call is held against that."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distribution
from typing import Any, NamedTuple
from unittest.mock import create_autospec, patch

import pytest
import torch
from torch import Tensor

from fi_dcp_compat import (
    DCP,
    FlashInferCompatError,
    FlashInferVersionError,
    MLAState,
    UnsupportedConfigError,
    decode_mla,
    merge_dcp_states,
    recorded,
)
from fi_dcp_compat.abi import DISTRIBUTION, FUNCTION
from tests.hostsim.batches import Batch
from tests.hostsim.simulation import Simulation

# What it calls itself, whose code it is, and the release whose abilities it must be found to have:
# all the same unless a release was restated as another one.
RELEASE = os.environ.get("FI_DCP_TEST_RELEASE") or distribution(DISTRIBUTION).version
CODE = os.environ.get("FI_DCP_TEST_CODE", RELEASE)
ABILITIES = os.environ.get("FI_DCP_TEST_ABILITIES", CODE)
ASSUMED = os.environ.get("FI_DCP_TEST_ASSUME")
HAS = recorded(ABILITIES).features

BACKENDS = ("auto", "trtllm-gen", "cute-dsl")


class Refusal(NamedTuple):
    error: type[FlashInferCompatError]
    match: str


NO_DCP = Refusal(FlashInferVersionError, r"native DCP keywords\.\n.*\nNeeded: 0\.6\.17 or newer")
NO_VARLEN_DCP = Refusal(FlashInferVersionError, r"with DCP\.\n.*\nNeeded: 0\.7\.0 or newer")


def arguments(requests: Batch, workspace: Tensor, rank: int = 0, world: int = 1) -> dict[str, Any]:
    return {
        "query": requests.query(),
        "workspace_buffer": workspace,
        "bmm1_scale": requests.scale,
        "bmm2_scale": requests.output_scale,
        **requests.paged(rank, world),
    }


def refusal(
    backend: str,
    *,
    q_len: int,
    lse: bool,
    heads: int = 4,
    page_size: int = 32,
    compact: bool = False,
) -> Refusal | None:
    """Say how one backend of this release refuses a call; None if it runs it."""
    needs: list[tuple[bool, bool, str]]
    if backend == "trtllm-gen":
        if page_size > 64:
            return Refusal(UnsupportedConfigError, f"cannot read pages of {page_size} tokens")
        if heads == 96 or (heads == 24 and not HAS.trtllm_padded_heads):
            return Refusal(UnsupportedConfigError, f"cannot tile {heads} query heads")
        needs = [(compact, HAS.compact_queries, "0.6.14")]
    else:
        needs = [
            (q_len > 1, HAS.cute_dsl_causal, "0.6.13"),
            (q_len > 4, HAS.cute_dsl_long_q, "0.6.15"),
            (compact, HAS.cute_dsl_compact_queries, "0.6.16"),
            (lse, HAS.cute_dsl_lse, "0.6.13"),
        ]
    for asked, has, since in needs:
        if asked and not has:
            return Refusal(FlashInferVersionError, rf"Needed: {since} or newer")
    if backend == "trtllm-gen" and compact and lse:
        return Refusal(UnsupportedConfigError, "no LSE for variable-length queries")
    return None


def outcome(backend: str, **config: Any) -> str | Refusal:
    """Return the backend that runs a call, or how it is refused; untuned auto takes the first."""
    names = BACKENDS[1:] if backend == "auto" else (backend,)
    refusals = [refusal(name, **config) for name in names]
    able = [name for name, reason in zip(names, refusals, strict=True) if reason is None]
    return able[0] if able else refusals[0] or ""


@contextmanager
def refused(simulation: Simulation, refusal: Refusal) -> Iterator[None]:
    """Expect an error before FlashInfer's function is called."""
    module = importlib.import_module("flashinfer.decode")
    kernel = create_autospec(getattr(module, FUNCTION))
    with (
        patch.object(module, FUNCTION, kernel),
        pytest.raises(refusal.error, match=refusal.match) as raised,
    ):
        yield
    assert raised.type is refusal.error
    kernel.assert_not_called()
    assert simulation.launches == []


def assert_decodes(
    simulation: Simulation,
    requests: Batch,
    given: dict[str, Any],
    expected: str | Refusal,
    **oracle: Any,
) -> None:
    """Run one rank's call, and compare it with full attention or expect its refusal."""
    if isinstance(expected, Refusal):
        with refused(simulation, expected):
            decode_mla(**given)
        return
    result = decode_mla(**given)
    assert [launch.backend for launch in simulation.launches] == [expected]
    out, lse = result if isinstance(result, MLAState) else (result, None)
    shape = given["query"].shape[:-1]
    assert out.shape == (*shape, 512)
    expected_out, expected_lse = requests.expected(**oracle)
    assert_close(out, expected_out, 2**-7)
    assert (lse is not None) is given.get("return_lse", False)
    if lse is not None:
        assert lse.shape == shape
        assert_close(lse, expected_lse, 1e-5)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    # bf16 rounds each rank's output and the merged one; the LSE stays float32.
    actual = actual.double().reshape(expected.shape)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=False)


def assert_ranks_merge(
    simulation: Simulation,
    requests: Batch,
    workspace: Tensor,
    world: int,
    expected: Refusal | None,
    **extra: Any,
) -> None:
    """Compare what all ranks merge to with full attention, or expect each rank's refusal."""
    states = []
    for rank in range(world):
        given = arguments(requests, workspace, rank, world) | extra
        dcp = DCP(world, rank, requests.bounds())
        if expected is None:
            states.append(decode_mla(**given, dcp=dcp))
        else:
            with refused(simulation, expected):
                decode_mla(**given, dcp=dcp)
    if expected is not None:
        return
    assert {launch.backend for launch in simulation.launches} == {"cute-dsl"}
    assert [launch.arguments["cp_rank"] for launch in simulation.launches] == list(range(world))
    assert {launch.compile_key["cp_world"] for launch in simulation.launches} == {world}
    merged = merge_dcp_states([s.out for s in states], [s.lse for s in states])
    out, lse = requests.expected()
    assert_close(merged.out, out, 2**-7)
    assert_close(merged.lse, lse, 1e-5)
