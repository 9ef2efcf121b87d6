"""The drop-in with anything in it, on every recorded release."""

from __future__ import annotations

import functools
from typing import Any

import torch

from fi_dcp_compat import Reason, check
from fi_dcp_compat.abi import FUNCTION
from fi_dcp_compat.dropin import trtllm_batch_decode_with_kv_cache_mla as dropin
from fi_dcp_compat.dropin_guards import dense
from fi_dcp_compat.releases import recorded_versions
from fi_dcp_compat.validation import describe
from tests.fuzz.batches import fuzz
from tests.fuzz.calls import BACKENDS, PREPARED, REFERENCE, Given, changed, right, settled, shaped
from tests.fuzz.drawing import Choices
from tests.fuzz.judging import Died, assert_refused, on_every_rank, out_dtypes
from tests.support import RELEASES

# All, and twice those whose calls are checked.
VERSIONS = (*RELEASES[::-1], *recorded_versions()[::-1])
OWN = ("causal", "lse_base", *PREPARED)
# Keywords of FlashInfer's that only the drop-in can refuse: `check` does not know them.
KEYWORDS = ("enable_dcp", "cute_dsl_impl", "is_var_seq", "use_fp16_softmax")


class Call(Given):
    """A call by FlashInfer's names; ``world_size`` is its ``cp_world``."""

    def usual(self) -> dict[str, str]:
        return _plain()


@functools.cache
def _plain() -> dict[str, str]:
    return {name: describe(value) for name, value in any_call(b"").values.items()}


def any_call(data: bytes) -> Call:
    """One with up to three wild values in it."""
    choices = Choices(data)
    call = right(choices, VERSIONS, ("rectangle", "compact"))
    values = {name: value for name, value in call.values.items() if name not in OWN}
    world_size: int = values["world_size"]
    dcp = world_size > 1 or choices.lean((False, True))
    lengths = torch.full_like(values["seq_lens"], 7 * world_size)
    values |= {
        "bmm2_scale": values["bmm2_scale"] or 1.0,
        "max_q_len": choices.lean((values["max_q_len"], None)),
        "enable_dcp": dcp,
        "causal_seqlens_kv_global": lengths if dcp else None,
        "backend": choices.lean((values["backend"], "sparse", "cake")),
        "return_lse": values["return_lse"] or dcp,
        "return_lse_base": choices.lean((None, "basee", "base2")),
        "sparse_mla_top_k": choices.lean((0, 128)),
        "sparse_mla_top_k_lens": choices.lean((None, torch.zeros(2, dtype=torch.int32))),
        "is_var_seq": choices.lean((True, False)),
        "uses_shared_paged_kv_idx": choices.lean((True, False)),
        "cute_dsl_impl": choices.lean(("auto", "monolithic", "modular")),
        "kv_scale_format": choices.lean(("auto", "ue8m0")),
        "use_fp16_softmax": choices.lean((None, True, False)),
    }
    return changed(choices, Call(call.release, values))


def arguments(given: Given, rank: int) -> dict[str, Any]:
    """The drop-in's; only a call with DCP is of a rank."""
    named = {name: value for name, value in given.values.items() if name != "world_size"}
    return named | {"cp_world": given.values["world_size"], "cp_rank": rank}


def judge(given: Given) -> None:
    try:
        got = on_every_rank(given, lambda rank: dropin(**arguments(given, rank)))
    except Died:
        assert not checked(given)  # what goes through unseen is FlashInfer's to refuse
        return
    if got.error is None:
        empty = checked(given) and given.values["query"].shape[:-2].numel() == 0
        assert len(got.calls) == (given.values["backend"] != REFERENCE and not empty)
        if checked(given):
            assert check(given.abi, **configuration(given)) == ()
            assert_result(given, got.result)
    elif not got.error.reasons or not all(is_own(r, given) for r in got.error.reasons):
        assert_refused(got.error, given.abi, lambda: configuration(given))


def checked(given: Given) -> bool:
    """Whether `decode_mla` knows the rules of such a call."""
    known = given.abi.features.return_lse or given.values["backend"] == REFERENCE
    return known and dense(given.values)


def is_own(reason: Reason, given: Given) -> bool:
    """Whether only the drop-in can refuse so, and not `check`."""
    of_flashinfer = reason.summary.startswith(FUNCTION) or reason.argument in KEYWORDS
    return of_flashinfer or given.values["backend"] not in BACKENDS or not checked(given)


def configuration(given: Given) -> dict[str, Any]:
    """`check`'s keywords for a call by FlashInfer's names."""
    values, offsets = dict(given.values), given.values["cum_seq_lens_q"]
    if values["enable_dcp"] and values["backend"] == "auto":
        values["backend"] = "cute-dsl"  # one rank alone runs where all of them do
    if offsets is not None and values["max_q_len"] is None:
        values["max_q_len"] = max(1, int(offsets.diff().max()))
    query, cache = values["query"], values["kv_cache"]
    read = {"page_size": cache.shape[-2], "dtype": query.dtype, "kv_dtype": cache.dtype}
    return settled(values | read | {"causal": True}) | shaped(values)


def assert_result(given: Given, result: Any) -> None:
    """As FlashInfer returns it: a new LSE is [B * q_len, H]."""
    values = given.values
    out, lse = result if values["return_lse"] else (result, None)
    rows = values["query"].shape[:-1]
    if values["out"] is None:
        assert out.shape == (*rows, values["kv_lora_rank"])
        assert out.dtype in out_dtypes(given)
    else:
        assert out is values["out"]
    if lse is not None and values["lse"] is None:
        assert (lse.shape, lse.dtype) == ((rows[:-1].numel(), rows[-1]), torch.float32)
    else:
        assert lse is (values["lse"] if values["return_lse"] else None)


def test_the_drop_in_refuses_anything_as_check_does_or_calls_the_kernel() -> None:
    fuzz("drop-in, wild", 7_000, 104, any_call, judge)
