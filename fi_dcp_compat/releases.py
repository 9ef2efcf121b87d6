"""The recorded FlashInfer releases: what each one's function looks like, from its wheel."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from .abi import DISTRIBUTION, FlashInferABI, Parameter
from .errors import FlashInferVersionError
from .installed import DEFINED_IN, read_parameters

__all__ = ["newest", "recorded", "recorded_versions"]

_DATA = Path(__file__).with_name("releases.json")
_USUAL_KIND = Parameter("", None).kind


class _Record(NamedTuple):
    signature: int
    entry_point: str


def recorded(version: str) -> FlashInferABI:
    """Return the ABI of a recorded FlashInfer release.

    Parameters
    ----------
    version : str
        For example ``"0.6.17"``.

    Raises
    ------
    FlashInferVersionError
        No such release is recorded.
    """
    try:
        return _all()[Version(version)]
    except (InvalidVersion, KeyError) as exc:
        known = recorded_versions()
        raise FlashInferVersionError(
            f"No FlashInfer release {version} is recorded.",
            found=f"{version!r}.",
            needed=f"one of {', '.join(known)}.",
            fix="pass one of those, or probe() for the installed package.",
            argument="version",
            value=version,
        ) from exc


def newest() -> FlashInferABI:
    """Return the ABI of the newest recorded release."""
    return recorded(recorded_versions()[-1])


def recorded_versions() -> tuple[str, ...]:
    """Return the recorded releases, oldest first."""
    return tuple(str(version) for version in _all())


@lru_cache(maxsize=1)
def _all() -> dict[Version, FlashInferABI]:
    data = json.loads(_DATA.read_text(encoding="utf-8"))
    signatures = [
        tuple(Parameter(name, default, *kind) for name, default, *kind in signature)
        for signature in data["signatures"]
    ]
    return {
        Version(version): FlashInferABI(
            version=version,
            parameters=signatures[_Record(*record).signature],
            entry_point=_Record(*record).entry_point,
        )
        for version, record in data["releases"].items()
    }


def read_wheel(wheel: Path) -> FlashInferABI:
    """Read one release's ABI from its wheel, as a zip file; nothing is imported."""
    version = wheel.name.split("-")[1]
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        parameters, entry_point = read_parameters(
            {
                name: zipfile.Path(archive, f"flashinfer/{name}")
                for name in DEFINED_IN
                if f"flashinfer/{name}" in names
            }
        )
    if not parameters:
        raise FlashInferVersionError(
            f"{wheel.name} does not define the MLA decode function.",
            found=f"a wheel of {DISTRIBUTION} {version} without it.",
            needed="0.6.0 or newer.",
            fix="record another release.",
            argument="wheel",
            value=wheel.name,
        )
    return FlashInferABI(version=version, parameters=parameters, entry_point=entry_point)


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
