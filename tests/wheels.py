"""Real FlashInfer releases, unpacked as far as running their host code needs."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from fi_dcp_compat.wheels import fetch


def unpacked(version: str, folder: Path) -> Path:
    """Return a folder for PYTHONPATH with a release's Python code and its dist-info.

    The wheel is taken from `folder`, or downloaded to it; the result lies there too, and is kept.
    """

    def extract(scratch: Path) -> None:
        with zipfile.ZipFile(fetch(version, folder)) as wheel:
            wheel.extractall(scratch, [name for name in wheel.namelist() if _is_needed(name)])

    return _made_once(folder / f"unpacked-{version}", extract)


def restated(version: str, as_version: str, folder: Path) -> Path:
    """Return a copy of an unpacked release that says it is another one, as a backport does."""
    source = unpacked(version, folder)

    def copy(scratch: Path) -> None:
        # Links: only what is edited needs a file of its own. Bytecode belongs to the source.
        shutil.copytree(
            source,
            scratch,
            copy_function=os.link,
            ignore=shutil.ignore_patterns("__pycache__"),
            dirs_exist_ok=True,
        )
        metadata = scratch / f"flashinfer_python-{version}.dist-info"
        metadata = metadata.rename(scratch / f"flashinfer_python-{as_version}.dist-info")
        _edit(metadata / "METADATA", r"^Version: .*$", f"Version: {as_version}")
        build = scratch / "flashinfer" / "_build_meta.py"
        _edit(build, r"^__version__ = .*$", f'__version__ = "{as_version}"')

    return _made_once(folder / f"unpacked-{version}-as-{as_version}", copy)


# The C++ that `tests.contract.refusals` quotes.
QUOTED = (
    "trtllm_fmha_kernel_launcher.cu",
    "fmhaReduction.cu",
    "fmhaRunner.cuh",
    "kernelParams.h",
    "allocator.h",
    "fmhaKernels.cuh",
    "mla_sm120.cu",
)


def _is_needed(name: str) -> bool:
    # What kernels are compiled from is most of a wheel, and not read before they are.
    if name.endswith(tuple(f"/{quoted}" for quoted in QUOTED)):
        return True
    if name.startswith("flashinfer/data/") or name.endswith((".cu", ".cuh", "/RECORD")):
        return False
    return name.startswith("flashinfer/") or ".dist-info/" in name


def _made_once(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Fill a folder unless it is there; nobody sees it half filled, whoever else fills it too."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    try:
        fill(scratch)
        scratch.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _edit(path: Path, line: str, replacement: str) -> None:
    text, count = re.subn(line, replacement, path.read_text("utf-8"), flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"{path} has {count} lines like {line}")
    path.unlink()  # it is a link to the source's
    path.write_text(text, "utf-8")
