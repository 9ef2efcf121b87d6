"""mypy and basedpyright as commands, and the interpreters and folders that they look at."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import NamedTuple, TypedDict

from tests.fakes import REPOSITORY

CALL_SITES = ("right.py", "right_kernels.py", "wrong.py")
FOLDER = Path("tests", "typing")
MARK = re.compile(r"  # type: ignore\[(?P<mypy>.+)\]  # pyright: ignore\[(?P<basedpyright>.+)\]$")


class Finding(NamedTuple):
    file: str
    line: int
    code: str
    message: str


class Symbol(TypedDict):
    name: str
    isExported: bool
    isTypeKnown: bool
    isTypeAmbiguous: bool


class Completeness(TypedDict):
    pyTypedPath: str
    completenessScore: float
    symbols: list[Symbol]


def mypy(folder: Path, python: Path, cache: Path) -> list[Finding]:
    """Check the package and the call sites of `folder` as its pyproject.toml says."""
    names = ["fi_dcp_compat", *(str(FOLDER / name) for name in CALL_SITES)]
    files = [name for name in names if (folder / name).exists()]
    options = [f"--cache-dir={cache}", f"--python-executable={python}", "--strict"]
    options += ["--output=json", "--no-error-summary"]
    lines = map(json.loads, _output(python, "mypy", *options, *files, folder=folder).splitlines())
    return [Finding(one["file"], one["line"], one["code"], one["message"]) for one in lines]


def basedpyright(folder: Path, python: Path) -> list[Finding]:
    """Check what the pyproject.toml of `folder` includes."""
    answer = json.loads(_basedpyright(python, folder=folder))
    assert answer["summary"]["filesAnalyzed"] > 1
    return [
        Finding(one["file"], one["range"]["start"]["line"] + 1, one.get("rule", ""), one["message"])
        for one in answer["generalDiagnostics"]
    ]


def type_completeness(package: str, python: Path, folder: Path) -> Completeness:
    """Return basedpyright's report of an installed package's public types."""
    options = ("--verifytypes", package, "--ignoreexternal")
    answer = json.loads(_basedpyright(python, *options, folder=folder))
    report: Completeness = answer["typeCompleteness"]
    return report


def without_flashinfer(folder: Path) -> Path:
    """Make an environment with all that this one has but FlashInfer; return its interpreter."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for real in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for path in Path(real).iterdir():
            # A .pth is code, or names another folder; the package is linked as it is here.
            if not path.name.startswith(("flashinfer", "fi_dcp_compat")) and path.suffix != ".pth":
                (site / path.name).symlink_to(path)
    (site / "fi_dcp_compat").symlink_to(REPOSITORY / "fi_dcp_compat")
    return folder / "bin" / "python"


def copied(folder: Path, *names: str) -> Path:
    """Copy files and folders of this checkout, with the configuration of the checkers."""
    for name in ("pyproject.toml", *names):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (REPOSITORY / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(REPOSITORY / name, target, ignore=ignored)
        else:
            shutil.copy2(REPOSITORY / name, target)
    return folder


def _basedpyright(python: Path, *options: str, folder: Path) -> str:
    options = ("--outputjson", f"--pythonpath={python}", *options)
    return _output(python, "basedpyright", *options, folder=folder)


def _output(python: Path, checker: str, *arguments: str, folder: Path) -> str:
    """Run a checker of this environment; 1 says that it found something, more that it failed."""
    hidden = ("PYTHONPATH", "MYPYPATH", "MYPY_CACHE_DIR")
    variables = {name: text for name, text in os.environ.items() if name not in hidden}
    # --verifytypes asks the first python there, whatever --pythonpath says.
    variables["PATH"] = os.pathsep.join([str(python.parent), variables["PATH"]])
    done = subprocess.run(
        [sys.executable, "-m", checker, *arguments],
        env=variables,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout
