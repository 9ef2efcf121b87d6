"""Refusals at start-up, under `python -O`, and the releases that they name: S15, S16, S39."""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fi_dcp_compat
from fi_dcp_compat import (
    DCP,
    FlashInferCompatError,
    UnsupportedConfigError,
    bmm_scales,
    check,
    cli,
    debug_checks,
    decode_mla,
    merge_dcp_states,
    prepare_decode_mla,
    recorded,
    supports_combination,
    validate_dcp_config,
)
from fi_dcp_compat.dropin import trtllm_batch_decode_with_kv_cache_mla
from fi_dcp_compat.testing import mock_kernel, use_kernel
from tests.fakes import answer_of
from tests.scenarios.inputs import dropin_dcp_call, lens
from tests.support import RELEASES, call, dcp_of

# In `check`'s keywords; each pair of them is tried on each release, without DCP and with.
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"num_heads": 129},
    {"num_heads": 96, "backend": "trtllm-gen"},
    {"q_len": 5},
    {"page_size": 48},
    {"page_size": 16, "backend": "trtllm-gen"},
    {"dtype": "float32"},
    {"dtype": "float16", "backend": "trtllm-gen"},
    {"causal": False, "q_len": 3},
    {"backend": "xqa"},
    {"backend": "cute-dsl"},
    {"backend": "reference"},
    {"backend": "ring"},
    {"varlen": True, "q_len": 3},
    {"return_lse": True},
    {"sinks": True},
    {"skip_softmax": True},
    {"kv_lora_rank": 256},
)
BASE: dict[str, Any] = {"num_heads": 16, "q_len": 1, "page_size": 64, "dtype": "bfloat16"}
# 0.6.11 is recorded, but older than all that `decode_mla` runs on.
EACH = ("0.6.11", *RELEASES)


def configurations() -> Iterator[dict[str, Any]]:
    for first, second in itertools.combinations(CHANGES, 2):
        for world_size in (1, 8):
            yield BASE | first | second | {"dcp_world_size": world_size}


def called(config: dict[str, Any]) -> None:
    """Call `decode_mla` with tensors of that configuration."""
    heads, q_len, rank = config["num_heads"], config["q_len"], config.get("kv_lora_rank", 512)
    sizes: dict[str, Any] = {"heads": heads, "q_len": q_len, "kv_lora_rank": rank}
    given = call(page_size=config["page_size"], dtype=getattr(torch, config["dtype"]), **sizes)
    if config.get("varlen"):
        # One token of the first request, and q_len of the second.
        query = given["query"].flatten(0, 1)[: 1 + q_len]
        given |= {"query": query, "cum_seq_lens_q": lens(0, 1, 1 + q_len), "max_q_len": q_len}
    if config.get("sinks"):
        given["sinks"] = torch.zeros(heads)
    if config.get("skip_softmax"):
        given["skip_softmax_threshold_scale_factor"] = 1e-3
    given |= {name: config[name] for name in ("causal", "backend", "return_lse") if name in config}
    world_size = config["dcp_world_size"]
    decode_mla(**given, dcp=dcp_of(world_size) if world_size > 1 else None)


# S15: the same reasons at start-up, without tensors.


@pytest.mark.parametrize("version", EACH)
def test_s15_check_gives_the_reasons_that_the_call_raises(version: str) -> None:
    abi, kernel, refused = recorded(version), mock_kernel(version), 0
    with use_kernel(kernel):
        for config in configurations():
            expected, before = check(abi, **config), kernel.call_count
            if not expected:
                called(config)
                assert kernel.call_count == before + (config.get("backend") != "reference")
                continue
            refused += 1
            with pytest.raises(expected[0].error, match=r"\nNeeded: ") as raised:
                called(config)
            assert raised.value.reasons == expected
            assert kernel.call_count == before
            text = supports_combination(**config)
            assert text == "\n".join(map(str, expected))
    assert refused > 100


def test_s15_it_needs_neither_torch_nor_a_gpu() -> None:
    found = answer_of("""
import json, sys
from fi_dcp_compat import check, recorded
reasons = check(
    recorded("0.6.16"), dcp_world_size=8, num_heads=129, q_len=1, page_size=48, dtype="bfloat16"
)
imported = sorted({"torch", "flashinfer"} & set(sys.modules))
print(json.dumps([[reason.argument for reason in reasons], imported]))
""")
    assert found == [["dcp", "page_size", "num_heads"], []]


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"backend": "trtllm-gen"}, "backend"),
        ({"page_size": 48}, "page_size"),
        ({"causal": False}, "causal"),
        ({"interleave_size": 16}, "cp_kv_cache_interleave_size"),
        ({"sinks": torch.zeros(16)}, "sinks"),
        ({"dtype": torch.float32}, "dtype"),
    ],
)
def test_s15_the_preparation_refuses_before_the_first_request(
    changes: dict[str, Any], argument: str
) -> None:
    settings: dict[str, Any] = {"page_size": 64, "dtype": torch.bfloat16, "bmm1_scale": 0.1}
    settings["dcp_world_size"] = 8
    with use_kernel(mock_kernel("0.7.4")):
        prepare_decode_mla(**settings)
        with pytest.raises(UnsupportedConfigError, match=r"\nNeeded: ") as raised:
            prepare_decode_mla(**settings | changes)
    assert raised.value.argument == argument


# S16: guards that `python -O` would drop.


class Interleaved:
    decode_context_parallel_size = 4
    cp_kv_cache_interleave_size = 64


def refusals() -> dict[str, list[str]]:
    """Class and text of each refusal."""
    found: dict[str, list[str]] = {}

    def note(name: str, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:
            found[name] = [type(error).__name__, str(error)]

    for version in ("0.6.11", "0.6.16", "0.7.4"):
        with use_kernel(mock_kernel(version)):
            for config in configurations():
                note(f"{version} {config}", partial(called, config))
    int64 = torch.full((2,), 55)
    acts: dict[str, Callable[[], object]] = {
        "interleave": lambda: DCP(4, 0, int64, interleave_size=64),
        "rank": lambda: DCP(4, 4, int64),
        "parallel configuration": lambda: validate_dcp_config(Interleaved()),
        "int64 lengths": lambda: decode_mla(**call(), dcp=DCP(8, 3, int64)),
        "unaligned": lambda: decode_mla(**call(seq_lens=lens(7, 7, 7)[1:])),
        "workspace": lambda: decode_mla(
            **call(workspace_buffer=torch.zeros(64, dtype=torch.int8)), return_lse=True
        ),
        "fp8 without a scale": lambda: bmm_scales(0.1, torch.float8_e4m3fn),
        "base of the LSE": lambda: decode_mla(**call(lse_base="ln")),
        "states that do not fit": lambda: merge_dcp_states(torch.ones(2, 3, 8), torch.ones(3, 2)),
        "the drop-in": lambda: trtllm_batch_decode_with_kv_cache_mla(
            **dropin_dcp_call(8, 3, lens(55, 55), return_lse_base="ln")
        ),
        "swapped lengths": lambda: decode_mla(**call(), dcp=DCP(8, 3, lens(7, 7))),
        "a length of 0": lambda: decode_mla(**call(seq_lens=lens(0, 7))),
        "no such release": lambda: recorded("0.7.3"),
    }
    with use_kernel(mock_kernel("0.7.4")), debug_checks():
        for name, act in acts.items():
            note(name, act)
            assert name in found
    return found


def test_s16_python_with_O_refuses_the_same_with_the_same_words() -> None:
    expected = refusals()
    assert len(expected) > 500
    for kind, text in expected.values():
        assert issubclass(getattr(fi_dcp_compat, kind), FlashInferCompatError)
        assert "\nNeeded: " in text
    optimised = answer_of(
        """
import json, torch
assert False, "only python -O gets past this"
torch.set_num_threads(1)
from tests.scenarios.test_refusals import refusals
print(json.dumps(refusals()))
""",
        "-O",
    )
    assert optimised == expected


# S39: releases and backends in messages.

VERSION = re.compile(r"\b\d+\.\d+\.\d+(?:\.post\d+)?\b")


@pytest.fixture
def table(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The tables as ``fi-dcp-compat releases --json`` prints them."""
    assert cli.main(["releases", "--json"]) == 0
    tables: dict[str, Any] = json.loads(capsys.readouterr().out)
    return tables


@pytest.mark.parametrize("version", EACH)
def test_s39_every_release_and_backend_that_a_reason_names_stands_in_the_table(
    version: str, table: dict[str, Any]
) -> None:
    rows = [*table["features"], *table["limits"]]
    since = {row["since"] for row in table["features"]}
    noted = {found for row in rows for found in VERSION.findall(row["evidence"])}
    backends = {row["backend"] for row in table["limits"]} | {"reference"}
    named = set()
    for config in configurations():
        for reason in check(recorded(version), **config):
            assert set(VERSION.findall(reason.found)) <= {version}
            assert set(VERSION.findall(reason.fix)) <= since
            assert set(VERSION.findall(reason.needed)) <= since | noted
            named |= set(re.findall(r"backend='([\w-]+)'", reason.needed + reason.fix))
    assert "cute-dsl" in named
    assert named <= backends


MESSAGES = [
    path
    for path in sorted(Path(fi_dcp_compat.__file__).parent.glob("*.py"))
    if path.stem not in ("features", "limits", "known_issues")
]


@pytest.mark.parametrize("path", MESSAGES, ids=lambda path: path.stem)
def test_s39_no_other_module_writes_a_release_down(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    statements = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    docstrings = [value for value in statements if isinstance(value, ast.Constant)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            # Evidence names a line of a release's file, an example any release.
            text = re.sub(r"[\d.]+ \w+\.py:\d+|for example [\d.]+", "", node.value)
            assert node in docstrings or not VERSION.search(text), node.value
