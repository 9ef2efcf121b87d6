"""Find FlashInfer's function and describe it: live (inspect) or static (reads the file).

This is the only module, with `testing`, that imports flashinfer.
"""

from __future__ import annotations

import sys
from _thread import RLock  # of threading, whose import takes as long as that of this package
from typing import cast

from .abi import FUNCTION, FlashInferABI, takes_anything
from .describing import (
    Binding,
    Kernel,
    assumed_version,
    companions,
    describe_kernel,
    known_version,
    noted,
)
from .installed import (
    DEFINED_IN,
    module_file,
    package_folder,
    read_parameters,
    read_text,
    written_version,
)

__all__ = ["bind_kernel", "install_kernel", "installed_version", "probe"]


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
        return _read() if static else bind_kernel().abi

    def cache_clear(self) -> None:
        """Forget what was found; the next call looks again."""
        _bound.clear()
        _static.clear()


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
    modules = sys.modules
    # A failed import of the package leaves its finished submodules behind.
    module: object = modules.get("flashinfer.decode") if "flashinfer" in modules else None
    kernel: Kernel | None = getattr(module, FUNCTION, None)
    try:
        return _bound[kernel]
    except (KeyError, TypeError):  # a new one, or a stand-in that cannot be hashed
        pass
    # One that is under way in another thread has not filled them yet, and may fail.
    if module is None or _importing("flashinfer") or _importing("flashinfer.decode"):
        module = _import_decode()
        kernel = getattr(module, FUNCTION, None)
    if kernel is None:
        from .failures import function_gone

        raise function_gone(_live_place(), _live_version())
    binding = _bind(kernel)
    try:
        # Threads may bind at once; all of them get the one that was first.
        binding = _bound.setdefault(kernel, binding)
    except TypeError:  # a stand-in that cannot be hashed
        return binding
    for oldest in list(_bound)[:-_MOST_BOUND]:
        _bound.pop(oldest, None)
    return binding


# By the function object, so that a test that patches it needs no cache_clear.
_bound: dict[object, Binding] = {}
_MOST_BOUND = 16
_static: dict[str, FlashInferABI] = {}
# warnings.catch_warnings puts back what it found: overlapping ones lose the caller's filters.
_import_lock = RLock()


def _importing(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return getattr(spec, "_initializing", False) is True


def _live_place() -> str:
    module = sys.modules.get("flashinfer")
    folder = next(iter(getattr(module, "__path__", ()) or ()), None)
    file = getattr(module, "__file__", None)
    return str(folder or file or "flashinfer.decode")


def _bind(kernel: Kernel) -> Binding:
    import inspect
    from pathlib import Path

    abi = describe_kernel(kernel, _live_version())
    package = getattr(sys.modules.get("flashinfer"), "__path__", None)
    code = None if abi.unreadable else getattr(inspect.unwrap(kernel), "__code__", None)
    genuine = bool(package and code and Path(code.co_filename).is_relative_to(next(iter(package))))
    return Binding(kernel, abi, genuine=genuine)


def _live_version() -> str:
    assumed = assumed_version()
    if assumed is not None:
        return assumed
    module = sys.modules.get("flashinfer")
    version = getattr(module, "__version__", None)
    folder = next(iter(getattr(module, "__path__", ())), None)
    return known_version(version if isinstance(version, str) else None, folder)


def _import_decode() -> object:
    import importlib
    import warnings

    from .failures import function_gone, import_failure, not_found

    with _import_lock, warnings.catch_warnings():
        # Under an "error" filter a warning of FlashInfer's import would look like a broken one.
        filters = cast("list[tuple[object, ...]]", warnings.filters)
        filters[:] = [rule for rule in filters if rule[0] != "error"]
        try:
            importlib.import_module("flashinfer")
        except Exception as exc:
            if isinstance(exc, ModuleNotFoundError) and exc.name == "flashinfer":
                raise not_found() from exc
            raise import_failure(exc) from exc
        try:
            return importlib.import_module("flashinfer.decode")
        except Exception as exc:
            if isinstance(exc, ModuleNotFoundError) and exc.name == "flashinfer.decode":
                raise function_gone(_live_place(), _live_version()) from exc
            raise import_failure(exc) from exc


def installed_version() -> str:
    """Return the version of the FlashInfer on disk, whatever it is said to stand for."""
    package = package_folder()
    return known_version(None if package is None else written_version(package), package)


def _read() -> FlashInferABI:
    found = _static.get("flashinfer")
    return _static.setdefault("flashinfer", _static_abi()) if found is None else found


def _static_abi() -> FlashInferABI:
    package = package_folder()
    if package is None:
        file = module_file()
        if file is not None:
            from .failures import function_gone

            raise function_gone(file, assumed_version() or "unknown")
        from .failures import not_found

        raise not_found()
    version = assumed_version() or installed_version()
    texts = {name: read_text(package, name) for name in DEFINED_IN}
    parameters, entry_point = read_parameters({name: text for name, text in texts.items() if text})
    if not parameters:
        from .failures import function_gone

        raise function_gone(package, version)
    anything = takes_anything(parameters)
    return noted(
        FlashInferABI(
            version=version,
            parameters=() if anything else parameters,
            entry_point=entry_point,
            source="static",
            companions=companions(),
            unreadable="a function of *args and **kwargs" if anything else "",
        )
    )
