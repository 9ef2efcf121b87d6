"""Mocks of a release's function, and what puts them in FlashInfer's place."""

from __future__ import annotations

import functools
import gc
import inspect
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, create_autospec

import pytest
import torch
from torch import Tensor

from fi_dcp_compat import (
    FlashInferABI,
    FlashInferSignatureError,
    FlashInferVersionError,
    Parameter,
    decode_mla,
    probe,
    recorded,
)
from fi_dcp_compat.pytest_plugin import UseKernel, use_kernel  # noqa: F401  # the fixture
from fi_dcp_compat.releases import recorded_versions
from fi_dcp_compat.testing import mock_kernel
from fi_dcp_compat.testing import use_kernel as installed
from tests.fakes import Site, fake_site
from tests.support import RELEASES, call, dcp_of

pytest_plugins = ["pytester"]

VERSIONS = recorded_versions()
DECODE = "flashinfer.decode.trtllm_batch_decode_with_kv_cache_mla"


def arguments(**changes: Any) -> dict[str, Any]:
    """What FlashInfer's function requires, and two requests of three tokens."""
    given = call(q_len=3) | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    return given | changes


# The signature.


@pytest.mark.parametrize("version", VERSIONS)
def test_a_mock_shows_the_signature_of_its_release(version: str) -> None:
    kernel = mock_kernel(version)
    assert isinstance(kernel, MagicMock)
    shown = inspect.signature(kernel).parameters.values()
    assert [
        Parameter(p.name, None if p.default is p.empty else repr(p.default), p.kind.name)
        for p in shown
    ] == list(recorded(version).parameters)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_mock_refuses_what_its_release_refuses(version: str) -> None:
    kernel = mock_kernel(version)
    kernel(**arguments())
    lacking = recorded(version).lacks(*(p.name for p in recorded("0.7.4").parameters))
    for keyword in (*lacking, "block_table"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{keyword}'"):
            kernel(**arguments(), **{keyword: None})
    for parameter in recorded(version).parameters:
        if parameter.required:
            given = arguments()
            del given[parameter.name]
            with pytest.raises(TypeError, match=f"missing a required argument: '{parameter.name}'"):
                kernel(**given)
    assert kernel.call_count == 1


def test_a_mock_takes_positional_arguments_as_the_release_does() -> None:
    given = arguments()
    order = [p.name for p in recorded("0.7.4").parameters if p.required]
    kernel = mock_kernel("0.7.4")
    out = kernel(*(given[name] for name in order), 0, None, 0.1)
    assert out.shape == (2, 3, 16, 512)
    kernel.assert_called_once_with(
        **{name: given[name] for name in order}, sparse_mla_top_k=0, out=None, bmm1_scale=0.1
    )


def test_a_mock_can_lose_or_gain_parameters() -> None:
    abi = recorded("0.7.4")
    gained = (*abi.parameters, Parameter("kv_layout", None, "KEYWORD_ONLY"))
    with pytest.raises(TypeError, match="kv_layout"):
        mock_kernel(abi._replace(parameters=gained))(**arguments())
    for text in ("Layout.HND", "<Layout.HND: 1>"):
        odd = (*abi.parameters, Parameter("layout", text))
        kernel = mock_kernel(abi._replace(parameters=odd))
        assert inspect.signature(kernel).parameters["layout"].default == text


def test_an_unrecorded_release_has_no_mock() -> None:
    with pytest.raises(FlashInferVersionError, match=r"No FlashInfer release 0\.7\.3 is recorded"):
        mock_kernel("0.7.3")


# The answer.


@pytest.mark.parametrize("version", VERSIONS)
def test_the_output_is_in_the_querys_layout(version: str) -> None:
    kernel = mock_kernel(version)
    out = kernel(**arguments())
    assert (out.shape, out.dtype) == ((2, 3, 16, 512), torch.bfloat16)
    assert out.eq(1).all()
    flat = kernel(**arguments(query=torch.zeros(5, 16, 576)))
    assert flat.shape == (5, 16, 512)
    mine = torch.zeros(2, 3, 16, 512, dtype=torch.bfloat16)
    assert kernel(**arguments(out=mine)) is mine
    assert mine.eq(1).all()


def test_the_output_follows_the_query_where_the_release_does() -> None:
    half = arguments(query=torch.zeros(2, 1, 16, 576, dtype=torch.float16), backend="cute-dsl")
    assert mock_kernel("0.6.12")(**half).dtype is torch.float16
    assert mock_kernel("0.6.13")(**half).dtype is torch.bfloat16


@pytest.mark.parametrize("version", RELEASES)
def test_the_lse_has_the_shapes_of_the_release(version: str) -> None:
    kernel = mock_kernel(version)
    out, lse = kernel(**arguments(return_lse=True))
    assert out.shape == (2, 3, 16, 512)
    assert (lse.shape, lse.dtype) == ((6, 16), torch.float32)
    assert lse.eq(1).all()
    flat = torch.zeros(6, 16)
    assert kernel(**arguments(return_lse=True, lse=flat))[1] is flat
    assert flat.eq(1).all()
    nested = torch.zeros(2, 3, 16)
    if version == "0.6.12":
        with pytest.raises(ValueError, match=r"lse of shape \[2, 3, 16\], not \[6, 16\]"):
            kernel(**arguments(return_lse=True, lse=nested))
    else:
        assert kernel(**arguments(return_lse=True, lse=nested))[1] is nested
    with pytest.raises(ValueError, match=r"lse of shape \[2, 16\]"):
        kernel(**arguments(return_lse=True, lse=torch.zeros(2, 16)))


def test_a_mock_answers_otherwise_when_told() -> None:
    kernel = mock_kernel("0.7.4")
    kernel.side_effect, kernel.return_value = None, "mine"
    assert kernel(**arguments()) == "mine"
    kernel.side_effect = OSError("no GPU")
    with pytest.raises(OSError, match="no GPU"):
        kernel(**arguments())


# In FlashInfer's place.


@pytest.mark.parametrize("version", VERSIONS)
def test_a_mock_stands_for_its_release(version: str) -> None:
    with installed(mock_kernel(version)) as abi:
        assert probe() is abi
    assert abi.features == recorded(version).features
    assert (abi.version, abi.parameters) == (version, recorded(version).parameters)


def decode_with_dcp() -> None:
    decode_mla(**call(), dcp=dcp_of())


def test_the_fixture_installs_a_kernel_until_the_test_ends(
    use_kernel: UseKernel,  # noqa: F811
) -> None:
    first, second = mock_kernel("0.6.17"), mock_kernel("0.7.4")
    assert use_kernel(first).version == "0.6.17"
    decode_with_dcp()
    assert use_kernel(second, recorded("0.7.1")) == recorded("0.7.1") == probe()
    decode_with_dcp()
    assert (first.call_count, second.call_count) == (1, 1)


def test_the_fixture_puts_everything_back(pytester: pytest.Pytester) -> None:
    pytester.makeconftest('pytest_plugins = ["fi_dcp_compat.pytest_plugin"]')
    pytester.makepyfile(
        """
        from fi_dcp_compat import probing
        from fi_dcp_compat.testing import mock_kernel

        def test_one(use_kernel):
            use_kernel(mock_kernel("0.6.17"))
            assert use_kernel(mock_kernel("0.7.4")).version == "0.7.4"
            assert probing._installed is not None

        def test_two():
            assert probing._installed is None
        """
    )
    pytester.runpytest("-p", "no:cacheprovider").assert_outcomes(passed=2)


# The recipe of the docstring.


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with fake_site(tmp_path / "site-packages") as site:
        yield site


def locks_its_kernel(kernel: MagicMock, abi: FlashInferABI | None = None) -> None:
    with installed(kernel, abi):
        decode_with_dcp()
    given = kernel.call_args.kwargs
    assert given["backend"] == "cute-dsl"
    assert (given["cp_world"], given["cp_rank"]) == (8, 3)
    assert given["causal_seqlens_kv_global"].dtype == torch.int32


def without(keyword: str, version: str = "0.6.17") -> FlashInferABI:
    abi = recorded(version)
    return abi._replace(parameters=tuple(p for p in abi.parameters if p.name != keyword))


def test_a_users_test_fails_on_0_6_16_and_passes_on_0_6_17() -> None:
    with pytest.raises(FlashInferVersionError, match=r"Needed: 0\.6\.17 or newer"):
        locks_its_kernel(mock_kernel("0.6.16"))
    locks_its_kernel(mock_kernel("0.6.17"))


@pytest.mark.parametrize(
    "keyword", ["enable_dcp", "cp_world", "cp_rank", "causal_seqlens_kv_global", "return_lse"]
)
def test_a_users_test_fails_when_one_keyword_is_gone(keyword: str) -> None:
    with pytest.raises(FlashInferSignatureError, match=keyword):
        locks_its_kernel(mock_kernel(without(keyword)))
    # Even where the test says that it is all there.
    with pytest.raises(TypeError, match=keyword):
        locks_its_kernel(mock_kernel(without(keyword)), recorded("0.6.17"))


def test_patching_flashinfer_itself_needs_no_cache_clear_and_is_undone(
    monkeypatch: pytest.MonkeyPatch, site: Site
) -> None:
    site.flashinfer("0.7.4")
    before = probe()
    kernel = mock_kernel("0.6.17")
    with monkeypatch.context() as patched:
        patched.setattr(DECODE, kernel)
        decode_with_dcp()
        patched.setattr(DECODE, mock_kernel("0.6.16"))
        with pytest.raises(FlashInferVersionError, match=r"0\.6\.16, whose function lacks"):
            decode_with_dcp()
        patched.setattr(DECODE, mock_kernel(without("cp_rank")))
        with pytest.raises(FlashInferSignatureError, match="cp_rank"):
            decode_with_dcp()
    assert kernel.call_count == 1
    assert probe() is before


# Stand-ins of other kinds: each probes to a defined answer (S03).


class Kernel:
    """A callable object; its method is what the others here stand in for."""

    def __call__(
        self,
        query: Tensor,
        kv_cache: Tensor,
        workspace_buffer: Tensor,
        qk_nope_head_dim: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        block_tables: Tensor,
        seq_lens: Tensor,
        max_seq_len: int,
        bmm1_scale: float = 1.0,
        bmm2_scale: float = 1.0,
        backend: str = "auto",
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_dcp: bool = False,
        cp_world: int = 1,
        cp_rank: int = 0,
        causal_seqlens_kv_global: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        return ANSWER


class Anything:
    def __call__(self, *args: Any, **kwargs: Any) -> None: ...


class TwoParameters:
    def __init__(self, query: Tensor, kv_cache: Tensor) -> None: ...


real = Kernel().__call__
ANSWER = (torch.ones(2, 1, 16, 512), torch.ones(2, 16))
NAMES = tuple(inspect.signature(real).parameters)
STAND_INS: dict[str, tuple[Any, tuple[str, ...], bool]] = {
    # What it is, the parameters it shows, and whether it can do DCP; none shown is unreadable.
    "MagicMock()": (MagicMock(), (), False),
    "MagicMock(spec=f)": (MagicMock(spec=real), (), False),
    "MagicMock(wraps=f)": (MagicMock(wraps=real), (), False),
    "a function of *args, **kwargs": (lambda *args, **kwargs: None, (), False),
    "an object of *args, **kwargs": (Anything(), (), False),
    "not callable": (object(), (), False),
    "create_autospec(f)": (create_autospec(real, return_value=ANSWER), NAMES, True),
    "a callable object": (Kernel(), NAMES, True),
    "a class": (TwoParameters, ("query", "kv_cache"), False),
    "a bound method": (real, NAMES, True),
    "partial(f, enable_dcp=True)": (functools.partial(real, enable_dcp=True), NAMES, True),
    "partial(f, query)": (functools.partial(real, torch.zeros(1)), NAMES[1:], True),
    "partial(MagicMock())": (functools.partial(MagicMock()), (), False),
}


@pytest.mark.parametrize("name", STAND_INS)
def test_a_stand_in_probes_to_a_defined_answer(name: str) -> None:
    kernel, parameters, native_dcp = STAND_INS[name]
    with installed(kernel) as abi:
        assert tuple(p.name for p in abi.parameters) == parameters
        assert abi.version == "unknown"
        assert bool(abi.unreadable) is (parameters == ())
        assert abi.features.native_dcp is native_dcp
        if parameters == NAMES:
            decode_with_dcp()
            return
        with pytest.raises((FlashInferVersionError, FlashInferSignatureError)) as raised:
            decode_with_dcp()
    if not parameters:
        assert raised.type is FlashInferVersionError
        assert "whose signature cannot be read" in raised.value.found
    elif native_dcp:
        assert raised.type is FlashInferSignatureError
        assert "has lost query" in str(raised.value)


def test_a_mock_and_the_tensors_of_its_calls_go_when_the_test_is_over() -> None:
    kernel = mock_kernel("0.7.4")
    gone = weakref.ref(kernel)
    with installed(kernel):
        decode_with_dcp()
    del kernel
    gc.collect()
    assert gone() is None
