"""What decode_mla refuses is what the importable release refuses, or is listed with its evidence.

The release's real host code runs every configuration of the grid. What `check` lets through comes
to one kernel; what it refuses raises in FlashInfer's own Python when called directly, or is an
entry of `refusals`.
"""

from __future__ import annotations

import importlib
import itertools
from collections import Counter
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest

from fi_dcp_compat import (
    DCP,
    FlashInferABI,
    FlashInferCompatError,
    check,
    decode_mla,
    preparation,
    probe,
    recorded,
)
from fi_dcp_compat.errors import Reason
from tests.hostsim.calls import flashinfer_function
from tests.hostsim.simulation import Simulation, simulated_flashinfer
from tests.support import RELEASES

from .input_refusals import INPUTS_THAT_RUN
from .refusal_cases import (
    Case,
    attempt,
    bounds,
    common,
    configuration,
    direct,
    grid,
    listing,
)
from .refusals import RUNS_BUT_WRONG, Entry, Line

# Older releases are warned about; that is another test's business.
pytestmark = pytest.mark.filterwarnings("ignore::fi_dcp_compat.FlashInferCompatWarning")


class Outcome(NamedTuple):
    """What became of one configuration in decode_mla, and in FlashInfer's own function.

    ``reached`` are the kernels that a call came to; ``entries`` and ``unlisted`` say what stands
    for the reasons that the host does not share.
    """

    case: Case
    reasons: tuple[Reason, ...]
    raised: Exception | None
    reached: list[str]
    host_raised: Exception | None
    host_reached: list[str]
    entries: list[Entry]
    unlisted: list[Reason]


def own(case: Case) -> None:
    world, interleave = case.dcp
    # The construction refuses an interleave before the call could.
    dcp = DCP(world, 0, bounds(case), interleave) if world > 1 else None
    decode_mla(**common(case), causal=case.causal, dcp=dcp)


def outcome(simulation: Simulation, abi: FlashInferABI, case: Case) -> Outcome:
    reasons = check(abi, **configuration(case))
    raised = attempt(simulation, own, {"case": case})
    reached = [*simulation.reached]
    host_raised = attempt(simulation, flashinfer_function(), direct(case))
    host_reached = [*simulation.reached]
    entries: list[Entry] = []
    unlisted: list[Reason] = []
    if reasons and host_reached:
        # Of auto's reasons those that speak of the kernel that FlashInfer's auto came to.
        ran = configuration(case._replace(backend=host_reached[0]))
        for reason in check(abi, **ran) or reasons:
            found = [
                entry
                for entry in RUNS_BUT_WRONG
                if entry.covers(simulation.release, host_reached[0], reason.argument, case)
            ]
            entries += found
            unlisted += [] if found else [reason]
    return Outcome(case, reasons, raised, reached, host_raised, host_reached, entries, unlisted)


@lru_cache
def outcomes() -> tuple[Outcome, ...]:
    """Run the whole grid, once for all tests."""
    found: list[Outcome] = []
    for capability, cases in itertools.groupby(grid(), key=lambda case: case.capability):
        preparation._gpu.cache_clear()
        with simulated_flashinfer(compute_capability=capability, compute=False) as simulation:
            assert simulation.release == version("flashinfer-python")
            abi = recorded(simulation.release)
            assert probe().parameters == abi.parameters
            found += [outcome(simulation, abi, case) for case in cases]
    return tuple(found)


def test_the_grid_is_whole() -> None:
    assert len(outcomes()) == len(set(grid())) == 4003
    counts = Counter(
        "run" if not o.reasons else "listed" if o.host_reached else "refused by the host too"
        for o in outcomes()
    )
    print(version("flashinfer-python"), dict(counts))
    assert counts["run"] > 700
    assert counts["refused by the host too"] > 2000


def test_what_check_lets_through_comes_to_one_kernel() -> None:
    passed = [o for o in outcomes() if not o.reasons]
    wrong: list[object] = [
        (o.case, o.raised, o.reached) for o in passed if o.raised or len(o.reached) != 1
    ]
    # By hand too, so that no refusal of the host is one of a malformed call; but for auto and
    # non-causal blocks, which decode_mla turns into other calls.
    wrong += [
        (o.case, o.host_raised, o.host_reached)
        for o in passed
        if o.case.backend != "auto" and o.case.causal
        if o.host_raised or o.host_reached != o.reached
    ]
    assert not wrong, listing(wrong)


def test_what_check_refuses_raises_its_reasons_before_flashinfer() -> None:
    wrong: list[object] = []
    for o in outcomes():
        if not o.reasons:
            continue
        said = o.raised.reasons if isinstance(o.raised, FlashInferCompatError) else ()
        if o.case.dcp[1] > 1:
            agree = len(said) == 1 and said[0] in o.reasons
        else:
            agree = said == o.reasons and type(o.raised) is o.reasons[0].error
        if o.reached or not agree:
            wrong.append((o.case, o.raised, o.reached, [reason.summary for reason in o.reasons]))
    assert not wrong, listing(wrong)


def test_every_refusal_is_the_hosts_own_or_listed() -> None:
    wrong: list[object] = []
    for o in outcomes():
        if not o.reasons:
            continue
        if not o.host_reached and o.host_raised is None:
            wrong.append((o.case, "came to no kernel, and raised nothing"))
        if o.unlisted:
            wrong.append((o.case, o.host_reached, [reason.summary for reason in o.unlisted]))
        # What the emulated launcher refuses is listed as refused there.
        late = any(entry.verdict == "late" for entry in o.entries)
        if o.host_reached and o.host_raised and not late:
            wrong.append((o.case, o.host_reached, o.host_raised))
    assert not wrong, listing(wrong)


def test_every_entry_is_met_on_every_release_it_claims() -> None:
    release = version("flashinfer-python")
    met = {id(entry) for o in outcomes() for entry in o.entries}
    stale: list[object] = [
        entry for entry in RUNS_BUT_WRONG if entry.claims(release) and id(entry) not in met
    ]
    stale += [
        entry
        for entry in (*RUNS_BUT_WRONG, *INPUTS_THAT_RUN)
        if not any(entry.claims(known) for known in RELEASES)
    ]
    assert not stale, listing(stale)


def test_the_evidence_is_where_it_is_said_to_be() -> None:
    flashinfer = importlib.import_module("flashinfer")
    home, release = Path(str(flashinfer.__file__)).parent, version("flashinfer-python")
    wrong: list[object] = []
    for entry in (*RUNS_BUT_WRONG, *INPUTS_THAT_RUN):
        for line in entry.evidence:
            if not isinstance(line, Line) or line.release != release:
                continue
            source = home / line.path
            found = source.read_text().splitlines()[line.number - 1]
            wrong += [] if line.text in found else [(line, found)]
    assert not wrong, listing(wrong)
