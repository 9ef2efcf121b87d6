"""How far a call comes: through FlashInfer's Python, through the boundary, into the numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from .batches import random_batch
from .calls import decode
from .simulation import simulated_flashinfer


@pytest.mark.parametrize("backend", ["trtllm-gen", "cute-dsl"])
def test_python_that_raises_comes_to_no_kernel(backend: str) -> None:
    requests = random_batch([1], [40])
    with simulated_flashinfer() as simulation:
        with pytest.raises(
            (ValueError, AssertionError), match=r"got 575 and 576|got torch.float32"
        ):
            decode(requests, backend=backend, query=torch.zeros(1, 1, 4, 575))
        assert simulation.reached == []
        assert simulation.launches == []


@pytest.mark.parametrize(
    ("backend", "argument"), [("trtllm-gen", "query"), ("cute-dsl", "seq_lens")]
)
def test_a_boundary_that_raises_was_reached(backend: str, argument: str) -> None:
    requests = random_batch([1, 1], [40, 41])
    value = {"query": requests.query(), **requests.paged()}[argument]
    assert isinstance(value, Tensor)
    unaligned = torch.cat([value.flatten()[:1], value.flatten()])[1:].view(value.shape)
    with simulated_flashinfer() as simulation:
        with pytest.raises((ValueError, RuntimeError), match="align"):
            decode(requests, backend=backend, **{argument: unaligned})
        assert simulation.reached == [backend]
        assert simulation.launches == []
        decode(requests, backend=backend)
        assert simulation.reached == [backend] * 2
        assert len(simulation.launches) == 1
        simulation.clear()
        assert simulation.reached == []


@pytest.mark.parametrize("backend", ["trtllm-gen", "cute-dsl"])
def test_nothing_is_computed_without_compute(backend: str) -> None:
    requests = random_batch([1], [40])
    out = torch.full((1, 1, 4, 512), 7.0, dtype=torch.bfloat16)
    with simulated_flashinfer(compute=False) as simulation:
        decode(requests, backend=backend, out=out)
        assert (out == 7).all()
        assert [launch.backend for launch in simulation.launches] == [backend]


def test_xqa_is_reached_and_not_emulated() -> None:
    requests = random_batch([1], [40], num_heads=128)
    keywords = {"backend": "xqa", "workspace_buffer": torch.zeros(24 << 20, dtype=torch.uint8)}
    with simulated_flashinfer(compute_capability=(12, 0), compute=False) as simulation:
        decode(requests, **keywords)
        assert simulation.reached == ["xqa"]
        with pytest.raises(ValueError, match="only supports q_len_per_request == 1"):
            decode(random_batch([2], [40], num_heads=128), **keywords)
        with pytest.raises(ValueError, match="Invalid page_size: 8"):
            decode(random_batch([1], [40], num_heads=128, page_size=8), **keywords)
        assert simulation.reached == ["xqa"]
    with (
        simulated_flashinfer(compute_capability=(12, 0)),
        pytest.raises(NotImplementedError, match="xqa is not emulated"),
    ):
        decode(requests, **keywords)


def test_sinks_on_cute_dsl_go_to_a_kernel_without_a_causal_mask() -> None:
    requests, sinks = random_batch([2], [9]), torch.tensor([-1.0, 0.0, 1.0, 2.0])
    with simulated_flashinfer() as simulation:
        out = decode(requests, backend="cute-dsl", sinks=sinks)
        (launch,) = simulation.launches
        assert launch.arguments["sinks"] is sinks
    full, _ = requests.expected(causal=False, sinks=sinks)
    torch.testing.assert_close(out.double().flatten(0, 1), full, rtol=2**-7, atol=2**-7)
