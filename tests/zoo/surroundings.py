"""FlashInfer is as it should be; what it needs beside it is not."""

from __future__ import annotations

from tests.zoo.installation import (
    CUTLASS,
    OTHER_CUTLASS,
    Installation,
    Machine,
    Reason,
    edit,
    import_fault,
    install,
)

__all__ = ["SURROUNDINGS"]

NO_CUTLASS = Reason(
    f"{CUTLASS} is not installed; cute-dsl is compiled with it.",
    f'pip install "{CUTLASS}>=4.8.0".',
)
NO_TORCH = Reason("torch is not installed.", "pip install torch (a CUDA build).")
NO_TORCH_ERROR = ("ModuleNotFoundError", "No module named 'torch'")
BROKEN_TORCH = (
    "OSError",
    "libtorch_cuda.so: cannot open shared object file: No such file or directory",
)


def without_torch(machine: Machine, first: str) -> None:
    machine.site.flashinfer(first=first)
    machine.site.distribution(CUTLASS, "4.8.1")


def broken_torch(machine: Machine) -> None:
    install(machine.site, first="import torch")
    machine.site.write("torch/__init__.py", f"raise OSError({BROKEN_TORCH[1]!r})\n")


def cutlass_at_the_first_call(machine: Machine) -> None:
    install(machine.site, cutlass=None)
    edit(machine.site, "mla/_core.py", r"    import torch\n", "    import cutlass\n")


def other_cubin(machine: Machine) -> None:
    install(machine.site)
    machine.site.distribution("flashinfer-cubin", "0.6.13")


SURROUNDINGS = (
    Installation(
        "torch absent",
        lambda machine: without_torch(machine, ""),
        reasons=[NO_TORCH],
        torch=NO_TORCH_ERROR,
    ),
    Installation(
        "torch absent and imported by FlashInfer",
        lambda machine: without_torch(machine, "import torch"),
        live=import_fault(*NO_TORCH_ERROR),
        reasons=[NO_TORCH],
        live_reasons=[import_fault(*NO_TORCH_ERROR).reason, NO_TORCH],
        torch=NO_TORCH_ERROR,
    ),
    # Only an import shows it, and the doctor makes none unless asked.
    Installation(
        "torch installed and broken",
        broken_torch,
        live=import_fault(*BROKEN_TORCH),
        torch=BROKEN_TORCH,
    ),
    Installation(
        "a CPU build of torch",
        lambda machine: install(machine.site, cuda=False),
        reasons=[
            Reason(
                "torch 2.13.0+cpu is a CPU build: none of its tensors can be on a GPU.",
                "install a CUDA build of torch.",
            )
        ],
    ),
    Installation(
        "nvidia-cutlass-dsl absent and not imported",
        lambda machine: install(machine.site, cutlass=None),
        reasons=[NO_CUTLASS],
    ),
    Installation(
        "nvidia-cutlass-dsl absent and imported by the first call",
        cutlass_at_the_first_call,
        run=import_fault("ModuleNotFoundError", "No module named 'cutlass'", **OTHER_CUTLASS),
        reasons=[NO_CUTLASS],
    ),
    Installation(
        "an nvidia-cutlass-dsl that is too old",
        lambda machine: install(machine.site, cutlass="4.7.2"),
        reasons=[
            Reason(
                f"{CUTLASS} 4.7.2 does not fit flashinfer-python 0.7.4, which needs >=4.8.0.",
                f'pip install -U "{CUTLASS}>=4.8.0".',
            )
        ],
    ),
    Installation(
        "a companion wheel that 0.7.4 ignores",
        other_cubin,
        notes=[
            Reason(
                "flashinfer-cubin 0.6.13 is not of the version of flashinfer-python 0.7.4; "
                "FlashInfer ignores it.",
                'pip install "flashinfer-cubin==0.7.4" (from FlashInfer\'s own package index; not '
                "every version is on PyPI), or pip uninstall flashinfer-cubin.",
            )
        ],
    ),
    Installation(
        "a FlashInfer that warns when it is imported",
        lambda machine: install(
            machine.site, first="import warnings; warnings.warn('sm_121 is new', FutureWarning)"
        ),
    ),
    # What it prints is no part of the doctor's JSON.
    Installation(
        "a FlashInfer that prints when it is imported",
        lambda machine: install(machine.site, first="print('welcome')"),
    ),
)
