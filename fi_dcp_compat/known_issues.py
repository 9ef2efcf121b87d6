"""Known-bad releases: what goes wrong in which, and what is done about it here.

What a call gets wrong by itself is refused or kept from happening. What hangs on other calls or on
values that are not looked at runs, with a warning once where the configuration tells, or is only
listed. Evidence is written as in `features`, the public thread first.
"""

from __future__ import annotations

import sys
import warnings
from typing import Literal, NamedTuple

from packaging.version import Version

from .abi import FlashInferABI
from .errors import FlashInferCompatWarning
from .releases import drift

__all__ = ["KNOWN_ISSUES", "KnownIssue", "issues_of", "warn_of"]


class KnownIssue(NamedTuple):
    """One row: a fault of some releases.

    Attributes
    ----------
    name : str
        Unique, by what goes wrong.
    first, last : str
        The first and the last release that has it; `last` is empty if the newest has it too.
    backends : tuple of str
        Those that it is about, "auto" where FlashInfer's own choice may meet it.
    compact : bool
        Whether compact queries meet it too.
    what : str
        What goes wrong, and for whom.
    effect : {"refused", "avoided", "warned", "noted"}
        What this package does: raises, calls FlashInfer in another way, warns when a
        configuration meets it (``fi-dcp-compat doctor`` notes it too), or only lists it.
    instead : str
        What to do about it.
    evidence : str
        Thread or pull request, and file and line.
    used_by : str
        The guard, route or report here that acts on it, ``module.function``.
    """

    name: str
    first: str
    last: str
    backends: tuple[str, ...]
    what: str
    effect: Literal["refused", "avoided", "warned", "noted"]
    instead: str
    evidence: str
    used_by: str
    compact: bool = True

    @property
    def problem(self) -> str:
        """What goes wrong and the thread about it, as messages say it."""
        return f"{self.what} ({self.evidence.partition(';')[0]})."


# fmt: off
KNOWN_ISSUES = (
    KnownIssue("no_causal_mask", "0.6.12", "0.6.12", ("cute-dsl",),
               "cute-dsl masks nothing between the query tokens of a request",
               "refused", "decode one token a request, or name trtllm-gen",
               "#3309; 0.6.12 fp16:2565, fp8:2563", "backends.cute_dsl_rules"),
    KnownIssue("moved_cute_names", "0.6.12", "0.6.12", ("cute-dsl",),
               "cute-dsl dies with nvidia-cutlass-dsl 4.8 (AttributeError: ThrMma)",
               "refused", "install the nvidia-cutlass-dsl of its time",
               "vllm#49005; 0.6.12 roles/loader_tma.py:60", "launch.call_kernel"),
    KnownIssue("shared_workspace", "0.6.12", "0.6.12", ("cute-dsl",),
               "cute-dsl writes over the counters that trtllm-gen keeps in the front of the "
               "workspace, and a trtllm-gen call on the same one may hang",
               "warned", "give cute-dsl a workspace of its own",
               "#3582; 0.6.12 launcher:225, mla_decode.py:412", "preparation.Preparation"),
    KnownIssue("companions_raise", "0.6.12", "0.7.1", ("trtllm-gen", "cute-dsl", "xqa"),
               "import flashinfer dies beside companion wheels of another version (RuntimeError: "
               "flashinfer-cubin version ... does not match flashinfer version)",
               "refused", "install companion wheels of the same version, or none",
               "vllm#49804; 0.6.12 jit/env.py:79, 0.7.1:105", "failures.import_failure"),
    KnownIssue("tensor_scale_unread", "0.6.12", "0.6.13", ("trtllm-gen", "auto"),
               "trtllm-gen reduces the KV splits of more than 32 heads without a tensor bmm1_scale",
               "refused", "pass bmm1_scale as a float",
               "0.6.13 fmhaReduction.cu:130", "backends.trtllm_gen_rules"),
    KnownIssue("counters_overrun", "0.6.12", "0.6.14", ("trtllm-gen", "auto"),
               "trtllm-gen has counters for 8192 * 256 pairs of request and head and overruns them",
               "refused", "split the batch",
               "0.6.12 launcher:225", "sizes.check_workspace"),
    KnownIssue("row_without_keys", "0.6.12", "", ("trtllm-gen", "cute-dsl", "auto"),
               "without DCP a row that sees no key is NaN or unwritten on trtllm-gen, unwritten on "
               "cute-dsl",
               "noted", "keep seq_lens at least q_len; FI_DCP_COMPAT_DEBUG=1 checks it",
               "#2883, #4975; 0.7.4 fmhaReduction.cu:148", "debug.check_values"),
    KnownIssue("split_scratch_unchecked", "0.6.12", "", ("trtllm-gen", "auto"),
               "trtllm-gen keeps its KV splits behind the rest of the workspace, of a size that "
               "nothing checks",
               "noted", "allocate 128 MiB, 256 MiB with an LSE, as stacks do",
               "0.6.12 launcher:258, 0.7.4 launcher:450", "catalogue.text"),
    KnownIssue("lse_workspace", "0.6.12", "", ("trtllm-gen", "auto"),
               "trtllm-gen needs more workspace for an LSE, and raises if it is too small",
               "refused", "allocate min_workspace_bytes(...)",
               "vllm#50781; 0.6.12 launcher:246", "sizes.check_workspace"),
    KnownIssue("compiles_in_capture", "0.6.12", "0.7.2.post1", ("cute-dsl", "auto"),
               "cute-dsl compiles inside a CUDA-graph capture without a word",
               "noted", "run the same shapes eagerly once before capturing",
               "0.7.4 mla_decode.py:280 raises", "catalogue.text"),
    KnownIssue("page_size_unchecked", "0.6.13", "0.6.13", ("trtllm-gen", "auto"),
               "trtllm-gen looks for a kernel of any page size, auto included",
               "refused", "use pages of 32 or 64 tokens, or name cute-dsl",
               "#3428; 0.6.13 core:1917, 0.6.14 core:2853", "backends.trtllm_gen_rules"),
    KnownIssue("tuner_config_leak", "0.6.13", "0.6.15", ("trtllm-gen", "cute-dsl", "auto"),
               "each uniform call adds an entry to the tuner's cache, which on 0.6.15 stalls calls "
               "for milliseconds",
               "warned", "upgrade to 0.6.15.post1 or newer",
               "#3970; 0.6.13 core:1978, 0.6.15.post1 core:2151", "preparation.Preparation",
               compact=False),
    KnownIssue("persistent_fp8_hang", "0.6.13", "0.6.15.post1", ("cute-dsl",),
               "cute-dsl may hang on fp8 with is_var_seq=False",
               "avoided", "leave is_var_seq at its default, as decode_mla does",
               "#4197; 0.6.13 fp8:1495, 0.6.16 fp8:1663", "prepared.MLADecoder"),
    KnownIssue("sliced_heads_folded", "0.6.13", "0.6.15.post1", ("cute-dsl", "auto"),
               "cute-dsl reads the wrong heads of a query whose heads are a slice of wider ones",
               "refused", "pass a contiguous query",
               "0.6.13 fp16:423, 0.6.16 mla_decode.py:547", "plans.make_plan"),
    KnownIssue("tuned_lse_fails", "0.6.13", "0.6.16.post4", ("cute-dsl", "auto"),
               "inside flashinfer.autotune() cute-dsl raises ValueError for an LSE",
               "noted", "tune without an LSE",
               "0.6.13 core:1614, 0.6.17 core:2770", "catalogue.text"),
    KnownIssue("open_lse_base", "0.6.13", "0.7.0.post1", ("auto",),
               "the tuner decides between backends whose LSE has another base",
               "avoided", "name the backend, as decode_mla does",
               "vllm#47079; 0.6.13 core:1406, 1575", "routing.route"),
    KnownIssue("tuned_lse_workspace", "0.6.13", "", ("trtllm-gen", "auto"),
               "inside flashinfer.autotune() trtllm-gen raises RuntimeError for an LSE unless the "
               "workspace holds batches of 8192",
               "noted", "tune without an LSE, or pass tuning_buckets",
               "0.6.13 core:1068, 0.7.4 core:2815", "catalogue.text"),
    KnownIssue("shared_workspace_again", "0.6.14", "0.6.14", ("cute-dsl",),
               "cute-dsl writes over the counters that trtllm-gen keeps in the front of the "
               "workspace, and a trtllm-gen call on the same one may hang",
               "warned", "give cute-dsl a workspace of its own",
               "#3582; 0.6.14 core:2418", "preparation.Preparation"),
    KnownIssue("import_reads_gpu", "0.6.14", "0.7.0.post1", ("trtllm-gen", "cute-dsl", "xqa"),
               "import flashinfer dies with a CPU build of torch (AssertionError: Torch not "
               "compiled with CUDA enabled)",
               "refused", "install a CUDA build of torch, or FlashInfer 0.7.1 or newer",
               "0.6.14 gdn_decode_bf16_state.py:2701, 0.7.0:2705", "failures.import_failure"),
    KnownIssue("compact_split_lost", "0.6.14", "0.6.17", ("trtllm-gen", "auto"),
               "trtllm-gen may drop the last KV split of a request that is shorter than max_q_len, "
               "with more than 32 heads",
               "refused", "name cute-dsl (0.6.16 or newer), or pad to a uniform query, tokens last",
               "0.6.17 fmhaReduction.cu:96, 0.6.18:98", "backends.trtllm_gen_rules"),
    KnownIssue("cuda_13_3", "0.6.16", "0.6.17", ("trtllm-gen",),
               "trtllm-gen does not compile with CUDA 13.3",
               "noted", "use CUDA 13.2 or the jit-cache wheel",
               "0.6.16 fmhaKernels.cuh:134, 0.6.18:134", "catalogue.text"),
    KnownIssue("compact_dcp", "0.6.17", "0.6.18.post1", ("cute-dsl",),
               "DCP refuses cum_seq_lens_q",
               "refused", "pad to a uniform query, each request's tokens last",
               "#4719; 0.6.18 core:2796", "guards.config_reasons"),
    KnownIssue("fp8_sm103", "0.6.17", "", ("cute-dsl",),
               "wrong fp8 results of cute-dsl on compute capability 10.3 are reported, unconfirmed",
               "noted", "compare with bf16 before relying on it",
               "#4565", "catalogue.text"),
    KnownIssue("deprecation_each_call", "0.7.2", "", ("cute-dsl",),
               "with nvidia-cutlass-dsl 4.8 each cute-dsl call emits a DeprecationWarning",
               "noted", "filter it; it is FlashInfer's",
               "0.7.2 cute_dsl/availability.py:206", "catalogue.text"),
)
# fmt: on


def issues_of(abi: FlashInferABI) -> tuple[KnownIssue, ...]:
    """Return the known issues of a release; none if its version is unknown."""
    changed = drift(abi)
    release = abi.release if changed is None else changed.nearest.release
    if release is None:
        return ()
    release = Version(release.public)
    return tuple(
        issue
        for issue in KNOWN_ISSUES
        if Version(issue.first) <= release and (not issue.last or release <= Version(issue.last))
    )


def warn_of(abi: FlashInferABI, backend: str, *, compact: bool) -> None:
    """Warn of each fault of the release that a call on `backend` meets and that is only warned of.

    Python's default filter shows each text once.
    """
    for issue in issues_of(abi):
        if issue.effect == "warned" and backend in issue.backends and compact <= issue.compact:
            text = f"{abi.describe()}: {issue.problem}\nFix: {issue.instead}."
            warnings.warn(text, FlashInferCompatWarning, stacklevel=_callers_level())


def _callers_level() -> int:
    """Count the frames up to the first outside of this package, for `warnings.warn`."""
    package = __name__.rpartition(".")[0]
    level, frame = 1, sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and frame.f_globals.get("__package__") == package:
        level, frame = level + 1, frame.f_back
    return level
