"""Stand-ins for the function, functions that drifted, and typed call sites: S03, S18, S40."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, create_autospec

import pytest

from fi_dcp_compat import (
    FlashInferABI,
    FlashInferSignatureError,
    FlashInferVersionError,
    Parameter,
    capabilities,
    decode_mla,
    probe,
    recorded,
    supports_combination,
)
from fi_dcp_compat.dropin import trtllm_batch_decode_with_kv_cache_mla
from fi_dcp_compat.testing import mock_kernel, use_kernel
from tests.fakes import REPOSITORY, Site, header
from tests.scenarios.inputs import dropin_call
from tests.support import DCP_RELEASES, RELEASES, call, dcp_of

FUNCTION = "trtllm_batch_decode_with_kv_cache_mla"
NAMES = [parameter.name for parameter in recorded("0.7.4").parameters]
each_release = pytest.mark.parametrize("version", RELEASES)

# S03: mocks in place of the function.


def takes_anything(*args: object, **kwargs: object) -> None: ...


def real_function(version: str = "0.7.4") -> Callable[..., object]:
    namespace: dict[str, Callable[..., object]] = {}
    exec(header(recorded(version).parameters), namespace)
    return namespace[FUNCTION]


STAND_INS: dict[str, Callable[[], Callable[..., Any]]] = {
    "MagicMock()": MagicMock,
    "MagicMock(spec=function)": lambda: MagicMock(spec=real_function()),
    "*args, **kwargs": lambda: takes_anything,
}


@pytest.mark.parametrize("name", STAND_INS)
@pytest.mark.parametrize("patched", [True, False], ids=["patched", "use_kernel"])
def test_s03_a_stand_in_that_shows_no_signature_is_unknown_and_supports_nothing(
    patched: bool, name: str, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = STAND_INS[name]()
    if patched:
        site.flashinfer("0.7.4")
        probe()
        monkeypatch.setattr(sys.modules["flashinfer.decode"], FUNCTION, stand_in)
        assert_unknown()
    else:
        with use_kernel(stand_in):
            assert_unknown()


def assert_unknown() -> None:
    abi = probe()
    assert abi.unreadable
    assert abi.parameters == ()
    assert not any(abi.features)
    assert capabilities(abi).supports_dcp is False
    for world_size in (1, 8):
        reason = supports_combination(num_heads=16, dtype="bf16", dcp_world_size=world_size)
        assert reason is not None
        assert "a kernel whose signature cannot be read (" in reason
    for dcp in (None, dcp_of()):
        with pytest.raises(FlashInferVersionError, match="cannot tell what this kernel takes"):
            decode_mla(**call(), dcp=dcp)


def test_s03_of_a_magicmock_with_a_spec_it_says_why() -> None:
    mock = MagicMock(spec=real_function())
    with pytest.raises(ValueError, match="__annotations__") as why:
        inspect.signature(mock)
    with use_kernel(mock) as abi:
        assert abi.unreadable == f"MagicMock: {why.value}"


def autospec(version: str) -> MagicMock:
    mock: MagicMock = create_autospec(real_function(version))
    mock.side_effect = mock_kernel(version).side_effect
    return mock


@pytest.mark.parametrize("version", DCP_RELEASES)
@pytest.mark.parametrize("mocked", [mock_kernel, autospec])
def test_s03_an_autospec_of_the_real_signature_takes_the_call_and_not_without_a_keyword(
    mocked: Callable[[str], MagicMock], version: str
) -> None:
    kernel = mocked(version)
    with use_kernel(kernel, recorded(version)):
        decode_mla(**call(), dcp=dcp_of())
    given = dict(kernel.call_args.kwargs)
    without = tuple(p for p in recorded(version).parameters if p.name != "cp_rank")
    with pytest.raises(TypeError, match="cp_rank"):
        mock_kernel(recorded(version)._replace(parameters=without))(**given)


@pytest.mark.parametrize("version", DCP_RELEASES)
@pytest.mark.parametrize(
    "keyword", ["enable_dcp", "cp_world", "cp_rank", "causal_seqlens_kv_global", "return_lse"]
)
def test_s03_a_keyword_that_is_gone_fails_the_test_of_a_call_site(
    keyword: str, version: str
) -> None:
    """Design: by FlashInferSignatureError, before the mock would raise TypeError."""
    parameters = tuple(p for p in recorded(version).parameters if p.name != keyword)
    kernel = mock_kernel(recorded(version)._replace(parameters=parameters))
    with use_kernel(kernel), pytest.raises(FlashInferSignatureError, match=keyword):
        decode_mla(**call(), dcp=dcp_of())
    kernel.assert_not_called()


# S18: parameters in another order, or more of them.


def drifted(version: str, *added: Parameter, reverse: bool = False) -> FlashInferABI:
    parameters = [*recorded(version).parameters, *added]
    if reverse:
        parameters = [p._replace(kind="KEYWORD_ONLY") for p in reversed(parameters)]
    # Python wants those with a default behind those without.
    parameters.sort(key=lambda p: not p.required)
    return recorded(version)._replace(parameters=tuple(parameters))


@each_release
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("added", [(), (Parameter("new_knob", "None"),)])
def test_s18_every_argument_goes_by_keyword_whatever_the_order_and_what_is_new(
    added: tuple[Parameter, ...], reverse: bool, version: str
) -> None:
    kernel = mock_kernel(drifted(version, *added, reverse=reverse))
    with use_kernel(kernel):
        decode_mla(**call())
        trtllm_batch_decode_with_kv_cache_mla(**dropin_call())
        if version in DCP_RELEASES:
            decode_mla(**call(), dcp=dcp_of())
    assert kernel.call_count == (3 if version in DCP_RELEASES else 2)
    for made in kernel.call_args_list:
        assert made.args == ()
        assert set(made.kwargs) <= set(NAMES)


@pytest.mark.parametrize("release", [*RELEASES, "0.7.5", "0.9.0"])
def test_s18_a_parameter_that_is_newly_required_is_named(release: str) -> None:
    like = release if release in RELEASES else "0.7.4"
    abi = drifted(like, Parameter("scheduler_metadata", None))._replace(version=release)
    kernel = mock_kernel(abi)
    with use_kernel(kernel):
        with pytest.raises(FlashInferSignatureError, match="newly requires") as raised:
            decode_mla(**call())
        with pytest.raises(FlashInferSignatureError, match="newly requires") as from_dropin:
            trtllm_batch_decode_with_kv_cache_mla(**dropin_call())
    kernel.assert_not_called()
    assert raised.value.summary == f"{FUNCTION} newly requires scheduler_metadata."
    assert raised.value.found.startswith(f"flashinfer-python {release}: (query, ")
    assert str(from_dropin.value) == str(raised.value)


# S40: what FlashInfer deprecates, and what a type checker says of a call.


@each_release
def test_s40_a_deprecation_of_flashinfers_comes_out_once(version: str) -> None:
    kernel = mock_kernel(version)
    answer = kernel.side_effect

    def deprecated(**given: Any) -> Any:
        warnings.warn("bmm1_scale will be keyword-only", DeprecationWarning, stacklevel=2)
        return answer(**given)

    kernel.side_effect = deprecated
    for rule, times in (("always", 3), ("default", 1)):
        with use_kernel(kernel), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter(rule)  # type: ignore[arg-type]  # one of its words
            for _ in range(3):
                decode_mla(**call())
        assert [str(warning.message) for warning in caught] == [
            "bmm1_scale will be keyword-only"
        ] * times


def test_s40_so_does_one_of_its_import(site: Site) -> None:
    site.flashinfer(first="import warnings; warnings.warn('moved', DeprecationWarning)")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        probe()
        probe()
    assert [(one.category, str(one.message)) for one in caught] == [(DeprecationWarning, "moved")]


CALL_SITE = """\
from typing import TypedDict

from torch import Tensor

from fi_dcp_compat import DCP, MLAState, decode_mla

class Step(TypedDict):
    workspace_buffer: Tensor
    block_tables: Tensor
    max_seq_len: int
    bmm1_scale: float

def forward(query: Tensor, cache: Tensor, lens: Tensor, step: Step, dcp: DCP) -> MLAState:
    state: MLAState = decode_mla(query, cache, {keyword}=lens, dcp=dcp, **step)
    return state
"""
# Without torch's types, which take mypy half a minute; tests/typing has them.
MYPY_INI = "[mypy]\nstrict = True\nfollow_imports = silent\n[mypy-torch.*]\nfollow_imports = skip\n"


def test_s40_mypy_refuses_a_misspelt_keyword_at_a_call_site(tmp_path: Path) -> None:
    (tmp_path / "mypy.ini").write_text(MYPY_INI, encoding="utf-8")
    for keyword in ("seq_lens", "seqlens"):
        source = CALL_SITE.format(keyword=keyword)
        (tmp_path / f"with_{keyword}.py").write_text(source, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "with_seq_lens.py", "with_seqlens.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert errors, done.stdout + done.stderr
    assert all(line.startswith("with_seqlens.py:14: error:") for line in errors)
    assert 'Unexpected keyword argument "seqlens"' in errors[0]
