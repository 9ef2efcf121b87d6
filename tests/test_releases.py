"""The recorded releases: every one parses, and the table agrees with them."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from packaging.version import Version

from fi_dcp_compat import FlashInferVersionError, Parameter, recorded
from fi_dcp_compat.abi import FUNCTION
from fi_dcp_compat.features import FIRST_RELEASE, LseBase
from fi_dcp_compat.releases import _DATA, as_json, read_wheel, recorded_versions
from tests.fakes import header

VERSIONS = recorded_versions()
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
        "Fix: pass one of those, or probe() for the installed package."
    )
    assert raised.value.argument == "version"
    assert raised.value.value == version


# FIRST_RELEASE against the records.


@pytest.mark.parametrize("keyword", FIRST_RELEASE)
def test_a_keyword_first_appears_in_the_release_the_table_names(keyword: str) -> None:
    holders = [version for version in VERSIONS if keyword in names(version)]
    assert holders[0] == FIRST_RELEASE[keyword]
    assert holders == list(VERSIONS[VERSIONS.index(holders[0]) :])


def test_every_keyword_since_0_6_12_is_in_the_table() -> None:
    assert set(names("0.7.4")) - set(names("0.6.11")) == set(FIRST_RELEASE)


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


def wheel(folder: Path, version: str, name: str, source: str) -> Path:
    path = folder / f"flashinfer_python-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("flashinfer/__init__.py", "raise RuntimeError('imported')\n")
        archive.writestr(name, source)
    return path


@pytest.mark.parametrize(
    ("version", "name"),
    [("0.6.7.post3", "flashinfer/mla.py"), ("0.7.4", "flashinfer/mla/_core.py")],
)
def test_a_wheel_is_read_without_importing_it(version: str, name: str, tmp_path: Path) -> None:
    source = header(recorded(version).parameters)
    assert read_wheel(wheel(tmp_path, version, name, source)) == recorded(version)


def test_a_wheel_without_the_function_is_refused(tmp_path: Path) -> None:
    path = wheel(tmp_path, "0.9.0", "flashinfer/mla/_core.py", "def other(query): ...\n")
    with pytest.raises(FlashInferVersionError, match="does not define the MLA decode") as raised:
        read_wheel(path)
    assert path.name in str(raised.value)
    assert raised.value.found == "a wheel of flashinfer-python 0.9.0 without it."


def test_what_is_recorded_is_written_back_as_it_is() -> None:
    abis = [recorded(version) for version in VERSIONS]
    assert as_json(abis) == _DATA.read_text(encoding="utf-8")
    assert as_json(reversed(abis)) == as_json(abis)


def test_a_parameter_of_another_kind_keeps_its_kind() -> None:
    row = Parameter("kv_layout", "'HND'", "KEYWORD_ONLY")
    text = as_json([recorded("0.7.4").__class__(version="0.8.0", parameters=(row,))])
    assert '["kv_layout", "\'HND\'", "KEYWORD_ONLY"]' in text
