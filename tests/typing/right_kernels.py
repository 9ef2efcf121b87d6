"""FlashInfer's function itself, the drop-in, and kernels in its place; never run."""

from __future__ import annotations

from unittest.mock import MagicMock

import flashinfer
import flashinfer.mla
from torch import Tensor
from typing_extensions import assert_type

from fi_dcp_compat import FlashInferABI, recorded
from fi_dcp_compat.dropin import trtllm_batch_decode_with_kv_cache_mla
from fi_dcp_compat.pytest_plugin import UseKernel
from fi_dcp_compat.testing import mock_kernel, use_kernel


def as_a_stack_imports_it(q: Tensor, kv: Tensor, ws: Tensor, bt: Tensor, lens: Tensor) -> None:
    assert_type(flashinfer.__version__, str)
    out = flashinfer.decode.trtllm_batch_decode_with_kv_cache_mla(
        query=q,
        kv_cache=kv,
        workspace_buffer=ws,
        qk_nope_head_dim=128,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        block_tables=bt,
        seq_lens=lens,
        max_seq_len=9,
        bmm1_scale=0.1,
        skip_softmax_threshold_scale_factor=None,
    )
    assert_type(out, Tensor)
    both = flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla(
        *(q, kv, ws, 128, 512, 64, bt, lens, 9),
        return_lse=True,
        backend="cute-dsl",
        enable_dcp=True,
        cp_world=8,
        cp_rank=3,
        causal_seqlens_kv_global=lens,
        return_lse_base="basee",
    )
    assert_type(both, tuple[Tensor, Tensor])


def with_the_changed_import(
    q: Tensor, kv: Tensor, ws: Tensor, bt: Tensor, lens: Tensor, return_lse: bool
) -> None:
    out = trtllm_batch_decode_with_kv_cache_mla(
        query=q,
        kv_cache=kv,
        workspace_buffer=ws,
        qk_nope_head_dim=128,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        block_tables=bt,
        seq_lens=lens,
        max_seq_len=9,
        bmm1_scale=0.1,
        bmm2_scale=1.0,
        sinks=None,
        multi_ctas_kv_counter_buffer=ws,
    )
    assert_type(out, Tensor)
    both = trtllm_batch_decode_with_kv_cache_mla(
        *(q, kv, ws, 128, 512, 64, bt, lens, 9),
        bmm1_scale=0.1,
        return_lse=True,
        backend="cute-dsl",
        enable_dcp=True,
        cp_world=8,
        cp_rank=3,
        causal_seqlens_kv_global=lens,
        interleave_size=1,
        return_lse_base="base2",
    )
    assert_type(both, tuple[Tensor, Tensor])
    either = trtllm_batch_decode_with_kv_cache_mla(
        *(q, kv, ws, 128, 512, 64, bt, lens, 9), return_lse=return_lse
    )
    assert_type(either, Tensor | tuple[Tensor, Tensor])


def in_tests(fixture: UseKernel) -> FlashInferABI:
    kernel = assert_type(mock_kernel("0.6.17"), MagicMock)
    kernel.assert_not_called()
    assert_type(mock_kernel(recorded("0.7.4")), MagicMock)
    assert_type(fixture(kernel), FlashInferABI)
    with use_kernel(flashinfer.decode.trtllm_batch_decode_with_kv_cache_mla) as abi:
        assert_type(abi, FlashInferABI)
    with use_kernel(kernel, recorded("0.7.4")) as abi:
        return abi
