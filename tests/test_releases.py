"""The recorded releases: every one parses, and the table agrees with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from fi_dcp_compat import (
    FlashInferABI,
    FlashInferSignatureError,
    FlashInferVersionError,
    Parameter,
    Reason,
    check,
    decode_mla,
    recorded,
)
from fi_dcp_compat.abi import FUNCTION
from fi_dcp_compat.features import FIRST_RELEASE, LseBase
from fi_dcp_compat.releases import DATA, Drift, as_json, drift, recorded_versions
from fi_dcp_compat.testing import mock_kernel, use_kernel
from tests.support import call, dcp_of

VERSIONS = recorded_versions()
NEWEST = VERSIONS[-1]
SIXTEEN = (
    "query kv_cache workspace_buffer qk_nope_head_dim kv_lora_rank qk_rope_head_dim block_tables "
    "seq_lens max_seq_len sparse_mla_top_k out bmm1_scale bmm2_scale sinks enable_pdl backend"
)
# The number of parameters, and what came new, release by release.
GREW: dict[str, tuple[int, str]] = {
    "0.6.0": (16, SIXTEEN),
    "0.6.4": (17, "skip_softmax_threshold_scale_factor"),
    "0.6.7": (18, "uses_shared_paged_kv_idx"),
    "0.6.8": (19, "is_var_seq"),
    "0.6.12": (22, "lse return_lse cute_dsl_impl"),
    "0.6.14": (25, "kv_scale_format cum_seq_lens_q max_q_len"),
    "0.6.15": (26, "multi_ctas_kv_counter_buffer"),
    "0.6.17": (
        31,
        "sparse_mla_top_k_lens enable_dcp cp_world cp_rank causal_seqlens_kv_global",
    ),
    "0.6.18": (32, "use_fp16_softmax"),
    "0.7.1": (33, "return_lse_base"),
}


def names(version: str) -> list[str]:
    return [parameter.name for parameter in recorded(version).parameters]


def test_all_39_releases_are_recorded_oldest_first() -> None:
    assert len(VERSIONS) == 39
    assert len(set(VERSIONS)) == 39
    assert [Version(v) for v in VERSIONS] == sorted(map(Version, VERSIONS))
    assert (VERSIONS[0], VERSIONS[-1]) == ("0.6.0", "0.7.4")
    assert "0.7.3" not in VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_a_recorded_release_parses(version: str) -> None:
    abi = recorded(version)
    assert abi.version == version
    assert abi.source == "recorded"
    assert abi.is_final
    assert abi.unreadable == ""
    assert abi.companions == ()
    module = "flashinfer.mla" if Version(version) < Version("0.6.8") else "flashinfer.mla._core"
    assert abi.entry_point == f"{module}:{FUNCTION}"
    assert [p.name for p in abi.parameters if p.required] == SIXTEEN.split()[:9]
    assert {p.kind for p in abi.parameters} == {"POSITIONAL_OR_KEYWORD"}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_signature_grew_where_it_did(version: str) -> None:
    grown = max((v for v in GREW if Version(v) <= Version(version)), key=Version)
    count, new = GREW[grown]
    assert len(names(version)) == count
    if version == grown:
        before = names(VERSIONS[VERSIONS.index(version) - 1]) if version != "0.6.0" else []
        assert sorted(set(names(version)) - set(before)) == sorted(new.split())
        assert set(before) <= set(names(version))


def test_two_keywords_went_into_the_middle_of_the_list() -> None:
    assert names("0.6.4").index("skip_softmax_threshold_scale_factor") == 14
    assert names("0.6.4")[15:] == ["enable_pdl", "backend"]
    assert names("0.6.8")[-2:] == ["is_var_seq", "uses_shared_paged_kv_idx"]


def test_the_defaults_are_those_that_switch_dcp_off() -> None:
    defaults = {p.name: p.default for p in recorded("0.7.4").parameters}
    assert [defaults[name] for name in ("enable_dcp", "cp_world", "cp_rank")] == ["False", "1", "0"]
    assert defaults["causal_seqlens_kv_global"] == "None"
    assert defaults["backend"] == "'auto'"
    assert defaults["return_lse_base"] == "None"
    assert defaults["query"] is None


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("0.6.12", "0.6.13"),
        ("0.6.15", "0.6.16"),
        ("0.6.18", "0.7.0"),
        ("0.7.1", "0.7.4"),
        ("0.6.16", "0.6.16.post4"),
    ],
)
def test_these_releases_have_one_signature(first: str, second: str) -> None:
    assert recorded(first).parameters == recorded(second).parameters


@pytest.mark.parametrize(
    ("spelling", "version"), [("0.6.17.0", "0.6.17"), ("v0.7.4", "0.7.4"), ("0.7", "0.7.0")]
)
def test_a_version_may_be_spelt_as_pep_440_allows(spelling: str, version: str) -> None:
    assert recorded(spelling) is recorded(version)


@pytest.mark.parametrize("version", ["0.7.3", "0.5.3", "9.9", "garbage", ""])
def test_a_release_that_is_not_recorded_is_refused(version: str) -> None:
    with pytest.raises(FlashInferVersionError) as raised:
        recorded(version)
    assert str(raised.value) == (
        f"No FlashInfer release {version} is recorded.\n"
        f"Found: {version!r}.\n"
        f"Needed: one of {', '.join(VERSIONS)}.\n"
        "Fix: pass one of those, or probe() for the installed package, or record it: "
        "fi-dcp-compat releases --record."
    )
    assert raised.value.argument == "version"
    assert raised.value.value == version


# FIRST_RELEASE against the records.


@pytest.mark.parametrize("keyword", FIRST_RELEASE)
def test_a_keyword_first_appears_in_the_release_the_table_names(keyword: str) -> None:
    holders = [version for version in VERSIONS if keyword in names(version)]
    assert holders[0] == FIRST_RELEASE[keyword]
    assert holders == list(VERSIONS[VERSIONS.index(holders[0]) :])


def test_every_keyword_that_came_later_than_the_first_record_is_in_the_table() -> None:
    assert set(names("0.7.4")) - set(names("0.6.0")) == set(FIRST_RELEASE)


# The base of the LSE (S45).


@pytest.mark.parametrize("version", VERSIONS)
def test_the_lse_of_each_backend_has_the_base_it_has(version: str) -> None:
    release = Version(version)
    expected: dict[str, LseBase | None] = {
        "trtllm-gen": "2" if release >= Version("0.6.12") else None,
        "cute-dsl": "e" if release >= Version("0.6.13") else None,
        "xqa": None,
    }
    assert dict(recorded(version).features.lse_base) == expected


def test_the_bases_cannot_be_changed_by_a_caller() -> None:
    bases = recorded("0.7.4").features.lse_base
    with pytest.raises(TypeError, match="does not support item assignment"):
        bases["xqa"] = "2"  # type: ignore[index]


# Recording.


def test_what_is_recorded_is_written_back_as_it_is() -> None:
    abis = [recorded(version) for version in VERSIONS]
    assert as_json(abis) == Path(DATA).read_text(encoding="utf-8")
    assert as_json(reversed(abis)) == as_json(abis)


def test_a_parameter_of_another_kind_keeps_its_kind() -> None:
    row = Parameter("kv_layout", "'HND'", "KEYWORD_ONLY")
    text = as_json([recorded("0.7.4").__class__(version="0.8.0", parameters=(row,))])
    assert '["kv_layout", "\'HND\'", "KEYWORD_ONLY"]' in text


# Releases that are not recorded.


def unrecorded(version: str, *, like: str = NEWEST, lost: str = "", new: str = "") -> FlashInferABI:
    """The function of release `like` without one parameter, or with another; "x" is required."""
    abi = recorded(like)
    kept = tuple(p for p in abi.parameters if p.name != lost)
    name, _, default = new.partition("=")
    added = (Parameter(name, default or None, "KEYWORD_ONLY"),) if new else ()
    return abi._replace(version=version, parameters=kept + added, source="live")


def reasons(abi: FlashInferABI, **config: Any) -> tuple[Reason, ...]:
    return check(abi, num_heads=128, q_len=1, page_size=64, dtype="bfloat16", **config)


def test_a_recorded_release_has_nothing_to_compare_with() -> None:
    assert [version for version in VERSIONS if drift(recorded(version)) is not None] == []


@pytest.mark.parametrize("version", ["0.7.4+cu130", "0.6.16+local.7"])
def test_a_local_version_is_its_release(version: str) -> None:
    abi = unrecorded(version)
    assert drift(abi) is None
    assert recorded(version) is recorded(version.partition("+")[0])


@pytest.mark.parametrize(
    ("version", "nearest"),
    [
        ("0.7.5", "0.7.4"),
        ("0.7.4.post1", "0.7.4"),
        ("1.0.0", "0.7.4"),
        ("0.8.0rc1", "0.7.4"),
        ("0.7.5.dev20261201", "0.7.4"),
        ("0.7.5+cu130", "0.7.4"),
        ("0.7.3", "0.7.2.post1"),
        ("0.6.18.post2", "0.6.18.post1"),
    ],
)
def test_the_nearest_is_the_newest_that_is_not_newer(version: str, nearest: str) -> None:
    found = drift(unrecorded(version, like=nearest))
    assert found == Drift(recorded(nearest), (), (), ())
    assert found.note == f"not recorded; judged as {nearest}, the nearest recorded release"


@pytest.mark.parametrize(
    "version", ["0.5.3", "0.6.17rc1", "0.6.16.dev20260730", "0.0.0+unknown", "garbage", ""]
)
def test_what_is_judged_by_its_signature_has_no_nearest(version: str) -> None:
    abi = unrecorded(version, lost="sparse_mla_top_k")
    assert drift(abi) is None
    assert [reason for reason in reasons(abi) if "has lost" in reason.summary] == []


@pytest.mark.parametrize("version", ["0.7.5", "0.8.0rc1", "0.7.5.dev20261201", "0.7.4.post1"])
@pytest.mark.parametrize(
    "config",
    [{}, {"return_lse": True}, {"dcp_world_size": 8}, {"dcp_world_size": 8, "varlen": True}],
    ids=["plain", "LSE", "DCP", "compact DCP"],
)
def test_a_newer_release_with_the_same_function_is_fine(
    version: str, config: dict[str, Any]
) -> None:
    abi = unrecorded(version)
    assert reasons(abi, **config) == ()
    assert abi.features == recorded(NEWEST).features


def test_new_optional_parameters_are_left_alone_and_noted() -> None:
    abi = unrecorded("0.7.5", new="tile=64")
    assert reasons(abi, dcp_world_size=8) == ()
    found = drift(abi)
    assert found is not None
    assert found.added == ("tile",)
    assert found.note == (
        "not recorded; judged as 0.7.4, the nearest recorded release; its new tile left at the "
        "default"
    )
    with use_kernel(mock_kernel(abi), abi):
        decode_mla(**call())


@pytest.mark.parametrize("version", ["0.7.5", "0.8.0rc1"])
@pytest.mark.parametrize("config", [{}, {"dcp_world_size": 8}], ids=["plain", "DCP"])
def test_a_new_required_parameter_is_named(version: str, config: dict[str, Any]) -> None:
    abi = unrecorded(version, new="layout")
    (reason,) = reasons(abi, **config)
    assert str(reason) == (
        "trtllm_batch_decode_with_kv_cache_mla newly requires layout.\n"
        f"Found: {abi.describe()}: ({', '.join(p.name for p in abi.parameters)}).\n"
        "Needed: the parameters of 0.7.4, the nearest recorded release, and no further required "
        "ones.\n"
        "Fix: install a flashinfer-python that fi-dcp-compat records, or update fi-dcp-compat."
    )
    kernel = mock_kernel(abi)
    given = call() if not config else call(dcp=dcp_of())
    with use_kernel(kernel, abi), pytest.raises(FlashInferSignatureError, match="layout"):
        decode_mla(**given)
    kernel.assert_not_called()


@pytest.mark.parametrize("lost", names(NEWEST))
def test_a_missing_parameter_is_named_whether_it_is_used_or_not(lost: str) -> None:
    abi = unrecorded("0.8.0", lost=lost)
    for config in ({}, {"return_lse": True}, {"dcp_world_size": 8}):
        found = reasons(abi, **config)
        assert {reason.error for reason in found} == {FlashInferSignatureError}
        assert all(lost in reason.summary + reason.found for reason in found)
        assert len(found) == 1


@pytest.mark.parametrize("kind", ["POSITIONAL_ONLY", "VAR_KEYWORD"])
@pytest.mark.parametrize("name", ["query", "bmm2_scale"])
def test_a_parameter_that_no_keyword_reaches_is_missing(name: str, kind: str) -> None:
    abi = recorded("0.7.4")
    rows = tuple(p._replace(kind=kind) if p.name == name else p for p in abi.parameters)
    found = reasons(abi._replace(parameters=rows), return_lse=True)
    assert {reason.error for reason in found} == {FlashInferSignatureError}
    assert f"has lost {name}." in found[0].summary


@pytest.mark.parametrize("version", ["0.7.4", "0.8.0", "0.0.0+unknown", "0.6.17rc1"])
def test_dcp_needs_the_keyword_of_the_lse_too(version: str) -> None:
    abi = unrecorded(version, lost="return_lse")
    found = reasons(abi, dcp_world_size=8)
    assert {reason.error for reason in found} == {FlashInferSignatureError}
    assert found[0].summary == "trtllm_batch_decode_with_kv_cache_mla has lost return_lse."
    with (
        use_kernel(mock_kernel(abi), abi),
        pytest.raises(FlashInferSignatureError, match="return_lse"),
    ):
        decode_mla(**call(dcp=dcp_of()))


def test_a_missing_parameter_says_how_to_go_on() -> None:
    (reason,) = reasons(unrecorded("0.8.0", lost="use_fp16_softmax"))
    assert reason.fix == (
        "install a flashinfer-python that fi-dcp-compat records, or update fi-dcp-compat, or set "
        "FI_DCP_COMPAT_ASSUME_VERSION=0.7.4 if nothing else changed."
    )
    assert reasons(unrecorded("0.7.4", lost="use_fp16_softmax")) == ()
    (core,) = reasons(unrecorded("0.8.0", lost="seq_lens"))
    assert "FI_DCP_COMPAT_ASSUME_VERSION" not in core.fix
