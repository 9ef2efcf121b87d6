"""A call's configuration without its tensors, and what is wrong with a value by itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple, cast

from packaging.version import Version

from .errors import Reason, UnsupportedConfigError
from .limits import INTERLEAVE_SIZES

__all__ = [
    "BACKENDS",
    "UNIFORM_INSTEAD",
    "Config",
    "for_all_of_it",
    "interleave_reason",
    "refused",
    "value_reasons",
]

BACKENDS = ("auto", "trtllm-gen", "cute-dsl", "xqa", "reference")


# The newest tokens are the last rows: a mask cuts the bound from there.
UNIFORM_INSTEAD = "pad to a uniform query [B, q_len, H, D], each request's tokens last"


class Config(NamedTuple):
    """A call's configuration, without its tensors; dtypes by name, so torch is not needed."""

    num_heads: int
    q_len: int
    page_size: int
    dtype: str
    kv_dtype: str
    dcp_world_size: int = 1
    interleave_size: int = 1
    causal: bool = True
    backend: str = "auto"
    varlen: bool = False
    return_lse: bool = False
    sinks: bool = False
    skip_softmax: bool = False
    tensor_scales: bool = False
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    compute_capability: tuple[int, int] | None = None
    block_table_width: int | None = None
    batch: int | None = None

    @property
    def wants_lse(self) -> bool:
        """Whether the kernel is asked for an LSE; ranks cannot be merged without."""
        return self.return_lse or self.dcp_world_size > 1

    def flattened(self) -> Config:
        """Return what the kernel runs: a non-causal block is a batch of one-token rows."""
        if self.causal:
            return self
        rows = None if self.batch is None else self.batch * self.q_len
        return self._replace(q_len=1, varlen=False, batch=rows)


def refused(argument: str, summary: str, found: str, needed: str, fix: str) -> Reason:
    """Build the reason for a configuration that no upgrade makes possible."""
    return Reason(UnsupportedConfigError, argument, summary, found, needed, fix)


def for_all_of_it(reason: Reason, release: str) -> Reason:
    """Name `release` where a reason's own upgrade would not be enough for all of the call."""
    command = re.search(r'>=([^"]+)"', reason.fix)
    if command is None or Version(command[1]) >= Version(release):
        return reason
    return reason._replace(
        needed=f"{reason.needed.removesuffix('.')}; {release} for all of this call.",
        fix=reason.fix.replace(command[0], f'>={release}"'),
    )


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, cast("tuple[object, ...]", value)))
    return value is None or isinstance(value, (bool, int, float, str))


def _shown(value: object) -> str:
    """Show a value that may be anything: a tensor's contents are no message."""
    return repr(value) if _is_plain(value) else f"of type {type(value).__name__}"


_SWITCHES = ("causal", "varlen", "return_lse", "sinks", "skip_softmax", "tensor_scales")


def value_reasons(config: Config) -> Iterator[Reason]:
    """Yield what is wrong with each value by itself, whatever its annotation promises."""
    backend: object = config.backend
    if not isinstance(backend, str) or backend not in BACKENDS:
        yield refused(
            "backend",
            f"backend={_shown(backend)} is not one of decode_mla's.",
            f"{_shown(backend)}.",
            f"one of {', '.join(BACKENDS)}.",
            "name one of those; sparse MLA and packed caches need FlashInfer's own function.",
        )
    counts = ("num_heads", "q_len", "page_size", "dcp_world_size", "interleave_size")
    optional = ("block_table_width", "batch")
    lows = {**dict.fromkeys((*counts, "kv_lora_rank"), 1), "qk_rope_head_dim": 0}
    for name, low in (*lows.items(), *((name, 0) for name in optional)):
        value: object = getattr(config, name)
        if (value is None and name in optional) or (type(value) is int and value >= low):
            continue
        yield refused(
            name,
            f"{name} must be an int of at least {low}.",
            f"{name}={_shown(value)}.",
            f"an int of at least {low}.",
            f"pass the {name} of the call.",
        )
    for name in _SWITCHES:
        switch: object = getattr(config, name)
        if type(switch) is not bool:
            shown = f"{name} of type {type(switch).__name__}"
            needed = "True or False: whether the call gives it"
            yield refused(name, f"{name} must be a bool.", f"{shown}.", f"{needed}.", "pass one.")
    capability: object = config.compute_capability
    if capability is not None and not (
        isinstance(capability, tuple)
        and len(capability) == 2
        and all(type(part) is int for part in capability)
    ):
        yield refused(
            "compute_capability",
            "compute_capability must be a pair of ints.",
            f"{_shown(capability)}.",
            "(major, minor), for example (10, 0), or None.",
            "pass torch.cuda.get_device_capability().",
        )


def interleave_reason(
    world_size: int, interleave_size: int, supported: tuple[int, ...] = INTERLEAVE_SIZES
) -> Reason | None:
    """Return why the KV layout cannot be masked natively, or None if it can."""
    if world_size == 1 or interleave_size in supported:
        return None
    return refused(
        "cp_kv_cache_interleave_size",
        f"cp_kv_cache_interleave_size={interleave_size} cannot be masked natively.",
        f"interleave_size={interleave_size} with dcp_world_size={world_size}.",
        "cp_kv_cache_interleave_size=1: FlashInfer's mask, in every known release, takes "
        "local key k of rank r for global position W*k + r.",
        "start with --cp-kv-cache-interleave-size 1; a KV connector or prefill/decode "
        "disaggregation may have raised it to the block size.",
    )
