"""The scales of a quantised cache: S20, S21."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fi_dcp_compat import (
    DCP,
    InvalidInputError,
    bmm_scales,
    decode_mla,
    local_seq_lens,
    prepare_decode_mla,
)
from fi_dcp_compat.testing import mock_kernel, use_kernel
from tests.scenarios.inputs import lens
from tests.support import DCP_RELEASES, RELEASES, call, dcp_of

FP8 = torch.float8_e4m3fn
UNQUANTISED = [torch.bfloat16, torch.float16, torch.float32]


# S20: k_scale on a cache that is not quantised, or left out on one that is.


@pytest.mark.parametrize("kv_dtype", UNQUANTISED, ids=str)
@pytest.mark.parametrize("name", ["k_scale", "q_scale"])
def test_s20_a_scale_for_a_cache_that_is_not_quantised_is_refused(
    name: str, kv_dtype: torch.dtype
) -> None:
    scale: dict[str, Any] = {name: 0.5}
    with pytest.raises(InvalidInputError, match=f"^{name} must be left out") as raised:
        bmm_scales(0.1, kv_dtype, **scale)
    assert str(raised.value) == (
        f"{name} must be left out.\n"
        f"Found: {name}: 0.5 (float).\n"
        f"Needed: no {name}: a {kv_dtype} cache is not scaled.\n"
        f"Fix: drop {name}."
    )
    # A stack whose checkpoint has no scale says 1.0.
    assert bmm_scales(0.1, kv_dtype, 1.0, 1.0) == bmm_scales(0.1, kv_dtype) == (0.1, 1.0)


def test_s20_those_of_an_fp8_cache_are_fused() -> None:
    scales = bmm_scales(0.1, FP8, q_scale=1.5, k_scale=0.5)
    assert scales.bmm1_scale == pytest.approx(0.075)
    assert scales.bmm2_scale == 0.5


@pytest.mark.parametrize("name", ["k_scale", "q_scale"])
def test_s20_an_fp8_cache_is_not_taken_without_them(name: str) -> None:
    scales: dict[str, Any] = {"q_scale": 1.5, "k_scale": 0.5}
    del scales[name]
    with pytest.raises(InvalidInputError, match=f"^{name} must be given") as raised:
        bmm_scales(0.1, FP8, **scales)
    assert raised.value.needed == "a number for an fp8 cache, 1.0 if it was not scaled."


@pytest.mark.parametrize("version", RELEASES)
def test_s20_the_kernel_gets_them_as_they_are(version: str) -> None:
    kernel, scales = mock_kernel(version), bmm_scales(0.1, FP8, q_scale=1.5, k_scale=0.5)
    with use_kernel(kernel):
        decode_mla(**call(dtype=FP8) | scales._asdict())
    given = kernel.call_args.kwargs
    assert (given["bmm1_scale"], given["bmm2_scale"]) == scales


@pytest.mark.parametrize("world_size", [1, 4])
def test_s20_what_is_stored_scaled_is_decoded_as_what_it_stands_for(world_size: int) -> None:
    random = torch.Generator().manual_seed(20)
    query = torch.randn(2, 3, 16, 576, generator=random).to(FP8)
    cache = torch.randn(4, 64, 576, generator=random).to(FP8)
    local = local_seq_lens(lens(100, 47), world_size, 0)
    given = call(seq_lens=local, max_seq_len=100, dcp=DCP(world_size, 0, lens(100, 47)))
    given |= {"backend": "reference", "return_lse": True}

    stored = {"query": query, "kv_cache": cache}
    scaled = decode_mla(**given | stored | bmm_scales(0.1, FP8, 1.5, 0.5)._asdict())
    meant = {"query": 1.5 * query.float(), "kv_cache": 0.5 * cache.float()}
    real = decode_mla(**given | meant | bmm_scales(0.1, torch.float32)._asdict())
    torch.testing.assert_close(scaled.out.float(), real.out, rtol=2**-8, atol=2**-8)
    torch.testing.assert_close(scaled.lse, real.lse, rtol=1e-5, atol=1e-5)


# S21: the output scale of an fp8 cache left out.


REFUSAL = (
    "bmm2_scale must be given.\n"
    "Found: bmm2_scale: None (NoneType).\n"
    "Needed: a scale for an fp8 cache, 1.0 if it was not scaled.\n"
    "Fix: pass bmm_scales(...).bmm2_scale."
)


@pytest.mark.parametrize(
    ("version", "dcp"),
    [(version, None) for version in RELEASES] + [(version, dcp_of()) for version in DCP_RELEASES],
)
def test_s21_an_fp8_cache_is_refused_without_one_and_1_is_one(
    version: str, dcp: DCP | None
) -> None:
    kernel, given = mock_kernel(version), call(dtype=FP8, dcp=dcp)
    del given["bmm2_scale"]
    with use_kernel(kernel):
        with pytest.raises(InvalidInputError, match="bmm2_scale must be given") as raised:
            decode_mla(**given)
        kernel.assert_not_called()
        decode_mla(**given, bmm2_scale=1.0)
    assert str(raised.value) == REFUSAL
    assert kernel.call_args.kwargs["bmm2_scale"] == 1.0


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_s21_so_is_its_preparation(backend: str) -> None:
    known: dict[str, Any] = {"page_size": 64, "dtype": FP8, "bmm1_scale": 0.1, "backend": backend}
    with use_kernel(mock_kernel("0.7.4")):
        with pytest.raises(InvalidInputError, match="bmm2_scale must be given") as raised:
            prepare_decode_mla(**known)
        prepare_decode_mla(**known, bmm2_scale=1.0)
    assert str(raised.value) == REFUSAL


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_s21_any_other_cache_has_1_for_it(dtype: torch.dtype) -> None:
    kernel = mock_kernel("0.7.4")
    with use_kernel(kernel):
        decode_mla(**call(dtype=dtype, backend="cute-dsl"))
    assert kernel.call_args.kwargs["bmm2_scale"] == 1.0
