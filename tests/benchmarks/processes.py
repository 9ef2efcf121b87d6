"""Wall time of whole processes, as ratios to ``python -c pass``.

The package is compiled to bytecode first, as pip does when it installs a wheel; an editable install
may not be.
"""

from __future__ import annotations

import compileall
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import fi_dcp_compat

from .rounds import Arms, Row, measure, microseconds, ratio

IMPORT = "import fi_dcp_compat"
PROBE = "from fi_dcp_compat import probe; probe(static=True)"
LIGHT = "import sys; sys.exit(bool({'torch', 'flashinfer'} & sys.modules.keys()))"


def process_rows(rounds: int) -> list[Row]:
    compileall.compile_dir(Path(fi_dcp_compat.__file__).parent, quiet=1)
    for code in (IMPORT, PROBE):
        subprocess.run([sys.executable, "-c", f"{code}; {LIGHT}"], check=True)
    arms: Arms = {
        "pass": _python("-c", "pass"),
        "null": _python("-c", "pass"),
        "import": _python("-c", IMPORT),
        "probe": _python("-c", PROBE),
        "doctor": _run(str(Path(sysconfig.get_path("scripts"), "fi-dcp-compat")), "doctor"),
    }
    times = measure(arms, rounds, 0, warm=2)
    return [
        microseconds("python -c pass", times, "pass"),
        ratio("null: pass / pass", times, "null", "pass"),
        ratio("import fi_dcp_compat / pass", times, "import", "pass", 2.0),
        ratio("probe(static=True) / pass", times, "probe", "pass", 4.0),
        ratio("fi-dcp-compat doctor / pass", times, "doctor", "pass", 4.0),
    ]


def _python(*arguments: str) -> Callable[[], object]:
    return _run(sys.executable, *arguments)


def _run(*command: str) -> Callable[[], object]:
    # Doctor's exit status is an answer, not a failure.
    return lambda: subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
