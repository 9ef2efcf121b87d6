"""Inputs that decode_mla refuses raise in the importable release too, or are listed.

The numbers come from the emulated kernels: what is listed as wrong is shown to be.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from fi_dcp_compat import (
    DCP,
    InvalidInputError,
    UnsupportedConfigError,
    check,
    decode_mla,
    merge_dcp_states,
    recorded,
)
from tests.hostsim.batches import Batch, random_batch
from tests.hostsim.calls import decode, flashinfer_function
from tests.hostsim.simulation import Simulation, simulated_flashinfer

from .input_refusals import INPUTS_THAT_RUN
from .refusal_cases import attempt, configuration, listing
from .refused_inputs import INPUTS, Input

# What the emulation shows of an input, and the verdicts that agree with it: the launcher may
# refuse, and memory may hold, what no emulation knows.
AGREEING: dict[str, tuple[str, ...]] = {
    "raised": (),
    "late": ("late",),
    "wrong": ("wrong", "late", "undefined"),
    "right": ("stricter", "late", "undefined"),
}
pytestmark = pytest.mark.filterwarnings("ignore::fi_dcp_compat.FlashInferCompatWarning")

DCP_KEYWORDS = ("enable_dcp", "cp_world", "cp_rank", "causal_seqlens_kv_global")


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    with simulated_flashinfer() as running:
        yield running


def own(bad: Input) -> None:
    given: dict[str, Any] = {"causal_seqlens_kv_global": None} | bad.wrong()
    world, bound = bad.case.dcp[0], given["causal_seqlens_kv_global"]
    dcp = DCP(world, 0, bound) if world > 1 else None
    decode_mla(**{k: v for k, v in given.items() if k not in DCP_KEYWORDS}, dcp=dcp)


def results(given: dict[str, Any]) -> list[Tensor]:
    """Call FlashInfer's own function; an LSE buffer is a result, returned or not."""
    result = flashinfer_function()(**given)
    tensors = list(result) if isinstance(result, tuple) else [result]
    return [*tensors, given["lse"]] if "lse" in given and len(tensors) == 1 else tensors


def shown(simulation: Simulation, bad: Input) -> str:
    """Say what an input comes to when FlashInfer's own function is called with it."""
    given = bad.wrong()
    # Without the buffers: 0.6.12 wants an LSE flat where decode_mla wants it like the query.
    expected = results({k: v for k, v in bad.right().items() if k not in ("out", "lse")})
    found: list[Tensor] = []
    error = attempt(simulation, lambda: found.extend(results(given)), {})
    if error is None:
        pairs = zip(found, expected, strict=True)
        same = all(a.numel() == b.numel() and is_close(a, b) for a, b in pairs)
        return "right" if same else "wrong"
    if not simulation.reached or (bad.case.backend == "cute-dsl" and not simulation.launches):
        return "raised"
    # An emulated kernel that raises has left the memory that it was given.
    return "wrong" if simulation.launches else "late"


def is_close(actual: Tensor, expected: Tensor) -> bool:
    # bf16 keeps eight bits.
    return torch.allclose(
        actual.double().flatten(), expected.double().flatten(), rtol=2**-7, atol=2**-7
    )


def test_every_refused_input_raises_in_flashinfer_or_is_listed(simulation: Simulation) -> None:
    abi, wrong, tried = recorded(simulation.release), list[object](), 0
    met: set[tuple[int, str]] = set()
    cases = [
        bad._replace(case=bad.case._replace(backend=b)) for bad in INPUTS for b in bad.backends
    ]
    assert len(cases) == 107
    for bad in cases:
        runs = not check(abi, **configuration(bad.case))
        if not runs or (bad.argument.startswith("multi") and not abi.features.counter_buffer):
            continue
        tried += 1
        raised = attempt(simulation, own, {"bad": bad})
        refused = isinstance(raised, (InvalidInputError, UnsupportedConfigError))
        if simulation.reached or not refused or getattr(raised, "argument", "") != bad.argument:
            wrong.append((bad.name, bad.case.backend, raised))
        comes_to = shown(simulation, bad)
        entries = [
            entry
            for entry in INPUTS_THAT_RUN
            if entry.covers(simulation.release, bad.case.backend, bad.name, bad.case)
        ]
        met |= {(id(entry), bad.name) for entry in entries}
        verdicts = [entry.verdict for entry in entries]
        if (comes_to == "raised") is bool(verdicts) or not set(verdicts) <= set(AGREEING[comes_to]):
            wrong.append((bad.name, bad.case.backend, comes_to, verdicts))
    print(simulation.release, tried, "inputs")
    assert tried > 80
    wrong += [
        (entry.kernel, name, "is met by no input")
        for entry in INPUTS_THAT_RUN
        if entry.claims(simulation.release)
        for name in entry.subjects
        if (id(entry), name) not in met
    ]
    assert not wrong, listing(wrong)


def decode_ranks(requests: Batch, ranks: list[Batch]) -> Tensor:
    """Merge what FlashInfer gives for the keys of each rank and the whole context's lengths."""
    states = [
        decode(
            share,
            backend="cute-dsl",
            return_lse=True,
            enable_dcp=True,
            cp_world=len(ranks),
            cp_rank=rank,
            causal_seqlens_kv_global=requests.bounds(),
        )
        for rank, share in enumerate(ranks)
    ]
    outs, lses = [out.flatten(0, 1) for out, _ in states], [lse for _, lse in states]
    return merge_dcp_states(outs, lses).out


def held(requests: Batch, world: int, interleave: int) -> list[Batch]:
    """Split the keys as ranks hold them that take ``interleave`` tokens in turn."""
    return [
        Batch(
            requests.queries,
            [keys[(torch.arange(len(keys)) // interleave) % world == r] for keys in requests.keys],
            requests.page_size,
        )
        for r in range(world)
    ]


def lacks_dcp(simulation: Simulation, requests: Batch) -> bool:
    """Return whether the release has no DCP; then the call by hand has to raise."""
    if Version(simulation.release) >= Version("0.6.17"):
        return False
    with pytest.raises(TypeError, match="unexpected keyword argument 'enable_dcp'"):
        decode_ranks(requests, held(requests, 2, 1))
    return True


def test_dcp_over_an_interleaved_cache_is_wrong(simulation: Simulation) -> None:
    requests = random_batch([2, 2], [100, 39])
    if lacks_dcp(simulation, requests):
        return
    expected, _ = requests.expected()
    assert is_close(decode_ranks(requests, held(requests, 2, 1)), expected)
    for interleave in (2, 4, 16, 64):
        assert not is_close(decode_ranks(requests, held(requests, 2, interleave)), expected)


@pytest.mark.parametrize(("q_len", "heads"), [(2, 4), (1, 4), (3, 48), (2, 96)])
def test_a_query_of_sliced_heads_is_misread_where_its_tokens_are_folded(
    simulation: Simulation, q_len: int, heads: int
) -> None:
    requests = random_batch([q_len] * 2, [40, 9], num_heads=heads)
    sliced = torch.cat([requests.query()] * 2, -2)[..., :heads, :]
    expected = decode(requests, backend="cute-dsl")
    right = is_close(decode(requests, query=sliced, backend="cute-dsl"), expected)
    between = Version("0.6.13") <= Version(simulation.release) < Version("0.6.16")
    assert right is not (between and (q_len, heads) == (2, 4))
    if not recorded(simulation.release).features.cute_dsl_causal and q_len > 1:
        return  # decode_mla refuses several query tokens for another reason
    simulation.clear()
    given: dict[str, Any] = {
        "query": sliced,
        "workspace_buffer": torch.zeros(24 << 20, dtype=torch.int8),
        "bmm1_scale": requests.scale,
        "bmm2_scale": requests.output_scale,
        "backend": "cute-dsl",
        **requests.paged(),
    }
    if right:
        assert is_close(decode_mla(**given), expected)
        return
    with pytest.raises(InvalidInputError, match="right behind the last one's"):
        decode_mla(**given)
    assert simulation.reached == []


def test_a_non_causal_block_with_dcp_comes_out_causal(simulation: Simulation) -> None:
    requests = random_batch([3, 3], [40, 9])
    if lacks_dcp(simulation, requests):
        return
    out = decode_ranks(requests, held(requests, 2, 1))
    assert is_close(out, requests.expected()[0])
    assert not is_close(out, requests.expected(causal=False)[0])


def test_cute_dsl_has_no_causal_mask_with_sinks(simulation: Simulation) -> None:
    sinks = torch.tensor([-1.0, 0.0, 1.0, 2.0])
    for q_len in (1, 2):
        requests = random_batch([q_len] * 2, [9, 12])
        expected, _ = requests.expected(sinks=sinks)
        assert is_close(decode(requests, backend="trtllm-gen", sinks=sinks), expected)
        out = decode(requests, backend="cute-dsl", sinks=sinks)
        assert is_close(out, expected) is (q_len == 1)


def test_cute_dsl_has_no_causal_mask_before_0_6_13(simulation: Simulation) -> None:
    requests = random_batch([3, 3], [9, 12])
    expected, _ = requests.expected()
    causal = Version(simulation.release) >= Version("0.6.13")
    assert is_close(decode(requests, backend="trtllm-gen"), expected)
    assert is_close(decode(requests, backend="cute-dsl"), expected) is causal
