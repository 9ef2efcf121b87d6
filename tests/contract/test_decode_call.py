"""What the kernel receives: the exact keywords, release by release."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fi_dcp_compat import (
    DCP,
    FlashInferSignatureError,
    FlashInferVersionError,
    MLAState,
    UnsupportedConfigError,
    decode_mla,
    recorded,
)
from fi_dcp_compat.testing import mock_kernel, use_kernel
from tests.support import DCP_RELEASES, RELEASES, call, dcp_of

OWN_KEYWORDS = {
    "query",
    "kv_cache",
    "workspace_buffer",
    "qk_nope_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "block_tables",
    "seq_lens",
    "max_seq_len",
    "bmm1_scale",
    "bmm2_scale",
    "backend",
}


def dcp_call() -> dict[str, Any]:
    """World 8, rank 3, two requests of three tokens, 24 heads."""
    return {
        "query": torch.randn(6, 24, 576).bfloat16(),
        "kv_cache": torch.randn(2, 128, 576).bfloat16(),
        "workspace_buffer": torch.zeros(1 << 20, dtype=torch.int8),
        "block_tables": torch.tensor([[10], [20]], dtype=torch.int32),
        "seq_lens": torch.tensor([4, 5], dtype=torch.int32),
        "max_seq_len": 9,
        "bmm1_scale": 0.1,
        "dcp": DCP(8, 3, torch.tensor([31, 36], dtype=torch.int32)),
    }


class Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook
    """Counts the tensor operations that are more than views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("version", DCP_RELEASES)
def test_the_dcp_call_hands_the_kernel_exactly_these_keywords(version: str) -> None:
    kernel, given = mock_kernel(version), dcp_call()
    counters = torch.zeros(1024, dtype=torch.uint8)
    with use_kernel(kernel, recorded(version)):
        state = decode_mla(**given, multi_ctas_kv_counter_buffer=counters)

    assert kernel.call_args.args == ()
    got = dict(kernel.call_args.kwargs)
    assert got.pop("query").shape == (2, 3, 24, 576)
    assert got.pop("kv_cache").shape == (2, 1, 128, 576)
    for name in ("block_tables", "seq_lens", "workspace_buffer"):
        assert got.pop(name) is given[name]
    assert got.pop("causal_seqlens_kv_global") is given["dcp"].causal_seqlens_kv_global
    base = {} if recorded(version).lacks("return_lse_base") else {"return_lse_base": "basee"}
    assert got == base | {
        "qk_nope_head_dim": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "max_seq_len": 9,
        "bmm1_scale": 0.1,
        "bmm2_scale": 1.0,
        "backend": "cute-dsl",
        "return_lse": True,
        "enable_dcp": True,
        "cp_world": 8,
        "cp_rank": 3,
    }
    assert isinstance(state, MLAState)
    assert state.out.shape == (6, 24, 512)
    assert state.lse.shape == (6, 24)


@pytest.mark.parametrize("version", RELEASES)
def test_the_call_without_dcp_hands_the_kernel_nothing_that_it_does_not_need(version: str) -> None:
    kernel = mock_kernel(version)
    with use_kernel(kernel, recorded(version)):
        out = decode_mla(**call(q_len=1))
    assert set(kernel.call_args.kwargs) == OWN_KEYWORDS
    assert isinstance(out, torch.Tensor)
    assert out.shape == (2, 1, 16, 512)


def test_a_signature_that_lost_a_keyword_fails_the_contract() -> None:
    kernel = mock_kernel("0.6.16")  # lacks cp_rank and the others
    with use_kernel(kernel, recorded("0.6.17")), pytest.raises(TypeError, match="enable_dcp"):
        decode_mla(**dcp_call())


@pytest.mark.parametrize(
    ("version", "changes", "backend", "forwarded"),
    [
        pytest.param("0.6.15", {"heads": 24}, "cute-dsl", False, id="24 heads on 0.6.15"),
        pytest.param("0.6.16", {"heads": 24}, "auto", True, id="24 heads are padded on 0.6.16"),
        pytest.param("0.6.15", {"heads": 16}, "auto", True, id="16 heads"),
        pytest.param("0.6.14", {"heads": 16}, "auto", False, id="0.6.14 has no such keyword"),
        pytest.param("0.7.4", {"page_size": 128}, "cute-dsl", False, id="page size 128"),
        pytest.param("0.6.15", {"page_size": 128}, "cute-dsl", False, id="page size 128, 0.6.15"),
        pytest.param("0.7.4", {"heads": 96}, "cute-dsl", False, id="96 heads"),
        pytest.param("0.7.4", {"backend": "trtllm-gen"}, "trtllm-gen", True, id="trtllm-gen"),
        pytest.param("0.7.4", {"backend": "cute-dsl"}, "cute-dsl", False, id="cute-dsl"),
    ],
)
def test_the_counter_buffer_goes_where_trtllm_gen_can_run(
    version: str, changes: dict[str, Any], backend: str, forwarded: bool
) -> None:
    kernel, counters = mock_kernel(version), torch.zeros(4096, dtype=torch.uint8)
    with use_kernel(kernel, recorded(version)):
        decode_mla(**call(**changes), multi_ctas_kv_counter_buffer=counters)
    got = kernel.call_args.kwargs
    assert got["backend"] == backend
    assert (got.get("multi_ctas_kv_counter_buffer") is counters) == forwarded
    assert ("multi_ctas_kv_counter_buffer" in got) == forwarded


def test_interleave_2_is_refused_by_its_name() -> None:
    given = dcp_call()
    with pytest.raises(UnsupportedConfigError, match="cp_kv_cache_interleave_size"):
        DCP(8, 3, given["dcp"].causal_seqlens_kv_global, interleave_size=2)


def test_0_6_16_is_refused_before_any_tensor_work() -> None:
    kernel, given = mock_kernel("0.6.16"), dcp_call()
    with (
        use_kernel(kernel, recorded("0.6.16")),
        Dispatched() as dispatched,
        pytest.raises(FlashInferVersionError) as raised,
    ):
        decode_mla(**given)
    for text in (
        "enable_dcp, cp_world, cp_rank, causal_seqlens_kv_global",
        "0.6.16",
        "0.6.17",
        'pip install -U "flashinfer-python>=0.6.17"',
    ):
        assert text in str(raised.value)
    assert dispatched.names == []
    kernel.assert_not_called()


def test_non_causal_with_dcp_is_refused() -> None:
    kernel = mock_kernel("0.7.4")
    with (
        use_kernel(kernel, recorded("0.7.4")),
        pytest.raises(UnsupportedConfigError, match="flatten_query_rows"),
    ):
        decode_mla(**dcp_call(), causal=False)
    kernel.assert_not_called()


@pytest.mark.parametrize("version", DCP_RELEASES)
def test_the_natural_lse_costs_no_tensor_operation_on_the_dcp_path(version: str) -> None:
    given = dcp_call()
    result = (torch.ones(2, 3, 24, 512, dtype=torch.bfloat16), torch.ones(6, 24))
    kernel = MagicMock(return_value=result)
    with use_kernel(kernel, recorded(version)):
        with Dispatched() as dispatched:
            natural = decode_mla(**given, lse_base="e")
        assert dispatched.names == []
        assert natural.lse.data_ptr() == result[1].data_ptr()
        with Dispatched() as dispatched:
            decode_mla(**given, lse_base="2")
    named = not recorded(version).lacks("return_lse_base")
    assert dispatched.names == ([] if named else ["aten.mul_.Tensor"])


@pytest.mark.parametrize("version", DCP_RELEASES)
def test_every_rank_names_cute_dsl(version: str) -> None:
    kernel = mock_kernel(version)
    with use_kernel(kernel, recorded(version)):
        for rank in range(4):
            lens = torch.full((2,), 28, dtype=torch.int32)
            decode_mla(**call(), dcp=DCP(4, rank, lens))
    assert {c.kwargs["backend"] for c in kernel.call_args_list} == {"cute-dsl"}
    assert [c.kwargs["cp_rank"] for c in kernel.call_args_list] == [0, 1, 2, 3]


def test_a_rank_without_keys_passes_1_as_max_seq_len() -> None:
    kernel = mock_kernel("0.6.17")
    empty = torch.zeros(2, dtype=torch.int32)
    lens = torch.full((2,), 3, dtype=torch.int32)
    with use_kernel(kernel, recorded("0.6.17")):
        decode_mla(**call(seq_lens=empty, max_seq_len=0), dcp=DCP(8, 7, lens))
    assert kernel.call_args.kwargs["max_seq_len"] == 1


def test_compact_queries_with_dcp_reach_0_7_0_and_no_release_before() -> None:
    compact: dict[str, Any] = {
        "query": torch.zeros(4, 16, 576).bfloat16(),
        "cum_seq_lens_q": torch.tensor([0, 1, 4], dtype=torch.int32),
        "max_q_len": 3,
    }
    assert recorded("0.6.18").parameters == recorded("0.7.0").parameters
    for version in DCP_RELEASES:
        kernel = mock_kernel(version)
        with use_kernel(kernel, recorded(version)):
            if version in ("0.6.17", "0.6.18"):
                with pytest.raises(FlashInferVersionError, match=r"0\.7\.0") as raised:
                    decode_mla(**call(**compact), dcp=dcp_of())
                assert "uniform query" in str(raised.value)
                kernel.assert_not_called()
                continue
            state = decode_mla(**call(**compact), dcp=dcp_of())
        got = kernel.call_args.kwargs
        assert got["query"].shape == (4, 16, 576)
        assert got["cum_seq_lens_q"] is compact["cum_seq_lens_q"]
        assert got["max_q_len"] == 3
        assert got["causal_seqlens_kv_global"].shape == (2,)
        assert (state.out.shape, state.lse.shape) == ((4, 16, 512), (4, 16))


def test_a_new_required_parameter_is_named() -> None:
    abi = recorded("0.7.4")

    from fi_dcp_compat import Parameter

    drifted = abi._replace(parameters=(*abi.parameters, Parameter("kv_layout", None)))
    kernel = mock_kernel("0.7.4")
    with use_kernel(kernel, drifted), pytest.raises(FlashInferSignatureError, match="kv_layout"):
        decode_mla(**call())
    kernel.assert_not_called()
