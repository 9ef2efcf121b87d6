"""FlashInfer imports, and its function is gone, hidden or another."""

from __future__ import annotations

from fi_dcp_compat import Parameter, recorded
from fi_dcp_compat.abi import FUNCTION
from tests.zoo.installation import (
    INIT,
    LACKING,
    Fault,
    Installation,
    Machine,
    Reason,
    edit,
    gone,
    install,
    unreadable,
)

__all__ = ["DRIFTED"]

NEWEST = recorded("0.7.4").parameters
NO_DECODE = ("ModuleNotFoundError", "No module named 'flashinfer.decode'")


def without_decode(machine: Machine) -> None:
    install(machine.site)
    machine.site.write("flashinfer/__init__.py", INIT)
    (machine.site.folder / "flashinfer/decode.py").unlink()


def moved(machine: Machine) -> None:
    install(machine.site)
    site = machine.site
    core = site.folder / "flashinfer/mla/_core.py"
    site.write("flashinfer/attention/__init__.py", "")
    site.write("flashinfer/attention/mla.py", core.read_text())
    core.write_text("")
    site.write("flashinfer/__init__.py", INIT)
    site.write("flashinfer/decode.py", "")


def moved_and_exported(machine: Machine) -> None:
    moved(machine)
    machine.site.write("flashinfer/decode.py", f"from .attention.mla import {FUNCTION}\n")


def renamed(machine: Machine) -> None:
    install(machine.site)
    edit(machine.site, "mla/_core.py", rf"def {FUNCTION}\(", "def mla_decode(")
    machine.site.write("flashinfer/__init__.py", INIT)
    machine.site.write("flashinfer/decode.py", "from .mla import mla_decode\n")


def anything(machine: Machine) -> None:
    install(machine.site)
    header = f"def {FUNCTION}(*args, **kwargs):\n    return None\n"
    machine.site.write("flashinfer/mla/_core.py", header)


def assigned(machine: Machine, text: str) -> None:
    install(machine.site)
    machine.site.write("flashinfer/mla/_core.py", f"{FUNCTION} = {text}\n")


def compiled(machine: Machine) -> None:
    assigned(machine, "max")


def no_function(machine: Machine) -> None:
    assigned(machine, "'see flashinfer.attention'")


def hidden(machine: Machine) -> None:
    # As by a decorator without functools.wraps.
    install(machine.site)
    wrapper = f"def {FUNCTION}(*args, **kwargs):\n    return inner(*args, **kwargs)\n"
    edit(machine.site, "decode.py", r"\Z", f"inner = {FUNCTION}\n{wrapper}")


def patched(machine: Machine) -> None:
    install(machine.site, like="0.6.16")


def newly_required(machine: Machine) -> None:
    install(machine.site, "0.8.0", parameters=(*NEWEST[:9], Parameter("layout", None), *NEWEST[9:]))


def with_option(machine: Machine) -> None:
    install(machine.site, "0.8.0", parameters=(*NEWEST, Parameter("tile", "64")))


def without_option(machine: Machine) -> None:
    kept = tuple(p for p in NEWEST if p.name != "uses_shared_paged_kv_idx")
    install(machine.site, "0.8.0", parameters=kept)


def without_scale(machine: Machine) -> None:
    kept = tuple(p for p in NEWEST if p.name != "bmm2_scale")
    install(machine.site, "0.8.0", parameters=kept)


def names(*, without: str = "", layout: bool = False) -> str:
    """The parameters as the message shows them."""
    shown = [p.name for p in NEWEST if p.name != without]
    return ", ".join([*shown[:9], "layout", *shown[9:]] if layout else shown)


def differs(verb: str, parameters: str, fix: str = "") -> Fault:
    return Fault(
        "FlashInferSignatureError",
        f"{FUNCTION} {verb}.",
        f"flashinfer-python 0.8.0: ({parameters}).",
        "the parameters of 0.7.4, the nearest recorded release, and no further required ones.",
        f"install a flashinfer-python that fi-dcp-compat records, or update fi-dcp-compat{fix}.",
    )


def note(more: str = "") -> Reason:
    return Reason(
        "flashinfer-python 0.8.0 is not recorded; judged as 0.7.4, the nearest recorded "
        f"release{more}.",
        "update fi-dcp-compat once it records that release.",
    )


ANYTHING = "function with the signature (*args, **kwargs)"
BUILTIN = "builtin_function_or_method: no signature found for builtin <built-in function max>"
STRING = "str: 'see flashinfer.attention' is not a callable object"
REQUIRES = differs("newly requires layout", names(layout=True))
LOST_SCALE = differs("has lost bmm2_scale", names(without="bmm2_scale"))
LOST_OPTION = differs(
    "has lost uses_shared_paged_kv_idx",
    names(without="uses_shared_paged_kv_idx"),
    ", or set FI_DCP_COMPAT_ASSUME_VERSION=0.7.4 if nothing else changed",
)
PATCHED = Fault(
    "FlashInferSignatureError",
    "decode_mla(dcp=...) needs FlashInfer's native DCP keywords.",
    f"flashinfer-python 0.7.4, whose function lacks {LACKING}.",
    f"a function with {LACKING}, as 0.6.17 and newer have.",
    'pip install --force-reinstall "flashinfer-python==0.7.4" if it was patched, or install '
    "another release from 0.6.17 on, or call with dcp=None.",
)

DRIFTED = (
    Installation("flashinfer.decode is gone", without_decode, live=gone(cause=NO_DECODE)),
    Installation("the function moved", moved, live=gone(), static=gone()),
    Installation("the function is renamed", renamed, live=gone(), static=gone()),
    # A file that is not known is not read; what is imported is.
    Installation(
        "the function moved and is still exported",
        moved_and_exported,
        static=gone(),
        live_reasons=(),
    ),
    Installation(
        "a function of *args and **kwargs",
        anything,
        plain=unreadable(ANYTHING, "decode_mla"),
        dcp=unreadable(ANYTHING),
        native_dcp=False,
        readable=False,
        reasons=[unreadable("a function of *args and **kwargs", "Native DCP").reason],
        live_reasons=[unreadable(ANYTHING, "Native DCP").reason],
    ),
    Installation(
        "a decorator that hides the signature",
        hidden,
        plain=unreadable(ANYTHING, "decode_mla"),
        dcp=unreadable(ANYTHING),
        native_dcp=False,
        readable=False,
        hidden=True,
        live_reasons=[unreadable(ANYTHING, "Native DCP").reason],
    ),
    Installation(
        "a compiled function without a signature",
        compiled,
        static=gone(),
        plain=unreadable(BUILTIN, "decode_mla"),
        dcp=unreadable(BUILTIN),
        native_dcp=False,
        readable=False,
        live_reasons=[unreadable(BUILTIN, "Native DCP").reason],
    ),
    Installation(
        "a string in the function's place",
        no_function,
        static=gone(),
        plain=unreadable(STRING, "decode_mla"),
        dcp=unreadable(STRING),
        native_dcp=False,
        readable=False,
        live_reasons=[unreadable(STRING, "Native DCP").reason],
    ),
    Installation(
        "0.7.4 patched to the parameters of 0.6.16",
        patched,
        dcp=PATCHED,
        native_dcp=False,
        reasons=[
            PATCHED._replace(
                summary="Native DCP needs FlashInfer's native DCP keywords.",
                fix=PATCHED.fix.removesuffix(", or call with dcp=None.") + ".",
            ).reason
        ],
    ),
    Installation(
        "a future release with a newly required parameter",
        newly_required,
        version="0.8.0",
        plain=REQUIRES,
        dcp=REQUIRES,
        reasons=[REQUIRES.reason],
        notes=[note()],
    ),
    Installation(
        "a future release that lost an option",
        without_option,
        version="0.8.0",
        plain=LOST_OPTION,
        dcp=LOST_OPTION,
        reasons=[LOST_OPTION.reason],
        notes=[note()],
    ),
    Installation(
        "a future release that lost a scale",
        without_scale,
        version="0.8.0",
        plain=LOST_SCALE,
        dcp=LOST_SCALE,
        reasons=[LOST_SCALE.reason],
        notes=[note()],
    ),
    Installation(
        "a future release with a new option",
        with_option,
        version="0.8.0",
        notes=[note("; its new tile left at the default")],
    ),
)
