"""Each installation in processes of its own: what is there is said alike wherever it is asked."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path

import pytest

from fi_dcp_compat import errors as package_errors
from fi_dcp_compat.machine import torch_is_cpu_only
from tests.fakes import Site, run_python
from tests.zoo.absent import ABSENT
from tests.zoo.answers import Answers, Diagnosis, Doctor, Told
from tests.zoo.broken import BROKEN
from tests.zoo.calls import Fork, Request
from tests.zoo.drifted import DRIFTED
from tests.zoo.installation import Fault, Installation, Machine, Reason
from tests.zoo.surroundings import SURROUNDINGS
from tests.zoo.versions import VERSIONS

INSTALLATIONS = (*ABSENT, *BROKEN, *DRIFTED, *VERSIONS, *SURROUNDINGS)
# FlashInfer itself and what the machines have of their own.
NOT_LINKED = ("flashinfer", "nvidia_cutlass", "cutlass", "fi_dcp_compat")
NO_LSE = "decode_mla needs FlashInfer's LSE."
ASK = "import runpy\nrunpy.run_module('tests.zoo.answers', run_name='__main__')\n"


def linked(folder: Path, *, only: tuple[str, ...] = ()) -> Path:
    """Link what is installed here into `folder`, without FlashInfer."""
    folder.mkdir()
    for entry in sys.path:
        if not entry.endswith("-packages"):
            continue
        for path in Path(entry).iterdir():
            wanted = path.name in only or not (only or path.name.startswith(NOT_LINKED))
            if wanted and path.suffix != ".pth" and not (folder / path.name).exists():
                (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture(scope="module")
def packaging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the package needs where torch is not: packaging."""
    return linked(tmp_path_factory.mktemp("deps") / "packages", only=("packaging",))


@pytest.fixture(scope="module")
def fork(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fork]:
    with Fork(str(linked(tmp_path_factory.mktemp("torch") / "packages"))) as fork:
        yield fork


def ask(path: list[Path], prelude: str, *arguments: str, **environment: str) -> Answers:
    # Whoever runs the tests may have switched FlashInfer's check of its companions off.
    variables = {"FLASHINFER_DISABLE_VERSION_CHECK": ""} | environment
    arguments = ("-W", "error", *arguments)
    done = run_python(prelude + ASK, *arguments, path=path, environment=variables)
    assert done.returncode == 0, done.stderr
    answers: Answers = json.loads(done.stdout.splitlines()[-1])
    return answers


def found(version: str, *, native_dcp: bool = True, readable: bool = True) -> Told:
    return {"value": {"version": version, "native_dcp": native_dcp, "readable": readable}}


class Expected:
    """What is expected of one installation, in the words of its machine."""

    def __init__(self, installation: Installation, machine: Machine) -> None:
        self.installation, self.machine = installation, machine

    def here(self, text: str) -> str:
        text = text.replace("{front}", str(self.machine.front.folder))
        return text.replace("{site}", str(self.machine.site.folder)).replace(
            "{python}", sys.executable
        )

    def fault(self, fault: Fault, *also: Fault) -> Told:
        text = "\n".join([fault.text, *(f"Also: {other.summary}" for other in also)])
        kind: type[Exception] = getattr(package_errors, fault.error)
        bases = [base.__name__ for base in (ImportError, ValueError) if issubclass(kind, base)]
        return {
            "error": fault.error,
            "text": self.here(text),
            "facts": [self.here(fact) for fact in fault.facts],
            "cause": None if fault.cause is None else [self.here(part) for part in fault.cause],
            "also": bases,
            "pickled": [fault.error, self.here(text)],
        }

    def live(self) -> Told:
        given = self.installation
        if given.live is not None:
            return self.fault(given.live)
        return found(given.version, native_dcp=given.native_dcp, readable=given.readable)

    def static(self) -> Told:
        given = self.installation
        if given.static is not None:
            return self.fault(given.static)
        version = given.static_version or given.version
        if given.hidden:
            return found("0.7.4")
        return found(version, native_dcp=given.native_dcp, readable=given.readable)

    def call(self, fault: Fault | None, *, runs: bool = True) -> Told:
        given = self.installation
        early = given.live or (given.run if runs else None)
        if early is not None:
            return self.fault(early)
        return {"value": None} if fault is None else self.fault(fault, *given.also)

    def supports(self, fault: Fault | None) -> Told:
        given = self.installation
        if given.live is not None:
            return {"value": self.here(given.live.text)}
        if fault is None:
            return {"value": None}
        return {"value": self.here("\n".join(each.text for each in (fault, *given.also)))}

    def doctor(self, *, live: bool) -> Doctor:
        given = self.installation
        return doctor_says(
            [self.reason(each) for each in given.doctors_reasons(live=live)],
            [self.reason(each) for each in given.notes],
        )

    def reason(self, reason: Reason) -> Reason:
        return Reason(self.here(reason.problem), self.here(reason.fix))


def doctor_says(reasons: list[Reason], notes: list[Reason]) -> Doctor:
    status = 1 if reasons else 0
    lines = [f"Native DCP: {'cannot work here' if reasons else 'can work'}"]
    for title, findings in (("Reason", reasons), ("Note", notes)):
        for number, (problem, fix) in enumerate(findings, 1):
            lines += [f"{title} {number}: {problem}", f"  Fix: {fix}"]
    document: Diagnosis = {
        "native_dcp": not reasons,
        "reasons": [{"problem": problem, "fix": fix} for problem, fix in reasons],
        "notes": [{"problem": problem, "fix": fix} for problem, fix in notes],
    }
    return {"status": status, "json_status": status, "lines": lines, "document": document}


@pytest.mark.parametrize("installation", INSTALLATIONS, ids=lambda each: each.name)
def test_an_installation_is_told_alike_by_all_who_are_asked(
    installation: Installation, tmp_path: Path, packaging: Path, fork: Fork
) -> None:
    machine = Machine(*(Site(tmp_path / name) for name in ("front", "site", "checkout")))
    installation.build(machine)
    folders = [site.folder for site in machine]
    answers = ask([*folders, packaging], installation.prelude, "-S", **installation.environment)
    expected = Expected(installation, machine)
    assert answers["imported"] == {step: [] for step in answers["imported"]}
    assert answers["static"] == expected.static()
    assert answers["doctor"] == expected.doctor(live=False)
    assert answers["doctor_live"] == expected.doctor(live=True)
    assert answers["live"] == answers["again"] == expected.live()
    assert answers["supports"] == {
        "plain": expected.supports(installation.plain),
        "dcp": expected.supports(installation.dcp),
        "reference": {"value": None},
    }
    if installation.torch is not None:
        told = answers["decode_mla"]
        assert [told["error"], told["text"]] == list(installation.torch)
        return
    request: Request = {
        "path": [str(folder) for folder in folders],
        "sites": [],
        "prelude": installation.prelude,
        "environment": dict(installation.environment),
        "fake": True,
    }
    calls = fork.ask(request)
    plain, dcp = expected.call(installation.plain), expected.call(installation.dcp)
    assert (calls["plain"], calls["dcp"]) == (plain, dcp)
    assert calls["prepare"] == expected.call(installation.dcp, runs=False)
    assert calls["reference"] == {"value": None}
    # The drop-in speaks of FlashInfer's own keywords, and takes releases without an LSE.
    for dropin, call in ((calls["dropin"], plain), (calls["dropin_dcp"], dcp)):
        if installation.live or installation.run:
            assert dropin == call
        elif not installation.also and call.get("text", "").startswith(NO_LSE):
            assert dropin == {"value": None}
        else:
            assert dropin.get("error") == call.get("error")
            assert installation.also or found_by(dropin) == found_by(call)


def found_by(told: Told) -> str | None:
    return told["facts"][1] if "facts" in told else None


# The real one.


def _real_version() -> str | None:
    try:
        return installed_version("flashinfer-python")
    except PackageNotFoundError:
        return None


@pytest.mark.skipif(_real_version() != "0.7.4", reason="flashinfer-python 0.7.4 is not installed")
def test_the_real_0_7_4_is_told_alike_by_all_who_are_asked(fork: Fork) -> None:
    answers = ask([], "")
    assert answers["imported"] == {step: [] for step in answers["imported"]}
    assert answers["static"] == answers["live"] == answers["again"] == found("0.7.4")
    reasons = []
    if torch_is_cpu_only():
        version = installed_version("torch")
        problem = f"torch {version} is a CPU build: none of its tensors can be on a GPU."
        reasons = [Reason(problem, "install a CUDA build of torch.")]
    assert answers["doctor"] == answers["doctor_live"] == doctor_says(reasons, [])
    assert answers["supports"] == {call: {"value": None} for call in ("plain", "dcp", "reference")}
    packages = [entry for entry in sys.path if entry.endswith("-packages")]
    request: Request = {
        "path": [],
        "sites": packages,
        "prelude": "",
        "environment": {},
        "fake": False,
    }
    calls = fork.ask(request)
    assert calls["prepare"] == calls["reference"] == {"value": None}
    refused = calls["plain"]
    assert refused["text"] == (
        "query is on cpu, where FlashInfer has no kernel.\n"
        "Found: query: [2, 1, 16, 576] torch.bfloat16 on cpu.\n"
        "Needed: CUDA tensors.\n"
        "Fix: move the tensors to a GPU, or pass backend='reference'."
    )
    assert calls["dcp"] == calls["dropin"] == calls["dropin_dcp"] == refused


# The table.


def test_the_zoo_has_many_installations_of_every_outcome() -> None:
    names = [installation.name for installation in INSTALLATIONS]
    assert len(names) >= 18
    assert len(set(names)) == len(names)
    outcomes = {fault.error for each in INSTALLATIONS for fault in each[2:7] if fault is not None}
    assert outcomes == {
        "FlashInferNotFoundError",
        "FlashInferImportError",
        "FlashInferVersionError",
        "FlashInferSignatureError",
        "InvalidInputError",
    }


def test_every_message_of_the_zoo_has_one_fact_a_line() -> None:
    for installation in INSTALLATIONS:
        for fault in installation[2:7]:
            assert fault is None or len(fault.text.splitlines()) == 4, installation.name


def test_the_doctor_says_it_can_work_only_where_a_call_with_dcp_runs() -> None:
    for each in INSTALLATIONS:
        runs = each.live is None and each.dcp is None and each.run is None
        assert runs or each.doctors_reasons(live=True), each.name
        # What only an import shows, it cannot say without one.
        blind = each.live is not None or each.hidden
        assert runs or blind or each.doctors_reasons(live=False), each.name
