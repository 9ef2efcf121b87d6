"""FlashInfer's releases from their real wheels, each in a process of its own.

Slow, and it downloads what wheels are missing: ``pytest -m releases --wheels=DIR``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from packaging.version import Version

from fi_dcp_compat import recorded
from fi_dcp_compat.features import OLDEST_RELEASE
from fi_dcp_compat.releases import recorded_versions
from tests.fakes import REPOSITORY, answer_of
from tests.wheels import restated, unpacked

pytestmark = pytest.mark.releases

# Their Python and C++ of MLA is 0.6.16's and 0.6.16.post4's, byte by byte.
SAME_CODE = {"0.6.16.post1", "0.6.16.post2", "0.6.16.post3"}
# All that decode_mla runs on, one that was recorded a minute ago included.
RELEASES = [
    version
    for version in recorded_versions()
    if Version(version) >= Version(OLDEST_RELEASE) and version not in SAME_CODE
]
SUITE = "tests/contract/test_release.py"
REFUSALS = ("tests/contract/test_refusals.py", "tests/contract/test_refused_inputs.py")
INTEGRATION = "tests/contract/test_integration_release.py"
DROPIN = "tests/contract/test_dropin_release.py"
SIMULATION = "tests/hostsim/test_simulation.py"
# Fewer would mean that a file or a parameter was not found.
FEWEST_IN_SUITE = 370
FEWEST_IN_ALL = 400

# Prints what there is to see of a release that is first on the path.
PROBE = """
import importlib.util, json, sys
from fi_dcp_compat import probe
abi = probe(static=True)
imported = sorted({"torch", "flashinfer"} & {name.partition(".")[0] for name in sys.modules})
origin = importlib.util.find_spec("flashinfer").origin
print(json.dumps([abi.version, abi.entry_point, abi.parameters, imported, origin]))
"""
IMPORT = """
import json
from fi_dcp_compat import FlashInferImportError, probe

def attempt(act):
    try:
        return act()
    except FlashInferImportError as error:
        return "FlashInferImportError from " + repr(error.__cause__)
    except Exception as error:
        return repr(error)

print(json.dumps([
    attempt(lambda: __import__("flashinfer").__version__),
    attempt(lambda: probe().version),
    attempt(lambda: probe(static=True).version),
]))
"""
NO_CUDA = "AssertionError('Torch not compiled with CUDA enabled')"


class Suites(NamedTuple):
    """Run test files on a release, real or restated as another one."""

    release: str
    code: str
    abilities: str
    assumed: str = ""
    files: tuple[str, ...] = (SUITE,)

    def __call__(self, wheels: Path) -> subprocess.CompletedProcess[str]:
        if self.code == self.release:
            folder = unpacked(self.release, wheels)
        else:
            folder = restated(self.code, self.release, wheels)
        variables = {n: text for n, text in os.environ.items() if not n.startswith("FI_DCP")}
        variables |= {
            "PYTHONPATH": str(folder),
            "FI_DCP_TEST_RELEASE": self.release,
            "FI_DCP_TEST_CODE": self.code,
            "FI_DCP_TEST_ABILITIES": self.abilities,
        }
        if self.assumed:
            variables["FI_DCP_TEST_ASSUME"] = self.assumed
        options = ("-q", "-p", "no:cacheprovider", "--maxfail=3", "--tb=short")
        return subprocess.run(
            [sys.executable, "-m", "pytest", *self.files, *options],
            env=variables,
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )


class Answer(NamedTuple):
    """Run code that prints an answer in a process that finds one release."""

    release: str
    code: str

    def __call__(self, wheels: Path) -> Any:
        return answer_of(self.code, path=[unpacked(self.release, wheels)])


@pytest.fixture(scope="module")
def started(
    request: pytest.FixtureRequest, wheels_folder: Path
) -> Iterator[dict[str, Future[Any]]]:
    """Start the jobs of all selected tests, as many at a time as there are cores."""
    jobs = {
        item.nodeid: cast("Callable[[Path], Any]", item.callspec.params["job"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module
    }
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        yield {name: pool.submit(job, wheels_folder) for name, job in jobs.items()}
    finally:
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def result(request: pytest.FixtureRequest, started: dict[str, Future[Any]]) -> Any:
    return started[request.node.nodeid].result()


def assert_passed(done: subprocess.CompletedProcess[str], fewest: int) -> None:
    tail = done.stdout[-6000:] + done.stderr[-2000:]
    assert done.returncode == 0, tail
    passed = re.search(r"^(\d+) passed", done.stdout, re.MULTILINE)
    assert passed, tail
    assert int(passed[1]) >= fewest, tail


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(
            Suites(
                release,
                release,
                release,
                files=(SUITE, INTEGRATION, DROPIN, *REFUSALS, SIMULATION),
            ),
            id=release,
        )
        for release in RELEASES
    ],
)
def test_the_host_code_of_a_release_passes(
    job: Suites, result: subprocess.CompletedProcess[str]
) -> None:
    assert_passed(result, FEWEST_IN_ALL)
    # The simulation's own tests may skip what the release has not; ours may skip nothing.
    skipped = [line for line in result.stdout.splitlines() if line.startswith("SKIPPED")]
    for line in skipped:
        reason = re.search(r"\] (\S+?):\d+: FlashInfer (\S+) is older than (\S+)$", line)
        assert reason, line
        assert reason[1] == SIMULATION
        assert reason[2] == job.release
        assert Version(job.release) < Version(reason[3])
    assert bool(skipped) is (Version(job.release) < Version("0.7.1"))


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(Suites("0.6.16", "0.6.17", "0.6.16"), id="backport"),
        pytest.param(Suites("0.6.16", "0.6.17", "0.6.17", "0.6.17"), id="backport, overridden"),
        pytest.param(Suites("0.6.17rc1", "0.6.17", "0.6.17"), id="0.6.17rc1 with the keywords"),
        pytest.param(
            Suites("0.6.16.dev20260730", "0.6.17", "0.6.17"), id="nightly with the keywords"
        ),
        pytest.param(Suites("0.6.17rc1", "0.6.16", "0.6.16"), id="0.6.17rc1 without the keywords"),
        # What 0.6.16 has and no keyword shows counts as missing: the night may have been before.
        pytest.param(
            Suites("0.6.16.dev20260730", "0.6.16", "0.6.15.post1"),
            id="nightly without the keywords",
        ),
    ],
)
def test_a_release_that_calls_itself_another_has_what_the_rules_say(
    job: Suites, result: subprocess.CompletedProcess[str]
) -> None:
    assert_passed(result, FEWEST_IN_SUITE)
    assert "SKIPPED" not in result.stdout


@pytest.mark.parametrize(
    "job", [pytest.param(Answer(version, PROBE), id=version) for version in recorded_versions()]
)
def test_the_static_probe_gives_the_record(job: Answer, result: Any, wheels_folder: Path) -> None:
    record = recorded(job.release)
    origin = unpacked(job.release, wheels_folder) / "flashinfer" / "__init__.py"
    parameters = json.loads(json.dumps(record.parameters))
    assert result == [job.release, record.entry_point, parameters, [], str(origin)]


@pytest.mark.skipif(torch.version.cuda is not None, reason="about a CPU build of torch")
@pytest.mark.parametrize(
    "job",
    [
        pytest.param(Answer(version, IMPORT), id=version)
        for version in recorded_versions()
        if Version(version) >= Version("0.6.8")
    ],
)
def test_a_plain_import_without_cuda_does_what_the_table_says(job: Answer, result: Any) -> None:
    version = job.release
    if recorded(version).features.imports_without_cuda:
        assert result == [version, version, version]
    else:
        assert result == [NO_CUDA, f"FlashInferImportError from {NO_CUDA}", version]
