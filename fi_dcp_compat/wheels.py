"""FlashInfer's wheels: fetched with pip, read as zip files, and held against the records."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

from packaging.version import Version

from .abi import DISTRIBUTION, FlashInferABI, Parameter
from .errors import FlashInferNotFoundError, FlashInferVersionError
from .guards import check
from .installed import DEFINED_IN, read_parameters
from .releases import DATA, as_json, recorded, recorded_versions, write

__all__ = ["available", "changes", "fetch", "read_wheel", "record", "verify"]


def available() -> tuple[str, ...]:
    """Return the final releases on pip's index from the first recorded one on, oldest first."""
    text = _pip("index", "versions", DISTRIBUTION)
    listed = re.search(r"^Available versions: (.+)$", text, re.MULTILINE)
    if listed is None:
        raise _no_pip("index", f"no list of versions in {text!r}.")
    oldest = Version(recorded_versions()[0])
    versions = sorted(Version(version) for version in listed[1].split(", "))
    return tuple(str(v) for v in versions if v >= oldest and v.local is None)


def fetch(version: str, folder: Path) -> Path:
    """Return the wheel of a release in `folder`; pip downloads it there if it is missing.

    Raises
    ------
    FlashInferNotFoundError
        pip cannot find or download it.
    """
    name = DISTRIBUTION.replace("-", "_")
    for wheel in folder.glob(f"{name}-{version}-*.whl"):
        return wheel
    folder.mkdir(parents=True, exist_ok=True)
    # Moved when whole: an interrupted download must not pass for a wheel.
    with tempfile.TemporaryDirectory(dir=folder) as partial:
        wanted = f"{DISTRIBUTION}=={version}"
        _pip("download", "--no-deps", "--only-binary=:all:", f"--dest={partial}", wanted)
        (downloaded,) = Path(partial).glob("*.whl")
        wheel = folder / downloaded.name
        os.replace(downloaded, wheel)
    return wheel


@contextmanager
def _kept_in(folder: Path | None) -> Generator[Path]:
    """Give the folder for wheels: the caller's, or one that is deleted again."""
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="fi-dcp-compat-") as temporary:
        yield Path(temporary)


def _pip(*arguments: str) -> str:
    quiet = ("--no-input", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", *quiet, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        errors = [line for line in lines if line.startswith("ERROR")]
        raise _no_pip(arguments[0], f"{(errors or lines)[-1]} ({' '.join(command)}).")
    return done.stdout


def _no_pip(verb: str, found: str) -> FlashInferNotFoundError:
    return FlashInferNotFoundError(
        f"pip {verb} failed.",
        found=found,
        needed=f"pip for {sys.executable}, and an index with {DISTRIBUTION}.",
        fix="python -m ensurepip if pip is missing; or put the wheels into a folder, and pass it "
        "as --wheels with the versions.",
        argument="pip",
    )


def read_wheel(wheel: Path) -> FlashInferABI:
    """Read one release's ABI from its wheel, as a zip file; nothing is imported."""
    version = wheel.name.split("-")[1]
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = set(archive.namelist())
            texts = {
                name: archive.read(f"flashinfer/{name}").decode(errors="replace")
                for name in DEFINED_IN
                if f"flashinfer/{name}" in names
            }
        parameters, entry_point = read_parameters(texts)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError) as exc:
        # A RuntimeError is an encrypted archive, or a file that is no Python.
        found = getattr(exc, "found", f"{exc}.")
        raise _no_record("cannot be read", wheel, found, "delete it, and run again.") from exc
    if not parameters:
        raise _no_record(
            "does not define the MLA decode function",
            wheel,
            f"{DISTRIBUTION} {version} without it in {' and '.join(DEFINED_IN)}.",
            "name the module that has it in fi_dcp_compat.installed.DEFINED_IN, or report it.",
        )
    return FlashInferABI(version=version, parameters=parameters, entry_point=entry_point)


def _no_record(problem: str, wheel: Path, found: str, fix: str) -> FlashInferVersionError:
    return FlashInferVersionError(
        f"{wheel.name} {problem}.",
        found=found,
        needed=f"a wheel of {recorded_versions()[0]} or newer.",
        fix=fix,
        argument="wheel",
        value=wheel.name,
    )


def changes(before: FlashInferABI, after: FlashInferABI) -> list[str]:
    """Say, a line each, how the second function differs from the first."""
    old = {parameter.name: parameter for parameter in before.parameters}
    new = {parameter.name: parameter for parameter in after.parameters}
    lines = [f"lost {name}" for name in old if name not in new]
    lines += [
        f"new {'required ' if parameter.required else ''}{_written(parameter)}"
        for name, parameter in new.items()
        if name not in old
    ]
    lines += [
        f"{_written(old[name])} became {_written(parameter)}"
        for name, parameter in new.items()
        if name in old and old[name] != parameter
    ]
    shared = [name for name in old if name in new]
    if shared != [name for name in new if name in old]:
        lines.append("another order")
    if before.entry_point != after.entry_point:
        lines.append(f"moved from {before.entry_point} to {after.entry_point}")
    return lines


def _written(parameter: Parameter) -> str:
    text = parameter.name if parameter.default is None else f"{parameter.name}={parameter.default}"
    usual = Parameter("", None).kind
    return text if parameter.kind == usual else f"{text} ({parameter.kind.lower()})"


class _Config(TypedDict, total=False):
    dcp_world_size: int
    varlen: bool
    return_lse: bool


_CALLS: dict[str, _Config] = {
    "without DCP": {},
    "with an LSE": {"return_lse": True},
    "with DCP": {"dcp_world_size": 8},
    "with DCP and cum_seq_lens_q": {"dcp_world_size": 8, "varlen": True},
}


def verify(versions: Sequence[str], folder: Path | None) -> Iterator[tuple[str, list[str]]]:
    """Yield each of `versions` (none: all) with the ways in which its wheel is not the record.

    Without `versions` all that the index lists must be recorded, all that is recorded must be
    there to be had, and releases.json must be what `record` writes.
    """
    known = recorded_versions()
    listed = tuple(versions) or tuple(sorted({*available(), *known}, key=Version))
    abis: list[FlashInferABI] = []
    with _kept_in(folder) as kept:
        for version in listed:
            if version not in known:
                yield version, [f"not recorded; fi-dcp-compat releases --record {version}"]
                continue
            try:  # a yanked release is not listed any more, but can be had by its number
                abis.append(read_wheel(fetch(version, kept)))
            except FlashInferNotFoundError as exc:
                yield version, [f"recorded, but not to be had: {exc.found}"]
                continue
            yield version, changes(recorded(version), abis[-1])
    if not versions and as_json(abis) != Path(DATA).read_text(encoding="utf-8"):
        yield "releases.json", ["not as --record writes it from these wheels"]


def record(versions: Sequence[str], folder: Path | None) -> Iterator[str]:
    """Record `versions` (none: what the index has and the records lack) from their wheels.

    Yields, a line each, what changed against the release before and what `decode_mla` does now.
    """
    known = recorded_versions()
    wanted = tuple(versions) or tuple(v for v in available() if v not in known)
    if not wanted:
        yield f"Nothing to record: {known[-1]} is the newest release on the index."
        return
    for version in wanted:
        if Version(version).is_prerelease:
            raise FlashInferVersionError(
                f"{version} is no final release.",
                found=f"{version!r}.",
                needed="a final or post release: nightlies and candidates change.",
                fix="record the release itself; decode_mla judges others by their signature.",
                argument="version",
                value=version,
            )
    with _kept_in(folder) as kept:
        new = {version: read_wheel(fetch(version, kept)) for version in wanted}
    abis = {version: recorded(version) for version in known} | new
    write(abis.values())
    for version in sorted(new, key=Version):
        before = [abi for v, abi in abis.items() if Version(v) < Version(version)]
        last = max(before, key=lambda abi: Version(abi.version), default=None)
        yield f"{version}: recorded from its wheel"
        if last is not None:
            lines = changes(last, new[version]) or ["the same function"]
            yield from (f"  against {last.version}: {line}" for line in lines)
        for call, config in _CALLS.items():
            reasons = check(
                new[version], num_heads=128, q_len=1, page_size=64, dtype="bfloat16", **config
            )
            yield f"  decode_mla {call}: {reasons[0].summary if reasons else 'runs'}"
    yield "What no signature shows is taken from the release before until a row of features.py says"
    yield "otherwise. Next, in a checkout: pytest -m releases runs their own host code; the tests,"
    yield "README and CHANGELOG that name the newest release need its name."
