from __future__ import annotations

import pytest

from tests.fuzz.batches import COUNTS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if COUNTS:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in COUNTS.items())
        terminalreporter.write_line(f"random configurations: {COUNTS.total():,} ({kinds})")
