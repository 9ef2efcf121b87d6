"""What a release lacks of a drop-in call, and which of FlashInfer's keywords cannot go together."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from packaging.version import Version

from fi_dcp_compat import (
    FlashInferSignatureError,
    FlashInferVersionError,
    InvalidInputError,
    Parameter,
    UnsupportedConfigError,
    recorded,
)
from fi_dcp_compat.abi import CORE_KEYWORDS, FUNCTION
from fi_dcp_compat.dropin import trtllm_batch_decode_with_kv_cache_mla as dropin
from fi_dcp_compat.features import DCP_KEYWORDS, FIRST_RELEASE
from fi_dcp_compat.releases import recorded_versions
from fi_dcp_compat.testing import mock_kernel, use_kernel
from tests.test_dropin import arguments, compact, dcp, received

VERSIONS = recorded_versions()

# A value for each keyword that came later, and the release that takes it (where not its own).
ASKED: dict[str, dict[str, Any]] = {
    "skip_softmax_threshold_scale_factor": {"skip_softmax_threshold_scale_factor": 1e-3},
    "uses_shared_paged_kv_idx": {"uses_shared_paged_kv_idx": False},
    "is_var_seq": {"is_var_seq": False},
    "lse": {"lse": torch.zeros(2, 16), "return_lse": True},
    "return_lse": {"return_lse": True},
    "cute_dsl_impl": {"cute_dsl_impl": "monolithic"},
    "kv_scale_format": {"kv_scale_format": "ue8m0"},
    "cum_seq_lens_q": compact(),
    "max_q_len": compact(),
    "sparse_mla_top_k_lens": {"sparse_mla_top_k_lens": torch.zeros(2, dtype=torch.int32)},
    **dict.fromkeys(DCP_KEYWORDS, dcp()),
    "use_fp16_softmax": {"use_fp16_softmax": True, "backend": "trtllm-gen"},
}
# Never refused for the release: left out, or converted here.
MENDED = {"multi_ctas_kv_counter_buffer", "return_lse_base"}


def refusal(version: str, **changes: Any) -> Any:
    kernel = mock_kernel(version)
    with use_kernel(kernel), pytest.raises((FlashInferVersionError, UnsupportedConfigError)) as got:
        dropin(**arguments(**changes))
    kernel.assert_not_called()
    return got.value


# What a release lacks.


def test_every_keyword_that_came_later_has_a_case() -> None:
    assert ASKED.keys() | MENDED == FIRST_RELEASE.keys()


@pytest.mark.parametrize("keyword", ASKED)
def test_a_keyword_that_the_release_lacks_names_its_first(keyword: str) -> None:
    for version in VERSIONS:
        if Version(version) >= Version(FIRST_RELEASE[keyword]):
            received(version, arguments(**ASKED[keyword]))
            continue
        error = refusal(version, **ASKED[keyword])
        assert type(error) is FlashInferVersionError
        assert error.summary.startswith(f"{FUNCTION}(")
        assert f"whose function lacks {keyword}" in error.found or keyword in error.found
        assert error.needed.startswith(f"{FIRST_RELEASE[keyword]} or newer")
        assert f'"flashinfer-python>={FIRST_RELEASE[keyword]}"' in error.fix


def test_the_message_of_a_missing_keyword() -> None:
    assert str(refusal("0.6.17", use_fp16_softmax=True)) == (
        "trtllm_batch_decode_with_kv_cache_mla(use_fp16_softmax=...) needs FlashInfer's "
        "FP16 softmax on compute capability 10.7.\n"
        "Found: flashinfer-python 0.6.17, whose function lacks use_fp16_softmax.\n"
        "Needed: 0.6.18 or newer.\n"
        'Fix: pip install -U "flashinfer-python>=0.6.18".'
    )
    assert str(refusal("0.6.16", **dcp())) == (
        "trtllm_batch_decode_with_kv_cache_mla(enable_dcp=True) needs FlashInfer's native DCP "
        "keywords.\n"
        "Found: flashinfer-python 0.6.16, whose function lacks enable_dcp, cp_world, cp_rank, "
        "causal_seqlens_kv_global.\n"
        "Needed: 0.6.17 or newer (#4178).\n"
        'Fix: pip install -U "flashinfer-python>=0.6.17", or call with enable_dcp=False.'
    )


@pytest.mark.parametrize(
    ("backend", "since"), [("cute-dsl", "0.6.8"), ("sparse", "0.6.14"), ("cake", "0.7.1")]
)
def test_a_backend_that_the_release_lacks_names_its_first(backend: str, since: str) -> None:
    for version in VERSIONS:
        given = {"backend": backend} | ({"heads": 128} if backend == "cute-dsl" else {})
        if Version(version) >= Version(since):
            assert received(version, arguments(**given))["backend"] == backend
            continue
        error = refusal(version, **given)
        assert error.summary.startswith(f"{FUNCTION}(backend={backend!r}) needs FlashInfer's ")
        assert error.needed == f"{since} or newer."


def test_a_backend_that_no_release_has_is_refused() -> None:
    error = refusal("0.7.4", backend="turbo")
    assert str(error) == (
        "backend='turbo' is not one of FlashInfer's.\n"
        "Found: 'turbo'.\n"
        "Needed: one of auto, trtllm-gen, xqa, cute-dsl, sparse, cake, or reference.\n"
        "Fix: name one of those; reference is plain torch, for tests without a GPU."
    )


def test_compact_queries_with_dcp_need_0_7_0() -> None:
    for version in ("0.6.17", "0.6.18.post1"):
        error = refusal(version, **compact(), **dcp())
        assert error.summary.startswith(f"{FUNCTION}(enable_dcp=True, cum_seq_lens_q=...) needs")
        assert error.needed == "0.7.0 or newer (#4719)."
        assert error.fix.endswith("[B, q_len, H, D], each request's tokens last.")
        # One rank alone is FlashInfer's DCP path too.
        assert refusal(version, **compact(), **dcp(world=1, rank=0)).needed == error.needed
    received("0.7.0", arguments(**compact(), **dcp()))


def test_a_backport_is_refused_below_the_first_release() -> None:
    ported = recorded("0.6.17")._replace(version="0.6.16")
    kernel = mock_kernel(ported)
    with use_kernel(kernel), pytest.raises(FlashInferVersionError, match="but is older"):
        dropin(**arguments(**dcp()))


def test_a_function_without_a_readable_signature_is_refused() -> None:
    kernel = MagicMock()
    with use_kernel(kernel), pytest.raises(FlashInferVersionError) as raised:
        dropin(**arguments())
    kernel.assert_not_called()
    assert raised.value.summary == f"{FUNCTION} cannot tell what this kernel takes."


@pytest.mark.parametrize("version", ["0.6.11", "0.7.4"])
@pytest.mark.parametrize("keyword", CORE_KEYWORDS)
def test_a_function_that_lost_a_parameter_of_every_call_is_refused(
    version: str, keyword: str
) -> None:
    abi = recorded(version)
    kept = tuple(p for p in abi.parameters if p.name != keyword)
    kernel = mock_kernel(abi._replace(parameters=kept))
    with use_kernel(kernel), pytest.raises(FlashInferSignatureError) as raised:
        dropin(**arguments())
    kernel.assert_not_called()
    assert raised.value.summary == f"{FUNCTION} has lost {keyword}."


def test_a_newly_required_parameter_is_named() -> None:
    abi = recorded("0.7.4")
    more = (*abi.parameters, Parameter("kv_layout", None, "KEYWORD_ONLY"))
    kernel = mock_kernel(abi._replace(parameters=more, version="0.8.0"))
    with use_kernel(kernel), pytest.raises(FlashInferSignatureError, match="newly requires kv_lay"):
        dropin(**arguments())
    kernel.assert_not_called()


def test_a_newer_release_with_more_options_is_called() -> None:
    abi = recorded("0.7.4")
    more = (*abi.parameters, Parameter("kv_layout", "'HND'"))
    kernel = mock_kernel(abi._replace(parameters=more, version="0.8.0"))
    with use_kernel(kernel):
        dropin(**arguments(**dcp()))
    assert "kv_layout" not in kernel.call_args.kwargs


# What contradicts itself.


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "enable_dcp=1": (dcp() | {"enable_dcp": 1}, "enable_dcp must be a bool"),
    "return_lse=1": ({"return_lse": 1}, "return_lse must be a bool"),
    "no LSE": (dcp() | {"return_lse": False}, "return_lse must be True with enable_dcp"),
    "cp_world alone": ({"cp_world": 8}, "cp_world means nothing without enable_dcp"),
    "cp_rank alone": ({"cp_world": 1, "cp_rank": False}, "cp_rank means nothing without"),
    "global lengths alone": (
        {"causal_seqlens_kv_global": torch.zeros(2, dtype=torch.int32)},
        "causal_seqlens_kv_global means nothing without enable_dcp",
    ),
    "no global lengths": (
        dcp() | {"causal_seqlens_kv_global": None},
        "causal_seqlens_kv_global must be given with DCP",
    ),
    "rank 8 of 8": (dcp(rank=8), r"cp_rank must be an int in \[0, 8\)"),
    "world 0": (dcp(world=0, rank=0), "cp_world must be an int at least 1"),
    "a bool for a rank": (dcp(rank=True), r"cp_rank must be an int in \[0, 8\)"),
    "interleave 0": (dcp() | {"interleave_size": 0}, "interleave_size must be an int at least 1"),
    "another word for a base": (
        {"return_lse": True, "return_lse_base": "e"},
        "return_lse_base must be one of basee, base2, or None",
    ),
    "a base that is no word": (
        {"return_lse": True, "return_lse_base": ["basee"]},
        "return_lse_base must be one of basee, base2, or None",
    ),
    **{
        f"{name} of another type": ({name: wrong}, f"{name} must be a")
        for name, wrong in {
            "is_var_seq": torch.ones(2),
            "uses_shared_paged_kv_idx": None,
            "use_fp16_softmax": torch.ones(2),
            "cute_dsl_impl": ["auto"],
            "kv_scale_format": torch.ones(2),
            "backend": ["auto"],
            "bmm1_scale": None,
            "bmm2_scale": None,
        }.items()
    },
    "a flat query": (
        {"query": torch.zeros(2, 16, 576, dtype=torch.bfloat16)},
        r"query must be \[B, q_len, H, D\], or \[num_tokens, H, D\] with cum_seq_lens_q",
    ),
    "a query that is none": ({"query": None}, "query must be"),
    "a negative top k": ({"sparse_mla_top_k": -1}, "sparse_mla_top_k must be an int"),
    "no top k": ({"sparse_mla_top_k": None}, "sparse_mla_top_k must be an int"),
}


@pytest.mark.parametrize("version", ["0.6.0", "0.6.12", "0.7.4"])
@pytest.mark.parametrize("name", WRONG)
def test_a_call_that_contradicts_itself_is_refused_on_every_release(
    name: str, version: str
) -> None:
    changes, message = WRONG[name]
    kernel = mock_kernel(version)
    with use_kernel(kernel), pytest.raises(InvalidInputError, match=message):
        dropin(**arguments(**changes))
    kernel.assert_not_called()


def test_a_cache_that_is_none_is_refused() -> None:
    for version in ("0.6.0", "0.7.4"):
        with use_kernel(mock_kernel(version)), pytest.raises(InvalidInputError, match="kv_cache"):
            dropin(**arguments() | {"kv_cache": None})


def test_a_stack_without_dcp_may_name_one_rank() -> None:
    # As stacks pass it: enable_dcp=world > 1, and the rest always.
    given = {"enable_dcp": False, "cp_world": 1, "cp_rank": 0, "causal_seqlens_kv_global": None}
    got = received("0.6.13", arguments(**given, interleave_size=64))
    assert not set(got) & set(DCP_KEYWORDS)


# What FlashInfer takes and gets wrong, or refuses obscurely.


@pytest.mark.parametrize(
    "changes",
    [
        {"sparse_mla_top_k": 128},
        {"backend": "sparse"},
        {"backend": "cake"},
        {"uses_shared_paged_kv_idx": False},
        {"backend": "trtllm-gen", "cp_world": 1, "cp_rank": 0},
    ],
)
def test_dcp_is_for_dense_mla_on_cute_dsl(changes: dict[str, Any]) -> None:
    error = refusal("0.7.4", **dcp() | changes)
    assert type(error) is UnsupportedConfigError
    assert error.summary == "enable_dcp=True masks dense MLA decode on cute-dsl only."
    assert error.argument == "enable_dcp"


@pytest.mark.parametrize("backend", ["auto", "cute-dsl"])
def test_the_modular_kernel_is_for_one_token_and_no_lse(backend: str) -> None:
    modular = {"backend": backend, "cute_dsl_impl": "modular"}
    assert received("0.7.4", arguments(**modular))["cute_dsl_impl"] == "modular"
    for more in ({"q_len": 2}, {"return_lse": True}, compact(), dcp()):
        error = refusal("0.7.4", **modular, **more)
        assert error.argument == "cute_dsl_impl"
        assert "has no causal mask between query tokens, and no LSE" in error.summary
    received("0.7.4", arguments(q_len=2, backend="trtllm-gen", cute_dsl_impl="modular"))


@pytest.mark.parametrize("version", ["0.6.13", "0.6.15.post1"])
def test_equal_lengths_with_fp8_are_refused_where_they_may_hang(version: str) -> None:
    hangs = {"is_var_seq": False, "dtype": torch.float8_e4m3fn}
    for backend in ("auto", "cute-dsl"):
        error = refusal(version, **hangs, backend=backend)
        assert error.argument == "is_var_seq"
        assert f"flashinfer-python {version}" in error.found
    received(version, arguments(**hangs, backend="trtllm-gen"))
    received(version, arguments(is_var_seq=False))
    received("0.6.12", arguments(**hangs))
    received("0.6.16", arguments(**hangs))


@pytest.mark.parametrize("changes", [{"backend": "cute-dsl"}, dcp()])
def test_the_fp16_softmax_is_trtllm_gens(changes: dict[str, Any]) -> None:
    error = refusal("0.7.4", use_fp16_softmax=True, **changes)
    assert error.argument == "use_fp16_softmax"
    assert received("0.7.4", arguments(use_fp16_softmax=False, **changes))


def test_before_the_first_record_it_is_another_function() -> None:
    kernel = mock_kernel(recorded("0.6.0")._replace(version="0.5.3"))
    with use_kernel(kernel), pytest.raises(FlashInferVersionError) as raised:
        dropin(**arguments())
    kernel.assert_not_called()
    assert str(raised.value) == (
        "trtllm_batch_decode_with_kv_cache_mla is another function before 0.6.0.\n"
        "Found: flashinfer-python 0.5.3.\n"
        "Needed: 0.6.0 or newer.\n"
        'Fix: pip install -U "flashinfer-python>=0.6.0".'
    )


def test_the_scale_format_of_packed_caches_switches_no_check_off() -> None:
    # FlashInfer does not read it with a dense cache.
    given = {"kv_scale_format": "ue8m0"}
    assert received("0.7.4", arguments(**given, **dcp()))["enable_dcp"] is True
    with use_kernel(mock_kernel("0.7.4")), pytest.raises(InvalidInputError, match="int32"):
        dropin(**arguments(**given, seq_lens=torch.full((2,), 7)))


def test_the_reference_computes_dense_mla_only() -> None:
    for changes in ({"sparse_mla_top_k": 8}, {"uses_shared_paged_kv_idx": False}):
        with pytest.raises(UnsupportedConfigError, match="computes dense MLA only"):
            dropin(**arguments(backend="reference", **changes))
    packed = {"kv_cache": torch.zeros(4, 1, 64, 576, dtype=torch.uint8)}
    with pytest.raises(UnsupportedConfigError, match="computes dense MLA only"):
        dropin(**arguments(backend="reference") | packed)
