"""Call sites as stacks write them, every public name among them; for type checkers, never run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypedDict

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import assert_type

import fi_dcp_compat
from fi_dcp_compat import (
    DCP,
    Backend,
    BmmScales,
    Capabilities,
    CombineMode,
    Features,
    FlashInferABI,
    FlashInferCompatError,
    FlashInferCompatWarning,
    FlashInferImportError,
    FlashInferNotFoundError,
    FlashInferSignatureError,
    FlashInferVersionError,
    FlatRows,
    InvalidInputError,
    LseBase,
    MLADecoder,
    MLAState,
    NotPreparedError,
    ParallelConfig,
    Parameter,
    Reason,
    TokenSlots,
    UnsupportedConfigError,
    bmm_scales,
    capabilities,
    causal_bounds,
    check,
    combine,
    combine_buffers,
    counter_bytes,
    debug_checks,
    decode_mla,
    decode_mla_dcp,
    flatten_query_rows,
    gather_query_heads,
    local_seq_lens,
    merge_dcp_states,
    min_workspace_bytes,
    prepare_decode_mla,
    probe,
    raise_first,
    recorded,
    supports_combination,
    token_positions,
    token_slots,
    validate_dcp_config,
)

assert_type(fi_dcp_compat.__version__, str)
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class DcpConfig:
    decode_context_parallel_size: int = 1
    cp_kv_cache_interleave_size: int = 1


@dataclass(frozen=True)
class Metadata:
    block_tables: Tensor
    seq_lens: Tensor
    seq_lens_cpu: Tensor
    max_seq_len: int
    dcp_tot_seq_lens: Tensor | None
    cum_seq_lens_q: Tensor
    max_q_len: int


class Sizes(TypedDict):
    batch: int
    q_len: int
    num_heads: int
    sm_count: int


class AttentionBackend:
    """What a stack keeps from start-up on."""

    def __init__(self, config: DcpConfig, rank: int, dtype: torch.dtype) -> None:
        validate_dcp_config(config)
        self.world_size = config.decode_context_parallel_size
        self.rank = rank
        self.need_to_return_lse: bool = self.world_size > 1
        why_not = supports_combination(
            num_heads=128, dtype=dtype, dcp_world_size=self.world_size, compute_capability=(10, 0)
        )
        assert_type(why_not, str | None)
        self.abi = assert_type(probe(), FlashInferABI)
        sizes: Sizes = {"batch": 256, "q_len": 1, "num_heads": 128, "sm_count": 148}
        size = min_workspace_bytes("cute-dsl", abi=self.abi, return_lse=True, **sizes)
        counters = counter_bytes(256, 128, 148)
        self.workspace = torch.zeros(assert_type(size, int), dtype=torch.uint8)
        self.counters = torch.zeros(assert_type(counters, int), dtype=torch.uint8)
        self.scales = assert_type(bmm_scales(192**-0.5, FP8, q_scale=1.0, k_scale=0.5), BmmScales)

    def dense(self, q: Tensor, kv_cache: Tensor, step: Metadata) -> Tensor:
        without_counters = decode_mla(
            q,
            kv_cache,
            workspace_buffer=self.workspace,
            block_tables=step.block_tables,
            seq_lens=step.seq_lens,
            max_seq_len=step.max_seq_len,
            bmm1_scale=self.scales.bmm1_scale,
        )
        assert_type(without_counters, Tensor)
        with_counters = decode_mla(
            query=q,
            kv_cache=kv_cache,
            workspace_buffer=self.workspace,
            qk_nope_head_dim=128,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            block_tables=step.block_tables,
            seq_lens=step.seq_lens,
            max_seq_len=step.max_seq_len,
            bmm1_scale=self.scales.bmm1_scale,
            bmm2_scale=self.scales.bmm2_scale,
            dcp=None,
            return_lse=True,
            sinks=[q],
            skip_softmax_threshold_scale_factor=None,
            multi_ctas_kv_counter_buffer=self.counters,
        )
        assert_type(with_counters, MLAState)
        # `max_q_len` is missing, which is InvalidInputError at the call, by ruling no type error.
        decode_mla(
            q,
            kv_cache,
            workspace_buffer=self.workspace,
            block_tables=step.block_tables,
            seq_lens=step.seq_lens,
            max_seq_len=step.max_seq_len,
            bmm1_scale=torch.ones(1),
            cum_seq_lens_q=step.cum_seq_lens_q,
        )
        return with_counters.out

    def dense_dcp(
        self, q: Tensor, kv_cache: Tensor, step: Metadata, lens: Tensor
    ) -> tuple[Tensor, Tensor]:
        state = decode_mla(
            q,
            kv_cache,
            workspace_buffer=self.workspace,
            block_tables=step.block_tables,
            seq_lens=step.seq_lens,
            max_seq_len=step.max_seq_len,
            bmm1_scale=self.scales.bmm1_scale,
            dcp=DCP(self.world_size, self.rank, lens, interleave_size=1),
            backend="cute-dsl",
            lse_base="2",
        )
        assert_type(state, MLAState)
        out, lse = state
        assert_type(out, Tensor)
        return out, lse

    def forward_mqa(
        self, q: Tensor, kv_cache: Tensor, step: Metadata
    ) -> tuple[Tensor, Tensor | None]:
        dcp: DCP | None = None
        if step.dcp_tot_seq_lens is not None:
            dcp = DCP(self.world_size, self.rank, step.dcp_tot_seq_lens)
        result = decode_mla(
            q,
            kv_cache,
            workspace_buffer=self.workspace,
            block_tables=step.block_tables,
            seq_lens=step.seq_lens,
            max_seq_len=step.max_seq_len,
            bmm1_scale=self.scales.bmm1_scale,
            dcp=dcp,
            cum_seq_lens_q=step.cum_seq_lens_q,
            max_q_len=step.max_q_len,
            return_lse=self.need_to_return_lse,
        )
        assert_type(result, Tensor | MLAState)
        return result if isinstance(result, tuple) else (result, None)


def prepared(q: Tensor, kv_cache: Tensor, workspace: Tensor, step: Metadata) -> MLAState | Tensor:
    decoder = prepare_decode_mla(
        page_size=64,
        dtype=torch.bfloat16,
        kv_dtype=FP8,
        dcp_world_size=8,
        dcp_rank=3,
        bmm1_scale=0.1,
        bmm2_scale=0.5,
        backend="reference",
    )
    assert_type(decoder, MLADecoder)
    with debug_checks():
        out, lse = decoder.run(
            q,
            kv_cache,
            step.block_tables,
            step.seq_lens,
            step.max_seq_len,
            workspace,
            causal_seqlens_kv_global=step.dcp_tot_seq_lens,
        )
    assert_type(out, Tensor)
    assert_type(lse, Tensor | None)
    return out if lse is None else MLAState(out, lse)


def across_ranks(
    q: Tensor,
    kv_cache: Tensor,
    workspace: Tensor,
    step: Metadata,
    group: ProcessGroup,
    lens: Tensor,
) -> None:
    mode: CombineMode = "ag_rs"
    state = decode_mla_dcp(
        q,
        kv_cache,
        group=group,
        mode=mode,
        causal_seqlens_kv_global=lens,
        workspace_buffer=workspace,
        block_tables=step.block_tables,
        seq_lens=step.seq_lens,
        max_seq_len=step.max_seq_len,
        bmm1_scale=0.1,
    )
    assert_type(state, MLAState)
    assert_type(gather_query_heads(q, group), Tensor)
    buffers = assert_type(combine_buffers(state, None, mode), tuple[Tensor, ...])
    assert_type(combine(state, None, mode, lse_base="e", buffers=buffers), MLAState)
    assert_type(merge_dcp_states([q, q], [lens, lens]), MLAState)
    assert_type(merge_dcp_states(q, lens, lse_base="2"), MLAState)


def layout(lens: Tensor, step: Metadata) -> None:
    assert_type(local_seq_lens(10, 4, 1), int)
    assert_type(local_seq_lens(lens, 4, 1), Tensor)
    assert_type(causal_bounds(lens, 2, 4, 1), Tensor)
    slots = assert_type(token_slots(lens, 8), TokenSlots)
    assert_type(token_positions(slots.local, 8, slots.rank), Tensor)
    rows = flatten_query_rows(step.cum_seq_lens_q, 9, step.block_tables, step.seq_lens, lens)
    assert_type(rows, FlatRows)
    assert_type(rows.causal_seqlens_kv_global, Tensor | None)


def at_start_up(config: ParallelConfig, backend: Backend, base: LseBase) -> Capabilities:
    abi = recorded("0.6.17")
    abi.require_native_dcp()
    reasons = check(abi, num_heads=16, q_len=1, page_size=64, dtype="bfloat16", backend=backend)
    assert_type(reasons, tuple[Reason, ...])
    raise_first(reasons)
    prepare_decode_mla(page_size=64, dtype=FP8, bmm1_scale=0.1, backend=backend, lse_base=base)
    for reason in reasons:
        assert_type(reason.exception(), FlashInferCompatError)
    assert_type(abi.features, Features)
    assert_type(abi.features.native_dcp, bool)
    assert_type(abi.features.lse_base, Mapping[str, Literal["e", "2"] | None])
    assert_type(abi.source, Literal["live", "static", "recorded"])
    assert_type(abi.parameters, tuple[Parameter, ...])
    can = capabilities(abi)
    assert_type(can.supports_dcp, bool)
    assert_type(can.query_len_support, Literal["single_only", "uniform", "varlen"])
    probe.cache_clear()
    try:
        probe(static=True)
        validate_dcp_config(config)
    except (FlashInferNotFoundError, FlashInferImportError) as error:
        absent: ImportError = error
        raise absent from error
    except (UnsupportedConfigError, InvalidInputError) as error:
        refused: ValueError = error
        raise refused from error
    except (FlashInferVersionError, FlashInferSignatureError, NotPreparedError) as error:
        assert_type(error.found, str)
        assert_type(error.argument, str | None)
        assert_type(error.value, int | float | str | None)
        assert_type(error.reasons, tuple[Reason, ...])
    warnings.simplefilter("error", FlashInferCompatWarning)
    return can
