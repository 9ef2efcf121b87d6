"""The base of the log-sum-exp: S01, S30, S31, S44, S45."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args
from unittest.mock import MagicMock

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from fi_dcp_compat import (
    DCP,
    Backend,
    FlashInferVersionError,
    InvalidInputError,
    LseBase,
    MLAState,
    combine,
    decode_mla,
    merge_dcp_states,
    prepare_decode_mla,
    recorded,
)
from fi_dcp_compat.dropin import trtllm_batch_decode_with_kv_cache_mla
from fi_dcp_compat.releases import recorded_versions
from fi_dcp_compat.testing import mock_kernel, use_kernel
from tests.contract.test_decode_call import Dispatched
from tests.scenarios.inputs import dropin_call, lens
from tests.support import DCP_RELEASES, RELEASES, call

BASES: tuple[LseBase, ...] = get_args(LseBase)
LN2 = math.log(2)
NAMING_RELEASES = RELEASES[RELEASES.index("0.7.1") :]


def stub(version: str, *, total: float, out: float = 0.0) -> MagicMock:
    """Stand for a release's kernels on keys whose weights sum up to `total`.

    As FlashInfer's do, trtllm-gen gives the LSE in base 2 and cute-dsl in base e, unless told.
    """
    kernel = mock_kernel(version)

    def answer(**given: Any) -> tuple[Tensor, Tensor]:
        backend, named = given["backend"], given.get("return_lse_base")
        # From 0.6.13 on a tuner decides for auto, so that its base is open unless it is named.
        assert backend != "auto" or named is not None or version == "0.6.12"
        binary = backend != "cute-dsl" if named is None else named == "base2"
        lse = math.log2(total) if binary else math.log(total)
        return torch.full((2, 1, 16, 512), out).bfloat16(), torch.full((2, 16), lse)

    kernel.side_effect = answer
    return kernel


def state_of(
    version: str,
    backend: Backend,
    lse_base: LseBase,
    *,
    total: float,
    out: float = 0.0,
    dcp: DCP | None = None,
) -> MLAState:
    with use_kernel(stub(version, total=total, out=out)):
        given = call(backend=backend, lse_base=lse_base, dcp=dcp)
        state: MLAState = decode_mla(**given, return_lse=True)
    return state


def merged_out(states: list[MLAState], lse_base: LseBase) -> float:
    merged = merge_dcp_states([s.out.float() for s in states], [s.lse for s in states], lse_base)
    assert merged.out.eq(merged.out[0, 0, 0, 0]).all()
    return merged.out[0, 0, 0, 0].item()


def returns_lse(version: str, backend: str) -> bool:
    return (version, backend) != ("0.6.12", "cute-dsl")


WITH_LSE = [
    (version, backend)
    for version in RELEASES
    for backend in ("auto", "trtllm-gen", "cute-dsl")
    if returns_lse(version, backend)
]
each_kernel = pytest.mark.parametrize(("version", "backend"), WITH_LSE)
each_base = pytest.mark.parametrize("lse_base", BASES)


# S01: partition sums 2 and 8 on two ranks, with the outputs 0 and 10.


def test_s01_the_merge_is_8_in_the_right_base_and_another_number_in_the_wrong_one() -> None:
    outs = torch.tensor([0.0, 10.0]).view(2, 1, 1)
    natural = torch.tensor([2.0, 8.0]).log().view(2, 1)
    binary = torch.tensor([2.0, 8.0]).log2().view(2, 1)
    merged = [
        merge_dcp_states(outs, lses, lse_base).out.item()
        for lses in (natural, binary)
        for lse_base in BASES
    ]
    assert merged == pytest.approx([8.0, 7.2330, 8.8080, 8.0], abs=1e-4)


@each_kernel
@each_base
def test_s01_states_of_a_kernel_of_either_base_merge_to_8(
    lse_base: LseBase, version: str, backend: Backend
) -> None:
    states = [
        state_of(version, backend, lse_base, total=total, out=out)
        for total, out in ((2.0, 0.0), (8.0, 10.0))
    ]
    assert merged_out(states, lse_base) == pytest.approx(8.0, abs=1e-4)


@pytest.mark.parametrize("version", DCP_RELEASES)
@each_base
def test_s01_so_do_the_states_of_two_dcp_ranks(lse_base: LseBase, version: str) -> None:
    states = [
        state_of(version, "auto", lse_base, total=total, out=out, dcp=DCP(2, rank, lens(14, 14)))
        for rank, (total, out) in enumerate(((2.0, 0.0), (8.0, 10.0)))
    ]
    assert merged_out(states, lse_base) == pytest.approx(8.0, abs=1e-4)


# S30: no kernel of its own for the base.


def decoded(
    version: str, backend: Backend, lse_base: LseBase
) -> tuple[MagicMock, Tensor, MLAState, list[str]]:
    """Decode with a kernel that hands out one LSE tensor; name the tensor operations around it."""
    kernel, lse = mock_kernel(version), torch.full((2, 16), 3.0)
    kernel.side_effect = None
    kernel.return_value = (torch.ones(2, 1, 16, 512).bfloat16(), lse)
    given = call(backend=backend, lse_base=lse_base)
    with use_kernel(kernel), Dispatched() as operations:
        state = decode_mla(**given, return_lse=True)
    return kernel, lse, state, operations.names


@pytest.mark.parametrize("version", NAMING_RELEASES)
@pytest.mark.parametrize("backend", ["auto", "trtllm-gen", "cute-dsl"])
@pytest.mark.parametrize(("lse_base", "word"), [("e", "basee"), ("2", "base2")])
def test_s30_a_release_that_takes_the_base_gets_it_and_its_lse_is_handed_on(
    lse_base: LseBase, word: str, backend: Backend, version: str
) -> None:
    """Design: the caller names the base in the decode and in the merge; a state has no tag."""
    kernel, lse, state, operations = decoded(version, backend, lse_base)
    assert kernel.call_args.kwargs["return_lse_base"] == word
    assert operations == []
    assert state.lse.data_ptr() == lse.data_ptr()
    assert lse.eq(3.0).all()


@pytest.mark.parametrize("version", RELEASES[1 : -len(NAMING_RELEASES)])
@pytest.mark.parametrize(
    ("backend", "lse_base", "factor"),
    [
        ("cute-dsl", "e", None),
        ("cute-dsl", "2", 1 / LN2),
        ("trtllm-gen", "2", None),
        ("trtllm-gen", "e", LN2),
    ],
)
def test_s30_an_older_one_costs_one_multiplication_in_place_and_only_for_the_other_base(
    backend: Backend, lse_base: LseBase, factor: float | None, version: str
) -> None:
    kernel, lse, state, operations = decoded(version, backend, lse_base)
    assert "return_lse_base" not in kernel.call_args.kwargs
    assert operations == ([] if factor is None else ["aten.mul_.Tensor"])
    assert state.lse.data_ptr() == lse.data_ptr()
    assert state.lse[0, 0, 0].item() == pytest.approx(3.0 * (factor or 1.0))


# S31: FlashInfer's spellings, and others'.


def by_decode(lse_base: Any) -> None:
    decode_mla(**call(), return_lse=True, lse_base=lse_base)


def by_preparation(lse_base: Any) -> None:
    prepare_decode_mla(page_size=64, dtype=torch.bfloat16, bmm1_scale=0.1, lse_base=lse_base)


def by_merge(lse_base: Any) -> None:
    merge_dcp_states(torch.ones(2, 3, 8), torch.ones(2, 3), lse_base)


def by_combine(lse_base: Any) -> None:
    combine(MLAState(torch.ones(3, 8), torch.ones(3)), lse_base=lse_base)


@pytest.mark.parametrize(
    "way", [by_decode, by_preparation, by_merge, by_combine], ids=lambda way: way.__name__
)
@pytest.mark.parametrize("spelling", ["basee", "base2", "log2", "ln", "E", True, 2, None])
def test_s31_any_other_spelling_is_a_value_error_that_lists_both(
    spelling: object, way: Callable[[Any], None]
) -> None:
    with (
        use_kernel(mock_kernel("0.7.4")),
        pytest.raises(ValueError, match=r"^lse_base must be 'e' or '2'") as raised,
    ):
        way(spelling)
    assert str(raised.value) == (
        "lse_base must be 'e' or '2'.\n"
        f"Found: {spelling!r}.\n"
        "Needed: 'e' (natural log) or '2' (log2).\n"
        "Fix: pass 'e' where FlashInfer says 'basee', '2' where it says 'base2'."
    )


@pytest.mark.parametrize("version", ["0.6.12", "0.7.0", "0.7.1", "0.7.4"])
@pytest.mark.parametrize("spelling", ["e", "2", "log2", True, 2])
def test_s31_the_drop_in_takes_flashinfers_two_spellings_only(
    spelling: object, version: str
) -> None:
    with (
        use_kernel(mock_kernel(version)),
        pytest.raises(InvalidInputError, match="one of basee, base2, or None"),
    ):
        trtllm_batch_decode_with_kv_cache_mla(
            **dropin_call(return_lse=True, return_lse_base=spelling)
        )


# S44: a prefix decoded by one kernel is merged with a context that DCP ranks decoded by another.


@pytest.mark.parametrize("version", DCP_RELEASES)
@each_base
def test_s44_states_of_different_kernels_merge_in_the_one_base_asked_for(
    lse_base: LseBase, version: str
) -> None:
    """Design: no (lse, base) pairs; every decode converts to the base that the merge names."""
    prefix = state_of(version, "trtllm-gen", lse_base, total=2.0, out=0.0)
    context = state_of(version, "auto", lse_base, total=8.0, out=10.0, dcp=DCP(2, 0, lens(14, 14)))
    assert merged_out([prefix, context], lse_base) == pytest.approx(8.0, abs=1e-4)


def test_s44_a_base_that_is_neither_is_refused_at_run_time() -> None:
    with pytest.raises(InvalidInputError, match="lse_base must be 'e' or '2'"):
        merge_dcp_states(torch.ones(2, 3, 8), torch.ones(2, 3), None)  # type: ignore[arg-type]  # the point


# S45: which backend of which release returns what.


@pytest.mark.parametrize("version", recorded_versions())
def test_s45_the_table_has_the_base_of_each_backend(version: str) -> None:
    release, base = Version(version), recorded(version).features.lse_base
    assert base["trtllm-gen"] == ("2" if release >= Version("0.6.12") else None)
    assert base["cute-dsl"] == ("e" if release >= Version("0.6.13") else None)
    assert base["xqa"] is None


@each_kernel
@each_base
def test_s45_the_lse_is_that_of_the_keys_whatever_the_kernels_base(
    lse_base: LseBase, version: str, backend: Backend
) -> None:
    for total in (1e-3, 1.0, 2.0, 8.0, 3e4):
        state = state_of(version, backend, lse_base, total=total)
        expected = math.log(total) / (LN2 if lse_base == "2" else 1.0)
        assert state.lse[0, 0, 0].item() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_s45_cute_dsl_of_0_6_12_has_no_lse() -> None:
    """Design: told by the release that has one, before FlashInfer's NotImplementedError."""
    with (
        use_kernel(mock_kernel("0.6.12")),
        pytest.raises(FlashInferVersionError, match="LSE from cute-dsl") as raised,
    ):
        decode_mla(**call(), backend="cute-dsl", return_lse=True)
    assert raised.value.needed == "0.6.13 or newer (#3309)."
