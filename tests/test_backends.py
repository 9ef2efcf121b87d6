"""What each backend runs, release by release, and what it says where it does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fi_dcp_compat import (
    FlashInferVersionError,
    UnsupportedConfigError,
    check,
    recorded,
)
from fi_dcp_compat.backends import RULES
from fi_dcp_compat.config import BACKENDS, Config
from tests.support import DCP_RELEASES, RELEASES
from tests.test_guards import (
    Fault,
    abi_of,
    assert_fix_works,
    assert_parity,
    assert_refused,
    assert_versions_known,
    config_of,
)

FAULTS: dict[str, Fault] = {
    "cute-dsl on 12.0": Fault(
        "0.7.4",
        {"backend": "cute-dsl", "compute_capability": (12, 0)},
        UnsupportedConfigError,
        "backend='cute-dsl' has no kernel for compute capability 12.0.",
        "compute capability 12.0.",
        "10.0, 10.3 or 10.7.",
        "run on such a GPU, or pass backend='reference' in tests.",
    ),
    "cute-dsl on 10.7": Fault(
        "0.6.17",
        {"backend": "cute-dsl", "compute_capability": (10, 7)},
        FlashInferVersionError,
        "backend='cute-dsl' on compute capability 10.7 needs FlashInfer's cute-dsl "
        "kernels for 10.7.",
        "flashinfer-python 0.6.17.",
        "0.6.18 or newer.",
        "pip install -U \"flashinfer-python>=0.6.18\", or pass backend='trtllm-gen'.",
    ),
    "cute-dsl, DCP on 10.7": Fault(
        "0.6.17",
        {"dcp_world_size": 2, "compute_capability": (10, 7)},
        FlashInferVersionError,
        "backend='cute-dsl' on compute capability 10.7 needs FlashInfer's cute-dsl "
        "kernels for 10.7.",
        "flashinfer-python 0.6.17.",
        "0.6.18 or newer.",
        'pip install -U "flashinfer-python>=0.6.18".',
    ),
    "cute-dsl, fp8 cache": Fault(
        "0.7.4",
        {"backend": "cute-dsl", "dtypes": ("bfloat16", "float8_e4m3fn")},
        UnsupportedConfigError,
        "backend='cute-dsl' cannot take a bfloat16 query on a float8_e4m3fn cache.",
        "query bfloat16, kv_cache float8_e4m3fn.",
        "both the same, one of bfloat16, float16, float8_e4m3fn.",
        "cast or quantise the query to the cache's dtype.",
    ),
    "cute-dsl, 256 wide": Fault(
        "0.7.4",
        {"backend": "cute-dsl", "dims": (256, 64)},
        UnsupportedConfigError,
        "backend='cute-dsl' has no kernel for kv_lora_rank=256, qk_rope_head_dim=64.",
        "(256, 64).",
        "(512, 64).",
        "pass backend='reference' for other sizes in tests, or pass backend='trtllm-gen'.",
    ),
    "cute-dsl, page size 48": Fault(
        "0.7.4",
        {"backend": "cute-dsl", "page_size": 48},
        UnsupportedConfigError,
        "backend='cute-dsl' cannot read pages of 48 tokens.",
        "page_size=48.",
        "one of 2, 4, 8, 16, 32, 64, 128.",
        "set the cache's block size to one of those.",
    ),
    "cute-dsl, 129 heads": Fault(
        "0.7.4",
        {"backend": "cute-dsl", "num_heads": 129},
        UnsupportedConfigError,
        "backend='cute-dsl' cannot run 129 query heads.",
        "num_heads=129.",
        "1 to 128.",
        "use more tensor-parallel ranks, a smaller DCP group, or several calls.",
    ),
    "cute-dsl, no mask": Fault(
        "0.6.12",
        {"backend": "cute-dsl", "q_len": 2},
        FlashInferVersionError,
        "backend='cute-dsl' with several query tokens needs FlashInfer's causal mask "
        "between query tokens on cute-dsl.",
        "flashinfer-python 0.6.12.",
        "0.6.13 or newer (#3309).",
        "pip install -U \"flashinfer-python>=0.6.13\", or pass backend='trtllm-gen'.",
    ),
    "cute-dsl, 5 tokens": Fault(
        "0.6.14",
        {"backend": "cute-dsl", "q_len": 5},
        FlashInferVersionError,
        "backend='cute-dsl' with q_len=5 needs FlashInfer's query lengths above 4 on cute-dsl.",
        "flashinfer-python 0.6.14.",
        "0.6.15 or newer (#3664).",
        "pip install -U \"flashinfer-python>=0.6.15\", or pass backend='trtllm-gen'.",
    ),
    "cute-dsl, compact": Fault(
        "0.6.15",
        {"backend": "cute-dsl", "varlen": True, "q_len": 2},
        FlashInferVersionError,
        "backend='cute-dsl' with cum_seq_lens_q needs FlashInfer's compact "
        "variable-length queries on cute-dsl.",
        "flashinfer-python 0.6.15.",
        "0.6.16 or newer.",
        "pip install -U \"flashinfer-python>=0.6.16\", or pass backend='trtllm-gen'.",
    ),
    "cute-dsl, LSE": Fault(
        "0.6.12",
        {"backend": "cute-dsl", "return_lse": True},
        FlashInferVersionError,
        "backend='cute-dsl' with return_lse=True needs FlashInfer's LSE from cute-dsl.",
        "flashinfer-python 0.6.12.",
        "0.6.13 or newer (#3309).",
        "pip install -U \"flashinfer-python>=0.6.13\", or pass backend='trtllm-gen'.",
    ),
    "cute-dsl, sinks, 2 tokens": Fault(
        "0.7.4",
        {"backend": "cute-dsl", "sinks": True, "q_len": 2},
        UnsupportedConfigError,
        "backend='cute-dsl' cannot mask several query tokens with sinks.",
        "sinks with q_len=2.",
        "one query token: sinks go to the modular kernel, which has no causal mask "
        "(0.7.4 _cute_dsl_common.py:412).",
        "decode one token a request, or leave sinks out, or pass backend='trtllm-gen'.",
    ),
    "cute-dsl, sinks, LSE": Fault(
        "0.7.4",
        {"backend": "cute-dsl", "sinks": True, "return_lse": True},
        UnsupportedConfigError,
        "backend='cute-dsl' returns no LSE with sinks.",
        "sinks with return_lse=True.",
        "one of the two: sinks go to the modular kernel, which has no LSE.",
        "leave one of the two out, or pass backend='trtllm-gen'.",
    ),
    "cute-dsl, skip-softmax": Fault(
        "0.7.4",
        {"backend": "cute-dsl", "skip_softmax": True},
        UnsupportedConfigError,
        "backend='cute-dsl' does not take skip_softmax_threshold_scale_factor.",
        "skip_softmax_threshold_scale_factor given.",
        "no skip_softmax_threshold_scale_factor.",
        "leave it out, or pass backend='trtllm-gen'.",
    ),
    "cute-dsl, tensor scales": Fault(
        "0.7.4",
        {"backend": "cute-dsl", "tensor_scales": True},
        UnsupportedConfigError,
        "backend='cute-dsl' does not take tensor scales.",
        "tensor scales given.",
        "no tensor scales.",
        "leave it out, or pass backend='trtllm-gen'.",
    ),
    "cute-dsl, width": Fault(
        "0.7.4",
        {"backend": "cute-dsl", "extra_width": 1},
        UnsupportedConfigError,
        "backend='cute-dsl' cannot take a block table 3 pages wide.",
        "width 3 with page_size=64.",
        "a multiple of 2 (128 / page_size); the next is 4.",
        "allocate the table 4 pages wide; the tail may hold anything, or pass "
        "backend='trtllm-gen'.",
    ),
    "trtllm-gen on 9.0": Fault(
        "0.7.4",
        {"backend": "trtllm-gen", "compute_capability": (9, 0)},
        UnsupportedConfigError,
        "backend='trtllm-gen' has no kernel for compute capability 9.0.",
        "compute capability 9.0.",
        "10.0, 10.3 or 10.7.",
        "run on such a GPU, or pass backend='reference' in tests.",
    ),
    "trtllm-gen on 10.7": Fault(
        "0.6.15",
        {"backend": "trtllm-gen", "compute_capability": (10, 7)},
        FlashInferVersionError,
        "backend='trtllm-gen' on compute capability 10.7 needs FlashInfer's trtllm-gen "
        "kernels for 10.7.",
        "flashinfer-python 0.6.15.",
        "0.6.16 or newer.",
        'pip install -U "flashinfer-python>=0.6.16".',
    ),
    "trtllm-gen, fp8 cache": Fault(
        "0.7.4",
        {"backend": "trtllm-gen", "dtypes": ("bfloat16", "float8_e4m3fn")},
        UnsupportedConfigError,
        "backend='trtllm-gen' cannot take a bfloat16 query on a float8_e4m3fn cache.",
        "query bfloat16, kv_cache float8_e4m3fn.",
        "both the same, one of bfloat16, float8_e4m3fn.",
        "cast or quantise the query to the cache's dtype.",
    ),
    "trtllm-gen, 128 wide": Fault(
        "0.7.4",
        {"backend": "trtllm-gen", "dims": (128, 32)},
        UnsupportedConfigError,
        "backend='trtllm-gen' has no kernel for kv_lora_rank=128, qk_rope_head_dim=32.",
        "(128, 32).",
        "(512, 64), (256, 64).",
        "pass backend='reference' for other sizes in tests.",
    ),
    "trtllm-gen, page size 128": Fault(
        "0.7.4",
        {"backend": "trtllm-gen", "page_size": 128},
        UnsupportedConfigError,
        "backend='trtllm-gen' cannot read pages of 128 tokens.",
        "page_size=128.",
        "one of 32, 64.",
        "set the cache's block size to one of those, or pass backend='cute-dsl'.",
    ),
    "trtllm-gen, 24 heads": Fault(
        "0.6.15",
        {"backend": "trtllm-gen", "num_heads": 24},
        UnsupportedConfigError,
        "backend='trtllm-gen' cannot tile 24 query heads.",
        "num_heads=24 on flashinfer-python 0.6.15.",
        "1 to 16, 32, 48, or a multiple of 64.",
        "pad the query to that many heads, or pass backend='cute-dsl'.",
    ),
    "trtllm-gen, 96 heads": Fault(
        "0.7.4",
        {"backend": "trtllm-gen", "num_heads": 96},
        UnsupportedConfigError,
        "backend='trtllm-gen' cannot tile 96 query heads.",
        "num_heads=96 on flashinfer-python 0.7.4.",
        "1 to 64, or a multiple of 64.",
        "pad the query to that many heads, or pass backend='cute-dsl'.",
    ),
    "trtllm-gen, compact": Fault(
        "0.6.13",
        {"backend": "trtllm-gen", "varlen": True, "q_len": 2},
        FlashInferVersionError,
        "decode_mla(cum_seq_lens_q=...) needs FlashInfer's compact variable-length queries.",
        "flashinfer-python 0.6.13, whose function lacks cum_seq_lens_q, max_q_len.",
        "0.6.14 or newer.",
        'pip install -U "flashinfer-python>=0.6.14".',
    ),
    "trtllm-gen, compact with KV splits": Fault(
        "0.6.17",
        {"backend": "trtllm-gen", "varlen": True, "q_len": 2, "num_heads": 64},
        FlashInferVersionError,
        "backend='trtllm-gen' with more than 32 heads and cum_seq_lens_q needs FlashInfer's "
        "reduction of KV splits request by request.",
        "flashinfer-python 0.6.17.",
        "0.6.18 or newer.",
        "pip install -U \"flashinfer-python>=0.6.18\", or pass backend='cute-dsl'.",
    ),
    "trtllm-gen, tensor scale with KV splits": Fault(
        "0.6.13",
        {"backend": "trtllm-gen", "tensor_scales": True, "num_heads": 48},
        FlashInferVersionError,
        "backend='trtllm-gen' with more than 32 heads and a tensor bmm1_scale needs FlashInfer's "
        "tensor bmm1_scale in the reduction of KV splits.",
        "flashinfer-python 0.6.13.",
        "0.6.14 or newer.",
        'pip install -U "flashinfer-python>=0.6.14".',
    ),
    "trtllm-gen, compact LSE": Fault(
        "0.7.4",
        {"backend": "trtllm-gen", "varlen": True, "q_len": 2, "return_lse": True},
        UnsupportedConfigError,
        "backend='trtllm-gen' returns no LSE for variable-length queries.",
        "return_lse=True with cum_seq_lens_q.",
        "one of the two.",
        "leave one of the two out, or pad to a uniform query, each request's tokens last, or pass "
        "backend='cute-dsl'.",
    ),
    "trtllm-gen, width": Fault(
        "0.6.15",
        {"backend": "trtllm-gen", "extra_width": 1},
        UnsupportedConfigError,
        "backend='trtllm-gen' cannot take a block table 3 pages wide.",
        "width 3 with page_size=64.",
        "a multiple of 2 (128 / page_size); the next is 4.",
        "allocate the table 4 pages wide; the tail may hold anything.",
    ),
    "xqa on 10.0": Fault(
        "0.7.4",
        {"backend": "xqa", "num_heads": 128, "compute_capability": (10, 0)},
        UnsupportedConfigError,
        "backend='xqa' has no kernel for compute capability 10.0.",
        "compute capability 10.0.",
        "12.0 or 12.1.",
        "run on such a GPU, or pass backend='reference' in tests, or pass backend='trtllm-gen'.",
    ),
    "xqa, fp8 cache": Fault(
        "0.7.4",
        {"backend": "xqa", "num_heads": 128, "dtypes": ("bfloat16", "float8_e4m3fn")},
        UnsupportedConfigError,
        "backend='xqa' cannot take a bfloat16 query on a float8_e4m3fn cache.",
        "query bfloat16, kv_cache float8_e4m3fn.",
        "both the same, one of bfloat16, float8_e4m3fn.",
        "cast or quantise the query to the cache's dtype.",
    ),
    "xqa, 256 wide": Fault(
        "0.7.4",
        {"backend": "xqa", "num_heads": 128, "dims": (256, 64)},
        UnsupportedConfigError,
        "backend='xqa' has no kernel for kv_lora_rank=256, qk_rope_head_dim=64.",
        "(256, 64).",
        "(512, 64).",
        "pass backend='reference' for other sizes in tests, or pass backend='trtllm-gen'.",
    ),
    "xqa, page size 8": Fault(
        "0.7.4",
        {"backend": "xqa", "num_heads": 128, "page_size": 8},
        UnsupportedConfigError,
        "backend='xqa' cannot read pages of 8 tokens.",
        "page_size=8.",
        "one of 16, 32, 64, 128.",
        "set the cache's block size to one of those, or pass backend='cute-dsl'.",
    ),
    "xqa, width": Fault(
        "0.7.4",
        {"backend": "xqa", "num_heads": 128, "extra_width": 1},
        UnsupportedConfigError,
        "backend='xqa' cannot take a block table 3 pages wide.",
        "width 3 with page_size=64.",
        "a multiple of 2 (128 / page_size); the next is 4.",
        "allocate the table 4 pages wide; the tail may hold anything, or pass "
        "backend='trtllm-gen'.",
    ),
    "xqa, 64 heads": Fault(
        "0.7.4",
        {"backend": "xqa", "num_heads": 64},
        UnsupportedConfigError,
        "backend='xqa' cannot run 64 query heads.",
        "num_heads=64.",
        "128.",
        "gather the heads to 128, or pass backend='trtllm-gen'.",
    ),
    "xqa, 2 tokens": Fault(
        "0.7.4",
        {"backend": "xqa", "num_heads": 128, "q_len": 2},
        UnsupportedConfigError,
        "backend='xqa' takes one query token a request.",
        "q_len=2.",
        "q_len=1.",
        "decode the tokens one at a time, or pass backend='trtllm-gen'.",
    ),
    "xqa, LSE": Fault(
        "0.7.4",
        {"backend": "xqa", "num_heads": 128, "return_lse": True},
        UnsupportedConfigError,
        "backend='xqa' does not take return_lse.",
        "return_lse given.",
        "no return_lse.",
        "leave it out, or pass backend='trtllm-gen'.",
    ),
    "xqa, sinks": Fault(
        "0.7.4",
        {"backend": "xqa", "num_heads": 128, "sinks": True},
        UnsupportedConfigError,
        "backend='xqa' does not take sinks.",
        "sinks given.",
        "no sinks.",
        "leave it out, or pass backend='trtllm-gen'.",
    ),
    "xqa, skip-softmax": Fault(
        "0.7.4",
        {"backend": "xqa", "num_heads": 128, "skip_softmax": True},
        UnsupportedConfigError,
        "backend='xqa' does not take skip_softmax_threshold_scale_factor.",
        "skip_softmax_threshold_scale_factor given.",
        "no skip_softmax_threshold_scale_factor.",
        "leave it out, or pass backend='trtllm-gen'.",
    ),
    "xqa, compact": Fault(
        "0.7.4",
        {"backend": "xqa", "num_heads": 128, "varlen": True},
        UnsupportedConfigError,
        "backend='xqa' does not take cum_seq_lens_q.",
        "cum_seq_lens_q given.",
        "no cum_seq_lens_q.",
        "leave it out, or pass backend='trtllm-gen'.",
    ),
    "xqa, tensor scales": Fault(
        "0.7.4",
        {"backend": "xqa", "num_heads": 128, "tensor_scales": True},
        UnsupportedConfigError,
        "backend='xqa' does not take tensor scales.",
        "tensor scales given.",
        "no tensor scales.",
        "leave it out, or pass backend='trtllm-gen'.",
    ),
    "reference, fp8 cache": Fault(
        "0.7.4",
        {"backend": "reference", "dtypes": ("bfloat16", "float8_e4m3fn")},
        UnsupportedConfigError,
        "backend='reference' cannot take a bfloat16 query on a float8_e4m3fn cache.",
        "query bfloat16, kv_cache float8_e4m3fn.",
        "both the same, one of bfloat16, float16, float8_e4m3fn, float32.",
        "cast or quantise the query to the cache's dtype.",
    ),
    "reference, skip-softmax": Fault(
        "0.7.4",
        {"backend": "reference", "skip_softmax": True},
        UnsupportedConfigError,
        "backend='reference' does not take skip_softmax_threshold_scale_factor.",
        "skip_softmax_threshold_scale_factor given.",
        "no skip_softmax_threshold_scale_factor.",
        "leave it out.",
    ),
    "auto, nobody takes an fp8 cache": Fault(
        "0.7.4",
        {"dtypes": ("bfloat16", "float8_e4m3fn")},
        UnsupportedConfigError,
        "backend='trtllm-gen' cannot take a bfloat16 query on a float8_e4m3fn cache.",
        "query bfloat16, kv_cache float8_e4m3fn.",
        "both the same, one of bfloat16, float8_e4m3fn.",
        "cast or quantise the query to the cache's dtype.",
        also=("backend='cute-dsl' cannot take a bfloat16 query on a float8_e4m3fn cache.",),
    ),
    "auto, compact LSE too early": Fault(
        "0.6.15",
        {"varlen": True, "q_len": 2, "return_lse": True},
        UnsupportedConfigError,
        "backend='trtllm-gen' returns no LSE for variable-length queries.",
        "return_lse=True with cum_seq_lens_q.",
        "one of the two.",
        "leave one of the two out, or pad to a uniform query, each request's tokens last.",
        also=(
            "backend='cute-dsl' with cum_seq_lens_q needs FlashInfer's compact "
            "variable-length queries on cute-dsl.",
        ),
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_refusal_says_all_of_this(fault: Fault) -> None:
    assert_refused(fault)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_backend_that_a_fix_names_takes_the_call(fault: Fault) -> None:
    assert_fix_works(fault)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_s39_a_version_that_is_needed_stands_in_the_feature_table(fault: Fault) -> None:
    assert_versions_known(fault)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_without_its_one_fault_the_same_call_runs(fault: Fault) -> None:
    """Else the fault would not be what is refused."""
    kept = {
        name: value
        for name, value in fault.changes.items()
        if name == "backend" or (name == "num_heads" and fault.changes.get("backend") == "xqa")
    }
    if kept.get("backend") == "xqa":
        kept["num_heads"] = 128
    assert check(abi_of(fault.abi), **config_of(**kept)) == ()


@pytest.mark.parametrize("backend", ["auto", "trtllm-gen", "cute-dsl", "xqa", "reference"])
def test_a_dtype_that_is_not_taken_is_not_cured_by_a_cast_to_itself(backend: str) -> None:
    heads = 128 if backend == "xqa" else 16
    for dtype in ("float16", "float32", "float8_e5m2"):
        config = config_of(backend, num_heads=heads, dtypes=(dtype, dtype))
        for reason in check(recorded("0.7.4"), **config):
            assert "the query to the cache's dtype" not in reason.fix


def test_every_backend_has_its_rules() -> None:
    assert set(RULES) == set(BACKENDS) - {"auto"}


def runs(version: str, backend: str, **chosen: Any) -> bool:
    config = config_of(backend, **chosen)
    if backend == "xqa":
        config.setdefault("num_heads", 128)
    return assert_parity(recorded(version), config)


def since(first: str | None) -> Iterator[tuple[str, bool]]:
    """Each release, and whether it has what `first` brought; None: none has."""
    order = {version: index for index, version in enumerate(RELEASES)}
    for version in RELEASES:
        yield version, first is not None and order[version] >= order[first]


@pytest.mark.parametrize(
    ("backend", "chosen", "first"),
    [
        pytest.param("cute-dsl", {"q_len": 2}, "0.6.13", id="cute-dsl masks between tokens"),
        pytest.param("cute-dsl", {"q_len": 4}, "0.6.13", id="cute-dsl takes 4 tokens"),
        pytest.param("cute-dsl", {"q_len": 5}, "0.6.15", id="cute-dsl takes 5 tokens"),
        pytest.param(
            "cute-dsl", {"q_len": 5, "causal": False}, "0.6.12", id="cute-dsl, flattened rows"
        ),
        pytest.param("cute-dsl", {"return_lse": True}, "0.6.13", id="cute-dsl returns an LSE"),
        pytest.param(
            "cute-dsl", {"varlen": True, "q_len": 2}, "0.6.16", id="cute-dsl takes compact queries"
        ),
        pytest.param(
            "cute-dsl", {"varlen": True, "q_len": 1}, "0.6.16", id="compact queries of one token"
        ),
        pytest.param(
            "cute-dsl",
            {"varlen": True, "q_len": 2, "causal": False},
            "0.6.12",
            id="cute-dsl, flattened compact rows",
        ),
        pytest.param("cute-dsl", {"num_heads": 96}, "0.6.12", id="cute-dsl, 96 heads"),
        pytest.param("cute-dsl", {"num_heads": 128}, "0.6.12", id="cute-dsl, 128 heads"),
        pytest.param("cute-dsl", {"num_heads": 129}, None, id="cute-dsl, 129 heads"),
        pytest.param("cute-dsl", {"sinks": True}, "0.6.12", id="cute-dsl, sinks with one token"),
        pytest.param("cute-dsl", {"sinks": True, "q_len": 2}, None, id="cute-dsl, sinks with two"),
        pytest.param(
            "cute-dsl",
            {"sinks": True, "q_len": 2, "causal": False},
            "0.6.12",
            id="cute-dsl, sinks with flattened rows",
        ),
        pytest.param(
            "cute-dsl", {"sinks": True, "varlen": True}, None, id="cute-dsl, sinks, compact"
        ),
        pytest.param(
            "cute-dsl", {"sinks": True, "return_lse": True}, None, id="cute-dsl, sinks with an LSE"
        ),
        pytest.param("cute-dsl", {"compute_capability": (10, 7)}, "0.6.18", id="cute-dsl on 10.7"),
        pytest.param("cute-dsl", {"compute_capability": (11, 0)}, None, id="cute-dsl on 11.0"),
        pytest.param("cute-dsl", {"compute_capability": (12, 0)}, None, id="cute-dsl on 12.0"),
        pytest.param("cute-dsl", {"compute_capability": (10, 3)}, "0.6.12", id="cute-dsl on 10.3"),
        pytest.param(
            "cute-dsl", {"dtypes": ("float16", "float16")}, "0.6.12", id="cute-dsl takes fp16"
        ),
        pytest.param("cute-dsl", {"extra_width": 1}, None, id="cute-dsl, unaligned table"),
        pytest.param("trtllm-gen", {"q_len": 5}, "0.6.12", id="trtllm-gen takes 5 tokens"),
        pytest.param("trtllm-gen", {"return_lse": True}, "0.6.12", id="trtllm-gen, LSE"),
        pytest.param("trtllm-gen", {"num_heads": 8}, "0.6.12", id="trtllm-gen, 8 heads"),
        pytest.param("trtllm-gen", {"num_heads": 48}, "0.6.12", id="trtllm-gen, 48 heads"),
        pytest.param("trtllm-gen", {"num_heads": 24}, "0.6.16", id="trtllm-gen pads 24 heads"),
        pytest.param("trtllm-gen", {"num_heads": 40}, "0.6.16", id="trtllm-gen pads 40 heads"),
        pytest.param("trtllm-gen", {"num_heads": 64}, "0.6.12", id="trtllm-gen, 64 heads"),
        pytest.param("trtllm-gen", {"num_heads": 65}, None, id="trtllm-gen, 65 heads"),
        pytest.param("trtllm-gen", {"num_heads": 128}, "0.6.12", id="trtllm-gen, 128 heads"),
        pytest.param("trtllm-gen", {"num_heads": 192}, "0.6.12", id="trtllm-gen, 192 heads"),
        pytest.param(
            "trtllm-gen", {"varlen": True, "q_len": 2}, "0.6.14", id="trtllm-gen, compact queries"
        ),
        pytest.param(
            "trtllm-gen",
            {"varlen": True, "q_len": 2, "num_heads": 32},
            "0.6.14",
            id="trtllm-gen, compact queries of 32 heads",
        ),
        pytest.param(
            "trtllm-gen",
            {"varlen": True, "q_len": 2, "num_heads": 128},
            "0.6.18",
            id="trtllm-gen, compact queries of 128 heads",
        ),
        pytest.param(
            "auto",
            {"varlen": True, "q_len": 2, "num_heads": 128},
            "0.6.16",
            id="auto, compact queries of 128 heads",
        ),
        pytest.param(
            "trtllm-gen",
            {"tensor_scales": True, "num_heads": 32},
            "0.6.12",
            id="trtllm-gen, tensor scales of 32 heads",
        ),
        pytest.param(
            "trtllm-gen",
            {"tensor_scales": True, "num_heads": 128},
            "0.6.14",
            id="trtllm-gen, tensor scales of 128 heads",
        ),
        pytest.param(
            "trtllm-gen",
            {"varlen": True, "q_len": 2, "return_lse": True},
            None,
            id="trtllm-gen, compact queries with an LSE",
        ),
        pytest.param(
            "trtllm-gen",
            {"varlen": True, "q_len": 2, "return_lse": True, "causal": False},
            "0.6.12",
            id="trtllm-gen, flattened compact rows with an LSE",
        ),
        pytest.param("trtllm-gen", {"extra_width": 1}, "0.6.16", id="trtllm-gen, odd table"),
        pytest.param("trtllm-gen", {"page_size": 128}, None, id="trtllm-gen, page size 128"),
        pytest.param("trtllm-gen", {"page_size": 32}, "0.6.12", id="trtllm-gen, page size 32"),
        pytest.param("trtllm-gen", {"dims": (256, 64)}, "0.6.12", id="trtllm-gen, 256 wide"),
        pytest.param(
            "trtllm-gen", {"compute_capability": (10, 7)}, "0.6.16", id="trtllm-gen on 10.7"
        ),
        pytest.param(
            "trtllm-gen",
            {"sinks": True, "q_len": 2, "return_lse": True, "tensor_scales": True},
            "0.6.12",
            id="trtllm-gen takes what cute-dsl does not",
        ),
        pytest.param(
            "auto",
            {"varlen": True, "q_len": 2, "return_lse": True},
            "0.6.16",
            id="auto, compact queries with an LSE",
        ),
        pytest.param("auto", {"extra_width": 1}, "0.6.16", id="auto, odd table"),
        pytest.param("auto", {"compute_capability": (10, 7)}, "0.6.16", id="auto on 10.7"),
        pytest.param("auto", {"num_heads": 96}, "0.6.12", id="auto, 96 heads"),
        pytest.param("auto", {"num_heads": 129}, None, id="auto, 129 heads"),
        pytest.param("auto", {"num_heads": 256}, "0.6.12", id="auto, 256 heads"),
        pytest.param("auto", {"dims": (128, 32)}, None, id="auto, 128 wide"),
        pytest.param("reference", {"dims": (128, 32)}, "0.6.12", id="the reference, 128 wide"),
        pytest.param("reference", {"num_heads": 256}, "0.6.12", id="the reference, 256 heads"),
    ],
)
def test_a_backend_runs_it_from_that_release_on(
    backend: str, chosen: dict[str, Any], first: str | None
) -> None:
    assert {version: runs(version, backend, **chosen) for version in RELEASES} == dict(since(first))


@pytest.mark.parametrize(
    ("chosen", "first"),
    [
        pytest.param({}, "0.6.17", id="DCP"),
        pytest.param({"q_len": 5}, "0.6.17", id="five query tokens"),
        pytest.param({"varlen": True, "q_len": 3}, "0.7.0", id="compact queries"),
        pytest.param({"compute_capability": (10, 7)}, "0.6.18", id="on 10.7"),
        pytest.param({"compute_capability": (11, 0)}, None, id="on 11.0"),
        pytest.param({"compute_capability": (12, 0)}, None, id="on 12.0"),
        pytest.param({"num_heads": 128}, "0.6.17", id="128 heads"),
        pytest.param({"num_heads": 256}, None, id="256 heads"),
        pytest.param({"page_size": 128}, "0.6.17", id="page size 128"),
        pytest.param({"page_size": 1}, None, id="page size 1"),
        pytest.param({"dtypes": ("float8_e4m3fn", "float8_e4m3fn")}, "0.6.17", id="fp8"),
        pytest.param({"dtypes": ("bfloat16", "float8_e4m3fn")}, None, id="an fp8 cache only"),
        pytest.param({"dims": (256, 64)}, None, id="256 wide"),
        pytest.param({"tensor_scales": True}, None, id="tensor scales"),
        pytest.param({"extra_width": 1}, None, id="an odd table"),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "cute-dsl"])
def test_dcp_runs_it_from_that_release_on(
    backend: str, chosen: dict[str, Any], first: str | None
) -> None:
    chosen = chosen | {"dcp_world_size": 8}
    assert {version: runs(version, backend, **chosen) for version in RELEASES} == dict(since(first))


@pytest.mark.parametrize("backend", ["cute-dsl", "trtllm-gen", "xqa"])
@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 16, 32, 48, 64, 128, 256])
def test_a_backend_reads_its_page_sizes_and_no_others(backend: str, page_size: int) -> None:
    sizes = {
        "cute-dsl": (2, 4, 8, 16, 32, 64, 128),
        "trtllm-gen": (32, 64),
        "xqa": (16, 32, 64, 128),
    }
    heads = 128 if backend == "xqa" else 16
    for version in RELEASES:
        assert runs(version, backend, num_heads=heads, page_size=page_size) == (
            page_size in sizes[backend]
        )


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0), (11, 0), (13, 0)])
def test_a_gpu_without_a_kernel_is_refused_by_every_backend_but_the_reference(
    capability: tuple[int, int],
) -> None:
    for version in DCP_RELEASES:
        for backend in ("auto", "cute-dsl", "trtllm-gen", "xqa"):
            config = config_of(backend, num_heads=128, compute_capability=capability)
            (reason,) = check(recorded(version), **config)
            assert (reason.error, reason.argument) == (UnsupportedConfigError, "compute_capability")
            assert f"{capability[0]}.{capability[1]}" in reason.found
        assert runs(version, "reference", compute_capability=capability)


@pytest.mark.parametrize("capability", [(12, 0), (12, 1)])
def test_12_runs_xqa_and_says_what_xqa_lacks(capability: tuple[int, int]) -> None:
    for version in RELEASES:
        assert runs(version, "auto", num_heads=128, compute_capability=capability)
        changes: tuple[dict[str, Any], ...] = (
            {"num_heads": 64},
            {"q_len": 2},
            {"return_lse": True},
            {"sinks": True},
            {"skip_softmax": True},
            {"tensor_scales": True},
            {"varlen": True},
            {"page_size": 8},
            {"extra_width": 1},
            {"dtypes": ("float16", "float16")},
        )
        for change in changes:
            base: dict[str, Any] = {"num_heads": 128, "compute_capability": capability}
            config = config_of(**(base | change))
            (reason,) = check(recorded(version), **config)
            assert "backend='xqa'" in reason.summary


def test_a_final_release_is_judged_by_its_number_and_a_nightly_by_its_signature() -> None:
    dcp = config_of(dcp_world_size=8)
    assert check(abi_of("0.6.16.dev20260731 with 0.6.17's signature"), **dcp) == ()
    for name in ("0.6.16 with 0.6.17's signature", "0.6.17.dev20260801 with 0.6.16's signature"):
        (reason,) = check(abi_of(name), **dcp)
        assert reason.error is FlashInferVersionError


def test_a_non_causal_block_counts_as_its_rows() -> None:
    config = Config(16, 4, 64, "bfloat16", "bfloat16", causal=False, varlen=True, batch=3)
    assert config.flattened() == config._replace(q_len=1, varlen=False, batch=12)
    assert config._replace(batch=None).flattened().batch is None
    assert config._replace(causal=True).flattened() == config._replace(causal=True)
    for batch, fits in ((16383, True), (16384, False)):
        block = config_of("cute-dsl", q_len=4, causal=False) | {"batch": batch}
        assert (check(recorded("0.7.4"), **block) == ()) == fits
