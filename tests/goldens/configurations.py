"""Messages about a configuration: what `check` says and the call raises, and what is warned of."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from fi_dcp_compat import (
    FlashInferABI,
    FlashInferCompatError,
    FlashInferCompatWarning,
    check,
    decode_mla,
    prepare_decode_mla,
    recorded,
    validate_dcp_config,
)
from fi_dcp_compat.describing import Binding
from fi_dcp_compat.known_issues import KNOWN_ISSUES, KnownIssue
from fi_dcp_compat.probing import install_kernel
from fi_dcp_compat.testing import mock_kernel, use_kernel
from tests import test_backends, test_guards
from tests.goldens.message import Case, case
from tests.support import call, stub_result
from tests.test_guards import abi_of, attempt, config_of, gpu, without

# Further ones, in the form of `test_guards.FAULTS`: a release, and what is not as usual.
CONFIGURATIONS: dict[str, tuple[FlashInferABI, dict[str, Any]]] = {
    "a newer release without a parameter": (
        without("0.7.4", "seq_lens")._replace(version="0.9.0"),
        {},
    ),
    "a newer release without an optional parameter": (
        without("0.7.4", "sinks")._replace(version="0.9.0"),
        {},
    ),
    "a release with DCP and without return_lse": (
        without("0.7.4", "return_lse"),
        {"dcp_world_size": 8},
    ),
    "a release that needs two upgrades": (
        recorded("0.6.16"),
        {"dcp_world_size": 8, "varlen": True, "q_len": 2},
    ),
    "no keyword for compact queries": (
        without("0.7.4", "cum_seq_lens_q"),
        {"backend": "cute-dsl", "varlen": True},
    ),
}


def _configured(
    abi: FlashInferABI, changes: Mapping[str, Any], **more: Any
) -> FlashInferCompatError | None:
    return attempt(abi, config_of(**changes) | more)


def _checked(**changes: Any) -> FlashInferCompatError:
    """The error of what only `check` can be asked: a call has no such value."""
    reasons = check(recorded("0.7.4"), **(config_of() | changes))
    return reasons[0].exception(reasons)


def _called(abi: FlashInferABI, **changes: Any) -> None:
    with use_kernel(stub_result, abi):
        decode_mla(**call(**changes))


def _prepared(**changes: Any) -> None:
    settings: dict[str, Any] = {"page_size": 64, "dtype": torch.bfloat16, "bmm1_scale": 0.1}
    with use_kernel(mock_kernel("0.7.4")):
        prepare_decode_mla(**settings | changes)


def _warned(issue: KnownIssue) -> Warning:
    """What a call on FlashInfer's own code warns of; a mock has none of its faults."""
    abi = recorded(issue.last)
    previous = install_kernel(Binding(mock_kernel(abi), abi, genuine=True))
    try:
        with gpu(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            decode_mla(**call(backend=issue.backends[0]))
    finally:
        install_kernel(previous)
    own = [w.message for w in caught if isinstance(w.message, FlashInferCompatWarning)]
    (warning,) = (warning for warning in own if issue.problem in str(warning))
    return warning


def _requires_dcp(abi: FlashInferABI) -> None:
    abi.require_native_dcp()


def cases() -> Iterator[tuple[str, Case]]:
    for name, fault in (test_guards.FAULTS | test_backends.FAULTS).items():
        yield f"configuration: {name}", case(_configured, abi_of(fault.abi), fault.changes)
    for name, (abi, changes) in CONFIGURATIONS.items():
        yield f"configuration: {name}", case(_configured, abi, changes)
    for issue in KNOWN_ISSUES:
        if issue.effect == "warned":
            yield f"warning: {issue.name}", case(_warned, issue)
    yield from ONES.items()


ONES: dict[str, Case] = {
    "configuration: more tiles than a grid has": case(
        _configured, recorded("0.7.4"), {"backend": "cute-dsl", "num_heads": 128}, batch=65536
    ),
    "check: no ABI": case(check, "0.6.17", **config_of()),
    "check: a switch that is none": case(_checked, sinks=1),
    "check: no pair for a compute capability": case(_checked, compute_capability=(10,)),
    "check: interleave": case(_checked, dcp_world_size=8, interleave_size=64),
    "require_native_dcp: too old": case(_requires_dcp, recorded("0.6.16")),
    "require_native_dcp: lost": case(_requires_dcp, without("0.7.4", "return_lse")),
    "require_native_dcp: required": case(_requires_dcp, abi_of("0.7.4 with kv_layout")),
    "recorded: no such release": case(recorded, "0.7.3"),
    "validate_dcp_config: no field": case(
        validate_dcp_config, SimpleNamespace(decode_context_parallel_size=8)
    ),
    "validate_dcp_config: a size": case(
        validate_dcp_config,
        SimpleNamespace(decode_context_parallel_size=0, cp_kv_cache_interleave_size=1),
    ),
    "validate_dcp_config: interleave": case(
        validate_dcp_config,
        SimpleNamespace(decode_context_parallel_size=8, cp_kv_cache_interleave_size=16),
    ),
    "decode_mla: a keyword that the function lost": case(
        _called,
        without("0.7.4", "out"),
        out=torch.zeros(2, 1, 16, 512, dtype=torch.bfloat16),
    ),
    "prepare_decode_mla: a dtype by name": case(_prepared, dtype="bfloat16"),
    "prepare_decode_mla: pages that no backend reads": case(_prepared, page_size=256),
    "prepare_decode_mla: rank 8 of 8": case(_prepared, dcp_world_size=8, dcp_rank=8),
}
