"""Each message against the golden file, and what all of them keep to.

After a change of words: ``python -m tests.goldens --write``, and look at the difference.
"""

from __future__ import annotations

import pytest

from fi_dcp_compat import errors
from fi_dcp_compat.features import FEATURES
from tests.goldens.golden import CASES, FILE, HEAD, block, message, written
from tests.goldens.sites import sites
from tests.goldens.wording import complaints, parts, strangers

# Places that no case can be seen to pass, and why.
UNSEEN = {
    ("forwarding", "_require", "release_reasons"): "only makes the generator; asked a line below",
}


def test_the_file_has_these_cases_and_no_others() -> None:
    assert list(written()) == list(CASES)
    assert FILE.read_text(encoding="utf-8").startswith(HEAD)


@pytest.mark.parametrize("name", CASES)
def test_a_message_is_what_the_file_says(name: str) -> None:
    assert block(name) == written()[name].rstrip("\n") + "\n"


def test_every_place_that_builds_an_error_has_a_case() -> None:
    passed = {site for name in CASES for site in message(name).sites}
    without = [site for site in sites() if site not in passed]
    assert [str(site) for site in without if site[:3] not in UNSEEN] == []
    assert {site[:3] for site in without} == UNSEEN.keys()


def test_a_place_is_passed_by_its_own_message_alone() -> None:
    (only,) = [site for site in sites() if site.callee == "NotPreparedError"]
    saying = [name for name in CASES if only in message(name).sites]
    assert saying == ["decode_mla: a first call in a capture"]


def test_every_class_has_a_case() -> None:
    kinds = {name for name in errors.__all__ if name.endswith(("Error", "Warning"))}
    kinds.remove("FlashInferCompatError")  # only a base
    assert {message(name).kind for name in CASES} == kinds | {"printed"}


def test_every_feature_that_a_guard_asks_for_has_a_case() -> None:
    modules = ("abi.", "backends.", "dropin_guards.", "guards.")
    asked = {row.name for row in FEATURES if row.used_by.startswith(modules)}
    # These only widen what is taken; what is refused before them is refused for a number.
    asked -= {"trtllm_padded_heads", "native_table_width"}
    texts = "\n".join(message(name).text for name in CASES)
    told = {row.name for row in FEATURES if f"needs FlashInfer's {row.what}." in texts}
    assert told == asked | {"out_4d"}


@pytest.mark.parametrize("name", CASES)
def test_a_message_says_what_was_found_what_is_needed_and_the_fix(name: str) -> None:
    kind, text, _ = message(name)
    said = parts(text)
    assert said is not None
    assert list(complaints(text)) == []
    noted = kind == "FlashInferCompatWarning" or name.startswith("doctor:")
    assert bool(said.needed) != noted


@pytest.mark.parametrize("name", CASES)
def test_a_message_names_only_what_a_table_or_the_caller_names(name: str) -> None:
    assert list(strangers(message(name).text)) == []


RIGHT = "A.\nFound: B.\nNeeded: C.\nFix: D."


def test_a_right_message_has_no_complaint() -> None:
    for text in (RIGHT, f"{RIGHT}\nAlso: E.", "A.\nFix: D.", RIGHT.replace("C", "[.., H] (...)")):
        assert list(complaints(text)) == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("A.\nFound: B.\nNeeded: C.", "not of the form"),
        (RIGHT.replace("\nNeeded: C.", ""), "not of the form"),
        (RIGHT.replace("Found", "Got"), "not of the form"),
        (RIGHT.replace("B", "B.\nB"), "not of the form"),
        (RIGHT.replace("B", ""), "nothing said"),
        (RIGHT.replace("C.", "C"), "no full stop"),
        (f"{RIGHT}\nAlso: E", "no full stop"),
        (RIGHT.replace("D.", "D.."), "two full stops"),
        (RIGHT.replace("D.", "x=...."), "two full stops"),
        (RIGHT.replace("A.", "A..  B."), "two full stops"),
        (RIGHT.replace("A.", "A  a."), "two blanks"),
        (RIGHT.replace("B", "tensor([7])"), "contents of a tensor"),
        (RIGHT.replace("B", "[0., 1.]"), "contents of a tensor"),
        (RIGHT.replace("D", "pass %s"), "a template"),
        (RIGHT.replace("D", "pass {name}"), "a template"),
    ],
)
def test_a_wrong_message_has_a_complaint(text: str, complaint: str) -> None:
    assert any(complaint in said for said in complaints(text))


@pytest.mark.parametrize(
    ("words", "stranger"),
    [
        ("0.6.99 or newer.", "0.6.99"),
        ('pip install "flashinfer-python>=0.7.3".', "0.7.3"),
        ("0.7.0.post9 or newer.", "0.7.0.post9"),
        ("pass backend='cudnn'.", "cudnn"),
        ("pass backend='auto' or 'fa3'.", "fa3"),
        ("name cute_dsl.", "cute_dsl"),
        ("name TRTLLM-gen.", "TRTLLM-gen"),
        ("pass cum_seqlens_q.", "cum_seqlens_q"),
        ("pass seqlens=...", "seqlens"),
    ],
)
def test_a_name_that_no_table_has_is_a_stranger_unless_the_caller_named_it(
    words: str, stranger: str
) -> None:
    for place in ("A.", "C.", "D."):
        assert stranger in list(strangers(RIGHT.replace(place, words)))
        text = RIGHT.replace("Found: B.", f"Found: {words}").replace(place, words)
        assert list(strangers(text)) == []
    assert stranger in list(strangers(f"{RIGHT}\nAlso: {words}"))


def test_the_names_of_the_tables_are_no_strangers() -> None:
    words = (
        "0.6.17 or newer, 0.7.2.post1, backend='auto' or 'cute-dsl', trtllm-gen, xqa, cake, "
        "cum_seq_lens_q=..., dcp_world_size=8, cp_kv_cache_interleave_size=1, flatten_query_rows."
    )
    assert list(strangers(RIGHT.replace("C.", words))) == []
