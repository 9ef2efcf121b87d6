"""FlashInfer is not there, or something else has its name."""

from __future__ import annotations

from tests.fakes import Site
from tests.zoo.installation import (
    Fault,
    Installation,
    Machine,
    beside,
    gone,
    install,
    unreadable,
)

__all__ = ["ABSENT"]

NO_MODULE = ("ModuleNotFoundError", "No module named 'flashinfer'")
NO_DECODE = ("ModuleNotFoundError", "No module named 'flashinfer.decode'")
NO_PACKAGE = (NO_DECODE[0], f"{NO_DECODE[1]}; 'flashinfer' is not a package")
NOT_FOUND = Fault(
    "FlashInferNotFoundError",
    "FlashInfer is not installed.",
    "no module flashinfer for {python}.",
    "flashinfer-python 0.6.17 or newer for native DCP, 0.6.12 or newer without.",
    'pip install "flashinfer-python>=0.6.17", or decode_mla(backend="reference") in tests.',
)
NOT_IMPORTED = NOT_FOUND._replace(cause=NO_MODULE)
# pip would call a plain install "already satisfied".
METADATA_ALONE = NOT_FOUND._replace(
    found="no module flashinfer for {python}, only the metadata of flashinfer-python 0.7.4.",
    fix=NOT_FOUND.fix.replace("pip install ", "pip install --force-reinstall "),
)

STAND_IN = "import sys, types\nsys.modules['flashinfer'] = types.ModuleType('flashinfer')\n"
MAGIC = "MagicMock with the signature (*args, **kwargs)"
MOCK = "import sys\nfrom unittest.mock import MagicMock\nsys.modules['flashinfer'] = MagicMock()\n"


def nothing(machine: Machine) -> None:
    beside(machine.site)


def whole(machine: Machine) -> None:
    install(machine.site)


def metadata_alone(machine: Machine) -> None:
    beside(machine.site)
    machine.site.distribution("flashinfer-python", "0.7.4")


def leftovers(site: Site) -> None:
    # What pip leaves: files that were written after it installed the package.
    beside(site)
    site.write("flashinfer/data/cubins/kernel.cubin", "")
    site.write("flashinfer/__pycache__/decode.cpython-311.pyc", "")


def half_removed(machine: Machine) -> None:
    leftovers(machine.site)


def half_installed(machine: Machine) -> None:
    leftovers(machine.site)
    machine.site.distribution("flashinfer-python", "0.7.4")


def clone_in_front(machine: Machine) -> None:
    # The working directory, with a git clone of FlashInfer in it.
    machine.front.write("flashinfer/README.md", "")
    machine.front.write("flashinfer/flashinfer/__init__.py", "raise RuntimeError('the clone')\n")


def clone_alone(machine: Machine) -> None:
    clone_in_front(machine)
    beside(machine.site)


def clone_and_package(machine: Machine) -> None:
    clone_in_front(machine)
    install(machine.site)


def script_of_that_name(machine: Machine) -> None:
    machine.front.write("flashinfer.py", "print = print\n")
    install(machine.site)


def dangling_link(machine: Machine) -> None:
    beside(machine.site)
    (machine.site.folder / "flashinfer").symlink_to(machine.site.folder / "moved-away")


ABSENT = (
    Installation("nothing installed", nothing, live=NOT_IMPORTED, static=NOT_FOUND),
    Installation("a dangling link", dangling_link, live=NOT_IMPORTED, static=NOT_FOUND),
    Installation(
        "metadata without the package",
        metadata_alone,
        live=METADATA_ALONE._replace(cause=NO_MODULE),
        static=METADATA_ALONE,
    ),
    Installation(
        "None in sys.modules",
        whole,
        live=NOT_FOUND._replace(
            cause=("ModuleNotFoundError", "import of flashinfer halted; None in sys.modules")
        ),
        static=NOT_FOUND,
        prelude="import sys\nsys.modules['flashinfer'] = None\n",
    ),
    Installation(
        "a half-removed folder",
        half_removed,
        live=gone("unknown", cause=NO_DECODE),
        static=gone("unknown"),
    ),
    Installation(
        "a half-installed folder, with metadata",
        half_installed,
        live=gone(cause=NO_DECODE),
        static=gone(),
    ),
    Installation(
        "shadowed by a namespace package",
        clone_alone,
        live=gone("unknown", "{front}/flashinfer", NO_DECODE),
        static=gone("unknown", "{front}/flashinfer"),
    ),
    # A package further back on the path comes before a folder that is none.
    Installation("a namespace package before the real one", clone_and_package),
    Installation(
        "shadowed by a script of that name",
        script_of_that_name,
        live=gone("unknown", "{front}/flashinfer.py", NO_PACKAGE),
        static=gone("unknown", "{front}/flashinfer.py"),
    ),
    Installation(
        "an empty module without __spec__, nothing installed",
        nothing,
        live=gone("unknown", "flashinfer.decode", NO_PACKAGE),
        static=NOT_FOUND,
        prelude=STAND_IN + "del sys.modules['flashinfer'].__spec__\n",
    ),
    Installation(
        "an empty module without __spec__ over the real one",
        whole,
        live=gone("unknown", "flashinfer.decode", NO_PACKAGE),
        prelude=STAND_IN + "del sys.modules['flashinfer'].__spec__\n",
    ),
    Installation(
        "an empty module with __spec__ None over the real one",
        whole,
        live=gone("unknown", "flashinfer.decode", NO_PACKAGE),
        prelude=STAND_IN,
    ),
    Installation(
        "a MagicMock over the real one",
        whole,
        live=gone("unknown", "flashinfer.decode", NO_PACKAGE),
        prelude=MOCK,
    ),
    # It has every name, and none of them says what it takes.
    Installation(
        "a MagicMock over flashinfer.decode too",
        whole,
        plain=unreadable(MAGIC, "decode_mla"),
        dcp=unreadable(MAGIC),
        version="unknown",
        native_dcp=False,
        readable=False,
        hidden=True,
        live_reasons=[unreadable(MAGIC, "Native DCP").reason],
        prelude=MOCK + "sys.modules['flashinfer.decode'] = MagicMock()\n",
    ),
)
