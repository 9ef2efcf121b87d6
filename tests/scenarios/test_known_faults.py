"""Releases with a known fault: S41."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
from packaging.version import Version

from fi_dcp_compat import (
    FlashInferCompatWarning,
    FlashInferVersionError,
    cli,
    decode_mla,
)
from fi_dcp_compat.releases import recorded_versions
from fi_dcp_compat.testing import mock_kernel, use_kernel
from tests.fakes import Site
from tests.support import RELEASES, call
from tests.test_guards import gpu

# Called as FlashInfer's own function would be: not a mock, whose faults would be nobody's.
BODY = """\
    import torch

    return torch.ones(*query.shape[:-1], kv_lora_rank, dtype=torch.bfloat16)
"""


def install(site: Site, version: str) -> None:
    site.flashinfer(version, like=version)
    source = site.folder / "flashinfer/mla/_core.py"
    text = source.read_text(encoding="utf-8")
    assert text.endswith("    return None\n")
    site.write("flashinfer/mla/_core.py", text.replace("    return None\n", BODY))


def warned(backend: str) -> list[str]:
    with gpu(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert decode_mla(**call(backend=backend)).shape == (2, 1, 16, 512)
    assert all(one.category is FlashInferCompatWarning for one in caught)
    # It points at the code that calls, not into this package.
    assert {one.filename for one in caught} <= {__file__}
    return [str(one.message) for one in caught]


LEAK = (
    "each uniform call adds an entry to the tuner's cache, which on 0.6.15 stalls calls for "
    "milliseconds (#3970).\nFix: upgrade to 0.6.15.post1 or newer."
)
COUNTERS = (
    "cute-dsl writes over the counters that trtllm-gen keeps in the front of the workspace, and a "
    "trtllm-gen call on the same one may hang (#3582).\nFix: give cute-dsl a workspace of its own."
)


@pytest.mark.parametrize(
    ("version", "backend", "faults"),
    [
        ("0.6.12", "trtllm-gen", []),
        ("0.6.12", "cute-dsl", [COUNTERS]),
        ("0.6.13", "trtllm-gen", [LEAK]),
        ("0.6.13", "cute-dsl", [LEAK]),
        ("0.6.14", "cute-dsl", [LEAK, COUNTERS]),
        ("0.6.15", "auto", [LEAK]),
        ("0.6.15", "trtllm-gen", [LEAK]),
        ("0.6.15", "cute-dsl", [LEAK]),
        ("0.6.15.post1", "auto", []),
        ("0.6.16", "cute-dsl", []),
        ("0.7.4", "trtllm-gen", []),
    ],
)
def test_s41_a_release_in_the_range_runs_and_warns_once_with_the_thread(
    version: str, backend: str, faults: list[str], site: Site
) -> None:
    install(site, version)
    assert warned(backend) == [f"flashinfer-python {version}: {fault}" for fault in faults]


def test_s41_what_a_call_gets_wrong_by_itself_is_refused_and_not_warned_of(site: Site) -> None:
    install(site, "0.6.12")
    with gpu(), pytest.raises(FlashInferVersionError, match="several query tokens") as raised:
        decode_mla(**call(q_len=2, backend="cute-dsl"))
    assert raised.value.needed == "0.6.13 or newer (#3309)."


@pytest.mark.parametrize("version", RELEASES)
def test_s41_a_mock_of_the_release_has_none_of_its_faults(version: str) -> None:
    with use_kernel(mock_kernel(version)), warnings.catch_warnings():
        warnings.simplefilter("error")
        for backend in ("auto", "trtllm-gen", "cute-dsl"):
            decode_mla(**call(backend=backend))


def test_s41_the_list_is_data_with_a_range_an_effect_and_a_thread_or_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["releases", "--json"]) == 0
    issues: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["known_issues"]
    assert len({issue["name"] for issue in issues}) == len(issues) > 10
    for issue in issues:
        assert issue["first"] in recorded_versions()
        assert not issue["last"] or Version(issue["first"]) <= Version(issue["last"])
        assert issue["effect"] in ("refused", "avoided", "warned", "noted")
        assert "#" in issue["evidence"] or ":" in issue["evidence"]
    warned_of = [issue for issue in issues if issue["effect"] == "warned"]
    assert {issue["evidence"].partition(";")[0] for issue in warned_of} == {"#3582", "#3970"}


@pytest.mark.parametrize(
    ("version", "threads"), [("0.6.15", ["#3970"]), ("0.6.14", ["#3970", "#3582"]), ("0.7.4", [])]
)
def test_s41_the_doctor_notes_them(
    version: str, threads: list[str], site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.flashinfer(version, like=version)
    cli.main(["doctor", "--json"])
    notes = json.loads(capsys.readouterr().out)["notes"]
    found = [note["problem"] for note in notes if "#" in note["problem"]]
    assert [thread in problem for thread, problem in zip(threads, found, strict=True)] == [
        True for _ in threads
    ]
