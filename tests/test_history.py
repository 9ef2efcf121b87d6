"""A call is what it is alone, whatever was called before it: nothing that is cached shows.

Every call here differs from a right one in one argument, often only by what compares equal to it,
and all others are the same objects: the calls that a cache is most likely to mix up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fi_dcp_compat import DCP, FlashInferCompatError, debug_checks, decode_mla, recorded
from fi_dcp_compat.dropin import trtllm_batch_decode_with_kv_cache_mla as drop_in
from fi_dcp_compat.prepared import prepare_decode_mla
from fi_dcp_compat.testing import use_kernel
from tests.support import call, stub_result

BF16, INT = torch.bfloat16, torch.int32
RIGHT = call(batch=4, q_len=2)
LENS = torch.full((4,), 55, dtype=INT)
STEP = ("query", "kv_cache", "block_tables", "seq_lens", "max_seq_len", "workspace_buffer")


# They all compare equal.
ONES = (1, 1.0, np.float64(1), np.float32(1), np.int64(1), True, np.True_, Fraction(1))


def shifted(tensor: Tensor) -> Tensor:
    """Copy it to where the kernel cannot read it: 2 bytes off."""
    flat = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
    return flat[1:].view(tensor.shape).copy_(tensor)


def apart(tensor: Tensor) -> Tensor:
    """Copy it to rows that lie apart, as in a pool of layers."""
    pool = torch.zeros(tensor.shape[0], 2, *tensor.shape[1:], dtype=tensor.dtype)
    return pool[:, 1].copy_(tensor)


def other_tensors() -> Iterator[tuple[str, dict[str, Any]]]:
    query, cache, tables = RIGHT["query"], RIGHT["kv_cache"], RIGHT["block_tables"]
    for name in ("query", "kv_cache", "block_tables", "seq_lens", "workspace_buffer"):
        tensor = RIGHT[name]
        yield f"another {name}", {name: tensor.clone()}
        yield f"{name} off by two bytes", {name: shifted(tensor)}
        yield f"{name} apart", {name: apart(tensor)}
        yield f"{name} elsewhere", {name: tensor.to("meta")}
        yield f"{name} in float64", {name: tensor.double()}
        yield f"sparse {name}", {name: tensor[:64].to_sparse()}
        yield f"numpy {name}", {name: tensor[:64].float().numpy()}
        yield f"no {name}", {name: None}
    wide = [torch.zeros(*tensor.shape[:-1], 1152, dtype=BF16) for tensor in (query, cache)]
    yield "every other element of a query", {"query": wide[0][..., ::2]}
    yield "pages with gaps", {"kv_cache": wide[1][..., :576]}
    yield "flat query", {"query": query.flatten(0, 1)}
    yield "flat query of one token each", {"query": query[:, 0].contiguous()}
    yield "one token each", {"query": query[:, :1].contiguous()}
    yield "one token each, apart", {"query": query[:, :1]}
    yield "fewer heads", {"query": query[:, :, :8].contiguous()}
    yield "fewer heads, apart", {"query": query[:, :, :8]}
    yield "a query without requests", {"query": query[:0], "block_tables": tables[:0]}
    yield "a cache with heads", {"kv_cache": cache.unsqueeze(1)}
    yield "fewer pages", {"kv_cache": cache[:-1]}
    yield "smaller pages", {"kv_cache": cache.view(-1, 32, 576)}
    yield "a cache of one dimension", {"kv_cache": cache[0, 0]}
    eighth = {name: RIGHT[name].to(torch.float8_e4m3fn) for name in ("query", "kv_cache")}
    yield "fp8", eighth | {"bmm2_scale": 1.0}
    yield "fp8 without its scale", eighth
    one_head = query[:, :, :1].contiguous()
    yield "one head", {"query": one_head}
    strides = (1152, 576, 7777, 1)
    yield (
        "one head, of strides that say nothing",
        {"query": one_head.as_strided((4, 2, 1, 576), strides)},
    )
    yield "a wider table", {"block_tables": torch.zeros(4, 6, dtype=INT)}
    yield "fewer requests", {"block_tables": tables[:2].clone()}


def other_values() -> Iterator[tuple[str, dict[str, Any]]]:
    rows, heads = (4, 2), 16
    out = torch.zeros(*rows, heads, 512, dtype=BF16)
    for name, values in {
        "max_seq_len": (0, 1, True, 7.0, None),
        "bmm1_scale": (
            1,
            1.0,
            np.float64(1),
            True,
            0.25,
            0,
            -1.0,
            float("nan"),
            torch.tensor(0.25),
        ),
        "bmm2_scale": (1, 1.0, True, 0.5, torch.tensor(1.0)),
        "qk_nope_head_dim": (128.0, 64, True, 1),
        "kv_lora_rank": (512.0, 256),
        "qk_rope_head_dim": (64.0, 32),
        "causal": (1, False, 0, None),
        "return_lse": (True, 1, 0, 1.0),
        "lse_base": ("2", "e", 2, ["e"]),
        "backend": ("cute-dsl", "trtllm-gen", "reference", "nonsense", ["auto"]),
        "enable_pdl": (True, False, 1, 0),
        "skip_softmax_threshold_scale_factor": (0, 0.0, False, np.float32(0), *ONES),
        "max_q_len": (2, 2.0, 3, True),
        "sinks": (torch.zeros(16), [torch.zeros(16)], torch.zeros(8)),
        "out": (out, out.flatten(0, 1), out.float(), apart(out), out.clone().requires_grad_()),
        "lse": (torch.zeros(*rows, heads), torch.zeros(8, heads), torch.zeros(*rows, 8)),
        "multi_ctas_kv_counter_buffer": (torch.zeros(4096, dtype=torch.uint8), 7),
        "cum_seq_lens_q": (torch.tensor([0, 2, 4, 6, 8], dtype=INT),),
    }.items():
        for value in values:
            yield f"{name} {describe(value)}", {name: value}
    yield "an LSE too", {"return_lse": True, "lse": torch.zeros(*rows, heads)}
    compact = {
        "query": RIGHT["query"].flatten(0, 1)[:7],
        "cum_seq_lens_q": torch.tensor([0, 1, 3, 5, 7], dtype=INT),
        "max_q_len": 2,
    }
    yield "requests of different lengths", compact
    yield "requests of a longer bound", compact | {"max_q_len": 3}
    yield "requests of a bound that equals it", compact | {"max_q_len": 2.0}


def other_groups() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "DCP", {"dcp": DCP(8, 3, LENS)}
    yield "another rank", {"dcp": DCP(8, 4, LENS)}
    yield "another world", {"dcp": DCP(4, 3, LENS)}
    yield "a group of one", {"dcp": DCP(1, 0, LENS)}
    yield "a group of one, interleaved", {"dcp": DCP(1, 0, LENS, 64)}
    yield "other lengths", {"dcp": DCP(8, 3, LENS.clone())}
    yield "lengths in int64", {"dcp": DCP(8, 3, LENS.long())}
    yield "no lengths", {"dcp": DCP(8, 3, None)}  # type: ignore[arg-type]  # the point
    yield "no DCP at all", {"dcp": 8}


def describe(value: object) -> str:
    shown = f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else repr(value)
    return f"{type(value).__name__} {shown}"


CHANGES: dict[str, dict[str, Any]] = {"right": {}}
for found in (other_tensors, other_values, other_groups):
    CHANGES.update(found())
WITH_DCP = {
    name: {"dcp": DCP(8, 3, LENS)} | change
    for name, change in CHANGES.items()
    if not name.startswith(("sinks", "skip", "backend"))
}


def place(value: object) -> int | None:
    return value.data_ptr() if isinstance(value, Tensor) and not value.is_sparse else None


GIVEN = {
    place(value) for values in (RIGHT, *WITH_DCP.values()) for value in (*values.values(), LENS)
}


def seen(value: object) -> object:
    """Show a value so that two are equal only if they are the same to a kernel and to a caller."""
    if isinstance(value, Tensor):
        # What was made for this call lies elsewhere each time.
        at = place(value) if place(value) in GIVEN else None
        return (type(value), value.shape, value.stride(), value.dtype, value.device, at)
    if isinstance(value, tuple):
        return (type(value), *map(seen, value))
    return (type(value), repr(value))


class Recorder:
    """A kernel that keeps what it got."""

    def __init__(self) -> None:
        self.got: dict[str, object] | None = None

    def __call__(self, **arguments: Any) -> Any:
        self.got = {name: seen(value) for name, value in sorted(arguments.items())}
        return stub_result(**arguments)


def outcome(kernel: Recorder, act: Callable[[], object]) -> object:
    """Return what a call handed the kernel and gave back, or the error that it raised."""
    kernel.got = None
    try:
        result = act()
    except FlashInferCompatError as exc:
        return type(exc), str(exc), kernel.got
    return seen(result), kernel.got


def one_shot(change: Mapping[str, Any]) -> Callable[[], object]:
    return lambda: decode_mla(**(RIGHT | dict(change)))


def dropped_in(change: Mapping[str, Any]) -> Callable[[], object] | None:
    """Return the same call by FlashInfer's own keywords, where it has them."""
    given = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64} | RIGHT | dict(change)
    dcp = given.pop("dcp", None)
    if not given.pop("causal", True) or given.pop("lse_base", "e") != "e":
        return None
    if dcp is not None:
        if not isinstance(dcp, DCP):
            return None
        given |= {"enable_dcp": True, "cp_world": dcp.world_size, "cp_rank": dcp.rank}
        given |= {"causal_seqlens_kv_global": dcp.causal_seqlens_kv_global, "return_lse": True}
    if given.get("bmm2_scale") is None:
        given["bmm2_scale"] = 1.0
    return lambda: drop_in(**given)


def the_same_after_any_other(
    acts: Mapping[str, Callable[[], object]], before: Mapping[str, Callable[[], object]]
) -> int:
    """Hold each of `acts` alone against each after each of `before`; return how many pairs."""
    abi = recorded("0.7.4")
    pairs = 0
    kernel = Recorder()
    alone: dict[str, object] = {}
    for name, act in acts.items():
        with use_kernel(kernel, abi):
            alone[name] = outcome(kernel, act)
    for first, earlier in before.items():
        for name, act in acts.items():
            with use_kernel(kernel, abi):
                outcome(kernel, earlier)
                assert outcome(kernel, act) == alone[name], f"{name!r} after {first!r}"
            pairs += 1
    return pairs


@pytest.mark.parametrize("changes", [CHANGES, WITH_DCP], ids=["without DCP", "with DCP"])
def test_a_call_is_the_same_after_any_other(changes: Mapping[str, Mapping[str, Any]]) -> None:
    acts = {name: one_shot(change) for name, change in changes.items()}
    assert the_same_after_any_other(acts, acts) == len(changes) ** 2


def test_a_call_with_dcp_is_the_same_after_one_without_and_the_other_way_round() -> None:
    plain = {name: one_shot(change) for name, change in CHANGES.items()}
    ranked = {name: one_shot(change) for name, change in WITH_DCP.items()}
    one = {"right": plain["right"]}
    with_one = {"right": ranked["right"]}
    the_same_after_any_other(ranked, one)
    the_same_after_any_other(plain, with_one)
    the_same_after_any_other(one, ranked)
    the_same_after_any_other(with_one, plain)


@pytest.mark.parametrize("changes", [CHANGES, WITH_DCP], ids=["without DCP", "with DCP"])
def test_a_call_is_the_same_after_the_drop_in_and_the_drop_in_after_a_call(
    changes: Mapping[str, Mapping[str, Any]],
) -> None:
    calls = {name: one_shot(change) for name, change in changes.items()}
    dropped = {name: act for name, change in changes.items() if (act := dropped_in(change))}
    right_call, right_drop = {"right": calls["right"]}, {"right": dropped["right"]}
    the_same_after_any_other(calls, right_drop)
    the_same_after_any_other(dropped, right_call)
    the_same_after_any_other(dropped, right_drop)
    the_same_after_any_other(right_call, dropped)
    the_same_after_any_other(right_drop, dropped)


@pytest.mark.parametrize("dcp", [False, True])
def test_a_step_of_a_prepared_decoder_is_the_same_after_any_other(dcp: bool) -> None:
    """One decoder takes all steps, and each decoder of the model shares what it finds."""
    own = {*STEP, "cum_seq_lens_q", "max_q_len", "out", "lse", "multi_ctas_kv_counter_buffer"}
    changes = [change for change in CHANGES.values() if change.keys() <= own]
    if dcp:
        lengths = (LENS, LENS.clone(), LENS.long(), None)
        changes += [{"causal_seqlens_kv_global": each} for each in lengths]
    ranks: dict[str, Any] = {"dcp_world_size": 8, "dcp_rank": 3} if dcp else {}
    kernel = Recorder()

    def steps() -> list[Callable[[], object]]:
        decoders = [
            prepare_decode_mla(page_size=64, dtype=BF16, bmm1_scale=scale, return_lse=dcp, **ranks)
            for scale in (0.05, 0.25)
        ]
        acts: list[Callable[[], object]] = []
        for number, change in enumerate(changes):
            given: dict[str, Any] = {"causal_seqlens_kv_global": LENS} if dcp else {}
            given |= RIGHT | change
            step = [given.pop(name) for name in STEP]
            for name in ("bmm1_scale", "kv_lora_rank"):
                del given[name]
            decoder = decoders[number % 2]
            acts.append(partial(decoder.run, *step, **given))
        return acts

    abi = recorded("0.7.4")
    alone = []
    for number in range(len(changes)):
        with use_kernel(kernel, abi):
            alone.append(outcome(kernel, steps()[number]))
    for first in range(len(changes)):
        with use_kernel(kernel, abi):
            acts = steps()
            for number, act in enumerate(acts):
                outcome(kernel, acts[first])
                assert outcome(kernel, act) == alone[number], (changes[number], changes[first])


def test_values_are_checked_inside_the_block_whatever_passed_before_it() -> None:
    wrong = {"seq_lens": torch.tensor([7, -1, 7, 7], dtype=INT)}
    with ExitStack() as stack:
        stack.enter_context(use_kernel(Recorder(), recorded("0.7.4")))
        for _ in range(3):
            one_shot(wrong)()
            with debug_checks(), pytest.raises(FlashInferCompatError, match="is negative"):
                one_shot(wrong)()


def test_numpy_is_what_these_calls_take_for_another_library() -> None:
    assert isinstance(CHANGES["numpy query"]["query"], np.ndarray)
