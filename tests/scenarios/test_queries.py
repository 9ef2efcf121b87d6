"""Query tokens: requests of different lengths, and blocks that are not causal: S19, S38."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fi_dcp_compat import (
    DCP,
    FlashInferVersionError,
    UnsupportedConfigError,
    check,
    decode_mla,
    flatten_query_rows,
    local_seq_lens,
    merge_dcp_states,
    probe,
    recorded,
)
from fi_dcp_compat.dropin import trtllm_batch_decode_with_kv_cache_mla
from fi_dcp_compat.testing import mock_kernel, use_kernel
from tests.fakes import Site
from tests.scenarios.inputs import dropin_dcp_call, keys_seen, lens
from tests.support import DCP_RELEASES, RELEASES, call, dcp_of

# S19: one token of the first request and three of the second, with DCP.

REFUSING = ("0.6.17", "0.6.18", "0.6.18.post1")
TAKING = ("0.7.0", "0.7.0.post1", "0.7.1", "0.7.2", "0.7.2.post1", "0.7.4")


def compact_queries() -> dict[str, Any]:
    query = torch.zeros(4, 16, 576).bfloat16()
    return {"query": query, "cum_seq_lens_q": lens(0, 1, 4), "max_q_len": 3}


@pytest.mark.parametrize("version", REFUSING)
def test_s19_an_older_release_is_refused_with_0_7_0_and_the_uniform_query(version: str) -> None:
    kernel = mock_kernel(version)
    with use_kernel(kernel):
        with pytest.raises(FlashInferVersionError, match="cum_seq_lens_q") as raised:
            decode_mla(**call(**compact_queries()), dcp=dcp_of())
        with pytest.raises(FlashInferVersionError, match="cum_seq_lens_q") as from_dropin:
            trtllm_batch_decode_with_kv_cache_mla(
                **dropin_dcp_call(8, 3, lens(55, 55), **compact_queries())
            )
    kernel.assert_not_called()
    text = (
        "decode_mla(dcp=..., cum_seq_lens_q=...) needs FlashInfer's compact variable-length "
        "queries with DCP.\n"
        f"Found: flashinfer-python {version}.\n"
        "Needed: 0.7.0 or newer (#4719).\n"
        'Fix: pip install -U "flashinfer-python>=0.7.0", or pad to a uniform query '
        "[B, q_len, H, D], each request's tokens last."
    )
    assert str(raised.value) == text
    assert str(from_dropin.value) == text.replace(
        "decode_mla(dcp=..., cum_seq_lens_q=...)",
        "trtllm_batch_decode_with_kv_cache_mla(enable_dcp=True, cum_seq_lens_q=...)",
    )


@pytest.mark.parametrize("version", TAKING)
def test_s19_a_newer_one_gets_the_flat_query_and_a_global_length_of_each_request(
    version: str,
) -> None:
    kernel, given = mock_kernel(version), call(**compact_queries())
    with use_kernel(kernel):
        state = decode_mla(**given, dcp=dcp_of())
    seen = kernel.call_args.kwargs
    assert seen["query"].shape == (4, 16, 576)
    assert seen["cum_seq_lens_q"] is given["cum_seq_lens_q"]
    assert seen["max_q_len"] == 3
    assert seen["causal_seqlens_kv_global"].shape == (2,)
    assert (state.out.shape, state.lse.shape) == ((4, 16, 512), (4, 16))


def test_s19_no_signature_tells_the_two_apart() -> None:
    old, new = recorded("0.6.18.post1"), recorded("0.7.0")
    assert old.parameters == new.parameters
    assert (old.features.varlen_dcp, new.features.varlen_dcp) == (False, True)


@pytest.mark.parametrize("version", ["0.0.0+unknown", "unknown", "not a version"])
@pytest.mark.parametrize(
    ("like", "supported"),
    [("0.6.17", False), ("0.6.18", False), ("0.7.0", False), ("0.7.1", True), ("0.7.4", True)],
)
def test_s19_without_a_version_a_keyword_of_a_release_that_has_it_must_prove_it(
    like: str, supported: bool, version: str
) -> None:
    # 0.7.1 brought return_lse_base, which shows that 0.7.0's behaviour is there.
    abi = recorded(like)._replace(version=version)
    assert ("return_lse_base" in {p.name for p in abi.parameters}) is supported
    reasons = check(
        abi,
        num_heads=16,
        q_len=3,
        page_size=64,
        dtype="bfloat16",
        dcp_world_size=8,
        varlen=True,
    )
    if supported:
        assert reasons == ()
        return
    (reason,) = reasons
    assert reason.error is FlashInferVersionError
    assert reason.found == (
        f"flashinfer-python of unknown version ({version}), whose signature does not show it."
    )
    assert reason.needed == "0.7.0 or newer (#4719)."
    assert reason.fix == (
        'pip install -U "flashinfer-python>=0.7.0", or set FI_DCP_COMPAT_ASSUME_VERSION to the '
        "release it stands for, or pad to a uniform query [B, q_len, H, D], each request's "
        "tokens last."
    )


def test_s19_or_the_environment_says_which_release_it_is(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.flashinfer(None, like="0.7.0", distribution=None)
    assert probe().version == "0.0.0+unknown"
    assert probe().features.varlen_dcp is False
    monkeypatch.setenv("FI_DCP_COMPAT_ASSUME_VERSION", "0.7.0")
    probe.cache_clear()
    assert probe().features.varlen_dcp is True


# S38: blocks whose rows all see the whole context.


@pytest.mark.parametrize("version", DCP_RELEASES)
@pytest.mark.parametrize("q_len", [2, 3])
@pytest.mark.parametrize("backend", ["auto", "cute-dsl", "reference"])
def test_s38_a_non_causal_block_with_dcp_is_refused_with_what_flattens_it(
    backend: str, q_len: int, version: str
) -> None:
    kernel = mock_kernel(version)
    with (
        use_kernel(kernel),
        pytest.raises(UnsupportedConfigError, match="A non-causal block cannot be") as raised,
    ):
        decode_mla(**call(q_len=q_len, causal=False, backend=backend), dcp=dcp_of())
    kernel.assert_not_called()
    assert str(raised.value) == (
        "A non-causal block cannot be masked with DCP.\n"
        "Found: causal=False with dcp_world_size=8.\n"
        "Needed: causal=True: FlashInfer's DCP mask is causal in every known release.\n"
        "Fix: flatten the block with flatten_query_rows: one-token rows, each with its own bound, "
        "are ordinary causal calls."
    )


def test_s38_flattened_rows_have_the_whole_context_of_their_request_as_bound() -> None:
    rows = flatten_query_rows(lens(0, 1, 4), 5, torch.tensor([[5], [6]]), lens(2, 3), lens(7, 10))
    assert rows.block_tables.tolist() == [[5], [6], [6], [6], [6]]
    # The row behind the last request is padding.
    assert rows.seq_lens.tolist() == [2, 3, 3, 3, 3]
    assert rows.causal_seqlens_kv_global is not None
    assert rows.causal_seqlens_kv_global.tolist() == [7, 10, 10, 10, 10]


def test_s38_every_flattened_row_sees_all_keys_of_all_ranks() -> None:
    states = []
    for rank in range(4):
        local = local_seq_lens(lens(10), 4, rank)
        given = call(batch=1, seq_lens=local, max_seq_len=3, backend="reference")
        rows = flatten_query_rows(lens(0, 3), 3, given["block_tables"], given["seq_lens"], lens(10))
        assert rows.causal_seqlens_kv_global is not None
        given |= {"query": torch.zeros(3, 16, 576).bfloat16(), "seq_lens": rows.seq_lens}
        given |= {"block_tables": rows.block_tables}
        states.append(decode_mla(**given, dcp=DCP(4, rank, rows.causal_seqlens_kv_global)))
    merged = merge_dcp_states([s.out for s in states], [s.lse for s in states])
    assert merged.lse.shape == (3, 16)
    # Ten keys of the weight 1.
    torch.testing.assert_close(merged.lse, torch.full((3, 16), math.log(10)))


def test_s38_without_dcp_the_call_flattens_by_itself() -> None:
    assert keys_seen(10, 3, 1, 0) == [8, 9, 10]
    assert keys_seen(10, 3, 1, 0, causal=False) == [10, 10, 10]


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("backend", ["auto", "trtllm-gen", "cute-dsl"])
def test_s38_and_the_kernel_gets_rows_of_one_token(backend: str, version: str) -> None:
    kernel = mock_kernel(version)
    with use_kernel(kernel):
        out = decode_mla(**call(q_len=3, seq_lens=lens(7, 9), causal=False, backend=backend))
    assert out.shape == (2, 3, 16, 512)
    given = kernel.call_args.kwargs
    assert given["query"].shape == (6, 1, 16, 576)
    assert given["seq_lens"].tolist() == [7, 7, 7, 9, 9, 9]
    assert given["block_tables"].tolist() == [[0, 1]] * 3 + [[2, 3]] * 3
