"""Finding FlashInfer, alive and on disk: absent, broken, changed, mocked, and the installed one."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, create_autospec

import pytest
from packaging.version import Version

from fi_dcp_compat import (
    FlashInferABI,
    FlashInferCompatError,
    FlashInferImportError,
    FlashInferNotFoundError,
    FlashInferSignatureError,
    FlashInferVersionError,
    InvalidInputError,
    Parameter,
    capabilities,
    check,
    probe,
    recorded,
    supports_combination,
)
from fi_dcp_compat.abi import FUNCTION
from fi_dcp_compat.features import DCP_KEYWORDS
from fi_dcp_compat.probing import bind_kernel
from fi_dcp_compat.releases import recorded_versions
from fi_dcp_compat.testing import mock_kernel, use_kernel
from tests.fakes import Site, answer_of, fake_site
from tests.support import signature, stub_result

CUBIN_MISMATCH = (
    "flashinfer-cubin version (0.6.13) does not match flashinfer version (0.6.15). "
    "Please install the same version of both packages. "
    "Set FLASHINFER_DISABLE_VERSION_CHECK=1 to bypass this check."
)
CONFIGURATION: dict[str, Any] = {"num_heads": 16, "q_len": 1, "page_size": 64, "dtype": "bf16"}


def _installed() -> str | None:
    try:
        return installed_version("flashinfer-python")
    except PackageNotFoundError:
        return None


INSTALLED = _installed()
needs_flashinfer = pytest.mark.skipif(INSTALLED is None, reason="flashinfer-python is absent")
# Releases before it cannot be imported next to a CPU build of torch.
needs_importable = pytest.mark.skipif(
    INSTALLED is None or Version(INSTALLED) < Version("0.7.1"),
    reason=f"flashinfer-python {INSTALLED} may not be importable here",
)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with fake_site(tmp_path / "site-packages") as site:
        yield site


def without_dcp(version: str) -> tuple[Parameter, ...]:
    return tuple(p for p in recorded(version).parameters if p.name not in DCP_KEYWORDS)


def patch(function: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put `function` where stacks and their tests patch FlashInfer's."""
    monkeypatch.setattr(importlib.import_module("flashinfer.decode"), FUNCTION, function)


# The installed release, imported in a process of its own.

INSTALLED_SCRIPT = """
import json, sys
from fi_dcp_compat import probe, recorded
static = probe(static=True)
before = sorted({"torch", "flashinfer"} & set(sys.modules))
live = probe()

import flashinfer.decode
real = flashinfer.decode.trtllm_batch_decode_with_kv_cache_mla
def older(query, kv_cache): ...
flashinfer.decode.trtllm_batch_decode_with_kv_cache_mla = older
patched = [parameter.name for parameter in probe().parameters]
flashinfer.decode.trtllm_batch_decode_with_kv_cache_mla = real
from fi_dcp_compat.probing import bind_kernel
from fi_dcp_compat import supports_combination
print(json.dumps({
    "imported by the static probe": before,
    "static": [static.version, static.entry_point, static.source, static.parameters],
    "live": [live.version, live.entry_point, live.source, live.parameters],
    "patched": patched,
    "restored": probe() == live,
    "genuine": bind_kernel().genuine,
    "version": flashinfer.__version__,
    "reason": supports_combination(num_heads=16, dtype="bf16", dcp_world_size=8),
}))
"""


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """What a fresh process, in which every warning is an error, finds in the real package."""
    found: dict[str, Any] = answer_of(INSTALLED_SCRIPT, "-W", "error")
    return found


@needs_importable
def test_the_live_probe_reads_the_installed_release(answers: dict[str, Any]) -> None:
    version, entry_point, source, parameters = answers["live"]
    assert version == answers["version"] == INSTALLED
    assert source == "live"
    if version in recorded_versions():
        record = recorded(version)
        assert entry_point == record.entry_point
        assert [Parameter(*p) for p in parameters] == list(record.parameters)


@needs_importable
def test_the_static_probe_agrees_with_the_live_one_on_the_installed_release(
    answers: dict[str, Any],
) -> None:
    version, entry_point, source, parameters = answers["static"]
    assert source == "static"
    assert [version, entry_point, parameters] == [answers["live"][i] for i in (0, 1, 3)]
    assert {p[0] for p in parameters} >= {"query", "backend", *DCP_KEYWORDS}


@needs_importable
def test_the_static_probe_imports_neither_torch_nor_flashinfer(answers: dict[str, Any]) -> None:
    assert answers["imported by the static probe"] == []


@needs_importable
def test_patching_the_installed_function_needs_no_cache_clear(answers: dict[str, Any]) -> None:
    assert answers["patched"] == ["query", "kv_cache"]
    assert answers["restored"] is True


@needs_importable
def test_the_installed_function_is_known_to_be_flashinfers_own(answers: dict[str, Any]) -> None:
    assert answers["genuine"] is True


@needs_importable
def test_the_installed_release_can_do_native_dcp(answers: dict[str, Any]) -> None:
    assert Version(answers["version"]) >= Version("0.6.17")
    assert answers["reason"] is None


@needs_flashinfer
def test_the_static_probe_reads_the_installed_release_in_this_process() -> None:
    abi = probe(static=True)
    assert abi.version == INSTALLED
    assert abi.source == "static"
    if INSTALLED in recorded_versions():
        assert abi.parameters == recorded(INSTALLED).parameters


# Releases written to disk.


@pytest.mark.parametrize("version", recorded_versions())
def test_each_release_is_read_alive_and_from_its_file_alike(version: str, site: Site) -> None:
    site.flashinfer(version, like=version)
    static = probe(static=True)
    assert "flashinfer" not in sys.modules
    live, record = probe(), recorded(version)
    assert (live.source, static.source, record.source) == ("live", "static", "recorded")
    for abi in (live, static):
        assert abi.version == version
        assert abi.entry_point == record.entry_point
        assert abi.parameters == record.parameters
        assert abi.features == record.features
        assert abi.unreadable == ""


def test_kinds_and_defaults_of_every_sort_are_read_alike(site: Site) -> None:
    site.flashinfer()
    site.write(
        "flashinfer/mla/_core.py",
        "import math\n\n\n"
        f"def {FUNCTION}(\n"
        "    query, kv_cache=None, /, workspace_buffer='int8', sizes=(1, -2.5), *rest,\n"
        '    backend="auto", bmm1_scale, scale=-1e-3, flag=True, **more,\n'
        ") -> 'tuple[object, ...]':\n"
        "    return rest\n",
    )
    live, static = probe(), probe(static=True)
    assert live.parameters == static.parameters
    assert static.parameters == (
        Parameter("query", None, "POSITIONAL_ONLY"),
        Parameter("kv_cache", "None", "POSITIONAL_ONLY"),
        Parameter("workspace_buffer", "'int8'"),
        Parameter("sizes", "(1, -2.5)"),
        Parameter("rest", None, "VAR_POSITIONAL"),
        Parameter("backend", "'auto'", "KEYWORD_ONLY"),
        Parameter("bmm1_scale", None, "KEYWORD_ONLY"),
        Parameter("scale", "-0.001", "KEYWORD_ONLY"),
        Parameter("flag", "True", "KEYWORD_ONLY"),
        Parameter("more", None, "VAR_KEYWORD"),
    )


def test_a_decorator_that_keeps_the_signature_hides_nothing(site: Site) -> None:
    site.flashinfer()
    core = site.folder / "flashinfer/mla/_core.py"
    site.write(
        "flashinfer/mla/_core.py",
        "import functools\n\n\n"
        "def flashinfer_api(function):\n"
        "    @functools.wraps(function)\n"
        "    def wrapper(*args, **kwargs):\n"
        "        return function(*args, **kwargs)\n\n"
        "    return wrapper\n\n\n@flashinfer_api\n" + core.read_text(),
    )
    assert probe().parameters == probe(static=True).parameters == recorded("0.7.4").parameters
    assert probe().entry_point == recorded("0.7.4").entry_point
    assert bind_kernel().genuine is True


@pytest.mark.parametrize("static", [False, True], ids=["live", "static"])
def test_the_companion_wheels_are_reported(static: bool, site: Site) -> None:
    site.flashinfer("0.7.4")
    site.distribution("flashinfer-cubin", "0.7.4")
    site.distribution("flashinfer-jit-cache", "0.7.4+cu130")
    companions = probe(static=static).companions
    assert dict(companions) == {"flashinfer-cubin": "0.7.4", "flashinfer-jit-cache": "0.7.4+cu130"}


@pytest.mark.parametrize("static", [False, True], ids=["live", "static"])
def test_a_release_that_is_not_recorded_says_what_it_is_judged_as(static: bool, site: Site) -> None:
    site.flashinfer("0.7.5", parameters=(*recorded("0.7.4").parameters, Parameter("tile", "64")))
    assert probe(static=static).note == (
        "not recorded; judged as 0.7.4, the nearest recorded release; its new tile left at the "
        "default"
    )


@pytest.mark.parametrize("static", [False, True], ids=["live", "static"])
def test_what_was_found_is_kept_until_the_cache_is_cleared(static: bool, site: Site) -> None:
    site.flashinfer("0.7.1")
    first = probe(static=static)
    site.write("flashinfer/_build_meta.py", '__version__ = "0.7.4"\n')
    assert probe(static=static) is first
    sys.modules.pop("flashinfer", None)
    sys.modules.pop("flashinfer._build_meta", None)
    sys.modules.pop("flashinfer.version", None)
    probe.cache_clear()
    if not static:
        importlib.import_module("flashinfer")
    assert probe(static=static).version == "0.7.4"


def test_threads_that_probe_at_once_find_the_same(site: Site) -> None:
    site.flashinfer("0.7.4", first="import time; time.sleep(0.05)")
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: probe(), range(16)))
    assert set(found) == {probe()}


def test_the_kernel_a_test_installed_is_what_the_probe_finds(site: Site) -> None:
    with use_kernel(mock_kernel("0.6.16"), recorded("0.6.16")):
        assert probe() == recorded("0.6.16")
    with pytest.raises(FlashInferNotFoundError, match="not installed"):
        probe()


def test_a_kernel_installed_without_an_abi_is_read_from_its_signature() -> None:
    with use_kernel(mock_kernel("0.6.17")) as abi:
        assert probe() == abi
    assert abi.parameters == recorded("0.6.17").parameters
    assert abi.version == "0.6.17"
    assert abi.features == recorded("0.6.17").features

    def own(**call: Any) -> None: ...

    own.__signature__ = signature(recorded("0.6.17"))  # type: ignore[attr-defined]  # inspect's
    with use_kernel(create_autospec(own)) as abi:
        assert abi.parameters == recorded("0.6.17").parameters
    assert abi.release is None
    assert abi.features.native_dcp is True
    with use_kernel(MagicMock()) as abi:
        assert abi.unreadable
        assert abi.features.native_dcp is False


# Absent.


@pytest.mark.parametrize("static", [False, True], ids=["live", "static"])
def test_an_absent_flashinfer_is_not_found(static: bool, site: Site) -> None:
    with pytest.raises(FlashInferNotFoundError) as raised:
        probe(static=static)
    assert isinstance(raised.value, ImportError)
    assert str(raised.value) == (
        "FlashInfer is not installed.\n"
        f"Found: no module flashinfer for {sys.executable}.\n"
        "Needed: flashinfer-python 0.6.17 or newer for native DCP, 0.6.12 or newer without.\n"
        'Fix: pip install "flashinfer-python>=0.6.17", or decode_mla(backend="reference") in tests.'
    )


def test_a_blocked_flashinfer_is_not_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.flashinfer()
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(FlashInferNotFoundError, match="FlashInfer is not installed"):
        probe()
    with pytest.raises(FlashInferNotFoundError, match="FlashInfer is not installed"):
        probe(static=True)


def test_an_install_after_a_failed_probe_is_seen_without_clearing(site: Site) -> None:
    for static in (False, True):
        with pytest.raises(FlashInferNotFoundError, match="not installed"):
            probe(static=static)
    site.flashinfer("0.7.4")
    assert probe().version == probe(static=True).version == "0.7.4"


# Installed, but the import fails.

BROKEN = [
    pytest.param(
        f"raise RuntimeError({CUBIN_MISMATCH!r})",
        RuntimeError,
        'pip install -U "flashinfer-python==0.6.15" "flashinfer-cubin==0.6.15"',
        id="cubin of another version",
    ),
    pytest.param(
        "raise RuntimeError('flashinfer-jit-cache-cu130 version (0.7.0+cu130) does not match "
        "flashinfer-jit-cache version (0.7.0+cu129). Please install the same')",
        RuntimeError,
        "pip uninstall flashinfer-cubin",
        id="jit-cache provider of another version",
    ),
    pytest.param(
        "raise AssertionError('Torch not compiled with CUDA enabled')",
        AssertionError,
        'pip install -U "flashinfer-python>=0.7.1", or run on a machine with a GPU.',
        id="CPU build of torch",
    ),
    pytest.param(
        "raise RuntimeError('Found no NVIDIA driver on your system. Please check')",
        RuntimeError,
        "run on a machine with a GPU",
        id="no driver",
    ),
    pytest.param(
        "raise OSError('libcuda.so.1: cannot open shared object file: No such file')",
        OSError,
        "run on a machine with a GPU",
        id="no driver library",
    ),
    pytest.param(
        "raise AttributeError(\"module 'cutlass.cute.core' has no attribute 'ThrMma'\")",
        AttributeError,
        'pip install -U "flashinfer-python>=0.6.17" nvidia-cutlass-dsl',
        id="cutlass-dsl without a name",
    ),
    pytest.param(
        "raise ModuleNotFoundError(\"No module named 'cutlass'\", name='cutlass')",
        ModuleNotFoundError,
        'pip install -U "flashinfer-python>=0.6.17" nvidia-cutlass-dsl',
        id="no cutlass-dsl",
    ),
    pytest.param(
        "raise ZeroDivisionError('no idea')",
        ZeroDivisionError,
        "pip install --force-reinstall flashinfer-python",
        id="anything else",
    ),
    pytest.param(
        "import tqdm_that_is_absent",
        ModuleNotFoundError,
        "pip install --force-reinstall flashinfer-python",
        id="a dependency is absent",
    ),
]


@pytest.mark.parametrize(("code", "cause", "fix"), BROKEN)
def test_an_import_that_fails_says_why_and_what_mends_it(
    code: str, cause: type[Exception], fix: str, site: Site
) -> None:
    site.flashinfer("0.6.15", like="0.6.15", first=code)
    site.distribution("flashinfer-cubin", "0.6.13")
    with pytest.raises(FlashInferImportError, match="installed, but importing it fails") as raised:
        probe()
    error = raised.value
    assert isinstance(error, ImportError)
    assert type(error.__cause__) is cause
    assert str(error.__cause__) in error.found
    assert "flashinfer-python 0.6.15" in error.found
    assert "flashinfer-cubin 0.6.13" in error.found
    assert fix in error.fix


@pytest.mark.parametrize(("code", "cause", "fix"), BROKEN)
def test_the_static_probe_answers_where_the_import_fails(
    code: str, cause: type[Exception], fix: str, site: Site
) -> None:
    site.flashinfer("0.6.15", like="0.6.15", first=code)
    assert probe(static=True).parameters == recorded("0.6.15").parameters
    assert "flashinfer" not in sys.modules


def test_a_companion_mismatch_reads_so(site: Site) -> None:
    site.flashinfer("0.6.15", like="0.6.15", first=f"raise RuntimeError({CUBIN_MISMATCH!r})")
    site.distribution("flashinfer-cubin", "0.6.13")
    site.distribution("flashinfer-jit-cache", "0.6.15+cu130")
    with pytest.raises(FlashInferImportError) as raised:
        probe()
    assert str(raised.value) == (
        "FlashInfer is installed, but importing it fails.\n"
        f"Found: RuntimeError: {CUBIN_MISMATCH} (flashinfer-python 0.6.15, "
        "flashinfer-cubin 0.6.13, flashinfer-jit-cache 0.6.15+cu130).\n"
        "Needed: companion wheels of the same version as flashinfer-python (0.7.2 and "
        "newer ignore others, with a warning).\n"
        'Fix: pip install -U "flashinfer-python==0.6.15" "flashinfer-cubin==0.6.15" '
        '"flashinfer-jit-cache==0.6.15" (the companion wheels are on FlashInfer\'s own package '
        "index, not all on PyPI), or pip uninstall flashinfer-cubin flashinfer-jit-cache."
    )


def test_a_companion_mismatch_without_metadata_still_names_the_companion(site: Site) -> None:
    site.flashinfer("0.6.15", like="0.6.15", first=f"raise RuntimeError({CUBIN_MISMATCH!r})")
    with pytest.raises(FlashInferImportError, match="does not match") as raised:
        probe()
    assert '"flashinfer-cubin==0.6.15"' in raised.value.fix
    assert "pip uninstall flashinfer-cubin" in raised.value.fix


def test_an_import_that_failed_once_fails_the_second_time_too(site: Site) -> None:
    # As 0.6.14 to 0.7.0: flashinfer.decode is imported, and stays in sys.modules, before
    # flashinfer.gdn_prefill raises.
    broken = "raise AssertionError('Torch not compiled with CUDA enabled')"
    site.flashinfer("0.6.17", like="0.6.17", last=broken)
    for _ in range(3):
        with pytest.raises(FlashInferImportError, match="Torch not compiled with CUDA"):
            probe()


def test_a_mended_import_is_seen_without_clearing(site: Site) -> None:
    site.flashinfer("0.7.4", first="raise OSError('disk')")
    with pytest.raises(FlashInferImportError, match="OSError: disk"):
        probe()
    site.flashinfer("0.7.4")
    assert probe().version == "0.7.4"


def test_an_interrupt_during_the_import_is_not_caught(site: Site) -> None:
    site.flashinfer("0.7.4", first="raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        probe()


def test_warnings_of_the_import_fail_nothing_and_still_come_out(site: Site) -> None:
    site.flashinfer(first="import warnings; warnings.warn('sm_121 is new', FutureWarning)")
    filters = list(warnings.filters)
    assert any(rule[0] == "error" for rule in filters)
    with pytest.warns(FutureWarning, match="sm_121 is new"):
        assert probe().version == "0.7.4"
    assert warnings.filters == filters


def test_a_warning_that_the_caller_ignores_stays_ignored(site: Site) -> None:
    site.flashinfer(first="import warnings; warnings.warn('old', DeprecationWarning)")
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="old")
        assert probe().version == "0.7.4"
    assert shown == []


# The function is gone, or the module is.


@pytest.mark.parametrize("static", [False, True], ids=["live", "static"])
def test_a_function_that_is_gone_is_said_to_be_gone(static: bool, site: Site) -> None:
    site.flashinfer("0.9.0")
    site.write("flashinfer/mla/_core.py", "def another_name(query): ...\n")
    site.write("flashinfer/decode.py", "another_name = print\n")
    site.write("flashinfer/__init__.py", "from .version import __version__ as __version__\n")
    with pytest.raises(FlashInferSignatureError, match=f"has no {FUNCTION}") as raised:
        probe(static=static)
    assert "flashinfer 0.9.0 at" in raised.value.found
    assert str(site.folder / "flashinfer") in raised.value.found
    assert "not installed" not in str(raised.value)


def test_the_version_of_a_package_without_the_function_is_read_from_its_files(site: Site) -> None:
    site.flashinfer("0.9.0", distribution=None)
    site.write("flashinfer/mla/_core.py", "")
    with pytest.raises(FlashInferSignatureError, match=r"flashinfer 0\.9\.0 at"):
        probe(static=True)


def test_a_decode_module_that_is_gone_is_the_function_gone(site: Site) -> None:
    # It is installed and it imports: neither "not installed" nor a broken import.
    site.flashinfer("0.9.0")
    (site.folder / "flashinfer/decode.py").unlink()
    site.write("flashinfer/__init__.py", "from .version import __version__ as __version__\n")
    with pytest.raises(FlashInferSignatureError, match=f"has no {FUNCTION}"):
        probe()


def test_a_file_that_is_no_python_is_an_error_of_this_package(site: Site) -> None:
    site.flashinfer()
    site.write("flashinfer/mla/_core.py", "def torn(\n")
    with pytest.raises(FlashInferCompatError, match=r"_core\.py"):
        probe(static=True)


# Something else stands in the function's place (S03).


def takes_anything(*args: Any, **kwargs: Any) -> None: ...


@pytest.fixture(params=["MagicMock()", "MagicMock(spec=function)", "*args, **kwargs"])
def unreadable(
    request: pytest.FixtureRequest, site: Site, monkeypatch: pytest.MonkeyPatch
) -> FlashInferABI:
    site.flashinfer("0.7.4")
    real = getattr(importlib.import_module("flashinfer.decode"), FUNCTION)
    stand_ins: dict[str, Callable[[], object]] = {
        "MagicMock()": MagicMock,
        "MagicMock(spec=function)": lambda: MagicMock(spec=real),
        "*args, **kwargs": lambda: takes_anything,
    }
    patch(stand_ins[request.param](), monkeypatch)
    return probe()


def test_a_stand_in_without_a_signature_is_unreadable_and_says_why(
    unreadable: FlashInferABI,
) -> None:
    assert unreadable.parameters == ()
    assert ("(*args" in unreadable.unreadable) or ("__annotations__" in unreadable.unreadable)


def test_a_stand_in_without_a_signature_supports_nothing(unreadable: FlashInferABI) -> None:
    assert unreadable.features.native_dcp is False
    assert unreadable.features.varlen_dcp is False
    assert capabilities(unreadable).supports_dcp is False
    assert capabilities(unreadable).can_return_lse_for_decode is False
    for world_size in (1, 8):
        reasons = check(unreadable, **CONFIGURATION, dcp_world_size=world_size)
        assert "signature cannot be read" in reasons[0].found
        assert 'mock_kernel("0.6.17")' in reasons[0].fix


def test_a_stand_in_without_a_signature_is_unknown_for_dcp_as_for_any_call(
    unreadable: FlashInferABI,
) -> None:
    assert check(unreadable, **CONFIGURATION)[0].error is FlashInferVersionError
    with pytest.raises(FlashInferVersionError, match="signature cannot be read"):
        unreadable.require_native_dcp()


def test_an_autospec_is_read_like_the_function_it_copies(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.flashinfer("0.7.4")
    real = getattr(importlib.import_module("flashinfer.decode"), FUNCTION)
    patch(create_autospec(real), monkeypatch)
    assert probe().parameters == recorded("0.7.4").parameters
    assert probe().features.native_dcp is True
    assert bind_kernel().genuine is False


def test_a_mock_module_has_every_name_and_supports_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", MagicMock())
    monkeypatch.setitem(sys.modules, "flashinfer.decode", MagicMock())
    abi = probe()
    assert abi.unreadable
    assert abi.features.native_dcp is False
    with pytest.raises(FlashInferNotFoundError, match="not installed"):
        probe(static=True)


def test_a_fake_module_without_a_spec_hides_no_installed_package(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.flashinfer("0.7.4")
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    assert probe(static=True).parameters == recorded("0.7.4").parameters


def test_patching_the_function_needs_no_cache_clear(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.flashinfer("0.7.4")
    before = probe()
    assert before.features.native_dcp is True
    with monkeypatch.context() as patched:
        patch(mock_kernel("0.6.16"), patched)
        assert probe().lacks(*DCP_KEYWORDS) == DCP_KEYWORDS
        with pytest.raises(FlashInferVersionError, match="enable_dcp"):
            probe().require_native_dcp()
    assert probe() is before


# Which release it counts as (S12, S13).


def judged(site: Site, version: str | None, *, keywords: bool, **package: Any) -> FlashInferABI:
    parameters = recorded("0.6.17").parameters if keywords else without_dcp("0.6.17")
    site.flashinfer(version, parameters=parameters, **package)
    live, static = probe(), probe(static=True)
    assert live.parameters == static.parameters
    assert live.release == static.release
    assert live.features == static.features
    return live


@pytest.mark.parametrize(
    "version",
    [
        "0.6.17",
        "0.6.17+cu130",
        "0.6.17.post1",
        "0.6.18+sm89.1",
        "0.7.2.post1",
        "0.10.0",
        "1.0",
        "0.6.17rc1",
        "0.6.17.dev20260801",
        "0.6.16.dev20260730",
        "0.6.16.dev20260730+g1234567",
        "0.0.0+unknown",
        "garbage",
    ],
)
def test_these_versions_with_the_keywords_can_do_native_dcp(version: str, site: Site) -> None:
    abi = judged(site, version, keywords=True, distribution=None)
    assert abi.features.native_dcp is True
    abi.require_native_dcp()


@pytest.mark.parametrize(
    ("version", "error"),
    [
        ("0.6.9", FlashInferVersionError),
        ("0.6.16", FlashInferVersionError),
        ("0.6.16.post4", FlashInferVersionError),
        ("0.6.17rc1", FlashInferVersionError),
        ("0.6.16.dev20260730", FlashInferVersionError),
        ("0.0.0+unknown", FlashInferVersionError),
        ("garbage", FlashInferVersionError),
        ("0.6.17", FlashInferSignatureError),
        ("0.10.0", FlashInferSignatureError),
    ],
)
def test_these_versions_without_the_keywords_cannot(
    version: str, error: type[FlashInferCompatError], site: Site
) -> None:
    abi = judged(site, version, keywords=False, distribution=None)
    assert abi.features.native_dcp is False
    with pytest.raises(error, match="lacks enable_dcp, cp_world, cp_rank") as raised:
        abi.require_native_dcp()
    assert type(raised.value) is error
    assert version in raised.value.found


def test_an_unknown_version_without_the_keywords_is_said_to_be_unknown(site: Site) -> None:
    abi = judged(site, "0.0.0+unknown", keywords=False, distribution=None)
    with pytest.raises(FlashInferVersionError) as raised:
        abi.require_native_dcp()
    assert str(raised.value) == (
        "decode_mla(dcp=...) needs FlashInfer's native DCP keywords.\n"
        "Found: flashinfer-python of unknown version (0.0.0+unknown), whose function lacks "
        "enable_dcp, cp_world, cp_rank, causal_seqlens_kv_global.\n"
        "Needed: 0.6.17 or newer (#4178).\n"
        'Fix: pip install -U "flashinfer-python>=0.6.17", or call with dcp=None.'
    )


@pytest.mark.parametrize("version", ["0.6.16", "0.6.9", "0.6.16.post4", "0.6.15+cu130"])
def test_a_backport_is_refused_until_told_which_release_it_stands_for(
    version: str, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    abi = judged(site, version, keywords=True)
    assert abi.features.native_dcp is False
    with pytest.raises(FlashInferVersionError) as raised:
        abi.require_native_dcp()
    assert str(raised.value) == (
        "decode_mla(dcp=...) needs FlashInfer's native DCP keywords.\n"
        f"Found: flashinfer-python {version}, which carries enable_dcp, cp_world, cp_rank, "
        "causal_seqlens_kv_global but is older.\n"
        "Needed: 0.6.17 or newer (#4178).\n"
        'Fix: pip install -U "flashinfer-python>=0.6.17", or set FI_DCP_COMPAT_ASSUME_VERSION to '
        "the release whose behaviour was ported, or call with dcp=None."
    )
    monkeypatch.setenv("FI_DCP_COMPAT_ASSUME_VERSION", "0.6.17")
    probe.cache_clear()
    for assumed in (probe(), probe(static=True)):
        assert assumed.version == "0.6.17"
        assert assumed.features.native_dcp is True
        assert assumed.features.varlen_dcp is False
        assumed.require_native_dcp()


def test_an_assumed_version_lends_no_keywords(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FI_DCP_COMPAT_ASSUME_VERSION", "0.7.4")
    abi = judged(site, "0.6.16", keywords=False)
    assert abi.version == "0.7.4"
    with pytest.raises(FlashInferSignatureError, match="enable_dcp"):
        abi.require_native_dcp()


@pytest.mark.parametrize("static", [False, True], ids=["live", "static"])
@pytest.mark.parametrize("value", ["latest", "0.6.x", "0.0.0+unknown"])
def test_an_assumed_version_must_be_one(
    value: str, static: bool, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.flashinfer()
    monkeypatch.setenv("FI_DCP_COMPAT_ASSUME_VERSION", value)
    with pytest.raises(InvalidInputError, match="FI_DCP_COMPAT_ASSUME_VERSION is not") as raised:
        probe(static=static)
    assert raised.value.value == value
    assert repr(value) in raised.value.found


def test_an_empty_assumed_version_assumes_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.flashinfer("0.7.1", like="0.7.1")
    monkeypatch.setenv("FI_DCP_COMPAT_ASSUME_VERSION", "")
    assert probe().version == probe(static=True).version == "0.7.1"


@pytest.mark.parametrize("written", [None, "0.0.0+unknown"], ids=["no _build_meta.py", "unknown"])
def test_the_distribution_knows_the_version_a_source_build_does_not(
    written: str | None, site: Site
) -> None:
    site.flashinfer(written, like="0.6.17", distribution="0.6.17")
    assert probe(static=True).version == "0.6.17"
    assert probe().version == "0.6.17"


@pytest.mark.parametrize("static", [False, True], ids=["live", "static"])
def test_the_package_says_its_version_before_the_distribution_does(
    static: bool, site: Site
) -> None:
    site.flashinfer("0.7.1", like="0.7.1", distribution="0.7.4")
    assert probe(static=static).version == "0.7.1"


def test_a_distribution_elsewhere_says_nothing_of_a_source_tree(site: Site, tmp_path: Path) -> None:
    # A checkout on the path, in front of what is installed.
    checkout = Site(tmp_path / "checkout")
    checkout.flashinfer(None, like="0.6.18", distribution=None)
    site.distribution("flashinfer-python", "0.7.4")
    sys.path.insert(0, str(checkout.folder))
    importlib.invalidate_caches()
    for static in (True, False):
        abi = probe(static=static)
        assert abi.release is None
        assert not abi.features.varlen_dcp


@pytest.mark.parametrize("static", [False, True], ids=["live", "static"])
def test_an_editable_install_knows_its_version(static: bool, site: Site, tmp_path: Path) -> None:
    checkout = Site(tmp_path / "checkout")
    checkout.flashinfer(None, like="0.7.0", distribution=None)
    site.distribution("flashinfer-python", "0.7.0")
    direct = '{"dir_info": {"editable": true}, "url": "file:///checkout"}'
    site.write("flashinfer_python-0.7.0.dist-info/direct_url.json", direct)
    sys.path.append(str(checkout.folder))
    importlib.invalidate_caches()
    assert probe(static=static).version == "0.7.0"


@pytest.mark.parametrize("static", [False, True], ids=["live", "static"])
def test_a_function_of_anything_is_unknown(static: bool, site: Site) -> None:
    site.flashinfer("0.7.4")
    text = f"def {FUNCTION}(*args, **kwargs): ...\n"
    site.write("flashinfer/mla/_core.py", text)
    abi = probe(static=static)
    assert abi.parameters == ()
    assert abi.unreadable
    with pytest.raises(FlashInferVersionError, match="cannot tell what this kernel takes"):
        abi.require_native_dcp()


class Unhashable:
    __hash__ = None  # type: ignore[assignment]  # as a dataclass has it

    def __call__(self, **arguments: Any) -> Any:
        return stub_result(**arguments)


class Raising:
    @property
    def __signature__(self) -> Any:
        raise RuntimeError("no signature today")

    def __call__(self, **arguments: Any) -> Any: ...


def wraps_itself(**arguments: Any) -> Any: ...


wraps_itself.__wrapped__ = wraps_itself  # type: ignore[attr-defined]  # a circle


@pytest.mark.parametrize("stand_in", [Unhashable(), Raising(), wraps_itself], ids=repr)
def test_an_odd_callable_is_unknown_and_no_crash(
    stand_in: Any, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.flashinfer("0.7.4")
    decode = importlib.import_module("flashinfer.decode")
    monkeypatch.setattr(decode, FUNCTION, stand_in)
    abi = probe()
    assert abi.unreadable
    assert supports_combination(num_heads=16, dtype="bfloat16", dcp_world_size=8) is not None
    with pytest.raises(FlashInferVersionError, match="cannot tell what this kernel takes"):
        abi.require_native_dcp()


@pytest.mark.parametrize("static", [False, True], ids=["live", "static"])
def test_a_version_that_nothing_knows_is_unknown(static: bool, site: Site) -> None:
    site.flashinfer(None)
    abi = probe(static=static)
    assert abi.release is None
    assert "unknown" in abi.version
    assert abi.features.native_dcp is True


@pytest.mark.parametrize(
    ("version", "like", "expected"),
    [
        pytest.param("0.0.0+unknown", "0.7.1", True, id="unknown, return_lse_base proves 0.7.1"),
        pytest.param("0.0.0+unknown", "0.7.0", False, id="unknown, 0.7.0 looks like 0.6.18"),
        pytest.param("0.0.0+unknown", "0.6.17", False, id="unknown, like 0.6.17"),
        pytest.param("0.7.0rc1", "0.7.0", False, id="0.7.0rc1 does not show it"),
        pytest.param("0.7.1.dev20260925", "0.7.0", True, id="a dev build above 0.7.0"),
        pytest.param("0.7.0", "0.7.0", True, id="0.7.0"),
        pytest.param("0.6.18.post1", "0.6.18.post1", False, id="0.6.18.post1"),
        pytest.param("0.6.18", "0.7.4", False, id="0.6.18 with a ported keyword"),
    ],
)
def test_compact_queries_with_dcp_need_proof(
    version: str, like: str, expected: bool, site: Site
) -> None:
    site.flashinfer(version, like=like, distribution=None)
    for abi in (probe(), probe(static=True)):
        assert abi.features.native_dcp is True
        assert abi.features.varlen_dcp is expected


def test_a_reordered_signature_with_more_options_is_still_read(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.flashinfer("0.7.4")
    drifted = FlashInferABI(
        version="0.8.0",
        parameters=tuple(
            Parameter(p.name, p.default, "KEYWORD_ONLY")
            for p in (*reversed(recorded("0.7.4").parameters), Parameter("kv_layout", "'HND'"))
        ),
    )

    def kernel(**call: Any) -> None: ...

    kernel.__signature__ = signature(drifted)  # type: ignore[attr-defined]  # inspect reads it
    patch(kernel, monkeypatch)
    assert probe().parameters == drifted.parameters
    assert check(probe(), **CONFIGURATION, dcp_world_size=8) == ()
