"""(ABI, configuration) -> which backend, and which keywords. Pure and cached."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from .abi import FlashInferABI
from .config import Config
from .errors import raise_first
from .features import LseBase
from .guards import backend_reasons, candidates, config_reasons
from .limits import LSE_BASE_WORDS
from .lse import lse_factor

__all__ = ["Route", "route"]


class Route(NamedTuple):
    """How one configuration runs on one release.

    Attributes
    ----------
    backend : str
        What the kernel gets as ``backend``.
    may_run : tuple of str
        The backends the kernel may then pick.
    counter_buffer : bool
        Whether ``multi_ctas_kv_counter_buffer`` is forwarded.
    return_lse_base : str or None
        FlashInfer's word for the LSE base; None where the release has none, or no LSE is wanted.
    lse_factor : float or None
        What the returned LSE is multiplied with; None: it is in the base asked for already.
    """

    backend: str
    may_run: tuple[str, ...]
    counter_buffer: bool
    return_lse_base: str | None
    lse_factor: float | None


@lru_cache(maxsize=1024)
def route(abi: FlashInferABI, config: Config, lse_base: LseBase) -> Route:
    """Route a configuration, or raise the first reason why it cannot run."""
    raise_first(config_reasons(abi, config))
    able = tuple(n for n in candidates(config) if not backend_reasons(abi, config, n))
    features = abi.features
    backend = able[0]
    if config.backend == "auto" and set(able) == {"trtllm-gen", "cute-dsl"}:
        # With both able auto may stay auto, unless it leaves the base of the LSE open: from
        # 0.6.13 the tuning cache decides who runs, and only 0.7.1 lets a call name the base.
        open_base = config.wants_lse and features.auto_tunes and not features.return_lse_base
        backend = "trtllm-gen" if open_base else "auto"
    may_run = able if backend == "auto" and features.auto_tunes else (able[0],)
    named = config.wants_lse and features.return_lse_base
    found = "e" if backend == "reference" else features.lse_base[may_run[0]]
    return Route(
        backend=backend,
        may_run=may_run,
        # Never with DCP, which no call routes to trtllm-gen.
        counter_buffer="trtllm-gen" in may_run and features.counter_buffer,
        return_lse_base=LSE_BASE_WORDS[lse_base] if named else None,
        lse_factor=lse_factor(found, lse_base)
        if config.wants_lse and found and not named
        else None,
    )
