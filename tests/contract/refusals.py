"""Configurations that decode_mla refuses although the release's own host code lets them through.

Paths are those of the wheel, below ``flashinfer``; every line quoted is looked up where the
importable release has the file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from packaging.version import Version

from .refusal_cases import FP8, Case

# wrong: numbers come out and are wrong. late: C++ or CUDA raises, at the launch. undefined: what
# happens hangs on memory that nothing has set. stricter: nothing shows it wrong; the package keeps
# to what FlashInfer documents, or has one rule for two backends.
Verdict = Literal["wrong", "late", "undefined", "stricter"]

MONO = "cute_dsl/attention/monolithic"
FP16, FP8_KERNEL = f"{MONO}/mla_decode_fp16.py", f"{MONO}/mla_decode_fp8.py"
MODULAR = "cute_dsl/attention/roles/mla_compute.py"
LAUNCHER = "data/csrc/trtllm_fmha_kernel_launcher.cu"
RUNNER = "data/include/flashinfer/trtllm/fmha/fmhaRunner.cuh"
KERNELS = "data/include/flashinfer/trtllm/fmha/fmhaKernels.cuh"
REDUCTION = "data/csrc/fmhaReduction.cu"
XQA = "data/csrc/xqa/mla_sm120.cu"


class Line(NamedTuple):
    """A line of a release, and what it says."""

    release: str
    path: str
    number: int
    text: str


class Entry(NamedTuple):
    """One refusal that the host does not share: what of, on which releases, and why it stands.

    ``subjects`` are the arguments of the reasons, or the names of the inputs.
    """

    kernel: str
    subjects: tuple[str, ...]
    verdict: Verdict
    what: str
    evidence: tuple[Line | str, ...]
    since: str = "0.6.12"
    until: str | None = None
    applies: Callable[[Case], bool] = lambda case: True

    def claims(self, release: str) -> bool:
        version = Version(release)
        return Version(self.since) <= version and (
            self.until is None or version <= Version(self.until)
        )

    def covers(self, release: str, kernel: str, subject: str, case: Case) -> bool:
        return (
            kernel == self.kernel
            and subject in self.subjects
            and self.claims(release)
            and self.applies(case)
        )


def _fp8_on_11(case: Case) -> bool:
    return case.capability == (11, 0) and case.dtypes == (FP8, FP8)


# fmt: off
RUNS_BUT_WRONG = (
    Entry(
        "cute-dsl", ("cute_dsl_causal",), "wrong",
        "every query token sees the newest key: the kernel masks by length only",
        (Line("0.6.12", FP16, 2568, "if cute.elem_less("),
         Line("0.6.12", FP16, 2570, "common_params.K,"),
         "#3309"),
        until="0.6.12",
    ),
    Entry(
        "cute-dsl", ("sinks",), "wrong",
        "sinks go to the modular kernel, which masks by length only",
        (Line("0.7.4", MODULAR, 273, "common_params.K,"),
         Line("0.7.4", "mla/_batch_mla/_backends/_cute_dsl_common.py", 412,
              "_causal_multi_q = False")),
        applies=lambda case: case.q_len > 1,
    ),
    Entry(
        "cute-dsl", ("cp_kv_cache_interleave_size",), "wrong",
        "the mask takes local key k of rank r for global position W*k + r",
        (Line("0.6.17", FP16, 3123, "self.cp_world * key_pos"),
         Line("0.7.4", FP16, 2986, "self.cp_world * key_pos")),
        since="0.6.17",
    ),
    Entry(
        "cute-dsl", ("causal",), "wrong",
        "the DCP mask is causal: earlier tokens of the block do not see its later keys",
        (Line("0.7.4", "mla/_core.py", 3777, "exclusive causal bound for the newest query token"),),
        since="0.6.17",
    ),
    Entry(
        "cute-dsl", ("compute_capability",), "undefined",
        "the softmax has a branch for 10.x alone: elsewhere the scores are never read",
        (Line("0.6.12", FP16, 2562, "Arch.sm_100f"),
         Line("0.6.12", FP16, 2577, "Arch.sm_103f"),
         Line("0.7.4", FP16, 2974, "Arch.sm_100f"),
         Line("0.7.4", FP16, 3009, "_ARCH_SM107F"),
         Line("0.7.4", MODULAR, 265, "Arch.sm_100f")),
        applies=lambda case: case.capability >= (11, 0) and not _fp8_on_11(case),
    ),
    Entry(
        "cute-dsl", ("compute_capability",), "undefined",
        "nor has the fp8 kernel a branch for 11.0 yet",
        (Line("0.6.12", FP8_KERNEL, 2574, "Arch.sm_103f"),),
        until="0.6.12",
        applies=_fp8_on_11,
    ),
    Entry(
        "cute-dsl", ("compute_capability",), "stricter",
        "the fp8 kernel alone has a branch for 11.0; the package takes a GPU for all dtypes",
        (Line("0.6.13", FP8_KERNEL, 3070, "Arch.sm_110f"),),
        since="0.6.13",
        applies=_fp8_on_11,
    ),
    Entry(
        "cute-dsl", ("cute_dsl_sm107",), "undefined",
        "the softmax has no branch for 10.7 yet: the scores are never read",
        (Line("0.6.17", FP16, 3146, "Arch.sm_103f"),
         Line("0.6.17", FP8_KERNEL, 3564, "Arch.sm_103f"),
         Line("0.6.18", FP16, 3153, "_ARCH_SM107F")),
        until="0.6.17",
    ),
    Entry(
        "cute-dsl", ("query",), "late",
        "the batch is the grid's y, of which CUDA launches 65535; the host looks from 0.6.16 on",
        (Line("0.6.12", f"{MONO}/mla_helpers.py", 219,
              "params.problem_shape_b * params.problem_shape_s"),
         Line("0.6.16", f"{MONO}/mla_decode.py", 54, "grid_y > _CUDA_GRID_Y_MAX")),
        until="0.6.15.post1",
        applies=lambda case: case.batch > 65535,
    ),
    Entry(
        "cute-dsl", ("block_tables",), "undefined",
        "page numbers of the last tile beyond the table are not copied, but loaded by all the same",
        (Line("0.6.12", FP16, 1527, "mPT.shape[0]"),
         Line("0.6.12", FP16, 1840, "for k in cutlass.range(page_per_tile):"),
         Line("0.6.13", "mla/_core.py", 197, "Expected block_num % (128 / block_size) == 0")),
        until="0.6.12",
        applies=lambda case: case.extra_pages > 0 or case.page_size == 48,
    ),
    Entry(
        "trtllm-gen", ("compute_capability",), "late",
        "the C++ runner has cubins for 10.x alone",
        (Line("0.6.12", RUNNER, 37, "Unsupported architecture"),
         Line("0.7.4", RUNNER, 38, "Unsupported architecture")),
        applies=lambda case: case.capability[0] != 10,
    ),
    Entry(
        "trtllm-gen", ("trtllm_sm107",), "late",
        "the C++ runner does not know 10.7 yet",
        (Line("0.6.15", RUNNER, 37, "mSM == kSM_100 || mSM == kSM_103,"),
         Line("0.6.16", RUNNER, 37, "mSM == kSM_107")),
        until="0.6.15.post1",
    ),
    Entry(
        "trtllm-gen", ("dtype",), "late",
        "no MLA cubin for fp16, nor for a query of another dtype than the cache's",
        ("flashinfer-cubin 0.6.13: HQk576HV512 and HQk320HV256 are QkvBfloat16 and QkvE4m3",
         Line("0.6.12", LAUNCHER, 270, "Missing TRTLLM-GEN kernel ("),
         Line("0.7.4", LAUNCHER, 465, "Missing TRTLLM-GEN kernel ("),
         Line("0.7.4", "mla/_batch_mla/_backends/trtllm_gen_backend.py", 822,
              "0,  # bf16q_fp8kv_transform_mode")),
        applies=lambda case: case.dtypes not in (Case().dtypes, (FP8, FP8)),
    ),
    Entry(
        "trtllm-gen", ("num_heads",), "late",
        "the heads are no multiple of one of the tiles, 8 to 64, that the lengths choose from",
        (Line("0.6.12", KERNELS, 445, "The numHeadsQ/numHeadsKv is not supported."),
         Line("0.6.15", KERNELS, 445, "The numHeadsQ/numHeadsKv is not supported.")),
        until="0.6.15.post1",
        applies=lambda case: (case.heads > 16 and case.heads % 16 > 0) or case.heads in (80, 96),
    ),
    Entry(
        "trtllm-gen", ("num_heads",), "late",
        "above 128 the heads have to be a multiple of the tile of 64",
        (Line("0.6.16", KERNELS, 506, "The numHeadsQ/numHeadsKv is not supported."),
         Line("0.7.4", KERNELS, 688, "The numHeadsQ/numHeadsKv is not supported.")),
        since="0.6.16",
        applies=lambda case: case.heads > 128 and case.heads % 64 > 0,
    ),
    Entry(
        "trtllm-gen", ("trtllm_tensor_scales",), "wrong",
        "above 32 heads another kernel reduces the KV splits, by the host's scalar",
        (Line("0.6.13", REDUCTION, 130, "params.mScaleSoftmaxLog2"),
         Line("0.6.14", REDUCTION, 131, "params.ptrScaleSoftmaxLog2")),
        until="0.6.13",
        applies=lambda case: case.heads > 32 and case.tensor_scales,
    ),
    Entry(
        "trtllm-gen", ("trtllm_compact_splits",), "wrong",
        "above 32 heads another kernel reduces the KV splits, by the longest query's mask for all",
        (Line("0.6.17", REDUCTION, 96, "(params.mMaxSeqLenQ - 1) - ctaIdxQ"),
         Line("0.6.18", REDUCTION, 98, "Use the per-batch seqLenQ")),
        since="0.6.14", until="0.6.17",
        applies=lambda case: case.heads > 32 and case.compact,
    ),
    Entry(
        "trtllm-gen", ("page_size",), "late",
        "no MLA cubin for such pages; 0.6.13 has lost the host's check",
        (Line("0.6.13", LAUNCHER, 270, "Missing TRTLLM-GEN kernel ("), "#3428"),
        since="0.6.13", until="0.6.13",
        applies=lambda case: case.page_size not in (16, 32, 64),
    ),
    Entry(
        "trtllm-gen", ("page_size",), "late",
        "no MLA cubin for such pages; compact queries do not meet the host's check before 0.6.16",
        (Line("0.6.14", LAUNCHER, 270, "Missing TRTLLM-GEN kernel ("),
         Line("0.6.15", LAUNCHER, 285, "Missing TRTLLM-GEN kernel (")),
        since="0.6.14", until="0.6.15.post1",
        applies=lambda case: case.compact and case.page_size not in (16, 32, 64),
    ),
    Entry(
        "trtllm-gen", ("page_size",), "stricter",
        "cubins for pages of 16 exist, but each host that looks refuses them",
        ("flashinfer-cubin 0.6.13: PagedKvDenseP16",
         Line("0.6.14", "mla/_core.py", 2855, "trtllm-gen requires block_size in (32, 64)")),
        since="0.6.13", until="0.6.15.post1",
        applies=lambda case: case.page_size == 16,
    ),
    Entry(
        "xqa", ("bmm1_scale",), "wrong",
        "the host multiplies a tensor by log2(e), and so does the kernel",
        (Line("0.6.12", "mla/_core.py", 1176, "bmm1_scale = bmm1_scale * log2e"),
         Line("0.6.12", XQA, 464, "args.qScale * args.kvCacheScale * log2e")),
        until="0.6.12",
    ),
    Entry(
        "xqa", ("bmm1_scale",), "stricter",
        "FlashInfer documents a float, though the kernel would read a tensor",
        (Line("0.7.4", "mla/_core.py", 3628, "XQA, and SM120/SM121 sparse v32/GLM require a"),
         Line("0.7.4", XQA, 1651, "qScalePtr != nullptr")),
        since="0.6.13",
    ),
)
# fmt: on
