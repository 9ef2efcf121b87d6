"""`check` over random configurations: what it says, and whether calls, routes and fixes agree."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest

from fi_dcp_compat import (
    FlashInferABI,
    FlashInferVersionError,
    Reason,
    check,
    recorded,
    supports_combination,
)
from fi_dcp_compat.config import Config
from fi_dcp_compat.guards import dtype_name
from fi_dcp_compat.releases import recorded_versions
from fi_dcp_compat.routing import route
from fi_dcp_compat.validation import describe
from tests import test_guards
from tests.fuzz.batches import fuzz
from tests.fuzz.drawing import Choices
from tests.fuzz.judging import assert_well_put
from tests.fuzz.wild import wild
from tests.test_guards import CHOICES, SPECIAL, abi_of, assert_parity, config_of, suggestions

RELEASES = (*recorded_versions()[::-1], *SPECIAL)


class Drawn(NamedTuple):
    """A release, by its name in `test_guards`, and `check`'s keywords."""

    release: str
    config: dict[str, Any]

    def __repr__(self) -> str:
        """Only what is not as usual."""
        plain = config_of() | {"interleave_size": 1}
        shown = [
            f"{name}={describe(value)}"
            for name, value in self.config.items()
            if describe(value) != describe(plain[name])
        ]
        return f"{self.release}: {', '.join(shown) or 'the plainest configuration'}"

    @property
    def abi(self) -> FlashInferABI:
        return abi_of(self.release)


def callable_configuration(data: bytes) -> Drawn:
    """One that `test_guards.attempt` can call with: it builds no group of another interleave."""
    return right(Choices(data))


def right(choices: Choices) -> Drawn:
    chosen = {name: choices.lean(values) for name, values in CHOICES.items()}
    config = config_of(choices.pick(test_guards.BACKENDS), **chosen)
    return Drawn(choices.pick(RELEASES), config)


def any_configuration(data: bytes) -> Drawn:
    choices = Choices(data)
    release, config = right(choices)
    return Drawn(release, config | {"interleave_size": choices.lean((1, 2, 64))})


def wild_configuration(data: bytes) -> Drawn:
    choices = Choices(data)
    release, config = right(choices)
    for _ in range(choices.pick((1, 1, 2, 3))):
        name = choices.pick(tuple(config))
        config[name] = wild(choices, config[name])
    return Drawn(release, config)


def judge(drawn: Drawn) -> None:
    reasons = judge_wild(drawn)
    assert_routed(drawn, reasons)
    assert_mended(drawn, reasons)


def judge_wild(drawn: Drawn) -> tuple[Reason, ...]:
    """Each reason is well put and told once; `supports_combination` says the same as text."""
    reasons = check(drawn.abi, **drawn.config)
    assert len(set(reasons)) == len(reasons)
    for reason in reasons:
        assert_well_put(reason.exception(reasons))
    if drawn.config["page_size"] is not None:  # there it means any
        text = supports_combination(abi=drawn.abi, **drawn.config)
        assert text == ("\n".join(map(str, reasons)) or None)
    return reasons


def assert_routed(drawn: Drawn, reasons: tuple[Reason, ...]) -> None:
    """A route exists where there is no reason; where there is one, it is what is raised."""
    names = {name: dtype_name(drawn.config[name]) for name in ("dtype", "kv_dtype")}
    config = Config(**drawn.config | names)
    if reasons:
        with pytest.raises(reasons[0].error) as raised:
            route(drawn.abi, config, "e")
        assert raised.value.reasons == reasons
        return
    path = route(drawn.abi, config, "e")
    assert path.may_run
    assert path.backend in ("auto", *path.may_run)
    assert config.backend in ("auto", path.backend)
    if config.dcp_world_size > 1:
        assert path.backend in ("cute-dsl", "reference")


def assert_mended(drawn: Drawn, reasons: tuple[Reason, ...]) -> None:
    """What the first fix says to do takes its reason away."""
    if not reasons:
        return
    first = reasons[0]
    for backend in suggestions(first.fix):
        config = drawn.config | {"backend": backend}
        assert first.summary not in [reason.summary for reason in check(drawn.abi, **config)]
    upgrade = re.search(r'pip install -U "flashinfer-python>=([^"]+)"', first.fix)
    if upgrade is not None and first.error is FlashInferVersionError:
        left = check(recorded(upgrade[1]), **drawn.config)
        assert first.summary not in [reason.summary for reason in left]


def judge_call(drawn: Drawn) -> None:
    assert_parity(drawn.abi, drawn.config)


def test_check_says_what_a_route_and_its_own_fixes_say() -> None:
    fuzz("check", 38_000, 20, any_configuration, judge)


def test_check_has_a_reason_for_anything() -> None:
    fuzz("check, wild", 5_000, 26, wild_configuration, judge_wild)


def test_a_call_comes_to_what_check_says_on_any_gpu() -> None:
    fuzz("decode_mla", 4_000, 20, callable_configuration, judge_call)
