"""Configurations to be refused or run: all pairs of values, as a decode_mla and a direct call."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.hostsim.simulation import Simulation

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
LENGTH = 40
WORKSPACE_BYTES = 40 << 20


class Case(NamedTuple):
    """One configuration; the defaults run on every release and, but for xqa, on every backend."""

    backend: str = "auto"
    heads: int = 16
    q_len: int = 1
    page_size: int = 64
    dtypes: tuple[torch.dtype, torch.dtype] = (BF16, BF16)
    compact: bool = False
    return_lse: bool = False
    extra_pages: int = 0
    dcp: tuple[int, int] = (1, 1)  # ranks, interleave size
    sinks: bool = False
    skip_softmax: bool = False
    tensor_scales: bool = False
    causal: bool = True
    capability: tuple[int, int] = (10, 0)
    kv_lora_rank: int = 512
    batch: int = 2

    @property
    def width(self) -> int:
        return 2 * max(1, 128 // self.page_size) + self.extra_pages

    def __repr__(self) -> str:
        """Only what differs from the defaults: failures list many."""
        changed = (f"{k}={v}" for k, v in self._asdict().items() if v != self._field_defaults[k])
        return f"Case({', '.join(changed)})"


VALUES: dict[str, tuple[Any, ...]] = {
    "heads": (1, 8, 12, 16, 17, 24, 32, 40, 48, 64, 80, 96, 127, 128, 129, 192, 256),
    "q_len": (1, 2, 4, 5, 7),
    "page_size": (1, 2, 8, 16, 32, 48, 64, 128, 256),
    "dtypes": ((BF16, BF16), (FP16, FP16), (FP8, FP8), (BF16, FP8), (FP8, BF16), (FP16, BF16)),
    "compact": (False, True),
    "return_lse": (False, True),
    "extra_pages": (0, 1),
    "dcp": ((1, 1), (2, 1), (2, 2)),
    "sinks": (False, True),
    "skip_softmax": (False, True),
    "tensor_scales": (False, True),
    "causal": (True, False),
    "capability": ((10, 0), (9, 0), (10, 3), (10, 7), (11, 0), (12, 0)),
    "kv_lora_rank": (512, 256),
}

# The base of each backend's pairs, on a GPU that it is for.
BASES = (
    Case("auto"),
    Case("trtllm-gen"),
    Case("cute-dsl"),
    Case("xqa", heads=128, capability=(12, 0)),
)


def grid() -> list[Case]:
    """Every pair of values on every backend, each case once, by GPU."""
    cases: dict[Case, None] = {}
    for base in BASES:
        for first, second in itertools.combinations(VALUES, 2):
            for values in itertools.product(VALUES[first], VALUES[second]):
                case = base._replace(**dict(zip((first, second), values, strict=True)))
                # A page of 128 tokens or more fills the kernel's tile: every width is a multiple.
                if not (case.extra_pages and case.page_size >= 128):
                    cases[case] = None
        if base.backend != "xqa":
            # One request more than CUDA's grid.y has places for.
            cases[base._replace(batch=65536)] = None
    return sorted(cases, key=lambda case: case.capability)


def configuration(case: Case) -> dict[str, Any]:
    """The case as `check` takes it."""
    return {
        "num_heads": case.heads,
        "q_len": case.q_len,
        "page_size": case.page_size,
        "dtype": case.dtypes[0],
        "kv_dtype": case.dtypes[1],
        "dcp_world_size": case.dcp[0],
        "interleave_size": case.dcp[1],
        "causal": case.causal,
        "backend": case.backend,
        "varlen": case.compact,
        "return_lse": case.return_lse,
        "sinks": case.sinks,
        "skip_softmax": case.skip_softmax,
        "tensor_scales": case.tensor_scales,
        "kv_lora_rank": case.kv_lora_rank,
        "compute_capability": case.capability,
        "block_table_width": case.width,
        "batch": case.batch,
    }


@lru_cache
def _zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape).to(dtype)


@lru_cache
def _tables(batch: int, width: int) -> Tensor:
    return torch.arange(batch * width, dtype=torch.int32).view(batch, width) % (2 * width)


def common(case: Case) -> dict[str, Any]:
    """The arguments that decode_mla and FlashInfer's own function share."""
    dim = case.kv_lora_rank + 64
    query = _zeros(1, case.q_len, case.heads, dim, dtype=case.dtypes[0])
    query = query.expand(case.batch, -1, -1, -1)
    arguments: dict[str, Any] = {
        "query": query.flatten(0, 1) if case.compact else query,
        "kv_cache": _zeros(2 * case.width, 1, case.page_size, dim, dtype=case.dtypes[1]),
        "workspace_buffer": _zeros(WORKSPACE_BYTES, dtype=torch.int8),
        "kv_lora_rank": case.kv_lora_rank,
        "qk_rope_head_dim": 64,
        "block_tables": _tables(case.batch, case.width),
        "seq_lens": torch.full((case.batch,), LENGTH, dtype=torch.int32),
        "max_seq_len": LENGTH,
        "bmm1_scale": torch.tensor([0.1]) if case.tensor_scales else 0.1,
        "bmm2_scale": 1.0,
        "backend": case.backend,
    }
    if case.compact:
        lengths = torch.full((case.batch,), case.q_len, dtype=torch.int32)
        arguments["cum_seq_lens_q"] = torch.nn.functional.pad(
            lengths.cumsum(0, dtype=torch.int32), (1, 0)
        )
        arguments["max_q_len"] = case.q_len
    if case.return_lse:
        arguments["return_lse"] = True
    if case.sinks:
        arguments["sinks"] = torch.zeros(case.heads)
    if case.skip_softmax:
        arguments["skip_softmax_threshold_scale_factor"] = 1e-3
    return arguments


def bounds(case: Case) -> Tensor:
    return torch.full((case.batch,), case.dcp[0] * LENGTH, dtype=torch.int32)


def direct(case: Case) -> dict[str, Any]:
    """The call that a caller writes by hand: FlashInfer has no word for causal or interleave."""
    arguments = common(case) | {"qk_nope_head_dim": 128}
    if case.dcp[0] > 1:
        arguments |= {
            "return_lse": True,
            "enable_dcp": True,
            "cp_world": case.dcp[0],
            "cp_rank": 0,
            "causal_seqlens_kv_global": bounds(case),
        }
    return arguments


def attempt(
    simulation: Simulation, function: Callable[..., object], arguments: dict[str, Any]
) -> Exception | None:
    """Call, and return what was raised; the simulation then knows how far the call came."""
    simulation.clear()
    try:
        function(**arguments)
    except Warning:
        raise
    except Exception as error:
        return error
    return None


def listing(mismatches: list[object]) -> str:
    """What an assertion on an empty list says."""
    shown = "\n".join(f"  {mismatch}" for mismatch in mismatches[:12])
    return f"{len(mismatches)} mismatches, of which the first are\n{shown}"
