from __future__ import annotations

from collections.abc import Iterator

import pytest

from fi_dcp_compat import decode, prepared, probe


@pytest.fixture(autouse=True)
def _fresh_caches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in ("FI_DCP_COMPAT_ASSUME_VERSION", "FI_DCP_COMPAT_DEBUG"):
        monkeypatch.delenv(variable, raising=False)
    _clear()
    yield
    _clear()


def _clear() -> None:
    probe.cache_clear()
    prepared._gpu.cache_clear()
    decode._prepared.cache_clear()
