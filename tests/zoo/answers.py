"""Ask one installation all that needs no torch, in a process of its own: ``python -m`` this.

Nothing but the standard library is imported before the package under test.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import runpy
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from fi_dcp_compat import FlashInferABI

__all__ = ["Answers", "Doctor", "Found", "Told", "answers", "told"]


class Found(TypedDict):
    """An answer that is no error: what a probe found."""

    version: str
    native_dcp: bool
    readable: bool


class Told(TypedDict, total=False):
    """What a question gave: an error of this package, another's, or a value."""

    value: Found | str | None
    error: str
    text: str
    facts: list[str]
    cause: list[str] | None
    also: list[str]
    pickled: list[str]


class Finding(TypedDict):
    problem: str
    fix: str


class Diagnosis(TypedDict):
    """The part of ``doctor --json`` that is compared."""

    native_dcp: bool
    reasons: list[Finding]
    notes: list[Finding]


class Doctor(TypedDict):
    """Both exit statuses, the lines of the verdict, and the JSON."""

    status: int
    json_status: int
    lines: list[str]
    document: Diagnosis


class Answers(TypedDict):
    """All answers; `imported` has the forbidden packages that each step left in sys.modules."""

    imported: dict[str, list[str]]
    static: Told
    doctor: Doctor
    live: Told
    again: Told
    doctor_live: Doctor
    supports: dict[str, Told]
    decode_mla: Told


def _words(exc: BaseException) -> list[str]:
    try:
        return [type(exc).__name__, str(exc)]
    except Exception as unprintable:
        return [type(exc).__name__, f"unprintable: {unprintable}"]


def told(question: Callable[[], Found | str | None]) -> Told:
    """Ask, and write down the value or all there is of the error."""
    try:
        return {"value": question()}
    except Exception as exc:
        error, text = _words(exc)
        answer: Told = {
            "error": error,
            "text": text,
            "cause": None if exc.__cause__ is None else _words(exc.__cause__),
            "also": [base.__name__ for base in (ImportError, ValueError) if isinstance(exc, base)],
        }
        names = ("summary", "found", "needed", "fix")
        if all(hasattr(exc, name) for name in names):
            answer["facts"] = [str(getattr(exc, name)) for name in names]
            answer["pickled"] = _words(pickle.loads(pickle.dumps(exc)))
        return answer


def _found(probed: FlashInferABI) -> Found:
    return {
        "version": probed.version,
        "native_dcp": probed.features.native_dcp,
        "readable": not probed.unreadable,
    }


def _run(*arguments: str) -> tuple[int, str]:
    """Run ``python -m fi_dcp_compat`` and return its exit status and what it printed."""
    sys.argv = ["fi-dcp-compat", *arguments]
    output = io.StringIO()
    status: object = None
    with contextlib.redirect_stdout(output):
        try:
            runpy.run_module("fi_dcp_compat", run_name="__main__")
        except SystemExit as end:
            status = end.code
    assert isinstance(status, int), status
    return status, output.getvalue()


def _doctor(*arguments: str) -> Doctor:
    # JSON first: what an import prints must not get into it.
    json_status, text = _run("doctor", "--json", *arguments)
    told = json.loads(text)
    document: Diagnosis = {
        "native_dcp": told["native_dcp"],
        "reasons": told["reasons"],
        "notes": told["notes"],
    }
    status, text = _run("doctor", *arguments)
    lines = text.partition("\n\n")[2].splitlines()
    return {"status": status, "json_status": json_status, "lines": lines, "document": document}


def answers() -> Answers:
    """Ask what imports nothing first, then what imports FlashInfer."""
    before = set(sys.modules)
    imported: dict[str, list[str]] = {}

    def note(step: str) -> None:
        new = {name.partition(".")[0] for name in set(sys.modules) - before}
        imported[step] = sorted(new & {"torch", "flashinfer"})

    import fi_dcp_compat
    from fi_dcp_compat import probe, supports_combination

    note("import fi_dcp_compat")
    static = told(lambda: _found(probe(static=True)))
    note("probe(static=True)")

    # A machine with one B200, whatever this one has.
    from fi_dcp_compat import doctor
    from fi_dcp_compat.machine import Gpu

    vars(doctor)["visible_gpus"] = lambda: [Gpu("NVIDIA B200", (10, 0))]
    report = _doctor()
    note("doctor")
    report_live = _doctor("--live")
    live = told(lambda: _found(probe()))
    supports = {
        "plain": told(lambda: supports_combination(num_heads=16, dtype="bfloat16")),
        "dcp": told(lambda: supports_combination(num_heads=16, dtype="bfloat16", dcp_world_size=8)),
        "reference": told(
            lambda: supports_combination(
                num_heads=16, dtype="bfloat16", dcp_world_size=8, backend="reference"
            )
        ),
    }
    return {
        "imported": imported,
        "static": static,
        "doctor": report,
        "live": live,
        "again": told(lambda: _found(probe())),
        "doctor_live": report_live,
        "supports": supports,
        "decode_mla": told(lambda: fi_dcp_compat.decode_mla.__name__),
    }


if __name__ == "__main__":
    print(json.dumps(answers()))
