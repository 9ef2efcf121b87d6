"""Wheels: had through pip, read as zip files, recorded, and held against what is recorded."""

from __future__ import annotations

import json
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from fi_dcp_compat import (
    FlashInferABI,
    FlashInferNotFoundError,
    FlashInferVersionError,
    Parameter,
    check,
    decode_mla,
    plans,
    recorded,
)
from fi_dcp_compat import releases as records
from fi_dcp_compat import wheels as module
from fi_dcp_compat.abi import FUNCTION
from fi_dcp_compat.cli import main
from fi_dcp_compat.releases import recorded_versions, write
from fi_dcp_compat.wheels import available, changes, fetch, read_wheel
from tests.fakes import header
from tests.support import call, dcp_of

VERSIONS = recorded_versions()
NEWEST = VERSIONS[-1]


def wheel(
    folder: Path,
    version: str,
    parameters: Sequence[Parameter],
    name: str = "mla/_core.py",
    compression: int = zipfile.ZIP_STORED,
) -> Path:
    """Build a wheel that pip takes, with the function in it and nothing that can be imported."""
    path = folder / f"flashinfer_python-{version}-py3-none-any.whl"
    info = f"flashinfer_python-{version}.dist-info"
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("flashinfer/__init__.py", "raise RuntimeError('imported')\n")
        archive.writestr(f"flashinfer/{name}", header(parameters))
        metadata = f"Metadata-Version: 2.1\nName: flashinfer-python\nVersion: {version}\n"
        archive.writestr(f"{info}/METADATA", metadata)
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", tags)
        archive.writestr(f"{info}/RECORD", "")
    return path


def wheel_of(folder: Path, version: str, compression: int = zipfile.ZIP_STORED) -> Path:
    abi = recorded(version)
    name = "mla.py" if abi.entry_point.startswith("flashinfer.mla:") else "mla/_core.py"
    return wheel(folder, version, abi.parameters, name, compression)


def changed(abi: FlashInferABI, **defaults: str | None) -> tuple[Parameter, ...]:
    """Give parameters other defaults, or add them."""
    names = [parameter.name for parameter in abi.parameters]
    kept = [p._replace(default=defaults.get(p.name, p.default)) for p in abi.parameters]
    return (*kept, *(Parameter(n, default) for n, default in defaults.items() if n not in names))


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The records, to be written over."""
    path = tmp_path / "releases.json"
    path.write_text(Path(records.DATA).read_text("utf-8"), "utf-8")
    monkeypatch.setattr(records, "DATA", str(path))
    monkeypatch.setattr(module, "DATA", str(path))
    yield path
    monkeypatch.undo()
    records._data.cache_clear()
    records._recorded.cache_clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    return folder


@pytest.fixture
def index(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index with every recorded release on it, for the real pip."""
    links = folder.parent / "index"
    links.mkdir()
    for version in VERSIONS:
        wheel_of(links, version)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return links


# Reading.


@pytest.mark.parametrize("version", ["0.6.7.post3", "0.7.4"])
def test_a_wheel_is_read_without_importing_it(version: str, folder: Path) -> None:
    assert read_wheel(wheel_of(folder, version)) == recorded(version)


def test_a_wheel_without_the_function_is_refused(folder: Path) -> None:
    path = wheel(folder, "0.9.0", (), name="other.py")
    with pytest.raises(FlashInferVersionError, match="does not define the MLA decode") as raised:
        read_wheel(path)
    assert path.name in str(raised.value)
    assert raised.value.found == "flashinfer-python 0.9.0 without it in mla/_core.py and mla.py."


def cut(content: bytes) -> bytes:
    return content[:1000]


def flipped(content: bytes) -> bytes:
    at = content.index(b"flashinfer/mla/_core.py") + 60
    return content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]


def garbled(content: bytes) -> bytes:
    return content  # the archive is whole, its Python is not; see below


@pytest.mark.parametrize("damage", [cut, flipped, garbled])
def test_a_damaged_wheel_is_said_to_be_unreadable(
    damage: Callable[[bytes], bytes], folder: Path
) -> None:
    path = wheel_of(folder, "0.7.4", zipfile.ZIP_DEFLATED if damage is flipped else 0)
    if damage is garbled:
        with zipfile.ZipFile(path, "a") as archive, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the second of a name is the one that is read
            archive.writestr("flashinfer/mla/_core.py", f"def {FUNCTION}(\n  que ry,\n): ...\n")
    else:
        path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(FlashInferVersionError, match=r"whl cannot be read\.") as raised:
        read_wheel(path)
    assert raised.value.fix == "delete it, and run again."
    assert raised.value.__cause__ is not None


def test_every_kind_of_change_is_named() -> None:
    old = recorded("0.7.4")
    rows = [p for p in changed(old, max_seq_len="0", layout=None, tile="64") if p.name != "sinks"]
    rows[0], rows[1] = rows[1], rows[0]
    rows[2] = rows[2]._replace(kind="KEYWORD_ONLY")
    new = old._replace(parameters=tuple(rows), entry_point="flashinfer.mla.decode:f")
    assert changes(old, new) == [
        "lost sinks",
        "new required layout",
        "new tile=64",
        "workspace_buffer became workspace_buffer (keyword_only)",
        "max_seq_len became max_seq_len=0",
        "another order",
        f"moved from {old.entry_point} to flashinfer.mla.decode:f",
    ]
    assert changes(old, old) == []


# Fetching, with the real pip.


def test_the_index_is_read_oldest_first(index: Path) -> None:
    wheel_of(index, "0.7.4").rename(index / "flashinfer_python-0.5.3-py3-none-any.whl")
    assert available() == VERSIONS[:-1]


def test_a_local_build_on_the_index_is_no_release(index: Path) -> None:
    wheel(index, "0.7.5+cu130", recorded("0.7.4").parameters)
    assert available() == VERSIONS


def test_a_wheel_is_downloaded_once(index: Path, folder: Path) -> None:
    first = fetch("0.6.17", folder / "new")
    assert read_wheel(first) == recorded("0.6.17")
    assert [path.name for path in first.parent.iterdir()] == [first.name]
    (index / first.name).unlink()
    assert fetch("0.6.17", folder / "new") == first


def test_a_release_that_pip_cannot_find_is_an_error(index: Path, folder: Path) -> None:
    with pytest.raises(FlashInferNotFoundError, match="pip download") as raised:
        fetch("0.7.3", folder)
    assert "No matching distribution found for flashinfer-python==0.7.3" in raised.value.found
    assert "--wheels" in raised.value.fix
    assert list(folder.iterdir()) == []


# Holding the records against wheels.


def test_the_wheels_are_what_is_recorded(
    data: Path, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["releases", "--verify", "--wheels", str(index)]) == 0
    assert capsys.readouterr().out == "0 differences in 39 releases\n"


@pytest.mark.parametrize("version", ["0.6.0", "0.6.17", "0.7.4"])
def test_an_altered_record_is_found(
    version: str, data: Path, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    altered = changed(recorded(version), backend="'cute-dsl'")
    write(
        recorded(v)._replace(parameters=altered) if v == version else recorded(v) for v in VERSIONS
    )
    assert main(["releases", "--verify", "--wheels", str(index)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{version}: backend='cute-dsl' became backend='auto'"
    assert lines[-1].startswith("2 differences in ")
    assert main(["releases", "--verify", "0.6.1", "--wheels", str(index)]) == 0
    assert main(["releases", "--verify", version, "--wheels", str(index)]) == 1


def test_a_release_on_one_side_only_is_a_difference(
    data: Path, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel(index, "0.7.5", recorded("0.7.4").parameters)
    (index / "flashinfer_python-0.6.9-py3-none-any.whl").unlink()
    assert main(["releases", "--verify", "--wheels", str(index)]) == 1
    out = capsys.readouterr().out
    assert "0.7.5: not recorded; fi-dcp-compat releases --record 0.7.5\n" in out
    assert "0.6.9: recorded, but not to be had: ERROR: No matching distribution" in out


def test_a_file_that_was_edited_by_hand_is_a_difference(
    data: Path, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data.write_text(json.dumps(json.loads(data.read_text("utf-8"))), "utf-8")
    assert main(["releases", "--verify", "--wheels", str(index)]) == 1
    assert "releases.json: not as --record writes it" in capsys.readouterr().out


# Recording.


def record(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["releases", "--record", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_all_are_recorded_again_from_their_wheels(
    data: Path, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = data.read_text("utf-8")
    write([recorded("0.6.0")])
    lines = record(capsys, "--wheels", str(index))
    assert len([line for line in lines if line.endswith(": recorded from its wheel")]) == 38
    assert data.read_text("utf-8") == before
    assert record(capsys, "--wheels", str(index)) == [
        "Nothing to record: 0.7.4 is the newest release on the index."
    ]


def test_a_new_release_is_recorded_with_what_changed_and_what_follows(
    data: Path, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel(index, "0.7.5", changed(recorded("0.7.4"), tile="64"))
    assert record(capsys, "--wheels", str(index))[:6] == [
        "0.7.5: recorded from its wheel",
        "  against 0.7.4: new tile=64",
        "  decode_mla without DCP: runs",
        "  decode_mla with an LSE: runs",
        "  decode_mla with DCP: runs",
        "  decode_mla with DCP and cum_seq_lens_q: runs",
    ]
    abi = recorded("0.7.5")
    assert abi.parameters[-1] == Parameter("tile", "64")
    assert abi.features == recorded("0.7.4").features
    assert recorded_versions() == (*VERSIONS, "0.7.5")


def test_a_new_release_that_is_refused_says_so(
    data: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel(folder, "0.8.0", (Parameter("layout", None), *recorded("0.7.4").parameters))
    lines = record(capsys, "0.8.0", "--wheels", str(folder))
    assert lines[1] == "  against 0.7.4: new required layout"
    refusal = "trtllm_batch_decode_with_kv_cache_mla newly requires layout."
    assert lines[2:6] == [
        f"  decode_mla {call}: {refusal}"
        for call in ("without DCP", "with an LSE", "with DCP", "with DCP and cum_seq_lens_q")
    ]
    reasons = check(
        recorded("0.8.0"), num_heads=16, q_len=1, page_size=64, dtype="bfloat16", return_lse=True
    )
    assert [reason.summary for reason in reasons] == [refusal]


def test_a_release_is_recorded_anew(
    data: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = data.read_text("utf-8")
    wheel_of(folder, "0.6.5")
    write(recorded(v)._replace(parameters=()) if v == "0.6.5" else recorded(v) for v in VERSIONS)
    lines = record(capsys, "0.6.5", "--wheels", str(folder))
    assert lines[1] == "  against 0.6.4: the same function"
    assert data.read_text("utf-8") == before


# The command line.


def test_what_pip_cannot_do_ends_with_status_2(
    index: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["releases", "--verify", "0.6.17", "--wheels", str(folder)]) == 0
    (index / "flashinfer_python-0.6.18-py3-none-any.whl").unlink()
    assert main(["releases", "--record", "0.6.18", "--wheels", str(folder)]) == 2
    assert capsys.readouterr().err.startswith("pip download failed.\nFound: ERROR: ")


def test_an_index_that_says_nothing_is_not_an_empty_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_pip", lambda *arguments: "flashinfer-python (0.7.4)\n")
    for option in ("--verify", "--record"):
        assert main(["releases", option]) == 2
        assert capsys.readouterr().err.startswith("pip index failed.\nFound: no list of versions")


def test_a_release_that_was_yanked_can_still_be_had(
    data: Path, index: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "available", lambda: VERSIONS[:5])
    assert main(["releases", "--verify", "--wheels", str(index)]) == 0
    assert capsys.readouterr().out == "0 differences in 39 releases\n"


@pytest.mark.parametrize("version", ["0.7.5rc1", "0.7.5.dev20261201"])
def test_only_final_releases_are_recorded(
    version: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = data.read_bytes()
    assert main(["releases", "--record", version]) == 2
    assert capsys.readouterr().err.startswith(f"{version} is no final release.\n")
    assert data.read_bytes() == before


def test_a_local_version_is_recorded_as_its_release(
    data: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel(folder, "0.7.5", recorded("0.7.4").parameters)
    assert record(capsys, "0.7.5+cu130", "--wheels", str(folder))[0].startswith("0.7.5: recorded")
    assert recorded("0.7.5+cu130") is recorded("0.7.5")


def test_the_reference_does_not_depend_on_what_is_recorded(data: Path, folder: Path) -> None:
    kept = tuple(p for p in recorded("0.7.4").parameters if p.name != "cp_rank")
    write([*map(recorded, VERSIONS), recorded("0.7.4")._replace(version="0.8.1", parameters=kept)])
    plans._reference_binding.cache_clear()
    try:
        decode_mla(**call(dcp=dcp_of()), backend="reference")
    finally:
        plans._reference_binding.cache_clear()


def test_an_interruption_leaves_the_records_whole(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = data.read_bytes()

    def interrupted(*paths: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write([recorded("0.6.0")])
    assert data.read_bytes() == before


def test_records_that_cannot_be_written_end_with_status_2(
    data: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refused(*paths: object) -> None:
        raise PermissionError(13, "Permission denied", str(data))

    wheel(folder, "0.7.5", recorded("0.7.4").parameters)
    monkeypatch.setattr("os.replace", refused)
    assert main(["releases", "--record", "0.7.5", "--wheels", str(folder)]) == 2
    assert capsys.readouterr().err == f"[Errno 13] Permission denied: '{data}'\n"


@pytest.mark.parametrize("option", ["--json", "--markdown"])
def test_a_folder_of_wheels_goes_with_verify_and_record_only(
    option: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["releases", option, "--wheels", str(folder)]) == 2
    assert capsys.readouterr().err == "--wheels goes with --verify or --record\n"


@pytest.mark.parametrize("option", ["--verify", "--record"])
def test_a_version_that_is_none_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["releases", option, "newest"])
    assert f"argument {option}: 'newest' is not a version" in capsys.readouterr().err


# The real wheels.


@pytest.mark.releases
@pytest.mark.parametrize("version", ["0.6.0", "0.6.16", "0.7.4"])
def test_a_record_is_held_against_the_real_wheel(
    version: str, data: Path, wheels_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verify = ["releases", "--verify", version, "--wheels", str(wheels_folder)]
    assert main(verify) == 0
    assert capsys.readouterr().out == "0 differences in 1 releases\n"
    altered = changed(recorded(version), max_seq_len="0")
    write(
        recorded(v)._replace(parameters=altered) if v == version else recorded(v) for v in VERSIONS
    )
    assert main(verify) == 1
    assert f"{version}: max_seq_len=0 became max_seq_len\n" in capsys.readouterr().out
