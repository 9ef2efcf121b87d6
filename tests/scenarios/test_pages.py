"""The paged cache and its tables: S23, S24, S25, S42."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from fi_dcp_compat import (
    DCP,
    Backend,
    InvalidInputError,
    UnsupportedConfigError,
    debug_checks,
    decode_mla,
    local_seq_lens,
)
from fi_dcp_compat.dropin import trtllm_batch_decode_with_kv_cache_mla
from fi_dcp_compat.testing import mock_kernel, use_kernel
from tests.scenarios.inputs import dropin_call, lens
from tests.support import DCP_RELEASES, RELEASES, call, dcp_of

each_release = pytest.mark.parametrize("version", RELEASES)

# S23: the width of the block table. Design: refused, a copy would be an allocation each step.


def wide(page_size: int, width: int, **changes: Any) -> dict[str, Any]:
    """A table of that width; its tail is not read, so the cache may be small."""
    tables = torch.zeros(2, width, dtype=torch.int32)
    return call(page_size=page_size, block_tables=tables, **changes)


def refusal(backend: str, page_size: int, width: int, step: int, after: int) -> str:
    return (
        f"backend='{backend}' cannot take a block table {width} pages wide.\n"
        f"Found: width {width} with page_size={page_size}.\n"
        f"Needed: a multiple of {step} (128 / page_size); the next is {after}.\n"
        f"Fix: allocate the table {after} pages wide; the tail may hold anything."
    )


ODD_WIDTHS = [(32, 295, 4, 296), (64, 295, 2, 296), (16, 295, 8, 296), (2, 295, 64, 320)]


@each_release
@pytest.mark.parametrize(("page_size", "width", "step", "after"), ODD_WIDTHS)
def test_s23_cute_dsl_refuses_an_odd_width_with_the_next_that_it_takes(
    page_size: int, width: int, step: int, after: int, version: str
) -> None:
    kernel = mock_kernel(version)
    with use_kernel(kernel):
        with pytest.raises(UnsupportedConfigError, match="block table 295 pages wide") as raised:
            decode_mla(**wide(page_size, width, backend="cute-dsl"))
        kernel.assert_not_called()
        decode_mla(**wide(page_size, after, backend="cute-dsl"))
    text = refusal("cute-dsl", page_size, width, step, after)
    runs_elsewhere = page_size in (32, 64) and version in RELEASES[RELEASES.index("0.6.16") :]
    instead = ", or pass backend='trtllm-gen'." if runs_elsewhere else "."
    assert str(raised.value) == text.removesuffix(".") + instead


@pytest.mark.parametrize("version", DCP_RELEASES)
@pytest.mark.parametrize(("page_size", "width", "step", "after"), ODD_WIDTHS)
def test_s23_so_it_does_with_dcp(
    page_size: int, width: int, step: int, after: int, version: str
) -> None:
    with use_kernel(mock_kernel(version)):
        with pytest.raises(UnsupportedConfigError, match="block table 295 pages wide") as raised:
            decode_mla(**wide(page_size, width), dcp=dcp_of())
        decode_mla(**wide(page_size, after), dcp=dcp_of())
    assert str(raised.value) == refusal("cute-dsl", page_size, width, step, after)


@each_release
@pytest.mark.parametrize("width", [1, 3, 295])
def test_s23_pages_of_128_tokens_take_any_width(width: int, version: str) -> None:
    kernel = mock_kernel(version)
    with use_kernel(kernel):
        decode_mla(**wide(128, width, backend="cute-dsl"))
    assert kernel.call_args.kwargs["block_tables"].shape == (2, width)


# S24: the page size.


@pytest.mark.parametrize(
    ("version", "dcp"),
    [(version, False) for version in RELEASES] + [(version, True) for version in DCP_RELEASES],
)
@pytest.mark.parametrize("page_size", [256, 1, 48])
def test_s24_a_page_size_that_cute_dsl_has_no_kernel_for_is_refused_with_those_that_it_has(
    page_size: int, version: str, dcp: bool
) -> None:
    # 1 is refused although it divides 128.
    given = wide(page_size, 128, backend="cute-dsl")
    words = f"pages of {page_size} tokens"
    kernel = mock_kernel(version)
    with use_kernel(kernel), pytest.raises(UnsupportedConfigError, match=words) as raised:
        decode_mla(**given, dcp=dcp_of() if dcp else None)
    kernel.assert_not_called()
    assert str(raised.value) == (
        f"backend='cute-dsl' cannot read pages of {page_size} tokens.\n"
        f"Found: page_size={page_size}.\n"
        "Needed: one of 2, 4, 8, 16, 32, 64, 128.\n"
        "Fix: set the cache's block size to one of those."
    )


@each_release
@pytest.mark.parametrize("page_size", [2, 4, 8, 16, 32, 64, 128])
def test_s24_those_sizes_reach_the_kernel(page_size: int, version: str) -> None:
    kernel = mock_kernel(version)
    with use_kernel(kernel):
        decode_mla(**wide(page_size, 128, backend="cute-dsl"))
    assert kernel.call_args.kwargs["kv_cache"].shape[2] == page_size


# S25: tables and slots of the whole group where a rank's own are expected; in debug mode.


BACKENDS = pytest.mark.parametrize("backend", ["auto", "reference"])


def refused_in_debug_mode(given: dict[str, Any]) -> InvalidInputError:
    kernel = mock_kernel("0.7.4")
    with (
        use_kernel(kernel),
        debug_checks(),
        pytest.raises(InvalidInputError, match=r"^\w+\[1\] ") as raised,
    ):
        decode_mla(**given)
    kernel.assert_not_called()
    return raised.value


def fix_of_row_1() -> str:
    return (
        "Fix: look at how row 1 of the batch was built; this check is FI_DCP_COMPAT_DEBUG or "
        "debug_checks()."
    )


def split(local: Tensor, world_size: int) -> dict[str, Any]:
    """Two requests on rank 0, whose global lengths are the shortest that leave it as many keys."""
    causal = (local - 1) * world_size + 1
    assert local_seq_lens(causal, world_size, 0).equal(local)
    return {"seq_lens": local, "max_seq_len": 999, "dcp": DCP(world_size, 0, causal)}


@BACKENDS
@pytest.mark.parametrize("world_size", [1, 8])
def test_s25_a_length_past_the_table_is_refused_with_its_row(
    world_size: int, backend: Backend
) -> None:
    # Two pages of 64 tokens.
    error = refused_in_debug_mode(call(**split(lens(128, 129), world_size), backend=backend))
    assert str(error) == (
        "seq_lens[1] is longer than its block table.\n"
        "Found: seq_lens[1] = 129.\n"
        f"Needed: at most 128 tokens.\n{fix_of_row_1()}"
    )


@BACKENDS
@pytest.mark.parametrize("world_size", [1, 8])
@pytest.mark.parametrize("page", [4, 40, -1])
def test_s25_a_used_page_outside_the_pool_is_refused_with_its_row(
    page: int, world_size: int, backend: Backend
) -> None:
    tables = torch.tensor([[0, 1], [2, page]], dtype=torch.int32)
    given = call(**split(lens(65, 65), world_size), block_tables=tables, backend=backend)
    assert str(refused_in_debug_mode(given)) == (
        "block_tables[1] names a page outside the cache.\n"
        f"Found: block_tables[1] = {page}.\n"
        "Needed: page numbers of this rank's pool in [0, 4), not global pages or slots.\n"
        f"{fix_of_row_1()}"
    )


def test_s25_slots_of_tokens_in_place_of_pages_are_refused() -> None:
    slots = torch.tensor([[0, 1], [128, 129]], dtype=torch.int32)
    error = refused_in_debug_mode(call(block_tables=slots))
    assert error.argument == "block_tables"
    assert "not global pages or slots" in error.needed


@BACKENDS
@pytest.mark.parametrize("world_size", [1, 8])
@pytest.mark.parametrize("checks", [debug_checks, nullcontext])
def test_s25_an_unused_tail_of_minus_1_and_a_bound_past_the_table_are_fine(
    checks: type[AbstractContextManager[None]], world_size: int, backend: Backend
) -> None:
    tables = torch.tensor([[0, -1], [2, 3]], dtype=torch.int32)
    given = call(**split(lens(64, 128), world_size), block_tables=tables, backend=backend)
    assert given["max_seq_len"] > 2 * 64
    with use_kernel(mock_kernel("0.7.4")), checks():
        decode_mla(**given)


# S42: a cache in three or in four dimensions.


@pytest.mark.parametrize(
    ("version", "dcp"),
    [(version, False) for version in RELEASES] + [(version, True) for version in DCP_RELEASES],
)
def test_s42_the_kernel_gets_the_cache_in_four_dimensions(version: str, dcp: bool) -> None:
    kernel, given = mock_kernel(version), call()
    flat = given["kv_cache"]
    assert flat.shape == (4, 64, 576)
    with use_kernel(kernel):
        for cache in (flat, flat.view(4, 1, 64, 576)):
            decode_mla(**given | {"kv_cache": cache}, dcp=dcp_of() if dcp else None)
            seen = kernel.call_args.kwargs["kv_cache"]
            assert seen.shape == (4, 1, 64, 576)
            assert seen.data_ptr() == flat.data_ptr()
            assert (seen is cache) == (cache.ndim == 4)


@each_release
@pytest.mark.parametrize("shape", [(4, 64, 512), (4, 1, 64, 512), (4, 2, 64, 576)])
def test_s42_a_cache_of_another_last_dimension_or_of_more_heads_is_refused_with_576(
    shape: tuple[int, ...], version: str
) -> None:
    kernel, cache = mock_kernel(version), torch.zeros(shape).bfloat16()
    with use_kernel(kernel):
        with pytest.raises(UnsupportedConfigError, match="576") as raised:
            decode_mla(**call(kv_cache=cache))
        with pytest.raises(UnsupportedConfigError, match="576"):
            trtllm_batch_decode_with_kv_cache_mla(**dropin_call(kv_cache=cache))
    kernel.assert_not_called()
    assert str(raised.value) == (
        "kv_cache must be [num_pages, 64, 576] or [num_pages, 1, 64, 576].\n"
        f"Found: kv_cache: {list(shape)} torch.bfloat16 on cpu.\n"
        "Needed: one head and a last dimension of 576 (kv_lora_rank + qk_rope_head_dim).\n"
        "Fix: pass the latent cache with its rope part, or the head dimensions that it has."
    )
