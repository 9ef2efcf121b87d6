"""`decode_mla` through the installed FlashInfer's own host code, down to the kernel launch."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest
import torch
from torch import Tensor

from fi_dcp_compat import (
    DCP,
    InvalidInputError,
    MLAState,
    NotPreparedError,
    UnsupportedConfigError,
    decode_mla,
    flatten_query_rows,
    merge_dcp_states,
    prepare_decode_mla,
    probe,
)
from tests.hostsim.batches import Batch, random_batch
from tests.hostsim.simulation import Simulation, simulated_flashinfer

from .release import arguments

DTYPES = [
    pytest.param(torch.bfloat16, id="bf16"),
    pytest.param(torch.float8_e4m3fn, id="fp8"),
]
WORKSPACE_BYTES = 128 << 20


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    with simulated_flashinfer() as running:
        # The whole file claims this release: a run against another one must not pass for it.
        assert running.release == version("flashinfer-python") == "0.7.4"
        yield running


@pytest.fixture(scope="module")
def workspace() -> Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.int8)


def assert_full_attention(state: MLAState, requests: Batch, *, causal: bool = True) -> None:
    out, lse = requests.expected(causal=causal)
    # bf16 rounds each rank's output and the merged one; the LSE stays float32.
    torch.testing.assert_close(
        state.out.double().reshape(out.shape), out, rtol=2**-7, atol=2**-7, equal_nan=False
    )
    torch.testing.assert_close(
        state.lse.double().reshape(lse.shape), lse, rtol=1e-5, atol=1e-5, equal_nan=False
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 24, 96, 128])
@pytest.mark.parametrize("page_size", [32, 64, 128])
@pytest.mark.parametrize("q_len", [1, 2, 3, 4])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_the_merged_ranks_are_full_attention(
    simulation: Simulation,
    workspace: Tensor,
    world: int,
    q_len: int,
    page_size: int,
    heads: int,
    dtype: torch.dtype,
) -> None:
    # From q_len keys in all, of which most ranks hold none, to several pages a rank.
    requests = random_batch(
        [q_len] * 3, [q_len, 9, 140], page_size=page_size, dtype=dtype, num_heads=heads
    )
    states = [
        decode_mla(
            **arguments(requests, workspace, rank, world),
            dcp=DCP(world, rank, requests.bounds()),
        )
        for rank in range(world)
    ]
    merged = merge_dcp_states([s.out for s in states], [s.lse for s in states])
    assert merged.out.shape == (3, q_len, heads, 512)
    assert_full_attention(merged, requests)
    assert len(simulation.launches) == world
    if world > 1:
        ranks = [launch.arguments["cp_rank"] for launch in simulation.launches]
        assert ranks == list(range(world))
        assert {launch.backend for launch in simulation.launches} == {"cute-dsl"}
        assert {launch.compile_key["cp_world"] for launch in simulation.launches} == {world}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_compact_queries_merge_to_full_attention(
    simulation: Simulation, workspace: Tensor, world: int, dtype: torch.dtype
) -> None:
    requests = random_batch([1, 3, 0, 2], [1, 50, 20, 300], page_size=64, dtype=dtype)
    states = [
        decode_mla(
            **(arguments(requests, workspace, rank, world) | requests.varlen()),
            dcp=DCP(world, rank, requests.bounds()),
        )
        for rank in range(world)
    ]
    merged = merge_dcp_states([s.out for s in states], [s.lse for s in states])
    assert merged.out.shape == (6, 4, 512)
    assert_full_attention(merged, requests)


@pytest.mark.parametrize("flat", [False, True], ids=["4-D", "flat"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [32, 64])
@pytest.mark.parametrize("heads", [1, 24, 64, 128])
@pytest.mark.parametrize("q_len", [1, 4])
def test_trtllm_gen_gives_a_natural_lse(
    simulation: Simulation,
    workspace: Tensor,
    q_len: int,
    heads: int,
    page_size: int,
    dtype: torch.dtype,
    flat: bool,
) -> None:
    requests = random_batch(
        [q_len] * 2, [37, 200], page_size=page_size, dtype=dtype, num_heads=heads
    )
    given = arguments(requests, workspace)
    if flat:
        given["query"] = given["query"].flatten(0, 1)
    state = decode_mla(**given, backend="trtllm-gen", return_lse=True)
    assert [launch.backend for launch in simulation.launches] == ["trtllm-gen"]
    shape = (2 * q_len, heads) if flat else (2, q_len, heads)
    assert (state.out.shape, state.lse.shape) == ((*shape, 512), shape)
    assert_full_attention(state, requests)


@pytest.mark.parametrize("backend", ["auto", "trtllm-gen", "cute-dsl"])
def test_base_2_is_the_natural_lse_over_ln_2(
    simulation: Simulation, workspace: Tensor, backend: Any
) -> None:
    requests = random_batch([2, 2], [37, 200])
    given = arguments(requests, workspace) | {"backend": backend, "return_lse": True}
    natural, binary = decode_mla(**given), decode_mla(**given, lse_base="2")
    torch.testing.assert_close(binary.lse, natural.lse / torch.tensor(2.0).log())


@pytest.mark.parametrize("backend", ["trtllm-gen", "cute-dsl"])
def test_compact_queries_without_dcp(
    simulation: Simulation, workspace: Tensor, backend: Any
) -> None:
    requests = random_batch([1, 3, 0, 2], [1, 50, 20, 300], page_size=64)
    given = arguments(requests, workspace) | requests.varlen()
    out = decode_mla(**given, backend=backend)
    state = decode_mla(**given, return_lse=True)
    assert [launch.backend for launch in simulation.launches] == [backend, "cute-dsl"]
    assert_full_attention(state, requests)
    torch.testing.assert_close(out, state.out, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("compact", [False, True], ids=["uniform", "compact"])
@pytest.mark.parametrize("backend", ["auto", "trtllm-gen", "cute-dsl"])
def test_a_non_causal_block_sees_the_whole_context(
    simulation: Simulation, workspace: Tensor, backend: Any, compact: bool
) -> None:
    requests = random_batch([1, 3, 2] if compact else [3, 3], [5, 50, 140][: 3 if compact else 2])
    given = arguments(requests, workspace) | (requests.varlen() if compact else {})
    state = decode_mla(**given, backend=backend, causal=False, return_lse=True)
    assert state.out.shape == (*given["query"].shape[:-1], 512)
    assert_full_attention(state, requests, causal=False)


@pytest.mark.parametrize("world", [2, 8])
def test_flattened_rows_make_a_non_causal_block_with_dcp(
    simulation: Simulation, workspace: Tensor, world: int
) -> None:
    requests = random_batch([1, 3, 2], [5, 50, 140])
    offsets = requests.varlen()["cum_seq_lens_q"]
    assert isinstance(offsets, Tensor)
    states = []
    for rank in range(world):
        given = arguments(requests, workspace, rank, world)
        rows = flatten_query_rows(
            offsets, 6, given["block_tables"], given["seq_lens"], requests.bounds()
        )
        assert rows.causal_seqlens_kv_global is not None
        given |= {"block_tables": rows.block_tables, "seq_lens": rows.seq_lens}
        dcp = DCP(world, rank, rows.causal_seqlens_kv_global)
        states.append(decode_mla(**given, dcp=dcp))
    merged = merge_dcp_states([s.out for s in states], [s.lse for s in states])
    assert_full_attention(merged, requests, causal=False)


@pytest.mark.parametrize("backend", ["trtllm-gen", "cute-dsl", "reference"])
@pytest.mark.parametrize("flat", [False, True], ids=["4-D", "flat"])
def test_the_callers_buffers_are_written_and_returned(
    simulation: Simulation, workspace: Tensor, backend: Any, flat: bool
) -> None:
    requests = random_batch([2, 2], [37, 200])
    given = arguments(requests, workspace)
    if flat:
        given["query"] = given["query"].flatten(0, 1)
    shape = given["query"].shape[:-1]
    out, lse = torch.full((*shape, 512), 9.0, dtype=torch.bfloat16), torch.full(shape, 9.0)
    state = decode_mla(**given, backend=backend, return_lse=True, out=out, lse=lse)
    assert state.out is out
    assert state.lse is lse
    assert_full_attention(state, requests)


def test_sinks_with_several_tokens_run_on_trtllm_gen(
    simulation: Simulation, workspace: Tensor
) -> None:
    requests = random_batch([2, 2], [37, 200])
    sinks = torch.tensor([-1.0, 0.0, 1.0, 2.0])
    state = decode_mla(**arguments(requests, workspace), sinks=[sinks], return_lse=True)
    assert [launch.backend for launch in simulation.launches] == ["trtllm-gen"]
    out, lse = requests.expected(sinks=sinks)
    torch.testing.assert_close(state.out.double().flatten(0, 1), out, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(state.lse.double().flatten(0, 1), lse, rtol=1e-5, atol=1e-5)


def test_the_live_and_the_static_probe_agree(simulation: Simulation) -> None:
    live, static = probe(), probe(static=True)
    assert (live.source, static.source) == ("live", "static")
    assert live.parameters == static.parameters
    assert len(live.parameters) == 33
    assert (live.version, live.entry_point) == (static.version, static.entry_point)


def test_a_first_call_under_capture_says_to_run_eagerly_once(
    simulation: Simulation, workspace: Tensor
) -> None:
    requests = random_batch([1, 1], [40, 41])

    def decode(world: int) -> None:
        given = arguments(requests, workspace, 0, world)
        decode_mla(**given, dcp=DCP(world, 0, requests.bounds()))

    decode(4)
    simulation.capturing = True
    decode(4)
    with pytest.raises(NotPreparedError, match="run the same call eagerly once") as raised:
        decode(2)
    for key in ("batch", "q_len", "heads", "page size", "dtype", "world size", "max_seq_len"):
        assert key in raised.value.needed
    assert isinstance(raised.value.__cause__, RuntimeError)


@pytest.mark.parametrize("capability", [(9, 0), (11, 0), (12, 0)])
@pytest.mark.parametrize("backend", ["cute-dsl", "trtllm-gen"])
def test_a_gpu_without_the_kernel_is_refused(
    workspace: Tensor, capability: tuple[int, int], backend: Any
) -> None:
    requests = random_batch([1], [40])
    named = f"{capability[0]}.{capability[1]}"
    with (
        simulated_flashinfer(compute_capability=capability) as simulation,
        pytest.raises(UnsupportedConfigError, match=f"compute capability {named}"),
    ):
        decode_mla(**arguments(requests, workspace), backend=backend)
    assert simulation.launches == []


def test_cpu_tensors_are_refused_for_flashinfers_own_kernel(workspace: Tensor) -> None:
    with simulated_flashinfer():
        pass  # imported; from here on the tensors are the CPU's again
    requests = random_batch([1], [40])
    with pytest.raises(InvalidInputError, match=r"query is on cpu") as raised:
        decode_mla(**arguments(requests, workspace))
    assert "backend='reference'" in raised.value.fix


def test_the_prepared_decoder_is_the_same_call(simulation: Simulation, workspace: Tensor) -> None:
    requests = random_batch([3, 3], [10, 140], page_size=64)
    states = []
    for rank in range(4):
        decoder = prepare_decode_mla(
            page_size=64,
            dtype=torch.bfloat16,
            dcp_world_size=4,
            dcp_rank=rank,
            bmm1_scale=requests.scale,
            bmm2_scale=requests.output_scale,
        )
        given = arguments(requests, workspace, rank, 4)
        out, lse = decoder.run(
            given["query"],
            given["kv_cache"],
            given["block_tables"],
            given["seq_lens"],
            given["max_seq_len"],
            workspace,
            causal_seqlens_kv_global=requests.bounds(),
        )
        assert lse is not None
        states.append(MLAState(out, lse))
    assert_full_attention(
        merge_dcp_states([s.out for s in states], [s.lse for s in states]), requests
    )
