"""Small calls of every form, right ones and ones with something wild in them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fi_dcp_compat import DCP, FlashInferABI, recorded
from fi_dcp_compat.validation import describe
from tests.fuzz.drawing import Choices
from tests.fuzz.wild import wild
from tests.support import RELEASES
from tests.test_guards import zeros

INT, BF16, FP8 = torch.int32, torch.bfloat16, torch.float8_e4m3fn
DTYPES = (
    (BF16, BF16),
    (torch.float16, torch.float16),
    (FP8, FP8),
    (torch.float32, torch.float32),
    (BF16, FP8),
    (BF16, torch.uint8),
)
REFERENCE = "reference"
BACKENDS = ("auto", "cute-dsl", "trtllm-gen", "xqa", REFERENCE)
# What decode_mla runs on, newest first, and one that is too old.
VERSIONS = (*RELEASES[::-1], "0.6.11")
FORMS = ("rectangle", "flat", "compact")
# Not `decode_mla`'s: what its `DCP` is built of, and what only a prepared decoder is told.
GROUP = ("world_size", "interleave_size", "causal_seqlens_kv_global")
PREPARED = ("page_size", "dtype", "kv_dtype")
# What a decoder is prepared for besides; the rest belongs to a step.
SETTINGS = (
    "qk_nope_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "causal",
    "backend",
    "bmm1_scale",
    "bmm2_scale",
    "return_lse",
    "lse_base",
    "sinks",
    "skip_softmax_threshold_scale_factor",
    "enable_pdl",
)


class Given(NamedTuple):
    """What a call is given, by name, on a release; `wild` names what was changed in it."""

    release: str
    values: dict[str, Any]
    wild: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Only what is wild, or not as in the plainest call."""
        usual = self.usual()
        shown = [
            f"{name}={describe(value)}{' (wild)' if name in self.wild else ''}"
            for name, value in self.values.items()
            if name in self.wild or describe(value) != usual[name]
        ]
        return f"{self.release}: {', '.join(shown) or 'the plainest call'}"

    def usual(self) -> dict[str, str]:
        """The plainest call of this kind, described."""
        return _plain()

    @property
    def abi(self) -> FlashInferABI:
        return recorded(self.release)

    @property
    def ranks(self) -> range:
        """All, or the first few of a wild number of them."""
        size: object = self.values["world_size"]
        return range(max(1, min(size, 3))) if type(size) is int else range(1)

    @property
    def grouped(self) -> bool:
        """Whether `decode_mla` gets a `DCP`."""
        size: object = self.values["world_size"]
        alone = type(size) is int and size == 1
        return not alone or self.values["causal_seqlens_kv_global"] is not None

    def dcp(self, rank: int) -> DCP | None:
        world_size, interleave_size, lengths = (self.values[name] for name in GROUP)
        return DCP(world_size, rank, lengths, interleave_size) if self.grouped else None

    def arguments(self, rank: int) -> dict[str, Any]:
        """`decode_mla`'s."""
        others = {n: v for n, v in self.values.items() if n not in (*GROUP, *PREPARED)}
        return others | {"dcp": self.dcp(rank)}

    def settings(self, rank: int) -> dict[str, Any]:
        """`prepare_decode_mla`'s."""
        named = {name: self.values[name] for name in (*SETTINGS, *PREPARED)}
        size, interleave, _ = (self.values[name] for name in GROUP)
        return named | {
            "dcp_world_size": size,
            "dcp_rank": rank,
            "interleave_size": interleave,
        }

    def step(self) -> dict[str, Any]:
        """`MLADecoder.run`'s."""
        settings = (*SETTINGS, *PREPARED, "world_size", "interleave_size")
        return {n: v for n, v in self.values.items() if n not in settings}


G = TypeVar("G", bound=Given)


def right(choices: Choices, versions: Sequence[str], forms: Sequence[str] = FORMS) -> Given:
    """A call whose tensors fit each other; whether a kernel runs it is another matter."""
    form = choices.lean(forms)
    batch, q_len = choices.lean((2, 1, 3, 0)), choices.lean((1, 2, 3, 5, 0))
    heads = choices.lean((8, 1, 16, 40, 128, 65, 0))
    page_size = choices.lean((64, 1, 2, 16, 32, 128, 48, 0))
    rank, rope = choices.lean(((512, 64), (256, 64), (8, 8)))
    dtype, kv_dtype = choices.lean(DTYPES)
    whole = max(1, 128 // max(1, page_size))
    width, pages = whole * choices.lean((1, 2, 0)) + choices.lean((0, 1)), choices.lean((4, 1, 0))
    rows = (batch, q_len) if form == "rectangle" else (batch * q_len,)
    cache = zeros(pages, page_size, rank + rope, dtype=kv_dtype)
    world_size = choices.lean((1, 2, 3))
    lengths = torch.full((batch,), 7 * world_size, dtype=INT)
    values: dict[str, Any] = {
        "query": zeros(rank + rope, dtype=dtype).expand(*rows, heads, rank + rope),
        "kv_cache": cache.unsqueeze(1) if choices.lean((False, True)) else cache,
        "workspace_buffer": zeros(32 << 20, dtype=torch.int8),
        "block_tables": zeros(batch, width, dtype=INT),
        "seq_lens": torch.full((batch,), 7, dtype=INT),
        "max_seq_len": choices.lean((7, 1, 10**6)),
        "bmm1_scale": choices.lean((0.05, 1, torch.tensor(0.05))),
        "bmm2_scale": choices.lean((1.0, 0.5, None)),
        "qk_nope_head_dim": 128,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rope,
        "causal": choices.lean((True, False)),
        "cum_seq_lens_q": torch.arange(batch + 1, dtype=INT) * q_len if form == "compact" else None,
        "max_q_len": q_len if form == "compact" else choices.lean((None, q_len or None)),
        "backend": choices.lean(BACKENDS),
        "return_lse": choices.lean((False, True)),
        "lse_base": choices.lean(("e", "2")),
        "out": choices.lean((None, torch.empty(*rows, heads, rank, dtype=BF16))),
        "lse": choices.lean((None, torch.empty(*rows, heads))),
        "sinks": choices.lean((None, torch.zeros(heads))),
        "skip_softmax_threshold_scale_factor": choices.lean((None, 0.0, 1e-3)),
        "enable_pdl": choices.lean((None, True, False)),
        "multi_ctas_kv_counter_buffer": choices.lean((None, zeros(4096, dtype=torch.uint8))),
        "world_size": world_size,
        "interleave_size": choices.lean((1, 2)),
        "causal_seqlens_kv_global": lengths
        if world_size > 1 or choices.lean((False, True))
        else None,
        "page_size": page_size,
        "dtype": dtype,
        "kv_dtype": kv_dtype,
    }
    return Given(choices.pick(versions), values)


@functools.cache
def _plain() -> dict[str, str]:
    return {name: describe(value) for name, value in right(Choices(b""), VERSIONS).values.items()}


def changed(choices: Choices, call: G) -> G:
    """The call with up to three wild values in it."""
    values = dict(call.values)
    for _ in range(choices.pick((0, 1, 1, 1, 2, 3))):
        name = choices.pick(tuple(values))
        values[name] = wild(choices, values[name])
    names = [name for name, value in values.items() if value is not call.values[name]]
    longest = values["max_q_len"]
    if values["backend"] is REFERENCE and type(longest) is int:
        # It pads each request to that: a wild one would fill the memory.
        values["max_q_len"] = min(longest, 64)
    return call._replace(values=values, wild=tuple(names))


def any_call(data: bytes) -> Given:
    choices = Choices(data)
    return changed(choices, right(choices, VERSIONS))


def settled(values: dict[str, Any]) -> dict[str, Any]:
    """`check`'s keywords for what is known of a call before its tensors."""
    scales = (values["bmm1_scale"], values["bmm2_scale"])
    same = (*PREPARED, "causal", "backend", "return_lse", "kv_lora_rank", "qk_rope_head_dim")
    return {name: values[name] for name in same} | {
        "dcp_world_size": values["world_size"],
        "interleave_size": values["interleave_size"],
        "sinks": values["sinks"] is not None,
        "skip_softmax": bool(values["skip_softmax_threshold_scale_factor"]),
        "tensor_scales": any(isinstance(scale, Tensor) for scale in scales),
    }


def shaped(values: dict[str, Any]) -> dict[str, Any]:
    """`check`'s keywords for tensors that passed their own checks."""
    query, tables, longest = values["query"], values["block_tables"], values["max_q_len"]
    batch, compact = tables.shape[0], values["cum_seq_lens_q"] is not None
    if query.ndim == 4:
        q_len = query.shape[1]
    elif batch or compact:
        q_len = query.shape[0] // batch if longest is None else longest
    else:
        q_len = 1  # a flat query of no request has no length
    return {
        "num_heads": query.shape[-2],
        "q_len": q_len,
        "varlen": compact,
        "block_table_width": tables.shape[1],
        "batch": batch,
    }
