"""The drop-in beside FlashInfer's own function, on the real host code of whatever is importable.

`test_every_release` runs this file on other releases than the installed one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fi_dcp_compat import FlashInferCompatError
from fi_dcp_compat.dropin import trtllm_batch_decode_with_kv_cache_mla as dropin
from tests.hostsim.batches import Batch, random_batch
from tests.hostsim.calls import flashinfer_function
from tests.hostsim.simulation import Launch, Simulation, simulated_flashinfer

from .release import HAS, arguments

pytestmark = pytest.mark.filterwarnings("ignore::fi_dcp_compat.FlashInferCompatWarning")

FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def machine() -> Iterator[Simulation]:
    with simulated_flashinfer() as running:
        yield running


@pytest.fixture
def simulation(machine: Simulation) -> Simulation:
    machine.clear()
    return machine


@pytest.fixture(scope="module")
def workspace() -> Tensor:
    return torch.zeros(24 << 20, dtype=torch.int8)


def counters() -> Tensor:
    return torch.zeros(8192, dtype=torch.uint8)


def dense(q_len: int = 1, **shape: Any) -> Batch:
    return random_batch([q_len] * 2, [37, 200], **shape)


def dcp(requests: Batch, world: int = 4, rank: int = 1) -> dict[str, Any]:
    return {
        "enable_dcp": True,
        "cp_world": world,
        "cp_rank": rank,
        "causal_seqlens_kv_global": requests.bounds(),
        "return_lse": True,
    }


def call(requests: Batch, workspace: Tensor, **keywords: Any) -> dict[str, Any]:
    """FlashInfer's keywords, all that its function requires."""
    world, rank = keywords.get("cp_world", 1), keywords.get("cp_rank", 0)
    dims = {"qk_nope_head_dim": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    return arguments(requests, workspace, rank, world) | dims | keywords


# What stacks call, by name: a batch, and keywords of it.
@functools.cache
def shapes() -> dict[str, tuple[Batch, dict[str, Any]]]:
    plain, several, fp8 = dense(), dense(3), dense(dtype=FP8)
    odd, many = dense(num_heads=24, page_size=64), dense(2, num_heads=96, page_size=64)
    pages = dense(page_size=128)
    ragged = random_batch([1, 3, 0, 2], [1, 50, 20, 300], page_size=64)
    lse = torch.zeros(2, 3, 4)
    out = torch.zeros(2, 3, 4, 512, dtype=torch.bfloat16)
    compact = ragged.varlen()
    return {
        "dense DCP": (plain, dcp(plain) | {"backend": "cute-dsl"}),
        "dense DCP, auto": (several, dcp(several)),
        "dense DCP, fp8": (fp8, dcp(fp8) | {"backend": "cute-dsl"}),
        "one DCP rank": (plain, dcp(plain, 1, 0)),
        "dense": (plain, {}),
        "dense with counters": (plain, {"multi_ctas_kv_counter_buffer": counters()}),
        "counters on cute-dsl": (
            plain,
            {"multi_ctas_kv_counter_buffer": counters(), "backend": "cute-dsl"},
        ),
        "DCP with counters": (plain, dcp(plain) | {"multi_ctas_kv_counter_buffer": counters()}),
        "trtllm-gen with an LSE": (several, {"backend": "trtllm-gen", "return_lse": True}),
        "cute-dsl with an LSE": (several, {"backend": "cute-dsl", "return_lse": True}),
        "fp8": (fp8, {"skip_softmax_threshold_scale_factor": None}),
        "odd heads": (odd, {"backend": "cute-dsl"}),
        "odd heads, auto": (odd, {}),
        "96 heads with an LSE": (many, {"backend": "cute-dsl", "return_lse": True}),
        "96 heads, auto": (many, {}),
        "pages of 128, auto": (pages, {"return_lse": True}),
        "own buffers": (several, {"return_lse": True, "lse": lse, "out": out}),
        "compact": (ragged, compact),
        "compact on cute-dsl": (ragged, compact | {"backend": "cute-dsl", "return_lse": True}),
        "compact DCP": (ragged, compact | dcp(ragged) | {"backend": "cute-dsl"}),
        "equal lengths": (plain, {"is_var_seq": False, "enable_pdl": False}),
        "sinks": (plain, {"backend": "trtllm-gen", "sinks": torch.zeros(4)}),
        "a trtllm-gen DCP": (plain, dcp(plain) | {"backend": "trtllm-gen"}),
        "DCP without an LSE": (plain, dcp(plain) | {"return_lse": False}),
        "the backend of nobody": (plain, {"backend": "turbo"}),
    }


# Which calls FlashInfer refuses, or launches to fail in C++, and which run through the drop-in: by
# leaving out counters that nobody reads, by a view of a buffer, or by naming the right backend.
MENDED = {
    "dense with counters": not HAS.counter_buffer,
    "counters on cute-dsl": True,
    "DCP with counters": HAS.native_dcp,
    "own buffers": not HAS.lse_3d,
    "odd heads, auto": not HAS.trtllm_padded_heads,
    "96 heads, auto": HAS.cute_dsl_causal and not HAS.trtllm_padded_heads,
    "pages of 128, auto": HAS.cute_dsl_lse and not HAS.compact_queries,
}
# trtllm-gen's C++, which does not run here, has no kernel for these heads up to 0.6.15.
UNTILED = set() if HAS.trtllm_padded_heads else {"odd heads, auto", "96 heads, auto"}


class Outcome(NamedTuple):
    """What a call came to: its result or error, and what it launched."""

    result: Tensor | tuple[Tensor, Tensor] | None
    error: Exception | None
    launches: list[Launch]


def attempt(simulation: Simulation, function: Callable[..., Any], given: dict[str, Any]) -> Outcome:
    simulation.clear()
    given["workspace_buffer"].zero_()
    result, error = None, None
    try:
        result = function(**given)
    except Exception as raised:
        error = raised
    return Outcome(result, error, list(simulation.launches))


def differing(ours: dict[str, object], theirs: dict[str, object]) -> list[str]:
    """Name the arguments of two launches that are not the same."""
    assert ours.keys() == theirs.keys()
    return [name for name, value in theirs.items() if not same(ours[name], value)]


def same(ours: object, theirs: object) -> bool:
    if not isinstance(theirs, Tensor):
        return ours == theirs
    assert isinstance(ours, Tensor)
    shapes = (ours.shape, ours.dtype, ours.stride()) == (
        theirs.shape,
        theirs.dtype,
        theirs.stride(),
    )
    return shapes and torch.equal(ours.float().nan_to_num(), theirs.float().nan_to_num())


@pytest.mark.parametrize("name", shapes())
def test_the_drop_in_launches_what_the_direct_call_launches(
    simulation: Simulation, workspace: Tensor, name: str
) -> None:
    requests, keywords = shapes()[name]
    given = call(requests, workspace, **keywords)
    direct = attempt(simulation, flashinfer_function(), given)
    ours = attempt(simulation, dropin, given)
    if MENDED.get(name):
        assert ours.error is None, ours.error
        assert direct.error is not None or name in UNTILED
        assert [launch.backend for launch in ours.launches] == [
            "cute-dsl" if name != "own buffers" and "dense" not in name else "trtllm-gen"
        ]
    elif direct.error is None and name not in UNTILED:
        assert ours.error is None, ours.error
        (mine,), (theirs,) = ours.launches, direct.launches
        assert mine.backend == theirs.backend
        assert mine.compile_key == theirs.compile_key
        assert differing(mine.arguments, theirs.arguments) == []
        assert same_results(ours.result, direct.result)
    else:
        assert isinstance(ours.error, FlashInferCompatError), direct.error
        assert ours.launches == []


def same_results(ours: object, theirs: object) -> bool:
    if not isinstance(theirs, tuple):
        return same(ours, theirs)
    assert isinstance(ours, tuple)
    return all(map(same, ours, theirs))
