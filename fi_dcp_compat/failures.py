"""What is wrong with FlashInfer's package, as errors: absent, broken, or without the function."""

from __future__ import annotations

import sys

from .abi import DISTRIBUTION, FUNCTION, carries, parse_version, upgrade_command
from .errors import FlashInferImportError, FlashInferNotFoundError, FlashInferSignatureError
from .features import OLDEST_RELEASE, ROWS
from .installed import COMPANIONS, installed_distributions, package_folder

__all__ = ["function_gone", "import_failure", "not_found"]

# What an import that needs a GPU dies of: a CPU build of torch, no driver, no driver library.
_NO_GPU = ("not compiled with CUDA", "NVIDIA driver", "libcuda.so")


def not_found() -> FlashInferNotFoundError:
    version = installed_distributions((DISTRIBUTION,)).get(DISTRIBUTION)
    alone = version is not None and package_folder() is None and "flashinfer" not in sys.modules
    metadata = f", only the metadata of {DISTRIBUTION} {version}" if alone else ""
    forced = "--force-reinstall " if alone else ""
    return FlashInferNotFoundError(
        "FlashInfer is not installed.",
        found=f"no module flashinfer for {sys.executable}{metadata}.",
        needed=f"{DISTRIBUTION} {ROWS['native_dcp'].since} or newer for native DCP, "
        f"{OLDEST_RELEASE} or newer without.",
        fix=f'pip install {forced}"{DISTRIBUTION}>={ROWS["native_dcp"].since}", or '
        'decode_mla(backend="reference") in tests.',
        argument="flashinfer",
    )


def function_gone(where: str, version: str) -> FlashInferSignatureError:
    return FlashInferSignatureError(
        f"FlashInfer has no {FUNCTION}.",
        found=f"flashinfer {version} at {where}, without the function.",
        needed=f"{DISTRIBUTION} {OLDEST_RELEASE} to the newest release this package knows.",
        fix=f'pip install --force-reinstall "{DISTRIBUTION}>={ROWS["native_dcp"].since}", or '
        "report the new release.",
        argument=FUNCTION,
    )


def import_failure(exc: Exception) -> FlashInferImportError:
    """Say why importing an installed FlashInfer failed, and what mends that cause."""
    installed = installed_distributions((DISTRIBUTION, *COMPANIONS))
    versions = ", ".join(f"{name} {version}" for name, version in installed.items())
    try:
        words = " ".join(str(exc).split())
    except Exception:  # noqa: BLE001  # as the traceback module
        words = "<exception str() failed>"
    text = f"{type(exc).__name__}: {words}"
    needed = "a FlashInfer that imports on this machine."
    if "does not match flashinfer" in text:
        version = installed.get(DISTRIBUTION, "X")
        names = [name for name in COMPANIONS if name in installed or name in text]
        pinned = " ".join(f'"{name}=={version}"' for name in (DISTRIBUTION, *names))
        needed = (
            "companion wheels of the same version as flashinfer-python "
            f"({ROWS['companions_may_differ'].since} and newer ignore others, with a warning)."
        )
        fix = (
            f"pip install -U {pinned} (the companion wheels are on FlashInfer's own package "
            f"index, not all on PyPI), or pip uninstall {' '.join(names)}."
        )
    elif any(sign in text for sign in _NO_GPU):
        since = ROWS["imports_without_cuda"].since
        needed = "a CUDA build of torch and a GPU driver."
        fix = "run on a machine with a GPU."
        release = parse_version(installed.get(DISTRIBUTION, ""))
        if release is None or not carries(release, ROWS["imports_without_cuda"]):
            needed = f"a CUDA build of torch and a GPU driver, or {since} or newer."
            fix = f'pip install -U "{DISTRIBUTION}>={since}", or {fix}'
    elif "cutlass" in text:
        needed = "the nvidia-cutlass-dsl that this FlashInfer was built for."
        fix = (
            f"{upgrade_command(None, ROWS['native_dcp'].since)} nvidia-cutlass-dsl, or install the "
            "nvidia-cutlass-dsl of its time (Requires-Dist in its metadata names the oldest)."
        )
    else:
        fix = "mend what it says, or reinstall: pip install --force-reinstall flashinfer-python."
    return FlashInferImportError(
        "FlashInfer is installed, but importing it fails.",
        found=f"{text} ({versions or 'no distribution metadata'}).",
        needed=needed,
        fix=fix,
        argument="flashinfer",
    )
