from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes import Site, fake_site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """The one site-packages folder of a machine with nothing installed."""
    with fake_site(tmp_path / "site-packages") as site:
        yield site
