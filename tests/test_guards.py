"""`check` and the call: the same reasons and the same class, without a tensor or a GPU."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

from fi_dcp_compat import (
    DCP,
    FlashInferABI,
    FlashInferCompatError,
    FlashInferSignatureError,
    FlashInferVersionError,
    InvalidInputError,
    Parameter,
    UnsupportedConfigError,
    check,
    decode_mla,
    preparation,
    prepare_decode_mla,
    recorded,
    supports_combination,
)
from fi_dcp_compat.errors import raise_first
from fi_dcp_compat.features import FEATURES
from fi_dcp_compat.limits import LIMITS
from fi_dcp_compat.testing import use_kernel
from tests.support import RELEASES, call, signature, stub_result

Config = dict[str, Any]

# A configuration that every backend but xqa runs on every release, in `check`'s keywords; what is
# behind the first value of each is tried in its place.
CHOICES: dict[str, tuple[Any, ...]] = {
    "num_heads": (16, 1, 8, 24, 40, 48, 64, 65, 96, 128, 129, 192, 256),
    "q_len": (1, 2, 4, 5),
    "page_size": (64, 1, 2, 16, 32, 48, 128, 256),
    "dtypes": (
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
        ("float8_e4m3fn", "float8_e4m3fn"),
        ("float32", "float32"),
        ("float8_e5m2", "float8_e5m2"),
        ("bfloat16", "float8_e4m3fn"),
        ("float16", "bfloat16"),
        ("bfloat16", "uint8"),
    ),
    "dcp_world_size": (1, 2, 8),
    "causal": (True, False),
    "varlen": (False, True),
    "return_lse": (False, True),
    "sinks": (False, True),
    "skip_softmax": (False, True),
    "tensor_scales": (False, True),
    "dims": ((512, 64), (256, 64), (128, 32)),
    "extra_width": (0, 1),
    "compute_capability": (
        None,
        (10, 0),
        (10, 3),
        (10, 7),
        (8, 0),
        (9, 0),
        (10, 1),
        (11, 0),
        (12, 0),
        (12, 1),
    ),
}
BACKENDS = ("auto", "trtllm-gen", "cute-dsl", "xqa", "reference", "sparse")


def config_of(backend: str = "auto", **chosen: Any) -> Config:
    """Keywords of `check` for a choice of `CHOICES`; the other values are right ones."""
    values = {name: choices[0] for name, choices in CHOICES.items()} | chosen
    dtype, kv_dtype = values.pop("dtypes")
    kv_lora_rank, qk_rope_head_dim = values.pop("dims")
    width = max(1, 128 // values["page_size"]) + values.pop("extra_width")
    return values | {
        "backend": backend,
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        "kv_lora_rank": kv_lora_rank,
        "qk_rope_head_dim": qk_rope_head_dim,
        "block_table_width": width,
        "batch": 2,
    }


@functools.cache
def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor that nobody writes to, so that thousands of calls need not make one each."""
    return torch.zeros(*shape).to(dtype)


def decode_arguments(config: Mapping[str, Any], rank: int = 0) -> dict[str, Any]:
    """Tensors of that configuration, as `decode_mla` takes them."""
    batch, q_len, heads = config["batch"], config["q_len"], config["num_heads"]
    dim = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    rows = (batch * q_len, heads) if config["varlen"] else (batch, q_len, heads)
    kv_dtype = getattr(torch, config["kv_dtype"])
    arguments: dict[str, Any] = {
        "query": zeros(dim, dtype=getattr(torch, config["dtype"])).expand(*rows, dim),
        "kv_cache": zeros(2, config["page_size"], dim, dtype=kv_dtype),
        "workspace_buffer": zeros(32 << 20, dtype=torch.int8),
        "block_tables": zeros(batch, config["block_table_width"], dtype=torch.int32),
        "seq_lens": torch.full((batch,), 7, dtype=torch.int32),
        "max_seq_len": 7,
        "bmm1_scale": torch.tensor(0.05) if config["tensor_scales"] else 0.05,
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_rope_head_dim": config["qk_rope_head_dim"],
        "causal": config["causal"],
        "backend": config["backend"],
        "return_lse": config["return_lse"],
    }
    if kv_dtype is torch.float8_e4m3fn:
        arguments["bmm2_scale"] = 1.0
    if config["varlen"]:
        arguments["cum_seq_lens_q"] = torch.arange(batch + 1, dtype=torch.int32) * q_len
        arguments["max_q_len"] = q_len
    if config["sinks"]:
        arguments["sinks"] = torch.zeros(heads)
    if config["skip_softmax"]:
        arguments["skip_softmax_threshold_scale_factor"] = 1e-3
    if config["dcp_world_size"] > 1:
        lens = torch.full((batch,), 7 * config["dcp_world_size"], dtype=torch.int32)
        arguments["dcp"] = DCP(config["dcp_world_size"], rank, lens)
    return arguments


signature_of = functools.cache(signature)


@contextmanager
def gpu(capability: tuple[int, int] = (10, 0), sm_count: int = 148) -> Iterator[None]:
    """Let CPU tensors pass for tensors on such a GPU."""
    facts = functools.cache(lambda device: preparation._Gpu(capability, sm_count))
    with (
        patch.object(preparation, "_gpu", facts),
        patch.object(torch.Tensor, "is_cuda", property(lambda self: True), create=True),
    ):
        yield


def attempt(
    abi: FlashInferABI, config: Mapping[str, Any], rank: int = 0
) -> FlashInferCompatError | None:
    """Call `decode_mla` so configured; return what it raised, before the kernel was called."""
    calls: list[dict[str, Any]] = []
    takes = signature_of(abi)

    def kernel(**arguments: Any) -> Any:
        takes.bind(**arguments)
        calls.append(arguments)
        return stub_result(**arguments)

    with ExitStack() as stack:
        if config["compute_capability"] is not None:
            stack.enter_context(gpu(config["compute_capability"]))
        stack.enter_context(use_kernel(kernel, abi))
        try:
            decode_mla(**decode_arguments(config, rank))
        except FlashInferCompatError as error:
            assert calls == []
            return error
    assert len(calls) == (config["backend"] != "reference")
    return None


def assert_parity(abi: FlashInferABI, config: Mapping[str, Any]) -> bool:
    """Hold the call against `check`; return whether the configuration runs."""
    reasons = check(abi, **config)
    error = attempt(abi, config)
    if error is None:
        assert reasons == (), f"check refuses what runs: {config} on {abi.version}"
    else:
        assert error.reasons == reasons, f"{config} on {abi.version}"
        assert type(error) is reasons[0].error
        assert str(error).startswith(str(reasons[0]))
        assert error.argument == reasons[0].argument
    return error is None


class Fault(NamedTuple):
    """One wrong thing in a right configuration, and the whole message that it gets."""

    abi: str
    changes: Mapping[str, Any]
    error: type[FlashInferCompatError]
    summary: str
    found: str
    needed: str
    fix: str
    also: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        lines = (self.summary, f"Found: {self.found}", f"Needed: {self.needed}", f"Fix: {self.fix}")
        return "\n".join((*lines, *(f"Also: {summary}" for summary in self.also)))


def without(version: str, *names: str) -> FlashInferABI:
    """A release whose function lost those parameters."""
    abi = recorded(version)
    return abi._replace(parameters=tuple(p for p in abi.parameters if p.name not in names))


SPECIAL = {
    "0.6.16 with 0.6.17's signature": recorded("0.6.17")._replace(version="0.6.16"),
    "unknown with 0.6.16's signature": recorded("0.6.16")._replace(version="0.0.0+unknown"),
    "unknown with 0.7.0's signature": recorded("0.7.0")._replace(version="0.0.0+unknown"),
    "unknown with 0.7.1's signature": recorded("0.7.1")._replace(version="0.0.0+unknown"),
    "0.6.17.dev20260801 with 0.6.16's signature": recorded("0.6.16")._replace(
        version="0.6.17.dev20260801"
    ),
    "0.6.16.dev20260731 with 0.6.17's signature": recorded("0.6.17")._replace(
        version="0.6.16.dev20260731"
    ),
    "0.6.16 with companions": recorded("0.6.16")._replace(
        companions=(("flashinfer-cubin", "0.6.13"),)
    ),
    "0.7.4 without cp_rank": without("0.7.4", "cp_rank"),
    "0.7.4 without seq_lens": without("0.7.4", "seq_lens"),
    "0.7.4 with kv_layout": recorded("0.7.4")._replace(
        parameters=(*recorded("0.7.4").parameters, Parameter("kv_layout", None, "KEYWORD_ONLY")),
    ),
    "a MagicMock": recorded("0.7.4")._replace(parameters=(), unreadable="MagicMock: no signature"),
}


def abi_of(name: str) -> FlashInferABI:
    return SPECIAL[name] if name in SPECIAL else recorded(name)


FAULTS: dict[str, Fault] = {
    "older than any release with an LSE": Fault(
        "0.6.11",
        {},
        FlashInferVersionError,
        "decode_mla needs FlashInfer's LSE.",
        "flashinfer-python 0.6.11, whose function lacks lse, return_lse.",
        "0.6.12 or newer (#3116).",
        'pip install -U "flashinfer-python>=0.6.12", or call fi_dcp_compat.dropin, which hands '
        "older releases what they take.",
    ),
    "older than native DCP": Fault(
        "0.6.16",
        {"dcp_world_size": 8},
        FlashInferVersionError,
        "decode_mla(dcp=...) needs FlashInfer's native DCP keywords.",
        "flashinfer-python 0.6.16, whose function lacks enable_dcp, cp_world, cp_rank, "
        "causal_seqlens_kv_global.",
        "0.6.17 or newer (#4178).",
        'pip install -U "flashinfer-python>=0.6.17", or call with dcp=None.',
    ),
    "older than compact queries with DCP": Fault(
        "0.6.18",
        {"dcp_world_size": 8, "varlen": True},
        FlashInferVersionError,
        "decode_mla(dcp=..., cum_seq_lens_q=...) needs FlashInfer's compact "
        "variable-length queries with DCP.",
        "flashinfer-python 0.6.18.",
        "0.7.0 or newer (#4719).",
        'pip install -U "flashinfer-python>=0.7.0", or pad to a uniform query [B, q_len, H, D], '
        "each request's tokens last.",
    ),
    "no such backend": Fault(
        "0.7.4",
        {"backend": "sparse"},
        UnsupportedConfigError,
        "backend='sparse' is not one of decode_mla's.",
        "'sparse'.",
        "one of auto, trtllm-gen, cute-dsl, xqa, reference.",
        "name one of those; sparse MLA and packed caches need FlashInfer's own function.",
    ),
    "no head": Fault(
        "0.7.4",
        {"num_heads": 0},
        UnsupportedConfigError,
        "num_heads must be an int of at least 1.",
        "num_heads=0.",
        "an int of at least 1.",
        "pass the num_heads of the call.",
    ),
    "trtllm-gen with DCP": Fault(
        "0.7.4",
        {"backend": "trtllm-gen", "dcp_world_size": 2},
        UnsupportedConfigError,
        "backend='trtllm-gen' has no DCP mask.",
        "backend='trtllm-gen' with dcp_world_size=2.",
        "backend='cute-dsl', the only one with a native DCP mask (0.6.17 or newer).",
        "pass backend='auto' or 'cute-dsl'; another backend's ranks can be merged "
        "outside the kernel for one query token only.",
    ),
    "xqa with DCP": Fault(
        "0.7.4",
        {"backend": "xqa", "dcp_world_size": 2},
        UnsupportedConfigError,
        "backend='xqa' has no DCP mask.",
        "backend='xqa' with dcp_world_size=2.",
        "backend='cute-dsl', the only one with a native DCP mask (0.6.17 or newer).",
        "pass backend='auto' or 'cute-dsl'; another backend's ranks can be merged "
        "outside the kernel for one query token only.",
    ),
    "non-causal with DCP": Fault(
        "0.7.4",
        {"causal": False, "q_len": 2, "dcp_world_size": 8},
        UnsupportedConfigError,
        "A non-causal block cannot be masked with DCP.",
        "causal=False with dcp_world_size=8.",
        "causal=True: FlashInfer's DCP mask is causal in every known release.",
        "flatten the block with flatten_query_rows: one-token rows, each with its own "
        "bound, are ordinary causal calls.",
    ),
    "sinks with DCP": Fault(
        "0.7.4",
        {"sinks": True, "dcp_world_size": 8},
        UnsupportedConfigError,
        "sinks cannot be combined with DCP.",
        "sinks with dcp_world_size=8.",
        "no sinks: the only kernel with a DCP mask does not take it.",
        "leave sinks out, or call with dcp=None.",
    ),
    "skip-softmax with DCP": Fault(
        "0.7.4",
        {"skip_softmax": True, "dcp_world_size": 8},
        UnsupportedConfigError,
        "skip_softmax_threshold_scale_factor cannot be combined with DCP.",
        "skip_softmax_threshold_scale_factor with dcp_world_size=8.",
        "no skip_softmax_threshold_scale_factor: the only kernel with a DCP mask does not take it.",
        "leave skip_softmax_threshold_scale_factor out, or call with dcp=None.",
    ),
    "a GPU without any kernel": Fault(
        "0.7.4",
        {"compute_capability": (9, 0)},
        UnsupportedConfigError,
        "backend='auto' has no kernel for compute capability 9.0.",
        "compute capability 9.0.",
        "10.x (trtllm-gen, cute-dsl) or 12.x (xqa).",
        "run on such a GPU, or pass backend='reference' in tests.",
    ),
    "a backport of the keywords": Fault(
        "0.6.16 with 0.6.17's signature",
        {"dcp_world_size": 8},
        FlashInferVersionError,
        "decode_mla(dcp=...) needs FlashInfer's native DCP keywords.",
        "flashinfer-python 0.6.16, which carries enable_dcp, cp_world, cp_rank, "
        "causal_seqlens_kv_global but is older.",
        "0.6.17 or newer (#4178).",
        'pip install -U "flashinfer-python>=0.6.17", or set '
        "FI_DCP_COMPAT_ASSUME_VERSION to the release whose behaviour was ported, or "
        "call with dcp=None.",
    ),
    "unknown version, no DCP keywords": Fault(
        "unknown with 0.6.16's signature",
        {"dcp_world_size": 8},
        FlashInferVersionError,
        "decode_mla(dcp=...) needs FlashInfer's native DCP keywords.",
        "flashinfer-python of unknown version (0.0.0+unknown), whose function lacks "
        "enable_dcp, cp_world, cp_rank, causal_seqlens_kv_global.",
        "0.6.17 or newer (#4178).",
        'pip install -U "flashinfer-python>=0.6.17", or call with dcp=None.',
    ),
    "unknown version, compact queries with DCP": Fault(
        "unknown with 0.7.0's signature",
        {"dcp_world_size": 8, "varlen": True},
        FlashInferVersionError,
        "decode_mla(dcp=..., cum_seq_lens_q=...) needs FlashInfer's compact "
        "variable-length queries with DCP.",
        "flashinfer-python of unknown version (0.0.0+unknown), whose signature does not show it.",
        "0.7.0 or newer (#4719).",
        'pip install -U "flashinfer-python>=0.7.0", or set '
        "FI_DCP_COMPAT_ASSUME_VERSION to the release it stands for, or pad to a "
        "uniform query [B, q_len, H, D], each request's tokens last.",
    ),
    "a nightly without the keywords": Fault(
        "0.6.17.dev20260801 with 0.6.16's signature",
        {"dcp_world_size": 8},
        FlashInferVersionError,
        "decode_mla(dcp=...) needs FlashInfer's native DCP keywords.",
        "flashinfer-python 0.6.17.dev20260801 (a pre-release, judged by its "
        "signature), whose function lacks enable_dcp, cp_world, cp_rank, "
        "causal_seqlens_kv_global.",
        "0.6.17 or newer (#4178).",
        'pip install -U "flashinfer-python>=0.6.17", or call with dcp=None.',
    ),
    "companion wheels": Fault(
        "0.6.16 with companions",
        {"dcp_world_size": 8},
        FlashInferVersionError,
        "decode_mla(dcp=...) needs FlashInfer's native DCP keywords.",
        "flashinfer-python 0.6.16, whose function lacks enable_dcp, cp_world, cp_rank, "
        "causal_seqlens_kv_global.",
        "0.6.17 or newer (#4178).",
        'pip install -U "flashinfer-python>=0.6.17" (and flashinfer-cubin of the same '
        "version), or call with dcp=None.",
    ),
    "a lost DCP keyword": Fault(
        "0.7.4 without cp_rank",
        {"dcp_world_size": 8},
        FlashInferSignatureError,
        "decode_mla(dcp=...) needs FlashInfer's native DCP keywords.",
        "flashinfer-python 0.7.4, whose function lacks cp_rank.",
        "a function with enable_dcp, cp_world, cp_rank, causal_seqlens_kv_global, as "
        "0.6.17 and newer have.",
        'pip install --force-reinstall "flashinfer-python==0.7.4" if it was patched, or install '
        "another release from 0.6.17 on, or call with dcp=None.",
    ),
    "a lost core keyword": Fault(
        "0.7.4 without seq_lens",
        {},
        FlashInferSignatureError,
        "trtllm_batch_decode_with_kv_cache_mla has lost seq_lens.",
        "flashinfer-python 0.7.4: (query, kv_cache, workspace_buffer, "
        "qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, max_seq_len, "
        "sparse_mla_top_k, out, bmm1_scale, bmm2_scale, sinks, "
        "skip_softmax_threshold_scale_factor, enable_pdl, backend, is_var_seq, "
        "uses_shared_paged_kv_idx, lse, return_lse, cute_dsl_impl, kv_scale_format, "
        "cum_seq_lens_q, max_q_len, multi_ctas_kv_counter_buffer, "
        "sparse_mla_top_k_lens, enable_dcp, cp_world, cp_rank, "
        "causal_seqlens_kv_global, use_fp16_softmax, return_lse_base).",
        "the parameters of a recorded release, and no further required ones.",
        "install a flashinfer-python that fi-dcp-compat records, or update fi-dcp-compat.",
    ),
    "a new required parameter": Fault(
        "0.7.4 with kv_layout",
        {},
        FlashInferSignatureError,
        "trtllm_batch_decode_with_kv_cache_mla newly requires kv_layout.",
        "flashinfer-python 0.7.4: (query, kv_cache, workspace_buffer, "
        "qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens, "
        "max_seq_len, sparse_mla_top_k, out, bmm1_scale, bmm2_scale, sinks, "
        "skip_softmax_threshold_scale_factor, enable_pdl, backend, is_var_seq, "
        "uses_shared_paged_kv_idx, lse, return_lse, cute_dsl_impl, kv_scale_format, "
        "cum_seq_lens_q, max_q_len, multi_ctas_kv_counter_buffer, "
        "sparse_mla_top_k_lens, enable_dcp, cp_world, cp_rank, "
        "causal_seqlens_kv_global, use_fp16_softmax, return_lse_base, kv_layout).",
        "the parameters of a recorded release, and no further required ones.",
        "install a flashinfer-python that fi-dcp-compat records, or update fi-dcp-compat.",
    ),
    "an unreadable signature": Fault(
        "a MagicMock",
        {},
        FlashInferVersionError,
        "decode_mla cannot tell what this kernel takes.",
        "a kernel whose signature cannot be read (MagicMock: no signature).",
        "FlashInfer's function, or a mock that carries its signature.",
        'use fi_dcp_compat.testing.mock_kernel("0.6.17"), or say what yours stands for: '
        'use_kernel(mock, recorded("0.6.17")).',
    ),
}


def grid(seed: int, size: int) -> list[tuple[str, str, Config]]:
    """Draw releases, backends and configurations, most of their values right ones."""
    rng = random.Random(seed)
    drawn = []
    for _ in range(size):
        right = rng.choice((0.6, 0.8, 0.92))
        chosen = {
            name: values[0] if rng.random() < right else rng.choice(values)
            for name, values in CHOICES.items()
        }
        backend = rng.choice(BACKENDS)
        release = rng.choice(("0.6.11", *RELEASES, *SPECIAL))
        drawn.append((release, backend, config_of(backend, **chosen)))
    return drawn


def test_check_gives_exactly_the_reasons_of_the_call_over_a_grid() -> None:
    drawn = grid(seed=0, size=600)
    ran = [assert_parity(abi_of(release), config) for release, _, config in drawn]
    assert 150 < sum(ran) < 450  # a grid that refuses all or nothing would show nothing


@pytest.mark.parametrize("version", ["0.6.11", *RELEASES])
@pytest.mark.parametrize("dcp_world_size", [1, 8])
def test_check_gives_exactly_the_reasons_of_the_call_for_each_single_change(
    version: str, dcp_world_size: int
) -> None:
    changes: list[Config] = [{}]
    changes += [{name: value} for name, values in CHOICES.items() for value in values[1:]]
    backends = BACKENDS if version == "0.7.4" else ("auto", "cute-dsl", "trtllm-gen")
    for backend in backends:
        for change in changes:
            config = config_of(backend, **({"dcp_world_size": dcp_world_size} | change))
            assert_parity(recorded(version), config)


@pytest.mark.parametrize(
    ("num_heads", "batch", "runs"),
    [
        pytest.param(128, 65535, True, id="as many tiles as CUDA has"),
        pytest.param(128, 65536, False, id="one tile more"),
        pytest.param(129, 40000, False, id="two tiles a request"),
        pytest.param(1024, 9000, False, id="eight tiles a request"),
    ],
)
def test_check_knows_the_largest_batch_as_the_call_does(
    num_heads: int, batch: int, runs: bool
) -> None:
    config = config_of("cute-dsl", num_heads=num_heads) | {"batch": batch}
    reasons = check(recorded("0.7.4"), **config)
    assert (reasons == ()) == runs
    if not runs:
        error = attempt(recorded("0.7.4"), config)
        assert error is not None
        assert error.reasons == reasons
        assert reasons[-1].argument == "query"


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_refusal_says_all_of_this(fault: Fault) -> None:
    assert_refused(fault)


def assert_refused(fault: Fault) -> None:
    """Render the message of `check`, of the call and of one on another rank; all are the same."""
    abi, config = abi_of(fault.abi), config_of(**fault.changes)
    reasons = check(abi, **config)
    with pytest.raises(fault.error, match=re.escape(fault.summary)) as raised:
        raise_first(reasons)
    assert str(raised.value) == fault.text
    for rank in range(config["dcp_world_size"]):
        error = attempt(abi, config, rank)
        assert type(error) is fault.error
        assert str(error) == fault.text


def suggestions(fix: str) -> list[str]:
    """Backends that a fix tells to pass."""
    named = re.findall(r"(?:backend=|or )'([a-z-]+)'", fix)
    return [name for name in named if name in BACKENDS]


def assert_fix_works(fault: Fault) -> None:
    """A backend that a message says to pass takes the call that got the message."""
    for backend in suggestions(fault.fix):
        config = config_of(**(dict(fault.changes) | {"backend": backend}))
        assert check(abi_of(fault.abi), **config) == (), f"{backend} is refused as well"


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_backend_that_a_fix_names_takes_the_call(fault: Fault) -> None:
    assert_fix_works(fault)


def prepared_runs(abi: FlashInferABI, config: Mapping[str, Any]) -> bool:
    """Whether the same configuration can be prepared and run."""
    arguments = decode_arguments(config)
    dcp = arguments.pop("dcp", None)
    query, kv_cache = arguments.pop("query"), arguments.pop("kv_cache")
    step: dict[str, Any] = {
        name: arguments.pop(name)
        for name in (
            "workspace_buffer",
            "block_tables",
            "seq_lens",
            "max_seq_len",
            "cum_seq_lens_q",
            "max_q_len",
        )
        if name in arguments
    }
    if dcp is not None:
        arguments |= {"dcp_world_size": dcp.world_size, "dcp_rank": dcp.rank}
        step["causal_seqlens_kv_global"] = dcp.causal_seqlens_kv_global
    facts = {
        "page_size": kv_cache.shape[-2],
        "dtype": query.dtype,
        "kv_dtype": kv_cache.dtype,
    }
    with ExitStack() as stack:
        if config["compute_capability"] is not None:
            stack.enter_context(gpu(config["compute_capability"]))
        stack.enter_context(use_kernel(lambda **call: stub_result(**call), abi))
        try:
            prepare_decode_mla(**facts, **arguments).run(query, kv_cache, **step)
        except FlashInferCompatError:
            return False
    return True


def test_a_prepared_decoder_refuses_what_check_refuses() -> None:
    for release, backend, config in grid(seed=1, size=300):
        if backend != "xqa":
            expected = check(abi_of(release), **config) == ()
            assert prepared_runs(abi_of(release), config) == expected, f"{config} on {release}"


@pytest.mark.parametrize("backend", ["auto", "trtllm-gen", "cute-dsl", "xqa", "reference"])
def test_every_backend_can_be_prepared(backend: str) -> None:
    config = config_of(backend, num_heads=128)
    assert check(recorded("0.7.4"), **config) == ()
    assert prepared_runs(recorded("0.7.4"), config)


SWITCHES = ("causal", "varlen", "return_lse", "sinks", "skip_softmax", "tensor_scales")


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("value", [None, 1, "yes", torch.ones(4)], ids=lambda v: type(v).__name__)
def test_check_names_a_switch_that_is_none(name: str, value: Any) -> None:
    config = config_of() | {name: value}
    reasons = check(recorded("0.7.4"), **config)
    assert [(r.error, r.argument) for r in reasons] == [(UnsupportedConfigError, name)]
    assert reasons[0].summary == f"{name} must be a bool."
    assert supports_combination(num_heads=16, dtype="bfloat16", **{name: value}) is not None


def test_check_wants_an_abi() -> None:
    with pytest.raises(InvalidInputError, match="abi must be a FlashInferABI") as raised:
        check("0.6.17", **config_of())  # type: ignore[arg-type]  # no ABI
    assert raised.value.found == "'0.6.17'."
    said = supports_combination(num_heads=16, dtype="bfloat16", abi="0.6.17")  # type: ignore[arg-type]
    assert said is not None


NUMBERS = ("num_heads", "q_len", "page_size", "dcp_world_size", "interleave_size")


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [0, -1, True, 2.0, "2", None], ids=repr)
def test_check_names_a_number_that_is_none(name: str, value: object) -> None:
    reasons = check(recorded("0.7.4"), **(config_of() | {"interleave_size": 1, name: value}))
    assert [(r.error, r.argument) for r in reasons] == [(UnsupportedConfigError, name)]
    assert reasons[0].found == f"{name}={value!r}."


@pytest.mark.parametrize("value", [0, True, "2", None], ids=repr)
def test_supports_combination_answers_whatever_it_is_given(value: Any) -> None:
    """Stacks ask it at start-up; it never raises."""
    given: dict[str, Any] = {"num_heads": 16, "dtype": "bf16", "abi": recorded("0.7.4")}
    for name in NUMBERS:
        if (name, value) != ("page_size", None):
            answer = supports_combination(**(given | {name: value}))
            assert isinstance(answer, str)
            assert name in answer


@pytest.mark.parametrize("value", [10, (10,), (10, 0, 0), "10.0", ("10", "0"), (10.0, 0)], ids=repr)
def test_check_names_a_compute_capability_that_is_no_pair_of_ints(value: Any) -> None:
    (reason,) = check(recorded("0.7.4"), **(config_of() | {"compute_capability": value}))
    assert (reason.error, reason.argument) == (UnsupportedConfigError, "compute_capability")
    assert str(reason) == (
        "compute_capability must be a pair of ints.\n"
        f"Found: {value!r}.\n"
        "Needed: (major, minor), for example (10, 0), or None.\n"
        "Fix: pass torch.cuda.get_device_capability()."
    )


@pytest.mark.parametrize("name", ["block_table_width", "batch"])
@pytest.mark.parametrize("value", ["2", 2.0, -1, True], ids=repr)
def test_check_names_a_size_that_is_none(name: str, value: Any) -> None:
    """They are None or an int of at least 0: an empty batch is a batch."""
    (reason,) = check(recorded("0.7.4"), **(config_of() | {name: value}))
    assert (reason.error, reason.argument) == (UnsupportedConfigError, name)
    assert repr(value) in reason.found
    for right in (None, 0, 2):
        assert check(recorded("0.7.4"), **(config_of() | {name: right})) == ()


def test_a_release_without_dcp_is_not_also_told_what_its_dcp_lacks() -> None:
    (reason,) = check(recorded("0.6.16"), **config_of(dcp_world_size=8, varlen=True, q_len=2))
    assert "0.6.17" in reason.needed


def test_a_dtype_may_be_named_in_words() -> None:
    for name in ("bf16", "bfloat16", "torch.bfloat16", torch.bfloat16):
        assert check(recorded("0.7.4"), **(config_of() | {"dtype": name, "kv_dtype": None})) == ()
    for name in ("fp8", "fp8_e4m3", "float8_e4m3", torch.float8_e4m3fn):
        assert check(recorded("0.7.4"), **(config_of() | {"dtype": name, "kv_dtype": name})) == ()
    for name in ("half", "fp16", torch.float16):
        fp16 = config_of() | {"dtype": name, "kv_dtype": name}
        assert check(recorded("0.7.4"), **fp16) == ()
        assert check(recorded("0.7.4"), **(fp16 | {"backend": "trtllm-gen"})) != ()


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("out", torch.zeros(2, 1, 16, 512, dtype=torch.bfloat16)),
        ("sinks", torch.zeros(16)),
        ("enable_pdl", True),
        ("skip_softmax_threshold_scale_factor", 1e-3),
    ],
)
def test_an_optional_keyword_that_the_function_lost_is_an_error_only_where_it_is_used(
    argument: str, value: Any
) -> None:
    abi = without("0.7.4", argument)
    with use_kernel(_strict(abi), abi):
        assert isinstance(decode_mla(**call()), torch.Tensor)
        with pytest.raises(FlashInferSignatureError, match=argument):
            decode_mla(**call(**{argument: value}))


@pytest.mark.parametrize("backend", ["auto", "cute-dsl", "trtllm-gen"])
def test_compact_queries_are_refused_where_the_function_lost_their_keywords(backend: str) -> None:
    abi = without("0.7.4", "cum_seq_lens_q")
    config = config_of(backend, varlen=True, q_len=2)
    reasons = check(abi, **config)
    assert reasons
    assert reasons[0].error is FlashInferSignatureError
    assert "cum_seq_lens_q" in str(reasons[0])
    assert_parity(abi, config)


def _strict(abi: FlashInferABI) -> Any:
    def kernel(**arguments: Any) -> Any:
        signature(abi).bind(**arguments)
        return stub_result(**arguments)

    return kernel


# Scenarios, by their numbers in scenarios.md.


# S39: versions in messages come from the feature table.

VERSION = re.compile(r"\b\d+\.\d+\.\d+(?:\.post\d+)?\b")


def assert_versions_known(fault: Fault) -> None:
    since = {row.since for row in FEATURES}
    noted = {v for row in (*FEATURES, *LIMITS) for v in VERSION.findall(row.evidence)}
    for reason in check(abi_of(fault.abi), **config_of(**fault.changes)):
        assert set(VERSION.findall(reason.fix)) <= since | {abi_of(fault.abi).version}
        assert set(VERSION.findall(reason.needed)) <= since | noted


def test_s39_a_row_that_moves_takes_every_message_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved = {
        row.name: row._replace(since="9.9.9") if row.since == "0.6.17" else row for row in FEATURES
    }
    monkeypatch.setattr("fi_dcp_compat.abi.ROWS", moved)
    monkeypatch.setattr("fi_dcp_compat.guards.ROWS", moved)
    for name in ("older than native DCP", "trtllm-gen with DCP", "xqa with DCP"):
        fault = FAULTS[name]
        text = "\n".join(map(str, check(abi_of(fault.abi), **config_of(**fault.changes))))
        assert "9.9.9 or newer" in text
        assert "0.6.17" not in text


# One upgrade for all of a call.


@pytest.mark.parametrize(
    ("version", "config", "first", "since"),
    [
        pytest.param(
            "0.6.16", {"dcp_world_size": 4, "varlen": True}, "0.7.0", "0.6.17", id="compact DCP"
        ),
        # 0.6.14 has compact queries, 0.6.16 a backend that takes 128 heads of them.
        pytest.param(
            "0.6.13", {"num_heads": 128, "varlen": True}, "0.6.16", "0.6.14", id="128 heads"
        ),
        pytest.param(
            "0.6.11", {"backend": "cute-dsl", "q_len": 5}, "0.6.15", "0.6.12", id="five tokens"
        ),
        pytest.param("0.6.16", {"dcp_world_size": 4}, "0.6.17", "0.6.17", id="one step is enough"),
    ],
)
def test_the_upgrade_is_to_a_release_that_runs_all_of_the_call(
    version: str, config: dict[str, Any], first: str, since: str
) -> None:
    asked: dict[str, Any] = {"num_heads": 16, "q_len": 3, "page_size": 64, "dtype": "bf16"}
    asked |= config
    reason, *_ = check(recorded(version), **asked)
    assert f'"flashinfer-python>={first}"' in reason.fix
    assert reason.needed.startswith(f"{since} or newer")
    assert reason.needed.endswith(f"; {first} for all of this call.") is (first != since)
    assert check(recorded(first), **asked) == ()


def test_no_upgrade_is_named_beyond_what_a_reason_asks_where_none_helps() -> None:
    asked: dict[str, Any] = {"num_heads": 16, "q_len": 3, "page_size": 48, "dtype": "bf16"}
    found = check(recorded("0.6.16"), dcp_world_size=4, varlen=True, **asked)
    assert '"flashinfer-python>=0.6.17"' in found[0].fix
    assert found[1].argument == "page_size"
