"""Wall time of the static probe in a process of its own, as a ratio to ``python -c pass``.

``python -m tests.benchmarks.static_probe`` alternates the arms and prints medians of the ratios
within a round. The null arm is ``pass`` against itself: its spread is the noise. The package is
compiled to bytecode first, as pip does when it installs a wheel; an editable install may not be.
"""

from __future__ import annotations

import compileall
import statistics
import subprocess
import sys
import time
from pathlib import Path

import fi_dcp_compat

ROUNDS = 40
PROBE = "from fi_dcp_compat import probe; probe(static=True)"
ARMS = {
    "pass": "pass",
    "null": "pass",
    "static probe": PROBE,
    "its imports": "import fi_dcp_compat.probing, fi_dcp_compat.releases",
    "import fi_dcp_compat": "import fi_dcp_compat",
}


def seconds(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


def main() -> None:
    compileall.compile_dir(Path(fi_dcp_compat.__file__).parent, quiet=1)
    check = f"{PROBE}; import sys; sys.exit(bool({{'torch', 'flashinfer'}} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", check], check=True)
    rounds: dict[str, list[float]] = {name: [] for name in ARMS}
    for index in range(ROUNDS + 1):
        for name in sorted(ARMS, reverse=bool(index % 2)):
            took = seconds(ARMS[name])
            if index:  # the first round warms up
                rounds[name].append(took)
    base = rounds.pop("pass")
    print(f"python -c pass: {statistics.median(base) * 1e3:.1f} ms")
    for name, times in rounds.items():
        ratios = [arm / empty for arm, empty in zip(times, base, strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        print(f"{name}: {median:.2f} times pass (quartiles {low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
