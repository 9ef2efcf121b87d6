"""FlashInfer is installed, and importing it fails."""

from __future__ import annotations

from tests.zoo.installation import (
    CUTLASS,
    INIT,
    OTHER_CUTLASS,
    Fault,
    Installation,
    Machine,
    Reason,
    gone,
    import_fault,
    install,
)

__all__ = ["BROKEN"]

OLD = "flashinfer-python 0.6.17"
NO_DRIVER = "libcuda.so.1: cannot open shared object file: No such file or directory"
NO_RUNTIME = NO_DRIVER.replace("libcuda.so.1", "libcudart.so.13")
NO_CUDA = "Torch not compiled with CUDA enabled"
GPU_OR_UPGRADE = {
    "needed": "a CUDA build of torch and a GPU driver, or 0.7.1 or newer.",
    "fix": 'pip install -U "flashinfer-python>=0.7.1", or run on a machine with a GPU.',
}
# An upgrade to what is installed mends nothing.
GPU_ALONE = {
    "needed": "a CUDA build of torch and a GPU driver.",
    "fix": "run on a machine with a GPU.",
}


def mismatch(companion: str, version: str) -> str:
    """FlashInfer's own words, from jit/env.py."""
    return (
        f"{companion} version ({version}) does not match flashinfer version (0.6.17). "
        "Please install the same version of both packages. "
        "Set FLASHINFER_DISABLE_VERSION_CHECK=1 to bypass this check."
    )


def companion(name: str, version: str) -> Installation:
    text = mismatch(name, version)

    def build(machine: Machine) -> None:
        install(machine.site, "0.6.17", like="0.6.17", first=f"raise RuntimeError({text!r})")
        machine.site.distribution(name, version)

    return Installation(
        f"{name} of another version",
        build,
        live=import_fault(
            "RuntimeError",
            text,
            installed=f"{OLD}, {name} {version}",
            needed="companion wheels of the same version as flashinfer-python (0.7.2 and newer "
            "ignore others, with a warning).",
            fix=f'pip install -U "flashinfer-python==0.6.17" "{name}==0.6.17" (the companion '
            "wheels are on FlashInfer's own package index, not all on PyPI), or pip uninstall "
            f"{name}.",
        ),
        version="0.6.17",
        reasons=[
            Reason(
                f"{name} {version} is not of the version of flashinfer-python 0.6.17: import "
                "flashinfer raises RuntimeError; 0.7.2 and newer ignore it, with a warning.",
                f'pip install "{name}==0.6.17" (from FlashInfer\'s own package index; not every '
                f"version is on PyPI), or pip uninstall {name}.",
            )
        ],
    )


def raising(
    name: str, code: str, fault: Fault, version: str = "0.7.4", *, late: bool = False
) -> Installation:
    """Importing it runs `code`, before or after flashinfer.decode; no file shows it."""

    def build(machine: Machine) -> None:
        first, last = ("", code) if late else (code, "")
        install(machine.site, version, like=version, first=first, last=last)

    return Installation(name, build, live=fault, version=version)


def no_cuda(machine: Machine) -> None:
    # As 0.6.14 to 0.7.0: flashinfer.decode is imported, and left behind, before it raises.
    raises = f"raise AssertionError({NO_CUDA!r})"
    install(machine.site, "0.6.17", like="0.6.17", last=raises, cuda=False)


def moved_cutlass(machine: Machine) -> None:
    text = "module 'cutlass.cute.core' has no attribute 'ThrMma'"
    install(machine.site, "0.6.17", like="0.6.17", first=f"raise AttributeError({text!r})")


def no_cutlass(machine: Machine) -> None:
    install(machine.site, first="import cutlass", cutlass=None)


def torn_init(machine: Machine) -> None:
    install(machine.site, first="def torn(")


def torn_core(machine: Machine) -> None:
    install(machine.site)
    machine.site.write("flashinfer/mla/_core.py", "def torn(\n")


def newer_python(machine: Machine) -> None:
    # What a wheel without Requires-Python brings; these quotes are of no Python yet.
    install(machine.site)
    machine.site.write("flashinfer/mla/__init__.py", "from ._core import *\nNAME = tt'{1}'\n")


def emptied_core(machine: Machine) -> None:
    install(machine.site)
    machine.site.write("flashinfer/mla/_core.py", "")


def lost_core(machine: Machine) -> None:
    install(machine.site)
    (machine.site.folder / "flashinfer/mla/_core.py").unlink()


def lost_decode(machine: Machine) -> None:
    install(machine.site)
    (machine.site.folder / "flashinfer/decode.py").unlink()


def broken_decode(machine: Machine) -> None:
    install(machine.site)
    machine.site.write("flashinfer/__init__.py", INIT)
    machine.site.write("flashinfer/decode.py", "raise RuntimeError('no compiler')\n")


NO_CORE = "No module named 'flashinfer.mla._core'"
NO_NAME = (
    "cannot import name 'trtllm_batch_decode_with_kv_cache_mla' from 'flashinfer.mla' "
    "({site}/flashinfer/mla/__init__.py)"
)
BANNER = "numpy.core.multiarray failed to import\n\nIMPORTANT: PLEASE READ THIS\n"
UNPRINTABLE = (
    "class Odd(Exception):\n    def __str__(self):\n        raise ValueError('no words')\nraise Odd"
)

BROKEN = (
    companion("flashinfer-cubin", "0.6.13"),
    companion("flashinfer-jit-cache", "0.6.16+cu130"),
    raising(
        "ImportError of a name that torch lacks",
        "raise ImportError(\"cannot import name 'missing' from 'torch'\")",
        import_fault("ImportError", "cannot import name 'missing' from 'torch'"),
    ),
    raising(
        "a dependency is absent",
        "import flashinfer_deps",
        import_fault("ModuleNotFoundError", "No module named 'flashinfer_deps'"),
    ),
    Installation(
        "AssertionError on a CPU build of torch",
        no_cuda,
        live=import_fault("AssertionError", NO_CUDA, installed=OLD, **GPU_OR_UPGRADE),
        version="0.6.17",
        reasons=[
            Reason(
                f"import flashinfer 0.6.17 fails with a CPU build of torch (AssertionError: "
                f"{NO_CUDA}).",
                "install a CUDA build of torch; to import without one, "
                'pip install -U "flashinfer-python>=0.7.1".',
            )
        ],
    ),
    raising(
        "RuntimeError without a driver",
        "raise RuntimeError('Found no NVIDIA driver on your system.')",
        import_fault(
            "RuntimeError",
            "Found no NVIDIA driver on your system.",
            installed=OLD,
            **GPU_OR_UPGRADE,
        ),
        "0.6.17",
        late=True,
    ),
    raising(
        "OSError of the missing driver library",
        f"raise OSError({NO_DRIVER!r})",
        import_fault("OSError", NO_DRIVER, installed=OLD, **GPU_OR_UPGRADE),
        "0.6.17",
    ),
    raising(
        "OSError of the missing driver library on 0.7.4",
        f"raise OSError({NO_DRIVER!r})",
        import_fault("OSError", NO_DRIVER, **GPU_ALONE),
    ),
    # libcudart comes with torch's wheels, not with a driver.
    raising(
        "OSError of a missing CUDA runtime library",
        f"raise OSError({NO_RUNTIME!r})",
        import_fault("OSError", NO_RUNTIME),
    ),
    Installation(
        "AttributeError of a cutlass-dsl that moved on",
        moved_cutlass,
        live=import_fault(
            "AttributeError",
            "module 'cutlass.cute.core' has no attribute 'ThrMma'",
            installed=OLD,
            **OTHER_CUTLASS,
        ),
        version="0.6.17",
    ),
    Installation(
        "nvidia-cutlass-dsl absent and imported",
        no_cutlass,
        live=import_fault("ModuleNotFoundError", "No module named 'cutlass'", **OTHER_CUTLASS),
        reasons=[
            Reason(
                f"{CUTLASS} is not installed; cute-dsl is compiled with it.",
                f'pip install "{CUTLASS}>=4.8.0".',
            )
        ],
    ),
    Installation(
        "SyntaxError in its first file",
        torn_init,
        live=import_fault("SyntaxError", "'(' was never closed (__init__.py, line 2)"),
    ),
    Installation(
        "SyntaxError in the function's file",
        torn_core,
        live=import_fault("SyntaxError", "'(' was never closed (_core.py, line 1)"),
        static=Fault(
            "FlashInferImportError",
            "A file of FlashInfer is not valid Python.",
            "flashinfer/mla/_core.py: '(' was never closed (<unknown>, line 1).",
            "the file as its wheel has it.",
            "pip install --force-reinstall flashinfer-python.",
            ("SyntaxError", "'(' was never closed (<unknown>, line 1)"),
        ),
    ),
    Installation(
        "syntax of a newer Python",
        newer_python,
        live=import_fault("SyntaxError", "invalid syntax (__init__.py, line 2)"),
    ),
    Installation(
        "the function's file is empty",
        emptied_core,
        live=import_fault("ImportError", NO_NAME),
        static=gone(),
    ),
    Installation(
        "the function's file is lost",
        lost_core,
        live=import_fault("ModuleNotFoundError", NO_CORE),
        static=gone(),
    ),
    # The package itself does not import, so it is not a release without the function.
    Installation(
        "flashinfer/decode.py is lost, and imported",
        lost_decode,
        live=import_fault("ModuleNotFoundError", "No module named 'flashinfer.decode'"),
    ),
    Installation(
        "flashinfer.decode alone is broken",
        broken_decode,
        live=import_fault("RuntimeError", "no compiler"),
    ),
    raising(
        "a circular import",
        "from flashinfer import later",
        import_fault(
            "ImportError",
            "cannot import name 'later' from partially initialized module 'flashinfer' (most "
            "likely due to a circular import) ({site}/flashinfer/__init__.py)",
        ),
    ),
    # One fact a line, whatever the cause says.
    raising(
        "an error of several lines",
        f"raise ImportError({BANNER!r})",
        import_fault("ImportError", BANNER, shown=" ".join(BANNER.split())),
    ),
    # As Python's own tracebacks write it.
    raising(
        "an error that cannot be printed",
        UNPRINTABLE,
        import_fault("Odd", "unprintable: no words", shown="<exception str() failed>"),
    ),
)
