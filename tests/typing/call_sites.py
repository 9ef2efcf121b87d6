"""Call sites as stacks write them, for mypy; nothing here is run.

A wrong line carries the error that it must give: an ignore that mypy does not need is an error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from flashinfer.decode import trtllm_batch_decode_with_kv_cache_mla
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import assert_type

from fi_dcp_compat import (
    DCP,
    BmmScales,
    CombineMode,
    FlashInferABI,
    MLAState,
    Reason,
    TokenSlots,
    bmm_scales,
    check,
    combine,
    combine_buffers,
    decode_mla,
    decode_mla_dcp,
    gather_query_heads,
    local_seq_lens,
    merge_dcp_states,
    prepare_decode_mla,
    probe,
    recorded,
    supports_combination,
    token_positions,
    token_slots,
    validate_dcp_config,
)
from fi_dcp_compat.testing import use_kernel


def results(q: Tensor, kv: Tensor, ws: Tensor, bt: Tensor, lens: Tensor, dcp: DCP) -> None:
    assert_type(
        decode_mla(
            q,
            kv,
            workspace_buffer=ws,
            block_tables=bt,
            seq_lens=lens,
            max_seq_len=9,
            bmm1_scale=0.1,
        ),
        Tensor,
    )
    assert_type(
        decode_mla(
            q,
            kv,
            workspace_buffer=ws,
            block_tables=bt,
            seq_lens=lens,
            max_seq_len=9,
            bmm1_scale=0.1,
            dcp=dcp,
        ),
        MLAState,
    )
    assert_type(
        decode_mla(
            q,
            kv,
            workspace_buffer=ws,
            block_tables=bt,
            seq_lens=lens,
            max_seq_len=9,
            bmm1_scale=0.1,
            return_lse=True,
        ),
        MLAState,
    )


def what_a_stack_passes(
    q: Tensor, kv: Tensor, ws: Tensor, bt: Tensor, lens: Tensor, dcp: DCP | None, return_lse: bool
) -> None:
    assert_type(
        decode_mla(
            q,
            kv,
            workspace_buffer=ws,
            block_tables=bt,
            seq_lens=lens,
            max_seq_len=9,
            bmm1_scale=0.1,
            dcp=dcp,
            return_lse=return_lse,
        ),
        Tensor | MLAState,
    )


def wrong_calls(q: Tensor, kv: Tensor, ws: Tensor, bt: Tensor, lens: Tensor, dcp: DCP) -> None:
    decode_mla(  # type: ignore[call-overload]  # misspelt keyword
        q,
        kv,
        workspace_buffer=ws,
        block_table=bt,
        seq_lens=lens,
        max_seq_len=9,
        bmm1_scale=0.1,
    )
    decode_mla(  # type: ignore[call-overload]  # no such base
        q,
        kv,
        workspace_buffer=ws,
        block_tables=bt,
        seq_lens=lens,
        max_seq_len=9,
        bmm1_scale=0.1,
        lse_base="base2",
    )
    decode_mla(  # type: ignore[call-overload]  # no such backend
        q,
        kv,
        workspace_buffer=ws,
        block_tables=bt,
        seq_lens=lens,
        max_seq_len=9,
        bmm1_scale=0.1,
        backend="cutedsl",
    )
    decode_mla(q, kv, ws, bt, lens, 9, 0.1)  # type: ignore[call-overload]  # positional
    DCP(8, 3)  # type: ignore[call-arg]  # the global lengths are missing
    merge_dcp_states(q, lens, lse_base="natural")  # type: ignore[arg-type]
    check(probe(), num_heads=16, q_len=1, page_size=64)  # type: ignore[call-arg]  # no dtype


def others(q: Tensor, kv: Tensor, ws: Tensor, bt: Tensor, lens: Tensor) -> None:
    decoder = prepare_decode_mla(page_size=64, dtype=torch.bfloat16, bmm1_scale=0.1)
    assert_type(decoder.run(q, kv, bt, lens, 9, ws), tuple[Tensor, Tensor | None])
    assert_type(probe(static=True), FlashInferABI)
    probe.cache_clear()
    probe(statc=True)  # type: ignore[call-arg]
    assert_type(
        check(recorded("0.6.17"), num_heads=16, q_len=1, page_size=64, dtype="bfloat16"),
        tuple[Reason, ...],
    )
    assert_type(supports_combination(num_heads=16, dtype=torch.bfloat16), str | None)
    assert_type(local_seq_lens(10, 4, 1), int)
    assert_type(local_seq_lens(lens, 4, 1), Tensor)
    assert_type(bmm_scales(0.1, torch.float8_e4m3fn, 1.5, 0.5), BmmScales)


def across_ranks(
    q: Tensor, kv: Tensor, ws: Tensor, bt: Tensor, lens: Tensor, group: ProcessGroup
) -> None:
    mode: CombineMode = "a2a"
    state = decode_mla_dcp(
        q,
        kv,
        group=group,
        mode=mode,
        causal_seqlens_kv_global=lens,
        workspace_buffer=ws,
        block_tables=bt,
        seq_lens=lens,
        max_seq_len=9,
        bmm1_scale=0.1,
    )
    assert_type(state, MLAState)
    assert_type(combine(state, group, "ag_rs", buffers=combine_buffers(state, group)), MLAState)
    assert_type(gather_query_heads(q, group), Tensor)
    assert_type(token_slots(lens, 8), TokenSlots)
    assert_type(token_positions(lens, 8, 3), Tensor)
    combine(state, group, "ring")  # type: ignore[arg-type]  # no such mode
    combine(q, group)  # type: ignore[arg-type]  # a bare tensor
    decode_mla_dcp(  # type: ignore[call-arg]  # the output is the ranks' own
        q,
        kv,
        causal_seqlens_kv_global=lens,
        workspace_buffer=ws,
        block_tables=bt,
        seq_lens=lens,
        max_seq_len=9,
        bmm1_scale=0.1,
        out=q,
    )


@dataclass
class ParallelConfig:
    decode_context_parallel_size: int = 8
    cp_kv_cache_interleave_size: int = 1


def at_start_up(config: ParallelConfig) -> None:
    validate_dcp_config(config)
    validate_dcp_config(object())  # type: ignore[arg-type]


def in_tests() -> None:
    with use_kernel(trtllm_batch_decode_with_kv_cache_mla, recorded("0.7.4")) as abi:
        assert_type(abi, FlashInferABI)
