"""A minimal attention backend in the shape of serving stacks', on the public API alone.

What follows is the README's section "In a serving stack"; tests/test_readme.py compares the two.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fi_dcp_compat import (
    Backend,
    Capabilities,
    FlashInferCompatError,
    bmm_scales,
    capabilities,
    check,
    counter_bytes,
    local_seq_lens,
    min_workspace_bytes,
    prepare_decode_mla,
    probe,
    raise_first,
    recorded,
    supports_combination,
    validate_dcp_config,
)


@dataclass(frozen=True)
class ParallelConfig:  # the stack's own, with vLLM's names
    decode_context_parallel_size: int = 1
    cp_kv_cache_interleave_size: int = 1


@dataclass(frozen=True, kw_only=True)
class Config:
    parallel: ParallelConfig
    dcp_rank: int = 0
    num_heads: int  # as the kernel gets them: those of all DCP ranks, after the gather
    softmax_scale: float
    page_size: int
    table_width: int  # of the block tables, in pages
    max_num_seqs: int
    max_query_len: int = 1  # more with speculative decoding
    ragged: bool = False  # whether a step's requests may differ in query length
    dtype: torch.dtype = torch.bfloat16  # of the query and the cache
    backend: Backend = "auto"
    device: str = "cuda"
    compute_capability: tuple[int, int] = (10, 0)
    sm_count: int = 148


def installed() -> Capabilities:
    try:
        return capabilities(probe())
    except FlashInferCompatError:  # absent or broken: as able as 0.6.0, which can do nothing
        return capabilities(recorded("0.6.0"))


class Ability:
    """A class attribute that asks the installed FlashInfer when it is read, not at import."""

    def __init__(self, read: Callable[[Capabilities], bool]) -> None:
        self.read = read

    def __get__(self, instance: object, owner: type) -> bool:
        return self.read(installed())


class MLABackend:
    """What a stack's selector asks; no answer raises."""

    lse_base_on_e = Ability(lambda found: found.lse_base_on_e)
    can_return_lse_for_decode = Ability(lambda found: found.can_return_lse_for_decode)
    supports_dcp = Ability(lambda found: found.supports_dcp)
    supports_dcp_with_varlen = Ability(lambda found: found.supports_dcp_with_varlen)
    supports_dcp_compact_varlen = Ability(lambda found: found.supports_dcp_compact_varlen)

    @staticmethod
    def get_supported_kernel_block_sizes(dcp_world_size: int = 1) -> tuple[int, ...]:
        return installed().dcp_page_sizes if dcp_world_size > 1 else installed().page_sizes

    @staticmethod
    def supports_combination(config: Config, *, causal: bool = True) -> str | None:
        return supports_combination(
            num_heads=config.num_heads,
            dtype=config.dtype,
            page_size=config.page_size,
            q_len=config.max_query_len,
            varlen=config.ragged,
            dcp_world_size=config.parallel.decode_context_parallel_size,
            interleave_size=config.parallel.cp_kv_cache_interleave_size,
            causal=causal,
            backend=config.backend,
            compute_capability=config.compute_capability,
        )


@dataclass(frozen=True, kw_only=True)
class Step:
    """What the scheduler gives for all layers: host ints, and tensors on the device."""

    num_tokens: int
    max_query_len: int
    max_seq_len: int  # global; keep it constant for a captured batch size
    seq_lens: Tensor  # [B], global, the new tokens included
    query_start_loc: Tensor  # [B + 1], int32
    block_tables: Tensor  # [B, table_width], int32: this rank's pages


@dataclass(frozen=True, kw_only=True)
class Metadata:
    block_tables: Tensor
    seq_lens: Tensor  # [B], int32, rank-local, as is max_seq_len
    max_seq_len: int
    global_seq_lens: Tensor  # [B], int32
    max_q_len: int
    cum_seq_lens_q: Tensor | None  # None: every request has max_q_len tokens
    workspace: Tensor
    counters: Tensor


class MetadataBuilder:
    """Refuse at start-up what cannot run right; own what layers and steps share."""

    def __init__(self, config: Config) -> None:
        # A stack without an interleave (SGLang) leaves this out: `check` has the rest.
        validate_dcp_config(config.parallel)
        self.config, self.world_size = config, config.parallel.decode_context_parallel_size
        # The torch reference needs no FlashInfer.
        abi = recorded("0.7.4") if config.backend == "reference" else probe()
        reasons = check(
            abi,
            num_heads=config.num_heads,
            dtype=config.dtype,
            page_size=config.page_size,
            q_len=config.max_query_len,
            varlen=config.ragged,
            dcp_world_size=self.world_size,
            backend=config.backend,
            compute_capability=config.compute_capability,
            block_table_width=config.table_width,
        )
        raise_first(reasons)

        heads, sms = config.num_heads, config.sm_count
        workspace_bytes = min_workspace_bytes(
            config.backend,
            abi=abi,
            batch=config.max_num_seqs,
            q_len=config.max_query_len,
            num_heads=heads,
            return_lse=self.world_size > 1,
            sm_count=sms,
            varlen=config.ragged,
        )
        if self.world_size == 1 and config.backend in ("auto", "trtllm-gen"):
            workspace_bytes += 128 << 20  # trtllm-gen's scratch, which no release tells
        # At addresses that a captured graph can keep. One builder per stream in flight.
        zeros = partial(torch.zeros, device=config.device)
        self.workspace = zeros(workspace_bytes, dtype=torch.int8)
        self.counters = zeros(counter_bytes(config.max_num_seqs, heads, sms), dtype=torch.uint8)
        self.global_seq_lens = zeros(config.max_num_seqs, dtype=torch.int32)
        self.local_seq_lens = zeros(config.max_num_seqs, dtype=torch.int32)

    def build(self, step: Step) -> Metadata:
        """Once per step, for all layers; nothing waits for the device."""
        world_size, rank, batch = self.world_size, self.config.dcp_rank, len(step.seq_lens)
        lens = self.global_seq_lens[:batch].copy_(step.seq_lens)
        ragged = self.config.ragged and step.num_tokens != batch * step.max_query_len
        return Metadata(
            block_tables=step.block_tables,
            seq_lens=self.local_seq_lens[:batch].copy_(local_seq_lens(lens, world_size, rank)),
            max_seq_len=local_seq_lens(step.max_seq_len, world_size, rank),
            global_seq_lens=lens,
            max_q_len=step.max_query_len,
            cum_seq_lens_q=step.query_start_loc if ragged else None,
            workspace=self.workspace,
            counters=self.counters,
        )


class MLAImpl(MLABackend):
    """One layer: its scales and its decoder are made once."""

    def __init__(
        self, config: Config, q_scale: float | None = None, k_scale: float | None = None
    ) -> None:
        scales = bmm_scales(config.softmax_scale, config.dtype, q_scale, k_scale)
        self.decoder = prepare_decode_mla(
            page_size=config.page_size,
            dtype=config.dtype,
            dcp_world_size=config.parallel.decode_context_parallel_size,
            dcp_rank=config.dcp_rank,
            backend=config.backend,
            bmm1_scale=scales.bmm1_scale,
            bmm2_scale=scales.bmm2_scale,
        )

    def forward_mqa(
        self, q: Tensor, kv_cache: Tensor, metadata: Metadata
    ) -> tuple[Tensor, Tensor | None]:
        """Decode q [num_tokens, H, D]; with DCP the LSE too, for the merge across ranks."""
        return self.decoder.run(
            q,
            kv_cache,
            metadata.block_tables,
            metadata.seq_lens,
            metadata.max_seq_len,
            metadata.workspace,
            causal_seqlens_kv_global=metadata.global_seq_lens,
            cum_seq_lens_q=metadata.cum_seq_lens_q,
            max_q_len=metadata.max_q_len,
            multi_ctas_kv_counter_buffer=metadata.counters,
        )
