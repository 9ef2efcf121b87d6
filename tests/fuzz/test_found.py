"""What the fuzzing found, each by itself: the plainest call with that one thing in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.fuzz import test_check, test_decode, test_dropin
from tests.fuzz.calls import BF16, INT, VERSIONS, Given, right
from tests.fuzz.drawing import Choices
from tests.fuzz.wild import CONTENTS

VECTOR, ARRAY = torch.full((2,), CONTENTS), np.full(2, CONTENTS)
TABLE = torch.full((2, 2), int(CONTENTS), dtype=torch.int32)
ONES = torch.ones(2, 2, dtype=INT)

CHECKED: dict[str, dict[str, Any]] = {
    "a tensor for a number": {"num_heads": TABLE},
    "a tensor for a backend": {"backend": VECTOR},
    "an array for a backend": {"backend": ARRAY},
    "a tensor for a compute capability": {"compute_capability": VECTOR},
    "a tensor for a dtype": {"dtype": TABLE},
    "no name for a dtype": {"kv_dtype": ""},
    "a tensor for a head dimension": {"kv_lora_rank": VECTOR},
    "an array for a head dimension": {"qk_rope_head_dim": ARRAY},
    "a number in a tensor for a head dimension": {"kv_lora_rank": torch.full((), CONTENTS)},
}
DECODED: dict[str, dict[str, Any]] = {
    "a tensor for a base": {"lse_base": TABLE},
    "an array for a base": {"lse_base": ARRAY},
    "an array for a tensor": {"seq_lens": ARRAY},
    "an array for a number": {"max_seq_len": ARRAY},
    "a list of tensors for a world size": {"world_size": [VECTOR]},
    "a cache without a page": {
        "backend": "reference",
        "kv_cache": torch.zeros(0, 64, 576, dtype=BF16),
    },
    "a page outside the cache": {"backend": "reference", "block_tables": 9999 * ONES},
    "offsets outside the query": {
        "backend": "reference",
        "query": torch.zeros(2, 8, 576, dtype=BF16),
        "cum_seq_lens_q": torch.tensor([0, 9, 10], dtype=INT),
        "max_q_len": 1,
    },
    "an int that no float32 is": {"backend": "reference", "bmm1_scale": 2**200},
    "an output that wants a gradient": {
        "out": torch.zeros(2, 1, 8, 512, dtype=BF16, requires_grad=True)
    },
    "an LSE that wants a gradient": {
        "return_lse": True,
        "lse": torch.zeros(2, 1, 8, requires_grad=True),
    },
}
PREPARED: dict[str, dict[str, Any]] = {
    "a tensor for a page size": {"page_size": TABLE},
    "an array for a dtype": {"dtype": ARRAY},
}
OFFSETS = torch.arange(3, dtype=INT)
COMPACT: dict[str, Any] = {"query": torch.zeros(2, 8, 576, dtype=BF16)}
FORWARDED: dict[str, dict[str, Any]] = {
    "a tensor for is_var_seq": {"is_var_seq": VECTOR},
    "a tensor for uses_shared_paged_kv_idx": {"uses_shared_paged_kv_idx": VECTOR},
    "a tensor for use_fp16_softmax": {"use_fp16_softmax": VECTOR},
    "a string for a buffer of sparse MLA": {"backend": "sparse", "out": "e"},
    "an array for cute_dsl_impl": {"cute_dsl_impl": ARRAY},
    "an array for kv_scale_format": {"kv_scale_format": ARRAY},
    "an array for a base": {"return_lse_base": ARRAY},
    "a tensor for max_seq_len with DCP": {
        "max_seq_len": VECTOR,
        "enable_dcp": True,
        "return_lse": True,
        "causal_seqlens_kv_global": torch.full((2,), 7, dtype=INT),
    },
    "offsets in a column": COMPACT | {"cum_seq_lens_q": OFFSETS.unsqueeze(1)},
    "offsets on another device": COMPACT | {"cum_seq_lens_q": OFFSETS.to("meta")},
    "offsets in fp8": COMPACT | {"cum_seq_lens_q": OFFSETS.to(torch.float8_e4m3fn)},
    "offsets that are no numbers": COMPACT | {"cum_seq_lens_q": torch.full((3,), torch.nan)},
    "a keyword that the reference does not know": {
        "backend": "reference",
        "uses_shared_paged_kv_idx": False,
        "sinks": 0.5,
    },
}


@pytest.mark.parametrize("name", CHECKED)
def test_check_has_a_reason_for(name: str) -> None:
    config = test_check.any_configuration(b"").config
    test_check.judge_wild(test_check.Drawn("0.7.4", config | CHECKED[name]))


def test_check_has_a_reason_for_a_list_where_all_reasons_are_the_kernels() -> None:
    config = test_check.any_configuration(b"").config | {"kv_lora_rank": [512]}
    test_check.judge_wild(test_check.Drawn("a MagicMock", config))


@pytest.mark.parametrize("name", DECODED)
def test_decode_mla_has_an_error_for(name: str) -> None:
    test_decode.judge_decode(_plain_with(DECODED[name]))


@pytest.mark.parametrize("name", PREPARED)
def test_prepare_decode_mla_has_an_error_for(name: str) -> None:
    test_decode.judge_prepared(_plain_with(PREPARED[name]))


@pytest.mark.parametrize("name", FORWARDED)
def test_the_drop_in_has_an_error_for(name: str) -> None:
    call = test_dropin.any_call(b"")
    test_dropin.judge(call._replace(values=call.values | FORWARDED[name]))


def test_the_plainest_calls_are_right() -> None:
    test_check.judge(test_check.any_configuration(b""))
    assert test_check.judge_wild(test_check.any_configuration(b"")) == ()
    test_decode.judge_decode(_plain_with({}))
    test_dropin.judge(test_dropin.any_call(b""))


def _plain_with(values: dict[str, Any]) -> Given:
    call = right(Choices(b""), VERSIONS)
    return call._replace(values=call.values | values)
