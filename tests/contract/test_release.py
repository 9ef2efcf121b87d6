"""`decode_mla` on the real host code of whatever FlashInfer is importable, release by release.

What a release has is computed with, what it has not must be refused: nothing is skipped.
`test_every_release` runs this file on other releases than the installed one.
"""

from __future__ import annotations

import importlib
import os
import re
import warnings
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec, patch

import pytest
import torch
from torch import Tensor

from fi_dcp_compat import DCP, FlashInferCompatWarning, decode_mla, probe, recorded
from fi_dcp_compat.abi import ASSUME_VERSION, DISTRIBUTION, FUNCTION
from tests.hostsim.batches import random_batch
from tests.hostsim.simulation import Simulation, simulated_flashinfer

from .release import (
    ASSUMED,
    BACKENDS,
    CODE,
    HAS,
    NO_DCP,
    NO_VARLEN_DCP,
    RELEASE,
    Refusal,
    arguments,
    assert_close,
    assert_decodes,
    assert_ranks_merge,
    outcome,
    refused,
)

# What a release is known to do wrong is warned of; one test below is about that.
pytestmark = pytest.mark.filterwarnings("ignore::fi_dcp_compat.FlashInferCompatWarning")

DTYPES = [
    pytest.param(torch.bfloat16, id="bf16"),
    pytest.param(torch.float8_e4m3fn, id="fp8"),
]
# Heads and page sizes: what both backends take, padded tiles, and what cute-dsl alone takes.
SHAPES = [(16, 32), (24, 64), (96, 32), (128, 128), (1, 64)]
# The same by query length, for the ranks of a group.
DCP_SHAPES = {1: (128, 32), 2: (24, 64), 3: (1, 128), 4: (16, 32), 6: (4, 64)}

TUNER_LEAK, SHARED_WORKSPACE = "#3970", "#3582"
WARNED_OF: dict[str, dict[str, tuple[str, ...]]] = {
    "0.6.12": {SHARED_WORKSPACE: ("cute-dsl",)},
    "0.6.13": {TUNER_LEAK: BACKENDS},
    "0.6.14": {TUNER_LEAK: BACKENDS, SHARED_WORKSPACE: ("cute-dsl",)},
    "0.6.15": {TUNER_LEAK: BACKENDS},
}


@pytest.fixture(scope="module")
def machine() -> Iterator[Simulation]:
    with simulated_flashinfer() as running:
        yield running


@pytest.fixture
def simulation(machine: Simulation, monkeypatch: pytest.MonkeyPatch) -> Simulation:
    if ASSUMED is not None:
        monkeypatch.setenv(ASSUME_VERSION, ASSUMED)
    machine.clear()
    return machine


@pytest.fixture(scope="module")
def workspace() -> Tensor:
    return torch.zeros(24 << 20, dtype=torch.int8)


@pytest.fixture(autouse=True)
def _zeroed(workspace: Tensor) -> None:
    # Up to 0.6.14 trtllm-gen keeps counters where cute-dsl leaves its partial sums.
    workspace.zero_()


def test_the_release_that_runs_is_the_one_claimed(simulation: Simulation) -> None:
    found = distribution(DISTRIBUTION)
    flashinfer = importlib.import_module("flashinfer")
    assert flashinfer.__version__ == simulation.release == found.version == RELEASE
    home = Path(str(found.locate_file("")))
    if "FI_DCP_TEST_RELEASE" in os.environ:
        assert home.samefile(os.environ["PYTHONPATH"].split(os.pathsep)[0])
    assert (home / "flashinfer" / "__init__.py").samefile(str(flashinfer.__file__))


def test_both_probes_find_what_is_recorded(simulation: Simulation) -> None:
    record = recorded(CODE)
    for abi in (probe(), probe(static=True)):
        assert abi.version == (ASSUMED or RELEASE)
        assert abi.parameters == record.parameters
        assert abi.entry_point == record.entry_point
        assert abi.features == HAS


@pytest.mark.parametrize("return_lse", [False, True], ids=["no LSE", "LSE"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_len", [1, 2, 3, 4, 6])
@pytest.mark.parametrize(("heads", "page_size"), SHAPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_call_without_dcp_is_full_attention(
    simulation: Simulation,
    workspace: Tensor,
    backend: str,
    heads: int,
    page_size: int,
    q_len: int,
    dtype: torch.dtype,
    return_lse: bool,
) -> None:
    requests = random_batch(
        [q_len] * 2, [q_len, 140], page_size=page_size, dtype=dtype, num_heads=heads
    )
    given = arguments(requests, workspace) | {"backend": backend, "return_lse": return_lse}
    expected = outcome(backend, q_len=q_len, lse=return_lse, heads=heads, page_size=page_size)
    assert_decodes(simulation, requests, given, expected)


@pytest.mark.parametrize("return_lse", [False, True], ids=["no LSE", "LSE"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_of_different_lengths_without_dcp(
    simulation: Simulation, workspace: Tensor, backend: str, dtype: torch.dtype, return_lse: bool
) -> None:
    requests = random_batch([1, 3, 0, 2], [1, 50, 20, 300], dtype=dtype)
    given = arguments(requests, workspace) | requests.varlen()
    given |= {"backend": backend, "return_lse": return_lse}
    expected = outcome(backend, q_len=3, lse=return_lse, compact=True)
    assert_decodes(simulation, requests, given, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_non_causal_block_sees_the_whole_context(
    simulation: Simulation, workspace: Tensor, backend: str
) -> None:
    requests = random_batch([3, 3], [5, 140])
    given = arguments(requests, workspace) | {"backend": backend, "causal": False}
    assert_decodes(simulation, requests, given, outcome(backend, q_len=1, lse=False), causal=False)


def test_sinks_with_several_tokens_run_on_trtllm_gen(
    simulation: Simulation, workspace: Tensor
) -> None:
    requests = random_batch([2, 2], [37, 200])
    sinks = torch.tensor([-1.0, 0.0, 1.0, 2.0])
    given = arguments(requests, workspace) | {"sinks": sinks, "return_lse": True}
    assert_decodes(simulation, requests, given, "trtllm-gen", sinks=sinks)


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_base_2_is_the_natural_lse_over_ln_2(
    simulation: Simulation, workspace: Tensor, backend: Any, q_len: int
) -> None:
    requests = random_batch([q_len] * 2, [37, 200])
    given = arguments(requests, workspace) | {"backend": backend, "return_lse": True}
    expected = outcome(backend, q_len=q_len, lse=True)
    if isinstance(expected, Refusal):
        with refused(simulation, expected):
            decode_mla(**given, lse_base="2")
        return
    _, lse = decode_mla(**given, lse_base="2")
    assert_close(lse, requests.expected()[1] / torch.tensor(2.0).double().log(), 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_len", DCP_SHAPES)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_the_merged_ranks_are_full_attention(
    simulation: Simulation, workspace: Tensor, world: int, q_len: int, dtype: torch.dtype
) -> None:
    heads, page_size = DCP_SHAPES[q_len]
    # From q_len keys in all, of which most ranks hold none, to several pages a rank.
    requests = random_batch(
        [q_len] * 3, [q_len, 9, 140], page_size=page_size, dtype=dtype, num_heads=heads
    )
    expected = None if HAS.native_dcp else NO_DCP
    assert_ranks_merge(simulation, requests, workspace, world, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_queries_of_different_lengths_with_dcp(
    simulation: Simulation, workspace: Tensor, world: int, dtype: torch.dtype
) -> None:
    requests = random_batch([1, 3, 0, 2], [1, 50, 20, 300], page_size=64, dtype=dtype)
    expected = None if HAS.varlen_dcp else NO_VARLEN_DCP if HAS.native_dcp else NO_DCP
    assert_ranks_merge(simulation, requests, workspace, world, expected, **requests.varlen())


def test_a_group_of_one_needs_no_native_dcp(simulation: Simulation, workspace: Tensor) -> None:
    requests = random_batch([3, 3], [37, 140])
    state = decode_mla(**arguments(requests, workspace), dcp=DCP(1, 0, requests.bounds()))
    assert_close(state.out, requests.expected()[0], 2**-7)
    assert_close(state.lse, requests.expected()[1], 1e-5)


@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("flat", [False, True], ids=["4-D", "flat"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_callers_buffers_are_written_and_returned(
    simulation: Simulation, workspace: Tensor, backend: Any, flat: bool, world: int
) -> None:
    requests = random_batch([2, 2], [37, 200])
    given = arguments(requests, workspace, 0, world) | {"return_lse": True}
    if flat:
        given["query"] = given["query"].flatten(0, 1)
    if world == 1:
        given["backend"] = backend
        expected = outcome(backend, q_len=2, lse=True)
    else:
        given["dcp"] = DCP(world, 0, requests.bounds())
        expected = "cute-dsl" if HAS.native_dcp else NO_DCP
    if isinstance(expected, Refusal):
        with refused(simulation, expected):
            decode_mla(**given)
        return
    fresh = decode_mla(**given)
    shape = given["query"].shape[:-1]
    out, lse = torch.full((*shape, 512), 9.0, dtype=torch.bfloat16), torch.full(shape, 9.0)
    workspace.zero_()
    state = decode_mla(**given, out=out, lse=lse)
    assert [launch.backend for launch in simulation.launches] == [expected] * 2
    assert state.out is out
    assert state.lse is lse
    assert out.equal(fresh.out)
    assert lse.equal(fresh.lse)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_counter_buffer_goes_where_it_can_be_used(
    simulation: Simulation, workspace: Tensor, backend: Any
) -> None:
    module = importlib.import_module("flashinfer.decode")
    kernel = create_autospec(getattr(module, FUNCTION), side_effect=getattr(module, FUNCTION))
    requests = random_batch([1, 1], [37, 200])
    counters = torch.zeros(1024, dtype=torch.uint8)
    given = arguments(requests, workspace) | {"multi_ctas_kv_counter_buffer": counters}
    with patch.object(module, FUNCTION, kernel):
        decode_mla(**given, backend=backend)
        forwarded = HAS.counter_buffer and backend != "cute-dsl"
        assert ("multi_ctas_kv_counter_buffer" in kernel.call_args.kwargs) is forwarded
        (launch,) = simulation.launches
        assert (launch.arguments.get("multi_ctas_kv_counter_buffer") is counters) is forwarded
        if HAS.native_dcp:
            decode_mla(**given, dcp=DCP(4, 0, requests.bounds()))
            assert "multi_ctas_kv_counter_buffer" not in kernel.call_args.kwargs


def test_a_rank_can_return_base_2(simulation: Simulation, workspace: Tensor) -> None:
    # Rank 3 holds no key of the first request, and none that the second's first token sees.
    requests = random_batch([2, 2, 2], [2, 4, 200])
    given = arguments(requests, workspace, 3, 4) | {"dcp": DCP(4, 3, requests.bounds())}
    if not HAS.native_dcp:
        with refused(simulation, NO_DCP):
            decode_mla(**given, lse_base="2")
        return
    natural, binary = decode_mla(**given), decode_mla(**given, lse_base="2")
    assert binary.out.equal(natural.out)
    assert (binary.lse.flatten()[:12] == -torch.inf).all()
    assert_close(binary.lse, natural.lse.double() / torch.tensor(2.0).double().log(), 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_call_warns_of_the_faults_that_it_meets(
    simulation: Simulation, workspace: Tensor, backend: Any
) -> None:
    given = arguments(random_batch([1, 1], [37, 200]), workspace)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        decode_mla(**given, backend=backend)
    own = [str(w.message) for w in caught if issubclass(w.category, FlashInferCompatWarning)]
    threads = {thread for text in own for thread in re.findall(r"\((#\d+)", text)}
    meets = WARNED_OF.get(CODE, {}).items()
    assert threads == {thread for thread, backends in meets if backend in backends}
