"""One case: what is provoked, what it says, and which places of the package it went through."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from fi_dcp_compat import FlashInferCompatError, FlashInferCompatWarning, probe
from tests.goldens.sites import Built, Site, sites, traced

# Provokes a message, with a folder of its own: raises it, or returns the error or what was printed.
Case = Callable[[Path], object]


class Message(NamedTuple):
    """What a case said, its class ("printed" by the command line), and where it was made."""

    kind: str
    text: str
    sites: frozenset[Site]


def case(act: Callable[..., object], *given: Any, **named: Any) -> Case:
    """A case that needs no folder."""
    return lambda folder: act(*given, **named)


def provoke(name: str, act: Case) -> Message:
    """Run a case as on a machine of its own."""
    with tempfile.TemporaryDirectory() as scratch, traced() as built, patch.dict(os.environ):
        probe.cache_clear()
        try:
            said = act(Path(scratch))
        except FlashInferCompatError as error:
            said = error
        finally:
            probe.cache_clear()
    if not isinstance(said, (FlashInferCompatError, FlashInferCompatWarning, str)):
        raise ValueError(f"{name}: nothing was said, but {said!r} returned")
    kind, text = "printed" if isinstance(said, str) else type(said).__name__, str(said).strip()
    return Message(kind, _portable(text, scratch), _through(text, built))


def _through(text: str, built: list[Built]) -> frozenset[Site]:
    """The places that made what the text says; a reason that nobody shows counts for nothing."""
    shown = [one for one in built if one.summary in text and one.found in text]
    return frozenset(site for site in sites() if any(one.passed(site) for one in shown))


def _portable(text: str, scratch: str) -> str:
    """The text without what is this machine's alone."""
    text = re.sub(rf"{re.escape(scratch)}[^\s),]*", "FOLDER", text)
    return text.replace(sys.executable, "PYTHON")
