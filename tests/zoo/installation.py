"""What an installation is, and what is expected of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from fi_dcp_compat import Parameter
from tests.fakes import Site

__all__ = [
    "CUTLASS",
    "INIT",
    "LACKING",
    "OTHER_CUTLASS",
    "Fault",
    "Installation",
    "Machine",
    "Reason",
    "beside",
    "edit",
    "gone",
    "import_fault",
    "install",
    "no_native_dcp",
    "unreadable",
]

CUTLASS = "nvidia-cutlass-dsl"
LACKING = "enable_dcp, cp_world, cp_rank, causal_seqlens_kv_global"
OTHER_CUTLASS = {
    "needed": "the nvidia-cutlass-dsl that this FlashInfer was built for.",
    "fix": 'pip install -U "flashinfer-python>=0.6.17" nvidia-cutlass-dsl, or install the '
    "nvidia-cutlass-dsl of its time (Requires-Dist in its metadata names the oldest).",
}
INIT = "from .version import __version__ as __version__\n"

# What the function of a fake FlashInfer does: the shapes and dtypes of a real one's result.
BODY = """\
    import torch

    out = torch.ones(*query.shape[:-1], kv_lora_rank, dtype=torch.bfloat16)
    tokens, heads = query.shape[:-1].numel() // query.shape[-2], query.shape[-2]
    return (out, torch.ones(tokens, heads)) if locals().get("return_lse") else out
"""


class Machine(NamedTuple):
    """The folders on the path, in this order; those that stay empty are not there."""

    front: Site
    site: Site
    checkout: Site


class Reason(NamedTuple):
    """A reason or note as the doctor says it."""

    problem: str
    fix: str


class Fault(NamedTuple):
    """A whole error. ``{python}``, ``{front}`` and ``{site}`` stand for what a run has there."""

    error: str
    summary: str
    found: str
    needed: str
    fix: str
    cause: tuple[str, str] | None = None

    @property
    def facts(self) -> list[str]:
        return [self.summary, self.found, self.needed, self.fix]

    @property
    def text(self) -> str:
        return f"{self.summary}\nFound: {self.found}\nNeeded: {self.needed}\nFix: {self.fix}"

    @property
    def reason(self) -> Reason:
        """The same, as the doctor says it."""
        return Reason(f"{self.summary} Found: {self.found}", self.fix)


class Installation(NamedTuple):
    """One machine, and what is expected of it.

    Attributes
    ----------
    build : callable
        Writes the packages. The machine has one B200.
    live, static : Fault or None
        What ``probe()`` and ``probe(static=True)`` raise; None where they answer. Every call
        raises the former too.
    plain, dcp : Fault or None
        What a call without and with DCP raises where ``probe()`` answers.
    run : Fault or None
        What the kernel raises when it runs, which nothing shows before.
    also : sequence of Fault
        Further reasons of `plain` and `dcp`.
    version, static_version, native_dcp, readable
        What the probes answer; the static one's version is the same if it is left out.
    hidden : bool
        What is imported hides a whole 0.7.4, which the static probe answers.
    reasons, live_reasons : sequence of Reason or None
        The doctor's, without and with ``--live``. Left out: the probe's fault; each once.
    notes : sequence of Reason
        The doctor's.
    prelude : str
        Code that runs before the package is imported.
    torch : (str, str) or None
        What using a call raises where torch itself is missing or broken.
    """

    name: str
    build: Callable[[Machine], None]
    live: Fault | None = None
    static: Fault | None = None
    plain: Fault | None = None
    dcp: Fault | None = None
    run: Fault | None = None
    also: Sequence[Fault] = ()
    version: str = "0.7.4"
    static_version: str | None = None
    native_dcp: bool = True
    readable: bool = True
    hidden: bool = False
    reasons: Sequence[Reason] | None = None
    live_reasons: Sequence[Reason] | None = None
    notes: Sequence[Reason] = ()
    prelude: str = ""
    environment: Mapping[str, str] = {}
    torch: tuple[str, str] | None = None

    def doctors_reasons(self, *, live: bool) -> list[Reason]:
        given = self.live_reasons if live else self.reasons
        if given is not None:
            return list(given)
        if not live:
            return [] if self.static is None else [self.static.reason]
        found = [] if self.live is None else [self.live.reason]
        return list(dict.fromkeys([*found, *self.doctors_reasons(live=False)]))


def install(
    site: Site,
    version: str | None = "0.7.4",
    *,
    like: str = "0.7.4",
    parameters: Sequence[Parameter] | None = None,
    distribution: str | None = "the same",
    first: str = "",
    last: str = "",
    cutlass: str | None = "4.8.1",
    cuda: bool = True,
) -> None:
    """Install FlashInfer with a function that returns ones, and what it needs beside it."""
    site.flashinfer(
        version,
        like=like,
        parameters=parameters,
        distribution=distribution,
        first=first,
        last=last,
        requires=[f"{CUTLASS}>=4.8.0"],
    )
    for name in ("mla.py", "mla/_core.py"):
        if (site.folder / "flashinfer" / name).exists():
            edit(site, name, r"    return None\n", BODY)
    beside(site, cutlass=cutlass, cuda=cuda)


def beside(site: Site, *, cutlass: str | None = "4.8.1", cuda: bool = True) -> None:
    """Install what native DCP needs beside FlashInfer."""
    if cutlass is not None:
        site.distribution(CUTLASS, cutlass)
    if cuda:
        site.torch()
    else:
        site.torch("2.13.0+cpu", cuda=None)


def edit(site: Site, name: str, pattern: str, replacement: str) -> None:
    """Change a file of the installed package; the pattern is there once."""
    path = site.folder / "flashinfer" / name
    text, count = re.subn(pattern, lambda _: replacement, path.read_text(encoding="utf-8"))
    assert count == 1, (name, pattern, count)
    path.write_text(text, encoding="utf-8")


def gone(
    version: str = "0.7.4",
    where: str = "{site}/flashinfer",
    cause: tuple[str, str] | None = None,
) -> Fault:
    """The function is not there."""
    return Fault(
        "FlashInferSignatureError",
        "FlashInfer has no trtllm_batch_decode_with_kv_cache_mla.",
        f"flashinfer {version} at {where}, without the function.",
        "flashinfer-python 0.6.12 to the newest release this package knows.",
        'pip install --force-reinstall "flashinfer-python>=0.6.17", or report the new release.',
        cause,
    )


def import_fault(
    cause: str,
    text: str,
    *,
    shown: str | None = None,
    installed: str = "flashinfer-python 0.7.4",
    needed: str = "a FlashInfer that imports on this machine.",
    fix: str = "mend what it says, or reinstall: pip install --force-reinstall flashinfer-python.",
) -> Fault:
    """Importing FlashInfer raises `cause` with `text`; `shown` is how the message has that."""
    return Fault(
        "FlashInferImportError",
        "FlashInfer is installed, but importing it fails.",
        f"{cause}: {text if shown is None else shown} ({installed}).",
        needed,
        fix,
        (cause, text),
    )


def no_native_dcp(version: str, *, found: str = f"whose function lacks {LACKING}") -> Fault:
    """The release is too old for native DCP."""
    return Fault(
        "FlashInferVersionError",
        "decode_mla(dcp=...) needs FlashInfer's native DCP keywords.",
        f"flashinfer-python {version}, {found}.",
        "0.6.17 or newer (#4178).",
        'pip install -U "flashinfer-python>=0.6.17", or call with dcp=None.',
    )


def unreadable(why: str, asked: str = "decode_mla(dcp=...)") -> Fault:
    """The function shows no parameters; `asked` is what was asked for."""
    return Fault(
        "FlashInferVersionError",
        f"{asked} cannot tell what this kernel takes.",
        f"a kernel whose signature cannot be read ({why}).",
        "FlashInfer's function, or a mock that carries its signature.",
        'use fi_dcp_compat.testing.mock_kernel("0.6.17"), or say what yours stands for: '
        'use_kernel(mock, recorded("0.6.17")).',
    )
