"""Messages of the drop-in: what a release lacks, and what cannot go together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import torch
from packaging.version import Version

from fi_dcp_compat import FlashInferABI, recorded
from fi_dcp_compat.dropin import trtllm_batch_decode_with_kv_cache_mla as dropin
from fi_dcp_compat.features import FIRST_RELEASE, ROWS
from fi_dcp_compat.releases import recorded_versions
from fi_dcp_compat.testing import mock_kernel, use_kernel
from tests import test_dropin_guards
from tests.goldens.message import Case, case
from tests.test_dropin import arguments, compact, dcp
from tests.test_guards import abi_of, without


def _called(abi: FlashInferABI, **changes: Any) -> None:
    with use_kernel(mock_kernel(abi)):
        dropin(**arguments() | changes)


def before(release: str) -> FlashInferABI:
    """The last recorded release before that one."""
    return recorded([v for v in recorded_versions() if Version(v) < Version(release)][-1])


def _unreadable() -> None:
    with use_kernel(MagicMock()):
        dropin(**arguments())


NEWEST = recorded("0.7.4")
MODULAR: dict[str, Any] = {"cute_dsl_impl": "modular", "return_lse": True}
HANGS: dict[str, Any] = arguments(is_var_seq=False, dtype=torch.float8_e4m3fn)
# What `test_dropin_guards.WRONG` has once for each check.
CONTRADICTIONS = (
    "a base that is no word",
    "a negative top k",
    "a query that is none",
    "enable_dcp=1",
    "global lengths alone",
    "no LSE",
    "no global lengths",
    "rank 8 of 8",
)
BACKENDS = {"cute-dsl": "cute_dsl", "sparse": "sparse_backend", "cake": "cake_backend"}

ONES: dict[str, Case] = {
    "a backend that no release has": case(_called, NEWEST, backend="fa3"),
    "a backend that is no string": case(_called, NEWEST, backend=None),
    "a buffer of several query tokens": case(
        _called,
        before(ROWS["out_4d"].since),
        **arguments(q_len=2, out=torch.zeros(2, 2, 16, 512, dtype=torch.bfloat16)),
    ),
    "a buffer that is no tensor": case(_called, NEWEST, out="e"),
    "a scale that is none": case(_called, NEWEST, bmm1_scale=None),
    "a cache that is none": case(_called, NEWEST, kv_cache=None),
    "a configuration that decode_mla refuses too": case(
        _called, NEWEST, **arguments(heads=96, backend="trtllm-gen")
    ),
    "a keyword that the function lost": case(
        _called, without("0.7.4", "enable_pdl"), enable_pdl=True
    ),
    "a lost core keyword": case(_called, without("0.7.4", "seq_lens")),
    "a new required parameter": case(_called, abi_of("0.7.4 with kv_layout")),
    "an unreadable signature": case(_unreadable),
    "before the first recorded release": case(_called, recorded("0.6.0")._replace(version="0.5.3")),
    "compact queries with DCP before any DCP": case(
        _called, recorded("0.6.16"), **compact(), **dcp()
    ),
    "compact queries with DCP": case(_called, recorded("0.6.18"), **compact(), **dcp()),
    "DCP of sparse MLA": case(_called, NEWEST, backend="sparse", **dcp()),
    "equal lengths with fp8": case(_called, recorded("0.6.13"), **HANGS),
    "FP16 softmax that is no switch": case(_called, NEWEST, use_fp16_softmax=1),
    "FP16 softmax on another backend": case(
        _called, NEWEST, backend="cute-dsl", use_fp16_softmax=True
    ),
    "offsets of another dtype": case(
        _called, NEWEST, **compact() | {"cum_seq_lens_q": torch.zeros(3), "max_q_len": None}
    ),
    "sparse MLA in plain torch": case(_called, NEWEST, backend="reference", sparse_mla_top_k=128),
    "the modular kernel with an LSE": case(_called, NEWEST, **MODULAR),
}


def cases() -> Iterator[tuple[str, Case]]:
    for keyword, changes in test_dropin_guards.ASKED.items():
        yield (
            f"drop-in: {keyword} too early",
            case(_called, before(FIRST_RELEASE[keyword]), **changes),
        )
    for backend, feature in BACKENDS.items():
        abi = before(ROWS[feature].since)
        yield f"drop-in: {backend} too early", case(_called, abi, backend=backend)
    for name in CONTRADICTIONS:
        yield f"drop-in: {name}", case(_called, NEWEST, **test_dropin_guards.WRONG[name][0])
    for name, one in ONES.items():
        yield f"drop-in: {name}", one
