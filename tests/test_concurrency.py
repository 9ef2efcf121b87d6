"""Threads: a first call in many at once, changes while calls run, what is a context's own."""

from __future__ import annotations

import importlib
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from fi_dcp_compat import (
    FlashInferImportError,
    FlashInferVersionError,
    MLAState,
    decode_mla,
    prepare_decode_mla,
    probe,
    recorded,
    reference,
)
from fi_dcp_compat.abi import FUNCTION
from fi_dcp_compat.probing import bind_kernel
from fi_dcp_compat.testing import mock_kernel
from tests.fakes import Site, answer_of, fake_site
from tests.support import SCALE, call, dcp_of
from tests.threads import outcome, together

T = TypeVar("T")
NAP = "import time; time.sleep(0.1)\n"
THREADS = 8
# The tensors of a step, in the order in which a prepared decoder takes them.
STEP = ("query", "kv_cache", "block_tables", "seq_lens", "max_seq_len", "workspace_buffer")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with fake_site(tmp_path / "site-packages") as site:
        yield site


def while_another_imports(module: str, question: Callable[[], T]) -> list[object]:
    """Ask in a thread, and again once its import has got to `module`."""
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(outcome, question)
        while module not in sys.modules and not first.done():
            time.sleep(0.001)
        second = threads.submit(outcome, question)
        return [first.result(), second.result()]


# A first call in many threads.


@pytest.mark.parametrize("slow", ["before decode", "in decode", "after decode"])
def test_a_thread_that_calls_while_another_imports_finds_the_same(slow: str, site: Site) -> None:
    site.flashinfer(
        first=NAP if slow == "before decode" else "", last=NAP if slow == "after decode" else ""
    )
    if slow == "in decode":
        decode = site.folder / "flashinfer/decode.py"
        decode.write_text(NAP + decode.read_text())
    reached = "flashinfer" if slow == "before decode" else "flashinfer.decode"
    first, second = while_another_imports(reached, probe)
    assert first == second
    assert first == recorded("0.7.4")._replace(source="live")


def test_an_import_that_fails_fails_for_every_thread_that_waits_for_it(site: Site) -> None:
    # As 0.6.14 to 0.7.0, which raise after flashinfer.decode is imported.
    site.flashinfer(last=f"{NAP}raise AssertionError('Torch not compiled with CUDA enabled')")
    first, second = while_another_imports("flashinfer.decode", probe)
    assert first == second
    assert isinstance(first, tuple)
    assert first[0] is FlashInferImportError


def test_threads_that_bind_at_once_get_one_binding(site: Site) -> None:
    site.flashinfer()
    importlib.import_module("flashinfer.decode")
    for _ in range(20):
        probe.cache_clear()
        bindings = together(*[bind_kernel] * THREADS)
        # Preparations are kept by identity.
        assert {id(binding) for binding in bindings} == {id(bind_kernel())}


@pytest.mark.parametrize("static", [False, True], ids=["live", "static"])
def test_threads_that_probe_at_once_get_one_abi(static: bool, site: Site) -> None:
    site.flashinfer()
    importlib.import_module("flashinfer.decode")
    for _ in range(20):
        probe.cache_clear()
        abis = together(*[lambda: probe(static=static)] * THREADS)
        assert {id(abi) for abi in abis} == {id(probe(static=static))}


def test_a_first_call_in_threads_leaves_the_filters_of_warnings_alone(site: Site) -> None:
    site.flashinfer(first=NAP)
    for _ in range(3):
        before = list(warnings.filters)
        together(*[probe] * THREADS)
        assert warnings.filters == before
        for name in [name for name in sys.modules if name.split(".")[0] == "flashinfer"]:
            del sys.modules[name]


LOAD = """
import json, random, sys, threading
import fi_dcp_compat

barrier = threading.Barrier(16)
failures = []

def load(seed):
    order = names[:]
    random.Random(seed).shuffle(order)
    barrier.wait()
    for name in order:
        try:
            getattr(fi_dcp_compat, name)
        except BaseException as exc:
            failures.append(f"{name}: {exc!r}")

threads = [threading.Thread(target=load, args=(seed,)) for seed in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps([failures, "torch" in sys.modules]))
"""
LIGHT = ["probe", "check", "recorded", "capabilities", "supports_combination", "Reason", "Features"]


@pytest.mark.parametrize(
    ("names", "needs_torch"),
    [
        # torch does not survive torch and torch.distributed imported first in two threads.
        ("import torch, fi_dcp_compat\nnames = list(fi_dcp_compat.__all__)", True),
        (f"names = {LIGHT}", False),
    ],
    ids=["all after torch", "those without torch"],
)
def test_threads_may_use_the_public_names_first_in_any_order(names: str, needs_torch: bool) -> None:
    assert answer_of(f"{names}\n{LOAD}") == [[], needs_torch]


# Calls while something changes.


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``flashinfer.decode``, with the torch reference in it."""
    package, decode = ModuleType("flashinfer"), ModuleType("flashinfer.decode")
    vars(package)["__version__"] = "0.7.4"
    vars(decode)[FUNCTION] = reference.trtllm_batch_decode_with_kv_cache_mla
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.decode", decode)
    return decode


def random_call(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    given = call(batch=1 + seed % 3, heads=8)
    for name in ("query", "kv_cache"):
        values = torch.randn(given[name].shape, generator=generator)
        given[name] = values.to(given[name].dtype)
    return given


def tensor_of(answer: object) -> Tensor:
    """The output of a call, with an LSE or without."""
    out = answer[0] if isinstance(answer, tuple) else answer
    assert isinstance(out, Tensor), answer
    return out


def repeated(question: Callable[[], T], times: int = 10) -> list[T]:
    return [question() for _ in range(times)]


def while_it_runs(change: Callable[[], object], questions: Sequence[Callable[[], T]]) -> list[T]:
    """Ask all at once while `change` is made over and over."""
    done = threading.Event()
    changes: list[object] = []

    def keep_changing() -> None:
        while not done.is_set():
            changes.append(outcome(change))

    changer = threading.Thread(target=keep_changing)
    changer.start()
    try:
        results = together(*questions)
    finally:
        done.set()
        changer.join()
    assert len(changes) > 10
    assert not [made for made in changes if isinstance(made, tuple)]
    return results


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_the_probe_may_be_cleared_while_calls_run(backend: str, patched: ModuleType) -> None:
    calls = [random_call(seed) | {"backend": backend} for seed in range(4)]
    expected = [tensor_of(decode_mla(**given)) for given in calls]
    asked = [partial(repeated, partial(decode_mla, **given)) for given in calls]
    results = while_it_runs(probe.cache_clear, asked)
    for result, right in zip(results, expected, strict=True):
        assert all(torch.equal(tensor_of(answer), right) for answer in result)


def test_a_call_while_the_release_changes_is_wholly_of_one(patched: ModuleType) -> None:
    old, new = mock_kernel("0.6.16"), mock_kernel("0.7.4")
    kernels = [old, new]
    with_dcp = call(dcp=dcp_of())

    def change() -> None:
        kernels.reverse()
        vars(patched)[FUNCTION] = kernels[0]
        probe.cache_clear()

    def until_both() -> list[object]:
        answers: list[object] = []
        deadline = time.monotonic() + 20
        while len({type(answer) for answer in answers}) < 2 and time.monotonic() < deadline:
            answers += repeated(partial(outcome, partial(decode_mla, **with_dcp)))
        return answers

    change()
    answers = [answer for each in while_it_runs(change, [until_both] * 4) for answer in each]
    ran = [answer for answer in answers if isinstance(answer, MLAState)]
    assert {answer[0] for answer in answers if type(answer) is tuple} == {FlashInferVersionError}
    assert old.call_count == 0
    assert new.call_count == len(ran) > 0


def test_threads_may_share_a_prepared_decoder() -> None:
    decoder = prepare_decode_mla(
        page_size=64, dtype=torch.bfloat16, bmm1_scale=SCALE, backend="reference"
    )
    steps = [[random_call(seed)[name] for name in STEP] for seed in range(4)]
    wrong = [steps[0][0], steps[0][1], steps[0][2], steps[0][3].long(), *steps[0][4:]]
    expected = [tensor_of(decoder.run(*step)) for step in steps]
    asked: list[Callable[[], list[object]]] = [
        partial(repeated, partial(outcome, partial(decoder.run, *step))) for step in [*steps, wrong]
    ]
    *results, refused = together(*asked)
    for result, right in zip(results, expected, strict=True):
        assert all(torch.equal(tensor_of(answer), right) for answer in result)
    # That another thread's tensors passed says nothing of these.
    message = str(refused[0])
    assert "seq_lens must be torch.int32, not torch.int64." in message
    assert {str(answer) for answer in refused} == {message}
