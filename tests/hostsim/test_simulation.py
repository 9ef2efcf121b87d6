"""The simulation against the oracle, through the installed FlashInfer's own entry point.

Run with another release first on PYTHONPATH, it skips what that release has not.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from .batches import Batch, random_batch
from .calls import decode
from .simulation import Simulation, simulated_flashinfer

State = tuple[Tensor, Tensor]


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    with simulated_flashinfer() as running:
        yield running


def require(simulation: Simulation, release: str) -> None:
    if Version(simulation.release) < Version(release):
        pytest.skip(f"FlashInfer {simulation.release} is older than {release}")


def decode_rank(requests: Batch, rank: int, world: int, **keywords: object) -> Any:
    arguments: dict[str, object] = {
        "backend": "cute-dsl",
        "return_lse": True,
        "enable_dcp": True,
        "cp_world": world,
        "cp_rank": rank,
        "causal_seqlens_kv_global": requests.bounds(),
        **requests.paged(rank, world),
    }
    return decode(requests, **(arguments | keywords))


def merge(states: list[State]) -> State:
    outs = torch.stack([out.double().flatten(0, -3) for out, _ in states])
    lses = torch.stack([lse.double().flatten(0, -2) for _, lse in states])
    lse = torch.logsumexp(lses, 0)
    return (outs * torch.exp(lses - lse)[..., None]).sum(0), lse


def is_close(state: State, expected: State, lse_factor: float = 1.0) -> bool:
    out, lse = (v.double().reshape(e.shape) for v, e in zip(state, expected, strict=True))
    # bf16 keeps eight bits; the LSE is float32.
    same_out = torch.allclose(out, expected[0], rtol=2**-7, atol=2**-7)
    return same_out and torch.allclose(lse, expected[1] * lse_factor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
@pytest.mark.parametrize("page_size", [32, 64, 128])
@pytest.mark.parametrize("q_len", [1, 2, 3, 4])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_ranks_merge_to_full_attention(
    simulation: Simulation, world: int, q_len: int, page_size: int, dtype: torch.dtype
) -> None:
    require(simulation, "0.6.17")
    # The first request leaves ranks without keys, the second rows without a visible one.
    requests = random_batch([q_len] * 3, [q_len, 9, 300], page_size=page_size, dtype=dtype)
    states = [decode_rank(requests, rank, world) for rank in range(world)]
    assert is_close(merge(states), requests.expected())
    assert {launch.compile_key["cp_world"] for launch in simulation.launches} == {world}


def test_all_heads_merge_to_full_attention(simulation: Simulation) -> None:
    require(simulation, "0.6.17")
    requests = random_batch([2], [200], num_heads=128)
    states = [decode_rank(requests, rank, 2) for rank in range(2)]
    assert is_close(merge(states), requests.expected())


@pytest.mark.parametrize("wrong", ["rank", "bound", "causal over local keys"])
def test_a_wrong_mask_shows(simulation: Simulation, wrong: str) -> None:
    require(simulation, "0.6.17")
    requests = random_batch([3, 3], [10, 41])
    keywords: dict[str, dict[str, object]] = {
        "rank": {"cp_rank": 0},
        "bound": {"causal_seqlens_kv_global": requests.bounds() - 1},
        "causal over local keys": {
            "enable_dcp": False,
            "cp_world": 1,
            "cp_rank": 0,
            "causal_seqlens_kv_global": None,
        },
    }
    states = [decode_rank(requests, rank, 4, **keywords[wrong]) for rank in range(4)]
    # Rows that the plain causal mask leaves unwritten hold anything.
    merged = merge([(out.nan_to_num(), lse.nan_to_num()) for out, lse in states])
    assert not is_close(merged, requests.expected())


@pytest.mark.parametrize("world", [1, 4])
def test_compact_queries_merge_to_full_attention(simulation: Simulation, world: int) -> None:
    require(simulation, "0.7.0")
    requests = random_batch([1, 3, 0, 2], [1, 50, 20, 300], page_size=64)
    states = [decode_rank(requests, rank, world, **requests.varlen()) for rank in range(world)]
    assert is_close(merge(states), requests.expected())


def test_compact_queries_without_dcp(simulation: Simulation) -> None:
    require(simulation, "0.6.16")
    requests = random_batch([1, 3, 0, 2], [1, 50, 20, 300], page_size=64)
    state = decode(requests, backend="cute-dsl", return_lse=True, **requests.varlen())
    assert is_close(state, requests.expected())
    out = decode(requests, backend="trtllm-gen", **requests.varlen())
    assert is_close((out, state[1]), requests.expected())
    assert [launch.backend for launch in simulation.launches] == ["cute-dsl", "trtllm-gen"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
@pytest.mark.parametrize("q_len", [1, 3])
def test_trtllm_gen_returns_base_2(simulation: Simulation, q_len: int, dtype: torch.dtype) -> None:
    requests = random_batch([q_len] * 2, [37, 200], dtype=dtype)
    state = decode(requests, backend="trtllm-gen", return_lse=True)
    assert is_close(state, requests.expected(), lse_factor=math.log2(math.e))


@pytest.mark.parametrize("backend", ["trtllm-gen", "cute-dsl"])
@pytest.mark.parametrize(("base", "factor"), [("base2", math.log2(math.e)), ("basee", 1.0)])
def test_return_lse_base(simulation: Simulation, backend: str, base: str, factor: float) -> None:
    require(simulation, "0.7.1")
    requests = random_batch([2, 2], [37, 200])
    state = decode(requests, backend=backend, return_lse=True, return_lse_base=base)
    assert is_close(state, requests.expected(), lse_factor=factor)


def test_scale_tensors_and_sinks_on_trtllm_gen(simulation: Simulation) -> None:
    requests = random_batch([2], [70], dtype=torch.float8_e4m3fn)
    scales = {
        "bmm1_scale": torch.tensor([requests.scale]),
        "bmm2_scale": torch.tensor([requests.output_scale]),
    }
    sinks = torch.tensor([-1.0, 0.0, 1.0, 2.0])
    state = decode(requests, backend="trtllm-gen", return_lse=True, sinks=sinks, **scales)
    assert is_close(state, requests.expected(sinks=sinks), lse_factor=math.log2(math.e))


def test_cute_dsl_masks_between_tokens_from_0_6_13(simulation: Simulation) -> None:
    requests = random_batch([3, 3], [37, 60])
    out = decode(requests, backend="cute-dsl")
    causal = Version(simulation.release) >= Version("0.6.13")
    expected = requests.expected(causal=causal)
    assert is_close((out, expected[1]), expected)


def test_an_empty_row_is_unwritten_without_dcp(simulation: Simulation) -> None:
    requests = random_batch([1, 1], [0, 40])
    for backend in ("trtllm-gen", "cute-dsl"):
        if backend == "cute-dsl":
            require(simulation, "0.6.13")
        out = torch.full((2, 1, 4, 512), 7.0, dtype=torch.bfloat16)
        lse = torch.full((2, 4), 7.0)
        decode(requests, backend=backend, return_lse=True, out=out, lse=lse)
        assert (out[0] == 7).all()
        assert (lse[0] == (7 if backend == "cute-dsl" else -torch.inf)).all()
        assert not (out[1] == 7).any()


def test_an_empty_row_is_zero_with_dcp(simulation: Simulation) -> None:
    require(simulation, "0.6.17")
    # Rank 3 holds position 3 of the second request, which only its last token sees.
    out, lse = decode_rank(random_batch([2, 2], [2, 4]), 3, 4)
    assert (out[0] == 0).all()
    assert (out[1, 0] == 0).all()
    assert (lse[:3] == -torch.inf).all()
    assert lse[3].isfinite().all()


def test_cute_dsl_refuses_what_the_compiled_kernel_refuses(simulation: Simulation) -> None:
    requests = random_batch([1, 1], [37, 60])
    table, lengths = requests.paged()["block_tables"], requests.paged()["seq_lens"]
    assert isinstance(table, Tensor)
    assert isinstance(lengths, Tensor)
    refusals: list[tuple[dict[str, object], str]] = [
        ({"block_tables": table.long()}, "dtype=int32"),
        ({"seq_lens": torch.cat([lengths[:1], lengths])[1:]}, "data alignment=16 bytes"),
        ({"seq_lens": lengths.repeat_interleave(2)[::2]}, "expected to be 1"),
        ({"seq_lens": torch.cat([lengths, lengths])}, "match page_table.shape"),
    ]
    for keywords, message in refusals:
        with pytest.raises(ValueError, match=message):
            decode(requests, backend="cute-dsl", **keywords)
    assert simulation.launches == []


def test_trtllm_gen_misreads_what_it_does_not_check(simulation: Simulation) -> None:
    requests = random_batch([1, 1], [100, 120])
    expected, table = requests.expected(), requests.paged()["block_tables"]
    assert isinstance(table, Tensor)
    sliced = torch.cat([table, table], 1)[:, :4]
    for wrong in (table.long(), sliced):
        out = decode(requests, backend="trtllm-gen", block_tables=wrong)
        assert not is_close((out, expected[1]), expected)
    if Version(simulation.release) >= Version("0.6.13"):
        out = decode(requests, backend="cute-dsl", block_tables=sliced)
        assert is_close((out, expected[1]), expected)


def test_trtllm_gen_wants_room_and_zeroed_counters(simulation: Simulation) -> None:
    requests = random_batch([1], [40])
    dirty: dict[str, object] = {
        "workspace_buffer": torch.ones(24 << 20, dtype=torch.int8),
        "multi_ctas_kv_counter_buffer": torch.ones(1024, dtype=torch.uint8),
    }
    if Version(simulation.release) < Version("0.6.15"):
        del dirty["multi_ctas_kv_counter_buffer"]
    if Version(simulation.release).base_version != "0.6.13":  # zeroes them itself
        with pytest.raises(RuntimeError, match="not zero"):
            decode(requests, backend="trtllm-gen", **dirty)
    with pytest.raises(RuntimeError, match="Increase the workspace buffer size"):
        decode(
            requests,
            backend="trtllm-gen",
            return_lse=True,
            workspace_buffer=torch.zeros(1 << 20, dtype=torch.int8),
        )


def test_capture_refuses_an_uncompiled_kernel(simulation: Simulation) -> None:
    require(simulation, "0.6.17")
    requests = random_batch([1], [40])
    decode_rank(requests, 0, 4)
    simulation.capturing = True
    decode_rank(requests, 1, 4)
    if Version(simulation.release) < Version("0.7.4"):
        decode_rank(requests, 1, 2)
        return
    with pytest.raises(RuntimeError, match="must be prepared before CUDA graph capture"):
        decode_rank(requests, 1, 2)


def test_a_launch_is_recorded_by_name(simulation: Simulation) -> None:
    require(simulation, "0.6.17")
    requests = random_batch([2, 2], [40, 41])
    decode_rank(requests, 1, 4)
    (launch,) = simulation.launches
    assert launch.arguments["cp_rank"] == 1
    assert launch.arguments["softmax_scale"] == pytest.approx(requests.scale)
    assert launch.compile_key["enable_dcp"] is True
    simulation.clear()
    assert simulation.launches == []


def test_everything_is_put_back() -> None:
    real = torch.cuda.get_device_properties
    utils = importlib.import_module("flashinfer.utils")
    for capability in ((12, 0), (10, 0), (9, 0)):
        with simulated_flashinfer(compute_capability=capability):
            assert utils.is_sm12x_supported(torch.device("cuda")) is (capability == (12, 0))
            assert torch.cuda.get_device_capability() == capability
            assert torch.zeros(1).is_cuda
    assert torch.cuda.get_device_properties is real
    assert not torch.zeros(1).is_cuda
    with pytest.raises(ValueError, match="device must be a cuda device"):
        utils.get_compute_capability(torch.device("cpu"))
    core = importlib.import_module("flashinfer.mla._core")
    assert core.get_compute_capability is utils.get_compute_capability


def test_cc_9_is_refused_by_cute_dsl() -> None:
    with (
        simulated_flashinfer(compute_capability=(9, 0)) as simulation,
        pytest.raises((ValueError, RuntimeError), match=r"SM100|compute capability"),
    ):
        decode(random_batch([1], [40]), backend="cute-dsl")
    assert simulation.launches == []
