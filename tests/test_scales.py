"""The scales of the two products: what the kernel gets, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fi_dcp_compat import (
    InvalidInputError,
    UnsupportedConfigError,
    bmm_scales,
    decode_mla,
    prepare_decode_mla,
    recorded,
)
from fi_dcp_compat.scales import skip_softmax_factor
from fi_dcp_compat.testing import mock_kernel, use_kernel
from tests.support import call, dcp_of

FP8 = torch.float8_e4m3fn
OTHERS = [torch.bfloat16, torch.float16, torch.float32]


def kernel_got(given: dict[str, Any], version: str = "0.7.4") -> dict[str, Any]:
    kernel = mock_kernel(version)
    with use_kernel(kernel, recorded(version)):
        decode_mla(**given)
    return dict(kernel.call_args.kwargs)


def fp8_call(**changes: Any) -> dict[str, Any]:
    given = call(dtype=FP8)
    del given["bmm2_scale"]
    return given | changes


# bmm_scales


@pytest.mark.parametrize("dtype", OTHERS)
def test_a_cache_that_is_not_quantised_is_not_scaled(dtype: torch.dtype) -> None:
    assert bmm_scales(0.1, dtype) == (0.1, 1.0)
    # What a stack passes whatever the cache is, and means nothing.
    assert bmm_scales(0.1, dtype, q_scale=1.0, k_scale=1.0) == (0.1, 1.0)


@pytest.mark.parametrize("name", ["softmax_scale", "q_scale", "k_scale"])
@pytest.mark.parametrize(
    "wrong", [0, 0.0, -0.5, math.nan, math.inf, -math.inf, True, "0.5", [0.5]], ids=repr
)
def test_a_scale_that_is_no_positive_number_is_refused(name: str, wrong: Any) -> None:
    scales: dict[str, Any] = {"softmax_scale": 0.1, "q_scale": 1.0, "k_scale": 1.0, name: wrong}
    with pytest.raises(InvalidInputError, match=f"{name} must be") as raised:
        bmm_scales(kv_dtype=FP8, **scales)
    assert raised.value.argument == name
    assert "positive finite float" in raised.value.needed


@pytest.mark.parametrize("name", ["softmax_scale", "q_scale", "k_scale"])
@pytest.mark.parametrize("scale", [torch.tensor(0.5), torch.ones(2)], ids=["one", "two"])
def test_a_scale_in_a_tensor_is_refused_for_a_host_float(name: str, scale: Tensor) -> None:
    scales: dict[str, Any] = {"softmax_scale": 0.1, "q_scale": 1.0, "k_scale": 1.0, name: scale}
    with pytest.raises(InvalidInputError, match=f"{name} must be a float") as raised:
        bmm_scales(kv_dtype=FP8, **scales)
    assert raised.value.argument == name
    assert raised.value.found == f"{name}: {list(scale.shape)} torch.float32 on cpu."
    assert raised.value.needed == "a host float."


@pytest.mark.parametrize("name", ["q_scale", "k_scale"])
@pytest.mark.parametrize(
    "wrong",
    [torch.tensor(1.0), torch.tensor(0.5), torch.ones(2), True, math.nan, "1.0"],
    ids=repr,
)
def test_a_scale_of_a_wrong_type_is_refused_for_a_cache_that_is_not_quantised(
    name: str, wrong: Any
) -> None:
    """Comparing a tensor with 1 would copy it to the host, or raise without a name."""
    scale: dict[str, Any] = {name: wrong}
    with pytest.raises(InvalidInputError, match=f"{name} must be") as raised:
        bmm_scales(0.1, torch.bfloat16, **scale)
    assert raised.value.argument == name


@pytest.mark.parametrize("dtype", ["fp8", "float8_e4m3fn", "bfloat16", None, 1], ids=repr)
def test_a_dtype_that_is_not_torchs_is_refused(dtype: Any) -> None:
    """Taken for a dtype that is not quantised, "fp8" would lose the scales silently."""
    with pytest.raises(InvalidInputError, match=r"kv_dtype must be a torch\.dtype") as raised:
        bmm_scales(0.1, dtype)
    assert raised.value.argument == "kv_dtype"


def test_numbers_that_are_floats_in_all_but_name_are_taken() -> None:
    assert bmm_scales(1, FP8, 2, 3) == (6, 3)
    assert bmm_scales(np.float64(0.5), torch.bfloat16) == (0.5, 1.0)


def test_its_scales_are_what_the_call_takes() -> None:
    scales = bmm_scales(0.1, FP8, 1.5, 0.5)
    got = kernel_got(fp8_call(**scales._asdict()))
    assert (got["bmm1_scale"], got["bmm2_scale"]) == pytest.approx((0.075, 0.5))


# In a call


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_caches_have_an_output_scale_of_1_unless_one_is_given(dtype: torch.dtype) -> None:
    assert kernel_got(call(dtype=dtype))["bmm2_scale"] == 1.0
    assert kernel_got(call(dtype=dtype, bmm2_scale=0.5))["bmm2_scale"] == 0.5


@pytest.mark.parametrize("name", ["bmm1_scale", "bmm2_scale"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_trtllm_gen_alone_takes_a_scale_in_a_tensor(name: str, shape: tuple[int, ...]) -> None:
    scale = torch.full(shape, 0.5)
    given = call() | {name: scale}
    for backend in ("auto", "trtllm-gen"):
        got = kernel_got(given | {"backend": backend})
        assert got[name] is scale
        assert got["backend"] == "trtllm-gen"
    kernel = mock_kernel("0.7.4")
    with use_kernel(kernel, recorded("0.7.4")):
        for more in ({"backend": "cute-dsl"}, {"dcp": dcp_of()}):
            with pytest.raises(UnsupportedConfigError, match="does not take tensor scales"):
                decode_mla(**(given | more))
    kernel.assert_not_called()


def test_a_scale_is_passed_on_as_it_is() -> None:
    """The host or the kernel multiplies by log2(e); this package must not."""
    for scale in (1, 0.1, np.float64(0.25), 1e-6, 1e6):
        got = kernel_got(call(bmm1_scale=scale))["bmm1_scale"]
        assert type(got) is float
        assert got == scale


@pytest.mark.parametrize(
    "wrong",
    [0, -0.1, math.nan, math.inf, True, "0.1", None, torch.ones(2), torch.ones(1).double()],
    ids=repr,
)
def test_a_prepared_decoder_refuses_a_wrong_scale_at_start_up(wrong: Any) -> None:
    with (
        use_kernel(mock_kernel("0.7.4"), recorded("0.7.4")),
        pytest.raises(InvalidInputError, match="bmm1_scale must be") as raised,
    ):
        prepare_decode_mla(page_size=64, dtype=torch.bfloat16, bmm1_scale=wrong)
    assert raised.value.argument == "bmm1_scale"


def test_a_prepared_decoder_refuses_a_scale_on_another_device_than_the_query() -> None:
    scale, given = torch.ones(1, device="meta"), call()
    kernel = mock_kernel("0.7.4")
    with use_kernel(kernel, recorded("0.7.4")):
        decoder = prepare_decode_mla(page_size=64, dtype=torch.bfloat16, bmm1_scale=scale)
        with pytest.raises(InvalidInputError, match="bmm1_scale must be") as raised:
            decoder.run(
                given["query"],
                given["kv_cache"],
                given["block_tables"],
                given["seq_lens"],
                7,
                given["workspace_buffer"],
            )
    assert raised.value.found == "bmm1_scale: [1] torch.float32 on meta."
    kernel.assert_not_called()


# Skip-softmax


@pytest.mark.parametrize("wrong", [-1, -1e-9, math.nan, True, False, "0", [0]], ids=repr)
def test_a_threshold_that_is_no_number_of_at_least_0_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidInputError, match="must be a finite float of at least 0") as raised:
        skip_softmax_factor(wrong)
    assert raised.value.argument == "skip_softmax_threshold_scale_factor"


def test_an_infinite_threshold_is_refused() -> None:
    """It would skip every tile."""
    with pytest.raises(InvalidInputError, match="skip_softmax_threshold_scale_factor must be"):
        skip_softmax_factor(math.inf)


@pytest.mark.parametrize(
    "name", ["bmm1_scale", "bmm2_scale", "skip_softmax_threshold_scale_factor"]
)
def test_an_int_that_no_float_can_hold_is_refused_by_its_name(name: str) -> None:
    """It would be an OverflowError on its way to the kernel."""
    kernel = mock_kernel("0.7.4")
    with (
        use_kernel(kernel, recorded("0.7.4")),
        pytest.raises(InvalidInputError, match=f"{name} must be") as raised,
    ):
        decode_mla(**(call() | {name: 10**400}))
    assert raised.value.argument == name
    kernel.assert_not_called()


def test_a_sparse_scale_is_refused() -> None:
    """It has no memory that the kernel could read through a pointer."""
    kernel = mock_kernel("0.7.4")
    with (
        use_kernel(kernel, recorded("0.7.4")),
        pytest.raises(InvalidInputError, match="bmm1_scale must be") as raised,
    ):
        decode_mla(**call(bmm1_scale=torch.ones(1).to_sparse()))
    assert raised.value.argument == "bmm1_scale"
    kernel.assert_not_called()
