"""The tables as text, Markdown and JSON: what each release can do, takes, and gets wrong."""

from __future__ import annotations

from typing import NamedTuple

from .features import FEATURES
from .known_issues import KNOWN_ISSUES
from .limits import LIMITS
from .releases import recorded, recorded_versions

__all__ = ["as_dict", "markdown", "text"]


class _Table(NamedTuple):
    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]


def _span(first: str, last: str) -> str:
    return first if first == last else f"{first} to {last}"


def _tables() -> list[_Table]:
    features: list[tuple[str, ...]] = [
        (
            row.what,
            "; ".join([*(_span(*span) for span in row.earlier), f"{row.since} on"]),
            ", ".join(row.keywords),
            row.evidence,
            row.used_by,
        )
        for row in FEATURES
    ]
    limits: list[tuple[str, ...]] = [
        (
            f"{row.backend}: {row.what}",
            ", ".join(str(value) for value in row.values),
            row.evidence,
            row.used_by,
        )
        for row in LIMITS
    ]
    issues: list[tuple[str, ...]] = [
        (
            row.what,
            _span(row.first, row.last) if row.last else f"{row.first} on",
            row.effect,
            row.evidence,
            row.used_by,
        )
        for row in KNOWN_ISSUES
    ]
    return [
        _Table(
            "What came when", ("feature", "releases", "shown by", "evidence", "acts in"), features
        ),
        _Table("What each backend takes", ("what", "values", "evidence", "acts in"), limits),
        _Table(
            "What is known to be wrong", ("what", "releases", "here", "evidence", "acts in"), issues
        ),
    ]


def text() -> str:
    """Write the tables for a terminal: a line for each row's subject, the rest below it."""
    versions = recorded_versions()
    lines = [f"{len(versions)} releases recorded, {versions[0]} to {versions[-1]}."]
    for table in _tables():
        lines += ["", f"{table.title}:"]
        for subject, *rest in table.rows:
            named = zip(table.head[1:], rest, strict=True)
            lines += [f"  {subject}", *(f"      {head}: {cell}" for head, cell in named if cell)]
    return "\n".join(lines)


def markdown() -> str:
    """Write the tables as the README shows them."""
    lines: list[str] = []
    for table in _tables():
        lines += [f"### {table.title}", ""]
        for row in (table.head, ("---",) * len(table.head), *table.rows):
            lines.append(f"| {' | '.join(row)} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def as_dict() -> dict[str, object]:
    """Return the tables and every recorded release, for JSON."""
    releases: dict[str, object] = {}
    for version in recorded_versions():
        abi = recorded(version)
        releases[version] = {
            "entry_point": abi.entry_point,
            "parameters": [parameter._asdict() for parameter in abi.parameters],
            "features": abi.features._asdict(),
        }
    return {
        "features": [row._asdict() for row in FEATURES],
        "limits": [row._asdict() for row in LIMITS],
        "known_issues": [row._asdict() for row in KNOWN_ISSUES],
        "releases": releases,
    }
