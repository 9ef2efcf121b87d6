"""Companion wheels of another version, and what repairs an installed mix: S11, S28, S29."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fi_dcp_compat import (
    FlashInferImportError,
    FlashInferNotFoundError,
    FlashInferVersionError,
    cli,
    decode_mla,
    probe,
    supports_combination,
)
from tests.fakes import Site
from tests.support import call, dcp_of

CUBIN, JIT_CACHE = "flashinfer-cubin", "flashinfer-jit-cache"


def mismatch(companion: str, have: str, version: str) -> str:
    """What FlashInfer raises, up to 0.7.1 (0.6.12 jit/env.py:79, 0.7.1:105)."""
    return (
        f"{companion} version ({have}) does not match flashinfer version ({version}). Please "
        "install the same version of both packages. Set FLASHINFER_DISABLE_VERSION_CHECK=1 to "
        "bypass this check."
    )


def install(site: Site, version: str, cubin: str, jit_cache: str) -> str:
    """Install a mix whose import fails, and return with what."""
    name, have = (CUBIN, cubin) if cubin != version else (JIT_CACHE, jit_cache)
    text = mismatch(name, have, version)
    site.flashinfer(version, like=version, first=f"raise RuntimeError({text!r})")
    site.distribution(CUBIN, cubin)
    site.distribution(JIT_CACHE, jit_cache)
    return text


MIXES = pytest.mark.parametrize(
    ("version", "cubin", "jit_cache"),
    [
        ("0.6.10", "0.6.8.post1", "0.6.10"),
        ("0.6.15", "0.6.13", "0.6.15+cu130"),
        ("0.7.1", "0.7.0.post1", "0.7.0.post1+cu130"),
        ("0.7.1", "0.7.1", "0.6.18+cu130"),
    ],
)

# S11: the import fails.


@MIXES
def test_s11_a_mismatch_is_an_import_error_with_all_versions_and_one_line_for_all_packages(
    version: str, cubin: str, jit_cache: str, site: Site
) -> None:
    text = install(site, version, cubin, jit_cache)
    with pytest.raises(FlashInferImportError, match="importing it fails") as raised:
        probe()
    error = raised.value
    assert not isinstance(error, FlashInferNotFoundError)
    assert isinstance(error.__cause__, RuntimeError)
    assert str(error.__cause__) == text
    assert error.found == (
        f"RuntimeError: {text} (flashinfer-python {version}, flashinfer-cubin {cubin}, "
        f"flashinfer-jit-cache {jit_cache})."
    )
    assert error.fix.startswith(
        f'pip install -U "flashinfer-python=={version}" "flashinfer-cubin=={version}" '
        f'"flashinfer-jit-cache=={version}" ('
    )


def test_s11_the_decode_and_the_selector_get_the_same_words(site: Site) -> None:
    install(site, "0.6.15", "0.6.13", "0.6.15")
    with pytest.raises(FlashInferImportError, match="importing it fails") as probed:
        probe()
    with pytest.raises(FlashInferImportError, match="importing it fails") as decoded:
        decode_mla(**call(), dcp=dcp_of())
    assert str(decoded.value) == str(probed.value)
    assert supports_combination(num_heads=16, dtype="bf16") == str(probed.value)


# S28: what is installed and what repairs it, in one line.


@pytest.mark.parametrize(
    ("companions", "named"),
    [
        ((), ""),
        ((CUBIN,), " (and flashinfer-cubin of the same version)"),
        ((JIT_CACHE,), " (and flashinfer-jit-cache of the same version)"),
        ((CUBIN, JIT_CACHE), " (and flashinfer-cubin, flashinfer-jit-cache of the same version)"),
    ],
)
@pytest.mark.parametrize("static", [False, True], ids=["live", "static"])
def test_s28_the_upgrade_names_the_companions_that_are_installed(
    static: bool, companions: tuple[str, ...], named: str, site: Site
) -> None:
    site.flashinfer("0.6.16", like="0.6.16")
    for name in companions:
        site.distribution(name, "0.6.16")
    with pytest.raises(FlashInferVersionError, match="needs FlashInfer's native DCP") as raised:
        probe(static=static).require_native_dcp()
    assert str(raised.value) == (
        "decode_mla(dcp=...) needs FlashInfer's native DCP keywords.\n"
        "Found: flashinfer-python 0.6.16, whose function lacks enable_dcp, cp_world, cp_rank, "
        "causal_seqlens_kv_global.\n"
        "Needed: 0.6.17 or newer (#4178).\n"
        f'Fix: pip install -U "flashinfer-python>=0.6.17"{named}, or call with dcp=None.'
    )


def doctor(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    status = cli.main(["doctor", "--json", *options])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return status, document


def about(findings: list[dict[str, str]], words: str) -> dict[str, str]:
    (finding,) = (finding for finding in findings if words in finding["problem"])
    return finding


def test_s28_the_doctor_gives_the_same_command(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.flashinfer("0.6.16", like="0.6.16")
    site.distribution(CUBIN, "0.6.16")
    status, document = doctor(capsys)
    assert status == 1
    finding = about(document["reasons"], "needs FlashInfer's native DCP keywords")
    upgrade = 'pip install -U "flashinfer-python>=0.6.17" (and flashinfer-cubin of the same version'
    assert finding["fix"].startswith(upgrade)


# S29: what to do where pip finds no wheel of that version.


def assert_says_all(text: str, stale: str) -> None:
    assert "FlashInfer's own package index" in text
    # After the installation, as the second way out.
    install_at, remove_at = text.index("pip install"), text.index("or pip uninstall")
    assert install_at < remove_at
    assert stale in text[remove_at:]
    assert "0.7.2 and newer ignore" in text
    assert "warning" in text


@MIXES
def test_s29_the_error_names_the_index_the_removal_and_the_release_that_only_warns(
    version: str, cubin: str, jit_cache: str, site: Site
) -> None:
    install(site, version, cubin, jit_cache)
    with pytest.raises(FlashInferImportError, match="does not match") as raised:
        probe()
    assert_says_all(str(raised.value), CUBIN if cubin != version else JIT_CACHE)


@MIXES
@pytest.mark.parametrize("options", [(), ("--live",)])
def test_s29_so_does_the_doctor(
    options: tuple[str, ...],
    version: str,
    cubin: str,
    jit_cache: str,
    site: Site,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FLASHINFER_DISABLE_VERSION_CHECK", raising=False)
    install(site, version, cubin, jit_cache)
    status, document = doctor(capsys, *options)
    assert status == 1
    stale, have = (CUBIN, cubin) if cubin != version else (JIT_CACHE, jit_cache)
    finding = about(document["reasons"], f"{stale} {have} is not of the version of")
    assert_says_all(f"{finding['problem']} {finding['fix']}", stale)


def test_s29_from_0_7_2_on_it_is_a_note_and_no_reason(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.flashinfer("0.7.2", like="0.7.2")
    site.distribution(CUBIN, "0.7.1")
    assert probe().features.native_dcp is True
    _, document = doctor(capsys)
    finding = about(document["notes"], f"{CUBIN} 0.7.1 is not of the version of")
    assert finding["problem"].endswith("flashinfer-python 0.7.2; FlashInfer ignores it.")
    assert not [one for one in document["reasons"] if CUBIN in one["problem"]]
