"""Find FlashInfer's function and describe it: live (inspect) or static (reads the file).

This is the only module, with `testing`, that imports flashinfer.
"""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias, cast

from .abi import (
    ASSUME_VERSION,
    DISTRIBUTION,
    FUNCTION,
    FlashInferABI,
    Parameter,
    parse_version,
    takes_anything,
)
from .errors import InvalidInputError
from .installed import (
    COMPANIONS,
    DEFINED_IN,
    distribution_of,
    installed_distributions,
    package_folder,
    read_parameters,
    read_text,
    written_version,
)
from .releases import drift

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["Binding", "Kernel", "bind_kernel", "probe"]


# FlashInfer's function, the torch reference, or a mock. Its parameters differ by release, which
# is what this package is about, so no type can name them.
Kernel: TypeAlias = "Callable[..., Tensor | tuple[Tensor, Tensor]]"


class Binding:
    """A kernel and what is known of it; compared by identity, so caches can be keyed on it."""

    __slots__ = ("abi", "genuine", "kernel", "taken")

    def __init__(self, kernel: Kernel, abi: FlashInferABI, *, genuine: bool = False) -> None:
        self.kernel: Kernel = kernel
        self.abi: FlashInferABI = abi
        self.genuine: bool = genuine
        """Whether it is FlashInfer's own code, which runs on a GPU only."""
        self.taken: set[object] = set()
        """The kinds of drop-in calls that the release was found to take."""


class _Probe:
    """Describe the installed FlashInfer.

    Call it as ``probe()`` or ``probe(static=True)``.

    Parameters
    ----------
    static : bool
        Read the installed file instead of importing it; imports neither flashinfer nor torch,
        so it answers where ``import flashinfer`` fails.

    Returns
    -------
    FlashInferABI
        Cached until `cache_clear`. ``FI_DCP_COMPAT_ASSUME_VERSION`` overrides the version.

    Raises
    ------
    FlashInferNotFoundError
        No flashinfer is installed.
    FlashInferImportError
        It is installed, but importing it raises; ``__cause__`` is what it raised.
    FlashInferSignatureError
        It has no function of that name.
    """

    def __call__(self, *, static: bool = False) -> FlashInferABI:
        return _static_abi() if static else bind_kernel().abi

    def cache_clear(self) -> None:
        """Forget what was found; the next call looks again."""
        _bind.cache_clear()
        _static_abi.cache_clear()


probe: _Probe = _Probe()

# The kernel that a test installed (testing.use_kernel), the only state besides the caches.
_installed: Binding | None = None


def install_kernel(binding: Binding | None) -> Binding | None:
    """Put `binding` in FlashInfer's place and return what was there; None: FlashInfer again."""
    global _installed
    previous, _installed = _installed, binding
    return previous


def bind_kernel() -> Binding:
    """Look FlashInfer's function up where stacks and their tests find and patch it."""
    if _installed is not None:
        return _installed
    # A failed import of the package leaves its finished submodules behind.
    imported = sys.modules.get("flashinfer.decode") if "flashinfer" in sys.modules else None
    module = imported or _import_decode()
    kernel = getattr(module, FUNCTION, None)
    if kernel is None:
        from .failures import function_gone

        raise function_gone(str(getattr(module, "__file__", "flashinfer.decode")), _live_version())
    try:
        return _bind(kernel)
    except TypeError:  # a stand-in that cannot be hashed
        return _bind.__wrapped__(kernel)


@lru_cache(maxsize=16)
def _bind(kernel: Kernel) -> Binding:
    import inspect
    from pathlib import Path

    abi = describe_kernel(kernel, _live_version())
    package = getattr(sys.modules.get("flashinfer"), "__path__", None)
    code = None if abi.unreadable else getattr(inspect.unwrap(kernel), "__code__", None)
    genuine = bool(package and code and Path(code.co_filename).is_relative_to(next(iter(package))))
    return Binding(kernel, abi, genuine=genuine)


def describe_kernel(kernel: Kernel, version: str) -> FlashInferABI:
    """Read a callable's own signature; one that shows none is unreadable, never supported."""
    import inspect

    parameters: tuple[Parameter, ...] = ()
    unreadable = ""
    inner: object = kernel
    try:
        signature = inspect.signature(kernel)
        parameters = tuple(
            Parameter(
                parameter.name,
                None if parameter.default is parameter.empty else repr(parameter.default),
                parameter.kind.name,
            )
            for parameter in signature.parameters.values()
        )
        inner = inspect.unwrap(kernel)
        told: object = getattr(kernel, "flashinfer_version", None)
        if isinstance(told, str):  # testing.mock_kernel says what it stands for
            version = told
        if takes_anything(parameters):
            unreadable = f"{type(kernel).__name__} with the signature {signature}"
    except Exception as exc:  # noqa: BLE001  # a stand-in may raise anything when it is asked
        unreadable = f"{type(kernel).__name__}: {exc}"
    if unreadable:
        parameters = ()
    return _noted(
        FlashInferABI(
            version=version,
            parameters=parameters,
            entry_point=f"{getattr(inner, '__module__', '?')}:{getattr(inner, '__name__', '?')}",
            source="live",
            companions=_companions(),
            unreadable=unreadable,
        )
    )


def _noted(abi: FlashInferABI) -> FlashInferABI:
    changed = drift(abi)
    return abi if changed is None else abi._replace(note=changed.note)


def assumed_version() -> str | None:
    """Return ``FI_DCP_COMPAT_ASSUME_VERSION`` if set; InvalidInputError if no version."""
    value = os.environ.get(ASSUME_VERSION)
    if not value:
        return None
    if parse_version(value) is None:
        raise InvalidInputError(
            f"{ASSUME_VERSION} is not a version.",
            found=f"{ASSUME_VERSION}={value!r}.",
            needed=f"a release of {DISTRIBUTION}, for example 0.7.4.",
            fix=f"unset {ASSUME_VERSION}, or set it to the release the installed code stands for.",
            argument=ASSUME_VERSION,
            value=value,
        )
    return value


def _live_version() -> str:
    assumed = assumed_version()
    if assumed is not None:
        return assumed
    module = sys.modules.get("flashinfer")
    version = getattr(module, "__version__", None)
    folder = next(iter(getattr(module, "__path__", ())), None)
    return _known_version(version if isinstance(version, str) else None, folder)


def _known_version(reported: str | None, package: str | None) -> str:
    # A source build reports 0.0.0+unknown; its distribution may still know.
    if reported is not None and parse_version(reported) is not None:
        return reported
    fallback = distribution_of(package, DISTRIBUTION)
    if fallback is not None and parse_version(fallback) is not None:
        return fallback
    return reported or "unknown"


def _import_decode() -> object:
    import importlib
    import warnings

    from .failures import function_gone, import_failure, not_found

    with warnings.catch_warnings():
        # Under an "error" filter a warning of FlashInfer's import would look like a broken one.
        filters = cast("list[tuple[object, ...]]", warnings.filters)
        filters[:] = [rule for rule in filters if rule[0] != "error"]
        try:
            importlib.import_module("flashinfer")
            return importlib.import_module("flashinfer.decode")
        except Exception as exc:
            missing = exc.name if isinstance(exc, ModuleNotFoundError) else None
            if missing == "flashinfer":
                raise not_found() from exc
            if missing == "flashinfer.decode":
                raise function_gone("flashinfer.decode", _live_version()) from exc
            raise import_failure(exc) from exc


def _companions() -> tuple[tuple[str, str], ...]:
    return tuple(installed_distributions(COMPANIONS).items())


def installed_version() -> str:
    """Return the version of the FlashInfer on disk, whatever it is said to stand for."""
    package = package_folder()
    return _known_version(None if package is None else written_version(package), package)


@lru_cache(maxsize=1)
def _static_abi() -> FlashInferABI:
    package = package_folder()
    if package is None:
        from .failures import not_found

        raise not_found()
    version = assumed_version() or installed_version()
    texts = {name: read_text(package, name) for name in DEFINED_IN}
    parameters, entry_point = read_parameters({name: text for name, text in texts.items() if text})
    if not parameters:
        from .failures import function_gone

        raise function_gone(package, version)
    anything = takes_anything(parameters)
    return _noted(
        FlashInferABI(
            version=version,
            parameters=() if anything else parameters,
            entry_point=entry_point,
            source="static",
            companions=_companions(),
            unreadable="a function of *args and **kwargs" if anything else "",
        )
    )
