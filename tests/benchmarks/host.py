"""The package around FlashInfer's own host code, whose compiled kernel is replaced by a no-op."""

from __future__ import annotations

import functools
import importlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any
from unittest import mock

import torch

from tests.hostsim.compiling import MONOLITHIC
from tests.hostsim.simulation import simulated_flashinfer

from .calls import Kernel, Step, direct, one_shot, prepared, prepared_decoder
from .rounds import Arms, Row, Times, measure, microseconds, ratio, share

# More steps than a preparation remembers, so that each is new to it.
LAYERS, STEPS = 61, 8


@contextmanager
def host_code() -> Iterator[Kernel]:
    """Yield FlashInfer's function on a simulated GPU, its cute-dsl kernel compiled to nothing."""
    with warnings.catch_warnings(), simulated_flashinfer(compute=False):
        warnings.simplefilter("ignore")
        mono = importlib.import_module(MONOLITHIC)

        @functools.cache  # as FlashInfer's own
        def get_compiled_kernel(**key: object) -> Callable[..., None]:
            return lambda *values: None

        with mock.patch.object(mono, "_get_compiled_mla_kernel", get_compiled_kernel):
            decode: Any = importlib.import_module("flashinfer.decode")
            yield decode.trtllm_batch_decode_with_kv_cache_mla


def with_room(step: Step) -> Step:
    step.workspace = torch.zeros(64 << 20, dtype=torch.int8)
    return step


def host_rows(rounds: int, no_op: Times) -> list[Row]:
    """Return the rows of the real host code; `no_op` has the arms' times without it."""
    with host_code() as kernel:
        step = with_room(Step())
        base = direct(kernel, step)

        def viewed() -> object:
            out, lse = kernel_call()
            return out, lse.view(step.batch, step.q_len, step.heads)

        kernel_call: Callable[[], Any] = base
        arms: Arms = {
            "direct": base,
            "null": base,
            "viewed": viewed,
            "prepared": prepared(prepared_decoder(), step),
            "one-shot": one_shot(step),
        }
        times = measure(arms, rounds, 0.02)
        whole = times["direct"]
        rows = [
            microseconds("FlashInfer's host code, the direct call", times, "direct"),
            ratio("null: direct / direct, host code", times, "null", "direct"),
            ratio("direct and a view of its LSE / direct", times, "viewed", "direct"),
            ratio("prepared / direct, 4-D, all counted", times, "prepared", "direct", 1.02),
            ratio("decode_mla / direct, 4-D, all counted", times, "one-shot", "direct"),
            share("(prepared - direct) / host code", no_op, "prepared", "direct", whole, 1.5),
            share("(decode_mla - direct) / host code", no_op, "one-shot", "direct", whole, 3.0),
        ]
        return [*rows, *_model_rows(kernel, rounds)]


def _model_rows(kernel: Kernel, rounds: int) -> list[Row]:
    """Time whole steps: each layer has a decoder and a cache of its own, each step all else."""
    model = with_room(Step())
    caches = [torch.zeros_like(model.cache) for _ in range(LAYERS)]
    decoders = [prepared_decoder() for _ in caches]
    calls: dict[str, list[list[Callable[[], object]]]] = {
        "direct": [],
        "prepared": [],
        "one-shot": [],
    }
    for _ in range(STEPS):
        tensors = Step()
        layers = []
        for cache in caches:
            layer = copy(tensors)
            layer.query, layer.cache = tensors.query.clone(), cache
            layer.workspace = model.workspace
            layers.append(layer)
        calls["direct"].append([direct(kernel, layer) for layer in layers])
        calls["prepared"].append([prepared(*each) for each in zip(decoders, layers, strict=True)])
        calls["one-shot"].append([one_shot(layer) for layer in layers])
    calls["null"] = calls["direct"]

    def steps(name: str) -> Callable[[], None]:
        in_turn = itertools.cycle(calls[name])

        def run() -> None:
            for call in next(in_turn):
                call()

        return run

    times = measure({name: steps(name) for name in calls}, max(10, rounds // 3), 0.02)
    label = f"{LAYERS} layers, all tensors but the caches new in each step"
    return [
        ratio(f"null: {label}", times, "null", "direct"),
        ratio(f"prepared / direct, {label}", times, "prepared", "direct"),
        ratio(f"decode_mla / direct, {label}", times, "one-shot", "direct"),
    ]
