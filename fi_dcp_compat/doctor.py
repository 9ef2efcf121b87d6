"""What is installed here, whether native DCP can work, and what would mend it.

It imports neither torch nor flashinfer, so it answers where importing either fails.
"""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from typing import NamedTuple

from packaging.version import Version

from .abi import (
    ASSUME_VERSION,
    DISTRIBUTION,
    FlashInferABI,
    carries,
    missing_feature,
    parse_version,
)
from .describing import assumed_version
from .errors import FlashInferCompatError, Reason
from .features import ROWS
from .guards import check
from .installed import (
    COMPANIONS,
    fits_specifier,
    installed_distributions,
    required_specifier,
)
from .known_issues import issues_of
from .limits import BLACKWELL
from .machine import Gpu, torch_is_cpu_only, visible_gpus
from .probing import installed_version, probe

__all__ = ["Diagnosis", "Finding", "diagnose"]

CUTLASS_DSL = "nvidia-cutlass-dsl"
NO_VERSION_CHECK = "FLASHINFER_DISABLE_VERSION_CHECK"
PACKAGES = (DISTRIBUTION, *COMPANIONS, CUTLASS_DSL, "torch")


class Finding(NamedTuple):
    """One thing in the way (or, as a note, worth knowing), and what mends it."""

    problem: str
    fix: str


class Diagnosis(NamedTuple):
    """The whole answer.

    Attributes
    ----------
    installed : dict
        Version of each package of interest; None if it is not installed.
    gpus : list of Gpu
    reasons : list of Finding
        Why native DCP cannot work here; empty if it can.
    notes : list of Finding
        What does not stand in the way.
    """

    installed: dict[str, str | None]
    abi: FlashInferABI | None
    gpus: list[Gpu]
    reasons: list[Finding]
    notes: list[Finding]

    @property
    def native_dcp(self) -> bool:
        """Whether native DCP can work here."""
        return not self.reasons

    def as_dict(self) -> dict[str, object]:
        """Return it for JSON."""
        abi = self.abi
        return {
            "native_dcp": self.native_dcp,
            "installed": self.installed,
            "flashinfer": None
            if abi is None
            else {
                "version": abi.version,
                "entry_point": abi.entry_point,
                "source": abi.source,
                "parameters": [parameter.name for parameter in abi.parameters],
                "features": abi.features._asdict(),
            },
            "gpus": [
                {"name": gpu.name, "compute_capability": list(gpu.compute_capability)}
                for gpu in self.gpus
            ],
            "reasons": [finding._asdict() for finding in self.reasons],
            "notes": [finding._asdict() for finding in self.notes],
        }


def diagnose(*, live: bool = False) -> Diagnosis:
    """Look at this machine; with `live`, import FlashInfer too and judge what that gives."""
    versions = installed_distributions(PACKAGES)
    reasons: list[Finding] = []
    notes: list[Finding] = []
    gpus = visible_gpus()
    abi: FlashInferABI | None = None
    for static in (False, True) if live else (True,):
        try:
            # What an import prints is no part of the answer.
            with redirect_stdout(sys.stderr):
                abi = probe(static=static)
            break
        except FlashInferCompatError as exc:
            if _finding(exc) not in reasons:
                reasons.append(_finding(exc))
    if abi is not None:
        missing = missing_feature(abi, "native_dcp", asked="Native DCP")
        if missing is not None:
            reasons.append(_finding(missing))
        else:
            drifted = check(
                abi, dcp_world_size=2, num_heads=128, q_len=1, page_size=64, dtype="bfloat16"
            )
            reasons += map(_finding, drifted)
        notes += [
            Finding(f"{abi.describe()}: {issue.problem}", f"{issue.instead}.")
            for issue in issues_of(abi)
            if issue.effect == "warned"
        ]
        if abi.note:
            problem = f"{abi.describe()} is {abi.note}."
            notes.append(Finding(problem, "update fi-dcp-compat once it records that release."))
        reasons += _cutlass_problems(abi, versions.get(CUTLASS_DSL))
        companions, harmless = _companion_problems(versions)
        reasons += companions
        notes += harmless
        if assumed_version() is not None:
            problem = f"{ASSUME_VERSION}={abi.version}: what is installed is taken for it."
            notes.append(Finding(problem, f"unset {ASSUME_VERSION} for the real version."))
    reasons += _torch_problems(versions.get("torch"))
    reasons += _gpu_problems(gpus, abi)
    return Diagnosis({name: versions.get(name) for name in PACKAGES}, abi, gpus, reasons, notes)


def _finding(problem: FlashInferCompatError | Reason) -> Finding:
    return Finding(f"{problem.summary} Found: {problem.found}", problem.fix)


def _torch_problems(version: str | None) -> list[Finding]:
    if version is None:
        return [Finding("torch is not installed.", "pip install torch (a CUDA build).")]
    if not torch_is_cpu_only():
        return []
    flashinfer = installed_version()
    release = parse_version(flashinfer)
    if release is None or carries(release, ROWS["imports_without_cuda"]):
        problem = f"torch {version} is a CPU build: none of its tensors can be on a GPU."
        return [Finding(problem, "install a CUDA build of torch.")]
    return [
        Finding(
            f"import flashinfer {flashinfer} fails with a CPU build of torch "
            "(AssertionError: Torch not compiled with CUDA enabled).",
            "install a CUDA build of torch; to import without one, "
            f'pip install -U "{DISTRIBUTION}>={ROWS["imports_without_cuda"].since}".',
        )
    ]


def _cutlass_problems(abi: FlashInferABI, have: str | None) -> list[Finding]:
    needed = required_specifier(DISTRIBUTION, CUTLASS_DSL)
    if have is None:
        return [
            Finding(
                f"{CUTLASS_DSL} is not installed; cute-dsl is compiled with it.",
                f'pip install "{CUTLASS_DSL}{needed}".',
            )
        ]
    if not needed or fits_specifier(have, needed):
        return []
    return [
        Finding(
            f"{CUTLASS_DSL} {have} does not fit {DISTRIBUTION} {abi.version}, which needs "
            f"{needed}.",
            f'pip install -U "{CUTLASS_DSL}{needed}".',
        )
    ]


def _companion_problems(versions: dict[str, str]) -> tuple[list[Finding], list[Finding]]:
    # FlashInfer compares with its own version, whatever release it is said to stand for.
    own = installed_version()
    release = parse_version(own)
    fatal: list[Finding] = []
    harmless: list[Finding] = []
    for name in COMPANIONS:
        have = versions.get(name)
        if have is None or release is None or _fits(name, have, own, release):
            continue
        problem = f"{name} {have} is not of the version of {DISTRIBUTION} {own}"
        fix = (
            f'pip install "{name}=={own}" (from FlashInfer\'s own package index; not every '
            f"version is on PyPI), or pip uninstall {name}."
        )
        if os.environ.get(NO_VERSION_CHECK):
            harmless.append(Finding(f"{problem}; {NO_VERSION_CHECK} lets it pass.", fix))
        elif release >= Version(ROWS["companions_may_differ"].since):
            harmless.append(Finding(f"{problem}; FlashInfer ignores it.", fix))
        else:
            since = ROWS["companions_may_differ"].since
            problem += ": import flashinfer raises RuntimeError"
            fatal.append(Finding(f"{problem}; {since} and newer ignore it, with a warning.", fix))
    return fatal, harmless


def _fits(name: str, have: str, own: str, release: Version) -> bool:
    if name == "flashinfer-jit-cache":
        # jit/env.py compares prefixes until 0.7.0, then all but the local part.
        exact = release >= Version(ROWS["jit_cache_exact"].since)
        return have == own or have.startswith(f"{own}+" if exact else own)
    return have == own


def _gpu_problems(gpus: list[Gpu], abi: FlashInferABI | None) -> list[Finding]:
    if not gpus:
        return [
            Finding(
                "No NVIDIA GPU is visible (libcuda.so.1).",
                "run on a Blackwell GPU (compute capability 10.0 or 10.3); decode_mla("
                'backend="reference") runs without one.',
            )
        ]
    rubin = abi is not None and abi.features.cute_dsl_sm107
    able: set[tuple[int, int]] = {*BLACKWELL} | ({(10, 7)} if rubin else set())
    if any(gpu.compute_capability in able for gpu in gpus):
        return []
    names = ", ".join(
        f"{gpu.name} ({gpu.compute_capability[0]}.{gpu.compute_capability[1]})" for gpu in gpus
    )
    return [
        Finding(
            f"No GPU here has a native DCP kernel: {names}.",
            "run on compute capability 10.0 or 10.3 (10.7 with FlashInfer "
            f"{ROWS['cute_dsl_sm107'].since} or newer).",
        )
    ]


def render(diagnosis: Diagnosis) -> str:
    """Write the diagnosis for people."""
    width = max(map(len, diagnosis.installed))
    lines = [
        f"{name:<{width}}  {version or 'not installed'}"
        for name, version in diagnosis.installed.items()
    ]
    for gpu in diagnosis.gpus:
        major, minor = gpu.compute_capability
        lines.append(f"{'GPU':<{width}}  {gpu.name}, compute capability {major}.{minor}")
    if not diagnosis.gpus:
        lines.append(f"{'GPU':<{width}}  none")
    if diagnosis.abi is not None:
        has = diagnosis.abi.features
        can = {
            "native DCP": has.native_dcp,
            "variable query lengths with DCP": has.varlen_dcp,
            "LSE": has.return_lse,
            "choice of the LSE base": has.return_lse_base,
        }
        shown = ", ".join(f"{what} {'yes' if able else 'no'}" for what, able in can.items())
        sources = {"live": "imported", "static": "read from its files", "recorded": "recorded"}
        source = sources[diagnosis.abi.source]
        lines.append(f"{'function':<{width}}  {shown} ({source})")
    lines += ["", f"Native DCP: {'can work' if diagnosis.native_dcp else 'cannot work here'}"]
    for title, findings in (("Reason", diagnosis.reasons), ("Note", diagnosis.notes)):
        for number, finding in enumerate(findings, 1):
            lines += [f"{title} {number}: {finding.problem}", f"  Fix: {finding.fix}"]
    return "\n".join(lines)
