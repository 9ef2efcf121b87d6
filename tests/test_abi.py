"""What a version and a signature say: features, and the reason for one that is missing."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
from packaging.version import Version

from fi_dcp_compat import (
    Features,
    FlashInferABI,
    FlashInferCompatError,
    FlashInferSignatureError,
    FlashInferVersionError,
    Parameter,
    recorded,
)
from fi_dcp_compat.abi import missing_feature
from fi_dcp_compat.features import DCP_KEYWORDS, FEATURES, FIRST_RELEASE, OLDEST_RELEASE, ROWS
from fi_dcp_compat.releases import recorded_versions

VERSIONS = recorded_versions()
# Since when a release can do what; the evidence is in features.py, this table is a second opinion.
SINCE = {
    "return_lse": "0.6.12",
    "cute_dsl_lse": "0.6.13",
    "cute_dsl_causal": "0.6.13",
    "cute_dsl_bf16_out": "0.6.13",
    "auto_tunes": "0.6.13",
    "trtllm_tensor_scales": "0.6.14",
    "uint8_workspace": "0.6.14",
    "compact_queries": "0.6.14",
    "counters_apart": "0.6.15",
    "cute_dsl_long_q": "0.6.15",
    "counter_buffer": "0.6.15",
    "cute_dsl_compact_queries": "0.6.16",
    "cute_dsl_sliced_heads": "0.6.16",
    "trtllm_padded_heads": "0.6.16",
    "trtllm_sm107": "0.6.16",
    "native_table_width": "0.6.16",
    "native_dcp": "0.6.17",
    "trtllm_compact_splits": "0.6.18",
    "cute_dsl_sm107": "0.6.18",
    "jit_cache_exact": "0.7.0",
    "varlen_dcp": "0.7.0",
    "imports_without_cuda": "0.7.1",
    "return_lse_base": "0.7.1",
    "companions_may_differ": "0.7.2",
    "max_seq_len_compiles": "0.7.2",
    "splits_48": "0.7.2",
    "splits_128": "0.7.2.post1",
}

# Had, and lost again.
HAD = dict.fromkeys(SINCE, "") | {
    "imports_without_cuda": "0.6.0 0.6.1 0.6.2 0.6.3 0.6.4 0.6.5 0.6.6 "
    "0.6.7 0.6.7.post1 0.6.7.post2 0.6.7.post3 0.6.12 0.6.13",
    "cute_dsl_sliced_heads": "0.6.12",
}


def without(abi: FlashInferABI, names: Sequence[str]) -> FlashInferABI:
    return abi._replace(parameters=tuple(p for p in abi.parameters if p.name not in names))


def counted_as(version: str, like: str = "0.6.17", **changes: Any) -> FlashInferABI:
    """The function of release `like`, reported as `version`."""
    return recorded(like)._replace(version=version, source="live", **changes)


# Versions (S13).


@pytest.mark.parametrize(
    ("version", "release", "is_final"),
    [
        ("0.6.9", "0.6.9", True),
        ("0.6.17", "0.6.17", True),
        ("0.6.17+cu130", "0.6.17+cu130", True),
        ("0.7.2.post1", "0.7.2.post1", True),
        ("0.10.0", "0.10.0", True),
        ("0.6.17rc1", "0.6.17rc1", False),
        ("0.6.16.dev20260730", "0.6.16.dev20260730", False),
        ("0.0.0+unknown", None, False),
        ("0.0.0", None, False),
        ("unknown", None, False),
        ("", None, False),
        ("0.6.x", None, False),
    ],
)
def test_a_version_is_known_final_or_neither(
    version: str, release: str | None, is_final: bool
) -> None:
    abi = counted_as(version)
    assert abi.release == (None if release is None else Version(release))
    assert abi.is_final is is_final


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.6.2", False),
        ("0.6.9", False),
        ("0.6.16", False),
        ("0.6.16.post4", False),
        ("0.6.16+cu130", False),
        ("0.6.17", True),
        ("0.6.17.post1", True),
        ("0.6.18+sm89.1", True),
        ("0.7.2.post1", True),
        ("0.7.2+cu130", True),
        ("0.10.0", True),
        ("1.0", True),
        ("0.6.17rc1", True),
        ("0.6.16.dev20260730", True),
        ("0.6.9rc1", True),
        ("0.0.0+unknown", True),
        ("garbage", True),
    ],
)
def test_the_keywords_count_unless_a_final_release_is_older(version: str, supported: bool) -> None:
    abi = counted_as(version)
    assert abi.features.native_dcp is supported
    assert without(abi, ["cp_rank"]).features.native_dcp is False
    if supported:
        abi.require_native_dcp()
    else:
        with pytest.raises(FlashInferVersionError, match="but is older"):
            abi.require_native_dcp()


@pytest.mark.parametrize(
    ("version", "text"),
    [
        ("0.6.17", "flashinfer-python 0.6.17"),
        ("0.6.17rc1", "flashinfer-python 0.6.17rc1 (a pre-release, judged by its signature)"),
        ("0.0.0+unknown", "flashinfer-python of unknown version (0.0.0+unknown)"),
    ],
)
def test_it_is_named_so_in_messages(version: str, text: str) -> None:
    assert counted_as(version).describe() == text


# Features.


def test_the_table_has_a_row_for_each_field_and_nothing_else() -> None:
    assert [row.name for row in FEATURES] == list(Features._fields)
    assert SINCE.keys() <= ROWS.keys()
    assert dict(ROWS) == {row.name: row for row in FEATURES}
    assert OLDEST_RELEASE == "0.6.12"


def test_the_table_is_in_the_order_of_the_releases() -> None:
    since = [Version(row.since) for row in FEATURES]
    assert since == sorted(since)
    assert {row.since for row in FEATURES} <= set(VERSIONS)


@pytest.mark.parametrize("name", SINCE)
def test_a_feature_is_in_every_release_since_its_first(name: str) -> None:
    having = [version for version in VERSIONS if getattr(recorded(version).features, name)]
    assert having == [
        v for v in VERSIONS if Version(v) >= Version(SINCE[name]) or v in HAD[name].split()
    ]


@pytest.mark.parametrize("row", FEATURES, ids=lambda row: row.name)
def test_a_feature_that_a_keyword_shows_is_gone_with_any_of_its_keywords(row: Any) -> None:
    for keyword in row.keywords:
        assert getattr(without(recorded("0.7.4"), [keyword]).features, row.name) is False


@pytest.mark.parametrize("row", FEATURES, ids=lambda row: row.name)
def test_an_unknown_version_has_what_its_keywords_prove(row: Any) -> None:
    for version in VERSIONS:
        abi = counted_as("0.0.0+unknown", like=version)
        proven = max(
            (Version(FIRST_RELEASE[p.name]) for p in abi.parameters if p.name in FIRST_RELEASE),
            default=Version("0"),
        )
        expected = not abi.lacks(*row.keywords) if row.keywords else proven >= Version(row.since)
        assert getattr(abi.features, row.name) is expected


@pytest.mark.parametrize("version", ["0.0.0+unknown", "0.7.0rc1", "0.6.18.dev20260810"])
def test_compact_queries_with_dcp_are_not_taken_on_trust(version: str) -> None:
    # 0.6.18 and 0.7.0 have one signature; only 0.7.0 can do it (S19).
    assert counted_as(version, like="0.7.0").features.varlen_dcp is False
    proven = counted_as(version, like="0.7.1")
    assert not proven.lacks("return_lse_base")
    assert proven.features.varlen_dcp is True


def test_no_release_masks_a_layout_other_than_interleave_1() -> None:
    for version in VERSIONS:
        assert recorded(version).features.interleave_sizes == (1,)
        assert recorded(version).features.native_interleave is False


def test_an_abi_is_a_frozen_value() -> None:
    abi = recorded("0.7.4")
    assert hash(abi) == hash(abi._replace())
    assert pickle.loads(pickle.dumps(abi)) == abi
    features = abi.features
    for name in ("version", "features", "other"):
        with pytest.raises(AttributeError, match=rf"read-only; _replace\({name}=...\)"):
            setattr(abi, name, None)
    assert abi.features is features
    assert repr(abi._replace(note="x")) == (
        "FlashInferABI(version='0.7.4', entry_point='flashinfer.mla._core:"
        "trtllm_batch_decode_with_kv_cache_mla', source='recorded', note='x')"
    )


def test_lacks_names_the_missing_in_the_order_asked() -> None:
    asked = ("cp_rank", "backend", "enable_dcp", "nothing")
    assert recorded("0.6.16").lacks(*asked) == ("cp_rank", "enable_dcp", "nothing")
    assert recorded("0.6.17").lacks(*asked) == ("nothing",)
    assert recorded("0.6.17").lacks() == ()


@pytest.mark.parametrize(
    ("parameter", "required"),
    [
        (Parameter("query", None), True),
        (Parameter("query", None, "KEYWORD_ONLY"), True),
        (Parameter("out", "None"), False),
        (Parameter("rest", None, "VAR_POSITIONAL"), False),
        (Parameter("more", None, "VAR_KEYWORD"), False),
    ],
)
def test_a_parameter_without_default_is_required(parameter: Parameter, required: bool) -> None:
    assert parameter.required is required


# Messages.

WORDING = [
    pytest.param(
        recorded("0.6.15"),
        FlashInferVersionError,
        "Found: flashinfer-python 0.6.15, whose function lacks enable_dcp, cp_world, cp_rank, "
        "causal_seqlens_kv_global.\n"
        "Needed: 0.6.17 or newer (#4178).\n"
        'Fix: pip install -U "flashinfer-python>=0.6.17", or call with dcp=None.',
        id="too old",
    ),
    pytest.param(
        recorded("0.6.16")._replace(
            companions=(("flashinfer-cubin", "0.6.16"), ("flashinfer-jit-cache", "0.6.16+cu130")),
        ),
        FlashInferVersionError,
        "Found: flashinfer-python 0.6.16, whose function lacks enable_dcp, cp_world, cp_rank, "
        "causal_seqlens_kv_global.\n"
        "Needed: 0.6.17 or newer (#4178).\n"
        'Fix: pip install -U "flashinfer-python>=0.6.17" (and flashinfer-cubin, '
        "flashinfer-jit-cache of the same version), or call with dcp=None.",
        id="too old, with companions",
    ),
    pytest.param(
        counted_as("0.6.16"),
        FlashInferVersionError,
        "Found: flashinfer-python 0.6.16, which carries enable_dcp, cp_world, cp_rank, "
        "causal_seqlens_kv_global but is older.\n"
        "Needed: 0.6.17 or newer (#4178).\n"
        'Fix: pip install -U "flashinfer-python>=0.6.17", or set FI_DCP_COMPAT_ASSUME_VERSION to '
        "the release whose behaviour was ported, or call with dcp=None.",
        id="a backport",
    ),
    pytest.param(
        counted_as("0.6.16.dev20260730", like="0.6.16"),
        FlashInferVersionError,
        "Found: flashinfer-python 0.6.16.dev20260730 (a pre-release, judged by its signature), "
        "whose function lacks enable_dcp, cp_world, cp_rank, causal_seqlens_kv_global.\n"
        "Needed: 0.6.17 or newer (#4178).\n"
        'Fix: pip install -U "flashinfer-python>=0.6.17", or call with dcp=None.',
        id="a dev build without the keywords",
    ),
    pytest.param(
        without(recorded("0.7.4"), ["cp_rank"]),
        FlashInferSignatureError,
        "Found: flashinfer-python 0.7.4, whose function lacks cp_rank.\n"
        "Needed: a function with enable_dcp, cp_world, cp_rank, causal_seqlens_kv_global, as "
        "0.6.17 and newer have.\n"
        'Fix: pip install --force-reinstall "flashinfer-python==0.7.4" if it was patched, or '
        "install another release from 0.6.17 on, or call with dcp=None.",
        id="a keyword gone",
    ),
]


@pytest.mark.parametrize(("abi", "error", "rest"), WORDING)
def test_native_dcp_that_is_missing_reads_so(
    abi: FlashInferABI, error: type[FlashInferCompatError], rest: str
) -> None:
    with pytest.raises(error) as raised:
        abi.require_native_dcp()
    assert type(raised.value) is error
    assert str(raised.value) == (
        f"decode_mla(dcp=...) needs FlashInfer's native DCP keywords.\n{rest}"
    )
    assert raised.value.argument == "dcp"
    assert [reason.error for reason in raised.value.reasons] == [error]


@pytest.mark.parametrize("version", ["unknown", "0.6.16", "0.7.4"])
def test_a_signature_that_cannot_be_read_is_unknown_whatever_the_version(version: str) -> None:
    abi = FlashInferABI(version=version, parameters=(), unreadable="MagicMock: no signature")
    with pytest.raises(FlashInferVersionError, match=r"cannot be read \(MagicMock: no signature"):
        abi.require_native_dcp()


@pytest.mark.parametrize("version", VERSIONS)
def test_native_dcp_is_there_from_0_6_17_on(version: str) -> None:
    abi = recorded(version)
    if Version(version) >= Version("0.6.17"):
        abi.require_native_dcp()
        return
    with pytest.raises(FlashInferVersionError, match="lacks enable_dcp") as raised:
        abi.require_native_dcp()
    assert f"flashinfer-python {version}," in raised.value.found


@pytest.mark.parametrize("row", FEATURES, ids=lambda row: row.name)
def test_a_reason_names_the_release_of_its_row_and_the_found_one(row: Any) -> None:
    asked, instead = "this", "do that"
    assert missing_feature(recorded("0.7.4"), row.name, asked=asked, instead=instead) is None
    old = [version for version in VERSIONS if not getattr(recorded(version).features, row.name)][-1]
    reason = missing_feature(recorded(old), row.name, asked=asked, instead=instead)
    assert reason is not None
    assert reason.error is FlashInferVersionError
    assert reason.summary == f"this needs FlashInfer's {row.what}."
    assert reason.found.startswith(f"flashinfer-python {old}")
    thread = row.evidence.partition(";")[0]
    shown = f" ({thread})" if thread.startswith("#") else ""
    assert reason.needed == f"{row.since} or newer{shown}."
    assert f'pip install -U "flashinfer-python>={row.since}"' in reason.fix
    assert reason.fix.endswith(", or do that.")
    for text in (reason.found, reason.needed, reason.fix):
        assert text.endswith(".")
        assert ".." not in text


def test_a_feature_that_no_signature_shows_can_be_assumed() -> None:
    abi = counted_as("0.0.0+unknown", like="0.7.0")
    reason = missing_feature(abi, "varlen_dcp", asked="this", instead="pad the query")
    assert reason is not None
    assert reason.found == (
        "flashinfer-python of unknown version (0.0.0+unknown), whose signature does not show it."
    )
    assert reason.fix == (
        'pip install -U "flashinfer-python>=0.7.0", or set FI_DCP_COMPAT_ASSUME_VERSION to the '
        "release it stands for, or pad the query."
    )


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        (recorded("0.7.4").parameters[1:], "has lost query."),
        ((*recorded("0.7.4").parameters, Parameter("layout", None)), "newly requires layout."),
        (
            tuple(p for p in recorded("0.7.4").parameters if p.name != "return_lse"),
            "has lost return_lse.",
        ),
    ],
    ids=["no query", "a new required parameter", "no return_lse"],
)
@pytest.mark.parametrize("version", ["0.7.4", "0.8.0"])
def test_native_dcp_needs_a_function_that_can_be_called(
    version: str, parameters: tuple[Parameter, ...], text: str
) -> None:
    abi = recorded("0.7.4")._replace(version=version, parameters=parameters)
    with pytest.raises(FlashInferSignatureError, match=text):
        abi.require_native_dcp()


def test_every_keyword_of_dcp_is_needed() -> None:
    for keyword in DCP_KEYWORDS:
        abi = without(recorded("0.7.4"), [keyword])
        with pytest.raises(FlashInferSignatureError, match=f"whose function lacks {keyword}"):
            abi.require_native_dcp()
