"""Calls that type checkers must refuse: each marked line, for the reason named; never run."""

from __future__ import annotations

from typing import TypedDict

import flashinfer.decode
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fi_dcp_compat import (
    DCP,
    Capabilities,
    FlashInferABI,
    MLADecoder,
    MLAState,
    Reason,
    bmm_scales,
    check,
    combine,
    decode_mla,
    decode_mla_dcp,
    local_seq_lens,
    merge_dcp_states,
    min_workspace_bytes,
    prepare_decode_mla,
    probe,
    recorded,
    supports_combination,
    validate_dcp_config,
)
from fi_dcp_compat.dropin import trtllm_batch_decode_with_kv_cache_mla as dropin
from fi_dcp_compat.testing import mock_kernel, use_kernel


class Tables(TypedDict):
    workspace_buffer: Tensor
    block_tables: Tensor
    max_seq_len: int
    bmm1_scale: float


class Sizes(TypedDict):
    batch: int
    q_len: int
    num_heads: int
    sm_count: int


class Step(Tables):
    seq_lens: Tensor


def takes_a_tensor(out: Tensor) -> None: ...
def takes_text(text: str) -> None: ...


def of_decode_mla(
    q: Tensor, kv: Tensor, lens: Tensor, dcp: DCP, flag: bool, tables: Tables, step: Step
) -> None:
    ws, bt = step["workspace_buffer"], step["block_tables"]
    # A misspelt keyword.
    decode_mla(q, kv, **tables, seqlens=lens)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    decode_mla(q, kv, **step, causel=False)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    # A required one left out.
    decode_mla(q, kv, **tables)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    # Positional.
    decode_mla(q, kv, ws, bt, lens, 9, 0.1)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    # An int where a tensor belongs.
    decode_mla(q, kv, **tables, seq_lens=7)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    decode_mla(q, 7, **step)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    decode_mla(q, kv, **step, out=7)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    # FlashInfer's words where this package has its own.
    decode_mla(q, kv, **step, lse_base="basee")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    decode_mla(q, kv, **step, enable_dcp=True)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    # No such backend.
    decode_mla(q, kv, **step, backend="cutedsl")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    # Ranks without what they share.
    decode_mla(q, kv, **step, dcp=8)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    decode_mla(q, kv, **step, dcp=(8, 3))  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    # A result that carries an LSE, used as a bare tensor.
    takes_a_tensor(decode_mla(q, kv, **step, dcp=dcp))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    takes_a_tensor(decode_mla(q, kv, **step, dcp=dcp, return_lse=False))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    takes_a_tensor(decode_mla(q, kv, **step, return_lse=True))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    takes_a_tensor(decode_mla(q, kv, **step, return_lse=flag))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    # One that carries none, used as one that does.
    takes_a_tensor(decode_mla(q, kv, **step).lse)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownArgumentType]


def of_dcp(lens: Tensor, dcp: DCP) -> None:
    # Rank without world, world without rank, both without the lengths.
    DCP(rank=3, causal_seqlens_kv_global=lens)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    DCP(world_size=8, causal_seqlens_kv_global=lens)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    DCP(8, 3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    DCP(8, 3, 100)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    DCP(8, 3, lens, interleave=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    DCP(8, rank=3, cp_world=8, causal_seqlens_kv_global=lens)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    dcp.rank = 4  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]


def of_the_prepared(decoder: MLADecoder, q: Tensor, kv: Tensor, lens: Tensor, ws: Tensor) -> None:
    prepare_decode_mla(page_size=64, dtype="bfloat16", bmm1_scale=0.1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    prepare_decode_mla(page_size=64, dtype=torch.bfloat16)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    prepare_decode_mla(page_size=64, dtype=torch.bfloat16, bmm1_scale=0.1, dcp_size=8)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    # None without an LSE.
    takes_a_tensor(decoder.run(q, kv, lens, lens, 9, ws)[1])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    decoder.run(q, kv, lens, lens, 9, ws)[1].exp()  # type: ignore[union-attr]  # pyright: ignore[reportOptionalMemberAccess]
    takes_a_tensor(decoder.run(q, kv, lens, lens, 9, ws))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    decoder.run(q, kv, lens, 7, 9, ws)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    decoder.run(q, kv, lens, lens, 9)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    decoder.run(q, kv, lens, lens, 9, ws, dcp=8)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def across_ranks(
    q: Tensor, kv: Tensor, lens: Tensor, state: MLAState, group: ProcessGroup, step: Step
) -> None:
    # The output is the ranks' own.
    decode_mla_dcp(q, kv, causal_seqlens_kv_global=lens, out=q, **step)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    decode_mla_dcp(q, kv, causal_seqlens_kv_global=lens, mode="ring", **step)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    decode_mla_dcp(q, kv, **step)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    combine(state, group, "ring")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    combine(q, group)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    combine(state, 0)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    merge_dcp_states(q, lens, lse_base="natural")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    local_seq_lens(3.5, 4, 1)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    local_seq_lens(lens, 4)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]


def at_start_up(abi: FlashInferABI, can: Capabilities, reason: Reason, sizes: Sizes) -> None:
    validate_dcp_config(object())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    print(can.supports_dpc)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownArgumentType]
    can.supports_dcp = True  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
    print(abi.features.native_dpc)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownArgumentType]
    abi.features.lse_base["cute-dsl"] = "2"  # type: ignore[index]  # pyright: ignore[reportIndexIssue]
    probe(statc=True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    recorded(0.7)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    check(abi, num_heads=16, q_len=1, page_size=64)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    check(abi, num_heads=16, q_len=1, page_size=64, dtype="bf16", backend="fa3")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    supports_combination(num_heads=96, dtype="bf16", dcp_size=8)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    takes_text(supports_combination(num_heads=96, dtype="bf16"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    bmm_scales(0.1, "fp8")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    min_workspace_bytes("flashmla", abi=abi, return_lse=True, **sizes)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    min_workspace_bytes("xqa", return_lse=True, **sizes)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    # Not an exception itself: `reason.exception()`.
    raise reason  # type: ignore[misc]  # pyright: ignore[reportGeneralTypeIssues]


def of_kernels(q: Tensor, kv: Tensor, ws: Tensor, bt: Tensor, lens: Tensor) -> None:
    native = flashinfer.decode.trtllm_batch_decode_with_kv_cache_mla
    native(q, kv, ws, 128, 512, 64, bt, lens, 9, cp_wrld=8)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    native(q, kv, ws, 128, 512, 64, bt, 7, 9)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    native(q, kv, ws, 128, 512, 64, bt, lens, 9, return_lse=True, return_lse_base="e")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    takes_a_tensor(native(q, kv, ws, 128, 512, 64, bt, lens, 9, return_lse=True))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    dropin(q, kv, ws, 128, 512, 64, bt, lens, 9, cp_wrld=8)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    dropin(q, kv, ws, 128, 512, 64, bt, 7, 9)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    dropin(q, kv, ws, 128, 512, 64, bt, lens, 9, return_lse=True, return_lse_base="e")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    dropin(q, kv, ws, 128, 512, 64, bt, lens, 9, interleave_size="1")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    takes_a_tensor(dropin(q, kv, ws, 128, 512, 64, bt, lens, 9, return_lse=True))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    mock_kernel(0.7)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    use_kernel(mock_kernel("0.7.4"), "0.7.4")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    use_kernel("0.7.4")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
