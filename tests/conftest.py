from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from fi_dcp_compat import plans, preparation, probe

# The tensors are small: more threads only wait for each other, on a busy machine tenfold.
torch.set_num_threads(1)
# A first call costs what the next do not; the machine's noise is no failure of a test.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--wheels",
        type=Path,
        default=Path.home() / ".cache" / "fi_dcp_compat" / "wheels",
        metavar="DIR",
        help="FlashInfer's wheels; what is missing is downloaded there (default: %(default)s)",
    )


@pytest.fixture(scope="session")
def wheels_folder(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.config.getoption("--wheels")
    return folder.absolute()


@pytest.fixture(autouse=True)
def _fresh_caches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in ("FI_DCP_COMPAT_ASSUME_VERSION", "FI_DCP_COMPAT_DEBUG"):
        monkeypatch.delenv(variable, raising=False)
    caches = (probe, preparation._gpu, plans._reference_binding)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()
