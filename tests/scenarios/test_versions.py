"""Which release an installed version is: S12, S13."""

from __future__ import annotations

from typing import Any

import pytest

from fi_dcp_compat import (
    FlashInferVersionError,
    check,
    probe,
    recorded,
    supports_combination,
)
from tests.fakes import Site

WITH_DCP: dict[str, Any] = {
    "num_heads": 16,
    "q_len": 1,
    "page_size": 64,
    "dtype": "bfloat16",
    "dcp_world_size": 8,
}

# S12: a source build without its version.


UNKNOWN = [None, "0.0.0+unknown", "0.0.0", "a+garbled.version"]


def shown(version: str | None, static: bool) -> str:
    """Without its generated file the real version.py, once imported, says 0.0.0+unknown."""
    return version or ("unknown" if static else "0.0.0+unknown")


@pytest.mark.parametrize("static", [False, True], ids=["live", "static"])
@pytest.mark.parametrize("version", UNKNOWN)
def test_s12_a_source_build_with_the_keywords_is_supported_by_its_signature(
    version: str | None, static: bool, site: Site
) -> None:
    site.flashinfer(version, like="0.7.4", distribution=None)
    abi = probe(static=static)
    assert abi.version == shown(version, static)
    assert abi.release is None
    assert abi.features.native_dcp is True
    abi.require_native_dcp()
    assert check(abi, **WITH_DCP) == ()
    # What is supported has no reasons; that the signature was one shows where it is another's.
    assert abi._replace(parameters=recorded("0.6.16").parameters).features.native_dcp is False


@pytest.mark.parametrize("static", [False, True], ids=["live", "static"])
@pytest.mark.parametrize("version", UNKNOWN)
def test_s12_one_without_them_is_too_old_and_of_unknown_version(
    version: str | None, static: bool, site: Site
) -> None:
    site.flashinfer(version, like="0.6.16", distribution=None)
    with pytest.raises(FlashInferVersionError, match="of unknown version") as raised:
        probe(static=static).require_native_dcp()
    assert raised.value.found == (
        f"flashinfer-python of unknown version ({shown(version, static)}), whose function lacks "
        "enable_dcp, cp_world, cp_rank, causal_seqlens_kv_global."
    )
    assert raised.value.needed == "0.6.17 or newer (#4178)."


# S13: versions that are no strings.


@pytest.mark.parametrize(
    ("version", "native_dcp"),
    [
        ("0.6.2", False),
        ("0.6.9", False),
        ("0.6.10", False),
        ("0.6.16.post4", False),
        ("0.6.17", True),
        ("0.6.18+sm89.1", True),
        ("0.6.100", True),
        ("0.7.2.post1", True),
        ("0.7.2+cu130", True),
        ("0.10.0", True),
        ("0.10.0.post1+cu130", True),
        ("1.0.0", True),
    ],
)
@pytest.mark.parametrize("static", [False, True], ids=["live", "static"])
def test_s13_0_6_9_is_before_0_6_17_and_0_10_0_behind_it(
    static: bool, version: str, native_dcp: bool, site: Site
) -> None:
    # With all keywords, so that the version alone decides.
    site.flashinfer(version, like="0.7.4")
    abi = probe(static=static)
    assert abi.version == version
    assert abi.features.native_dcp is native_dcp
    reasons = check(abi, **WITH_DCP)
    assert (reasons == ()) is native_dcp
    if not native_dcp:
        assert reasons[0].error is FlashInferVersionError
        assert f"{version}, which carries enable_dcp" in reasons[0].found


@pytest.mark.parametrize("version", ["garbage", "", "0..7", "v?", "0.7.4.4.4-x y", "unknown"])
def test_s13_garbage_is_an_unknown_version_and_no_exception(version: str) -> None:
    abi = recorded("0.7.4")._replace(version=version)
    assert abi.release is None
    assert abi.describe() == f"flashinfer-python of unknown version ({version})"
    assert supports_combination(num_heads=16, dtype="bf16", dcp_world_size=8, abi=abi) is None
    old = abi._replace(parameters=recorded("0.6.16").parameters)
    assert old.features.native_dcp is False
