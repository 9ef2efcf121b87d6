"""Bad input: what is wrong is named, with what is needed, before anything is computed."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from fi_dcp_compat import (
    DCP,
    FlashInferCompatError,
    InvalidInputError,
    UnsupportedConfigError,
    decode_mla,
    prepare_decode_mla,
    recorded,
)
from fi_dcp_compat.describing import Binding
from fi_dcp_compat.probing import install_kernel
from fi_dcp_compat.testing import mock_kernel, use_kernel
from tests.contract.test_decode_call import Dispatched
from tests.support import call, dcp_of, stub_result
from tests.test_guards import gpu

INT = torch.int32
BF16 = torch.bfloat16


def shifted(tensor: Tensor) -> Tensor:
    """The same tensor, one element away from an aligned address."""
    flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return flat[1:].copy_(tensor.flatten()).view(tensor.shape)


def strided(tensor: Tensor) -> Tensor:
    """The same tensor, with every other element of its last dimension skipped."""
    return torch.stack((tensor, tensor), dim=-1)[..., 0]


def lens(*values: int) -> Tensor:
    return torch.tensor(values, dtype=INT)


class Fault(NamedTuple):
    """One wrong argument in a right call, and what the message says of it.

    `found` and `needed` are pieces of those lines; `sm_count` has the call made as on a GPU.
    """

    argument: str
    changes: Callable[[], Mapping[str, Any]]
    summary: str
    found: str
    needed: str
    where: tuple[str, ...] = ("plain", "dcp")
    error: type[FlashInferCompatError] = InvalidInputError
    sm_count: int | None = None


@functools.cache
def _right() -> dict[str, Any]:
    return call(q_len=2)


def arguments_of(fault: Fault, where: str) -> dict[str, Any]:
    arguments = dict(_right())
    if where == "dcp":
        arguments["dcp"] = dcp_of()
    changes = dict(fault.changes())
    if where == "dcp" and "causal_seqlens_kv_global" in changes:
        arguments["dcp"] = DCP(8, 3, changes.pop("causal_seqlens_kv_global"))
    return arguments | changes


def refusal(fault: Fault, where: str) -> tuple[FlashInferCompatError | Exception | None, list[str]]:
    """Return what the call with that fault raised, and what was computed or called till then."""
    arguments = arguments_of(fault, where)
    calls: list[str] = []

    def kernel(**got: Any) -> Any:
        calls.append("kernel")
        return stub_result(**got)

    with ExitStack() as stack:
        if fault.sm_count is not None:
            stack.enter_context(gpu(sm_count=fault.sm_count))
        stack.enter_context(use_kernel(kernel, recorded("0.7.4")))
        dispatched = stack.enter_context(Dispatched())
        try:
            decode_mla(**arguments)
        except Exception as error:
            return error, dispatched.names + calls
    return None, dispatched.names + calls


QUERY = "[B, q_len, H, D] or [num_tokens, H, D]"
CACHE = "[num_pages, page_size, D] or [num_pages, 1, page_size, D]"
OUT = (2, 2, 16, 512)

# The tensors that the kernel reads through a raw pointer: shape, dtype, and who has it.
READ: dict[str, tuple[tuple[int, ...], torch.dtype, tuple[str, ...]]] = {
    "block_tables": ((2, 2), INT, ("plain", "dcp")),
    "seq_lens": ((2,), INT, ("plain", "dcp")),
    "causal_seqlens_kv_global": ((2,), INT, ("dcp",)),
    "cum_seq_lens_q": ((3,), INT, ("plain", "dcp")),
    "out": (OUT, BF16, ("plain", "dcp")),
    "lse": (OUT[:-1], torch.float32, ("plain", "dcp")),
    "sinks": ((16,), torch.float32, ("plain",)),
}
COMPACT: dict[str, Any] = {"query": torch.zeros(4, 16, 576).to(BF16), "max_q_len": 3}


def _set(name: str, value: Any) -> Callable[[], Mapping[str, Any]]:
    return lambda: {name: value}


def _with(name: str, value: Any) -> Callable[[], Mapping[str, Any]]:
    extra: dict[str, Any] = {}
    if name == "cum_seq_lens_q":
        extra = COMPACT
    elif name == "lse":
        extra = {"return_lse": True}
    return lambda: extra | {name: value() if callable(value) else value}


def _pointer_faults() -> dict[str, Fault]:
    faults: dict[str, Fault] = {}
    for name, (shape, dtype, where) in READ.items():
        right = torch.zeros(shape, dtype=dtype)
        want = f"{list(shape)} {dtype} on cpu"
        other_dtypes = (torch.int64, torch.float64, torch.bool, torch.int16, torch.float16)
        for other in other_dtypes:
            faults[f"{name} in {other}"] = Fault(
                name,
                _with(name, right.to(other)),
                f"{name} must be {dtype}, not {other}.",
                f"{list(shape)} {other} on cpu",
                want,
                where,
            )
        if name not in ("block_tables", "sinks"):
            for value, shown in (([7, 7], "list of 7 (int), 7 (int)"), (7, "7 (int)")):
                faults[f"{name}={value}"] = Fault(
                    name, _with(name, value), f"{name} must be a tensor.", shown, want, where
                )
        if name != "block_tables":
            wrong = torch.zeros(shape[0] + 1, *shape[1:], dtype=dtype)
            faults[f"{name} of another batch"] = Fault(
                name,
                _with(name, wrong),
                f"{name} must have shape {list(shape)}, not {list(wrong.shape)}.",
                f"{list(wrong.shape)} {dtype} on cpu",
                want,
                where,
            )
            faults[f"{name} with a dimension more"] = Fault(
                name,
                _with(name, right.unsqueeze(0)),
                f"{name} must have shape {list(shape)}, not {[1, *shape]}.",
                f"{[1, *shape]} {dtype} on cpu",
                want,
                where,
            )
            faults[f"{name} empty"] = Fault(
                name,
                _with(name, torch.zeros(0, dtype=dtype)),
                f"{name} must have shape {list(shape)}, not [0].",
                f"[0] {dtype} on cpu",
                want,
                where,
            )
        faults[f"{name} on another device"] = Fault(
            name,
            _with(name, torch.zeros(shape, dtype=dtype, device="meta")),
            f"{name} is on meta, but the query is on cpu.",
            f"{list(shape)} {dtype} on meta",
            want,
            where,
        )
        faults[f"{name} with gaps"] = Fault(
            name,
            _with(name, strided(right)),
            f"{name} must be contiguous, not strides {list(strided(right).stride())}.",
            f"{list(shape)} {dtype} on cpu",
            want,
            where,
        )
        if name not in ("causal_seqlens_kv_global", "cum_seq_lens_q"):
            off = right.element_size()
            faults[f"{name} off its alignment"] = Fault(
                name,
                _with(name, shifted(right)),
                f"{name} must start at a multiple of 16 bytes.",
                f"{list(shape)} {dtype} on cpu",
                f"{want}, 16-byte aligned; this one is off by {off}",
                where,
            )
    return faults


def _int_faults() -> dict[str, Fault]:
    faults: dict[str, Fault] = {}
    for name, low, where in (
        ("max_seq_len", 1, ("plain",)),
        ("max_seq_len", 0, ("dcp",)),
        ("max_q_len", 1, ("plain", "dcp")),
        ("qk_nope_head_dim", 0, ("plain", "dcp")),
        ("kv_lora_rank", 1, ("plain", "dcp")),
        ("qk_rope_head_dim", 0, ("plain", "dcp")),
    ):
        wrongs: list[tuple[Any, str]] = [
            (low - 1, f"{low - 1} (int)"),
            (True, "True (bool)"),
            (7.0, "7.0 (float)"),
            ("7", "'7' (str)"),
            (np.int64(7), f"{np.int64(7)!r} (int64)"),
            (torch.tensor(7), "[] torch.int64 on cpu"),
        ]
        if name != "max_q_len":
            wrongs.append((None, "None (NoneType)"))
        for value, shown in wrongs:
            faults[f"{name}={shown}, {where[0]}"] = Fault(
                name,
                _set(name, value),
                f"{name} must be an int of at least {low}.",
                shown,
                f"an int of at least {low}",
                where,
            )
    return faults


def _switch_faults() -> dict[str, Fault]:
    return {
        f"{name}={value!r}": Fault(
            name,
            _set(name, value),
            f"{name} must be a bool.",
            f"{value!r} ({type(value).__name__})",
            "True or False",
        )
        for name in ("causal", "return_lse", "enable_pdl")
        for value in (0, 1, None, "yes", 1.0)
        if (name, value) != ("enable_pdl", None)
    }


def _scale_faults() -> dict[str, Fault]:
    needed = "a positive finite float, or a float32 tensor of one element on the query's device"
    faults: dict[str, Fault] = {}
    for name in ("bmm1_scale", "bmm2_scale"):
        wrongs: list[Any] = [0, 0.0, -0.1, math.nan, math.inf, -math.inf, True, "0.1", [0.1]]
        wrongs += [None] if name == "bmm1_scale" else []
        for value in wrongs:
            shown = "list of 0.1 (float)" if value == [0.1] else f"{value!r} ("
            faults[f"{name}={value!r}"] = Fault(
                name,
                _set(name, value),
                f"{name} must be {needed}.",
                shown,
                needed,
            )
        # Any tensor is refused under DCP, by the configuration.
        for label, tensor in (
            ("float64", torch.tensor(0.1, dtype=torch.float64)),
            ("int32", torch.tensor(1, dtype=INT)),
            ("bool", torch.tensor(True)),
            ("two elements", torch.ones(2)),
            ("no element", torch.ones(0)),
            ("another device", torch.ones(1, device="meta")),
        ):
            faults[f"{name} tensor, {label}"] = Fault(
                name,
                _set(name, tensor),
                f"{name} must be {needed}.",
                f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}",
                needed,
                ("plain",),
            )
    for value in (-1, -1e-3, math.nan, True, "1", torch.tensor(1.0)):
        name = "skip_softmax_threshold_scale_factor"
        shown = "[] torch.float32 on cpu" if isinstance(value, Tensor) else f"{value!r} ("
        faults[f"{name}={value!r}"] = Fault(
            name,
            _set(name, value),
            f"{name} must be a finite float of at least 0, or None.",
            shown,
            "a finite float of at least 0, or None",
        )
    return faults


def _fp8() -> dict[str, Any]:
    fp8 = call(q_len=2, dtype=torch.float8_e4m3fn)
    del fp8["bmm2_scale"]
    return fp8


def _workspace_faults() -> dict[str, Fault]:
    def one(value: Any, shown: str, where: str, sm_count: int | None = None) -> Fault:
        dtype = " torch.int8 or torch.uint8" if where == "dcp" else ""
        needed = f"a contiguous{dtype} tensor on cpu, 32-byte aligned"
        return Fault(
            "workspace_buffer",
            lambda: (
                {"workspace_buffer": value}
                | ({"backend": "trtllm-gen"} if where == "plain" else {})
            ),
            f"workspace_buffer must be {needed}.",
            shown,
            needed,
            (where,),
            sm_count=sm_count,
        )

    size = 1 << 20
    faults: dict[str, Fault] = {}
    for where in ("plain", "dcp"):
        for label, value, shown in (
            ("None", None, "None (NoneType)"),
            ("an int", size, f"{size} (int)"),
            (
                "on another device",
                torch.zeros(size, dtype=torch.int8, device="meta"),
                f"[{size}] torch.int8 on meta",
            ),
            ("with gaps", torch.zeros(size, 2, dtype=torch.int8)[:, 0], f"[{size}] torch.int8"),
            ("off by 1 byte", shifted(torch.zeros(size, dtype=torch.int8)), f"[{size}] torch.int8"),
            (
                "off by 16 bytes",
                torch.zeros(size + 64, dtype=torch.int8)[16:],
                f"[{size + 48}] torch.int8",
            ),
        ):
            faults[f"workspace {label}, {where}"] = one(value, shown, where)
    for dtype in (torch.float32, torch.int32, torch.bool, BF16):
        buffer = torch.zeros(size, dtype=dtype)
        faults[f"workspace in {dtype}, dcp"] = one(buffer, f"[{size}] {dtype} on cpu", "dcp")
    # 2 requests of 2 tokens and 16 heads on 148 SMs: two tiles, 37 splits each.
    need = 2 * 128 * 37 * 513 * 4
    faults["workspace too small for cute-dsl"] = Fault(
        "workspace_buffer",
        lambda: {"workspace_buffer": torch.zeros(need - 1, dtype=torch.int8)},
        "workspace_buffer is too small.",
        f"{need - 1} bytes ([{need - 1}] torch.int8 on cpu).",
        f"{need} bytes for backend='cute-dsl'",
        ("dcp",),
        sm_count=148,
    )
    statistics = 8 * 16 * 2 * 256 + 2**20
    faults["workspace too small for an LSE of trtllm-gen"] = Fault(
        "workspace_buffer",
        lambda: {
            "workspace_buffer": torch.zeros(statistics - 1, dtype=torch.int8),
            "backend": "trtllm-gen",
            "return_lse": True,
        },
        "workspace_buffer is too small.",
        f"{statistics - 1} bytes ([{statistics - 1}] torch.int8 on cpu).",
        f"{statistics} bytes for backend='trtllm-gen'",
        ("plain",),
    )
    return faults


def _counter_faults() -> dict[str, Fault]:
    name, needed = "multi_ctas_kv_counter_buffer", "a contiguous tensor on cpu, 16-byte aligned"
    faults = {
        f"counters {label}": Fault(
            name,
            _set(name, value),
            f"{name} must be {needed}.",
            shown,
            needed,
            ("plain",),
        )
        for label, value, shown in (
            ("an int", 4096, "4096 (int)"),
            (
                "on another device",
                torch.zeros(4096, dtype=torch.uint8, device="meta"),
                "[4096] torch.uint8 on meta",
            ),
            ("with gaps", torch.zeros(4096, 2, dtype=torch.uint8)[:, 0], "[4096] torch.uint8"),
            ("off by 1", shifted(torch.zeros(4096, dtype=torch.uint8)), "[4096] torch.uint8"),
        )
    }
    for sm_count, need in ((None, 128), (148, 608)):
        faults[f"counters too small, {sm_count} SMs"] = Fault(
            name,
            _set(name, torch.zeros(need - 1, dtype=torch.uint8)),
            f"{name} is too small.",
            f"{need - 1} bytes ([{need - 1}] torch.uint8 on cpu).",
            f"{need} bytes for trtllm-gen's counters",
            ("plain",),
            sm_count=sm_count,
        )
    return faults


def query(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


FAULTS: dict[str, Fault] = {
    **_pointer_faults(),
    **_int_faults(),
    **_switch_faults(),
    **_scale_faults(),
    **_workspace_faults(),
    **_counter_faults(),
    # The query and its layout.
    "query=None": Fault(
        "query", lambda: {"query": None}, "query must be a tensor.", "None", "[B, q_len, H, D]"
    ),
    "query a list": Fault(
        "query", lambda: {"query": [1]}, "query must be a tensor.", "list of 1 (int)", "[B, q_len"
    ),
    "query of 2 dimensions": Fault(
        "query",
        lambda: {"query": query(2, 576)},
        f"query must be {QUERY}.",
        "[2, 576] torch.bfloat16 on cpu",
        QUERY,
    ),
    "query of 5 dimensions": Fault(
        "query",
        lambda: {"query": query(1, 2, 2, 16, 576)},
        f"query must be {QUERY}.",
        "[1, 2, 2, 16, 576] torch.bfloat16 on cpu",
        QUERY,
    ),
    "query without its rope part": Fault(
        "query",
        lambda: {"query": query(2, 2, 16, 512)},
        "query must have a last dimension of 576 (kv_lora_rank + qk_rope_head_dim).",
        "[2, 2, 16, 512] torch.bfloat16 on cpu",
        "576",
    ),
    "query without a last dimension": Fault(
        "query",
        lambda: {"query": query(2, 2, 16, 0)},
        "query must have a last dimension of 576 (kv_lora_rank + qk_rope_head_dim).",
        "[2, 2, 16, 0] torch.bfloat16 on cpu",
        "576",
    ),
    "query with gaps": Fault(
        "query",
        lambda: {"query": strided(query(2, 2, 16, 576))},
        "query must have a unit stride in the last dimension and a 16-byte aligned start.",
        "[2, 2, 16, 576] torch.bfloat16 on cpu",
        "unit stride",
    ),
    "query off its alignment": Fault(
        "query",
        lambda: {"query": shifted(query(2, 2, 16, 576))},
        "query must have a unit stride in the last dimension and a 16-byte aligned start.",
        "[2, 2, 16, 576] torch.bfloat16 on cpu",
        "16-byte aligned",
    ),
    "query on another device": Fault(
        "block_tables",
        lambda: {"query": torch.zeros(2, 2, 16, 576, dtype=BF16, device="meta"), **on_meta()},
        "block_tables is on cpu, but the query is on meta.",
        "[2, 2] torch.int32 on cpu",
        "[2, 2] torch.int32 on meta",
    ),
    "query of another batch": Fault(
        "query",
        lambda: {"query": query(3, 2, 16, 576)},
        "query has 3 requests, but block_tables has 2 rows.",
        "[3, 2, 16, 576] torch.bfloat16 on cpu",
        "2 requests",
    ),
    "q_len is not max_q_len": Fault(
        "query",
        lambda: {"max_q_len": 3},
        "query has q_len=2, but max_q_len=3.",
        "[2, 2, 16, 576] torch.bfloat16 on cpu",
        "q_len=3",
    ),
    "a query of 4 dimensions with cum_seq_lens_q": Fault(
        "query",
        lambda: {"cum_seq_lens_q": lens(0, 2, 4), "max_q_len": 2},
        "query must be [num_tokens, H, D] with cum_seq_lens_q.",
        "[2, 2, 16, 576] torch.bfloat16 on cpu",
        "[num_tokens, H, D]",
    ),
    "a flat query that does not divide": Fault(
        "query",
        lambda: {"query": query(5, 16, 576)},
        "query has 5 tokens, which 2 requests cannot share evenly.",
        "[5, 16, 576] torch.bfloat16 on cpu",
        "num_tokens = B * q_len with B = block_tables.shape[0]",
    ),
    "1 and 4 tokens asserted to be 2 each": Fault(
        "query",
        lambda: {"query": query(5, 16, 576), "max_q_len": 2},
        "query has 5 tokens, which 2 requests of max_q_len=2 cannot share evenly.",
        "[5, 16, 576] torch.bfloat16 on cpu",
        "num_tokens = B * q_len",
    ),
    "1 and 3 tokens of at most 3": Fault(
        "query",
        lambda: {"query": query(4, 16, 576), "max_q_len": 3},
        "query has 4 tokens, which 2 requests of max_q_len=3 cannot share evenly.",
        "[4, 16, 576] torch.bfloat16 on cpu",
        "num_tokens = B * q_len",
    ),
    "tokens without a request": Fault(
        "query",
        lambda: {"query": query(4, 16, 576), "block_tables": torch.zeros(0, 2, dtype=INT)},
        "query has 4 tokens, which 0 requests cannot share evenly.",
        "[4, 16, 576] torch.bfloat16 on cpu",
        "num_tokens = B * q_len",
    ),
    "cum_seq_lens_q without max_q_len": Fault(
        "max_q_len",
        lambda: {"query": query(4, 16, 576), "cum_seq_lens_q": lens(0, 1, 4)},
        "max_q_len must be given with cum_seq_lens_q.",
        "None (NoneType)",
        "the largest query length, a host int",
    ),
    "more tokens than max_q_len allows": Fault(
        "query",
        lambda: {"query": query(7, 16, 576), "cum_seq_lens_q": lens(0, 1, 7), "max_q_len": 3},
        "query has 7 tokens, more than 2 requests of max_q_len=3 hold.",
        "[7, 16, 576] torch.bfloat16 on cpu",
        "at most 6 tokens",
    ),
    # Tables and the cache.
    "block_tables=None": Fault(
        "block_tables",
        lambda: {"block_tables": None},
        "block_tables must be [B, width].",
        "None (NoneType)",
        "[B, width] int32",
    ),
    "block_tables a list": Fault(
        "block_tables",
        lambda: {"block_tables": [[0, 1], [2, 3]]},
        "block_tables must be [B, width].",
        "list of list of",
        "[B, width] int32",
    ),
    "block_tables of 1 dimension": Fault(
        "block_tables",
        lambda: {"block_tables": lens(0, 1, 2, 3)},
        "block_tables must be [B, width].",
        "[4] torch.int32 on cpu",
        "[B, width] int32",
    ),
    "block_tables of 3 dimensions": Fault(
        "block_tables",
        lambda: {"block_tables": torch.zeros(1, 2, 2, dtype=INT)},
        "block_tables must be [B, width].",
        "[1, 2, 2] torch.int32 on cpu",
        "[B, width] int32",
    ),
    "kv_cache=None": Fault(
        "kv_cache", lambda: {"kv_cache": None}, f"kv_cache must be {CACHE}.", "None", CACHE
    ),
    "kv_cache of 2 dimensions": Fault(
        "kv_cache",
        lambda: {"kv_cache": query(4, 576)},
        f"kv_cache must be {CACHE}.",
        "[4, 576] torch.bfloat16 on cpu",
        CACHE,
    ),
    "kv_cache of 5 dimensions": Fault(
        "kv_cache",
        lambda: {"kv_cache": query(1, 4, 1, 64, 576)},
        f"kv_cache must be {CACHE}.",
        "[1, 4, 1, 64, 576] torch.bfloat16 on cpu",
        CACHE,
    ),
    "s42 kv_cache without its rope part": Fault(
        "kv_cache",
        lambda: {"kv_cache": query(4, 64, 512)},
        "kv_cache must be [num_pages, 64, 576] or [num_pages, 1, 64, 576].",
        "[4, 64, 512] torch.bfloat16 on cpu",
        "a last dimension of 576",
        error=UnsupportedConfigError,
    ),
    "kv_cache with two heads": Fault(
        "kv_cache",
        lambda: {"kv_cache": query(4, 2, 64, 576)},
        "kv_cache must be [num_pages, 64, 576] or [num_pages, 1, 64, 576].",
        "[4, 2, 64, 576] torch.bfloat16 on cpu",
        "one head",
        error=UnsupportedConfigError,
    ),
    "kv_cache with pages of no token": Fault(
        "page_size",
        lambda: {"kv_cache": query(4, 0, 576)},
        "page_size must be an int of at least 1.",
        "page_size=0",
        "an int of at least 1",
        error=UnsupportedConfigError,
    ),
    "kv_cache on another device": Fault(
        "kv_cache",
        lambda: {"kv_cache": torch.zeros(4, 64, 576, dtype=BF16, device="meta")},
        "kv_cache must be torch.bfloat16 on cpu, each page contiguous, 16-byte aligned.",
        "[4, 64, 576] torch.bfloat16 on meta",
        "on cpu",
    ),
    "kv_cache with gaps in a page": Fault(
        "kv_cache",
        lambda: {"kv_cache": query(4, 128, 576)[:, ::2]},
        "kv_cache must be torch.bfloat16 on cpu, each page contiguous, 16-byte aligned.",
        "[4, 64, 576] torch.bfloat16 on cpu",
        "each page contiguous",
    ),
    "kv_cache with gaps in a row": Fault(
        "kv_cache",
        lambda: {"kv_cache": query(4, 64, 640)[:, :, :576]},
        "kv_cache must be torch.bfloat16 on cpu, each page contiguous, 16-byte aligned.",
        "[4, 64, 576] torch.bfloat16 on cpu",
        "each page contiguous",
    ),
    "kv_cache off its alignment": Fault(
        "kv_cache",
        lambda: {"kv_cache": shifted(query(4, 64, 576))},
        "kv_cache must be torch.bfloat16 on cpu, each page contiguous, 16-byte aligned.",
        "[4, 64, 576] torch.bfloat16 on cpu",
        "16-byte aligned",
    ),
    # A flat query's buffers are flat.
    "out of 4 dimensions for a flat query": Fault(
        "out",
        lambda: {"query": query(4, 16, 576), "out": query(*OUT)},
        "out must have shape [4, 16, 512], not [2, 2, 16, 512].",
        "[2, 2, 16, 512] torch.bfloat16 on cpu",
        "[4, 16, 512] torch.bfloat16 on cpu",
    ),
    "lse of 2 dimensions for a query of 4": Fault(
        "lse",
        lambda: {"lse": torch.zeros(4, 16), "return_lse": True},
        "lse must have shape [2, 2, 16], not [4, 16].",
        "[4, 16] torch.float32 on cpu",
        "[2, 2, 16] torch.float32 on cpu",
    ),
    "lse without return_lse": Fault(
        "lse",
        lambda: {"lse": torch.zeros(2, 2, 16)},
        "lse would not be written.",
        "[2, 2, 16] torch.float32 on cpu",
        "return_lse=True with an lse buffer",
        ("plain",),
    ),
    "rows of a wide table without a stride": Fault(
        "block_tables",
        lambda: {"block_tables": torch.zeros(2, 4, dtype=INT)[:, :2], "backend": "trtllm-gen"},
        "block_tables must be contiguous, not strides [4, 1].",
        "[2, 2] torch.int32 on cpu",
        "[2, 2] torch.int32 on cpu",
        ("plain",),
    ),
    # Not tensors.
    "dcp a number": Fault(
        "dcp",
        lambda: {"dcp": 8},
        "dcp must be a DCP.",
        "8 (int)",
        "DCP(world_size, rank, lengths)",
    ),
    "dcp a tuple": Fault(
        "dcp",
        lambda: {"dcp": (8, 3)},
        "dcp must be a DCP.",
        "tuple of 8 (int), 3 (int)",
        "DCP(world_size, rank, lengths)",
    ),
    "DCP without lengths": Fault(
        "causal_seqlens_kv_global",
        lambda: {"causal_seqlens_kv_global": None},
        "causal_seqlens_kv_global must be given with DCP.",
        "None (NoneType)",
        "[2] int32 on cpu, the global KV lengths",
        ("dcp",),
    ),
    "backend=None": Fault(
        "backend",
        lambda: {"backend": None},
        "backend must be a string.",
        "None (NoneType)",
        "a backend's name",
    ),
    "backend a list": Fault(
        "backend",
        lambda: {"backend": ["auto"]},
        "backend must be a string.",
        "list of 'auto' (str)",
        "a backend's name",
    ),
    "no such backend": Fault(
        "backend",
        lambda: {"backend": "fa3"},
        "backend='fa3' is not one of decode_mla's.",
        "'fa3'",
        "one of auto, trtllm-gen, cute-dsl, xqa, reference",
        error=UnsupportedConfigError,
    ),
    "s31 lse_base in FlashInfer's words": Fault(
        "lse_base",
        lambda: {"lse_base": "basee"},
        "lse_base must be 'e' or '2'.",
        "'basee'",
        "'e' (natural log) or '2' (log2)",
    ),
    "lse_base=2": Fault(
        "lse_base", lambda: {"lse_base": 2}, "lse_base must be 'e' or '2'.", "2.", "'e'"
    ),
    "sinks a list of two": Fault(
        "sinks",
        lambda: {"sinks": [torch.zeros(16)] * 2},
        "sinks must be a tensor [16] float32, or a list of one.",
        "list of [16] torch.float32 on cpu, [16] torch.float32 on cpu",
        "a tensor [16] float32, or a list of one",
        ("plain",),
    ),
    "sinks an empty list": Fault(
        "sinks",
        lambda: {"sinks": []},
        "sinks must be a tensor [16] float32, or a list of one.",
        "list of nothing",
        "a tensor [16] float32, or a list of one",
        ("plain",),
    ),
    "sinks a number": Fault(
        "sinks",
        lambda: {"sinks": 1.0},
        "sinks must be a tensor [16] float32, or a list of one.",
        "1.0 (float)",
        "a tensor [16] float32, or a list of one",
        ("plain",),
    ),
    "sinks a list of a number": Fault(
        "sinks",
        lambda: {"sinks": [1.0]},
        "sinks must be a tensor.",
        "1.0 (float)",
        "[16] torch.float32 on cpu",
        ("plain",),
    ),
    "s21 no output scale for an fp8 cache": Fault(
        "bmm2_scale",
        _fp8,
        "bmm2_scale must be given.",
        "None (NoneType)",
        "a scale for an fp8 cache, 1.0 if it was not scaled",
    ),
}


def on_meta() -> dict[str, Any]:
    return {"kv_cache": torch.zeros(4, 64, 576, dtype=BF16, device="meta")}


CASES = [
    pytest.param(fault, where, id=f"{name}, {where}")
    for name, fault in FAULTS.items()
    for where in fault.where
]


@pytest.mark.parametrize("where", ["plain", "dcp"])
def test_the_call_that_the_faults_are_put_into_is_right(where: str) -> None:
    right = Fault("", dict, "", "", "")
    for sm_count in (None, 148):
        error, done = refusal(right._replace(sm_count=sm_count), where)
        assert error is None
        assert "kernel" in done
    for name, (shape, dtype, places) in READ.items():
        if where in places:
            value = torch.zeros(shape, dtype=dtype)
            error, done = refusal(right._replace(changes=_with(name, value)), where)
            assert error is None, name
            assert "kernel" in done


@pytest.mark.parametrize(("fault", "where"), CASES)
def test_a_wrong_argument_is_named_before_anything_is_computed(fault: Fault, where: str) -> None:
    error, done = refusal(fault, where)
    assert type(error) is fault.error
    assert isinstance(error, FlashInferCompatError)
    assert error.summary == fault.summary
    assert error.argument == fault.argument
    assert fault.found in error.found
    assert fault.needed in error.needed
    assert done == []
    text = str(error)
    assert re.fullmatch(
        r"[^\n]+\.\nFound: [^\n]+\.\nNeeded: [^\n]+\.\nFix: [^\n]+\.(\nAlso: .*)*", text
    )
    assert re.search(r"(?<!\.)\.\.(?!\.)|tensor\(", text) is None
    assert not isinstance(error.value, Tensor)
    assert isinstance(error, ValueError)
    assert isinstance(error, RuntimeError)


TEXTS: dict[str, tuple[str, str]] = {
    "seq_lens in torch.int64": (
        "plain",
        "seq_lens must be torch.int32, not torch.int64.\n"
        "Found: seq_lens: [2] torch.int64 on cpu.\n"
        "Needed: [2] torch.int32 on cpu; the kernel reads it through a raw pointer.\n"
        "Fix: cast it once per step, not per layer: seq_lens.to(torch.int32).",
    ),
    "seq_lens=7": (
        "plain",
        "seq_lens must be a tensor.\n"
        "Found: seq_lens: 7 (int).\n"
        "Needed: [2] torch.int32 on cpu.\n"
        "Fix: pass a tensor.",
    ),
    "seq_lens of another batch": (
        "plain",
        "seq_lens must have shape [2], not [3].\n"
        "Found: seq_lens: [3] torch.int32 on cpu.\n"
        "Needed: [2] torch.int32 on cpu.\n"
        "Fix: pass the tensor of this batch.",
    ),
    "causal_seqlens_kv_global on another device": (
        "dcp",
        "causal_seqlens_kv_global is on meta, but the query is on cpu.\n"
        "Found: causal_seqlens_kv_global: [2] torch.int32 on meta.\n"
        "Needed: [2] torch.int32 on cpu.\n"
        "Fix: move it once per step to cpu.",
    ),
    "seq_lens off its alignment": (
        "plain",
        "seq_lens must start at a multiple of 16 bytes.\n"
        "Found: seq_lens: [2] torch.int32 on cpu.\n"
        "Needed: [2] torch.int32 on cpu, 16-byte aligned; this one is off by 4.\n"
        "Fix: give the kernel a tensor of its own (clone once per step), not a view into another.",
    ),
    "causal_seqlens_kv_global with gaps": (
        "dcp",
        "causal_seqlens_kv_global must be contiguous, not strides [2].\n"
        "Found: causal_seqlens_kv_global: [2] torch.int32 on cpu.\n"
        "Needed: [2] torch.int32 on cpu.\n"
        "Fix: give the kernel a tensor of its own (clone once per step), not a view into another.",
    ),
    "DCP without lengths": (
        "dcp",
        "causal_seqlens_kv_global must be given with DCP.\n"
        "Found: causal_seqlens_kv_global: None (NoneType).\n"
        "Needed: [2] int32 on cpu, the global KV lengths.\n"
        "Fix: pass the global lengths, the newest query token's key included.",
    ),
    "max_seq_len=True (bool), plain": (
        "plain",
        "max_seq_len must be an int of at least 1.\n"
        "Found: max_seq_len: True (bool).\n"
        "Needed: an int of at least 1.\n"
        "Fix: pass a host int, not a tensor; int(...) of it once per step.",
    ),
    "causal='yes'": (
        "plain",
        "causal must be a bool.\n"
        "Found: causal: 'yes' (str).\n"
        "Needed: True or False.\n"
        "Fix: pass one.",
    ),
    "query=None": (
        "plain",
        "query must be a tensor.\n"
        "Found: query: None (NoneType).\n"
        "Needed: [B, q_len, H, D].\n"
        "Fix: pass a tensor.",
    ),
    "query of 2 dimensions": (
        "plain",
        "query must be [B, q_len, H, D] or [num_tokens, H, D].\n"
        "Found: query: [2, 576] torch.bfloat16 on cpu.\n"
        "Needed: [B, q_len, H, D] or [num_tokens, H, D].\n"
        "Fix: reshape it.",
    ),
    "query without its rope part": (
        "plain",
        "query must have a last dimension of 576 (kv_lora_rank + qk_rope_head_dim).\n"
        "Found: query: [2, 2, 16, 512] torch.bfloat16 on cpu.\n"
        "Needed: a last dimension of 576 (kv_lora_rank + qk_rope_head_dim).\n"
        "Fix: join latent and rope parts.",
    ),
    "query off its alignment": (
        "plain",
        "query must have a unit stride in the last dimension and a 16-byte aligned start.\n"
        "Found: query: [2, 2, 16, 576] torch.bfloat16 on cpu.\n"
        "Needed: a unit stride in the last dimension and a 16-byte aligned start.\n"
        "Fix: give the kernel a tensor of its own (clone once per step), not a view into another.",
    ),
    "query of another batch": (
        "plain",
        "query has 3 requests, but block_tables has 2 rows.\n"
        "Found: query: [3, 2, 16, 576] torch.bfloat16 on cpu.\n"
        "Needed: 2 requests.\n"
        "Fix: pass the tensors of one batch.",
    ),
    "q_len is not max_q_len": (
        "plain",
        "query has q_len=2, but max_q_len=3.\n"
        "Found: query: [2, 2, 16, 576] torch.bfloat16 on cpu.\n"
        "Needed: q_len=3.\n"
        "Fix: drop max_q_len.",
    ),
    "a query of 4 dimensions with cum_seq_lens_q": (
        "plain",
        "query must be [num_tokens, H, D] with cum_seq_lens_q.\n"
        "Found: query: [2, 2, 16, 576] torch.bfloat16 on cpu.\n"
        "Needed: [num_tokens, H, D] with cum_seq_lens_q.\n"
        "Fix: flatten it, or drop cum_seq_lens_q.",
    ),
    "a flat query that does not divide": (
        "plain",
        "query has 5 tokens, which 2 requests cannot share evenly.\n"
        "Found: query: [5, 16, 576] torch.bfloat16 on cpu.\n"
        "Needed: num_tokens = B * q_len with B = block_tables.shape[0].\n"
        "Fix: pass cum_seq_lens_q and max_q_len for requests of different query lengths.",
    ),
    "cum_seq_lens_q without max_q_len": (
        "plain",
        "max_q_len must be given with cum_seq_lens_q.\n"
        "Found: max_q_len: None (NoneType).\n"
        "Needed: the largest query length, a host int: without it FlashInfer copies "
        "cum_seq_lens_q to the host.\n"
        "Fix: pass max_q_len=...",
    ),
    "more tokens than max_q_len allows": (
        "plain",
        "query has 7 tokens, more than 2 requests of max_q_len=3 hold.\n"
        "Found: query: [7, 16, 576] torch.bfloat16 on cpu.\n"
        "Needed: at most 6 tokens.\n"
        "Fix: pass the largest query length of the batch as max_q_len.",
    ),
    "block_tables=None": (
        "plain",
        "block_tables must be [B, width].\n"
        "Found: block_tables: None (NoneType).\n"
        "Needed: [B, width] int32.\n"
        "Fix: reshape it.",
    ),
    "kv_cache=None": (
        "plain",
        "kv_cache must be [num_pages, page_size, D] or [num_pages, 1, page_size, D].\n"
        "Found: kv_cache: None (NoneType).\n"
        "Needed: [num_pages, page_size, D] or [num_pages, 1, page_size, D].\n"
        "Fix: reshape it.",
    ),
    "s42 kv_cache without its rope part": (
        "plain",
        "kv_cache must be [num_pages, 64, 576] or [num_pages, 1, 64, 576].\n"
        "Found: kv_cache: [4, 64, 512] torch.bfloat16 on cpu.\n"
        "Needed: one head and a last dimension of 576 (kv_lora_rank + qk_rope_head_dim).\n"
        "Fix: pass the latent cache with its rope part, or the head dimensions that it has.",
    ),
    "kv_cache off its alignment": (
        "plain",
        "kv_cache must be torch.bfloat16 on cpu, each page contiguous, 16-byte aligned.\n"
        "Found: kv_cache: [4, 64, 576] torch.bfloat16 on cpu.\n"
        "Needed: torch.bfloat16 on cpu, each page contiguous, 16-byte aligned.\n"
        "Fix: pass the cache as it was allocated.",
    ),
    "lse without return_lse": (
        "plain",
        "lse would not be written.\n"
        "Found: lse: [2, 2, 16] torch.float32 on cpu.\n"
        "Needed: return_lse=True with an lse buffer.\n"
        "Fix: pass return_lse=True.",
    ),
    "dcp a number": (
        "plain",
        "dcp must be a DCP.\n"
        "Found: dcp: 8 (int).\n"
        "Needed: DCP(world_size, rank, lengths).\n"
        "Fix: build a DCP.",
    ),
    "backend=None": (
        "plain",
        "backend must be a string.\n"
        "Found: backend: None (NoneType).\n"
        "Needed: a backend's name.\n"
        "Fix: pass 'auto'.",
    ),
    "sinks an empty list": (
        "plain",
        "sinks must be a tensor [16] float32, or a list of one.\n"
        "Found: sinks: list of nothing.\n"
        "Needed: a tensor [16] float32, or a list of one.\n"
        "Fix: pass the one tensor.",
    ),
    "bmm1_scale=-0.1": (
        "plain",
        "bmm1_scale must be a positive finite float, or a float32 tensor of one element on the "
        "query's device.\n"
        "Found: bmm1_scale: -0.1 (float).\n"
        "Needed: a positive finite float, or a float32 tensor of one element on the query's "
        "device.\n"
        "Fix: pass float(...) of the scale.",
    ),
    "s21 no output scale for an fp8 cache": (
        "plain",
        "bmm2_scale must be given.\n"
        "Found: bmm2_scale: None (NoneType).\n"
        "Needed: a scale for an fp8 cache, 1.0 if it was not scaled.\n"
        "Fix: pass bmm_scales(...).bmm2_scale.",
    ),
    "skip_softmax_threshold_scale_factor=-1": (
        "plain",
        "skip_softmax_threshold_scale_factor must be a finite float of at least 0, or None.\n"
        "Found: skip_softmax_threshold_scale_factor: -1 (int).\n"
        "Needed: a finite float of at least 0, or None.\n"
        "Fix: leave it out to switch it off.",
    ),
    "workspace None, dcp": (
        "dcp",
        "workspace_buffer must be a contiguous torch.int8 or torch.uint8 tensor on cpu, 32-byte "
        "aligned.\n"
        "Found: workspace_buffer: None (NoneType).\n"
        "Needed: a contiguous torch.int8 or torch.uint8 tensor on cpu, 32-byte aligned.\n"
        "Fix: allocate it once, zeroed: torch.zeros(bytes, dtype=torch.int8, device=...).",
    ),
    "workspace too small for cute-dsl": (
        "dcp",
        "workspace_buffer is too small.\n"
        "Found: 19436543 bytes ([19436543] torch.int8 on cpu).\n"
        "Needed: 19436544 bytes for backend='cute-dsl' and this batch.\n"
        "Fix: allocate at least 19436544 bytes once.",
    ),
    "counters an int": (
        "plain",
        "multi_ctas_kv_counter_buffer must be a contiguous tensor on cpu, 16-byte aligned.\n"
        "Found: multi_ctas_kv_counter_buffer: 4096 (int).\n"
        "Needed: a contiguous tensor on cpu, 16-byte aligned.\n"
        "Fix: allocate counter_bytes(...) once, zeroed, as uint8.",
    ),
    "counters too small, 148 SMs": (
        "plain",
        "multi_ctas_kv_counter_buffer is too small.\n"
        "Found: 607 bytes ([607] torch.uint8 on cpu).\n"
        "Needed: 608 bytes for trtllm-gen's counters and this batch.\n"
        "Fix: allocate at least 608 bytes once.",
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_whole_message_of_each_check(name: str) -> None:
    where, text = TEXTS[name]
    error, _ = refusal(FAULTS[name], where)
    assert str(error) == text


def test_a_setting_of_a_wrong_type_is_refused_whether_or_not_a_right_call_came_before() -> None:
    """True == 1 and 512 == 512.0: a preparation kept under equal settings must not let them in."""
    wrongs: list[tuple[str, Any]] = [
        ("causal", 1),
        ("enable_pdl", 1),
        ("kv_lora_rank", 512.0),
        ("qk_rope_head_dim", 64.0),
        ("qk_nope_head_dim", 128.0),
    ]
    kernel = mock_kernel("0.7.4")
    with use_kernel(kernel, recorded("0.7.4")):
        for name, wrong in wrongs:
            given = call()
            decode_mla(**(given | {name: wrong == 1 or int(wrong)}))
            kernel.reset_mock()
            with pytest.raises(InvalidInputError, match=f"{name} must be") as raised:
                decode_mla(**(given | {name: wrong}))
            assert raised.value.argument == name
            kernel.assert_not_called()


@pytest.mark.parametrize(
    "name",
    ["causal", "return_lse", "enable_pdl", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"],
)
def test_a_setting_that_cannot_be_hashed_is_refused_by_its_name(name: str) -> None:
    with (
        use_kernel(mock_kernel("0.7.4"), recorded("0.7.4")),
        pytest.raises(InvalidInputError, match=f"{name} must be") as raised,
    ):
        decode_mla(**(call() | {name: [1]}))
    assert raised.value.argument == name


@pytest.mark.parametrize("name", ["dtype", "kv_dtype"])
def test_a_prepared_dtype_is_torchs(name: str) -> None:
    settings: dict[str, Any] = {"page_size": 64, "dtype": BF16, "bmm1_scale": 0.1, name: "bfloat16"}
    with (
        use_kernel(mock_kernel("0.7.4"), recorded("0.7.4")),
        pytest.raises(InvalidInputError, match=f"{name} must be a torch.dtype") as raised,
    ):
        prepare_decode_mla(**settings)
    assert str(raised.value) == (
        f"{name} must be a torch.dtype.\n"
        f"Found: {name}: 'bfloat16' (str).\n"
        "Needed: a torch.dtype.\n"
        "Fix: pass torch.bfloat16."
    )


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("kv_lora_rank", 0),
        ("kv_lora_rank", True),
        ("qk_rope_head_dim", -1),
        ("qk_nope_head_dim", None),
        ("causal", None),
        ("return_lse", None),
        ("return_lse", 0),
        ("enable_pdl", 0),
    ],
)
def test_a_prepared_decoder_refuses_a_setting_of_a_wrong_type(name: str, wrong: Any) -> None:
    settings: dict[str, Any] = {"page_size": 64, "dtype": BF16, "bmm1_scale": 0.1, name: wrong}
    with (
        use_kernel(mock_kernel("0.7.4"), recorded("0.7.4")),
        pytest.raises(InvalidInputError, match=f"{name} must be") as raised,
    ):
        prepare_decode_mla(**settings)
    assert raised.value.argument == name


STEP = (
    "query",
    "kv_cache",
    "block_tables",
    "seq_lens",
    "max_seq_len",
    "workspace_buffer",
)


@pytest.mark.parametrize("dcp", [False, True], ids=["plain", "dcp"])
@pytest.mark.parametrize("name", STEP)
@pytest.mark.parametrize("wrong", [None, "x", [1]], ids=repr)
def test_a_prepared_decoder_refuses_a_step_of_wrong_types(dcp: bool, name: str, wrong: Any) -> None:
    kernel, given = mock_kernel("0.7.4"), call()
    group: dict[str, Any] = {"dcp_world_size": 8, "dcp_rank": 3} if dcp else {}
    more: dict[str, Any] = {"causal_seqlens_kv_global": lens(55, 55)} if dcp else {}
    with use_kernel(kernel, recorded("0.7.4")):
        decoder = prepare_decode_mla(page_size=64, dtype=BF16, bmm1_scale=0.1, **group)
        decoder.run(*(given[key] for key in STEP), **more)
        kernel.reset_mock()
        given[name] = wrong
        with pytest.raises(InvalidInputError, match=f"{name} must be") as raised:
            decoder.run(*(given[key] for key in STEP), **more)
    assert raised.value.argument == name
    kernel.assert_not_called()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float8_e4m3fn])
def test_a_prepared_decoder_refuses_a_query_of_another_dtype(dtype: torch.dtype) -> None:
    """FlashInfer asserts it or picks another kernel; the preparation was checked for bf16."""
    kernel, given = mock_kernel("0.7.4"), call()
    with use_kernel(kernel, recorded("0.7.4")):
        decoder = prepare_decode_mla(page_size=64, dtype=BF16, bmm1_scale=0.1)
        given["query"] = given["query"].to(dtype)
        with pytest.raises((InvalidInputError, UnsupportedConfigError), match=str(dtype)) as raised:
            decoder.run(*(given[key] for key in STEP))
    assert raised.value.argument == "query"
    kernel.assert_not_called()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float8_e4m3fn])
def test_a_prepared_decoder_refuses_a_cache_of_another_dtype(dtype: torch.dtype) -> None:
    kernel, given = mock_kernel("0.7.4"), call()
    with use_kernel(kernel, recorded("0.7.4")):
        decoder = prepare_decode_mla(page_size=64, dtype=BF16, bmm1_scale=0.1)
        given["kv_cache"] = given["kv_cache"].to(dtype)
        with pytest.raises(InvalidInputError, match=r"kv_cache must be torch\.bfloat16") as raised:
            decoder.run(*(given[key] for key in STEP))
    assert raised.value.argument == "kv_cache"
    kernel.assert_not_called()


def test_a_prepared_decoder_needs_the_global_lengths_with_dcp() -> None:
    given = call()
    with use_kernel(mock_kernel("0.7.4"), recorded("0.7.4")):
        decoder = prepare_decode_mla(
            page_size=64, dtype=BF16, bmm1_scale=0.1, dcp_world_size=8, dcp_rank=3
        )
        with pytest.raises(InvalidInputError, match="must be given with DCP"):
            decoder.run(*(given[key] for key in STEP))


def test_a_tensor_that_has_no_memory_to_point_at_is_refused_by_its_name() -> None:
    sparse = lens(7, 7).to_sparse()
    with (
        use_kernel(mock_kernel("0.7.4"), recorded("0.7.4")),
        pytest.raises(InvalidInputError, match="seq_lens") as raised,
    ):
        decode_mla(**call(seq_lens=sparse))
    assert raised.value.argument == "seq_lens"


def test_lengths_at_4_bytes_and_rows_of_a_wide_table_are_read_where_the_kernel_can() -> None:
    """The compiled cute-dsl kernel wants 4 bytes of these, and knows a table's row stride."""
    kernel = mock_kernel("0.7.4")
    wide = torch.zeros(2, 4, dtype=INT)[:, :2]
    with use_kernel(kernel, recorded("0.7.4")):
        decode_mla(**call(block_tables=wide), dcp=DCP(8, 3, shifted(lens(55, 55))))
        assert kernel.call_args.kwargs["block_tables"] is wide
        compact = COMPACT | {"cum_seq_lens_q": shifted(lens(0, 1, 4))}
        decode_mla(**call(**compact), dcp=dcp_of())
    assert kernel.call_count == 2


def test_max_q_len_asserts_a_uniform_query_and_passes_where_it_is_one() -> None:
    kernel = mock_kernel("0.7.4")
    with use_kernel(kernel, recorded("0.7.4")):
        for shape in ((4, 16, 576), (2, 2, 16, 576)):
            decode_mla(**call(query=query(*shape)), max_q_len=2)
            assert kernel.call_args.kwargs["query"].shape == (2, 2, 16, 576)
            assert "max_q_len" not in kernel.call_args.kwargs


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, BF16])
def test_auto_refuses_a_workspace_that_one_of_its_two_backends_refuses(dtype: torch.dtype) -> None:
    """A tuned auto may pick cute-dsl, which takes bytes only, on any later call."""
    kernel = mock_kernel("0.7.4")
    with (
        use_kernel(kernel, recorded("0.7.4")),
        pytest.raises(InvalidInputError, match="workspace_buffer must be") as raised,
    ):
        decode_mla(**call(workspace_buffer=torch.zeros(1 << 20, dtype=dtype)))
    assert raised.value.argument == "workspace_buffer"
    kernel.assert_not_called()


@pytest.mark.parametrize(
    "name", ["block_tables", "seq_lens", "workspace_buffer", "causal_seqlens_kv_global"]
)
@pytest.mark.parametrize("kept", [False, True], ids=["freed before", "kept"])
@pytest.mark.parametrize("wrong", ["None", "int64", "another device"])
def test_a_tensor_that_passed_does_not_let_its_successor_through(
    name: str, kept: bool, wrong: str
) -> None:
    kernel = mock_kernel("0.7.4")
    given = call() | {"lengths": lens(55, 55)}
    key = "lengths" if name == "causal_seqlens_kv_global" else name
    with use_kernel(kernel, recorded("0.7.4")):

        def decode() -> None:
            arguments = dict(given)
            decode_mla(dcp=DCP(8, 3, arguments.pop("lengths")), **arguments)

        decode()
        decode()
        kernel.reset_mock()
        right = given[key]
        if wrong == "None":
            given[key] = None
        else:
            given[key] = (
                right.long() if wrong == "int64" else torch.empty_like(right, device="meta")
            )
        if not kept:
            del right
        with pytest.raises(InvalidInputError, match=name) as raised:
            decode()
    assert raised.value.argument == name
    kernel.assert_not_called()


@pytest.mark.parametrize("name", ["workspace_buffer", "multi_ctas_kv_counter_buffer"])
def test_what_a_backend_does_not_take_may_be_anything(name: str) -> None:
    with use_kernel(mock_kernel("0.7.4"), recorded("0.7.4")):
        decode_mla(**(call(backend="reference") | {name: 7}))


NO_COUNTS = [0, -1, True, False, 2.0, np.int64(8), "8", None, [8], torch.tensor(8)]


@pytest.mark.parametrize("value", NO_COUNTS, ids=lambda value: f"{type(value).__name__} {value}")
@pytest.mark.parametrize("name", ["world_size", "interleave_size"])
def test_dcp_is_built_with_counts_that_are_ints(name: str, value: Any) -> None:
    sizes: dict[str, Any] = {"world_size": 8, "interleave_size": 1} | {name: value}
    with pytest.raises(InvalidInputError, match=f"^{name}.* must be an int") as raised:
        DCP(rank=0, causal_seqlens_kv_global=lens(55, 55), **sizes)
    assert raised.value.argument == name
    assert "at least 1" in raised.value.needed
    assert type(value).__name__ in raised.value.found
    assert "tensor(" not in str(raised.value)
    with (
        use_kernel(mock_kernel("0.7.4"), recorded("0.7.4")),
        pytest.raises(InvalidInputError, match=f"{name}.* must be an int") as prepare,
    ):
        prepare_decode_mla(
            page_size=64,
            dtype=BF16,
            bmm1_scale=0.05,
            dcp_world_size=sizes["world_size"],
            interleave_size=sizes["interleave_size"],
        )
    assert prepare.value.found == raised.value.found


@pytest.mark.parametrize(
    "value",
    [-1, 8, 9, True, False, 1.0, np.int64(1), "1", None],
    ids=lambda value: f"{type(value).__name__} {value}",
)
def test_dcp_is_built_with_a_rank_of_its_group(value: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^rank \(FlashInfer: cp_rank\)") as raised:
        DCP(8, value, lens(55, 55))
    fix = (
        "pass the value of this process's own DCP group."
        if type(value) is int
        else "pass int(...) of the group's value."
    )
    assert str(raised.value) == (
        "rank (FlashInfer: cp_rank) must be an int in [0, 8).\n"
        f"Found: {value!r} ({type(value).__name__}).\n"
        "Needed: an int in [0, 8); bool and NumPy integers are not taken.\n"
        f"Fix: {fix}"
    )
    assert raised.value.argument == "rank"


def test_dcp_leaves_its_lengths_to_the_call() -> None:
    anything: Any = "no tensor"
    assert DCP(8, 3, anything).causal_seqlens_kv_global is anything


@pytest.mark.parametrize("dims", [3, 4])
def test_a_prepared_decoder_refuses_a_cache_of_other_pages(dims: int) -> None:
    cache = query(8, 32, 576) if dims == 3 else query(8, 1, 32, 576)
    given = call(kv_cache=cache)
    kernel = mock_kernel("0.7.4")
    with use_kernel(kernel, recorded("0.7.4")):
        decoder = prepare_decode_mla(page_size=64, dtype=BF16, bmm1_scale=0.05)
        with pytest.raises(InvalidInputError, match="must have pages of 64 tokens") as raised:
            decoder.run(*(given[key] for key in STEP))
    kernel.assert_not_called()
    assert raised.value.argument == "kv_cache"
    assert raised.value.fix == "prepare another decoder."


def test_flashinfers_own_code_is_not_called_with_tensors_of_a_cpu() -> None:
    kernel = mock_kernel("0.7.4")
    previous = install_kernel(Binding(kernel, recorded("0.7.4"), genuine=True))
    try:
        with pytest.raises(InvalidInputError, match="where FlashInfer has no kernel") as raised:
            decode_mla(**call())
        kernel.assert_not_called()
        with gpu():
            decode_mla(**call())
    finally:
        install_kernel(previous)
    kernel.assert_called_once()
    assert str(raised.value) == (
        "query is on cpu, where FlashInfer has no kernel.\n"
        "Found: query: [2, 1, 16, 576] torch.bfloat16 on cpu.\n"
        "Needed: CUDA tensors.\n"
        "Fix: move the tensors to a GPU, or pass backend='reference'."
    )


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"kv_cache": query(4, 3, 64, 576)[:, 1]}, id="a layer of a pool"),
        pytest.param({"kv_cache": query(5, 64, 576)[1:]}, id="some of the pages"),
        pytest.param({"query": query(2, 1, 32, 576)[:, :, 16:]}, id="half the heads"),
        pytest.param({"query": query(3, 1, 16, 576)[1:]}, id="some of the requests"),
        pytest.param({"sinks": [torch.zeros(16)]}, id="a list of one tensor of sinks"),
        pytest.param({"sinks": (torch.zeros(16),)}, id="a tuple of one tensor of sinks"),
        pytest.param(
            {"workspace_buffer": torch.zeros(1 << 20, dtype=torch.int8)[32:]},
            id="the rest of a workspace",
        ),
    ],
)
def test_views_that_the_kernel_can_read_are_passed_on_as_they_are(changes: dict[str, Any]) -> None:
    kernel = mock_kernel("0.7.4")
    with use_kernel(kernel, recorded("0.7.4")):
        decode_mla(**call(**changes))
    for name, value in changes.items():
        expected = value if isinstance(value, Tensor) else value[0]
        assert kernel.call_args.kwargs[name].data_ptr() == expected.data_ptr()
