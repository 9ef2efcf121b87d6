"""What every message keeps to: its parts, its full stops, and names that the tables know."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple, get_args

import torch

import fi_dcp_compat
from fi_dcp_compat import DCP, CombineMode, MLADecoder, ParallelConfig, dropin, recorded, testing
from fi_dcp_compat.abi import FUNCTION
from fi_dcp_compat.config import BACKENDS, Config
from fi_dcp_compat.features import FEATURES
from fi_dcp_compat.known_issues import KNOWN_ISSUES
from fi_dcp_compat.limits import LIMITS, LSE_BASES
from fi_dcp_compat.releases import recorded_versions

_LINE = r"([^\n]+)"
_ERROR = re.compile(rf"{_LINE}\nFound: {_LINE}\nNeeded: {_LINE}\nFix: {_LINE}((?:\nAlso: [^\n]+)*)")
# What only warns, or what the doctor says, is told without what is needed.
_NOTE = re.compile(rf"{_LINE}\nFix: {_LINE}")

_VERSION = re.compile(r"(?<![\w.])\d+\.\d+\.\d+(?:(?:\.post|\.dev|rc)\d+)?(?:\+\w+)?")
_QUOTED = re.compile(r"""backend=["']([^"']*)["'](?: or ["']([^"']*)["'])?""")
_WORD = re.compile(r"[A-Za-z][\w-]*")
_KEYWORD = re.compile(r"(?<![\w.])([a-z][a-z0-9]*(?:_[a-z0-9]+)+)\b(?!\.\w)|\b([a-z]\w*)=(?!=)")


class Parts(NamedTuple):
    """A message taken apart; `needed` is empty where nothing is refused."""

    summary: str
    found: str
    needed: str
    fix: str
    also: str = ""

    @property
    def own(self) -> str:
        """What the package says of itself: all but what it was given."""
        return "\n".join((self.summary, self.needed, self.fix, self.also))


def parts(text: str) -> Parts | None:
    """Take a message apart, or return None if it has not the form of one."""
    error, note = _ERROR.fullmatch(text), _NOTE.fullmatch(text)
    if error is not None:
        return Parts(*error.groups())
    return None if note is None else Parts(note[1], "", "", note[2])


def complaints(text: str) -> Iterator[str]:
    """Yield what is wrong with the form of a message."""
    message = parts(text)
    if message is None:
        yield f"not of the form of a message: {text!r}"
        return
    for line in text.splitlines():
        said = line.removeprefix("Found: ").removeprefix("Needed: ").removeprefix("Fix: ")
        if not said.strip(" ."):
            yield f"nothing said: {line!r}"
        if not line.endswith("."):
            yield f"no full stop: {line!r}"
        if re.search(r"(?<!\.)\.\.(?!\.)(?:\s|$)|\.{4}", line):
            yield f"two full stops: {line!r}"
        if "  " in line:
            yield f"two blanks: {line!r}"
    if re.search(r"\b(?:tensor|array)\(|\d\.,", text):
        yield f"contents of a tensor: {text!r}"
    if re.search(r"%[sdrif]|[{}]", message.own):
        yield f"a template that was not filled in: {message.own!r}"


def strangers(text: str) -> Iterator[str]:
    """Yield the releases, backends and keywords that neither a table nor the caller names."""
    message = parts(text)
    if message is None:
        return
    for find, known in (
        (_versions, known_versions()),
        (_backends, known_backends()),
        (_keywords, known_keywords()),
    ):
        given = set(find(message.found)) | set(_WORD.findall(message.found))
        yield from sorted(set(find(message.own)) - known - given)


def _versions(text: str) -> Iterable[str]:
    return _VERSION.findall(text)


def _backends(text: str) -> Iterator[str]:
    for names in _QUOTED.findall(text):
        yield from filter(None, names)
    spelt = {_letters(name) for name in known_backends()}
    yield from (word for word in _WORD.findall(text) if _letters(word) in spelt)


def _letters(word: str) -> str:
    return re.sub(r"[\W_]", "", word).lower()


def _keywords(text: str) -> Iterator[str]:
    yield from (one or other for one, other in _KEYWORD.findall(text))


@functools.cache
def known_versions() -> frozenset[str]:
    """Every release in the tables and in their evidence."""
    rows = (*FEATURES, *LIMITS, *KNOWN_ISSUES)
    quoted = {version for row in rows for version in _VERSION.findall(row.evidence)}
    return frozenset(quoted | {row.since for row in FEATURES} | set(recorded_versions()))


@functools.cache
def known_backends() -> frozenset[str]:
    return frozenset({*BACKENDS, *LSE_BASES, *(row.backend for row in LIMITS)} - {"DCP"})


# What is named so and is no parameter: dimensions, torch's own names, a wheel's file.
_OTHER_WORDS = ("num_tokens", "num_pages", "device", "new_group", "flashinfer_python")


@functools.cache
def known_keywords() -> frozenset[str]:
    """Parameters of FlashInfer's function and of what is public here, and public names."""
    names = {p.name for version in recorded_versions() for p in recorded(version).parameters}
    public: list[object] = [getattr(fi_dcp_compat, name) for name in fi_dcp_compat.__all__]
    public += [DCP.__init__, MLADecoder.run, dropin.trtllm_batch_decode_with_kv_cache_mla]
    for one in public:
        if inspect.isfunction(one):
            names |= set(inspect.signature(one).parameters)
    names |= {*fi_dcp_compat.__all__, *testing.__all__, FUNCTION, *_OTHER_WORDS}
    names |= {*dir(ParallelConfig), *Config._fields, *get_args(CombineMode)}
    names |= {str(dtype).removeprefix("torch.") for dtype in _dtypes()}
    return frozenset(names)


def _dtypes() -> list[torch.dtype]:
    return [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
