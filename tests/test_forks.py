"""Processes: forked before and after the first call, spawned, and the errors they send back."""

from __future__ import annotations

import contextlib
import importlib.abc
import json
import math
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch

from fi_dcp_compat import (
    DCP,
    FlashInferCompatError,
    bmm_scales,
    debug_checks,
    decode_mla,
    probe,
    recorded,
    supports_combination,
)
from fi_dcp_compat.abi import FUNCTION
from fi_dcp_compat.testing import mock_kernel, use_kernel
from tests.fakes import Site, answer_of
from tests.support import call, dcp_of
from tests.threads import outcome

# Errors, each raised as its user meets it; a worker raises one by its name.


@contextlib.contextmanager
def flashinfer_is(*module: ModuleType | None) -> Iterator[None]:
    """Let ``import flashinfer`` give `module`; None blocks it, and nothing looks for it anew."""
    before = {name: sys.modules.pop(name) for name in [*sys.modules] if name.startswith("flashin")}
    for given in module:
        sys.modules["flashinfer"] = given  # type: ignore[assignment]  # None is allowed there
    try:
        yield
    finally:
        sys.modules.pop("flashinfer", None)
        sys.modules.update(before)


class Broken(importlib.abc.MetaPathFinder):
    """A FlashInfer whose import raises."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "flashinfer":
            raise OSError("libcuda.so.1: cannot open shared object file")
        return None


def broken() -> object:
    sys.meta_path.insert(0, Broken())
    try:
        with flashinfer_is():
            return probe()
    finally:
        del sys.meta_path[0]


def absent() -> object:
    with flashinfer_is(None):
        return probe()


def gone() -> object:
    with flashinfer_is(ModuleType("flashinfer")):
        return probe()


def too_old() -> object:
    with use_kernel(mock_kernel("0.6.16")):
        return decode_mla(**call(dcp=dcp_of()))


def unsupported() -> object:
    lengths = torch.tensor([31, 36], dtype=torch.int32)
    with use_kernel(mock_kernel("0.7.4")):
        return decode_mla(**call(dcp=DCP(4, 2, lengths, interleave_size=2), causal=False))


def wrong_input() -> object:
    return decode_mla(**call(backend="reference", block_tables=torch.zeros(2, 2)))


def capturing() -> object:
    kernel = mock_kernel("0.7.4")
    kernel.side_effect = RuntimeError("MLA must be prepared before CUDA graph capture")
    with use_kernel(kernel):
        return decode_mla(**call(dcp=dcp_of()))


REFUSALS: dict[str, Callable[[], object]] = {
    "FlashInferNotFoundError": absent,
    "FlashInferImportError": broken,
    "FlashInferSignatureError": gone,
    "FlashInferVersionError": too_old,
    "UnsupportedConfigError": unsupported,
    "InvalidInputError": wrong_input,
    "NotPreparedError": capturing,
}


def facts(exc: BaseException | None) -> list[str]:
    """All that an error says, but its traceback."""
    assert isinstance(exc, FlashInferCompatError)
    attributes = {name: repr(value) for name, value in sorted(vars(exc).items())}
    return [type(exc).__name__, str(exc), json.dumps(attributes), repr(exc.args)]


def raised(name: str) -> BaseException | None:
    try:
        REFUSALS[name]()
    except FlashInferCompatError as exc:
        return exc
    return None


def work() -> list[object]:
    """What a worker does: the torch reference, a mock, an answer to a stack."""
    reference = decode_mla(**call(dcp=dcp_of(), backend="reference"))
    kernel = mock_kernel("0.7.4")
    with use_kernel(kernel):
        mocked = decode_mla(**call(dcp=dcp_of()))
        refusal = supports_combination(num_heads=16, dtype="bfloat16", dcp_world_size=8)
    return [
        [*reference.out.shape],
        reference.lse.double().sum().item(),
        mocked.lse.double().sum().item(),
        kernel.call_count,
        refusal,
        bmm_scales(0.5, torch.bfloat16, 1.0, 1.0),
    ]


def pooled(method: str) -> dict[str, object]:
    """Work in one worker; hold its errors against those raised here."""
    context = multiprocessing.get_context(method)
    answers: dict[str, object] = {}
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        answers["work"] = pool.submit(work).result(60) == work()
        for name in REFUSALS:
            received = pool.submit(REFUSALS[name]).exception(60)
            here = facts(raised(name))
            answers[name] = facts(received) == here and here[0]
        answers["work after errors"] = pool.submit(work).result(60) == work()
    return answers


# Forks of a process with FlashInfer on its path.


def in_child(question: Callable[[], object]) -> object:
    """Fork, ask there, and return the answer; a child that hangs is killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            answer = question()
        except BaseException as exc:
            answer = repr(exc)
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    received: object = json.loads(text or '"it hung"')
    return received


def found() -> object:
    """The release that a first call finds, and that the calls work."""
    abi = probe()
    return [abi.version, abi.parameters == recorded("0.7.4").parameters, work()]


def cleared() -> object:
    before = probe()
    probe.cache_clear()
    return [before == probe(), before is probe(), found()]


def checks() -> object:
    """Whether a call with lengths above their bound is refused."""
    wrong = call(backend="reference", max_seq_len=3)
    return isinstance(outcome(lambda: decode_mla(**wrong)), tuple)


class Slow:
    """A kernel in FlashInfer's place that takes its time to show its signature."""

    def __init__(self) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()

    @property
    def __signature__(self) -> object:
        self.asked.set()
        self.go_on.wait(30)
        raise ValueError("no signature")

    def __call__(self, **arguments: object) -> None: ...


def while_a_thread_binds() -> object:
    """Fork while a thread is at its first call of another kernel."""
    decode = sys.modules["flashinfer.decode"]
    real, slow = getattr(decode, FUNCTION), Slow()
    setattr(decode, FUNCTION, slow)
    thread = threading.Thread(target=probe)
    thread.start()
    slow.asked.wait(30)
    setattr(decode, FUNCTION, real)
    probe.cache_clear()
    answer = in_child(found)
    slow.go_on.set()
    thread.join()
    return answer


def forked() -> dict[str, object]:
    answers: dict[str, object] = {"child first": in_child(found)}
    answers["imported by the child's call"] = "flashinfer" in sys.modules
    answers["parent"] = found()
    answers["child after"] = in_child(found)
    abi = probe()
    answers["child that clears"] = in_child(cleared)
    answers["parent's own"] = probe() is abi
    with use_kernel(mock_kernel("0.6.16")):
        answers["child in a block"] = in_child(lambda: probe().version)
    answers["child after a block"] = in_child(lambda: probe().version)
    with debug_checks():
        answers["child checks"] = in_child(checks)
    answers["child checks after"] = in_child(checks)
    answers["while a thread binds"] = while_a_thread_binds()
    return answers


SCRIPT = """
import json
import torch
torch.set_num_threads(1)
from tests.test_forks import forked, pooled
print(json.dumps(forked() | {method: pooled(method) for method in ("fork", "spawn")}))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What parent and children found; a process with threads of its own is none to fork."""
    site = Site(tmp_path_factory.mktemp("site"))
    site.flashinfer()
    answers: dict[str, Any] = answer_of(SCRIPT, path=[site.folder])
    return answers


def test_a_forked_worker_works_before_and_after_the_first_call(answers: dict[str, Any]) -> None:
    version, same, worked = answers["parent"]
    assert (version, same) == ("0.7.4", True)
    shape, reference, mocked, *rest = worked
    assert shape == [2, 1, 16, 512]
    # Each of 32 rows sees 7 keys of score 0.
    assert reference == pytest.approx(32 * math.log(7))
    assert [mocked, *rest[:2]] == [32.0, 1, None]
    for child in ("child first", "child after", "while a thread binds"):
        assert answers[child] == answers["parent"], child


def test_a_forked_workers_first_call_is_its_own(answers: dict[str, Any]) -> None:
    assert answers["imported by the child's call"] is False
    assert answers["child that clears"] == [True, False, answers["parent"]]
    assert answers["parent's own"] is True


def test_a_forked_worker_is_where_its_parent_was(answers: dict[str, Any]) -> None:
    assert (answers["child in a block"], answers["child after a block"]) == ("0.6.16", "0.7.4")
    assert (answers["child checks"], answers["child checks after"]) == (True, False)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_works_and_its_errors_arrive_whole(method: str, answers: dict[str, Any]) -> None:
    expected: dict[str, object] = {name: name for name in REFUSALS}
    assert answers[method] == {"work": True, **expected, "work after errors": True}
