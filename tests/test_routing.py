"""Which backend runs, and with which keywords, release by release."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fi_dcp_compat import (
    FlashInferVersionError,
    UnsupportedConfigError,
    decode_mla,
    recorded,
)
from fi_dcp_compat.config import Config
from fi_dcp_compat.features import LseBase
from fi_dcp_compat.routing import Route, route
from fi_dcp_compat.testing import mock_kernel, use_kernel
from tests.support import DCP_RELEASES, RELEASES, call

BOTH = ("trtllm-gen", "cute-dsl")
COMPACT = {"varlen": True, "q_len": 3}


def from_release(first: str) -> tuple[str, ...]:
    return RELEASES[RELEASES.index(first) :]


def until_release(last: str) -> tuple[str, ...]:
    return RELEASES[: RELEASES.index(last) + 1]


def routed(version: str, lse_base: LseBase = "e", **chosen: Any) -> Route:
    config = Config(16, 1, 64, "bfloat16", "bfloat16", block_table_width=2, batch=2)
    return route(recorded(version), config._replace(**chosen), lse_base)


@pytest.mark.parametrize("version", RELEASES)
def test_auto_stays_auto_where_both_backends_can_run(version: str) -> None:
    path = routed(version)
    # 0.6.12's auto never picks cute-dsl; from 0.6.13 a tuner chooses.
    assert path.may_run == (BOTH if version != "0.6.12" else ("trtllm-gen",))
    assert path.backend == "auto"
    assert (path.return_lse_base, path.lse_factor) == (None, None)


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("lse_base", ["e", "2"])
def test_an_lse_never_comes_from_auto_where_its_base_is_open(
    version: str, lse_base: LseBase
) -> None:
    path = routed(version, lse_base, return_lse=True)
    if version in from_release("0.7.1"):
        assert (path.backend, path.may_run) == ("auto", BOTH)
    else:
        assert (path.backend, path.may_run) == ("trtllm-gen", ("trtllm-gen",))


@pytest.mark.parametrize("version", RELEASES)
def test_the_base_of_an_lse_is_named_from_0_7_1_and_multiplied_in_before(version: str) -> None:
    named = version in from_release("0.7.1")

    def states(backend: str, lse_base: LseBase) -> tuple[str | None, float | None]:
        path = routed(version, lse_base, backend=backend, return_lse=True)
        assert path.backend == backend
        return path.return_lse_base, path.lse_factor

    assert states("trtllm-gen", "e") == (("basee", None) if named else (None, math.log(2)))
    assert states("trtllm-gen", "2") == (("base2", None) if named else (None, None))
    if version != "0.6.12":
        assert states("cute-dsl", "e") == (("basee", None) if named else (None, None))
        assert states("cute-dsl", "2") == (("base2", None) if named else (None, math.log2(math.e)))


@pytest.mark.parametrize("version", DCP_RELEASES)
@pytest.mark.parametrize("backend", ["auto", "cute-dsl"])
def test_dcp_runs_on_cute_dsl_by_name_and_returns_an_lse(version: str, backend: str) -> None:
    path = routed(version, backend=backend, dcp_world_size=8)
    assert (path.backend, path.may_run) == ("cute-dsl", ("cute-dsl",))
    assert not path.counter_buffer
    named = version in from_release("0.7.1")
    assert path.return_lse_base == ("basee" if named else None)
    assert path.lse_factor is None
    base2 = routed(version, "2", backend=backend, dcp_world_size=8)
    assert base2.return_lse_base == ("base2" if named else None)
    assert base2.lse_factor == (None if named else math.log2(math.e))


@pytest.mark.parametrize(
    ("chosen", "runs_from"),
    [
        pytest.param({"num_heads": 96}, "0.6.12", id="96 heads"),
        pytest.param({"num_heads": 96, "return_lse": True}, "0.6.13", id="96 heads with an LSE"),
        pytest.param({"dtype": "float16", "kv_dtype": "float16"}, "0.6.12", id="fp16"),
        pytest.param({"page_size": 128}, "0.6.12", id="page size 128"),
        pytest.param({"page_size": 16, "block_table_width": 8}, "0.6.12", id="page size 16"),
        pytest.param(COMPACT | {"return_lse": True}, "0.6.16", id="compact queries with an LSE"),
    ],
)
def test_auto_names_cute_dsl_where_trtllm_gen_cannot_run(
    chosen: dict[str, Any], runs_from: str
) -> None:
    for version in from_release(runs_from):
        path = routed(version, **chosen)
        assert (path.backend, path.may_run) == ("cute-dsl", ("cute-dsl",))
        assert not path.counter_buffer
    for version in RELEASES[: RELEASES.index(runs_from)]:
        with pytest.raises((FlashInferVersionError, UnsupportedConfigError), match="backend="):
            routed(version, **chosen)


@pytest.mark.parametrize(
    ("chosen", "runs_from"),
    [
        pytest.param({"sinks": True, "q_len": 2}, "0.6.12", id="sinks with two query tokens"),
        pytest.param({"sinks": True, "return_lse": True}, "0.6.12", id="sinks with an LSE"),
        pytest.param({"skip_softmax": True}, "0.6.12", id="skip-softmax"),
        pytest.param({"tensor_scales": True}, "0.6.12", id="tensor scales"),
        pytest.param({"kv_lora_rank": 256}, "0.6.12", id="256 wide"),
        pytest.param({"num_heads": 256}, "0.6.12", id="256 heads"),
        pytest.param({"block_table_width": 3}, "0.6.16", id="an unaligned table width"),
    ],
)
def test_auto_names_trtllm_gen_where_cute_dsl_cannot_run(
    chosen: dict[str, Any], runs_from: str
) -> None:
    for version in from_release(runs_from):
        path = routed(version, **chosen)
        assert (path.backend, path.may_run) == ("trtllm-gen", ("trtllm-gen",))
        assert path.counter_buffer == (version in from_release("0.6.15"))
    for version in RELEASES[: RELEASES.index(runs_from)]:
        with pytest.raises(UnsupportedConfigError, match="3 pages wide"):
            routed(version, **chosen)


@pytest.mark.parametrize(
    ("chosen", "only_trtllm_gen_until"),
    [
        pytest.param({"q_len": 2}, "0.6.12", id="two query tokens"),
        pytest.param({"q_len": 5}, "0.6.14", id="five query tokens"),
        pytest.param(COMPACT, "0.6.15", id="compact queries"),
    ],
)
def test_auto_names_trtllm_gen_until_cute_dsl_can_run_it(
    chosen: dict[str, Any], only_trtllm_gen_until: str
) -> None:
    for version in RELEASES:
        if version in until_release("0.6.13") and "varlen" in chosen:
            continue
        expected = "trtllm-gen" if version in until_release(only_trtllm_gen_until) else "auto"
        assert routed(version, **chosen).backend == expected


def test_auto_names_cute_dsl_until_trtllm_gen_pads_the_heads() -> None:
    for num_heads in (24, 40):
        for version in RELEASES:
            expected = "cute-dsl" if version in until_release("0.6.15") else "auto"
            assert routed(version, num_heads=num_heads).backend == expected


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("backend", ["trtllm-gen", "cute-dsl", "reference"])
def test_a_backend_that_is_named_is_the_one_that_runs(version: str, backend: str) -> None:
    path = routed(version, backend=backend)
    assert (path.backend, path.may_run) == (backend, (backend,))


@pytest.mark.parametrize("version", RELEASES)
def test_the_counter_buffer_is_for_trtllm_gen_since_0_6_15(version: str) -> None:
    known = version in from_release("0.6.15")
    assert routed(version).counter_buffer == known
    assert routed(version, backend="trtllm-gen").counter_buffer == known
    assert not routed(version, backend="cute-dsl").counter_buffer
    assert not routed(version, backend="reference").counter_buffer
    assert not routed(version, num_heads=128, compute_capability=(12, 0)).counter_buffer


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("capability", [(10, 0), (10, 3), None])
def test_10_0_and_10_3_run_what_is_run_without_asking(
    version: str, capability: tuple[int, int] | None
) -> None:
    assert routed(version, compute_capability=capability) == routed(version)


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("capability", [(12, 0), (12, 1)])
def test_12_runs_xqa_by_name(version: str, capability: tuple[int, int]) -> None:
    path = routed(version, num_heads=128, compute_capability=capability)
    assert path == Route("xqa", ("xqa",), False, None, None)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (11, 0)])
def test_8_9_and_11_are_refused(capability: tuple[int, int]) -> None:
    for version in RELEASES:
        for backend in ("auto", "trtllm-gen", "cute-dsl", "xqa"):
            with pytest.raises(
                UnsupportedConfigError,
                match=rf"compute capability {capability[0]}\.{capability[1]}",
            ):
                routed(version, backend=backend, num_heads=128, compute_capability=capability)


def test_10_7_runs_trtllm_gen_from_0_6_16_and_cute_dsl_from_0_6_18() -> None:
    for version in RELEASES:
        if version in until_release("0.6.15"):
            with pytest.raises(FlashInferVersionError, match=r"10\.7"):
                routed(version, compute_capability=(10, 7))
            continue
        expected = "trtllm-gen" if version in ("0.6.16", "0.6.17") else "auto"
        assert routed(version, compute_capability=(10, 7)).backend == expected
    for version in DCP_RELEASES:
        if version == "0.6.17":
            with pytest.raises(FlashInferVersionError, match=r"0\.6\.18"):
                routed(version, compute_capability=(10, 7), dcp_world_size=2)
        else:
            path = routed(version, compute_capability=(10, 7), dcp_world_size=2)
            assert path.backend == "cute-dsl"


def test_the_reference_returns_the_base_asked_for_and_nothing_is_multiplied() -> None:
    for version in RELEASES:
        path = routed(version, "e", backend="reference", return_lse=True)
        assert path.lse_factor is None
    assert routed("0.7.4", "2", backend="reference", return_lse=True).return_lse_base == "base2"


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("lse_base", ["e", "2"])
def test_the_lse_that_comes_back_is_in_the_base_asked_for(version: str, lse_base: str) -> None:
    """The mock returns 1 in the backend's own base, whatever that is; the result is converted."""
    kernel = mock_kernel(version)
    with use_kernel(kernel, recorded(version)):
        _, lse = decode_mla(**call(backend="trtllm-gen", lse_base=lse_base), return_lse=True)
        got = kernel.call_args.kwargs
    if version in from_release("0.7.1"):
        assert got["return_lse_base"] == ("basee" if lse_base == "e" else "base2")
        assert lse.unique().tolist() == [1.0]
    else:
        assert "return_lse_base" not in got
        expected = math.log(2) if lse_base == "e" else 1.0
        torch.testing.assert_close(lse, torch.full_like(lse, expected))


def test_a_caller_buffer_is_converted_in_place() -> None:
    kernel, lse = mock_kernel("0.7.0"), torch.empty(2, 1, 16)
    with use_kernel(kernel, recorded("0.7.0")):
        state = decode_mla(**call(backend="trtllm-gen", lse=lse), return_lse=True)
    assert state.lse is lse
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(2)))


def test_a_refused_configuration_is_refused_each_time_though_routes_are_cached() -> None:
    for _ in range(2):
        with pytest.raises(UnsupportedConfigError, match="256") as raised:
            routed("0.7.4", page_size=256)
        assert len(raised.value.reasons) == 2
    assert routed("0.7.4") is routed("0.7.4")
