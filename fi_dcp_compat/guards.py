"""(ABI, configuration) -> the reasons why it cannot run. Pure: no tensor, no GPU, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, cast

from packaging.version import Version

from .abi import (
    ASSUME_VERSION,
    CORE_KEYWORDS,
    FlashInferABI,
    missing_dcp,
    missing_feature,
    signature_reason,
)
from .backends import RULES, arch_reason
from .config import (
    UNIFORM_INSTEAD,
    Config,
    for_all_of_it,
    interleave_reason,
    refused,
    value_reasons,
)
from .errors import (
    FlashInferVersionError,
    InvalidInputError,
    Reason,
    UnsupportedConfigError,
)
from .features import FEATURES, ROWS
from .limits import AUTO_BACKENDS, DCP_BACKENDS
from .releases import drift, recorded, recorded_versions

if TYPE_CHECKING:
    import torch

__all__ = ["Backend", "backend_reasons", "candidates", "check", "config_reasons", "dtype_name"]

Backend = Literal["auto", "trtllm-gen", "cute-dsl", "xqa", "reference"]

_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "float8_e4m3": "float8_e4m3fn",
}


def check(
    abi: FlashInferABI,
    *,
    num_heads: int,
    q_len: int,
    page_size: int,
    dtype: torch.dtype | str,
    kv_dtype: torch.dtype | str | None = None,
    dcp_world_size: int = 1,
    interleave_size: int = 1,
    causal: bool = True,
    backend: Backend = "auto",
    varlen: bool = False,
    return_lse: bool = False,
    sinks: bool = False,
    skip_softmax: bool = False,
    tensor_scales: bool = False,
    kv_lora_rank: int = 512,
    qk_rope_head_dim: int = 64,
    compute_capability: Sequence[int] | None = None,
    block_table_width: int | None = None,
    batch: int | None = None,
) -> tuple[Reason, ...]:
    """Return why `decode_mla` would refuse this configuration; empty if it would run it.

    It needs no tensor and no GPU, so a stack runs it at start-up. The call raises the class of the
    first reason, with all of them attached.

    Parameters
    ----------
    abi : FlashInferABI
        ``probe()`` for the installed FlashInfer, ``recorded(version)`` for another.
    num_heads, q_len : int
        Query heads and query tokens a request, as the kernel gets them (after a gather of heads).
    page_size : int
        Tokens per page of the cache.
    dtype, kv_dtype : torch.dtype or str
        Of the query and the cache; `kv_dtype` is `dtype` if left out.
    dcp_world_size, interleave_size : int
        As in `DCP`.
    varlen : bool
        Whether ``cum_seq_lens_q`` is given; `q_len` is then ``max_q_len``.
    skip_softmax : bool
        Whether ``skip_softmax_threshold_scale_factor`` is given and not 0.
    tensor_scales : bool
        Whether ``bmm1_scale`` or ``bmm2_scale`` is a tensor.
    compute_capability : sequence of two ints, optional
        Of the GPU; unchecked if left out.
    block_table_width, batch : int, optional
        Width of ``block_tables`` in pages, and requests; unchecked if left out.
    """
    if not isinstance(abi, FlashInferABI):
        raise InvalidInputError(
            "abi must be a FlashInferABI.",
            found=f"{abi!r}.",
            needed="a FlashInferABI.",
            fix="pass probe(), or recorded(version).",
            argument="abi",
            value=repr(abi),
        )
    config = Config(
        num_heads=num_heads,
        q_len=q_len,
        page_size=page_size,
        dtype=dtype_name(dtype),
        kv_dtype=dtype_name(dtype if kv_dtype is None else kv_dtype),
        dcp_world_size=dcp_world_size,
        interleave_size=interleave_size,
        causal=causal,
        backend=backend,
        varlen=varlen,
        return_lse=return_lse,
        sinks=sinks,
        skip_softmax=skip_softmax,
        tensor_scales=tensor_scales,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        compute_capability=_pair(compute_capability),
        block_table_width=block_table_width,
        batch=batch,
    )
    return config_reasons(abi, config)


def _pair(capability: Sequence[int] | None) -> tuple[int, int] | None:
    pair = tuple(capability) if isinstance(capability, list) else capability
    return cast("tuple[int, int] | None", pair)


def dtype_name(dtype: torch.dtype | str) -> str:
    """Return torch's name of a dtype, without torch."""
    given: object = dtype
    if not isinstance(given, str) and type(given).__name__ != "dtype":
        return f"{type(given).__name__} (no dtype)"
    name = str(given).removeprefix("torch.")
    return _ALIASES.get(name, name) or "'' (no dtype)"


def config_reasons(abi: FlashInferABI, config: Config) -> tuple[Reason, ...]:
    """Return why `config` cannot run on `abi`, the first to raise first; empty if it can."""
    found = _reasons(abi, config)
    if not found or any(reason.error is not FlashInferVersionError for reason in found):
        return found
    # One upgrade, not one after the other.
    newer = (v for v in _running(config) if abi.release is None or Version(v) > abi.release)
    first = next(newer, "")
    return tuple(for_all_of_it(reason, first) for reason in found) if first else found


@lru_cache(maxsize=1024)
def _running(config: Config) -> tuple[str, ...]:
    """Return the releases that brought something and that can run `config`."""
    brought = dict.fromkeys(row.since for row in FEATURES)
    return tuple(version for version in brought if not _reasons(recorded(version), config))


def _reasons(abi: FlashInferABI, config: Config) -> tuple[Reason, ...]:
    found = list(value_reasons(config))
    if found:
        return tuple(found)
    if config.backend != "reference":
        found += _abi_reasons(abi, config)
    if abi.unreadable and found:
        return tuple(found)
    names = candidates(config)
    if config.dcp_world_size > 1:
        found += _dcp_reasons(abi, config)
        # The reasons above speak for these; what is left is what the kernel itself cannot do.
        config = config._replace(causal=True, sinks=False, skip_softmax=False)
    if not names and config.compute_capability is not None:
        needed = "10.x (trtllm-gen, cute-dsl) or 12.x (xqa)"
        found.append(arch_reason(config.backend, config.compute_capability, needed))
    per_backend = [backend_reasons(abi, config, name) for name in names]
    if all(per_backend):
        rules = [reason for reasons in per_backend for reason in reasons]
        # Beside a reason above, an upgrade that a backend asks for would only repeat it.
        found += [r for r in rules if r.error is UnsupportedConfigError] if found else rules
    return tuple(dict.fromkeys(found))


def candidates(config: Config) -> tuple[str, ...]:
    """Return the backends that may run `config`, the preferred one first."""
    if config.dcp_world_size > 1 and config.backend != "reference":
        return DCP_BACKENDS
    if config.backend != "auto":
        return (config.backend,)
    major = 10 if config.compute_capability is None else config.compute_capability[0]
    return AUTO_BACKENDS.get(major, ())


def backend_reasons(abi: FlashInferABI, config: Config, backend: str) -> tuple[Reason, ...]:
    """Return why one named backend cannot run `config` right."""
    found = tuple(RULES[backend](abi, config.flattened()))
    if not found or config.backend in ("auto", "reference") or config.dcp_world_size > 1:
        return found
    others = (name for name in ("trtllm-gen", "cute-dsl") if name != backend)
    able = [name for name in others if not tuple(RULES[name](abi, config.flattened()))]
    if not able:
        return found
    instead = f", or pass backend={able[0]!r}."
    return tuple(reason._replace(fix=reason.fix.removesuffix(".") + instead) for reason in found)


def _abi_reasons(abi: FlashInferABI, config: Config) -> Iterator[Reason]:
    feature = "native_dcp" if config.dcp_world_size > 1 else "return_lse"
    dcp = feature == "native_dcp"
    older = "call fi_dcp_compat.dropin, which hands older releases what they take"
    if abi.release is not None and abi.release < Version(recorded_versions()[0]):
        older = ""  # another function altogether
    plain = missing_feature(abi, "return_lse", asked="decode_mla", instead=older)
    missing = missing_dcp(abi) if dcp else plain
    if missing is not None:
        yield missing
    if abi.unreadable:
        return
    changed = drift(abi)
    used = ["sinks"] if config.sinks else []
    used += ["skip_softmax_threshold_scale_factor"] if config.skip_softmax else []
    used += ["return_lse"] if dcp and missing is None else []
    # What an unrecorded release has lost says that it is another function, used or not.
    gone = (*abi.lacks(*CORE_KEYWORDS, *used), *(changed.missing if changed is not None else ()))
    named = ROWS[feature].keywords if missing is not None else ()
    lost = tuple(name for name in dict.fromkeys(gone) if name not in named)
    for names, verb in ((lost, "has lost"), (abi.newly_required, "newly requires")):
        if names:
            yield drift_reason(abi, names, verb)


def drift_reason(abi: FlashInferABI, names: tuple[str, ...], verb: str = "has lost") -> Reason:
    """Build the reason for drifted parameters, held against the nearest recorded release."""
    changed = drift(abi)
    if changed is None:
        return signature_reason(abi, names, verb)
    like, instead = f"{changed.nearest.version}, the nearest recorded release", ""
    if not set(names) & {*CORE_KEYWORDS, *changed.required}:
        instead = f"set {ASSUME_VERSION}={changed.nearest.version} if nothing else changed"
    return signature_reason(abi, names, verb, like=like, instead=instead)


def _dcp_reasons(abi: FlashInferABI, config: Config) -> Iterator[Reason]:
    world = f"dcp_world_size={config.dcp_world_size}"
    reason = interleave_reason(
        config.dcp_world_size, config.interleave_size, abi.features.interleave_sizes
    )
    if reason is not None:
        yield reason
    if config.backend in ("trtllm-gen", "xqa"):
        yield refused(
            "backend",
            f"backend={config.backend!r} has no DCP mask.",
            f"backend={config.backend!r} with {world}.",
            "backend='cute-dsl', the only one with a native DCP mask "
            f"({ROWS['native_dcp'].since} or newer).",
            "pass backend='auto' or 'cute-dsl'; another backend's ranks can be merged outside the "
            "kernel for one query token only.",
        )
    if not config.causal:
        yield refused(
            "causal",
            "A non-causal block cannot be masked with DCP.",
            f"causal=False with {world}.",
            "causal=True: FlashInfer's DCP mask is causal in every known release.",
            "flatten the block with flatten_query_rows: one-token rows, each with its own bound, "
            "are ordinary causal calls.",
        )
    for given, name in (
        (config.sinks, "sinks"),
        (config.skip_softmax, "skip_softmax_threshold_scale_factor"),
    ):
        if given:
            yield refused(
                name,
                f"{name} cannot be combined with DCP.",
                f"{name} with {world}.",
                f"no {name}: the only kernel with a DCP mask does not take it.",
                f"leave {name} out, or call with dcp=None.",
            )
    if config.varlen and config.backend != "reference" and abi.features.native_dcp:
        missing = missing_feature(
            abi,
            "varlen_dcp",
            asked="decode_mla(dcp=..., cum_seq_lens_q=...)",
            instead=UNIFORM_INSTEAD,
        )
        if missing is not None:
            yield missing
