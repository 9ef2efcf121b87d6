"""The worked integration at start-up: what its backend says, and what it refuses on mocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fi_dcp_compat import (
    FlashInferCompatError,
    FlashInferNotFoundError,
    FlashInferVersionError,
    InvalidInputError,
    UnsupportedConfigError,
    recorded,
)
from fi_dcp_compat.sizes import needed_bytes
from fi_dcp_compat.testing import mock_kernel, use_kernel
from tests.fakes import answer_of, fake_site

from .integration import Config, MetadataBuilder, MLABackend, MLAImpl, ParallelConfig
from .integration_cases import (
    ALONE,
    CONFIG,
    DCP_RELEASES,
    FP8,
    RELEASES,
    UNIFORM,
    WORLD,
    assert_ranks_merge,
    layers_of,
)


@pytest.mark.parametrize("release", RELEASES)
def test_the_backend_says_what_its_release_can_do(release: str) -> None:
    with use_kernel(mock_kernel(release)):
        assert MLABackend.lse_base_on_e
        assert MLABackend.can_return_lse_for_decode
        assert MLABackend.supports_dcp is (release in DCP_RELEASES)
        assert MLABackend.supports_dcp_with_varlen is (release in DCP_RELEASES)
        assert MLABackend.supports_dcp_compact_varlen is (release in ("0.7.0", "0.7.4"))
        assert 64 in MLABackend.get_supported_kernel_block_sizes()
        assert (64 in MLABackend.get_supported_kernel_block_sizes(8)) is (release in DCP_RELEASES)
        assert MLABackend.supports_combination(ALONE) is None
        assert (MLABackend.supports_combination(CONFIG) is None) is (release in DCP_RELEASES)


@pytest.mark.parametrize("release", ["0.6.12", "0.6.16"])
def test_a_release_without_dcp_is_refused_when_the_builder_is_made(release: str) -> None:
    kernel = mock_kernel(release)
    with (
        use_kernel(kernel),
        pytest.raises(FlashInferVersionError, match=rf"\nFound: flashinfer-python {release},"),
    ):
        MetadataBuilder(CONFIG)
    kernel.assert_not_called()


@pytest.mark.parametrize("release", ["0.6.17", "0.7.4"])
@pytest.mark.parametrize("heads", [16, 128])
def test_the_workspace_fits_every_batch(release: str, heads: int) -> None:
    config = replace(CONFIG, num_heads=heads, max_num_seqs=256)
    with use_kernel(mock_kernel(release)):
        builder = MetadataBuilder(config)
    needs = [
        needed_bytes(
            "cute-dsl",
            recorded(release),
            batch,
            q_len,
            heads,
            return_lse=True,
            sm_count=config.sm_count,
            num_tokens=num_tokens,
        )
        for batch in (1, 3, 16, 37, 74, 256)
        for q_len in (1, 3)
        for num_tokens in (None, batch + q_len - 1)
    ]
    assert max(needs) <= builder.workspace.numel() <= 66 << 20
    assert needs[-1] < max(needs)  # the largest batch is not the one that needs most


@pytest.mark.parametrize(
    ("config", "least", "most"),
    [
        pytest.param(CONFIG, 16, 32, id="DCP"),
        pytest.param(replace(CONFIG, backend="reference"), 0, 0, id="DCP on the reference"),
        pytest.param(ALONE, 128, 160, id="auto"),
        pytest.param(replace(ALONE, backend="trtllm-gen"), 128, 129, id="trtllm-gen"),
        pytest.param(replace(ALONE, backend="cute-dsl"), 16, 32, id="cute-dsl"),
    ],
)
def test_the_workspace_is_what_its_kernels_need(config: Config, least: int, most: int) -> None:
    with use_kernel(mock_kernel("0.7.4")):
        builder = MetadataBuilder(config)
    assert least << 20 <= builder.workspace.numel() <= most << 20


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"parallel": ParallelConfig(WORLD, 64)}, "cp_kv_cache_interleave_size"),
        ({"num_heads": 136}, "num_heads"),
        ({"page_size": 48}, "page_size"),
        ({"table_width": 3}, "block_tables"),
        ({"dtype": torch.float32}, "dtype"),
        ({"backend": "trtllm-gen"}, "backend"),
        ({"compute_capability": (9, 0)}, "compute_capability"),
    ],
    ids=str,
)
def test_what_no_kernel_runs_is_refused_when_the_builder_is_made(
    changes: dict[str, Any], argument: str
) -> None:
    kernel = mock_kernel("0.7.4")
    with use_kernel(kernel):
        MetadataBuilder(CONFIG)
        with pytest.raises(UnsupportedConfigError) as raised:
            MetadataBuilder(replace(CONFIG, **changes))
        said = MLABackend.supports_combination(replace(CONFIG, **changes))
    assert raised.value.argument == argument
    # The selector is asked before there are tables.
    assert (said == str(raised.value)) is (argument != "block_tables")
    kernel.assert_not_called()


def test_query_tokens_that_a_release_does_not_mask_are_refused_when_the_builder_is_made() -> None:
    config = replace(ALONE, backend="cute-dsl", max_query_len=1)
    with use_kernel(mock_kernel("0.6.12")):
        MetadataBuilder(config)
        speculative = replace(config, max_query_len=3)
        with pytest.raises(FlashInferVersionError, match=r"Needed: 0\.6\.13 or newer") as raised:
            MetadataBuilder(speculative)
        assert MLABackend.supports_combination(speculative) == str(raised.value)


def test_an_interleave_without_dcp_is_no_matter() -> None:
    (requests,) = layers_of(*UNIFORM[1], count=1)
    assert_ranks_merge([requests], 1, backend="reference", parallel=ParallelConfig(1, 64))


def test_every_reason_is_in_the_error() -> None:
    with use_kernel(mock_kernel("0.6.16")), pytest.raises(FlashInferCompatError) as raised:
        MetadataBuilder(replace(CONFIG, backend="trtllm-gen"))
    assert [reason.argument for reason in raised.value.reasons] == ["dcp", "backend"]


def test_speculative_decoding_with_dcp_is_causal() -> None:
    with use_kernel(mock_kernel("0.7.4")):
        assert MLABackend.supports_combination(CONFIG, causal=True) is None
        reason = MLABackend.supports_combination(CONFIG, causal=False)
    assert reason is not None
    assert reason.startswith("A non-causal block cannot be masked with DCP.")


def test_an_fp8_cache_without_its_scales_is_refused_when_the_layer_is_made() -> None:
    with (
        use_kernel(mock_kernel("0.7.4")),
        pytest.raises(InvalidInputError, match="q_scale must be given"),
    ):
        MLAImpl(replace(CONFIG, dtype=FP8))


def test_without_flashinfer_the_backend_answers_and_the_reference_runs(tmp_path: Path) -> None:
    (requests,) = layers_of(*UNIFORM[1], count=1)
    with fake_site(tmp_path / "site-packages"):
        assert MLABackend.lse_base_on_e
        assert not MLABackend.can_return_lse_for_decode
        assert not MLABackend.supports_dcp
        assert not MLABackend.supports_dcp_with_varlen
        assert not MLABackend.supports_dcp_compact_varlen
        assert MLABackend.get_supported_kernel_block_sizes(8) == ()
        reason = MLABackend.supports_combination(CONFIG)
        assert reason is not None
        assert reason.startswith("FlashInfer is not installed.")
        with pytest.raises(FlashInferNotFoundError):
            MetadataBuilder(CONFIG)
        assert MLABackend.supports_combination(replace(CONFIG, backend="reference")) is None
        assert_ranks_merge([requests], 2, backend="reference")


def test_importing_it_looks_for_no_flashinfer() -> None:
    code = "import json, sys, tests.contract.integration\n"
    code += "print(json.dumps('flashinfer' in sys.modules))"
    assert answer_of(code) is False
