"""Debug mode: values that cannot be right are refused with their row; off unless asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from fi_dcp_compat import (
    DCP,
    InvalidInputError,
    MLAState,
    debug,
    debug_checks,
    decode_mla,
    prepare_decode_mla,
    recorded,
)
from fi_dcp_compat.testing import mock_kernel, use_kernel
from tests.contract.test_decode_call import Dispatched
from tests.hostsim.batches import random_batch
from tests.support import call, dcp_of
from tests.test_guards import gpu

INT = torch.int32
NAN = float("nan")


def lens(*values: int) -> Tensor:
    return torch.tensor(values, dtype=INT)


def dcp_call(local: Tensor, causal: Tensor, world: int = 4, rank: int = 0) -> dict[str, Any]:
    batch = len(local)
    return call(batch=batch, seq_lens=local, max_seq_len=99, dcp=DCP(world, rank, causal))


def compact_call(*offsets: int, max_q_len: int = 3, tokens: int = 4, **more: Any) -> dict[str, Any]:
    query = torch.zeros(tokens, 16, 576).bfloat16()
    batch = len(offsets) - 1
    return call(
        batch=batch, query=query, cum_seq_lens_q=lens(*offsets), max_q_len=max_q_len, **more
    )


@contextmanager
def kernel_of(backend: str, kernel: Callable[..., Any] | None = None) -> Iterator[dict[str, str]]:
    """Give the backend to run on: the torch reference, or a mock in FlashInfer's place."""
    with ExitStack() as stack:
        if backend == "reference":
            yield {"backend": "reference"}
            return
        stack.enter_context(use_kernel(kernel or mock_kernel("0.7.4"), recorded("0.7.4")))
        yield {}


def refusal(given: Mapping[str, Any], backend: str = "mock") -> InvalidInputError:
    """The error of a call in debug mode, of a kernel that was not called."""
    kernel = mock_kernel("0.7.4")
    with (
        kernel_of(backend, kernel) as chosen,
        debug_checks(),
        pytest.raises(InvalidInputError, match=r"\[\d+\]") as raised,
    ):
        decode_mla(**{**given, **chosen})
    kernel.assert_not_called()
    return raised.value


WRONG: dict[str, tuple[Callable[[], dict[str, Any]], str, str, str, str]] = {
    "s09 global lengths for local ones": (
        lambda: dcp_call(lens(10), lens(10)),
        "seq_lens",
        "seq_lens[0] looks global, or the causal lengths look local.",
        "seq_lens[0] = 10.",
        "the rank-local length of rank 0 of 4: expected 3 for a global length of 10.",
    ),
    "s09 local lengths for global ones": (
        lambda: dcp_call(lens(3), lens(3)),
        "seq_lens",
        "seq_lens[0] looks global, or the causal lengths look local.",
        "seq_lens[0] = 3.",
        "the rank-local length of rank 0 of 4: expected 1 for a global length of 3.",
    ),
    "the local length of another rank": (
        lambda: dcp_call(lens(3, 3), lens(10, 9), rank=1),
        "seq_lens",
        "seq_lens[1] does not fit causal_seqlens_kv_global.",
        "seq_lens[1] = 3.",
        "expected 2, what rank 1 of 4 holds of 9 tokens (local_seq_lens).",
    ),
    "a length without the newest token": (
        lambda: dcp_call(lens(2), lens(9)),
        "seq_lens",
        "seq_lens[0] does not fit causal_seqlens_kv_global.",
        "seq_lens[0] = 2.",
        "expected 3, what rank 0 of 4 holds of 9 tokens (local_seq_lens).",
    ),
    "a negative length": (
        lambda: call(seq_lens=lens(7, -1)),
        "seq_lens",
        "seq_lens[1] is negative.",
        "seq_lens[1] = -1.",
        "0 or more.",
    ),
    "a negative length with DCP": (
        lambda: dcp_call(lens(3, -1), lens(10, 10)),
        "seq_lens",
        "seq_lens[1] is negative.",
        "seq_lens[1] = -1.",
        "0 or more.",
    ),
    "a negative global length": (
        lambda: dcp_call(lens(3, 0), lens(10, -2)),
        "causal_seqlens_kv_global",
        "causal_seqlens_kv_global[1] is negative.",
        "causal_seqlens_kv_global[1] = -2.",
        "0 or more.",
    ),
    "s08 a length of 0 inside the batch": (
        lambda: call(batch=3, seq_lens=lens(7, 0, 7)),
        "seq_lens",
        "seq_lens[1] is 0 inside the batch.",
        "seq_lens[1] = 0.",
        "at least 1: FlashInfer leaves the row of an empty sequence undefined without DCP.",
    ),
    "s08 a length of 0 before everything": (
        lambda: call(seq_lens=lens(0, 7)),
        "seq_lens",
        "seq_lens[0] is 0 inside the batch.",
        "seq_lens[0] = 0.",
        "at least 1: FlashInfer leaves the row of an empty sequence undefined without DCP.",
    ),
    "s25 a length past the table": (
        lambda: call(seq_lens=lens(7, 129), max_seq_len=200),
        "seq_lens",
        "seq_lens[1] is longer than its block table.",
        "seq_lens[1] = 129.",
        "at most 128 tokens.",
    ),
    "a length past max_seq_len": (
        lambda: call(seq_lens=lens(7, 8)),
        "seq_lens",
        "seq_lens[1] is longer than max_seq_len.",
        "seq_lens[1] = 8.",
        "at most max_seq_len=7.",
    ),
    "offsets that do not start at 0": (
        lambda: compact_call(1, 2, 4),
        "cum_seq_lens_q",
        "cum_seq_lens_q[0] does not span the query.",
        "cum_seq_lens_q[0] = 1.",
        "first 0 and last 4.",
    ),
    "offsets that do not end at the query's end": (
        lambda: compact_call(0, 1, 3),
        "cum_seq_lens_q",
        "cum_seq_lens_q[2] does not span the query.",
        "cum_seq_lens_q[2] = 3.",
        "first 0 and last 4.",
    ),
}


@pytest.mark.parametrize("backend", ["mock", "reference"])
@pytest.mark.parametrize("name", WRONG)
def test_a_value_that_cannot_be_right_is_refused_with_its_row(name: str, backend: str) -> None:
    given, argument, summary, found, needed = WRONG[name]
    error = refusal(given(), backend)
    row = summary.partition("[")[2].partition("]")[0]
    assert str(error) == (
        f"{summary}\nFound: {found}\nNeeded: {needed}\n"
        f"Fix: look at how row {row} of the batch was built; this check is FI_DCP_COMPAT_DEBUG or "
        "debug_checks()."
    )
    assert error.argument == argument


@pytest.mark.parametrize("name", WRONG)
def test_debug_mode_is_off_by_default_and_reads_nothing(name: str) -> None:
    given = WRONG[name][0]()
    kernel = mock_kernel("0.7.4")
    with use_kernel(kernel, recorded("0.7.4")):
        decode_mla(**given)
        kernel.assert_called_once()
        with Dispatched() as dispatched:
            decode_mla(**given)
    # What is left is the mock's own: a result of ones.
    assert {operation.partition(".")[2] for operation in dispatched.names} <= {"ones.default"}


@pytest.mark.parametrize("value", ["1", "true", "yes"])
@pytest.mark.parametrize("name", WRONG)
def test_the_environment_switches_it_on(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    given, _, summary, _, _ = WRONG[name]
    monkeypatch.setenv("FI_DCP_COMPAT_DEBUG", value)
    with (
        use_kernel(mock_kernel("0.7.4"), recorded("0.7.4")),
        pytest.raises(InvalidInputError, match=r"\[\d+\]") as raised,
    ):
        decode_mla(**given())
    assert raised.value.summary == summary


def test_the_environment_is_read_where_a_steps_tensors_are_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with use_kernel(mock_kernel("0.7.4"), recorded("0.7.4")):
        first = call(seq_lens=lens(7, -1))
        decode_mla(**first)
        monkeypatch.setenv("FI_DCP_COMPAT_DEBUG", "1")
        decode_mla(**first)
        second = call(seq_lens=lens(7, -1))
        for _ in range(2):  # a step that was refused is looked at again
            with pytest.raises(InvalidInputError, match="is negative"):
                decode_mla(**second)
        decoder = prepare_decode_mla(page_size=64, dtype=torch.bfloat16, bmm1_scale=0.1)
        names = ("query", "kv_cache", "block_tables", "seq_lens", "max_seq_len", "workspace_buffer")
        with pytest.raises(InvalidInputError, match="is negative"):
            decoder.run(*(second[name] for name in names))
        monkeypatch.delenv("FI_DCP_COMPAT_DEBUG")
        decode_mla(**second)


@pytest.mark.parametrize("value", ["", "0"])
def test_the_environment_leaves_it_off(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("FI_DCP_COMPAT_DEBUG", value)
    with use_kernel(mock_kernel("0.7.4"), recorded("0.7.4")):
        decode_mla(**call(seq_lens=lens(7, -1)))


def test_the_block_switches_it_on_inside_only_and_may_be_nested() -> None:
    given = call(seq_lens=lens(7, -1))
    with use_kernel(mock_kernel("0.7.4"), recorded("0.7.4")):
        with debug_checks():
            with debug_checks():
                pass
            with pytest.raises(InvalidInputError, match="is negative"):
                decode_mla(**given)
        decode_mla(**given)
        with pytest.raises(KeyError, match="left"), debug_checks():
            raise KeyError("left")
        decode_mla(**given)


@pytest.mark.parametrize("switch", ["environment", "block"])
def test_nothing_is_checked_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    """A copy to the host would break the capture."""
    given = call(seq_lens=lens(7, -1))
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    kernel = mock_kernel("0.7.4")
    with ExitStack() as stack:
        if switch == "environment":
            monkeypatch.setenv("FI_DCP_COMPAT_DEBUG", "1")
        else:
            stack.enter_context(debug_checks())
        stack.enter_context(gpu())
        stack.enter_context(use_kernel(kernel, recorded("0.7.4")))
        with pytest.raises(InvalidInputError, match="is negative"):
            decode_mla(**given)
        capturing = True
        decode_mla(**given)
    kernel.assert_called_once()


def test_a_cpu_is_not_asked_whether_it_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    def capturing() -> bool:
        raise AssertionError("asked")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", capturing)
    assert refusal(call(seq_lens=lens(7, -1))).argument == "seq_lens"


def test_a_prepared_decoder_is_checked_too() -> None:
    given = call(seq_lens=lens(7, -1))
    with use_kernel(mock_kernel("0.7.4"), recorded("0.7.4")):
        decoder = prepare_decode_mla(page_size=64, dtype=torch.bfloat16, bmm1_scale=0.1)
        with debug_checks(), pytest.raises(InvalidInputError, match=r"seq_lens\[1\] is negative"):
            decoder.run(
                given["query"],
                given["kv_cache"],
                given["block_tables"],
                given["seq_lens"],
                7,
                given["workspace_buffer"],
            )


# What is right, though it looks odd.

RIGHT: dict[str, Callable[[], dict[str, Any]]] = {
    "an ordinary call": call,
    "several query tokens": lambda: call(q_len=3),
    "a flat query": lambda: call(query=torch.zeros(6, 16, 576).bfloat16()),
    "s08 trailing zeros are graph padding": lambda: call(batch=4, seq_lens=lens(7, 7, 0, 0)),
    "s08 nothing but padding": lambda: call(seq_lens=lens(0, 0)),
    # 8 tokens leave one on the last rank of 8, 3 none and 9 one.
    "s08 a rank without keys, inside the batch": lambda: dcp_call(
        lens(1, 0, 1), lens(8, 3, 9), world=8, rank=7
    ),
    "every length of a group": lambda: dcp_call(lens(3, 0, 50), lens(10, 0, 200)),
    "s25 -1 in the tail of a row": lambda: call(
        block_tables=torch.tensor([[0, -1], [2, -1]], dtype=INT)
    ),
    "s25 a page far outside in the tail": lambda: call(
        block_tables=torch.tensor([[0, 9999], [2, -7]], dtype=INT)
    ),
    "s25 a table of padding": lambda: call(
        seq_lens=lens(7, 0), block_tables=torch.tensor([[0, -1], [-1, -1]], dtype=INT)
    ),
    "s25 max_seq_len is a bound and may exceed the table": lambda: call(max_seq_len=1 << 20),
    "a length that fills the table": lambda: call(seq_lens=lens(128, 128), max_seq_len=128),
    "compact queries": lambda: compact_call(0, 1, 4),
    "a compact request without a token": lambda: compact_call(0, 1, 1, 4),
    "a compact request of max_q_len tokens": lambda: compact_call(0, 3, 4),
    "compact queries with DCP": lambda: compact_call(0, 1, 4, dcp=dcp_of()),
    "rows of a non-causal block": lambda: call(q_len=3, causal=False),
    "a group of one with a length of 0 at the end": lambda: call(
        seq_lens=lens(7, 0), dcp=DCP(1, 0, lens(7, 0))
    ),
    "a rank with no key at all": lambda: call(
        seq_lens=lens(0, 0), max_seq_len=0, dcp=DCP(8, 7, lens(3, 7))
    ),
}


@pytest.mark.parametrize("backend", ["mock", "reference"])
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_passes(name: str, backend: str) -> None:
    with kernel_of(backend) as chosen, debug_checks():
        decode_mla(**{**RIGHT[name](), **chosen})


@pytest.mark.parametrize("dcp", [False, True])
@pytest.mark.parametrize("layout", ["4-D", "flat", "compact", "compact, no token"])
def test_an_empty_batch_is_nothing_to_check(layout: str, dcp: bool) -> None:
    given = call(batch=0, block_tables=torch.zeros(0, 2, dtype=INT))
    if layout != "4-D":
        given["query"] = torch.zeros(0, 16, 576).bfloat16()
    if layout == "compact":
        given |= {"cum_seq_lens_q": lens(0), "max_q_len": 1}
    if layout == "compact, no token":
        given = compact_call(0, 0, 0, tokens=0)
    batch = len(given["seq_lens"])
    kernel = mock_kernel("0.7.4")
    with use_kernel(kernel, recorded("0.7.4")), debug_checks():
        state = decode_mla(**given, dcp=dcp_of(batch=batch) if dcp else None, return_lse=True)
    kernel.assert_not_called()
    assert state.lse.numel() == 0


# Pages.


@pytest.mark.parametrize("backend", ["mock", "reference"])
@pytest.mark.parametrize("page", [-1, 4, 9999])
@pytest.mark.parametrize("column", [0, 1])
def test_s25_a_page_that_is_used_and_lies_outside_the_pool_is_refused(
    page: int, column: int, backend: str
) -> None:
    tables = torch.tensor([[0, 1], [2, 3]], dtype=INT)
    tables[1, column] = page
    given = call(seq_lens=lens(64, 65), max_seq_len=65, block_tables=tables)
    error = refusal(given, backend)
    assert error.argument == "block_tables"
    assert error.summary == "block_tables[1] names a page outside the cache."
    assert str(page) in error.found
    assert "[0, 4)" in error.needed
    given["seq_lens"] = lens(64, 64)  # the second column is now a tail
    if column == 1:
        with use_kernel(mock_kernel("0.7.4"), recorded("0.7.4")), debug_checks():
            decode_mla(**given)


def test_s25_a_page_number_of_the_whole_group_is_refused_with_dcp() -> None:
    given = dcp_call(lens(3, 3), lens(10, 10))
    given["block_tables"] = torch.tensor([[0, 0], [40, 41]], dtype=INT)
    error = refusal(given)
    assert error.argument == "block_tables"
    assert "not global pages or slots" in error.needed


def test_s25_a_cache_without_a_page_holds_no_length() -> None:
    error = refusal(call(kv_cache=torch.zeros(0, 64, 576).bfloat16()))
    assert error.argument == "block_tables"
    assert "[0, 0)" in error.needed


def test_s25_a_table_without_a_page_holds_no_length() -> None:
    """With a width of 0 every length is past it."""
    error = refusal(
        call(block_tables=torch.zeros(2, 0, dtype=INT), seq_lens=lens(7, 7), backend="reference")
    )
    assert error.summary == "seq_lens[0] is longer than its block table."


# Offsets.


@pytest.mark.parametrize(
    ("offsets", "max_q_len", "row", "count"),
    [((0, 3, 4), 2, 0, 3), ((0, 1, 4), 2, 1, 3), ((0, 5, 4), 6, 1, -1)],
)
def test_a_query_length_out_of_range_names_the_request(
    offsets: tuple[int, ...], max_q_len: int, row: int, count: int
) -> None:
    error = refusal(compact_call(*offsets, max_q_len=max_q_len))
    assert error.argument == "cum_seq_lens_q"
    assert f"[{row}] gives a query length out of range" in error.summary
    assert f"lengths in [0, max_q_len={max_q_len}]" in error.needed
    # Not the offset of that row, which is another number.
    assert error.found.endswith(f"{count}.")
    assert f"cum_seq_lens_q[{row}] = {count}" not in error.found


# NaN.


def result_with(
    where: tuple[int, ...], *, in_lse: bool = False, value: float = NAN
) -> Callable[..., Any]:
    """A kernel whose result holds that value in one place, and ones elsewhere."""

    def kernel(**got: Any) -> Any:
        query = got["query"]
        out = torch.ones(*query.shape[:-1], 512, dtype=torch.bfloat16)
        lse = torch.ones(query.shape[:-1])
        (lse if in_lse else out)[where] = value
        lse = lse.flatten(0, -2)
        return (out, lse) if got.get("return_lse") else out

    return kernel


def run_with(kernel: Callable[..., Any], given: dict[str, Any]) -> Any:
    with use_kernel(kernel, recorded("0.7.4")), debug_checks():
        return decode_mla(**given)


@pytest.mark.parametrize("in_lse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize("layout", ["4-D", "flat", "compact"])
@pytest.mark.parametrize("dcp", [False, True], ids=["plain", "dcp"])
def test_nan_in_the_result_is_refused_with_the_request(
    in_lse: bool, layout: str, dcp: bool
) -> None:
    more: dict[str, Any] = {"dcp": dcp_of()} if dcp else {"return_lse": in_lse}
    # Two requests of 2 tokens, or of 1 and 3: the NaN is in the second token of the second.
    where: tuple[int, ...] = (1, 1)
    given = call(q_len=2, **more)
    if layout == "flat":
        given["query"] = given["query"].flatten(0, 1)
    elif layout == "compact":
        given, where = compact_call(0, 1, 4, **more), (2,)
    where = (*where, 5) if in_lse else (*where, 5, 100)
    with pytest.raises(InvalidInputError, match=r"out\[1\] holds NaN") as raised:
        run_with(result_with(where, in_lse=in_lse), given)
    assert raised.value.argument == "out"
    assert "a finite result: look for NaN in the cache's pages or the query" in raised.value.needed
    run_with(result_with(where, in_lse=in_lse, value=-2.0), given)


@pytest.mark.parametrize(
    ("offsets", "token", "request_"),
    [((0, 1, 4), 0, 0), ((0, 1, 4), 1, 1), ((0, 1, 1, 4), 1, 2), ((0, 0, 3, 4), 2, 1)],
)
def test_nan_in_a_compact_result_names_the_request_of_the_token(
    offsets: tuple[int, ...], token: int, request_: int
) -> None:
    with pytest.raises(InvalidInputError, match=rf"out\[{request_}\] holds NaN"):
        run_with(result_with((token, 0, 0)), compact_call(*offsets))


def test_nan_in_a_padding_row_is_nobodys() -> None:
    """Without DCP FlashInfer leaves a row without keys undefined."""
    given = call(batch=3, seq_lens=lens(7, 0, 0), q_len=2)
    for row in (1, 2):
        run_with(result_with((row, 1, 3, 7)), given)
    with pytest.raises(InvalidInputError, match=r"out\[0\] holds NaN"):
        run_with(result_with((0, 1, 3, 7)), given)


def test_nan_in_a_row_without_keys_is_refused_with_dcp() -> None:
    """There it is (0, -inf) on every release, so NaN is a fault of the kernel or the mock."""
    given = dcp_call(lens(1, 0), lens(1, 0), world=8)
    with pytest.raises(InvalidInputError, match=r"out\[1\] holds NaN"):
        run_with(result_with((1, 0, 3, 7)), given)


def test_an_lse_of_minus_infinity_is_no_nan() -> None:
    given = dcp_call(lens(1, 0), lens(1, 0), world=8)
    state = run_with(result_with((1, 0, 3), in_lse=True, value=-torch.inf), given)
    assert isinstance(state, MLAState)
    assert state.lse[1, 0, 3] == -torch.inf


@pytest.mark.parametrize("dcp", [False, True], ids=["plain", "dcp"])
def test_nan_in_the_cache_is_seen_in_the_reference_s_result(dcp: bool) -> None:
    requests = random_batch([2, 2], [37, 60], page_size=64)
    given: dict[str, Any] = {
        "query": requests.query(),
        "bmm1_scale": requests.scale,
        "workspace_buffer": torch.empty(0, dtype=torch.int8),
        "backend": "reference",
        **(requests.paged(0, 4) if dcp else requests.paged()),
    }
    if dcp:
        given["dcp"] = DCP(4, 0, requests.bounds())
    with debug_checks():
        decode_mla(**given)
        page = int(given["block_tables"][1, 0])
        # Behind the keys NaN is nobody's.
        given["kv_cache"][page, int(given["seq_lens"][1]) :] = NAN
        decode_mla(**given)
        given["kv_cache"][page, 3] = NAN
        with pytest.raises(InvalidInputError, match=r"out\[1\] holds NaN"):
            decode_mla(**given)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_reference_passes_its_own_checks_on_every_rank(world: int) -> None:
    requests = random_batch([1, 3, 0, 2], [1, 50, 20, 300], page_size=64)
    for rank in range(world):
        given: dict[str, Any] = {
            "query": requests.query(),
            "bmm1_scale": requests.scale,
            "workspace_buffer": torch.empty(0, dtype=torch.int8),
            **requests.paged(rank, world),
            **requests.varlen(),
        }
        with debug_checks():
            dcp = DCP(world, rank, requests.bounds())
            plain = decode_mla(**given, dcp=dcp, backend="reference")
        torch.testing.assert_close(plain, decode_mla(**given, dcp=dcp, backend="reference"))


def test_the_variable_is_the_documented_one() -> None:
    assert debug.VARIABLE == "FI_DCP_COMPAT_DEBUG"
