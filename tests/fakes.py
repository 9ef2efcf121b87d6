"""A machine of its own: a site-packages folder with a pretended FlashInfer and its companions."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fi_dcp_compat import Parameter, recorded
from fi_dcp_compat.abi import FUNCTION

REPOSITORY = Path(__file__).parents[1]

# The real one's version.py: without _build_meta.py the version is not known.
VERSION_PY = """\
try:
    from . import _build_meta

    __version__: str = _build_meta.__version__
except ImportError:
    __version__ = "0.0.0+unknown"
"""


def header(parameters: Sequence[Parameter]) -> str:
    """Write the function as FlashInfer's file does, with a line for each parameter."""
    lines = [f"    {p.name}," if p.required else f"    {p.name}={p.default}," for p in parameters]
    return "\n".join([f"def {FUNCTION}(", *lines, ") -> object:", "    return None", ""])


class Site:
    """The one site-packages folder on the path; what is written there is what is installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        importlib.invalidate_caches()
        return path

    def distribution(self, name: str, version: str, *requires: str) -> None:
        lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requires]
        folder = f"{name.replace('-', '_')}-{version}.dist-info"
        self.write(f"{folder}/METADATA", "\n".join([*lines, "", ""]))

    def flashinfer(
        self,
        version: str | None = "0.7.4",
        *,
        like: str = "0.7.4",
        parameters: Sequence[Parameter] | None = None,
        distribution: str | None = "the same",
        first: str = "",
        last: str = "",
        requires: Sequence[str] = (),
    ) -> None:
        """Install FlashInfer `version` (None: not written down) with the function of `like`.

        `first` and `last` run while it is imported, before and after ``flashinfer.decode`` is.
        """
        abi = recorded(like)
        source = header(abi.parameters if parameters is None else parameters)
        if version is not None:
            self.write("flashinfer/_build_meta.py", f'__version__ = "{version}"\n')
        self.write("flashinfer/version.py", VERSION_PY)
        self.write(
            "flashinfer/__init__.py",
            "from .version import __version__ as __version__\n"
            f"{first}\nfrom .decode import {FUNCTION} as _function\n{last}\n",
        )
        self.write("flashinfer/decode.py", f"from .mla import {FUNCTION} as {FUNCTION}\n")
        if abi.entry_point.startswith("flashinfer.mla:"):
            self.write("flashinfer/mla.py", source)
        else:
            self.write("flashinfer/mla/__init__.py", "from ._core import *\n")
            self.write("flashinfer/mla/_core.py", source)
        if distribution == "the same":
            distribution = version
        if distribution is not None:
            self.distribution("flashinfer-python", distribution, *requires)

    def torch(self, version: str = "2.13.0+cu130", cuda: str | None = "13.0") -> None:
        self.distribution("torch", version)
        self.write("torch/version.py", f"__version__ = {version!r}\ncuda: str | None = {cuda!r}\n")


@contextmanager
def fake_site(folder: Path) -> Iterator[Site]:
    """Let `folder` be all there is beside the standard library, and no flashinfer imported."""
    folder.mkdir(parents=True)
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    extensions = {path for path in sys.path if path.endswith("lib-dynload")}
    path, modules, bytecode = sys.path[:], _imported(), sys.dont_write_bytecode
    sys.path[:] = [str(folder), *sorted(standard | extensions)]
    sys.dont_write_bytecode = True
    _forget()
    try:
        yield Site(folder)
    finally:
        sys.path[:], sys.dont_write_bytecode = path, bytecode
        _forget()
        sys.modules.update(modules)
        importlib.invalidate_caches()


def _imported() -> dict[str, Any]:
    return {name: sys.modules[name] for name in sys.modules if name.split(".")[0] == "flashinfer"}


def _forget() -> None:
    for name in _imported():
        del sys.modules[name]


def run_python(
    code: str,
    *arguments: str,
    path: Sequence[Path] = (),
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter that finds this checkout, after the folders of `path`."""
    variables = {name: text for name, text in os.environ.items() if not name.startswith("FI_DCP")}
    variables["PYTHONPATH"] = os.pathsep.join(map(str, [*path, REPOSITORY]))
    variables.update(environment or {})
    return subprocess.run(
        [sys.executable, *arguments, "-c", code],
        env=variables,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )


def answer_of(code: str, *arguments: str, path: Sequence[Path] = ()) -> Any:
    """Run `code`, which prints JSON in its last line, and return that."""
    done = run_python(code, *arguments, path=path)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
