"""Choices read off bytes that hypothesis draws: thousands of configurations in a second.

Zeros choose the first of everything, which is right everywhere, so what hypothesis shrinks to is a
right call with the one thing in it that fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

# Of 256: how often the first choice is taken, by the first byte.
_LEANINGS = (240, 170, 220)


class Choices:
    """A reader of bytes; past their end it reads zeros."""

    def __init__(self, data: bytes) -> None:
        self._left = iter(data)
        self._leaning = self.pick(_LEANINGS)

    def pick(self, options: Sequence[T]) -> T:
        """Choose any."""
        return options[next(self._left, 0) % len(options)]

    def lean(self, options: Sequence[T]) -> T:
        """Choose the first, mostly."""
        byte = next(self._left, 0)
        if byte < self._leaning or len(options) == 1:
            return options[0]
        return options[1 + (byte - self._leaning) % (len(options) - 1)]
