"""What is the whole process's, and what a thread, a task or a context has for itself."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch import Tensor

from fi_dcp_compat import (
    FlashInferNotFoundError,
    InvalidInputError,
    debug_checks,
    decode_mla,
    probe,
    recorded,
)
from fi_dcp_compat.testing import mock_kernel, use_kernel
from tests.fakes import Site, fake_site
from tests.support import call
from tests.threads import outcome, together


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with fake_site(tmp_path / "site-packages") as site:
        yield site


# A kernel in FlashInfer's place is the whole process's.


def test_a_kernel_that_a_test_installs_is_every_threads(site: Site) -> None:
    def asked(threads: ThreadPoolExecutor) -> list[object]:
        # Together, so that no thread answers twice.
        barrier = threading.Barrier(2)
        answers = [threads.submit(lambda: (barrier.wait(30), outcome(probe))[1]) for _ in range(2)]
        return [answer.result() for answer in answers]

    with ThreadPoolExecutor(2) as threads:
        before = asked(threads)
        with use_kernel(mock_kernel("0.6.16"), recorded("0.6.16")) as abi:
            assert asked(threads) == [abi, abi]
        assert asked(threads) == before
    assert {answer[0] for answer in before if isinstance(answer, tuple)} == {
        FlashInferNotFoundError
    }


def test_a_kernel_that_another_thread_installs_is_this_ones_too(site: Site) -> None:
    entered, leave = threading.Event(), threading.Event()

    def block() -> None:
        with use_kernel(mock_kernel("0.7.4")):
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=block)
    thread.start()
    entered.wait(30)
    assert probe().version == "0.7.4"
    leave.set()
    thread.join()
    with pytest.raises(FlashInferNotFoundError, match="not installed"):
        probe()


# The checks of values are a context's.


def checked_wrong() -> object:
    """Decode with lengths above their bound, which only the checks see."""
    return outcome(lambda: decode_mla(**call(backend="reference", max_seq_len=3)))


def refused(answer: object) -> bool:
    if isinstance(answer, Tensor):
        return False
    assert isinstance(answer, tuple)
    assert answer[0] is InvalidInputError
    assert str(answer[1]).startswith("seq_lens[0] is longer than max_seq_len.")
    return True


def test_a_block_of_checks_is_its_own_threads() -> None:
    step = threading.Barrier(2)

    def inside() -> list[bool]:
        with debug_checks():
            step.wait(30)
            answers = [refused(checked_wrong())]
            step.wait(30)
        step.wait(30)
        return [*answers, refused(checked_wrong())]

    def later() -> list[bool]:
        step.wait(30)
        answers = [refused(checked_wrong())]
        with debug_checks():
            step.wait(30)
            step.wait(30)
            # The other block has ended.
            return [*answers, refused(checked_wrong())]

    assert together(inside, later) == [[True, False], [False, True]]


def test_a_copied_context_takes_the_checks_along() -> None:
    with debug_checks():
        context = contextvars.copy_context()
    assert not refused(checked_wrong())
    with ThreadPoolExecutor(1) as threads:
        assert refused(threads.submit(context.run, checked_wrong).result())
        assert not refused(threads.submit(checked_wrong).result())


def test_a_block_of_checks_is_its_own_tasks() -> None:
    async def inside(other: asyncio.Event, mine: asyncio.Event) -> bool:
        with debug_checks():
            mine.set()
            await other.wait()
            return refused(checked_wrong())

    async def outside(other: asyncio.Event, mine: asyncio.Event) -> bool:
        await other.wait()
        answer = refused(checked_wrong())
        mine.set()
        return answer

    async def both() -> list[bool]:
        first, second = asyncio.Event(), asyncio.Event()
        return list(await asyncio.gather(inside(first, second), outside(second, first)))

    assert asyncio.run(both()) == [True, False]


def test_the_environment_switches_the_checks_on_in_every_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FI_DCP_COMPAT_DEBUG", "1")
    assert [refused(answer) for answer in together(*[checked_wrong] * 4)] == [True] * 4
