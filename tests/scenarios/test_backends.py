"""Which backend may run what: S14, S22, S34, S35, S37."""

from __future__ import annotations

import pytest
import torch

from fi_dcp_compat import (
    DCP,
    Backend,
    FlashInferVersionError,
    UnsupportedConfigError,
    capabilities,
    check,
    decode_mla,
    recorded,
)
from fi_dcp_compat.dropin import trtllm_batch_decode_with_kv_cache_mla
from fi_dcp_compat.testing import mock_kernel, use_kernel
from tests.scenarios.inputs import dropin_call, dropin_dcp_call, lens
from tests.support import DCP_RELEASES, RELEASES, call, dcp_of

each_release = pytest.mark.parametrize("version", RELEASES)
each_dcp_release = pytest.mark.parametrize("version", DCP_RELEASES)


# S14: DCP on a backend without a mask.


@each_dcp_release
@pytest.mark.parametrize("backend", ["trtllm-gen", "xqa"])
def test_s14_dcp_is_refused_with_the_backend_that_masks_and_the_other_path(
    backend: Backend, version: str
) -> None:
    kernel = mock_kernel(version)
    unmasked = rf"^backend='{backend}' has no DCP mask\."
    with use_kernel(kernel):
        with pytest.raises(UnsupportedConfigError, match=unmasked) as raised:
            decode_mla(**call(backend=backend), dcp=DCP(2, 0, lens(14, 14)))
        with pytest.raises(UnsupportedConfigError, match=unmasked) as from_dropin:
            trtllm_batch_decode_with_kv_cache_mla(
                **dropin_dcp_call(2, 0, lens(14, 14), backend=backend)
            )
    kernel.assert_not_called()
    for error in (raised.value, from_dropin.value):
        assert str(error) == (
            f"backend='{backend}' has no DCP mask.\n"
            f"Found: backend='{backend}' with dcp_world_size=2.\n"
            "Needed: backend='cute-dsl', the only one with a native DCP mask (0.6.17 or newer).\n"
            "Fix: pass backend='auto' or 'cute-dsl'; another backend's ranks can be merged outside "
            "the kernel for one query token only."
        )


@pytest.mark.parametrize(
    ("version", "lse", "dcp"),
    [
        ("0.6.11", False, False),
        ("0.6.12", True, False),
        ("0.6.16", True, False),
        ("0.6.17", True, True),
    ],
)
def test_s14_a_stack_can_ask_first_whether_decode_returns_an_lse(
    version: str, lse: bool, dcp: bool
) -> None:
    found = capabilities(recorded(version))
    assert (found.can_return_lse_for_decode, found.supports_dcp) == (lse, dcp)


# S22: head counts.


@each_release
def test_s22_96_heads_on_trtllm_gen_are_refused_with_the_backend_that_has_them(
    version: str,
) -> None:
    kernel = mock_kernel(version)
    with (
        use_kernel(kernel),
        pytest.raises(UnsupportedConfigError, match="96 query heads") as raised,
    ):
        decode_mla(**call(heads=96, backend="trtllm-gen"))
    kernel.assert_not_called()
    padded = RELEASES.index(version) >= RELEASES.index("0.6.16")
    tiles = "1 to 64, or a multiple of 64" if padded else "1 to 16, 32, 48, or a multiple of 64"
    assert str(raised.value) == (
        "backend='trtllm-gen' cannot tile 96 query heads.\n"
        f"Found: num_heads=96 on flashinfer-python {version}.\n"
        f"Needed: {tiles}.\n"
        "Fix: pad the query to that many heads, or pass backend='cute-dsl'."
    )


@each_dcp_release
@pytest.mark.parametrize("heads", [96, 24, 1, 128, 7, 65])
def test_s22_cute_dsl_runs_up_to_128_heads_with_dcp_and_without(heads: int, version: str) -> None:
    kernel = mock_kernel(version)
    with use_kernel(kernel):
        out = decode_mla(**call(heads=heads, backend="cute-dsl"))
        state = decode_mla(**call(heads=heads, backend="cute-dsl"), dcp=dcp_of())
        # 96 and 65 heads are trtllm-gen's in no release, so auto is cute-dsl for them.
        decode_mla(**call(heads=heads))
    assert out.shape == state.out.shape == (2, 1, heads, 512)
    assert kernel.call_args.kwargs["backend"] == ("cute-dsl" if heads in (96, 65) else "auto")


@each_release
@pytest.mark.parametrize("heads", [129, 256])
def test_s22_more_are_refused_with_the_bound(heads: int, version: str) -> None:
    with (
        use_kernel(mock_kernel(version)),
        pytest.raises(UnsupportedConfigError, match=f"^backend='cute-dsl' .* {heads} ") as raised,
    ):
        decode_mla(**call(heads=heads, backend="cute-dsl"))
    assert raised.value.found == f"num_heads={heads}."
    assert raised.value.needed == "1 to 128."


def test_s22_an_install_that_is_too_old_is_told_first() -> None:
    with (
        use_kernel(mock_kernel("0.6.11")),
        pytest.raises(FlashInferVersionError, match=r"needs FlashInfer's LSE") as raised,
    ):
        decode_mla(**call(heads=96, backend="trtllm-gen"))
    assert [reason.argument for reason in raised.value.reasons] == ["lse", "num_heads"]
    assert "96" in str(raised.value)


# S34: sinks.


@each_dcp_release
@pytest.mark.parametrize("backend", ["auto", "cute-dsl", "reference"])
@pytest.mark.parametrize("as_list", [False, True])
def test_s34_sinks_with_dcp_are_refused(as_list: bool, backend: Backend, version: str) -> None:
    kernel, sinks = mock_kernel(version), torch.zeros(16)
    with (
        use_kernel(kernel),
        pytest.raises(UnsupportedConfigError, match=r"^sinks cannot be combined") as raised,
    ):
        decode_mla(**call(backend=backend, sinks=[sinks] if as_list else sinks), dcp=dcp_of())
    kernel.assert_not_called()
    assert str(raised.value) == (
        "sinks cannot be combined with DCP.\n"
        "Found: sinks with dcp_world_size=8.\n"
        "Needed: no sinks: the only kernel with a DCP mask does not take it.\n"
        "Fix: leave sinks out, or call with dcp=None."
    )


@each_release
@pytest.mark.parametrize("backend", ["auto", "trtllm-gen", "cute-dsl"])
def test_s34_sinks_without_dcp_reach_the_kernel(backend: Backend, version: str) -> None:
    kernel, sinks = mock_kernel(version), torch.zeros(16)
    with use_kernel(kernel):
        decode_mla(**call(backend=backend, sinks=sinks))
    assert kernel.call_args.kwargs["sinks"] is sinks


def test_s34_sinks_change_the_references_result() -> None:
    given = call(batch=1, backend="reference", kv_cache=torch.ones(2, 64, 576).bfloat16())
    plain = decode_mla(**given)
    assert decode_mla(**given, sinks=torch.full((16,), -100.0)).equal(plain)
    # A sink that weighs as much as all 7 keys takes half.
    sinks = torch.full((16,), 7.0).log()
    torch.testing.assert_close(decode_mla(**given, sinks=sinks).float(), plain.float() / 2)


# S35: skip-softmax.


@each_release
@pytest.mark.parametrize("backend", ["auto", "trtllm-gen", "cute-dsl"])
@pytest.mark.parametrize("off", [None, 0.0, 0])
def test_s35_a_threshold_that_is_off_is_left_out(
    off: float | None, backend: Backend, version: str
) -> None:
    kernel = mock_kernel(version)
    given = call(backend=backend, skip_softmax_threshold_scale_factor=off)
    with use_kernel(kernel):
        decode_mla(**given)
        trtllm_batch_decode_with_kv_cache_mla(
            **dropin_call(backend=backend, skip_softmax_threshold_scale_factor=off)
        )
        if version in DCP_RELEASES and backend != "trtllm-gen":
            decode_mla(**given, dcp=dcp_of())
    for made in kernel.call_args_list:
        assert "skip_softmax_threshold_scale_factor" not in made.kwargs


@each_release
@pytest.mark.parametrize("backend", ["cute-dsl", "xqa", "reference"])
def test_s35_one_that_is_on_is_refused_where_the_backend_has_none(
    backend: Backend, version: str
) -> None:
    kernel = mock_kernel(version)
    given = call(heads=128, backend=backend, skip_softmax_threshold_scale_factor=1e-3)
    with (
        use_kernel(kernel),
        pytest.raises(UnsupportedConfigError, match=f"^backend='{backend}' does not") as raised,
    ):
        decode_mla(**given)
    kernel.assert_not_called()
    assert raised.value.summary == (
        f"backend='{backend}' does not take skip_softmax_threshold_scale_factor."
    )


@each_release
def test_s35_one_that_is_on_reaches_trtllm_gen_named_or_not(version: str) -> None:
    kernel = mock_kernel(version)
    with use_kernel(kernel):
        for backend in ("auto", "trtllm-gen"):
            decode_mla(**call(backend=backend, skip_softmax_threshold_scale_factor=1e-3))
            given = kernel.call_args.kwargs
            assert given["skip_softmax_threshold_scale_factor"] == 1e-3
            # A tuned auto might hand it to cute-dsl.
            assert given["backend"] == "trtllm-gen"


# S37: a choice that ranks might make differently.


@each_dcp_release
@pytest.mark.parametrize("backend", ["auto", "cute-dsl"])
@pytest.mark.parametrize("world_size", [2, 8])
def test_s37_every_rank_names_cute_dsl(world_size: int, backend: Backend, version: str) -> None:
    kernel = mock_kernel(version)
    with use_kernel(kernel):
        for rank in range(world_size):
            for q_len, heads, page_size in ((1, 16, 64), (3, 96, 128), (4, 128, 32)):
                given = call(q_len=q_len, heads=heads, page_size=page_size, backend=backend)
                decode_mla(**given, dcp=DCP(world_size, rank, lens(55, 55)))
    assert kernel.call_count == 3 * world_size
    assert {made.kwargs["backend"] for made in kernel.call_args_list} == {"cute-dsl"}


@each_dcp_release
def test_s37_the_reasons_do_not_depend_on_the_rank(version: str) -> None:
    expected = check(
        recorded(version),
        num_heads=129,
        q_len=1,
        page_size=64,
        dtype="bfloat16",
        dcp_world_size=8,
    )
    assert len(expected) == 1
    for rank in range(8):
        with (
            use_kernel(mock_kernel(version)),
            pytest.raises(UnsupportedConfigError, match="129 query heads") as raised,
        ):
            decode_mla(**call(heads=129), dcp=dcp_of(rank=rank))
        assert raised.value.reasons == expected
