"""What the drop-in mends: the LSE's base, the backend, views for old releases; and its checks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from fi_dcp_compat import (
    FlashInferVersionError,
    InvalidInputError,
    NotPreparedError,
    UnsupportedConfigError,
    debug_checks,
    merge_dcp_states,
    recorded,
)
from fi_dcp_compat.dropin import trtllm_batch_decode_with_kv_cache_mla as dropin
from fi_dcp_compat.testing import mock_kernel, use_kernel
from tests.hostsim.batches import random_batch
from tests.support import RELEASES
from tests.test_dropin import OLD, arguments, compact, dcp, received
from tests.test_guards import gpu


def lse_of(version: str, **changes: Any) -> float:
    """The LSE that the drop-in returns where the kernel wrote 1."""
    with use_kernel(mock_kernel(version)):
        result = dropin(**arguments(return_lse=True, **changes))
    assert isinstance(result, tuple)
    return float(result[1].flatten()[0])


# The base of the LSE.


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("backend", ["trtllm-gen", "cute-dsl"])
@pytest.mark.parametrize("base", ["basee", "base2"])
def test_the_base_asked_for_comes_from_every_release(version: str, backend: str, base: str) -> None:
    if (version, backend) == ("0.6.12", "cute-dsl"):
        with pytest.raises(FlashInferVersionError, match=r"0\.6\.13"):
            lse_of(version, backend=backend)
        return
    natural = backend == "cute-dsl"
    factor = {("basee", False): math.log(2), ("base2", True): math.log2(math.e)}
    given = {"backend": backend, "return_lse_base": base}
    if Version(version) >= Version("0.7.1"):
        assert lse_of(version, **given) == 1.0
        got = received(version, arguments(return_lse=True, **given))
        assert got["return_lse_base"] == base
    else:
        assert lse_of(version, **given) == pytest.approx(factor.get((base, natural), 1.0))
        assert "return_lse_base" not in received(version, arguments(return_lse=True, **given))


@pytest.mark.parametrize("version", RELEASES)
def test_auto_names_a_backend_where_it_leaves_the_base_open(version: str) -> None:
    given = arguments(return_lse=True)
    named = None if Version(version) >= Version("0.7.1") else "trtllm-gen"
    for base in (None, "basee"):
        assert received(version, given | {"return_lse_base": base}).get("backend") == named
    assert lse_of(version, return_lse_base="base2") == 1.0


def test_a_base_without_an_lse_is_left_out() -> None:
    assert "return_lse_base" not in received("0.7.4", arguments(return_lse_base="base2"))
    received("0.6.0", arguments(return_lse_base="base2"))


@pytest.mark.parametrize("version", RELEASES)
def test_the_callers_lse_buffer_is_converted_in_place(version: str) -> None:
    lse = torch.zeros(2, 1, 16)
    with use_kernel(mock_kernel(version)):
        _, got = dropin(**arguments(return_lse=True, lse=lse, return_lse_base="basee"))
    assert got is lse
    expected = 1.0 if Version(version) >= Version("0.7.1") else math.log(2)
    torch.testing.assert_close(lse, torch.full_like(lse, expected))


def test_cakes_base_is_converted_here_since_it_leaves_the_keyword_unread() -> None:
    given = arguments(backend="cake", return_lse=True, return_lse_base="basee")
    assert "return_lse_base" not in received("0.7.4", given)
    assert lse_of("0.7.4", backend="cake", return_lse_base="basee") == pytest.approx(math.log(2))
    assert lse_of("0.7.4", backend="cake", return_lse_base="base2") == 1.0


@pytest.mark.parametrize("version", ["0.6.14", "0.7.0", "0.7.4"])
def test_the_base_of_sparse_mla_is_converted_too(version: str) -> None:
    sparse = {
        "sparse_mla_top_k": 128,
        "block_tables": torch.zeros(2, 1, 128, dtype=torch.int32),
        "return_lse_base": "basee",
    }
    expected = 1.0 if version == "0.7.4" else math.log(2)
    for backend in ("auto", "sparse", "trtllm-gen"):
        assert lse_of(version, backend=backend, **sparse) == pytest.approx(expected)


def test_dcp_has_the_base_asked_for() -> None:
    for version, base, expected in (
        ("0.6.17", None, 1.0),
        ("0.6.17", "basee", 1.0),
        ("0.6.17", "base2", math.log2(math.e)),
        ("0.7.4", "base2", 1.0),
    ):
        with use_kernel(mock_kernel(version)):
            result = dropin(**arguments(**dcp(), return_lse_base=base))
        assert float(result[1].flatten()[0]) == pytest.approx(expected)


# The backend.


@pytest.mark.parametrize(
    ("version", "changes", "backend"),
    [
        pytest.param("0.6.15", {"heads": 24}, "cute-dsl", id="24 heads"),
        pytest.param("0.6.16", {"heads": 24}, None, id="24 heads are padded"),
        pytest.param("0.6.13", {"page_size": 128}, "cute-dsl", id="pages of 128"),
        pytest.param("0.7.4", {"heads": 96}, "cute-dsl", id="96 heads"),
        pytest.param("0.6.12", {"q_len": 3}, "trtllm-gen", id="no causal mask"),
        pytest.param("0.7.4", {"q_len": 3, "sinks": torch.zeros(16)}, "trtllm-gen", id="sinks"),
        pytest.param("0.7.4", {"sinks": torch.zeros(16)}, None, id="sinks, one token"),
        pytest.param("0.6.14", compact(), "trtllm-gen", id="compact"),
        pytest.param("0.6.16", compact(), None, id="compact on both"),
        pytest.param("0.7.4", {"width": 3}, "trtllm-gen", id="an odd table"),
    ],
)
def test_auto_becomes_the_backend_that_is_right_where_its_own_choice_is_not(
    version: str, changes: dict[str, Any], backend: str | None
) -> None:
    assert received(version, arguments(**changes)).get("backend") == backend


@pytest.mark.usefixtures("_sm120")
def test_12_is_xqas_and_its_scales_are_what_it_multiplies() -> None:
    out = torch.zeros(2, 1, 128, 512, dtype=torch.bfloat16)
    given = arguments(heads=128, bmm1_scale=0.2, bmm2_scale=2.0, out=out)
    kernel = mock_kernel("0.7.4")
    with use_kernel(kernel):
        assert dropin(**given) is out
    got = kernel.call_args.kwargs
    assert (got["bmm1_scale"], got["bmm2_scale"]) == (0.1, 2.0)
    assert got["out"].shape == (2, 128, 512)
    assert got["out"].data_ptr() == out.data_ptr()
    flat = out.squeeze(1)
    with use_kernel(kernel):
        assert dropin(**given | {"out": flat}) is flat


@pytest.fixture
def _sm120() -> Iterator[None]:
    with gpu((12, 0)):
        yield


# Counters, thresholds, bounds.


@pytest.mark.parametrize(
    ("version", "changes", "forwarded"),
    [
        ("0.6.14", {}, False),
        ("0.6.15", {}, True),
        ("0.7.4", {}, True),
        ("0.7.4", {"backend": "trtllm-gen"}, True),
        ("0.7.4", {"backend": "cute-dsl"}, False),
        ("0.7.4", {"heads": 96}, False),
        ("0.7.4", dcp(), False),
        ("0.6.0", {}, False),
    ],
)
def test_counters_go_where_trtllm_gen_can_run(
    version: str, changes: dict[str, Any], forwarded: bool
) -> None:
    counters = torch.zeros(4096, dtype=torch.uint8)
    got = received(version, arguments(multi_ctas_kv_counter_buffer=counters, **changes))
    assert (got.get("multi_ctas_kv_counter_buffer") is counters) is forwarded
    assert ("multi_ctas_kv_counter_buffer" in got) is forwarded


def test_a_threshold_of_0_is_left_out_and_another_forwarded() -> None:
    name = "skip_softmax_threshold_scale_factor"
    assert name not in received("0.7.4", arguments(**{name: 0.0}))
    assert name not in received("0.6.0", arguments(**{name: 0.0}))
    assert received("0.6.4", arguments(**{name: 1e-3}))[name] == 1e-3
    with pytest.raises(FlashInferVersionError, match=r"Needed: 0\.6\.4 or newer"):
        received("0.6.3", arguments(**{name: 1e-3}))
    with pytest.raises(UnsupportedConfigError, match=r"cute-dsl.*does not take skip_softmax"):
        received("0.7.4", arguments(backend="cute-dsl", **{name: 1e-3}))
    with pytest.raises(InvalidInputError, match="finite float of at least 0"):
        received("0.7.4", arguments(**{name: -1.0}))


def test_a_rank_without_keys_passes_1_as_max_seq_len() -> None:
    empty = torch.zeros(2, dtype=torch.int32)
    given = arguments(seq_lens=empty, max_seq_len=0, **dcp(rank=7, tokens=3))
    assert received("0.6.17", given)["max_seq_len"] == 1
    with pytest.raises(InvalidInputError, match="max_seq_len must be an int of at least 1"):
        received("0.6.17", arguments(seq_lens=empty, max_seq_len=0))


def test_an_lse_buffer_without_return_lse_is_left_out() -> None:
    assert "lse" not in received("0.7.4", arguments(lse=torch.zeros(2, 16)))
    assert "lse" not in received("0.6.0", arguments(lse=torch.zeros(2, 16)))


# Views for old releases.


def test_0_6_0_gets_a_cache_in_four_dimensions() -> None:
    given = arguments()
    flat = given["kv_cache"].squeeze(1)
    got = received("0.6.0", given | {"kv_cache": flat})["kv_cache"]
    assert got.shape == given["kv_cache"].shape
    assert got.data_ptr() == flat.data_ptr()
    assert received("0.6.1", given | {"kv_cache": flat})["kv_cache"] is flat


def test_before_0_6_8_an_output_buffer_is_of_one_token_a_request() -> None:
    out = torch.zeros(2, 1, 16, 512, dtype=torch.bfloat16)
    kernel = mock_kernel("0.6.7")
    with use_kernel(kernel):
        assert dropin(**arguments(out=out)) is out
    assert kernel.call_args.kwargs["out"].shape == (2, 16, 512)
    assert out.eq(1).all()
    assert received("0.6.8", arguments(out=out))["out"] is out
    several = torch.zeros(2, 3, 16, 512, dtype=torch.bfloat16)
    with pytest.raises(FlashInferVersionError) as raised:
        received("0.6.7", arguments(q_len=3, out=several))
    assert str(raised.value) == (
        "trtllm_batch_decode_with_kv_cache_mla(out=...) with several query tokens needs "
        "FlashInfer's output buffers of [B, q_len, H, kv_lora_rank].\n"
        "Found: flashinfer-python 0.6.7.\n"
        "Needed: 0.6.8 or newer.\n"
        'Fix: pip install -U "flashinfer-python>=0.6.8", or call without the buffer.'
    )
    assert received("0.6.8", arguments(q_len=3, out=several))["out"] is several


def test_0_6_12_gets_an_lse_buffer_in_two_dimensions() -> None:
    lse = torch.zeros(2, 3, 16)
    got = received("0.6.12", arguments(q_len=3, return_lse=True, lse=lse))["lse"]
    assert got.shape == (6, 16)
    assert got.data_ptr() == lse.data_ptr()
    assert received("0.6.13", arguments(q_len=3, return_lse=True, lse=lse))["lse"] is lse


# The checks of `decode_mla`.


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "interleave 64": (
        dcp() | {"interleave_size": 64},
        UnsupportedConfigError,
        "cp_kv_cache_interleave_size=64 cannot be masked natively",
    ),
    "256 heads": ({"heads": 256, **dcp()}, UnsupportedConfigError, "cannot run 256 query heads"),
    "pages of 48": ({"page_size": 48, **dcp()}, UnsupportedConfigError, "pages of 48 tokens"),
    "an odd table": ({"width": 295, **dcp()}, UnsupportedConfigError, "the next is 296"),
    "sinks with DCP": (
        {"sinks": torch.zeros(16), **dcp()},
        UnsupportedConfigError,
        "sinks cannot be combined with DCP",
    ),
    "trtllm-gen with DCP": (
        {"backend": "trtllm-gen", **dcp()},
        UnsupportedConfigError,
        "backend='trtllm-gen' has no DCP mask",
    ),
    "int64 lengths": (
        {"seq_lens": torch.full((2,), 7)},
        InvalidInputError,
        "seq_lens must be torch.int32, not torch.int64",
    ),
    "int64 pages": (
        {"block_tables": torch.zeros(2, 2, dtype=torch.int64)},
        InvalidInputError,
        "block_tables must be torch.int32",
    ),
    "int64 global lengths": (
        dcp() | {"causal_seqlens_kv_global": torch.full((2,), 55)},
        InvalidInputError,
        "causal_seqlens_kv_global must be torch.int32",
    ),
    "no global lengths": (
        dcp() | {"causal_seqlens_kv_global": None},
        InvalidInputError,
        "causal_seqlens_kv_global must be given with DCP",
    ),
    "no global lengths on one rank": (
        dcp(world=1, rank=0) | {"causal_seqlens_kv_global": None},
        InvalidInputError,
        "causal_seqlens_kv_global must be given with DCP",
    ),
    "tensor scales with DCP": (
        {"bmm1_scale": torch.ones(1), **dcp()},
        UnsupportedConfigError,
        "does not take tensor scales",
    ),
    "no lengths": ({"seq_lens": None}, InvalidInputError, "seq_lens must be a tensor"),
    "a small workspace": (
        {"workspace_buffer": torch.zeros(64, dtype=torch.int8), "return_lse": True},
        InvalidInputError,
        "workspace_buffer is too small",
    ),
    "an output in fp16": (
        {"out": torch.zeros(2, 1, 16, 512, dtype=torch.float16)},
        InvalidInputError,
        "out must be torch.bfloat16",
    ),
    "an LSE of another batch": (
        {"lse": torch.zeros(3, 16), "return_lse": True},
        InvalidInputError,
        "lse must have shape",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_dense_call_is_checked_as_decode_mla_checks_it(name: str) -> None:
    changes, error, message = REFUSED[name]
    kernel = mock_kernel("0.7.4")
    with use_kernel(kernel), pytest.raises(error, match=message) as raised:
        dropin(**arguments(**changes))
    assert raised.type is error
    kernel.assert_not_called()


def test_debug_mode_checks_the_values_of_a_drop_in_call() -> None:
    given = arguments(**dcp(tokens=9))
    received("0.7.4", given)
    with debug_checks(), pytest.raises(InvalidInputError, match=r"seq_lens.0. does not fit causal"):
        received("0.7.4", given)
    kernel = mock_kernel("0.7.4")
    nan = torch.full((2, 1, 16, 512), torch.nan)
    kernel.side_effect = lambda **_: (nan, torch.ones(2, 16))
    with debug_checks(), use_kernel(kernel), pytest.raises(InvalidInputError, match="holds NaN"):
        dropin(**arguments(**dcp()))


def test_a_first_compilation_inside_a_capture_is_not_prepared() -> None:
    kernel = mock_kernel("0.7.4")
    text = "CuTe DSL MLA must be prepared before CUDA graph capture"
    kernel.side_effect = RuntimeError(text)
    with use_kernel(kernel), pytest.raises(NotPreparedError):
        dropin(**arguments(**dcp()))


@pytest.mark.parametrize("version", OLD)
def test_before_0_6_12_a_call_is_flashinfers_own(version: str) -> None:
    given = arguments(heads=24, page_size=128, seq_lens=torch.full((2,), 7))
    assert received(version, given)["seq_lens"] is given["seq_lens"]


def test_compact_queries_may_leave_max_q_len_to_flashinfer() -> None:
    given = arguments() | compact()
    del given["max_q_len"]
    assert "max_q_len" not in received("0.7.4", given)
    lengths: Tensor = given["cum_seq_lens_q"]
    assert received("0.7.4", given)["cum_seq_lens_q"] is lengths


def test_recorded_features_agree_with_what_is_mended() -> None:
    assert recorded("0.6.0").features.kv_cache_3d is False
    assert recorded("0.6.7").features.out_4d is False
    assert recorded("0.6.12").features.lse_3d is False


# The torch reference.


@pytest.mark.parametrize("base", [None, "basee", "base2"])
def test_the_reference_computes_by_name_without_flashinfer_or_a_gpu(base: Any) -> None:
    requests = random_batch([3, 3], [37, 140])
    given = {
        **arguments(),
        **requests.paged(),
        "query": requests.query(),
        "bmm1_scale": requests.scale,
        "bmm2_scale": requests.output_scale,
        "backend": "reference",
        "return_lse": True,
        "return_lse_base": base,
    }
    out, lse = dropin(**given)
    expected, natural = requests.expected()
    assert (out.shape, lse.shape) == ((2, 3, 4, 512), (6, 4))
    torch.testing.assert_close(out.double().flatten(0, 1), expected, rtol=2**-7, atol=2**-7)
    scale = math.log2(math.e) if base == "base2" else 1.0
    torch.testing.assert_close(lse.double(), natural * scale, rtol=1e-5, atol=1e-5)


def test_the_reference_merges_ranks_as_decode_mla_does() -> None:
    requests, world = random_batch([2, 2], [37, 140]), 4
    states = []
    for rank in range(world):
        ranks = {
            "enable_dcp": True,
            "cp_world": world,
            "cp_rank": rank,
            "causal_seqlens_kv_global": requests.bounds(),
            "return_lse": True,
        }
        given = arguments() | requests.paged(rank, world) | ranks
        given |= {"query": requests.query(), "bmm1_scale": requests.scale}
        given |= {"bmm2_scale": requests.output_scale, "backend": "reference"}
        out, lse = dropin(**given)
        states.append((out, lse.view(out.shape[:-1])))
    merged = merge_dcp_states([out for out, _ in states], [lse for _, lse in states])
    expected, _ = requests.expected()
    torch.testing.assert_close(merged.out.double().flatten(0, 1), expected, rtol=2**-7, atol=2**-7)
    out, lse = states[0]
    with pytest.raises(InvalidInputError, match="FlashInfer's own LSE is flat"):
        merge_dcp_states([out], [lse.flatten(0, 1)])


# What FlashInfer takes in another form, or not at all.


def test_an_empty_batch_is_answered_without_a_kernel() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    empty = {"seq_lens": none, "block_tables": torch.zeros(0, 2, dtype=torch.int32)}
    empty["query"] = torch.zeros(0, 3, 16, 576, dtype=torch.bfloat16)
    kernel = mock_kernel("0.7.4")
    with use_kernel(kernel):
        assert dropin(**arguments(**empty)).shape == (0, 3, 16, 512)
        out, lse = dropin(**arguments(**empty, **dcp(batch=0)))
        mine = torch.zeros(0, 16), torch.zeros(0, 3, 16, 512, dtype=torch.bfloat16)
        buffers = {"lse": mine[0], "out": mine[1], "return_lse": True}
        got = dropin(**arguments(**empty, **buffers))
    kernel.assert_not_called()
    assert (out.shape, out.dtype) == ((0, 3, 16, 512), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((0, 16), torch.float32)
    assert got[0] is mine[1]
    assert got[1] is mine[0]


@pytest.mark.parametrize("backend", ["sparse", "cake", "auto", "trtllm-gen"])
def test_counters_of_sparse_mla_go_to_trtllm_gen_alone(backend: str) -> None:
    counters = torch.zeros(4096, dtype=torch.uint8)
    given = arguments(
        backend=backend,
        sparse_mla_top_k=128,
        block_tables=torch.zeros(2, 1, 128, dtype=torch.int32),
        multi_ctas_kv_counter_buffer=counters,
    )
    forwarded = "multi_ctas_kv_counter_buffer" in received("0.7.4", given)
    assert forwarded is (backend in ("auto", "trtllm-gen"))


def test_a_flat_output_buffer_is_viewed_as_the_kernel_takes_it() -> None:
    flat = torch.zeros(6, 16, 512, dtype=torch.bfloat16)
    kernel = mock_kernel("0.7.4")
    with use_kernel(kernel):
        assert dropin(**arguments(q_len=3, out=flat)) is flat
    assert kernel.call_args.kwargs["out"].shape == (2, 3, 16, 512)
    assert flat.eq(1).all()
    with pytest.raises(FlashInferVersionError, match="with several query tokens"):
        received("0.6.7", arguments(q_len=3, out=flat))


def test_a_list_of_sinks_is_unwrapped_and_a_query_length_that_says_nothing_left_out() -> None:
    sinks = torch.zeros(16)
    got = received("0.7.4", arguments(backend="trtllm-gen", sinks=[sinks], max_q_len=1))
    assert got["sinks"] is sinks
    assert "max_q_len" not in got
    with pytest.raises(InvalidInputError, match="max_q_len=2"):
        received("0.7.4", arguments(max_q_len=2))


def test_one_rank_without_keys_passes_1_as_max_seq_len_too() -> None:
    empty = torch.zeros(2, dtype=torch.int32)
    given = arguments(seq_lens=empty, max_seq_len=0, **dcp(world=1, rank=0, tokens=0))
    assert received("0.7.4", given)["max_seq_len"] == 1
    for wrong in (torch.zeros(2), torch.zeros(()), None, 0.0):
        with pytest.raises(InvalidInputError, match="max_seq_len"):
            received("0.7.4", arguments(**dcp()) | {"max_seq_len": wrong})


@pytest.mark.parametrize(
    "offsets",
    [
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(3, 1, dtype=torch.int32),
        torch.zeros(3, dtype=torch.float8_e4m3fn),
        torch.zeros(3, dtype=torch.int32, device="meta"),
    ],
    ids=str,
)
def test_offsets_are_looked_at_before_they_are_read(offsets: Tensor) -> None:
    given = arguments(**compact() | {"cum_seq_lens_q": offsets})
    del given["max_q_len"]
    with pytest.raises(InvalidInputError, match="cum_seq_lens_q"):
        received("0.7.4", given)


@pytest.mark.parametrize(
    ("changes", "argument"),
    [({"kv_cache": torch.zeros(576).bfloat16()}, "kv_cache"), ({"enable_pdl": 1}, "enable_pdl")],
)
def test_what_the_checks_rest_on_is_looked_at_first(changes: dict[str, Any], argument: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{argument} must be") as raised:
        received("0.7.4", arguments() | changes)
    assert raised.value.argument == argument
