"""Messages about what is installed: FlashInfer's package, its wheels, the command line."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from fi_dcp_compat import decode_mla, probe
from fi_dcp_compat.cli import main
from fi_dcp_compat.testing import mock_kernel, use_kernel
from tests.fakes import Site, fake_site
from tests.goldens.message import Case
from tests.support import call
from tests.test_probing import CUBIN_MISMATCH
from tests.test_wheels import wheel, wheel_of


def _installed(install: Callable[[Site], object], act: Callable[[], object]) -> Case:
    """Act on a machine with that installed and nothing else."""

    def installed(folder: Path) -> object:
        with fake_site(folder / "site-packages") as site:
            install(site)
            return act()

    return installed


def _decode() -> None:
    decode_mla(**call())


def _broken(code: str) -> Case:
    def install(site: Site) -> None:
        site.flashinfer("0.6.15", like="0.6.15", first=f"raise {code}")
        site.distribution("flashinfer-cubin", "0.6.13")

    return _installed(install, _decode)


def _run(*arguments: str) -> str:
    """What the command line writes to stderr."""
    said = io.StringIO()
    with redirect_stderr(said), redirect_stdout(io.StringIO()):
        main(arguments)
    return said.getvalue()


def _doctor() -> str:
    """What the doctor says first."""
    said = io.StringIO()
    with redirect_stdout(said):
        main(["doctor", "--json"])
    problem, fix = json.loads(said.getvalue())["reasons"][0].values()
    return f"{problem}\nFix: {fix}"


def _pip(code: str, *arguments: str) -> Case:
    """Run the command line with a pip that is this code."""

    def run(folder: Path) -> str:
        (folder / "pip.py").write_text(code, encoding="utf-8")
        os.environ["PYTHONPATH"] = str(folder)
        return _run(*arguments, "--wheels", str(folder / "wheels"))

    return run


def _wheel(make: Callable[[Path], object]) -> Case:
    def run(folder: Path) -> str:
        make(folder)
        return _run("releases", "--verify", "0.7.4", "--wheels", str(folder))

    return run


def _damaged(folder: Path) -> None:
    wheel_of(folder, "0.7.4").write_bytes(b"no zip")


def _first_cutlass_call() -> None:
    def kernel(**arguments: Any) -> None:
        raise AttributeError("module 'cutlass.cute.core' has no attribute 'ThrMma'")

    mock = mock_kernel("0.6.12")
    mock.side_effect = kernel
    with use_kernel(mock):
        decode_mla(**call(backend="cute-dsl"))


def _assumed() -> None:
    os.environ["FI_DCP_COMPAT_ASSUME_VERSION"] = "latest"
    probe()


def _rewritten(name: str, text: str | None) -> Callable[[Site], object]:
    """Install 0.7.4 with another file of that name, or without it; its import needs none of it."""

    def install(site: Site) -> None:
        site.flashinfer("0.7.4")
        site.write("flashinfer/__init__.py", "from .version import __version__\n")
        if text is None:
            (site.folder / name).unlink()
        else:
            site.write(name, text)

    return install


def cases() -> Iterator[tuple[str, Case]]:
    yield from ONES.items()


NO_RELEASE = 'import sys; sys.exit("ERROR: No matching distribution found for flashinfer-python")'

ONES: dict[str, Case] = {
    "installed: nothing": _installed(lambda site: None, _decode),
    "installed: nothing, read from the files": _installed(
        lambda site: None, lambda: probe(static=True)
    ),
    "installed: a companion of another version": _broken(f"RuntimeError({CUBIN_MISMATCH!r})"),
    "installed: needs CUDA": _broken("AssertionError('Torch not compiled with CUDA enabled')"),
    "installed: another CuTe DSL": _broken("ImportError(\"No module named 'cutlass'\")"),
    "installed: broken for another reason": _broken("OSError('disk')"),
    "installed: CuTe DSL without a name, at the first call": _installed(
        lambda site: site.distribution("flashinfer-python", "0.6.12"), _first_cutlass_call
    ),
    "installed: decode module without the function": _installed(
        _rewritten("flashinfer/decode.py", ""), _decode
    ),
    "installed: a decode module that fails": _installed(
        _rewritten("flashinfer/decode.py", "raise OSError('disk')"), _decode
    ),
    "installed: a single module, read from the files": _installed(
        lambda site: site.write("flashinfer.py", ""), lambda: probe(static=True)
    ),
    "installed: no decode module": _installed(_rewritten("flashinfer/decode.py", None), _decode),
    "installed: no function in the files": _installed(
        _rewritten("flashinfer/mla/_core.py", ""), lambda: probe(static=True)
    ),
    "installed: a file that is no Python": _installed(
        _rewritten("flashinfer/mla/_core.py", ")"), lambda: probe(static=True)
    ),
    "installed: on a CPU": _installed(lambda site: site.flashinfer(), _decode),
    "installed: an assumed version that is none": _installed(
        lambda site: site.flashinfer(), _assumed
    ),
    "doctor: too old": _installed(lambda site: site.flashinfer("0.6.16", like="0.6.16"), _doctor),
    "releases: pip fails": _pip(NO_RELEASE, "releases", "--record", "0.9.9"),
    "releases: pip lists nothing": _pip("", "releases", "--record"),
    "releases: a candidate": lambda folder: _run("releases", "--record", "0.7.5rc1"),
    "releases: a damaged wheel": _wheel(_damaged),
    "releases: a wheel without the function": _wheel(
        lambda folder: wheel(folder, "0.7.4", (), name="other.py")
    ),
}
