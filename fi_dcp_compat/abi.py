"""What one FlashInfer's MLA decode function is: its version, parameters and features."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from packaging.version import InvalidVersion, Version

from .errors import (
    FlashInferSignatureError,
    FlashInferVersionError,
    Reason,
    raise_first,
)
from .features import FEATURES, FIRST_RELEASE, ROWS, Feature, Features

__all__ = [
    "DISTRIBUTION",
    "FUNCTION",
    "FlashInferABI",
    "Parameter",
    "carries",
    "missing_dcp",
    "missing_feature",
]

DISTRIBUTION = "flashinfer-python"
FUNCTION = "trtllm_batch_decode_with_kv_cache_mla"
ASSUME_VERSION = "FI_DCP_COMPAT_ASSUME_VERSION"
# What decode_mla always passes; FlashInfer has had these since 0.6.0.
CORE_KEYWORDS = (
    "query",
    "kv_cache",
    "workspace_buffer",
    "qk_nope_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "block_tables",
    "seq_lens",
    "max_seq_len",
    "bmm1_scale",
    "bmm2_scale",
    "backend",
)


class Parameter(NamedTuple):
    """One parameter of the function.

    Attributes
    ----------
    name : str
    default : str or None
        The default as source text; None if it is required.
    kind : str
        As `inspect` names it, for example ``POSITIONAL_OR_KEYWORD``.
    """

    name: str
    default: str | None
    kind: str = "POSITIONAL_OR_KEYWORD"

    @property
    def by_keyword(self) -> bool:
        """Whether a call can give it by keyword."""
        return self.kind in ("POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY")

    @property
    def required(self) -> bool:
        """Whether a call must give it."""
        return self.default is None and not self.kind.startswith("VAR_")


class _Facts(NamedTuple):
    version: str
    parameters: tuple[Parameter, ...]
    entry_point: str = ""
    source: Literal["live", "static", "recorded"] = "recorded"
    companions: tuple[tuple[str, str], ...] = ()
    unreadable: str = ""
    note: str = ""


class FlashInferABI(_Facts):
    """One FlashInfer's MLA decode function, as a probe or a record describes it.

    Attributes
    ----------
    version : str
        As reported, or as ``FI_DCP_COMPAT_ASSUME_VERSION`` says; ``"unknown"`` if none is.
    parameters : tuple of Parameter
        In order; empty if the signature cannot be read.
    entry_point : str
        ``module:function`` where it is defined.
    source : {"live", "static", "recorded"}
        Imported and inspected, read from the installed file, or recorded from a wheel.
    companions : tuple of (str, str)
        Installed companion wheels (flashinfer-cubin, flashinfer-jit-cache) and their versions.
    unreadable : str
        Why the signature cannot be read; empty if it can.
    note : str
        Which recorded release a newer one is judged by, and what it adds; empty if it is recorded.
    """

    @cached_property
    def features(self) -> Features:
        """What it can do; worked out from the rest."""
        return Features(**{row.name: _present(self, row) for row in FEATURES})

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"FlashInferABI is read-only; _replace({name}=...) makes another")

    def __repr__(self) -> str:
        # The parameters would fill a screen.
        shown = {n: v for n, v in self._asdict().items() if n != "parameters" and v}
        return f"FlashInferABI({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def release(self) -> Version | None:
        """The version, parsed; None if it is unknown or cannot be read."""
        return parse_version(self.version)

    @property
    def is_final(self) -> bool:
        """Whether the version is known and neither a pre-release nor a dev build."""
        return self.release is not None and not self.release.is_prerelease

    @property
    def newly_required(self) -> tuple[str, ...]:
        """The parameters without a default that no release up to the newest recorded one has."""
        required = (p.name for p in self.parameters if p.required)
        return tuple(name for name in required if name not in CORE_KEYWORDS)

    def lacks(self, *keywords: str) -> tuple[str, ...]:
        """Return those of `keywords` that the function does not take as keywords."""
        names = {parameter.name for parameter in self.parameters if parameter.by_keyword}
        return tuple(keyword for keyword in keywords if keyword not in names)

    def describe(self) -> str:
        """Name it as messages do."""
        if self.release is None:
            return f"{DISTRIBUTION} of unknown version ({self.version})"
        if not self.is_final:
            return f"{DISTRIBUTION} {self.version} (a pre-release, judged by its signature)"
        return f"{DISTRIBUTION} {self.version}"

    def require_native_dcp(self) -> None:
        """Return if it can do native DCP.

        Raises
        ------
        FlashInferVersionError
            The release is older than 0.6.17, or unknown and without the keywords.
        FlashInferSignatureError
            The release is new enough but a keyword is missing, or another parameter is required.
        """
        reason = missing_dcp(self)
        lost = self.lacks(*CORE_KEYWORDS, "return_lse")
        if reason is None and lost:
            reason = signature_reason(self, lost, "has lost")
        elif reason is None and self.newly_required:
            reason = signature_reason(self, self.newly_required, "newly requires")
        raise_first(() if reason is None else (reason,))


def takes_anything(parameters: tuple[Parameter, ...]) -> bool:
    """Return whether a signature is `*args` and `**kwargs` alone, which says nothing."""
    return all(parameter.kind.startswith("VAR_") for parameter in parameters)


@lru_cache(maxsize=64)
def parse_version(version: str) -> Version | None:
    """Return the version, or None if it says nothing of the release."""
    try:
        parsed = Version(version)
    except InvalidVersion:
        return None
    # A source build without its generated metadata reports 0.0.0+unknown.
    return parsed if any(parsed.release) else None


def carries(release: Version, row: Feature) -> bool:
    """Return whether a release has what `row` is about, by its number alone."""
    release = Version(release.public)
    return release >= Version(row.since) or any(
        Version(first) <= release <= Version(last) for first, last in row.earlier
    )


def _present(abi: FlashInferABI, row: Feature) -> bool:
    if abi.unreadable or abi.lacks(*row.keywords):
        return False
    release, since = abi.release, Version(row.since)
    if release is not None and (abi.is_final or release >= since):
        # A backport may carry the keywords; only the release is known to do what they say.
        return carries(release, row)
    # No final version to go by: PEP 440 sorts 0.6.17rc1 below 0.6.17, which has the feature.
    return bool(row.keywords) or any(
        Version(FIRST_RELEASE[parameter.name]) >= since
        for parameter in abi.parameters
        if parameter.name in FIRST_RELEASE
    )


def upgrade_command(abi: FlashInferABI | None, since: str) -> str:
    """Return the pip command that brings release `since` or newer, companions named too."""
    command = f'pip install -U "{DISTRIBUTION}>={since}"'
    names = [name for name, _ in abi.companions] if abi is not None else []
    return f"{command} (and {', '.join(names)} of the same version)" if names else command


def missing_feature(
    abi: FlashInferABI, name: str, *, asked: str, instead: str = ""
) -> Reason | None:
    """Return why `abi` lacks the feature `name`, or None if it has it.

    Parameters
    ----------
    asked : str
        What was asked for, as the summary names it.
    instead : str
        What to do on this release; it follows the upgrade command.
    """
    row = ROWS[name]
    if getattr(abi.features, name):
        return None
    if abi.unreadable:
        return Reason(
            FlashInferVersionError,
            "kernel",
            f"{asked} cannot tell what this kernel takes.",
            f"a kernel whose signature cannot be read ({abi.unreadable}).",
            "FlashInfer's function, or a mock that carries its signature.",
            f'use fi_dcp_compat.testing.mock_kernel("{ROWS["native_dcp"].since}"), or say what '
            f'yours stands for: use_kernel(mock, recorded("{ROWS["native_dcp"].since}")).',
        )
    gone = abi.lacks(*row.keywords)
    fix = upgrade_command(abi, row.since)
    found = abi.describe()
    if gone:
        found += f", whose function lacks {', '.join(gone)}"
    elif abi.is_final and row.keywords:
        found += f", which carries {', '.join(row.keywords)} but is older"
        fix += f", or set {ASSUME_VERSION} to the release whose behaviour was ported"
    elif not abi.is_final:
        found += ", whose signature does not show it"
        fix += f", or set {ASSUME_VERSION} to the release it stands for"
    kind: type[FlashInferVersionError] | type[FlashInferSignatureError] = FlashInferVersionError
    thread = row.evidence.partition(";")[0]
    needed = f"{row.since} or newer" + (f" ({thread})" if thread.startswith("#") else "")
    if gone and abi.release is not None and abi.release >= Version(row.since):
        kind = FlashInferSignatureError
        needed = f"a function with {', '.join(row.keywords)}, as {row.since} and newer have"
        fix = (
            f'pip install --force-reinstall "{DISTRIBUTION}=={abi.version}" if it was patched, or '
            f"install another release from {row.since} on"
        )
    return Reason(
        error=kind,
        argument="dcp" if name.endswith("dcp") else row.keywords[0] if row.keywords else name,
        summary=f"{asked} needs FlashInfer's {row.what}.",
        found=found + ".",
        needed=needed + ".",
        fix=f"{fix}, or {instead}." if instead else f"{fix}.",
    )


def signature_reason(
    abi: FlashInferABI,
    names: tuple[str, ...],
    verb: str,
    *,
    like: str = "a recorded release",
    instead: str = "",
) -> Reason:
    """Build the reason for a function whose parameters are not those of its version."""
    fix = f"install a {DISTRIBUTION} that fi-dcp-compat records, or update fi-dcp-compat"
    return Reason(
        FlashInferSignatureError,
        names[0],
        f"{FUNCTION} {verb} {', '.join(names)}.",
        f"{abi.describe()}: ({', '.join(p.name for p in abi.parameters)}).",
        f"the parameters of {like}, and no further required ones.",
        f"{fix}, or {instead}." if instead else f"{fix}.",
    )


def missing_dcp(abi: FlashInferABI) -> Reason | None:
    """Return why a call with `dcp` cannot run on `abi`, or None if it can."""
    asked, instead = "decode_mla(dcp=...)", "call with dcp=None"
    return missing_feature(abi, "native_dcp", asked=asked, instead=instead)
