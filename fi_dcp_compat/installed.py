"""What is on disk: installed distributions, and the function's header in the package's files.

Nothing here imports flashinfer or torch, so it answers where importing either fails.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Mapping
from functools import lru_cache

from .abi import FUNCTION, Parameter, parse_version
from .errors import FlashInferImportError

__all__ = [
    "COMPANIONS",
    "DEFINED_IN",
    "distribution_of",
    "find_distribution",
    "fits_specifier",
    "installed_distributions",
    "package_folder",
    "read_parameters",
    "read_text",
    "required_specifier",
    "written_version",
]

COMPANIONS = ("flashinfer-cubin", "flashinfer-jit-cache")
# The public function's module, newest layout first: facts, section 1.2.
DEFINED_IN = ("mla/_core.py", "mla.py")
_HEADER = re.compile(rf"^def {FUNCTION}\(.*?^\)[^\n]*:[ \t]*$", re.MULTILINE | re.DOTALL)
_DIST_INFO = ".dist-info"


def installed_distributions(names: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of those of `names` that are installed, from dist-info folder names."""
    return {name: _version_of(folder) for name, folder in _dist_infos(names).items()}


def distribution_of(package: str | None, name: str) -> str | None:
    """Return the version of a distribution if the package in that folder belongs to it."""
    folder = find_distribution(name)
    if folder is None or package is None:
        return None
    beside = os.path.realpath(os.path.dirname(folder)) == os.path.realpath(os.path.dirname(package))
    editable = '"editable"' in (read_text(folder, "direct_url.json") or "")
    return _version_of(folder) if beside or editable else None


def _version_of(folder: str) -> str:
    return folder.removesuffix(_DIST_INFO).rpartition("-")[2]


def find_distribution(name: str) -> str | None:
    """Return the dist-info folder of an installed distribution, or None."""
    return _dist_infos((name,)).get(name)


@lru_cache(maxsize=256)
def _dist_info_names(folder: str, *changed: object) -> tuple[str, ...]:
    return tuple(entry for entry in os.listdir(folder) if entry.endswith(_DIST_INFO))


def _dist_infos(names: tuple[str, ...]) -> dict[str, str]:
    # Reading folder names costs a fraction of importlib.metadata, which opens every candidate.
    wanted = {name.replace("-", "_"): name for name in names}
    initials = {name[0] for name in names}
    written = None
    found: dict[str, str] = {}
    for folder in sys.path:
        try:
            seen = os.stat(folder or ".")
            entries = _dist_info_names(folder or ".", seen.st_mtime_ns, seen.st_nlink, os.getcwd())
        except OSError:
            continue
        for entry in entries:
            if entry[0].lower() not in initials:
                continue
            label, _, version = entry.removesuffix(_DIST_INFO).rpartition("-")
            name = wanted.get(re.sub(r"[-_.]+", "_", label).lower())
            if name is None or not version:
                continue
            path = os.path.join(folder or ".", entry)
            # The first on the path is the one that is imported; of two in one folder, the one
            # that the package's own files name.
            other = found.setdefault(name, path)
            if other != path and os.path.dirname(other) == os.path.dirname(path):
                if name == "flashinfer-python":
                    written = written_version(os.path.join(folder or ".", "flashinfer"))
                if version == written:
                    found[name] = path
    return {name: found[name] for name in names if name in found}


def required_specifier(distribution: str, name: str) -> str:
    """Return which versions of `name` a distribution requires whatever the extras, or nothing."""
    folder = find_distribution(distribution)
    text = None if folder is None else read_text(folder, "METADATA")
    for line in re.findall(r"^Requires-Dist: (.+)$", text or "", re.MULTILINE):
        found = re.match(r"[\w.-]*\w", line)
        if found is None or re.sub(r"[-_.]+", "-", found[0]).lower() != name or "extra ==" in line:
            continue
        plain = re.fullmatch(r"\s*(>=[\w.]+)", line[found.end() :])
        if plain is not None:  # as in all releases; importing packaging.requirements takes 30 ms
            return plain[1]
        from packaging.requirements import InvalidRequirement, Requirement

        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            return str(requirement.specifier)
    return ""


def fits_specifier(have: str, specifier: str) -> bool:
    """Return whether a version is one of those."""
    release, floor = parse_version(have), parse_version(specifier.removeprefix(">="))
    if release is not None and floor is not None and specifier.startswith(">="):
        return release >= floor
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(have, prereleases=True)


def read_parameters(sources: Mapping[str, str]) -> tuple[tuple[Parameter, ...], str]:
    """Read the function's parameters from the first of `sources`, file to text, that has it."""
    for name, text in sources.items():
        # The last definition counts, as for Python. Parsing its header alone takes a fiftieth of
        # parsing the whole file.
        headers = [match[0] for match in _HEADER.finditer(text)]
        try:
            tree = _parsed(f"{headers[-1]} pass") if headers else None
            tree = tree or ast.parse(text)
        except (SyntaxError, ValueError) as exc:
            raise FlashInferImportError(
                "A file of FlashInfer is not valid Python.",
                found=f"flashinfer/{name}: {exc}.",
                needed="the file as its wheel has it.",
                fix="pip install --force-reinstall flashinfer-python.",
                argument=name,
            ) from exc
        for node in reversed(tree.body):
            if isinstance(node, ast.FunctionDef) and node.name == FUNCTION:
                module = "flashinfer." + name.removesuffix(".py").replace("/", ".")
                return _parameters(node.args), f"{module}:{FUNCTION}"
    return (), ""


def _parsed(header: str) -> ast.Module | None:
    try:
        return ast.parse(header)
    except SyntaxError:
        return None  # the pattern was caught out by what follows the header


def _parameters(args: ast.arguments) -> tuple[Parameter, ...]:
    positional = [*args.posonlyargs, *args.args]
    padding: list[ast.expr | None] = [None] * (len(positional) - len(args.defaults))
    found = [
        Parameter(
            arg.arg,
            _default(default),
            "POSITIONAL_ONLY" if arg in args.posonlyargs else "POSITIONAL_OR_KEYWORD",
        )
        for arg, default in zip(positional, [*padding, *args.defaults], strict=True)
    ]
    if args.vararg:
        found.append(Parameter(args.vararg.arg, None, "VAR_POSITIONAL"))
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        found.append(Parameter(arg.arg, _default(default), "KEYWORD_ONLY"))
    if args.kwarg:
        found.append(Parameter(args.kwarg.arg, None, "VAR_KEYWORD"))
    return tuple(found)


def _default(node: ast.expr | None) -> str | None:
    if node is None:
        return None
    try:
        return repr(ast.literal_eval(node))
    except ValueError:
        return ast.unparse(node)


def package_folder() -> str | None:
    """Return the folder of the installed flashinfer package, importing nothing of it."""
    import importlib.machinery
    import importlib.util

    try:
        spec = importlib.util.find_spec("flashinfer")
    except ValueError:  # a module without a spec stands in sys.modules
        spec = importlib.machinery.PathFinder.find_spec("flashinfer")
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(iter(spec.submodule_search_locations))


def module_file() -> str | None:
    """Return the file of a single module that has the package's name."""
    import importlib.machinery
    import importlib.util

    try:
        spec = importlib.util.find_spec("flashinfer")
    except ValueError:
        spec = importlib.machinery.PathFinder.find_spec("flashinfer")
    return None if spec is None else spec.origin


def read_text(*path: str) -> str | None:
    """Return a file's text, or None if it cannot be read."""
    try:
        with open(os.path.join(*path), encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def written_version(package: str) -> str | None:
    """Return the version written in the package's own files, or None."""
    for name in ("_build_meta.py", "version.py"):
        text = read_text(package, name) or ""
        match = re.search(r"""^__version__(?:\s*:\s*str)?\s*=\s*["']([^"']+)["']""", text, re.M)
        if match:
            return match[1]
    return None
