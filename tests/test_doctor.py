"""What the doctor says of a machine: this one, and ones that are only folders."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import pytest

from fi_dcp_compat import Parameter, cli, doctor, probe, recorded
from fi_dcp_compat.doctor import Diagnosis, Finding, diagnose, render
from fi_dcp_compat.machine import Gpu, visible_gpus
from fi_dcp_compat.testing import mock_kernel, use_kernel
from tests.fakes import Site, answer_of, fake_site, header

B200 = Gpu("NVIDIA B200", (10, 0))
B300 = Gpu("NVIDIA B300", (10, 3))
H200 = Gpu("NVIDIA H200", (9, 0))
RUBIN = Gpu("NVIDIA Rubin", (10, 7))
THOR = Gpu("NVIDIA Thor", (11, 0))
RTX = Gpu("NVIDIA RTX PRO 6000", (12, 0))
CUTLASS = "nvidia-cutlass-dsl"
INDEX = "FlashInfer's own package index"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A machine with one B200 and nothing installed."""
    monkeypatch.delenv("FLASHINFER_DISABLE_VERSION_CHECK", raising=False)
    monkeypatch.setattr(doctor, "visible_gpus", lambda: [B200])
    with fake_site(tmp_path / "site-packages") as site:
        yield site


def install(site: Site, version: str = "0.7.4", *, cpu_torch: bool = False, **package: Any) -> None:
    """Install what native DCP needs beside FlashInfer, and FlashInfer `version`."""
    site.flashinfer(version, **({"like": version} | package))
    site.distribution(CUTLASS, "4.8.1")
    if cpu_torch:
        site.torch("2.13.0+cpu", cuda=None)
    else:
        site.torch()


def with_gpus(monkeypatch: pytest.MonkeyPatch, *gpus: Gpu) -> None:
    monkeypatch.setattr(doctor, "visible_gpus", lambda: list(gpus))


def problems(diagnosis: Diagnosis) -> str:
    return "\n".join(finding.problem for finding in diagnosis.reasons)


def only_reason(diagnosis: Diagnosis) -> tuple[str, str]:
    assert len(diagnosis.reasons) == 1, diagnosis.reasons
    assert diagnosis.native_dcp is False
    return diagnosis.reasons[0]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = cli.main(["doctor", *arguments])
    output = capsys.readouterr()
    assert output.err == ""
    return status, output.out


# This machine.

HERE = """
import contextlib, io, json, sys
from fi_dcp_compat.cli import main
text, document = io.StringIO(), io.StringIO()
with contextlib.redirect_stdout(text):
    status = main(["doctor"])
with contextlib.redirect_stdout(document):
    same = main(["doctor", "--json"])
print(json.dumps([
    status, same, text.getvalue(), json.loads(document.getvalue()),
    sorted({"torch", "flashinfer"} & set(sys.modules)),
]))
"""


def _version(name: str) -> str | None:
    try:
        return installed_version(name)
    except PackageNotFoundError:
        return None


def test_it_answers_here_importing_neither_torch_nor_flashinfer() -> None:
    status, same, text, document, imported = answer_of(HERE)
    assert imported == []
    assert status == same == (0 if document["native_dcp"] else 1)
    assert document["installed"] == {name: _version(name) for name in doctor.PACKAGES}
    assert document["native_dcp"] is (document["reasons"] == [])
    assert ("Native DCP: can work\n" in text) is document["native_dcp"]
    if document["flashinfer"] is not None:
        assert document["flashinfer"]["source"] == "static"


# A machine where it works.


def test_all_in_place_it_can_work(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    install(site)
    diagnosis = diagnose()
    assert diagnosis.reasons == []
    assert diagnosis.notes == []
    assert diagnosis.native_dcp is True
    status, text = run(capsys)
    assert status == 0
    assert text == (
        "flashinfer-python     0.7.4\n"
        "flashinfer-cubin      not installed\n"
        "flashinfer-jit-cache  not installed\n"
        "nvidia-cutlass-dsl    4.8.1\n"
        "torch                 2.13.0+cu130\n"
        "GPU                   NVIDIA B200, compute capability 10.0\n"
        "function              native DCP yes, variable query lengths with DCP yes, LSE yes, "
        "choice of the LSE base yes (read from its files)\n"
        "\n"
        "Native DCP: can work\n"
    )


@pytest.mark.parametrize("version", ["0.6.17", "0.6.18.post1", "0.7.0", "0.7.1", "0.7.4"])
def test_every_release_with_native_dcp_can_work(version: str, site: Site) -> None:
    install(site, version)
    diagnosis = diagnose()
    assert diagnosis.reasons == []
    assert diagnosis.abi is not None
    assert diagnosis.abi.parameters == recorded(version).parameters


# Nothing installed.


def test_nothing_installed_is_a_diagnosis(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    diagnosis = diagnose()
    assert diagnosis.abi is None
    assert set(diagnosis.installed.values()) == {None}
    assert "FlashInfer is not installed" in problems(diagnosis)
    assert "torch is not installed" in problems(diagnosis)
    status, text = run(capsys)
    assert status == 1
    assert 'Fix: pip install "flashinfer-python>=0.6.17"' in text
    assert "Fix: pip install torch" in text
    status, text = run(capsys, "--json")
    assert status == 1
    assert json.loads(text)["flashinfer"] is None


def test_torch_alone_missing_is_a_reason(site: Site) -> None:
    site.flashinfer("0.7.4")
    site.distribution(CUTLASS, "4.8.1")
    problem, fix = only_reason(diagnose())
    assert problem == "torch is not installed."
    assert "pip install torch" in fix


# The release.


@pytest.mark.parametrize("version", ["0.6.11", "0.6.13", "0.6.15", "0.6.16.post4"])
def test_a_release_without_native_dcp_is_the_reason(version: str, site: Site) -> None:
    install(site, version)
    problem, fix = only_reason(diagnose())
    assert problem == (
        "Native DCP needs FlashInfer's native DCP keywords. Found: flashinfer-python "
        f"{version}, whose function lacks enable_dcp, cp_world, cp_rank, causal_seqlens_kv_global."
    )
    assert fix == 'pip install -U "flashinfer-python>=0.6.17".'


def test_the_upgrade_names_the_companions_too(site: Site) -> None:
    install(site, "0.6.15")
    site.distribution("flashinfer-cubin", "0.6.15")
    _, fix = only_reason(diagnose())
    assert fix == (
        'pip install -U "flashinfer-python>=0.6.17" (and flashinfer-cubin of the same version).'
    )


def test_a_function_that_is_gone_is_a_reason(site: Site) -> None:
    install(site)
    site.write("flashinfer/mla/_core.py", "")
    problem, fix = only_reason(diagnose())
    assert problem.startswith("FlashInfer has no trtllm_batch_decode_with_kv_cache_mla. Found: ")
    assert "--force-reinstall" in fix


def test_a_backport_works_once_it_is_told_what_it_stands_for(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, "0.6.16", like="0.6.17")
    problem, fix = only_reason(diagnose())
    assert "which carries enable_dcp" in problem
    assert "FI_DCP_COMPAT_ASSUME_VERSION" in fix
    monkeypatch.setenv("FI_DCP_COMPAT_ASSUME_VERSION", "0.6.17")
    probe.cache_clear()
    assert diagnose().reasons == []


def test_an_assumed_version_is_noted(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "0.7.1")
    assert diagnose().notes == []
    monkeypatch.setenv("FI_DCP_COMPAT_ASSUME_VERSION", "0.7.4")
    probe.cache_clear()
    (note,) = diagnose().notes
    assert "FI_DCP_COMPAT_ASSUME_VERSION=0.7.4" in note.problem
    assert "unset FI_DCP_COMPAT_ASSUME_VERSION" in note.fix


def test_a_release_that_is_not_recorded_is_noted(site: Site) -> None:
    parameters = (*recorded("0.7.4").parameters, Parameter("tile", "64"))
    install(site, "0.7.5", like="0.7.4", parameters=parameters)
    diagnosis = diagnose()
    assert diagnosis.native_dcp
    assert diagnosis.notes == [
        Finding(
            "flashinfer-python 0.7.5 is not recorded; judged as 0.7.4, the nearest recorded "
            "release; its new tile left at the default.",
            "update fi-dcp-compat once it records that release.",
        )
    ]


def test_a_release_that_newly_requires_a_parameter_is_a_reason(site: Site) -> None:
    parameters = (Parameter("layout", None), *recorded("0.7.4").parameters)
    install(site, "0.8.0", like="0.7.4", parameters=parameters)
    problem, fix = only_reason(diagnose())
    assert problem.startswith("trtllm_batch_decode_with_kv_cache_mla newly requires layout. Found:")
    assert "update fi-dcp-compat" in fix


def test_a_backports_companions_are_held_to_its_real_version(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    # FlashInfer compares with its own __version__; it knows nothing of the assumed one.
    install(site, "0.6.16", like="0.6.17")
    site.distribution("flashinfer-cubin", "0.6.16")
    site.distribution("flashinfer-jit-cache", "0.6.16+cu130")
    monkeypatch.setenv("FI_DCP_COMPAT_ASSUME_VERSION", "0.6.17")
    assert diagnose().reasons == []


def test_a_backports_import_is_judged_by_its_real_version(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The function may be 0.7.4's; the import is still 0.6.16's.
    install(site, "0.6.16", like="0.7.4", cpu_torch=True)
    monkeypatch.setenv("FI_DCP_COMPAT_ASSUME_VERSION", "0.7.4")
    assert "Torch not compiled with CUDA enabled" in problems(diagnose())


@pytest.mark.parametrize("value", ["latest", "0.0.0+unknown"])
def test_a_wrong_assumed_version_is_a_reason(
    value: str, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site)
    monkeypatch.setenv("FI_DCP_COMPAT_ASSUME_VERSION", value)
    problem, fix = only_reason(diagnose())
    assert f"FI_DCP_COMPAT_ASSUME_VERSION={value!r}" in problem
    assert "unset FI_DCP_COMPAT_ASSUME_VERSION" in fix


# torch.


@pytest.mark.parametrize(
    ("version", "fails"),
    [
        ("0.6.7", False),
        ("0.6.8", True),
        ("0.6.11.post3", True),
        ("0.6.12", False),
        ("0.6.13", False),
        ("0.6.14", True),
        ("0.6.17", True),
        ("0.7.0.post1", True),
        ("0.7.1", False),
        ("0.7.4", False),
    ],
)
@pytest.mark.parametrize("gpus", [[], [B200]], ids=["no GPU", "a GPU"])
def test_a_release_that_a_cpu_torch_cannot_import_is_a_reason(
    version: str, fails: bool, gpus: list[Gpu], site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The AssertionError is of the build of torch; a GPU does not help it.
    with_gpus(monkeypatch, *gpus)
    install(site, version, cpu_torch=True)
    found = [f for f in diagnose().reasons if f"import flashinfer {version} fails" in f.problem]
    assert len(found) == fails
    for problem, fix in found:
        assert "AssertionError: Torch not compiled with CUDA enabled" in problem
        assert "CUDA build of torch" in fix


def test_a_cuda_torch_imports_every_release(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch)
    install(site, "0.6.17")
    assert "fails with a CPU build" not in problems(diagnose())


def test_native_dcp_cannot_work_on_a_cpu_torch_whatever_the_release(site: Site) -> None:
    # 0.7.4 imports there, but no tensor of such a torch can be on the GPU.
    install(site, "0.7.4", cpu_torch=True)
    problem, fix = only_reason(diagnose())
    assert "CPU build" in problem
    assert "CUDA build of torch" in fix


# nvidia-cutlass-dsl.


def test_a_missing_cutlass_dsl_is_a_reason(site: Site) -> None:
    site.flashinfer("0.7.4", requires=["torch", f"{CUTLASS}>=4.8.0"])
    site.torch()
    problem, fix = only_reason(diagnose())
    assert problem == f"{CUTLASS} is not installed; cute-dsl is compiled with it."
    assert fix == f'pip install "{CUTLASS}>=4.8.0".'


def test_a_missing_cutlass_dsl_is_a_reason_without_metadata(site: Site) -> None:
    site.flashinfer("0.7.4", distribution=None)
    site.torch()
    problem, fix = only_reason(diagnose())
    assert f"{CUTLASS} is not installed" in problem
    assert fix == f'pip install "{CUTLASS}".'


@pytest.mark.parametrize(
    ("requirement", "have", "fits"),
    [
        (f"{CUTLASS}>=4.8.0", "4.8.1", True),
        (f"{CUTLASS}>=4.8.0", "4.8.0", True),
        (f"{CUTLASS}>=4.8.0", "4.7.2", False),
        (f"{CUTLASS}>=4.8.0", "4.10.0", True),
        (f"{CUTLASS}>=4.6.2a0", "4.6.2a0", True),
        (f"{CUTLASS}>=4.6.2a0", "4.9.0.dev0", True),
        (f"{CUTLASS}>=4.8.0", "4.8.0.dev0", False),
        (f'{CUTLASS}>=9; extra == "cu12"', "4.8.1", True),
        ("nvidia-cutlass-dsl-libs-base>=9", "4.8.1", True),
        (CUTLASS, "4.0.0", True),
    ],
)
def test_a_cutlass_dsl_is_held_to_what_the_release_requires(
    requirement: str, have: str, fits: bool, site: Site
) -> None:
    site.flashinfer("0.7.4", requires=["not a requirement ==", requirement])
    site.distribution(CUTLASS, have)
    site.torch()
    if fits:
        assert diagnose().reasons == []
        return
    problem, fix = only_reason(diagnose())
    assert problem == (
        f"{CUTLASS} {have} does not fit flashinfer-python 0.7.4, which needs "
        f"{requirement.removeprefix(CUTLASS)}."
    )
    assert fix == f'pip install -U "{requirement}".'


@pytest.mark.parametrize(
    ("line", "specifier"),
    [
        (f"{CUTLASS}[cu13] >=4.9", ">=4.9"),
        (f"{CUTLASS} (>=4.9.0)", ">=4.9.0"),
        (f"{CUTLASS}~=4.9", "~=4.9"),
        (f"{CUTLASS}==4.7.*", "==4.7.*"),
        (f'{CUTLASS}>=4.9; python_version >= "3"', ">=4.9"),
        (f'{CUTLASS} (<4.8,>=4.5) ; python_version >= "3"', "<4.8,>=4.5"),
        ("nvidia_cutlass_dsl>=4.9", ">=4.9"),
        ("Nvidia.Cutlass.DSL >= 4.9", ">=4.9"),
        (f'{CUTLASS}>=4.9; python_version < "3"', ""),
        (f'{CUTLASS}>=4.9; extra == "cu13"', ""),
        (f"{CUTLASS} >= banana", ""),
        (f"{CUTLASS}-libs-base>=9", ""),
    ],
)
def test_a_requirement_is_read_however_it_is_written(line: str, specifier: str, site: Site) -> None:
    site.flashinfer("0.7.4", requires=[line])
    site.distribution(CUTLASS, "4.8.1")
    site.torch()
    if specifier:
        problem, fix = only_reason(diagnose())
        assert problem.endswith(f"which needs {specifier}.")
        assert fix == f'pip install -U "{CUTLASS}{specifier}".'
    else:
        assert diagnose().reasons == []


# Companion wheels. The rules are those of flashinfer/jit/env.py, release by release.


@pytest.mark.parametrize(
    ("version", "companion", "have", "outcome"),
    [
        ("0.6.17", "flashinfer-cubin", "0.6.17", "fine"),
        ("0.6.17", "flashinfer-cubin", "0.6.13", "fatal"),
        ("0.6.17", "flashinfer-jit-cache", "0.6.17", "fine"),
        ("0.6.17", "flashinfer-jit-cache", "0.6.17+cu130", "fine"),
        ("0.6.17", "flashinfer-jit-cache", "0.6.16+cu130", "fatal"),
        # Up to 0.6.18 the jit-cache's version must only start with FlashInfer's.
        ("0.6.18", "flashinfer-jit-cache", "0.6.18.post1+cu130", "fine"),
        ("0.6.18.post1", "flashinfer-jit-cache", "0.6.18+cu130", "fatal"),
        ("0.7.0", "flashinfer-jit-cache", "0.7.0.post1+cu130", "fatal"),
        ("0.7.1", "flashinfer-cubin", "0.6.13", "fatal"),
        ("0.7.1", "flashinfer-jit-cache", "0.7.0+cu130", "fatal"),
        ("0.7.2", "flashinfer-cubin", "0.6.13", "note"),
        ("0.7.2", "flashinfer-cubin", "0.7.2", "fine"),
        ("0.7.2.post1", "flashinfer-jit-cache", "0.7.2+cu130", "note"),
        ("0.7.4", "flashinfer-jit-cache", "0.7.4+cu130", "fine"),
        ("0.7.4", "flashinfer-jit-cache", "0.7.2+cu130", "note"),
    ],
)
def test_a_companion_of_another_version_is_fatal_before_0_7_2(
    version: str,
    companion: str,
    have: str,
    outcome: str,
    site: Site,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(site, version)
    site.distribution(companion, have)
    diagnosis = diagnose()
    assert diagnosis.installed[companion] == have
    assert (len(diagnosis.reasons), len(diagnosis.notes)) == {
        "fine": (0, 0),
        "fatal": (1, 0),
        "note": (0, 1),
    }[outcome]
    for problem, fix in (*diagnosis.reasons, *diagnosis.notes):
        assert f"{companion} {have}" in problem
        assert f"flashinfer-python {version}" in problem
        assert f'pip install "{companion}=={version}"' in fix
        assert INDEX in fix
        assert f"pip uninstall {companion}" in fix
    status, text = run(capsys)
    assert status == (1 if outcome == "fatal" else 0)
    assert ("RuntimeError" in text) is (outcome == "fatal")
    assert ("Note 1: " in text) is (outcome == "note")


def test_the_check_that_is_switched_off_stands_in_nobodys_way(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, "0.6.17")
    site.distribution("flashinfer-cubin", "0.6.13")
    monkeypatch.setenv("FLASHINFER_DISABLE_VERSION_CHECK", "0")  # any value that is not empty
    diagnosis = diagnose()
    assert diagnosis.reasons == []
    (note,) = diagnosis.notes
    assert "flashinfer-cubin 0.6.13 is not of the version of flashinfer-python" in note.problem
    # With the check off FlashInfer uses the wheel as it is.
    assert "ignores" not in note.problem
    assert "FLASHINFER_DISABLE_VERSION_CHECK" in note.problem


def test_a_source_build_checks_no_companion(site: Site) -> None:
    install(site, "0.0.0+unknown", like="0.6.17", distribution=None)
    site.distribution("flashinfer-cubin", "0.6.13")
    assert diagnose().reasons == []


def test_both_companions_may_be_wrong(site: Site) -> None:
    install(site, "0.6.17")
    site.distribution("flashinfer-cubin", "0.6.13")
    site.distribution("flashinfer-jit-cache", "0.6.16+cu130")
    assert len(diagnose().reasons) == 2


# GPUs.


@pytest.mark.parametrize(
    ("version", "gpus", "works"),
    [
        ("0.7.4", [B200], True),
        ("0.7.4", [B300], True),
        ("0.7.4", [H200, B200], True),
        ("0.7.4", [H200], False),
        ("0.7.4", [THOR], False),
        ("0.7.4", [RTX], False),
        ("0.7.4", [], False),
        ("0.7.4", [RUBIN], True),
        ("0.6.18", [RUBIN], True),
        ("0.6.17", [RUBIN], False),
    ],
    ids=str,
)
def test_a_gpu_with_the_kernel_is_needed(
    version: str,
    gpus: list[Gpu],
    works: bool,
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(site, version)
    with_gpus(monkeypatch, *gpus)
    diagnosis = diagnose()
    assert diagnosis.gpus == gpus
    assert run(capsys)[0] == (0 if works else 1)
    if works:
        assert diagnosis.reasons == []
        return
    problem, fix = only_reason(diagnosis)
    assert "10.0 or 10.3" in fix
    for name, (major, minor) in gpus:
        assert f"{name} ({major}.{minor})" in problem
    if not gpus:
        assert problem.startswith("No NVIDIA GPU is visible")


class Driver:
    """libcuda.so.1, as far as it is asked."""

    def __init__(self, *gpus: Gpu, status: int = 0) -> None:
        self.gpus, self.status = gpus, status

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self.gpus)
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = ordinal + 40  # a handle, not the ordinal
        return 0

    def cuDeviceGetName(self, name: Any, length: int, device: Any) -> int:
        assert length == ctypes.sizeof(name)
        name.value = self.gpus[device.value - 40].name.encode()
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:
        value._obj.value = self.gpus[device.value - 40].compute_capability[attribute - 75]
        return 0


def with_driver(monkeypatch: pytest.MonkeyPatch, load: Callable[[str], Any]) -> None:
    monkeypatch.setattr(ctypes, "CDLL", load)


def test_the_driver_names_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    with_driver(monkeypatch, lambda name: Driver(H200, B300))
    assert visible_gpus() == [H200, B300]


def test_a_driver_that_fails_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with_driver(monkeypatch, lambda name: Driver(B200, status=100))
    assert visible_gpus() == []


def test_a_machine_without_driver_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    with_driver(monkeypatch, load)
    assert visible_gpus() == []


# It answers, whatever is in the way.


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("flashinfer/mla/_core.py", "def torn(\n"),
        ("flashinfer/__init__.py", "raise RuntimeError('imported')\n"),
        ("flashinfer/_build_meta.py", '__version__ = "garbage"\n'),
        ("flashinfer_python-0.7.4.dist-info/METADATA", "Requires-Dist: \n\x00"),
        ("nvidia_cutlass_dsl-4.8.1_local.dist-info/METADATA", ""),
        ("torch/version.py", "\n"),
    ],
)
def test_a_torn_installation_is_answered_for(name: str, text: str, site: Site) -> None:
    site.flashinfer(requires=[f"{CUTLASS}>=4.8.0"])
    site.torch()
    site.write(name, text)
    assert render(diagnose())


def test_files_that_are_not_text_are_answered_for(site: Site) -> None:
    install(site)
    for name in (
        "flashinfer/mla/_core.py",
        "flashinfer/_build_meta.py",
        "flashinfer_python-0.7.4.dist-info/METADATA",
        "torch/version.py",
    ):
        (site.folder / name).write_bytes(b"\xff\xfe\x00")
    assert render(diagnose())


def test_0_6_17_on_a_cpu_torch_without_gpu_is_answered_for(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_gpus(monkeypatch)
    broken = "raise AssertionError('Torch not compiled with CUDA enabled')"
    install(site, "0.6.17", last=broken, cpu_torch=True)
    for arguments in ((), ("--live",)):
        status, text = run(capsys, *arguments)
        assert status == 1
        assert "Torch not compiled with CUDA enabled" in text
        assert "No NVIDIA GPU is visible" in text


# Alive.


@pytest.mark.parametrize("live", [False, True])
def test_only_live_imports_flashinfer(
    live: bool, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    install(site, last="raise OSError('only when imported')")
    status, text = run(capsys, *(["--live"] if live else []))
    assert status == (1 if live else 0)
    assert ("OSError: only when imported" in text) is live


def test_live_adds_nothing_where_the_import_works(site: Site) -> None:
    install(site)
    static, live = diagnose(), diagnose(live=True)
    assert static.abi is not None
    assert live == static._replace(abi=static.abi._replace(source="live"))
    assert live.native_dcp is True


def test_live_judges_what_is_imported(site: Site) -> None:
    install(site)
    site.write("flashinfer/decode.py", header(recorded("0.6.16").parameters))
    assert diagnose().native_dcp is True
    problem, _ = only_reason(diagnose(live=True))
    assert "whose function lacks enable_dcp" in problem


@pytest.mark.parametrize("live", [False, True])
def test_the_text_says_what_the_function_can_do_and_how_one_knows(
    live: bool, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    install(site, "0.6.17")
    text = run(capsys, *(["--live"] if live else []))[1]
    assert (
        "native DCP yes, variable query lengths with DCP no, LSE yes, choice of the LSE base no "
        f"({'imported' if live else 'read from its files'})\n"
    ) in text


def test_a_kernel_that_a_test_installed_is_answered_for(site: Site) -> None:
    install(site)
    with use_kernel(mock_kernel("0.6.16"), recorded("0.6.16")):
        assert "native DCP no" in render(diagnose(live=True))


def test_live_without_flashinfer_says_it_once(site: Site) -> None:
    site.torch()
    assert problems(diagnose(live=True)).count("FlashInfer is not installed") == 1


# Forms.


def in_trouble(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, H200)
    install(site, "0.6.15")
    site.distribution("flashinfer-cubin", "0.6.13")


def test_the_text_has_a_fix_for_each_reason(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_trouble(site, monkeypatch)
    diagnosis = diagnose()
    assert len(diagnosis.reasons) == 3
    lines = run(capsys)[1].splitlines()
    assert "Native DCP: cannot work here" in lines
    for number, (problem, fix) in enumerate(diagnosis.reasons, 1):
        assert "\n" not in problem + fix
        assert lines[lines.index(f"Reason {number}: {problem}") + 1] == f"  Fix: {fix}"


def test_the_json_says_what_the_text_says(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_trouble(site, monkeypatch)
    diagnosis = diagnose()
    status, text = run(capsys, "--json")
    assert status == 1
    assert json.loads(text) == {
        "native_dcp": False,
        "installed": {
            "flashinfer-python": "0.6.15",
            "flashinfer-cubin": "0.6.13",
            "flashinfer-jit-cache": None,
            CUTLASS: "4.8.1",
            "torch": "2.13.0+cu130",
        },
        "flashinfer": {
            "version": "0.6.15",
            "entry_point": "flashinfer.mla._core:trtllm_batch_decode_with_kv_cache_mla",
            "source": "static",
            "parameters": [parameter.name for parameter in recorded("0.6.15").parameters],
            "features": recorded("0.6.15").features._asdict(),
        },
        "gpus": [{"name": "NVIDIA H200", "compute_capability": [9, 0]}],
        "reasons": [{"problem": p, "fix": f} for p, f in diagnosis.reasons],
        "notes": [{"problem": p, "fix": f} for p, f in diagnosis.notes],
    }
    (leak,) = diagnosis.notes
    assert "flashinfer-python 0.6.15: each uniform call adds an entry" in leak.problem
    assert leak.problem.endswith("for milliseconds (#3970).")
    assert leak.fix == "upgrade to 0.6.15.post1 or newer."


def test_the_json_has_the_notes(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    install(site, "0.7.4")
    site.distribution("flashinfer-cubin", "0.6.13")
    status, text = run(capsys, "--json")
    assert status == 0
    (note,) = json.loads(text)["notes"]
    assert note["problem"].endswith("FlashInfer ignores it.")
