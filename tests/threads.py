"""Questions asked in threads, all at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["outcome", "together"]

T = TypeVar("T")


def together(*questions: Callable[[], T]) -> list[T]:
    """Ask all at once, each in a thread of its own; raise what one raises."""
    barrier = threading.Barrier(len(questions))

    def ask(question: Callable[[], T]) -> T:
        barrier.wait(30)
        return question()

    with ThreadPoolExecutor(len(questions)) as threads:
        return list(threads.map(ask, questions))


def outcome(question: Callable[[], object]) -> object:
    """Ask, and return the answer, or the class and text of the error."""
    try:
        return question()
    except Exception as exc:
        return type(exc), str(exc)
