"""How many there were; the last file of the folder, so that the others have run."""

from __future__ import annotations

import pytest

from tests.fuzz.batches import COUNTS

KINDS = {
    "check",
    "check, wild",
    "decode_mla",
    "decode_mla, wild",
    "MLADecoder.run, wild",
    "MLADecoder.run, again",
    "drop-in, wild",
}


def test_there_were_at_least_50_000_different_ones() -> None:
    if set(COUNTS) != KINDS:
        pytest.skip("only a part of the tests ran")
    assert COUNTS.total() >= 50_000
