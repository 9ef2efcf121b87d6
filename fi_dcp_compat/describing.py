"""A kernel and what is known of it: which release it counts as, and what its signature shows."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeAlias

from .abi import (
    ASSUME_VERSION,
    DISTRIBUTION,
    FlashInferABI,
    Parameter,
    parse_version,
    takes_anything,
)
from .errors import InvalidInputError
from .installed import COMPANIONS, distribution_of, installed_distributions
from .releases import drift

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from .preparation import Preparation
    from .prepared import MLADecoder

__all__ = [
    "Binding",
    "Kernel",
    "assumed_version",
    "companions",
    "describe_kernel",
    "known_version",
    "noted",
]


# FlashInfer's function, the torch reference, or a mock. Its parameters differ by release, which
# is what this package is about, so no type can name them.
Kernel: TypeAlias = "Callable[..., Tensor | tuple[Tensor, Tensor]]"


class Binding:
    """A kernel and what is known of it; compared by identity, so caches can be keyed on it."""

    __slots__ = (
        "abi",
        "decoders",
        "genuine",
        "kernel",
        "keywords",
        "preparations",
        "taken",
    )

    def __init__(self, kernel: Kernel, abi: FlashInferABI, *, genuine: bool = False) -> None:
        self.kernel: Kernel = kernel
        self.abi: FlashInferABI = abi
        self.keywords: frozenset[str] = frozenset(p.name for p in abi.parameters if p.by_keyword)
        self.genuine: bool = genuine
        """Whether it is FlashInfer's own code, which runs on a GPU only."""
        self.decoders: dict[object, MLADecoder] = {}
        self.preparations: dict[object, Preparation] = {}
        """By their settings; they, and what a mock recorded, go when it goes."""
        self.taken: set[object] = set()
        """The kinds of drop-in calls that the release was found to take."""


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
    return noted(
        FlashInferABI(
            version=version,
            parameters=parameters,
            entry_point=f"{getattr(inner, '__module__', '?')}:{getattr(inner, '__name__', '?')}",
            source="live",
            companions=companions(),
            unreadable=unreadable,
        )
    )


def noted(abi: FlashInferABI) -> FlashInferABI:
    """Return it with what an unrecorded release is judged by."""
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


def known_version(reported: str | None, package: str | None) -> str:
    """Return what the package reports, or its distribution where that says nothing."""
    # A source build reports 0.0.0+unknown; its distribution may still know.
    if reported is not None and parse_version(reported) is not None:
        return reported
    fallback = distribution_of(package, DISTRIBUTION)
    if fallback is not None and parse_version(fallback) is not None:
        return fallback
    return reported or "unknown"


def companions() -> tuple[tuple[str, str], ...]:
    """Return the installed companion wheels and their versions."""
    return tuple(installed_distributions(COMPANIONS).items())
