"""The exceptions: each says what was found, what is needed, and what mends it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypedDict, TypeVar

__all__ = [
    "FlashInferCompatError",
    "FlashInferCompatWarning",
    "FlashInferImportError",
    "FlashInferNotFoundError",
    "FlashInferSignatureError",
    "FlashInferVersionError",
    "InvalidInputError",
    "NotPreparedError",
    "Reason",
    "UnsupportedConfigError",
    "raise_first",
]

_E = TypeVar("_E", bound="FlashInferCompatError")


class FlashInferCompatError(RuntimeError):
    """Base of every error this package raises.

    Attributes
    ----------
    summary : str
        One line, complete by itself.
    found, needed, fix : str
        What there is, what is needed, and how to mend it.
    argument : str or None
        The argument, setting or package the error is about.
    value : object
        The refused value; a tensor is described by shape, dtype and device, never kept.
    reasons : tuple of Reason
        Every reason found, the raised one first.
    """

    def __init__(
        self,
        summary: str,
        *,
        found: str,
        needed: str,
        fix: str,
        argument: str | None = None,
        value: object = None,
        reasons: Iterable[Reason] = (),
    ) -> None:
        self.summary = summary
        self.found = found
        self.needed = needed
        self.fix = fix
        self.argument = argument
        # Plain values only: these errors are pickled, and must not keep a tensor alive.
        plain = value if isinstance(value, (int, float, str, type(None))) else repr(value)
        self.value: int | float | str | None = plain
        self.reasons: tuple[Reason, ...] = tuple(reasons)
        super().__init__(summary)

    def __str__(self) -> str:
        lines = [
            self.summary,
            f"Found: {self.found}",
            f"Needed: {self.needed}",
            f"Fix: {self.fix}",
        ]
        lines += [f"Also: {reason.summary}" for reason in self.reasons[1:]]
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        state = _State(
            found=self.found,
            needed=self.needed,
            fix=self.fix,
            argument=self.argument,
            value=self.value,
            reasons=self.reasons,
        )
        # Keyword-only arguments: workers send these errors between processes.
        return _rebuild, (type(self), self.summary, state)


class _State(TypedDict):
    found: str
    needed: str
    fix: str
    argument: str | None
    value: object
    reasons: tuple[Reason, ...]


def _rebuild(kind: type[_E], summary: str, state: _State) -> _E:
    return kind(summary, **state)


class FlashInferNotFoundError(FlashInferCompatError, ImportError):
    """No flashinfer package is installed."""


class FlashInferImportError(FlashInferCompatError, ImportError):
    """FlashInfer is installed, but importing it fails; ``__cause__`` holds why."""


class FlashInferVersionError(FlashInferCompatError):
    """The installed release is too old, or unknown, for what was asked."""


class FlashInferSignatureError(FlashInferCompatError):
    """The version is right, but the function is gone or its parameters differ."""


class UnsupportedConfigError(FlashInferCompatError, ValueError):
    """No kernel of the installed release can run this configuration right."""


class InvalidInputError(FlashInferCompatError, ValueError):
    """An argument has a wrong type, value, shape, dtype, device, layout or alignment."""


class NotPreparedError(FlashInferCompatError):
    """A kernel would be compiled for the first time inside a CUDA-graph capture."""


class FlashInferCompatWarning(UserWarning):
    """The installed release has a known fault that other calls or time may bring out."""


class Reason(NamedTuple):
    """One reason why a configuration cannot run.

    Attributes
    ----------
    error : type of FlashInferCompatError
        The class that the call raises for it.
    argument : str
        The argument or setting it is about.
    summary, found, needed, fix : str
        As in `FlashInferCompatError`.
    """

    error: type[FlashInferCompatError]
    argument: str
    summary: str
    found: str
    needed: str
    fix: str

    def __str__(self) -> str:
        return str(self.exception())

    def exception(self, reasons: Sequence[Reason] = ()) -> FlashInferCompatError:
        """Build the exception for this reason, carrying all `reasons`."""
        return self.error(
            self.summary,
            found=self.found,
            needed=self.needed,
            fix=self.fix,
            argument=self.argument,
            reasons=reasons or (self,),
        )


def raise_first(reasons: Sequence[Reason]) -> None:
    """Raise the first of `reasons`, if any, with all of them attached."""
    if reasons:
        raise reasons[0].exception(tuple(reasons))
