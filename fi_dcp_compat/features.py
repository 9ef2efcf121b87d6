"""The feature table: which FlashInfer release brought what, and how one knows.

Guards, routes, messages and the command line read these rows; nothing else names a release.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

__all__ = ["FEATURES", "FIRST_RELEASE", "OLDEST_RELEASE", "Feature", "Features", "LseBase"]

LseBase = Literal["e", "2"]


class Feature(NamedTuple):
    """One row of the table: what a release can do, since when, and how one knows.

    Attributes
    ----------
    name : str
        A field of `Features`.
    since : str
        The first release that has it.
    keywords : tuple of str
        The parameters that show it; empty if no signature does.
    what : str
        What it is, as messages say it.
    evidence : str
        Where the row comes from.
    """

    name: str
    since: str
    keywords: tuple[str, ...]
    what: str
    evidence: str


DCP_KEYWORDS = ("enable_dcp", "cp_world", "cp_rank", "causal_seqlens_kv_global")

FEATURES = (
    Feature("return_lse", "0.6.12", ("lse", "return_lse"), "LSE", "#3116"),
    Feature("cute_dsl_lse", "0.6.13", (), "LSE from cute-dsl", "#3309"),
    Feature(
        "cute_dsl_causal",
        "0.6.13",
        (),
        "causal mask between query tokens on cute-dsl",
        "0.6.12 mla_decode_fp16.py masks by length only; #3309",
    ),
    Feature("cute_dsl_bf16_out", "0.6.13", (), "bf16 output for fp16 queries", "0.6.13 core:1859"),
    Feature(
        "auto_tunes",
        "0.6.13",
        (),
        "tuned choice between trtllm-gen and cute-dsl",
        "0.6.13 core:1774",
    ),
    Feature(
        "uint8_workspace", "0.6.14", (), "uint8 workspace on cute-dsl", "0.6.14 mla_decode.py:441"
    ),
    Feature(
        "compact_queries",
        "0.6.14",
        ("cum_seq_lens_q", "max_q_len"),
        "compact variable-length queries",
        "0.6.14 core:763",
    ),
    Feature(
        "counters_apart",
        "0.6.15",
        (),
        "counters outside the workspace on trtllm-gen",
        "#3582; 0.6.12 trtllm_fmha_kernel_launcher.cu:225",
    ),
    Feature("cute_dsl_long_q", "0.6.15", (), "query lengths above 4 on cute-dsl", "#3664"),
    Feature(
        "counter_buffer",
        "0.6.15",
        ("multi_ctas_kv_counter_buffer",),
        "caller-owned counter buffer",
        "#3582",
    ),
    Feature(
        "cute_dsl_compact_queries",
        "0.6.16",
        (),
        "compact variable-length queries on cute-dsl",
        "0.6.16 core:3057; 0.6.15 core:2926 raises",
    ),
    Feature("trtllm_padded_heads", "0.6.16", (), "padded head tiles on trtllm-gen", "#4178"),
    Feature(
        "trtllm_sm107", "0.6.16", (), "trtllm-gen kernels for 10.7", "0.6.16 fmhaRunner.cuh:37"
    ),
    Feature("native_table_width", "0.6.16", (), "free table width on trtllm-gen", "#3916"),
    Feature("native_dcp", "0.6.17", DCP_KEYWORDS, "native DCP keywords", "#4178"),
    Feature(
        "cute_dsl_sm107",
        "0.6.18",
        (),
        "cute-dsl kernels for 10.7",
        "no softmax branch for it before; 0.7.4 mla_decode_fp16.py:2974",
    ),
    Feature(
        "jit_cache_exact",
        "0.7.0",
        (),
        "whole comparison of the jit-cache wheel's version",
        "0.7.0 jit/env.py:147",
    ),
    Feature("varlen_dcp", "0.7.0", (), "compact variable-length queries with DCP", "#4719"),
    Feature(
        "imports_without_cuda",
        "0.7.1",
        (),
        "import on a CPU build of torch, for good",
        "see IMPORT_NEEDS_CUDA",
    ),
    Feature(
        "return_lse_base", "0.7.1", ("return_lse_base",), "choice of the LSE base", "#4485, #4650"
    ),
    Feature(
        "companions_may_differ",
        "0.7.2",
        (),
        "import beside companion wheels of another version",
        "0.7.2 jit/env.py warns where 0.7.1 raised",
    ),
    Feature(
        "max_seq_len_compiles",
        "0.7.2",
        (),
        "compile key with max_seq_len",
        "0.7.2 mla_decode.py reducer_max_splits",
    ),
    Feature("splits_48", "0.7.2", (), "48 KV splits on cute-dsl", "0.7.2 mla_decode.py"),
    Feature(
        "splits_128",
        "0.7.2.post1",
        (),
        "128 KV splits on cute-dsl",
        "0.7.2.post1 mla_decode.py _reducer_split_cap",
    ),
)

OLDEST_RELEASE = FEATURES[0].since

# First and last releases whose import reads the GPU's properties at module level, and dies of a
# CPU build of torch with an AssertionError (gdn_kernels/gdn_decode_bf16_state.py).
IMPORT_NEEDS_CUDA = (("0.6.8", "0.6.11.post3"), ("0.6.14", "0.7.0.post1"))

# Keywords that no row above is about; they too prove a release to one whose version is unknown.
_OTHER_KEYWORDS = {
    "cute_dsl_impl": "0.6.12",
    "kv_scale_format": "0.6.14",
    "sparse_mla_top_k_lens": "0.6.17",
    "use_fp16_softmax": "0.6.18",
}
FIRST_RELEASE: Mapping[str, str] = MappingProxyType(
    {keyword: row.since for row in FEATURES for keyword in row.keywords} | _OTHER_KEYWORDS
)
ROWS: Mapping[str, Feature] = MappingProxyType({row.name: row for row in FEATURES})


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What a release can do: one field a row of `FEATURES`, and what follows from them."""

    return_lse: bool
    cute_dsl_lse: bool
    cute_dsl_causal: bool
    cute_dsl_bf16_out: bool
    auto_tunes: bool
    uint8_workspace: bool
    compact_queries: bool
    counters_apart: bool
    cute_dsl_long_q: bool
    counter_buffer: bool
    cute_dsl_compact_queries: bool
    trtllm_padded_heads: bool
    trtllm_sm107: bool
    native_table_width: bool
    native_dcp: bool
    cute_dsl_sm107: bool
    jit_cache_exact: bool
    varlen_dcp: bool
    imports_without_cuda: bool
    return_lse_base: bool
    companions_may_differ: bool
    max_seq_len_compiles: bool
    splits_48: bool
    splits_128: bool

    @property
    def lse_base(self) -> Mapping[str, LseBase | None]:
        """Base of the LSE each backend returns when none is named; None: it returns no LSE."""
        return MappingProxyType(
            {
                "trtllm-gen": "2" if self.return_lse else None,
                "cute-dsl": "e" if self.cute_dsl_lse else None,
                "xqa": None,
            }
        )

    @property
    def interleave_sizes(self) -> tuple[int, ...]:
        """The ``cp_kv_cache_interleave_size`` values that the native DCP mask covers."""
        return (1,)

    @property
    def native_interleave(self) -> bool:
        """Whether the mask covers a value above 1; in no release to 0.7.4."""
        return max(self.interleave_sizes) > 1
