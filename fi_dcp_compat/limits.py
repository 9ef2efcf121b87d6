"""What each backend takes, in every release from 0.6.12 to the newest recorded one.

What one release has and another has not is in `features`; guards, routes, messages and the
command line read both.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

__all__ = ["LIMITS", "Limit", "LseBase"]

LseBase = Literal["e", "2"]

CUTE_DSL_PAGE_SIZES = (2, 4, 8, 16, 32, 64, 128)
CUTE_DSL_DTYPES = ("bfloat16", "float16", "float8_e4m3fn")
CUTE_DSL_DIMS = ((512, 64),)
CUTE_DSL_MAX_HEADS = 128
# More where the release takes long queries.
CUTE_DSL_SHORT_Q_LEN = 4
CUTE_DSL_MAX_Q_LEN_WITH_SINKS = 1
CUTE_DSL_WORKSPACE_DTYPES = ("int8",)
# Rows of (query token, head) in one tile of the cute-dsl kernel, and CUDA's limit on tiles.
CUTE_DSL_TILE_ROWS = 128
GRID_Y_MAX = 65535
# Block tables hold whole tiles of keys.
TABLE_TOKENS = 128

TRTLLM_GEN_PAGE_SIZES = (32, 64)
TRTLLM_GEN_DTYPES = ("bfloat16", "float8_e4m3fn")
TRTLLM_GEN_DIMS = ((512, 64), (256, 64))
TRTLLM_GEN_HEAD_TILES = (8, 16, 64)
# Above as many heads a second kernel reduces the KV splits.
TRTLLM_GEN_FUSED_HEADS = 32
# 8192 * 256 int32 counters, in the front of the workspace where they are not apart.
TRTLLM_GEN_COUNTER_BYTES = 8192 * 256 * 4

XQA_PAGE_SIZES = (16, 32, 64, 128)
XQA_DTYPES = ("bfloat16", "float8_e4m3fn")
XQA_DIMS = ((512, 64),)
XQA_HEADS = 128
XQA_MAJORS = (12,)
XQA_MAX_Q_LEN = 1

# Heads that each backend but xqa takes in every release.
FEW_HEADS = 8

# GPUs that cute-dsl and trtllm-gen have kernels for in every release; 10.7 came later.
BLACKWELL = ((10, 0), (10, 3))
# What auto may run, by the major compute capability, the one it takes untuned first.
AUTO_BACKENDS: Mapping[int, tuple[str, ...]] = MappingProxyType(
    {10: ("trtllm-gen", "cute-dsl"), 12: ("xqa",)}
)
LSE_BASES: Mapping[str, LseBase] = MappingProxyType(
    {"trtllm-gen": "2", "cute-dsl": "e", "sparse": "2", "cake": "2"}
)
# FlashInfer's words for them, as return_lse_base takes them.
LSE_BASE_WORDS: Mapping[LseBase, str] = MappingProxyType({"e": "basee", "2": "base2"})
INTERLEAVE_SIZES = (1,)
DCP_BACKENDS = ("cute-dsl",)


class Limit(NamedTuple):
    """One row: the values that a backend takes, and how one knows.

    Attributes
    ----------
    backend : str
        The backend; "auto" for how it chooses, "DCP" for what holds with DCP.
    what : str
        What the values are.
    values : tuple
        Those that it takes.
    evidence : str
        File and line in a release's wheel, as in `features`.
    used_by : str
        The guard, route or report here that acts on it, ``module.function``.
    """

    backend: str
    what: str
    values: tuple[object, ...]
    evidence: str
    used_by: str


# fmt: off
LIMITS = (
    Limit("auto", "on compute capability 10.x, the first untuned", AUTO_BACKENDS[10],
          "0.6.12 core:1169; 0.6.13 core:1920; 0.7.4 core:3899", "guards.candidates"),
    Limit("auto", "on compute capability 12.x", AUTO_BACKENDS[12],
          "0.6.12 core:1169; 0.7.4 core:3899", "guards.candidates"),
    Limit("auto", "FlashInfer's own goes to cute-dsl from 0.6.14 on",
          ("pages not of 32 or 64 tokens",), "0.6.14 core:2752, 2853", "routing.route"),
    Limit("auto", "FlashInfer's own goes to cute-dsl from 0.6.16 on",
          ("65 to 127 heads", "compact queries with an LSE"),
          "0.6.16 core:3041, 3102", "routing.route"),
    Limit("DCP", "interleave sizes", INTERLEAVE_SIZES,
          "0.6.17 fp16:3123: key k of rank r is W*k + r", "config.interleave_reason"),
    Limit("DCP", "backends", DCP_BACKENDS,
          "0.6.17 core:2235", "guards.candidates"),
    Limit("cute-dsl", "compute capabilities", BLACKWELL,
          "0.7.4 fp16:2974 has no branch for others", "backends.cute_dsl_rules"),
    Limit("cute-dsl", "query heads, at most", (CUTE_DSL_MAX_HEADS,),
          "0.6.12 fp16:3523; 0.7.4 fp16:4068", "backends.cute_dsl_rules"),
    Limit("cute-dsl", "query tokens, at most, of old", (CUTE_DSL_SHORT_Q_LEN,),
          "0.6.14 mla_config.py:179; 0.6.15 core:2123", "backends.cute_dsl_rules"),
    Limit("cute-dsl", "page sizes", CUTE_DSL_PAGE_SIZES,
          "0.6.12 fp16:3517; 0.7.4 fp16:4062 leaves out 1", "backends.cute_dsl_rules"),
    Limit("cute-dsl", "block tables in multiples of tokens", (TABLE_TOKENS,),
          "0.6.13 core:195; 0.7.4 mla/_utils.py:147", "backends.cute_dsl_rules"),
    Limit("cute-dsl", "(kv_lora_rank, qk_rope_head_dim)", CUTE_DSL_DIMS,
          "0.6.12 fp16:3508; 0.7.4 fp16:4053", "backends.cute_dsl_rules"),
    Limit("cute-dsl", "dtypes of query and cache", CUTE_DSL_DTYPES,
          "0.6.12 fp16:3510, fp8:3482; 0.6.13 mla_decode.py:394", "backends.cute_dsl_rules"),
    Limit("cute-dsl", "workspace dtypes, of old", CUTE_DSL_WORKSPACE_DTYPES,
          "0.6.13 mla_decode.py:440", "sizes.check_workspace"),
    Limit("cute-dsl", "tiles of a launch, at most", (GRID_Y_MAX,),
          "0.6.16 mla_decode.py:44; CUDA's grid.y", "backends.cute_dsl_rules"),
    Limit("cute-dsl", "query tokens with sinks, at most", (CUTE_DSL_MAX_Q_LEN_WITH_SINKS,),
          "0.7.4 _cute_dsl_common.py:412: modular, no causal mask", "backends.cute_dsl_rules"),
    Limit("cute-dsl", "base of the LSE", (LSE_BASES["cute-dsl"],),
          "0.6.13 fp16:1459, fp8:1689", "routing.route"),
    Limit("trtllm-gen", "compute capabilities", BLACKWELL,
          "0.6.12 fmhaRunner.cuh:37", "backends.trtllm_gen_rules"),
    Limit("trtllm-gen", "head tiles", TRTLLM_GEN_HEAD_TILES,
          "0.6.12 fmhaKernels.cuh:441, 691; 0.6.16 core:3042", "backends.trtllm_gen_rules"),
    Limit("trtllm-gen", "query heads above which KV splits are reduced apart",
          (TRTLLM_GEN_FUSED_HEADS,), "0.6.14 fmhaKernels.cuh:691", "backends.trtllm_gen_rules"),
    Limit("trtllm-gen", "page sizes", TRTLLM_GEN_PAGE_SIZES,
          "0.6.12 core:1234; 0.7.4 trtllm_gen_backend.py:986", "backends.trtllm_gen_rules"),
    Limit("trtllm-gen", "(kv_lora_rank, qk_rope_head_dim)", TRTLLM_GEN_DIMS,
          "0.6.12 core:94; 0.7.4 mla/_utils.py:40", "backends.trtllm_gen_rules"),
    Limit("trtllm-gen", "dtypes of query and cache", TRTLLM_GEN_DTYPES,
          "flashinfer-cubin 0.6.13; 0.6.12 launcher:270", "backends.trtllm_gen_rules"),
    Limit("trtllm-gen", "bytes of counters in the workspace, of old", (TRTLLM_GEN_COUNTER_BYTES,),
          "0.6.12 launcher:225", "sizes.min_workspace_bytes"),
    Limit("trtllm-gen", "base of the LSE", (LSE_BASES["trtllm-gen"],),
          "0.6.12 lse.cuh:46", "routing.route"),
    Limit("xqa", "compute capability, major", XQA_MAJORS,
          "0.6.12 jit/xqa.py:188; 0.7.4 core:4314", "backends.xqa_rules"),
    Limit("xqa", "query tokens, at most", (XQA_MAX_Q_LEN,),
          "0.6.12 core:1195", "backends.xqa_rules"),
    Limit("xqa", "query heads", (XQA_HEADS,),
          "0.6.12 xqa.py:525; 0.7.4 xqa.py:623", "backends.xqa_rules"),
    Limit("xqa", "page sizes", XQA_PAGE_SIZES,
          "0.6.12 jit/xqa.py:165; 0.7.4 jit/xqa.py:209", "backends.xqa_rules"),
    Limit("xqa", "(kv_lora_rank, qk_rope_head_dim)", XQA_DIMS,
          "0.6.12 jit/xqa.py:148", "backends.xqa_rules"),
    Limit("xqa", "dtypes of query and cache", XQA_DTYPES,
          "0.6.12 jit/xqa.py:150", "backends.xqa_rules"),
    Limit("sparse", "base of the LSE, as documented", (LSE_BASES["sparse"],),
          "0.7.4 core:3702", "forwarding.forward"),
    Limit("cake", "base of the LSE, whatever return_lse_base says", (LSE_BASES["cake"],),
          "0.7.1 core:3882 leaves the keyword unread", "forwarding.forward"),
)
# fmt: on
