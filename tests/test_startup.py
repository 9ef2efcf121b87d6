"""What a stack asks at start-up: text or None, never an exception."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, MagicMock

import pytest
from packaging.version import Version

from fi_dcp_compat import (
    FlashInferABI,
    FlashInferVersionError,
    InvalidInputError,
    Parameter,
    UnsupportedConfigError,
    capabilities,
    check,
    recorded,
    supports_combination,
    validate_dcp_config,
)
from fi_dcp_compat.releases import recorded_versions
from fi_dcp_compat.testing import mock_kernel, use_kernel
from tests.fakes import Site, answer_of, fake_site

HEADS: dict[str, Any] = {"num_heads": 16, "dtype": "bf16"}
DCP_PAGES = (2, 4, 8, 16, 32, 64, 128)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with fake_site(tmp_path / "site-packages") as site:
        yield site


# supports_combination


@pytest.mark.parametrize("version", recorded_versions())
@pytest.mark.parametrize("world_size", [1, 8])
def test_a_combination_is_supported_from_the_release_that_can_run_it(
    version: str, world_size: int
) -> None:
    needed = "0.6.17" if world_size > 1 else "0.6.12"
    reason = supports_combination(**HEADS, dcp_world_size=world_size, abi=recorded(version))
    if Version(version) >= Version(needed):
        assert reason is None
    else:
        assert reason is not None
        assert f"Found: flashinfer-python {version}," in reason
        assert f"Needed: {needed} or newer" in reason
        assert f'pip install -U "flashinfer-python>={needed}"' in reason


def test_an_absent_flashinfer_is_a_reason(site: Site) -> None:
    reason = supports_combination(**HEADS)
    assert reason is not None
    assert reason.startswith("FlashInfer is not installed.\nFound: ")


@pytest.mark.parametrize(
    "code",
    [
        "raise RuntimeError('flashinfer-cubin version (1) does not match flashinfer version (2)')",
        "raise AssertionError('Torch not compiled with CUDA enabled')",
        "raise OSError('libcuda.so.1: cannot open shared object file')",
        "raise AttributeError(\"module 'cutlass.cute.core' has no attribute 'ThrMma'\")",
        "import nothing_of_that_name",
        "1 / 0",
        "def torn(",
    ],
)
def test_a_flashinfer_whose_import_fails_is_a_reason_each_time(code: str, site: Site) -> None:
    site.flashinfer("0.7.0", like="0.7.0", last=code)
    for _ in range(2):
        reason = supports_combination(**HEADS)
        assert reason is not None
        assert reason.startswith("FlashInfer is installed, but importing it fails.")


def test_an_old_flashinfer_is_a_reason(site: Site) -> None:
    site.flashinfer("0.6.16", like="0.6.16")
    assert supports_combination(**HEADS) is None
    assert supports_combination(**HEADS, dcp_world_size=8) == (
        "decode_mla(dcp=...) needs FlashInfer's native DCP keywords.\n"
        "Found: flashinfer-python 0.6.16, whose function lacks enable_dcp, cp_world, cp_rank, "
        "causal_seqlens_kv_global.\n"
        "Needed: 0.6.17 or newer (#4178).\n"
        'Fix: pip install -U "flashinfer-python>=0.6.17", or call with dcp=None.'
    )


def test_a_flashinfer_without_the_function_is_a_reason(site: Site) -> None:
    site.flashinfer("0.9.0")
    site.write("flashinfer/decode.py", "")
    site.write("flashinfer/__init__.py", "from .version import __version__ as __version__\n")
    reason = supports_combination(**HEADS)
    assert reason is not None
    assert reason.startswith("FlashInfer has no trtllm_batch_decode_with_kv_cache_mla.")


def test_a_wrong_assumed_version_is_a_reason(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.flashinfer()
    monkeypatch.setenv("FI_DCP_COMPAT_ASSUME_VERSION", "latest")
    reason = supports_combination(**HEADS)
    assert reason is not None
    assert "FI_DCP_COMPAT_ASSUME_VERSION='latest'" in reason


def test_a_mock_without_a_signature_is_a_reason() -> None:
    with use_kernel(MagicMock()):
        reason = supports_combination(**HEADS)
    assert reason is not None
    assert "signature cannot be read" in reason


def test_the_installed_flashinfer_is_asked_if_none_is_given(site: Site) -> None:
    site.flashinfer("0.7.4")
    assert supports_combination(**HEADS, dcp_world_size=8, varlen=True) is None
    with use_kernel(mock_kernel("0.6.18"), recorded("0.6.18")):
        reason = supports_combination(**HEADS, dcp_world_size=8, varlen=True)
    assert reason is not None
    assert "0.7.0 or newer" in reason


def test_the_reference_needs_no_flashinfer(site: Site) -> None:
    assert supports_combination(**HEADS, backend="reference") is None
    assert supports_combination(**HEADS, backend="reference", dcp_world_size=8, varlen=True) is None


@pytest.mark.parametrize(
    "question",
    [
        {"num_heads": 129},
        {"page_size": 48},
        {"dtype": "float32"},
        {"dtype": "bf16", "kv_dtype": "fp8"},
        {"interleave_size": 64},
        {"causal": False},
        {"backend": "trtllm-gen"},
        {"sinks": True},
        {"kv_lora_rank": 256},
        {"qk_rope_head_dim": 0},
        {"compute_capability": (9, 0)},
        {"compute_capability": (12, 0), "sinks": True, "interleave_size": 2},
        {"q_len": 4, "return_lse": True},
    ],
    ids=str,
)
def test_it_says_what_check_says(question: dict[str, Any]) -> None:
    abi = recorded("0.7.4")
    asked: dict[str, Any] = {**HEADS, "dcp_world_size": 8} | question
    reasons = check(abi, **({"page_size": 64, "q_len": 1} | asked))
    assert supports_combination(**asked, abi=abi) == ("\n".join(map(str, reasons)) or None)
    assert (reasons == ()) == ("return_lse" in question)


@pytest.mark.parametrize(
    "question",
    [
        {"num_heads": None},
        {"num_heads": 16.0},
        {"num_heads": "16"},
        {"num_heads": True},
        {"num_heads": 0},
        {"q_len": 0},
        {"q_len": None},
        {"page_size": 0},
        {"page_size": "64"},
        {"dcp_world_size": 0},
        {"dcp_world_size": None},
        {"dcp_world_size": "8"},
        {"dcp_world_size": 8, "interleave_size": None},
        {"dcp_world_size": 8, "interleave_size": "1"},
        {"dtype": None},
        {"dtype": "nonsense"},
        {"backend": "flashmla"},
        {"backend": None},
        {"backend": ["cute-dsl"]},
        {"backend": ANY},  # whatever it is compared with, it is equal
        {"kv_lora_rank": None},
        {"qk_rope_head_dim": "64"},
        {"compute_capability": 100},
        {"compute_capability": "10.0"},
        {"compute_capability": ()},
    ],
    ids=str,
)
def test_nonsense_is_a_reason_and_no_exception(question: dict[str, Any]) -> None:
    reason = supports_combination(**(HEADS | question), abi=recorded("0.7.4"))
    assert isinstance(reason, str)
    assert "Found: " in reason
    assert "Fix: " in reason


def test_a_page_size_left_out_is_one_that_every_backend_takes() -> None:
    for backend in ("trtllm-gen", "cute-dsl", "auto"):
        assert supports_combination(**HEADS, backend=backend, abi=recorded("0.7.4")) is None


def test_it_answers_without_torch_and_without_flashinfer() -> None:
    answer = answer_of(
        "import json, sys\n"
        "sys.modules['torch'] = sys.modules['flashinfer'] = None\n"
        "from fi_dcp_compat import recorded, supports_combination\n"
        "ask = lambda **more: supports_combination(num_heads=16, dtype='bf16', **more)\n"
        "print(json.dumps([ask(), ask(abi=recorded('0.7.4'))]))\n"
    )
    assert answer[0].startswith("FlashInfer is not installed.")
    assert answer[1] is None


GRID: list[dict[str, Any]] = [
    {"num_heads": 129},
    {"num_heads": 96, "backend": "trtllm-gen"},
    {"page_size": 1},
    {"dcp_world_size": 8, "interleave_size": 64},
    {"dcp_world_size": 8, "causal": False},
    {"backend": "bogus"},
    {"q_len": 0},
]


def test_optimised_python_refuses_the_same() -> None:
    # An `assert` would vanish there.
    answer = answer_of(
        "import json\n"
        "from fi_dcp_compat import recorded, supports_combination\n"
        f"grid = json.loads({json.dumps(json.dumps(GRID))})\n"
        "ask = lambda version, more: supports_combination(\n"
        "    abi=recorded(version), **({'num_heads': 16, 'dtype': 'bf16'} | more))\n"
        "assert False\n"
        "print(json.dumps([ask(v, q) for v in ('0.6.11', '0.6.16', '0.7.4') for q in grid]))\n",
        "-O",
    )
    assert answer == [
        supports_combination(**(HEADS | question), abi=recorded(version))
        for version in ("0.6.11", "0.6.16", "0.7.4")
        for question in GRID
    ]
    assert None not in answer


# validate_dcp_config


@dataclass(frozen=True)
class VllmConfig:
    decode_context_parallel_size: Any = 1
    cp_kv_cache_interleave_size: Any = 1
    tensor_parallel_size: int = 8


@pytest.mark.parametrize(("world_size", "interleave"), [(1, 1), (8, 1), (1, 64), (2, 1)])
def test_a_layout_that_can_be_decoded_passes(world_size: int, interleave: int) -> None:
    validate_dcp_config(VllmConfig(world_size, interleave))


def test_interleave_64_is_refused_at_startup_by_name_value_and_origin() -> None:
    with pytest.raises(UnsupportedConfigError) as raised:
        validate_dcp_config(VllmConfig(4, 64))
    assert str(raised.value) == (
        "cp_kv_cache_interleave_size=64 cannot be masked natively.\n"
        "Found: interleave_size=64 with dcp_world_size=4.\n"
        "Needed: cp_kv_cache_interleave_size=1: FlashInfer's mask, in every known release, takes "
        "local key k of rank r for global position W*k + r.\n"
        "Fix: start with --cp-kv-cache-interleave-size 1; a KV connector or prefill/decode "
        "disaggregation may have raised it to the block size."
    )
    assert raised.value.argument == "cp_kv_cache_interleave_size"


@pytest.mark.parametrize("field", ["decode_context_parallel_size", "cp_kv_cache_interleave_size"])
def test_a_field_that_is_missing_is_named(field: str) -> None:
    config = SimpleNamespace(decode_context_parallel_size=8, cp_kv_cache_interleave_size=1)
    delattr(config, field)
    with pytest.raises(InvalidInputError, match=f"has no {field}") as raised:
        validate_dcp_config(config)
    assert raised.value.argument == field
    assert "SimpleNamespace" in raised.value.found


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "8", None])
@pytest.mark.parametrize("field", ["decode_context_parallel_size", "cp_kv_cache_interleave_size"])
def test_a_field_that_is_no_int_of_at_least_1_is_refused(field: str, value: object) -> None:
    fields: dict[str, Any] = {"decode_context_parallel_size": 8, field: value}
    config = VllmConfig(**fields)
    with pytest.raises(InvalidInputError, match="must be an int at least 1") as raised:
        validate_dcp_config(config)
    assert raised.value.value == value
    assert repr(value) in raised.value.found


# capabilities

CAPABLE: list[tuple[str, bool, bool, bool, str]] = [
    # release, LSE, DCP, DCP with compact queries, query lengths
    ("0.6.0", False, False, False, "uniform"),
    ("0.6.11", False, False, False, "uniform"),
    ("0.6.12", True, False, False, "uniform"),
    ("0.6.13", True, False, False, "uniform"),
    ("0.6.14", True, False, False, "varlen"),
    ("0.6.16.post4", True, False, False, "varlen"),
    ("0.6.17", True, True, False, "varlen"),
    ("0.6.18.post1", True, True, False, "varlen"),
    ("0.7.0", True, True, True, "varlen"),
    ("0.7.1", True, True, True, "varlen"),
    ("0.7.4", True, True, True, "varlen"),
]


@pytest.mark.parametrize(
    ("version", "lse", "dcp", "compact", "lengths"), CAPABLE, ids=[row[0] for row in CAPABLE]
)
def test_a_release_can_do_what_it_can(
    version: str, lse: bool, dcp: bool, compact: bool, lengths: str
) -> None:
    found = capabilities(recorded(version))
    assert found.lse_base_on_e is True
    assert found.can_return_lse_for_decode is lse
    assert found.supports_dcp is dcp
    assert found.supports_dcp_with_varlen is dcp
    assert found.supports_dcp_compact_varlen is compact
    assert found.supports_non_causal_dcp is False
    assert found.query_len_support == lengths
    assert found.page_sizes == (DCP_PAGES if lse else ())
    assert found.dcp_page_sizes == (DCP_PAGES if dcp else ())
    assert found.compute_capability_majors == ((10, 12) if lse else ())


@pytest.mark.parametrize("version", recorded_versions())
def test_the_capabilities_agree_with_check(version: str) -> None:
    abi, found = recorded(version), capabilities(recorded(version))
    one: dict[str, Any] = {"num_heads": 16, "q_len": 1, "page_size": 64, "dtype": "bf16"}

    def runs(**changes: Any) -> bool:
        return not check(abi, **(one | changes))

    assert runs() is bool(found.page_sizes)
    assert runs(return_lse=True) is found.can_return_lse_for_decode
    assert runs(dcp_world_size=8) is found.supports_dcp
    assert runs(dcp_world_size=8, q_len=3) is found.supports_dcp_with_varlen
    assert runs(dcp_world_size=8, q_len=3, varlen=True) is found.supports_dcp_compact_varlen
    assert runs(dcp_world_size=8, q_len=3, causal=False) is found.supports_non_causal_dcp
    assert (runs() and runs(q_len=3, varlen=True)) is (found.query_len_support == "varlen")
    for page_size in (1, 2, 4, 8, 16, 32, 48, 64, 128, 256):
        assert runs(page_size=page_size) is (page_size in found.page_sizes)
        assert runs(page_size=page_size, dcp_world_size=2) is (page_size in found.dcp_page_sizes)
    for major in (8, 9, 10, 11, 12):
        heads = 128 if major == 12 else 16
        capable = runs(num_heads=heads, compute_capability=(major, 0))
        assert capable is (major in found.compute_capability_majors)


def test_an_unreadable_function_can_do_nothing() -> None:
    found = capabilities(FlashInferABI(version="0.7.4", parameters=(), unreadable="a mock"))
    assert found.can_return_lse_for_decode is False
    assert found.supports_dcp is False
    assert found.supports_dcp_compact_varlen is False
    assert found.page_sizes == found.dcp_page_sizes == ()
    assert found.compute_capability_majors == ()


def test_capabilities_are_a_frozen_value() -> None:
    found = capabilities(recorded("0.7.4"))
    assert found == capabilities(recorded("0.7.4"))
    with pytest.raises(FrozenInstanceError, match="supports_dcp"):
        found.supports_dcp = False  # type: ignore[misc]


@pytest.mark.parametrize(
    "abi",
    [
        recorded("0.7.4")._replace(
            version="0.8.0", parameters=(*recorded("0.7.4").parameters, Parameter("layout", None))
        ),
        recorded("0.7.4")._replace(parameters=recorded("0.7.4").parameters[1:]),
        recorded("0.6.17")._replace(version="0.8.0"),
    ],
    ids=["a new required parameter", "no query", "0.6.17's function as 0.8.0"],
)
def test_a_function_that_check_refuses_is_capable_of_nothing(abi: FlashInferABI) -> None:
    able = capabilities(abi)
    assert not able.supports_dcp
    assert not able.supports_dcp_compact_varlen
    assert not able.can_return_lse_for_decode
    assert able.query_len_support == "uniform"
    assert able.page_sizes == able.dcp_page_sizes == able.compute_capability_majors == ()


# Speculative decoding.


@pytest.mark.parametrize("version", recorded_versions())
def test_several_query_tokens_with_dcp_are_supported_where_dcp_is(version: str) -> None:
    abi = recorded(version)
    asked: dict[str, Any] = {"num_heads": 128, "dtype": "bf16", "dcp_world_size": 8, "abi": abi}
    for q_len in (1, 2, 4, 8):
        answer = supports_combination(**asked, q_len=q_len)
        assert (answer is None) is abi.features.native_dcp
    ragged = supports_combination(**asked, q_len=4, varlen=True)
    assert (ragged is None) is abi.features.varlen_dcp


def test_a_non_causal_block_with_dcp_is_not_supported_and_says_why() -> None:
    answer = supports_combination(
        num_heads=128, dtype="bf16", dcp_world_size=8, q_len=4, causal=False, abi=recorded("0.7.4")
    )
    assert answer == (
        "A non-causal block cannot be masked with DCP.\n"
        "Found: causal=False with dcp_world_size=8.\n"
        "Needed: causal=True: FlashInfer's DCP mask is causal in every known release.\n"
        "Fix: flatten the block with flatten_query_rows: one-token rows, each with its own bound, "
        "are ordinary causal calls."
    )


def test_a_stack_without_an_interleave_asks_check_alone() -> None:
    asked: dict[str, Any] = {"num_heads": 128, "q_len": 4, "page_size": 64, "dtype": "bf16"}
    assert check(recorded("0.6.17"), dcp_world_size=8, **asked) == ()
    (reason,) = check(recorded("0.6.16"), dcp_world_size=8, **asked)
    assert reason.error is FlashInferVersionError
