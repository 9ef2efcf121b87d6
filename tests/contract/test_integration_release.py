"""The worked integration on the real host code of whatever FlashInfer is importable.

`test_every_release` runs this file on other releases than the installed one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.hostsim.simulation import Simulation, simulated_flashinfer

from .integration import MetadataBuilder, MLABackend
from .integration_cases import FP8, RAGGED, UNIFORM, assert_ranks_merge, config_of, layers_of
from .release import HAS, NO_DCP, NO_VARLEN_DCP, RELEASE, Refusal, outcome, refused

# What a release is known to do wrong is warned of; `test_release` is about that.
pytestmark = pytest.mark.filterwarnings("ignore::fi_dcp_compat.FlashInferCompatWarning")

DTYPES = [pytest.param(torch.bfloat16, id="bf16"), pytest.param(FP8, id="fp8")]
LENGTHS = [pytest.param(*lengths, id=str(lengths[0])) for lengths in (*UNIFORM, RAGGED)]


@pytest.fixture(scope="module")
def machine() -> Iterator[Simulation]:
    with simulated_flashinfer() as running:
        yield running


@pytest.fixture
def simulation(machine: Simulation) -> Simulation:
    assert machine.release == RELEASE
    machine.clear()
    return machine


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_lens", "contexts"), LENGTHS)
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_the_merged_ranks_are_full_attention_or_refused(
    simulation: Simulation,
    world: int,
    heads: int,
    q_lens: list[int],
    contexts: list[int],
    dtype: torch.dtype,
) -> None:
    layers = layers_of(q_lens, contexts, dtype=dtype, num_heads=heads)
    if not HAS.native_dcp:
        with refused(simulation, NO_DCP):
            MetadataBuilder(config_of(layers[0], 0, world))
        return
    if len(set(q_lens)) > 1 and not HAS.varlen_dcp:
        with refused(simulation, NO_VARLEN_DCP):
            assert_ranks_merge(layers, world)
        return
    assert_ranks_merge(layers, world)
    launches = simulation.launches
    assert {launch.backend for launch in launches} == {"cute-dsl"}
    assert {launch.compile_key["cp_world"] for launch in launches} == {world}
    ranks = [rank for rank in range(world) for _ in layers]
    assert [launch.arguments["cp_rank"] for launch in launches] == ranks


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_lens", "contexts"), LENGTHS)
def test_without_dcp_it_is_full_attention_or_refused(
    simulation: Simulation, q_lens: list[int], contexts: list[int], dtype: torch.dtype
) -> None:
    layers, compact = layers_of(q_lens, contexts, dtype=dtype), len(set(q_lens)) > 1
    expected = outcome("auto", q_len=max(q_lens), lse=False, compact=compact)
    if isinstance(expected, Refusal):
        with refused(simulation, expected):
            assert_ranks_merge(layers, 1)
        return
    assert_ranks_merge(layers, 1)
    assert [launch.backend for launch in simulation.launches] == [expected] * len(layers)


def test_the_backend_says_what_the_release_has(simulation: Simulation) -> None:
    assert MLABackend.can_return_lse_for_decode
    assert MLABackend.supports_dcp is MLABackend.supports_dcp_with_varlen is HAS.native_dcp
    assert MLABackend.supports_dcp_compact_varlen is HAS.varlen_dcp
