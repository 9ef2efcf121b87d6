"""FlashInfer imports and has its function; which release it is, is the question."""

from __future__ import annotations

import json

from fi_dcp_compat.abi import FUNCTION
from tests.zoo.installation import (
    CUTLASS,
    LACKING,
    Fault,
    Installation,
    Machine,
    Reason,
    beside,
    gone,
    install,
    no_native_dcp,
)

__all__ = ["VERSIONS"]

ASSUME = "FI_DCP_COMPAT_ASSUME_VERSION"
# What an interrupted upgrade leaves, in the order in which a file system may list it.
IN_ORDER = "import os\nlistdir = os.listdir\nos.listdir = lambda at: sorted(listdir(at))\n"
REVERSED = IN_ORDER.replace("(listdir(at))", "(listdir(at), reverse=True)")


def without_version(machine: Machine, distribution: str | None) -> None:
    install(machine.site, None, distribution=distribution)
    machine.site.write("flashinfer/__init__.py", "")
    (machine.site.folder / "flashinfer/version.py").unlink()


def no_string(machine: Machine) -> None:
    install(machine.site, None, distribution="0.7.4")
    machine.site.write("flashinfer/version.py", "__version__ = (0, 7, 4)\n")


def editable(machine: Machine) -> None:
    beside(machine.site)
    machine.site.distribution("flashinfer-python", "0.7.4")
    direct = {"dir_info": {"editable": True}, "url": "file:///checkout"}
    name = "flashinfer_python-0.7.4.dist-info/direct_url.json"
    machine.site.write(name, json.dumps(direct))
    install(machine.checkout, None, distribution=None)


def two_distributions(machine: Machine) -> None:
    install(machine.site)
    machine.site.distribution("flashinfer-python", "0.6.16", f"{CUTLASS}>=9")


def before_all_records(machine: Machine) -> None:
    install(machine.site, "0.2.8", like="0.6.0")
    machine.site.write("flashinfer/mla.py", "")
    machine.site.write(
        "flashinfer/decode.py",
        f"def {FUNCTION}(\n    query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank,\n"
        "    qk_rope_head_dim, block_tables, seq_lens, block_size, max_seq_len, scale,\n"
        "    out=None, bmm1_scale=1.0,\n):\n    return None\n",
    )


def doctors(fault: Fault) -> list[Reason]:
    """The doctor's reason for what a call with DCP raises."""
    problem = fault.reason.problem.replace("decode_mla(dcp=...)", "Native DCP")
    return [Reason(problem, fault.fix.replace(", or call with dcp=None", ""))]


def other_parameters(what: str) -> Fault:
    return Fault(
        "FlashInferSignatureError",
        f"{FUNCTION} {what}.",
        "flashinfer-python 0.2.8: (query, kv_cache, workspace_buffer, qk_nope_head_dim, "
        "kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens, block_size, max_seq_len, scale, "
        "out, bmm1_scale).",
        "the parameters of a recorded release, and no further required ones.",
        "install a flashinfer-python that fi-dcp-compat records, or update fi-dcp-compat.",
    )


OLDER = ", or call fi_dcp_compat.dropin, which hands older releases what they take"


def no_lse(version: str, older: str = OLDER) -> Fault:
    return Fault(
        "FlashInferVersionError",
        "decode_mla needs FlashInfer's LSE.",
        f"flashinfer-python {version}, whose function lacks lse, return_lse.",
        "0.6.12 or newer (#3116).",
        f'pip install -U "flashinfer-python>=0.6.12"{older}.',
    )


NO_VERSION = Fault(
    "InvalidInputError",
    f"{ASSUME} is not a version.",
    f"{ASSUME}='latest'.",
    "a release of flashinfer-python, for example 0.7.4.",
    f"unset {ASSUME}, or set it to the release the installed code stands for.",
)
BACKPORT = no_native_dcp("0.6.16", found=f"which carries {LACKING} but is older")._replace(
    fix='pip install -U "flashinfer-python>=0.6.17", or set FI_DCP_COMPAT_ASSUME_VERSION to the '
    "release whose behaviour was ported, or call with dcp=None."
)
LOCAL = "0.7.4+cu130.local"
NIGHTLY = "0.6.16.dev20260730"
OLD_NIGHTLY = "0.6.16.dev20260601"


def lacking(
    name: str, version: str, like: str = "0.6.16", *, described: str | None = None
) -> Installation:
    """A release without the keywords."""
    fault = no_native_dcp(version if described is None else described)
    return Installation(
        name,
        lambda machine: install(machine.site, version, like=like),
        dcp=fault,
        version=version,
        native_dcp=False,
        reasons=doctors(fault),
    )


VERSIONS = (
    Installation("0.7.4 as it should be", lambda machine: install(machine.site)),
    Installation("no metadata", lambda machine: install(machine.site, distribution=None)),
    Installation("no __version__", lambda machine: without_version(machine, "0.7.4")),
    # Judged by its signature.
    Installation(
        "neither metadata nor __version__",
        lambda machine: without_version(machine, None),
        version="unknown",
    ),
    Installation("a __version__ that is no string", no_string),
    Installation(
        "metadata newer than __version__",
        lambda machine: install(machine.site, "0.6.16", like="0.6.16", distribution="0.7.4"),
        dcp=no_native_dcp("0.6.16"),
        version="0.6.16",
        native_dcp=False,
        reasons=doctors(no_native_dcp("0.6.16")),
    ),
    Installation(
        "metadata older than __version__",
        lambda machine: install(machine.site, distribution="0.6.16"),
    ),
    Installation(
        "a version that is garbage",
        lambda machine: install(machine.site, "main-abc123", distribution=None),
        version="main-abc123",
    ),
    Installation(
        "a source tree without generated metadata",
        lambda machine: install(machine.site, None, distribution=None),
        version="0.0.0+unknown",
        static_version="unknown",
    ),
    Installation(
        "an older source tree without generated metadata",
        lambda machine: install(machine.site, None, like="0.6.16", distribution=None),
        dcp=no_native_dcp("of unknown version (0.0.0+unknown)"),
        version="0.0.0+unknown",
        static_version="unknown",
        native_dcp=False,
        reasons=doctors(no_native_dcp("of unknown version (unknown)")),
        live_reasons=doctors(no_native_dcp("of unknown version (0.0.0+unknown)")),
    ),
    Installation("an editable install without generated metadata", editable),
    Installation("two dist-infos, the stale one first", two_distributions, prelude=IN_ORDER),
    Installation("two dist-infos, the stale one last", two_distributions, prelude=REVERSED),
    lacking("0.6.16", "0.6.16"),
    lacking(
        "a nightly without the keywords",
        OLD_NIGHTLY,
        described=f"{OLD_NIGHTLY} (a pre-release, judged by its signature)",
    ),
    lacking("0.6.11, without an LSE", "0.6.11", "0.6.11")._replace(plain=no_lse("0.6.11")),
    Installation(
        "0.2.8, older than any record",
        before_all_records,
        # It is in flashinfer/decode.py there, which is not read.
        static=gone("0.2.8"),
        plain=no_lse("0.2.8", older=""),
        dcp=no_native_dcp("0.2.8"),
        also=[
            other_parameters("has lost bmm2_scale, backend"),
            other_parameters("newly requires block_size, scale"),
        ],
        version="0.2.8",
        native_dcp=False,
        live_reasons=doctors(no_native_dcp("0.2.8")),
    ),
    Installation(
        "a pre-release",
        lambda machine: install(machine.site, "0.6.17rc1", like="0.6.17"),
        version="0.6.17rc1",
    ),
    Installation(
        "a nightly with the keywords",
        lambda machine: install(machine.site, NIGHTLY, like="0.6.17"),
        version=NIGHTLY,
    ),
    Installation("a local build", lambda machine: install(machine.site, LOCAL), version=LOCAL),
    Installation(
        "a backport",
        lambda machine: install(machine.site, "0.6.16", like="0.6.17"),
        dcp=BACKPORT,
        version="0.6.16",
        native_dcp=False,
        reasons=doctors(BACKPORT),
    ),
    Installation(
        "a backport that is said to be 0.6.17",
        lambda machine: install(machine.site, "0.6.16", like="0.6.17"),
        version="0.6.17",
        notes=[
            Reason(
                f"{ASSUME}=0.6.17: what is installed is taken for it.",
                f"unset {ASSUME} for the real version.",
            )
        ],
        environment={ASSUME: "0.6.17"},
    ),
    Installation(
        "an assumed version that is none",
        lambda machine: install(machine.site),
        live=NO_VERSION,
        static=NO_VERSION,
        environment={ASSUME: "latest"},
    ),
)
