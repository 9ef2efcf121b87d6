"""Arguments that decode_mla refuses one at a time, as a caller might pass them to FlashInfer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.hostsim.batches import Batch, random_batch

from .refusal_cases import FP8, Case

UNIFORM = Case(heads=4, batch=3)
COMPACT = UNIFORM._replace(compact=True, q_len=2)
WITH_LSE = UNIFORM._replace(return_lse=True)
RANK = UNIFORM._replace(dcp=(2, 1))
QUANTISED = UNIFORM._replace(dtypes=(FP8, FP8))
BOTH, TRTLLM_GEN, CUTE_DSL = ("trtllm-gen", "cute-dsl"), ("trtllm-gen",), ("cute-dsl",)

# What a call without them would pass if it passed them right.
_UNGIVEN: dict[str, Callable[[], object]] = {
    "out": lambda: torch.zeros(3, 1, 4, 512, dtype=torch.bfloat16),
    "lse": lambda: torch.zeros(3, 1, 4),
    "sinks": lambda: torch.arange(4.0),
    "multi_ctas_kv_counter_buffer": lambda: torch.zeros(2048, dtype=torch.uint8),
}


class Input(NamedTuple):
    """What one argument of a call that runs is changed to."""

    name: str
    argument: str
    change: Callable[[Any], object]
    backends: tuple[str, ...] = BOTH
    case: Case = UNIFORM
    return_lse: bool | None = None

    def right(self) -> dict[str, Any]:
        """Return a call that passes the argument as it should be."""
        given = call_of(self.case)
        if self.argument not in given:
            given[self.argument] = _UNGIVEN[self.argument]()
        return given

    def wrong(self) -> dict[str, Any]:
        """Return the call with the argument changed; None leaves it out."""
        given = self.right()
        given[self.argument] = self.change(given[self.argument])
        if self.return_lse is not None:
            given["return_lse"] = self.return_lse
        return {name: value for name, value in given.items() if value is not None}


def strided(value: Tensor) -> Tensor:
    """The same elements, two apart."""
    return value.repeat_interleave(2, -1)[..., ::2]


def shifted(value: Tensor) -> Tensor:
    """The same elements, one element behind an aligned start."""
    return torch.cat([value.flatten()[:1], value.flatten()])[1:].view(value.shape)


def sliced(value: Tensor) -> Tensor:
    """The same rows, in the front half of rows twice as long."""
    return torch.cat([value, value], -1)[..., : value.shape[-1]]


def longer(value: Tensor) -> Tensor:
    return torch.cat([value, value[-1:]])


def batch_of(case: Case) -> Batch:
    return random_batch(
        [case.q_len] * case.batch,
        [40, 100, 130],
        page_size=case.page_size,
        dtype=case.dtypes[0],
        num_heads=case.heads,
    )


def call_of(case: Case) -> dict[str, Any]:
    """A call that runs, with numbers in it, as FlashInfer's own function takes it."""
    requests = batch_of(case)
    given: dict[str, Any] = {
        "query": requests.query(),
        "workspace_buffer": torch.zeros(24 << 20, dtype=torch.int8),
        "kv_lora_rank": case.kv_lora_rank,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "bmm1_scale": requests.scale,
        "bmm2_scale": requests.output_scale,
        "backend": case.backend,
        **requests.paged(0, case.dcp[0]),
    }
    if case.compact:
        given |= {"query": given["query"].flatten(0, 1), **requests.varlen()}
    if case.return_lse:
        given["return_lse"] = True
    if case.dcp[0] > 1:
        given |= {
            "return_lse": True,
            "enable_dcp": True,
            "cp_world": case.dcp[0],
            "cp_rank": 0,
            "causal_seqlens_kv_global": requests.bounds(),
        }
    return given


def _nan(value: object) -> float:
    return float("nan")


# fmt: off
INPUTS = (
    Input("query of another width", "query", lambda q: q[..., 1:].clone()),
    Input("strided query", "query", strided),
    Input("unaligned query", "query", shifted),
    Input("query in two dimensions", "query", lambda q: q.flatten(0, 2)),
    Input("query of fewer requests", "query", lambda q: q[:2]),
    Input("flat query that does not divide", "query", lambda q: q[1:].flatten(0, 1)),
    Input("compact query in four dimensions", "query", lambda q: q[:, None], case=COMPACT),
    Input("compact query of too many tokens", "query", lambda q: longer(longer(q)), case=COMPACT),
    Input("offsets without max_q_len", "max_q_len", lambda _: None, case=COMPACT),
    Input("int64 offsets", "cum_seq_lens_q", Tensor.long, case=COMPACT),
    Input("too many offsets", "cum_seq_lens_q", longer, case=COMPACT),
    Input("strided offsets", "cum_seq_lens_q", strided, case=COMPACT),
    Input("cache in two dimensions", "kv_cache", lambda c: c.flatten(0, 1)),
    Input("cache of another width", "kv_cache", lambda c: c[..., 1:].clone()),
    Input("cache with gaps between tokens", "kv_cache", sliced),
    Input("strided cache", "kv_cache", strided),
    Input("unaligned cache", "kv_cache", shifted),
    Input("int64 block table", "block_tables", Tensor.long),
    Input("block table in one dimension", "block_tables", Tensor.flatten),
    Input("row-sliced block table", "block_tables", sliced, TRTLLM_GEN),
    Input("strided block table", "block_tables", strided),
    Input("unaligned block table", "block_tables", shifted),
    Input("int64 lengths", "seq_lens", Tensor.long),
    Input("unaligned lengths", "seq_lens", shifted),
    Input("strided lengths", "seq_lens", strided),
    Input("lengths in two dimensions", "seq_lens", lambda s: s[:, None]),
    Input("too many lengths", "seq_lens", longer),
    Input("max_seq_len of 0", "max_seq_len", lambda _: 0),
    Input("negative max_seq_len", "max_seq_len", lambda _: -1),
    Input("max_seq_len as a tensor", "max_seq_len", torch.tensor),
    Input("int64 global lengths", "causal_seqlens_kv_global", Tensor.long, CUTE_DSL, RANK),
    Input("strided global lengths", "causal_seqlens_kv_global", strided, CUTE_DSL, RANK),
    Input("too many global lengths", "causal_seqlens_kv_global", longer, CUTE_DSL, RANK),
    Input("no global lengths", "causal_seqlens_kv_global", lambda _: None, CUTE_DSL, RANK),
    Input("fp16 out", "out", Tensor.half),
    Input("flat out", "out", lambda o: o.flatten(0, 1)),
    Input("strided out", "out", strided),
    Input("unaligned out", "out", shifted),
    Input("fp16 lse", "lse", Tensor.half, case=WITH_LSE),
    Input("lse of another shape", "lse", lambda s: s[:2], case=WITH_LSE),
    Input("strided lse", "lse", strided, case=WITH_LSE),
    Input("unaligned lse", "lse", shifted, case=WITH_LSE),
    Input("lse without return_lse", "lse", lambda s: s, BOTH, WITH_LSE, return_lse=False),
    Input("workspace of 1 KiB", "workspace_buffer", lambda w: w[:1024], case=WITH_LSE),
    Input("strided workspace", "workspace_buffer", lambda w: w[::2]),
    Input("unaligned workspace", "workspace_buffer", lambda w: w[1:]),
    Input("float workspace", "workspace_buffer", lambda w: w.view(torch.float32), CUTE_DSL),
    Input("short counters", "multi_ctas_kv_counter_buffer", lambda c: c[:64], TRTLLM_GEN),
    Input("unaligned counters", "multi_ctas_kv_counter_buffer", lambda c: c[1:], TRTLLM_GEN),
    Input("strided counters", "multi_ctas_kv_counter_buffer", strided, TRTLLM_GEN),
    Input("sinks of another length", "sinks", lambda s: s[:2].clone()),
    Input("bf16 sinks", "sinks", Tensor.bfloat16),
    Input("strided sinks", "sinks", strided),
    Input("two sinks", "sinks", lambda s: [s, s]),
    Input("scale of 0", "bmm1_scale", lambda _: 0.0),
    Input("scale that is no number", "bmm1_scale", _nan),
    Input("float64 scale", "bmm1_scale", lambda x: torch.tensor([x]).double(), TRTLLM_GEN),
    Input("two scales", "bmm1_scale", lambda x: torch.tensor([x, x]), TRTLLM_GEN),
    Input("fp8 cache without its scale", "bmm2_scale", lambda _: None, case=QUANTISED),
)
# fmt: on
