"""The exceptions: what they say, what they carry, and that they survive the trip to a worker."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch

from fi_dcp_compat import (
    FlashInferCompatError,
    FlashInferCompatWarning,
    FlashInferImportError,
    FlashInferNotFoundError,
    FlashInferSignatureError,
    FlashInferVersionError,
    InvalidInputError,
    NotPreparedError,
    Reason,
    UnsupportedConfigError,
    decode_mla,
    recorded,
)
from fi_dcp_compat import errors as module
from fi_dcp_compat.errors import raise_first
from fi_dcp_compat.testing import mock_kernel, use_kernel
from tests.support import call

SECOND_BASE: dict[type[FlashInferCompatError], type[Exception]] = {
    FlashInferCompatError: RuntimeError,
    FlashInferNotFoundError: ImportError,
    FlashInferImportError: ImportError,
    FlashInferVersionError: RuntimeError,
    FlashInferSignatureError: RuntimeError,
    UnsupportedConfigError: ValueError,
    InvalidInputError: ValueError,
    NotPreparedError: RuntimeError,
}
ATTRIBUTES = ("summary", "found", "needed", "fix", "argument", "value", "reasons")

REASONS = (
    Reason(UnsupportedConfigError, "num_heads", "Too many heads.", "129.", "1 to 128.", "split."),
    Reason(FlashInferVersionError, "dcp", "No DCP.", "0.6.16.", "0.6.17.", "upgrade."),
)


def error_of(kind: type[FlashInferCompatError], **changes: Any) -> FlashInferCompatError:
    facts: dict[str, Any] = {
        "found": "what there is.",
        "needed": "what is needed.",
        "fix": "what mends it.",
        "argument": "query",
        "value": (1, "two"),
        "reasons": REASONS,
    }
    return kind("One line.", **(facts | changes))


each_class = pytest.mark.parametrize("kind", SECOND_BASE, ids=lambda kind: kind.__name__)


def test_these_are_all_the_classes() -> None:
    classes = {
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert classes == {*SECOND_BASE, FlashInferCompatWarning}
    assert FlashInferCompatWarning.__bases__ == (UserWarning,)


@each_class
def test_a_class_is_ours_and_a_builtin(kind: type[FlashInferCompatError]) -> None:
    error = error_of(kind)
    assert isinstance(error, FlashInferCompatError)
    assert isinstance(error, RuntimeError)
    assert isinstance(error, SECOND_BASE[kind])


@each_class
def test_it_says_found_needed_and_fix_one_a_line(kind: type[FlashInferCompatError]) -> None:
    assert str(error_of(kind, reasons=())) == (
        "One line.\nFound: what there is.\nNeeded: what is needed.\nFix: what mends it."
    )


@each_class
def test_it_names_the_other_reasons_too(kind: type[FlashInferCompatError]) -> None:
    assert str(error_of(kind)) == (
        "One line.\nFound: what there is.\nNeeded: what is needed.\nFix: what mends it.\n"
        "Also: No DCP."
    )


@each_class
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_it_pickles_with_everything_it_carries(
    kind: type[FlashInferCompatError], protocol: int
) -> None:
    error = error_of(kind)
    loaded = pickle.loads(pickle.dumps(error, protocol))
    assert type(loaded) is kind
    assert isinstance(loaded, SECOND_BASE[kind])
    assert str(loaded) == str(error)
    assert loaded.args == error.args
    for name in ATTRIBUTES:
        assert getattr(loaded, name) == getattr(error, name)


@each_class
def test_it_copies_with_everything_it_carries(kind: type[FlashInferCompatError]) -> None:
    error = error_of(kind)
    for copied in (copy.copy(error), copy.deepcopy(error)):
        assert type(copied) is kind
        assert [getattr(copied, name) for name in ATTRIBUTES] == [
            getattr(error, name) for name in ATTRIBUTES
        ]


class Special(UnsupportedConfigError):
    """A stack's own error, built on one of ours."""


def test_a_subclass_pickles_as_itself() -> None:
    loaded = pickle.loads(pickle.dumps(error_of(Special)))
    assert type(loaded) is Special
    assert loaded.reasons == REASONS


def test_what_is_not_given_is_empty() -> None:
    error = InvalidInputError("One line.", found="a.", needed="b.", fix="c.")
    assert error.argument is None
    assert error.value is None
    assert error.reasons == ()
    assert error.args == ("One line.",)


def test_the_reasons_become_a_tuple() -> None:
    assert error_of(UnsupportedConfigError, reasons=iter(REASONS)).reasons == REASONS


def test_a_cause_is_kept() -> None:
    cause = OSError("libcuda.so.1")
    with pytest.raises(FlashInferImportError, match="One line") as raised:
        raise error_of(FlashInferImportError) from cause
    assert raised.value.__cause__ is cause


# Values that the call refused travel too.


def test_a_refused_tensor_is_described_never_kept() -> None:
    query = torch.full((2, 1, 16, 575), 123.0, dtype=torch.bfloat16)
    with (
        use_kernel(mock_kernel("0.7.4"), recorded("0.7.4")),
        pytest.raises((InvalidInputError, UnsupportedConfigError), match="575") as raised,
    ):
        decode_mla(**call(query=query))
    assert "123" not in str(raised.value)
    assert not isinstance(raised.value.value, torch.Tensor)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_tensors_in_a_list_are_not_shown_either() -> None:
    with (
        use_kernel(mock_kernel("0.7.4"), recorded("0.7.4")),
        pytest.raises(InvalidInputError, match="query must be a tensor") as raised,
    ):
        decode_mla(**call(query=[torch.full((4,), 123.0)]))
    assert "123" not in str(raised.value)
    assert "123" not in str(raised.value.value)


def test_an_error_about_a_value_that_does_not_pickle_still_does() -> None:
    with (
        use_kernel(mock_kernel("0.7.4"), recorded("0.7.4")),
        pytest.raises(InvalidInputError, match="must be a DCP") as raised,
    ):
        decode_mla(**call(dcp=threading.Lock()))
    loaded = pickle.loads(pickle.dumps(raised.value))
    assert str(loaded) == str(raised.value)
    assert "lock" in str(loaded.value)


# Reasons.


@pytest.mark.parametrize("reason", REASONS, ids=lambda reason: reason.argument)
def test_a_reason_raises_its_own_class_with_its_own_facts(reason: Reason) -> None:
    error = reason.exception()
    assert type(error) is reason.error
    assert (error.summary, error.found, error.needed, error.fix) == reason[2:]
    assert error.argument == reason.argument
    assert error.reasons == (reason,)
    assert str(reason) == str(error)


def test_a_reason_reads_like_its_error() -> None:
    assert str(REASONS[0]) == "Too many heads.\nFound: 129.\nNeeded: 1 to 128.\nFix: split."


def test_the_first_reason_is_raised_with_all_attached() -> None:
    with pytest.raises(UnsupportedConfigError) as raised:
        raise_first(REASONS)
    assert type(raised.value) is UnsupportedConfigError
    assert raised.value.reasons == REASONS
    assert str(raised.value) == (
        "Too many heads.\nFound: 129.\nNeeded: 1 to 128.\nFix: split.\nAlso: No DCP."
    )
    with pytest.raises(FlashInferVersionError, match=r"^No DCP\.") as raised_second:
        raise_first(REASONS[::-1])
    assert str(raised_second.value).endswith("\nAlso: Too many heads.")


def test_without_a_reason_nothing_is_raised() -> None:
    raise_first(())
    raise_first([])


def test_reasons_pickle_and_compare() -> None:
    assert pickle.loads(pickle.dumps(REASONS)) == REASONS
    assert hash(REASONS[0]) == hash(REASONS[0]._replace())
