"""Installed releases that are too old, or cannot be imported: S02, S26, S27."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from packaging.version import Version

from fi_dcp_compat import (
    Backend,
    FlashInferImportError,
    FlashInferVersionError,
    decode_mla,
    prepare_decode_mla,
    probe,
)
from fi_dcp_compat.dropin import trtllm_batch_decode_with_kv_cache_mla
from fi_dcp_compat.releases import recorded_versions
from fi_dcp_compat.testing import mock_kernel
from tests.contract.test_decode_call import Dispatched
from tests.fakes import Site, answer_of
from tests.scenarios.inputs import dropin_call, dropin_dcp_call, lens
from tests.support import call, dcp_of
from tests.test_guards import gpu

FUNCTION = "trtllm_batch_decode_with_kv_cache_mla"
WITHOUT_DCP = [
    v for v in recorded_versions() if Version("0.6.12") <= Version(v) < Version("0.6.17")
]

# S02: a call site of a newer release.


def no_dcp(version: str, asked: str = "decode_mla(dcp=...)", instead: str = "dcp=None") -> str:
    return (
        f"{asked} needs FlashInfer's native DCP keywords.\n"
        f"Found: flashinfer-python {version}, whose function lacks enable_dcp, cp_world, cp_rank, "
        "causal_seqlens_kv_global.\n"
        "Needed: 0.6.17 or newer (#4178).\n"
        f'Fix: pip install -U "flashinfer-python>=0.6.17", or call with {instead}.'
    )


# Without a GPU too: nobody should be sent to one to learn that the release is too old.
each_machine = pytest.mark.parametrize("machine", [gpu, nullcontext], ids=["GPU", "no GPU"])
Machine = Callable[[], AbstractContextManager[None]]


@each_machine
@pytest.mark.parametrize("version", WITHOUT_DCP)
def test_s02_an_installed_release_without_the_keywords_is_too_old_before_any_tensor_work(
    version: str, machine: Machine, site: Site
) -> None:
    site.flashinfer(version, like=version)
    given = call(dcp=dcp_of())
    with (
        machine(),
        Dispatched() as operations,
        pytest.raises(FlashInferVersionError, match="enable_dcp") as raised,
    ):
        decode_mla(**given)
    assert operations.names == []
    assert str(raised.value) == no_dcp(version)


def test_s02_so_it_is_at_start_up_and_from_the_drop_in(site: Site) -> None:
    site.flashinfer("0.6.16", like="0.6.16")
    with pytest.raises(FlashInferVersionError, match="enable_dcp") as prepared:
        prepare_decode_mla(page_size=64, dtype=torch.bfloat16, bmm1_scale=0.1, dcp_world_size=8)
    assert str(prepared.value) == no_dcp("0.6.16")
    with pytest.raises(FlashInferVersionError, match="enable_dcp") as from_dropin:
        trtllm_batch_decode_with_kv_cache_mla(**dropin_dcp_call(8, 3, lens(55, 55)))
    asked = f"{FUNCTION}(enable_dcp=True)"
    assert str(from_dropin.value) == no_dcp("0.6.16", asked, "enable_dcp=False")


@pytest.mark.parametrize(
    ("keyword", "value", "before", "since"),
    [
        ("skip_softmax_threshold_scale_factor", 1e-3, "0.6.3", "0.6.4"),
        ("uses_shared_paged_kv_idx", False, "0.6.6", "0.6.7"),
        ("is_var_seq", False, "0.6.7.post3", "0.6.8"),
        ("return_lse", True, "0.6.11.post3", "0.6.12"),
        ("cute_dsl_impl", "monolithic", "0.6.11.post3", "0.6.12"),
        ("kv_scale_format", "arbitrary_fp32", "0.6.13", "0.6.14"),
        ("sparse_mla_top_k_lens", lens(4, 4), "0.6.16.post4", "0.6.17"),
        ("use_fp16_softmax", True, "0.6.17", "0.6.18"),
    ],
)
def test_s02_each_keyword_that_is_newer_than_the_release_is_named_with_its_first_one(
    keyword: str, value: object, before: str, since: str, site: Site
) -> None:
    site.flashinfer(before, like=before)
    with pytest.raises(FlashInferVersionError, match=keyword) as raised:
        trtllm_batch_decode_with_kv_cache_mla(**dropin_call(**{keyword: value}))
    assert f"flashinfer-python {before}, whose function lacks" in raised.value.found
    assert raised.value.needed.startswith(f"{since} or newer")
    assert f'"flashinfer-python>={since}"' in raised.value.fix


@each_machine
def test_s02_the_keywords_of_0_6_14_on_0_6_13_are_no_type_error(
    machine: Machine, site: Site
) -> None:
    site.flashinfer("0.6.13", like="0.6.13")
    given = call(query=torch.zeros(4, 16, 576).bfloat16())
    with (
        machine(),
        pytest.raises(FlashInferVersionError, match="cum_seq_lens_q, max_q_len") as raised,
    ):
        decode_mla(**given, cum_seq_lens_q=lens(0, 1, 4), max_q_len=3)
    assert raised.value.needed == "0.6.14 or newer."


# S26: an import that needs the driver, on a machine that has none.


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("RuntimeError", "Found no NVIDIA driver on your system"),
        ("OSError", "libcuda.so.1: cannot open shared object file"),
        ("AssertionError", "Torch not compiled with CUDA enabled"),
        ("ImportError", "libnvrtc.so.13: cannot open shared object file"),
        ("AttributeError", "module 'cutlass.cute.core' has no attribute 'ThrMma'"),
    ],
)
def test_s26_importing_this_package_imports_no_flashinfer_and_the_probe_keeps_the_cause(
    error: str, text: str, site: Site
) -> None:
    site.flashinfer("0.7.0", like="0.7.0", first=f"raise {error}({text!r})")
    # Nor does it need torch, whose own import may fail there.
    site.write("torch/__init__.py", "raise ImportError('no torch on this machine')")
    found = answer_of(
        """
import json, sys
import fi_dcp_compat
imported = sorted({"flashinfer", "torch"} & set(sys.modules))
static = fi_dcp_compat.probe(static=True).version
try:
    fi_dcp_compat.probe()
except fi_dcp_compat.FlashInferImportError as exc:
    cause = exc.__cause__
    print(json.dumps([imported, static, exc.found, type(cause).__name__, str(cause)]))
""",
        path=[site.folder],
    )
    assert found[:2] == [[], "0.7.0"]
    assert found[2] == f"{error}: {text} (flashinfer-python 0.7.0)."
    assert found[3:] == [error, text]


def test_s26_so_does_the_decode(site: Site) -> None:
    site.flashinfer("0.7.4", first="raise OSError('libcuda.so.1: cannot open')")
    for _ in range(2):
        with pytest.raises(FlashInferImportError, match="importing it fails") as raised:
            decode_mla(**call(), dcp=dcp_of())
        assert isinstance(raised.value.__cause__, OSError)
        assert isinstance(raised.value, ImportError)
    assert decode_mla(**call(backend="reference")).shape == (2, 1, 16, 512)


# S27: an old release is in nobody's way who does not ask it for DCP.


@pytest.mark.parametrize("version", ["0.6.0", "0.6.16"])
def test_s27_every_name_of_the_package_can_be_imported_beside_an_old_release(
    version: str, site: Site
) -> None:
    site.flashinfer(version, like=version)
    found = answer_of(
        """
import json, sys
from fi_dcp_compat import *
import fi_dcp_compat, fi_dcp_compat.dropin, fi_dcp_compat.testing
names = [name for name in fi_dcp_compat.__all__ if getattr(fi_dcp_compat, name) is not None]
print(json.dumps([len(names), len(fi_dcp_compat.__all__), "flashinfer" in sys.modules]))
""",
        path=[site.folder],
    )
    assert found[0] == found[1] > 40
    assert found[2] is False


@pytest.mark.parametrize("backend", ["auto", "trtllm-gen", "cute-dsl", "xqa"])
def test_s27_0_6_16_decodes_without_dcp_and_refuses_it_for_each_backend(
    backend: Backend, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.flashinfer("0.6.16", like="0.6.16")
    kernel = mock_kernel("0.6.16")
    monkeypatch.setattr(importlib.import_module("flashinfer.decode"), FUNCTION, kernel)
    assert decode_mla(**call(heads=128, backend=backend)).shape == (2, 1, 128, 512)
    kernel.assert_called_once()
    for refused in (
        lambda: decode_mla(**call(heads=128, backend=backend), dcp=dcp_of()),
        lambda: probe().require_native_dcp(),
    ):
        with pytest.raises(FlashInferVersionError, match=r"0\.6\.16, whose function lacks enable"):
            refused()
    kernel.assert_called_once()
