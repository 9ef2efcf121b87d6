"""The three tables: every row is about recorded releases, and something here acts on it."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from fi_dcp_compat import Features, FlashInferCompatWarning, limits, recorded
from fi_dcp_compat.catalogue import markdown, text
from fi_dcp_compat.cli import main
from fi_dcp_compat.features import FEATURES, OLDEST_RELEASE
from fi_dcp_compat.features import ROWS as ROWS_BY_NAME
from fi_dcp_compat.known_issues import KNOWN_ISSUES, issues_of, warn_of
from fi_dcp_compat.limits import LIMITS
from fi_dcp_compat.releases import recorded_versions

VERSIONS = recorded_versions()
ROWS: list[Any] = [*FEATURES, *LIMITS, *KNOWN_ISSUES]
RELEASE = re.compile(r"(?<![\d.])\d+\.\d+\.\d+(?:\.post\d+)?(?![\d.])")


def names(row: Any) -> str:
    return f"{type(row).__name__}-{row.name if hasattr(row, 'name') else row.what}"


@pytest.mark.parametrize("row", ROWS, ids=names)
def test_a_row_names_a_function_that_acts_on_it(row: Any) -> None:
    module, _, name = row.used_by.partition(".")
    function = getattr(importlib.import_module(f"fi_dcp_compat.{module}"), name)
    assert callable(function)
    assert not name.startswith("_")


@pytest.mark.parametrize("row", FEATURES, ids=names)
def test_the_module_that_acts_on_a_feature_reads_it(row: Any) -> None:
    module = importlib.import_module(f"fi_dcp_compat.{row.used_by.partition('.')[0]}")
    source = inspect.getsource(module)
    by_name = re.search(rf"features\.{row.name}\b|['\"]{row.name}['\"]", source)
    # The drop-in's guards look a keyword's row up, whichever it is.
    assert by_name or (row.keywords and "_ROW_OF" in source)


@pytest.mark.parametrize("row", ROWS, ids=names)
def test_a_row_names_recorded_releases_only(row: Any) -> None:
    named = set(RELEASE.findall(row.evidence))
    for field in ("since", "first", "last"):
        named |= {getattr(row, field, "")} - {""}
    named |= {release for span in getattr(row, "earlier", ()) for release in span}
    assert named <= set(VERSIONS)


@pytest.mark.parametrize("row", ROWS, ids=names)
def test_a_row_says_how_one_knows(row: Any) -> None:
    assert RELEASE.search(row.evidence) or re.search(r"#\d+", row.evidence)


@pytest.mark.parametrize("row", KNOWN_ISSUES, ids=names)
def test_an_issue_is_of_the_releases_in_its_range(row: Any) -> None:
    having = [version for version in VERSIONS if row in issues_of(recorded(version))]
    first, last = VERSIONS.index(row.first), VERSIONS.index(row.last or VERSIONS[-1])
    assert having == list(VERSIONS[first : last + 1])
    assert Version(row.first) >= Version(OLDEST_RELEASE)


def test_a_release_of_unknown_version_has_no_known_issues() -> None:
    assert issues_of(recorded("0.6.15")._replace(version="0.0.0+unknown")) == ()


# What is only warned of.


@pytest.mark.parametrize("backend", ["auto", "trtllm-gen", "cute-dsl"])
@pytest.mark.parametrize("version", VERSIONS[VERSIONS.index("0.6.12") :])
def test_the_warnings_are_those_of_the_release_and_backend(version: str, backend: str) -> None:
    expected = []
    if version in ("0.6.12", "0.6.14") and backend == "cute-dsl":
        expected.append("#3582")
    if version in ("0.6.13", "0.6.14", "0.6.15"):
        expected.append("#3970")
    if not expected:
        warn_of(recorded(version), backend, compact=False)
        return
    with pytest.warns(FlashInferCompatWarning) as caught:
        warn_of(recorded(version), backend, compact=False)
    threads = [re.findall(r"#\d+", str(warning.message))[0] for warning in caught]
    assert sorted(threads) == sorted(expected)


def test_a_warning_says_all_of_this() -> None:
    with pytest.warns(FlashInferCompatWarning) as caught:
        warn_of(recorded("0.6.15"), "trtllm-gen", compact=False)
    assert [str(warning.message) for warning in caught] == [
        "flashinfer-python 0.6.15: each uniform call adds an entry to the tuner's cache, which on "
        "0.6.15 stalls calls for milliseconds (#3970).\nFix: upgrade to 0.6.15.post1 or newer."
    ]
    # It points at the code that calls, not at this package.
    assert [warning.filename for warning in caught] == [__file__]


def test_compact_queries_do_not_meet_the_tuner() -> None:
    warn_of(recorded("0.6.15"), "trtllm-gen", compact=True)


@pytest.mark.parametrize("version", ["0.6.15+cu130", "0.6.12+local", "0.6.14+x"])
def test_a_local_version_has_the_issues_and_features_of_its_release(version: str) -> None:
    release = recorded(version)
    local = release._replace(version=version)
    assert issues_of(local) == issues_of(release) != ()
    assert local.features == release.features


def test_a_release_in_between_has_the_issues_of_the_nearest() -> None:
    abi = recorded("0.6.12")._replace(version="0.6.12.post1")
    assert issues_of(abi) == issues_of(recorded("0.6.12"))


# What a feature ends is over in the release before it.
ENDED_BY = {
    "no_causal_mask": "cute_dsl_causal",
    "companions_raise": "companions_may_differ",
    "tensor_scale_unread": "trtllm_tensor_scales",
    "counters_overrun": "counters_apart",
    "sliced_heads_folded": "cute_dsl_sliced_heads",
    "open_lse_base": "return_lse_base",
    "compact_split_lost": "trtllm_compact_splits",
    "import_reads_gpu": "imports_without_cuda",
    "compact_dcp": "varlen_dcp",
}


@pytest.mark.parametrize("name", ENDED_BY)
def test_an_issue_ends_where_the_feature_begins(name: str) -> None:
    (issue,) = (row for row in KNOWN_ISSUES if row.name == name)
    after = VERSIONS[VERSIONS.index(issue.last) + 1]
    assert after == ROWS_BY_NAME[ENDED_BY[name]].since


def test_every_limit_is_read_where_it_is_acted_on() -> None:
    sources = {
        name: inspect.getsource(importlib.import_module(f"fi_dcp_compat.{name}"))
        for name in {row.used_by.partition(".")[0] for row in LIMITS} | {"features", "plans"}
    }
    constants = [name for name in vars(limits) if name.isupper() and name != "LIMITS"]
    unread = [n for n in constants if not any(re.search(rf"\b{n}\b", s) for s in sources.values())]
    assert unread == []


# The command.


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["releases", *arguments]) == 0
    return capsys.readouterr().out


def test_the_text_has_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys)
    assert out == text() + "\n"
    assert out.startswith("39 releases recorded, 0.6.0 to 0.7.4.\n")
    for row in ROWS:
        assert row.what in out
        assert row.evidence in out
        assert row.used_by in out
    assert "releases: 0.6.0 to 0.6.7.post3; 0.6.12 to 0.6.13; 0.7.1 on\n" in out
    assert max(map(len, out.splitlines())) <= 160


def test_the_readme_shows_the_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--markdown")
    assert out == markdown() + "\n"
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    assert out in readme
    rows = [line for line in out.splitlines() if line.startswith("|")]
    assert len(rows) == len(ROWS) + 6
    assert {line.count("|") for line in rows} == {6, 5}


def test_the_json_has_the_tables_and_every_release(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(run(capsys, "--json"))
    assert [row["name"] for row in document["features"]] == list(Features._fields)
    assert len(document["limits"]) == len(LIMITS)
    assert [row["name"] for row in document["known_issues"]] == [row.name for row in KNOWN_ISSUES]
    assert list(document["releases"]) == list(VERSIONS)
    newest = document["releases"]["0.7.4"]
    assert newest["features"] == recorded("0.7.4").features._asdict()
    assert newest["parameters"][-1] == {
        "name": "return_lse_base",
        "default": "None",
        "kind": "POSITIONAL_OR_KEYWORD",
    }
