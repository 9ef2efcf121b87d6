"""The feature table: which FlashInfer release brought what, and how one knows.

Guards, routes, messages and the command line read these rows; nothing else names a release.
Evidence names a file and line of a release's wheel: core is mla/_core.py, fp16 and fp8 are
cute_dsl/attention/monolithic/mla_decode_fp16.py and _fp8.py, launcher is
trtllm_fmha_kernel_launcher.cu; #N is a FlashInfer pull request.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from .limits import INTERLEAVE_SIZES, LSE_BASES, LseBase

__all__ = ["FEATURES", "FIRST_RELEASE", "OLDEST_RELEASE", "Feature", "Features", "LseBase"]


class Feature(NamedTuple):
    """One row of the table: what a release can do, since when, and how one knows.

    Attributes
    ----------
    name : str
        A field of `Features`.
    since : str
        The first release that has it, and has kept it.
    keywords : tuple of str
        The parameters that show it; empty if no signature does.
    what : str
        What it is, as messages say it.
    evidence : str
        Where the row comes from; messages show it up to the semicolon.
    used_by : str
        The guard, route or report here that acts on it, ``module.function``.
    earlier : tuple of (str, str)
        First and last of the releases that had it and lost it again.
    """

    name: str
    since: str
    keywords: tuple[str, ...]
    what: str
    evidence: str
    used_by: str
    earlier: tuple[tuple[str, str], ...] = ()


DCP_KEYWORDS = ("enable_dcp", "cp_world", "cp_rank", "causal_seqlens_kv_global")

# fmt: off
FEATURES = (
    Feature("kv_cache_3d", "0.6.1", (),
            "caches of [num_pages, page_size, D]",
            "0.6.1 mla.py:80; 0.6.0:78 raises",
            "forwarding.forward"),
    Feature("skip_softmax", "0.6.4", ("skip_softmax_threshold_scale_factor",),
            "skip-softmax threshold",
            "0.6.4 mla.py:537",
            "dropin_guards.release_reasons"),
    Feature("separate_kv_idx", "0.6.7", ("uses_shared_paged_kv_idx",),
            "block tables of keys and values apart",
            "0.6.7 mla.py:610",
            "dropin_guards.release_reasons"),
    Feature("out_4d", "0.6.8", (),
            "output buffers of [B, q_len, H, kv_lora_rank]",
            "0.6.8 core:758; 0.6.7 mla.py:749 takes [B, H, kv_lora_rank]",
            "forwarding.forward"),
    Feature("cute_dsl", "0.6.8", (),
            "cute-dsl backend",
            "0.6.8 core:801; 0.6.7 mla.py raises",
            "dropin_guards.release_reasons"),
    Feature("is_var_seq", "0.6.8", ("is_var_seq",),
            "promise of equal lengths",
            "0.6.8 core:610",
            "dropin_guards.release_reasons"),
    Feature("return_lse", "0.6.12", ("lse", "return_lse"),
            "LSE",
            "#3116; 0.6.12 core:1273",
            "guards.config_reasons"),
    Feature("cute_dsl_impl", "0.6.12", ("cute_dsl_impl",),
            "choice of the cute-dsl kernel",
            "0.6.12 core:1076",
            "dropin_guards.release_reasons"),
    Feature("cute_dsl_lse", "0.6.13", (),
            "LSE from cute-dsl",
            "#3309; 0.6.13 fp16:1459, 0.6.12 core:1379 raises",
            "backends.cute_dsl_rules"),
    Feature("cute_dsl_causal", "0.6.13", (),
            "causal mask between query tokens on cute-dsl",
            "#3309; 0.6.12 fp16:2565 masks by length only",
            "backends.cute_dsl_rules"),
    Feature("cute_dsl_bf16_out", "0.6.13", (),
            "bf16 output for fp16 queries",
            "0.6.13 core:1859",
            "plans.make_plan"),
    Feature("auto_tunes", "0.6.13", (),
            "tuned choice between trtllm-gen and cute-dsl",
            "0.6.13 core:1920",
            "routing.route"),
    Feature("lse_3d", "0.6.13", (),
            "LSE buffers of [B, q_len, H]",
            "0.6.13 core:1884; 0.6.12 core:1279 raises",
            "testing.mock_kernel"),
    Feature("trtllm_tensor_scales", "0.6.14", (),
            "tensor bmm1_scale in the reduction of KV splits",
            "0.6.14 fmhaReduction.cu:130; 0.6.13:130 takes the host's scalar",
            "backends.trtllm_gen_rules"),
    Feature("uint8_workspace", "0.6.14", (),
            "uint8 workspace on cute-dsl",
            "0.6.14 mla_decode.py:442; 0.6.13:440 asserts int8",
            "sizes.check_workspace"),
    Feature("compact_queries", "0.6.14", ("cum_seq_lens_q", "max_q_len"),
            "compact variable-length queries",
            "0.6.14 core:2861",
            "backends.trtllm_gen_rules"),
    Feature("kv_scale_format", "0.6.14", ("kv_scale_format",),
            "scale formats of packed caches",
            "0.6.14 core:2553",
            "dropin_guards.release_reasons"),
    Feature("sparse_backend", "0.6.14", (),
            "sparse backend",
            "0.6.14 core:2810; 0.6.13 core:1823",
            "dropin_guards.release_reasons"),
    Feature("counters_apart", "0.6.15", (),
            "counters outside the workspace on trtllm-gen",
            "#3582; 0.6.15 launcher:237, 0.6.12 launcher:225",
            "sizes.min_workspace_bytes"),
    Feature("cute_dsl_long_q", "0.6.15", (),
            "query lengths above 4 on cute-dsl",
            "#3664; 0.6.15 core:2123, 0.6.14 mla_config.py:179",
            "backends.cute_dsl_rules"),
    Feature("counter_buffer", "0.6.15", ("multi_ctas_kv_counter_buffer",),
            "caller-owned counter buffer",
            "#3582; 0.6.15 core:2209",
            "routing.route"),
    Feature("cute_dsl_compact_queries", "0.6.16", (),
            "compact variable-length queries on cute-dsl",
            "0.6.16 core:3133; 0.6.15 core:2926 raises",
            "backends.cute_dsl_rules"),
    Feature("cute_dsl_sliced_heads", "0.6.16", (),
            "queries whose heads are a slice of wider ones on cute-dsl",
            "0.6.16 mla_decode.py:547; 0.6.13 fp16:423 reads across the gap",
            "plans.make_plan",
            (("0.6.12", "0.6.12"),)),
    Feature("trtllm_padded_heads", "0.6.16", (),
            "padded head tiles on trtllm-gen",
            "0.6.16 fmhaKernels.cuh:672",
            "backends.trtllm_gen_rules"),
    Feature("trtllm_sm107", "0.6.16", (),
            "trtllm-gen kernels for 10.7",
            "0.6.16 fmhaRunner.cuh:37",
            "backends.trtllm_gen_rules"),
    Feature("native_table_width", "0.6.16", (),
            "free table width on trtllm-gen",
            "#3916; 0.6.16 core:703",
            "backends.trtllm_gen_rules"),
    Feature("native_dcp", "0.6.17", DCP_KEYWORDS,
            "native DCP keywords",
            "#4178; 0.6.17 core:2146",
            "abi.missing_dcp"),
    Feature("sparse_top_k_lens", "0.6.17", ("sparse_mla_top_k_lens",),
            "lengths of sparse MLA's top k",
            "0.6.17 core:2929",
            "dropin_guards.release_reasons"),
    Feature("trtllm_compact_splits", "0.6.18", (),
            "reduction of KV splits request by request",
            "0.6.18 fmhaReduction.cu:98; 0.6.17:96 takes the longest",
            "backends.trtllm_gen_rules"),
    Feature("cute_dsl_sm107", "0.6.18", (),
            "cute-dsl kernels for 10.7",
            "0.6.18 mla_decode_fp16.py:3153; 0.6.17:3146 stops at sm_103f",
            "backends.cute_dsl_rules"),
    Feature("fp16_softmax", "0.6.18", ("use_fp16_softmax",),
            "FP16 softmax on compute capability 10.7",
            "0.6.18 core:3534",
            "dropin_guards.release_reasons"),
    Feature("jit_cache_exact", "0.7.0", (),
            "whole comparison of the jit-cache wheel's version",
            "0.7.0 jit/env.py:148",
            "doctor.diagnose"),
    Feature("varlen_dcp", "0.7.0", (),
            "compact variable-length queries with DCP",
            "#4719; 0.7.0 core:2654, 0.6.18 core:2796 raises",
            "guards.config_reasons"),
    Feature("imports_without_cuda", "0.7.1", (),
            "import on a CPU build of torch",
            "gdn_decode_bf16_state.py, 0.6.8:2262 to 0.7.0:2705, reads the GPU at import",
            "failures.import_failure",
            (("0.6.0", "0.6.7.post3"), ("0.6.12", "0.6.13"))),
    Feature("return_lse_base", "0.7.1", ("return_lse_base",),
            "choice of the LSE base",
            "#4485, #4650; 0.7.1 core:3819",
            "routing.route"),
    Feature("cake_backend", "0.7.1", (),
            "cake backend",
            "0.7.1 core:3882",
            "dropin_guards.release_reasons"),
    Feature("companions_may_differ", "0.7.2", (),
            "import beside companion wheels of another version",
            "0.7.2 jit/env.py:119 warns, 0.7.1:105 raises",
            "failures.import_failure"),
    Feature("max_seq_len_compiles", "0.7.2", (),
            "compile key with max_seq_len",
            "0.7.2 mla_decode.py:841",
            "launch.call_kernel"),
    Feature("splits_48", "0.7.2", (),
            "48 KV splits on cute-dsl",
            "0.7.2 mla_decode.py:46",
            "sizes.min_workspace_bytes"),
    Feature("splits_128", "0.7.2.post1", (),
            "128 KV splits on cute-dsl",
            "0.7.2.post1 mla_decode.py:102",
            "sizes.min_workspace_bytes"),
)
# fmt: on

FIRST_RELEASE: Mapping[str, str] = MappingProxyType(
    {keyword: row.since for row in FEATURES for keyword in row.keywords}
)
ROWS: Mapping[str, Feature] = MappingProxyType({row.name: row for row in FEATURES})
OLDEST_RELEASE = ROWS["return_lse"].since  # of what decode_mla runs on


class Features(NamedTuple):
    """What a release can do: one field a row of `FEATURES`, and what follows from them."""

    kv_cache_3d: bool
    skip_softmax: bool
    separate_kv_idx: bool
    out_4d: bool
    cute_dsl: bool
    is_var_seq: bool
    return_lse: bool
    cute_dsl_impl: bool
    cute_dsl_lse: bool
    cute_dsl_causal: bool
    cute_dsl_bf16_out: bool
    auto_tunes: bool
    lse_3d: bool
    trtllm_tensor_scales: bool
    uint8_workspace: bool
    compact_queries: bool
    kv_scale_format: bool
    sparse_backend: bool
    counters_apart: bool
    cute_dsl_long_q: bool
    counter_buffer: bool
    cute_dsl_compact_queries: bool
    cute_dsl_sliced_heads: bool
    trtllm_padded_heads: bool
    trtllm_sm107: bool
    native_table_width: bool
    native_dcp: bool
    sparse_top_k_lens: bool
    trtllm_compact_splits: bool
    cute_dsl_sm107: bool
    fp16_softmax: bool
    jit_cache_exact: bool
    varlen_dcp: bool
    imports_without_cuda: bool
    return_lse_base: bool
    cake_backend: bool
    companions_may_differ: bool
    max_seq_len_compiles: bool
    splits_48: bool
    splits_128: bool

    @property
    def lse_base(self) -> Mapping[str, LseBase | None]:
        """Base of the LSE each backend returns when none is named; None: it returns no LSE."""
        has = {"trtllm-gen": self.return_lse, "cute-dsl": self.cute_dsl_lse, "xqa": False}
        return MappingProxyType({name: LSE_BASES[name] if has[name] else None for name in has})

    @property
    def interleave_sizes(self) -> tuple[int, ...]:
        """The ``cp_kv_cache_interleave_size`` values that the native DCP mask covers."""
        return INTERLEAVE_SIZES

    @property
    def native_interleave(self) -> bool:
        """Whether the mask covers a value above 1; in no release to 0.7.4."""
        return max(self.interleave_sizes) > 1
