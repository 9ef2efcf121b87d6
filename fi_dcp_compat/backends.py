"""What each backend can run, release by release: one function of rules a backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from . import limits
from .abi import FlashInferABI, missing_feature
from .config import Config, refused
from .errors import Reason

__all__ = ["RULES", "arch_reason"]


def arch_reason(backend: str, capability: tuple[int, int], needed: str) -> Reason:
    """Build the reason for a GPU that the backend has no kernel for."""
    return refused(
        "compute_capability",
        f"backend={backend!r} has no kernel for compute capability "
        f"{capability[0]}.{capability[1]}.",
        f"compute capability {capability[0]}.{capability[1]}.",
        f"{needed}.",
        "run on such a GPU, or pass backend='reference' in tests.",
    )


def cute_dsl_rules(abi: FlashInferABI, config: Config) -> Iterator[Reason]:
    backend = "cute-dsl"
    yield from _arch_rule(abi, config, backend, "cute_dsl_sm107")
    yield from _dtype_rule(config, backend, limits.CUTE_DSL_DTYPES)
    yield from _dims_rule(config, backend, limits.CUTE_DSL_DIMS)
    yield from _page_rule(config, backend, limits.CUTE_DSL_PAGE_SIZES)
    if config.num_heads > limits.CUTE_DSL_MAX_HEADS:
        yield refused(
            "num_heads",
            f"backend='cute-dsl' cannot run {config.num_heads} query heads.",
            f"num_heads={config.num_heads}.",
            f"1 to {limits.CUTE_DSL_MAX_HEADS}.",
            "use more tensor-parallel ranks, a smaller DCP group, or several calls.",
        )
    if config.q_len > 1:
        yield from _feature(abi, "cute_dsl_causal", "backend='cute-dsl' with several query tokens")
    if config.q_len > limits.CUTE_DSL_SHORT_Q_LEN:
        yield from _feature(abi, "cute_dsl_long_q", f"backend='cute-dsl' with q_len={config.q_len}")
    if config.varlen:
        asked = "backend='cute-dsl' with cum_seq_lens_q"
        yield from _feature(abi, "cute_dsl_compact_queries", asked)
        if abi.features.cute_dsl_compact_queries:
            yield from _feature(abi, "compact_queries", asked)
    if config.wants_lse:
        yield from _feature(abi, "cute_dsl_lse", "backend='cute-dsl' with return_lse=True")
    if config.sinks and (config.q_len > limits.CUTE_DSL_MAX_Q_LEN_WITH_SINKS or config.varlen):
        yield refused(
            "sinks",
            "backend='cute-dsl' cannot mask several query tokens with sinks.",
            f"sinks with q_len={config.q_len}.",
            "one query token: sinks go to the modular kernel, which has no causal mask "
            "(0.7.4 _cute_dsl_common.py:412).",
            "decode one token a request, or leave sinks out.",
        )
    if config.sinks and config.return_lse:
        yield refused(
            "sinks",
            "backend='cute-dsl' returns no LSE with sinks.",
            "sinks with return_lse=True.",
            "one of the two: sinks go to the modular kernel, which has no LSE.",
            "leave one of the two out.",
        )
    yield from _argument_rule(config.skip_softmax, "skip_softmax_threshold_scale_factor", backend)
    yield from _argument_rule(config.tensor_scales, "bmm1_scale", backend, "tensor scales")
    yield from _width_rule(config, backend)
    tiles = -(-config.q_len * config.num_heads // limits.CUTE_DSL_TILE_ROWS)
    if config.batch is not None and config.batch * tiles > limits.GRID_Y_MAX:
        yield refused(
            "query",
            "backend='cute-dsl' cannot launch a batch this large.",
            f"{config.batch} requests of {tiles} query tiles, {config.batch * tiles} in all.",
            f"at most {limits.GRID_Y_MAX} (CUDA's grid.y).",
            "split the batch.",
        )


def trtllm_gen_rules(abi: FlashInferABI, config: Config) -> Iterator[Reason]:
    backend = "trtllm-gen"
    yield from _arch_rule(abi, config, backend, "trtllm_sm107")
    yield from _dtype_rule(config, backend, limits.TRTLLM_GEN_DTYPES)
    yield from _dims_rule(config, backend, limits.TRTLLM_GEN_DIMS)
    yield from _page_rule(config, backend, limits.TRTLLM_GEN_PAGE_SIZES)
    padded = abi.features.trtllm_padded_heads
    if not _tiles_heads(config.num_heads, padded):
        yield refused(
            "num_heads",
            f"backend='trtllm-gen' cannot tile {config.num_heads} query heads.",
            f"num_heads={config.num_heads} on {abi.describe()}.",
            "1 to 64, or a multiple of 64." if padded else "1 to 16, 32, 48, or a multiple of 64.",
            "pad the query to that many heads.",
        )
    splits = f"backend='trtllm-gen' with more than {limits.TRTLLM_GEN_FUSED_HEADS} heads"
    apart = config.num_heads > limits.TRTLLM_GEN_FUSED_HEADS
    if config.tensor_scales and apart:
        yield from _feature(abi, "trtllm_tensor_scales", f"{splits} and a tensor bmm1_scale")
    if config.varlen:
        yield from _feature(abi, "compact_queries", "decode_mla(cum_seq_lens_q=...)")
        if abi.features.compact_queries and apart:
            yield from _feature(abi, "trtllm_compact_splits", f"{splits} and cum_seq_lens_q")
        if config.return_lse:
            yield refused(
                "return_lse",
                "backend='trtllm-gen' returns no LSE for variable-length queries.",
                "return_lse=True with cum_seq_lens_q.",
                "one of the two.",
                "leave one of the two out, or pad to a uniform query, each request's tokens last.",
            )
    if not abi.features.native_table_width:
        yield from _width_rule(config, backend)


def _tiles_heads(num_heads: int, padded: bool) -> bool:
    # C++ asks num_heads % min(num_heads, tile) == 0 with tile 8, 16 or 64 (kernels.cuh); since
    # 0.6.16 up to 64 heads are padded to a tile (0.6.16 fmhaKernels.cuh:672).
    _, middle, largest = limits.TRTLLM_GEN_HEAD_TILES
    if num_heads > largest:
        return num_heads % largest == 0
    return padded or num_heads <= middle or num_heads % middle == 0


def xqa_rules(abi: FlashInferABI, config: Config) -> Iterator[Reason]:
    backend = "xqa"
    capability = config.compute_capability
    if capability is not None and capability[0] not in limits.XQA_MAJORS:
        yield arch_reason(backend, capability, "12.0 or 12.1")
    yield from _dtype_rule(config, backend, limits.XQA_DTYPES)
    yield from _dims_rule(config, backend, limits.XQA_DIMS)
    yield from _page_rule(config, backend, limits.XQA_PAGE_SIZES)
    yield from _width_rule(config, backend)
    if config.num_heads != limits.XQA_HEADS:
        yield refused(
            "num_heads",
            f"backend='xqa' cannot run {config.num_heads} query heads.",
            f"num_heads={config.num_heads}.",
            f"{limits.XQA_HEADS}.",
            f"gather the heads to {limits.XQA_HEADS}.",
        )
    if config.q_len > limits.XQA_MAX_Q_LEN:
        yield refused(
            "q_len",
            "backend='xqa' takes one query token a request.",
            f"q_len={config.q_len}.",
            "q_len=1.",
            "decode the tokens one at a time.",
        )
    for given, argument, what in (
        (config.return_lse, "return_lse", None),
        (config.sinks, "sinks", None),
        (config.skip_softmax, "skip_softmax_threshold_scale_factor", None),
        (config.varlen, "cum_seq_lens_q", None),
        (config.tensor_scales, "bmm1_scale", "tensor scales"),
    ):
        yield from _argument_rule(given, argument, backend, what)


def reference_rules(abi: FlashInferABI, config: Config) -> Iterator[Reason]:
    backend = "reference"
    yield from _dtype_rule(config, backend, ("bfloat16", "float16", "float8_e4m3fn", "float32"))
    yield from _argument_rule(config.skip_softmax, "skip_softmax_threshold_scale_factor", backend)


RULES: dict[str, Callable[[FlashInferABI, Config], Iterator[Reason]]] = {
    "cute-dsl": cute_dsl_rules,
    "trtllm-gen": trtllm_gen_rules,
    "xqa": xqa_rules,
    "reference": reference_rules,
}


def _arch_rule(abi: FlashInferABI, config: Config, backend: str, rubin: str) -> Iterator[Reason]:
    # FlashInfer's host lets 11.x and 12.x through to cute-dsl, whose 16-bit softmax has no branch
    # for 11.0 and leaves the scores unread; trtllm-gen is not checked at all.
    capability = config.compute_capability
    if capability is None or capability in limits.BLACKWELL:
        return
    if capability == (10, 7):
        yield from _feature(abi, rubin, f"backend={backend!r} on compute capability 10.7")
    else:
        needed = "10.0, 10.3 or 10.7" if getattr(abi.features, rubin) else "10.0 or 10.3"
        yield arch_reason(backend, capability, needed)


def _dtype_rule(config: Config, backend: str, allowed: tuple[str, ...]) -> Iterator[Reason]:
    if config.dtype != config.kv_dtype or config.dtype not in allowed:
        yield refused(
            "dtype",
            f"backend={backend!r} cannot take a {config.dtype} query on a {config.kv_dtype} cache.",
            f"query {config.dtype}, kv_cache {config.kv_dtype}.",
            f"both the same, one of {', '.join(allowed)}.",
            "cast or quantise the query to the cache's dtype."
            if config.kv_dtype in allowed
            else "keep the cache and the query in one of those.",
        )


def _dims_rule(
    config: Config, backend: str, allowed: tuple[tuple[int, int], ...]
) -> Iterator[Reason]:
    if (config.kv_lora_rank, config.qk_rope_head_dim) not in allowed:
        sizes = ", ".join(f"({rank}, {rope})" for rank, rope in allowed)
        yield refused(
            "kv_lora_rank",
            f"backend={backend!r} has no kernel for kv_lora_rank={config.kv_lora_rank}, "
            f"qk_rope_head_dim={config.qk_rope_head_dim}.",
            f"({config.kv_lora_rank}, {config.qk_rope_head_dim}).",
            f"{sizes}.",
            "pass backend='reference' for other sizes in tests.",
        )


def _page_rule(config: Config, backend: str, allowed: tuple[int, ...]) -> Iterator[Reason]:
    if config.page_size not in allowed:
        yield refused(
            "page_size",
            f"backend={backend!r} cannot read pages of {config.page_size} tokens.",
            f"page_size={config.page_size}.",
            f"one of {', '.join(map(str, allowed))}.",
            "set the cache's block size to one of those.",
        )


def _width_rule(config: Config, backend: str) -> Iterator[Reason]:
    width, step = config.block_table_width, max(1, limits.TABLE_TOKENS // config.page_size)
    if width is not None and width % step:
        after = -(-width // step) * step
        yield refused(
            "block_tables",
            f"backend={backend!r} cannot take a block table {width} pages wide.",
            f"width {width} with page_size={config.page_size}.",
            f"a multiple of {step} ({limits.TABLE_TOKENS} / page_size); the next is {after}.",
            f"allocate the table {after} pages wide; the tail may hold anything.",
        )


def _feature(abi: FlashInferABI, name: str, asked: str) -> Iterator[Reason]:
    reason = missing_feature(abi, name, asked=asked)
    if reason is not None:
        yield reason


def _argument_rule(
    given: bool, argument: str, backend: str, what: str | None = None
) -> Iterator[Reason]:
    if given:
        what = what or argument
        yield refused(
            argument,
            f"backend={backend!r} does not take {what}.",
            f"{what} given.",
            f"no {what}.",
            "leave it out.",
        )
