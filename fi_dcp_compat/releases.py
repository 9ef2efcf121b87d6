"""The recorded FlashInfer releases, and how an unrecorded one compares with the nearest."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from .abi import FlashInferABI, Parameter
from .errors import FlashInferVersionError

__all__ = ["Drift", "drift", "newest", "recorded", "recorded_versions"]

DATA = os.path.join(os.path.dirname(__file__), "releases.json")
_USUAL_KIND = Parameter("", None).kind


class _Record(NamedTuple):
    signature: int
    entry_point: str


class _Data(NamedTuple):
    signatures: list[tuple[Parameter, ...]]
    releases: dict[Version, _Record]


def recorded(version: str) -> FlashInferABI:
    """Return the ABI of a recorded FlashInfer release.

    Parameters
    ----------
    version : str
        For example ``"0.6.17"``; a local part (``+cu130``) is not looked at.

    Raises
    ------
    FlashInferVersionError
        No such release is recorded.
    """
    try:
        return _recorded(Version(Version(version).public))
    except (InvalidVersion, KeyError) as exc:
        known = recorded_versions()
        raise FlashInferVersionError(
            f"No FlashInfer release {version} is recorded.",
            found=f"{version!r}.",
            needed=f"one of {', '.join(known)}.",
            fix="pass one of those, or probe() for the installed package, or record it: "
            "fi-dcp-compat releases --record.",
            argument="version",
            value=version,
        ) from exc


def newest() -> FlashInferABI:
    """Return the ABI of the newest recorded release."""
    return recorded(recorded_versions()[-1])


def recorded_versions() -> tuple[str, ...]:
    """Return the recorded releases, oldest first."""
    return tuple(str(version) for version in _data().releases)


class Drift(NamedTuple):
    """What an unrecorded release's function has that the nearest recorded one's has not.

    Attributes
    ----------
    nearest : FlashInferABI
        The newest recorded release that is not newer.
    added, required : tuple of str
        New parameters, with a default and without.
    missing : tuple of str
        Parameters that are gone.
    """

    nearest: FlashInferABI
    added: tuple[str, ...]
    required: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def note(self) -> str:
        """Which release the behaviour is taken from, and what is left at its default."""
        note = f"not recorded; judged as {self.nearest.version}, the nearest recorded release"
        new = ", ".join(self.added)
        return f"{note}; its new {new} left at the default" if new else note


def drift(abi: FlashInferABI) -> Drift | None:
    """Compare an unrecorded release with the nearest recorded one.

    Returns
    -------
    Drift or None
        None where there is nothing to compare: the release is recorded, older than all that are,
        or judged by its signature alone (its version is unknown, or a pre-release of a recorded
        release).
    """
    release, known = abi.release, _data().releases
    if release is None or abi.unreadable or Version(release.public) in known:
        return None
    older = [version for version in known if version <= release]
    if not older or not (abi.is_final or older[-1] == next(reversed(known))):
        return None
    nearest = _recorded(older[-1])
    names = {parameter.name for parameter in nearest.parameters}
    new = [parameter for parameter in abi.parameters if parameter.name not in names]
    return Drift(
        nearest,
        added=tuple(parameter.name for parameter in new if not parameter.required),
        required=tuple(parameter.name for parameter in new if parameter.required),
        missing=abi.lacks(*(parameter.name for parameter in nearest.parameters)),
    )


@lru_cache(maxsize=1)
def _data() -> _Data:
    with open(DATA, encoding="utf-8") as file:
        data = json.load(file)
    return _Data(
        [
            tuple(Parameter(name, default, *kind) for name, default, *kind in signature)
            for signature in data["signatures"]
        ],
        {Version(version): _Record(*record) for version, record in data["releases"].items()},
    )


@lru_cache(maxsize=64)
def _recorded(version: Version) -> FlashInferABI:
    signatures, releases = _data()
    record = releases[version]
    return FlashInferABI(
        version=str(version),
        parameters=signatures[record.signature],
        entry_point=record.entry_point,
    )


def as_json(abis: Iterable[FlashInferABI]) -> str:
    """Write ABIs as releases.json: equal signatures once, releases in order."""
    signatures: list[tuple[Parameter, ...]] = []
    releases: dict[str, _Record] = {}
    for abi in sorted(abis, key=lambda abi: Version(abi.version)):
        if abi.parameters not in signatures:
            signatures.append(abi.parameters)
        releases[abi.version] = _Record(signatures.index(abi.parameters), abi.entry_point)
    rows = [
        [list(p) if p.kind != _USUAL_KIND else [p.name, p.default] for p in signature]
        for signature in signatures
    ]
    lines = ",\n    ".join(json.dumps(row) for row in rows)
    records = ",\n    ".join(f"{json.dumps(v)}: {json.dumps(r)}" for v, r in releases.items())
    return f'{{\n  "signatures": [\n    {lines}\n  ],\n  "releases": {{\n    {records}\n  }}\n}}\n'


def write(abis: Iterable[FlashInferABI]) -> None:
    """Replace what is recorded."""
    text = as_json(abis)
    with open(f"{DATA}.new", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(f"{DATA}.new", DATA)  # an interruption must not leave half of them
    _data.cache_clear()
    _recorded.cache_clear()
