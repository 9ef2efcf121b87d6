"""FlashInfer's own keywords: what a release lacks of a call, and what cannot go together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch
from packaging.version import Version

from .abi import CORE_KEYWORDS, FUNCTION, FlashInferABI, missing_feature, upgrade_command
from .config import UNIFORM_INSTEAD, for_all_of_it, refused
from .errors import FlashInferVersionError, Reason
from .features import DCP_KEYWORDS, FEATURES, ROWS, LseBase
from .guards import drift_reason
from .known_issues import issues_of
from .limits import CUTE_DSL_MAX_Q_LEN_WITH_SINKS, DCP_BACKENDS, LSE_BASE_WORDS
from .releases import recorded_versions
from .validation import invalid, is_tensor, require_int

__all__ = ["LSE_BASE_OF", "Call", "check_words", "dense", "keyword_reasons", "release_reasons"]

# A call by FlashInfer's keywords, all of them, defaults too.
Call: TypeAlias = "dict[str, Any]"  # pyright: ignore[reportExplicitAny]

_BACKENDS = {"cute-dsl": "cute_dsl", "sparse": "sparse_backend", "cake": "cake_backend"}
_ROW_OF = {keyword: row for row in FEATURES for keyword in row.keywords}
LSE_BASE_OF: dict[str, LseBase] = {word: base for base, word in LSE_BASE_WORDS.items()}


def check_words(call: Call) -> None:
    """Raise InvalidInputError where the call contradicts itself on every release."""
    query, shapes = call["query"], "[B, q_len, H, D], or [num_tokens, H, D] with cum_seq_lens_q"
    if not is_tensor(query) or query.ndim != (4 if call["cum_seq_lens_q"] is None else 3):
        invalid("query", f"must be {shapes}", query, shapes, "reshape it")
    if not is_tensor(call["kv_cache"]):
        invalid("kv_cache", "must be a tensor", call["kv_cache"], "a paged cache", "pass a tensor")
    require_int("sparse_mla_top_k", call["sparse_mla_top_k"], 0)
    for name in ("enable_dcp", "return_lse", "is_var_seq", "uses_shared_paged_kv_idx"):
        if type(call[name]) is not bool:
            invalid(name, "must be a bool", call[name], "True or False", "pass one")
    softmax = call["use_fp16_softmax"]
    if softmax is not None and type(softmax) is not bool:
        invalid("use_fp16_softmax", "must be a bool", softmax, "True, False or None", "drop it")
    for name in ("backend", "cute_dsl_impl", "kv_scale_format"):
        if not isinstance(call[name], str):
            invalid(name, "must be a string", call[name], "one of FlashInfer's", "pass 'auto'")
    for name in ("out", "lse"):
        if call[name] is not None and not is_tensor(call[name]):
            invalid(name, "must be a tensor", call[name], "a buffer, or None", "pass a tensor")
    for name in ("bmm1_scale", "bmm2_scale"):
        if call[name] is None:
            invalid(name, "must be a scale", None, "a float or a tensor", "leave it out for 1.0")
    base = call["return_lse_base"]
    if base is not None and not (isinstance(base, str) and base in LSE_BASE_OF):
        needed = f"one of {', '.join(LSE_BASE_OF)}, or None for the backend's own"
        invalid("return_lse_base", f"must be {needed}", base, needed, "pass one of those")
    if call["enable_dcp"]:
        if not call["return_lse"]:
            needed = "return_lse=True: ranks cannot be merged without the LSE"
            invalid("return_lse", "must be True with enable_dcp", False, needed, "pass True")
        if call["causal_seqlens_kv_global"] is None:
            name, needed = "causal_seqlens_kv_global", "[B] int32, the global KV lengths"
            invalid(name, "must be given with DCP", None, needed, "pass the global lengths")
        return
    for name, unused in (("cp_world", 1), ("cp_rank", 0), ("causal_seqlens_kv_global", None)):
        value = call[name]
        if value is not unused and not (type(value) is int and value == unused):
            needed = f"enable_dcp=True with {name}"
            invalid(name, "means nothing without enable_dcp", value, needed, "pass enable_dcp=True")


def dense(call: Call) -> bool:
    """Return whether it is dense MLA, whose rules this package knows."""
    return (
        call["sparse_mla_top_k"] == 0
        and call["sparse_mla_top_k_lens"] is None
        and call["backend"] not in ("sparse", "cake")
        and bool(call["uses_shared_paged_kv_idx"])
        and call["kv_cache"].dtype is not torch.uint8
    )


def release_reasons(
    abi: FlashInferABI, asked: Iterable[str], backend: str, *, dcp: bool, compact: bool, lse: bool
) -> Iterator[Reason]:
    """Yield what the release lacks of a call; `asked` names what differs from the defaults."""
    if abi.unreadable:
        yield from _missing(abi, "return_lse", FUNCTION)
        return
    oldest = recorded_versions()[0]
    if abi.release is not None and abi.release < Version(oldest):
        yield Reason(
            FlashInferVersionError,
            "kernel",
            f"{FUNCTION} is another function before {oldest}.",
            f"{abi.describe()}.",
            f"{oldest} or newer.",
            f"{upgrade_command(abi, oldest)}.",
        )
        return
    lost = abi.lacks(*CORE_KEYWORDS)
    if lost:
        yield drift_reason(abi, lost)
    if abi.newly_required:
        yield drift_reason(abi, abi.newly_required, "newly requires")
    if dcp:
        instead = "call with enable_dcp=False"
        for reason in _missing(abi, "native_dcp", f"{FUNCTION}(enable_dcp=True)", instead):
            yield for_all_of_it(reason, ROWS["varlen_dcp"].since) if compact else reason
        if compact and abi.features.native_dcp:
            what = f"{FUNCTION}(enable_dcp=True, cum_seq_lens_q=...)"
            instead = UNIFORM_INSTEAD
            yield from _missing(abi, "varlen_dcp", what, instead)
    if lse:
        yield from _missing(abi, "return_lse", f"{FUNCTION}(return_lse=True)")
    if backend not in ("auto", "trtllm-gen", "xqa", "reference", *_BACKENDS):
        yield refused(
            "backend",
            f"backend={backend!r} is not one of FlashInfer's.",
            f"{backend!r}.",
            f"one of auto, trtllm-gen, xqa, {', '.join(_BACKENDS)}, or reference.",
            "name one of those; reference is plain torch, for tests without a GPU.",
        )
    elif backend in _BACKENDS:
        yield from _missing(abi, _BACKENDS[backend], f"{FUNCTION}(backend={backend!r})")
    for name in abi.lacks(*sorted(asked)):
        row = _ROW_OF.get(name)
        if name in DCP_KEYWORDS or (row is not None and row.name == "return_lse"):
            continue  # told above
        if row is None:
            yield drift_reason(abi, (name,))
        else:
            yield from _missing(abi, row.name, f"{FUNCTION}({name}=...)")


def _missing(abi: FlashInferABI, feature: str, asked: str, instead: str = "") -> Iterator[Reason]:
    reason = missing_feature(abi, feature, asked=asked, instead=instead)
    if reason is not None:
        yield reason


def keyword_reasons(abi: FlashInferABI, call: Call) -> Iterator[Reason]:
    """Yield why FlashInfer's keywords that `decode_mla` has not cannot be taken together."""
    able = ("auto", "reference", *DCP_BACKENDS)
    if call["enable_dcp"] and (not dense(call) or call["backend"] not in able):
        yield refused(
            "enable_dcp",
            "enable_dcp=True masks dense MLA decode on cute-dsl only.",
            f"backend={call['backend']!r}, sparse_mla_top_k={call['sparse_mla_top_k']}, "
            f"uses_shared_paged_kv_idx={call['uses_shared_paged_kv_idx']}.",
            f"backend='auto' or {DCP_BACKENDS[0]!r} and a dense cache of the query's dtype.",
            "decode dense MLA with DCP, or call with enable_dcp=False.",
        )
    if call["backend"] == "reference" and not dense(call):
        yield refused(
            "backend",
            "backend='reference' computes dense MLA only.",
            f"sparse_mla_top_k={call['sparse_mla_top_k']}, kv_cache of {call['kv_cache'].dtype}.",
            "a dense cache of the query's dtype, and no sparse_mla_top_k.",
            "name a backend of FlashInfer's.",
        )
    tokens = 1 if call["query"].ndim == 3 else call["query"].shape[1]
    several = tokens > CUTE_DSL_MAX_Q_LEN_WITH_SINKS or call["cum_seq_lens_q"] is not None
    may_be_cute_dsl = call["backend"] in ("auto", "cute-dsl")
    if call["cute_dsl_impl"] == "modular" and may_be_cute_dsl and (several or call["return_lse"]):
        yield refused(
            "cute_dsl_impl",
            "cute_dsl_impl='modular' has no causal mask between query tokens, and no LSE.",
            f"cute_dsl_impl='modular' with {tokens} query tokens, return_lse={call['return_lse']}.",
            "one query token and no LSE.",
            "leave cute_dsl_impl out.",
        )
    persistent = not call["is_var_seq"] and may_be_cute_dsl
    persistent_fp8 = persistent and call["query"].dtype is torch.float8_e4m3fn
    if persistent_fp8 and any(issue.name == "persistent_fp8_hang" for issue in issues_of(abi)):
        yield refused(
            "is_var_seq",
            "is_var_seq=False may hang with an fp8 cache on this release.",
            f"is_var_seq=False on {abi.describe()}.",
            "is_var_seq=True, which is right for equal lengths too (#4197).",
            "leave is_var_seq out.",
        )
    if call["use_fp16_softmax"] and (
        call["enable_dcp"] or call["backend"] not in ("auto", "trtllm-gen")
    ):
        yield refused(
            "use_fp16_softmax",
            "use_fp16_softmax=True is trtllm-gen's only.",
            f"use_fp16_softmax=True with backend={call['backend']!r}, "
            f"enable_dcp={call['enable_dcp']}.",
            "backend='trtllm-gen' on compute capability 10.7.",
            "leave use_fp16_softmax out.",
        )
