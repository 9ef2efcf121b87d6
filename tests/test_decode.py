"""The call's own behaviour: layouts, look-up of the kernel, buffers, empty batches, bases."""

from __future__ import annotations

import math
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from fi_dcp_compat import (
    DCP,
    FlashInferImportError,
    FlashInferSignatureError,
    FlashInferVersionError,
    InvalidInputError,
    MLAState,
    NotPreparedError,
    UnsupportedConfigError,
    decode_mla,
    preparation,
    prepare_decode_mla,
    probe,
    recorded,
)
from fi_dcp_compat.abi import FUNCTION
from fi_dcp_compat.testing import mock_kernel, use_kernel
from tests.hostsim.batches import random_batch
from tests.support import RELEASES, call, dcp_of

COMPACT: dict[str, Any] = {
    "query": torch.zeros(4, 16, 576).bfloat16(),
    "cum_seq_lens_q": torch.tensor([0, 1, 4], dtype=torch.int32),
    "max_q_len": 3,
}


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("layout", ["4-D", "flat", "compact"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_the_result_follows_the_querys_layout(version: str, layout: str, return_lse: bool) -> None:
    given = call(q_len=3)
    shape: tuple[int, ...] = (2, 3, 16)
    if layout == "flat":
        given, shape = call(query=given["query"].flatten(0, 1)), (6, 16)
    elif layout == "compact":
        given, shape = call(**COMPACT), (4, 16)
    with use_kernel(mock_kernel(version), recorded(version)):
        old = version in ("0.6.12", "0.6.13")
        if layout == "compact" and (old or (return_lse and version in ("0.6.14", "0.6.15"))):
            needed = r"0\.6\.14" if old else r"0\.6\.16|cum_seq_lens_q"
            with pytest.raises((FlashInferVersionError, UnsupportedConfigError), match=needed):
                decode_mla(**given, return_lse=return_lse)
            return
        result = decode_mla(**given, return_lse=return_lse)
    if not return_lse:
        assert isinstance(result, Tensor)
        assert result.shape == (*shape, 512)
        return
    assert isinstance(result, MLAState)
    assert (result.out.shape, result.lse.shape) == ((*shape, 512), shape)


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("backend", ["auto", "trtllm-gen", "cute-dsl"])
@pytest.mark.parametrize(("base", "expected"), [("e", 1.0), ("2", 1.0 / math.log(2))])
def test_the_lse_comes_in_the_base_asked_for(
    version: str, backend: Any, base: Any, expected: float
) -> None:
    # The kernel writes the same LSE, 1 in natural log, in the base that it really has.
    abi = recorded(version)

    def kernel(**got: Any) -> Any:
        assert got["backend"] != "auto" or "return_lse_base" in got or version == "0.6.12"
        natural = torch.ones(2, 16)
        binary = got["backend"] in ("trtllm-gen", "auto")
        if "return_lse_base" in got:
            binary = got["return_lse_base"] == "base2"
        lse = natural / math.log(2) if binary else natural
        return torch.ones(2, 1, 16, 512, dtype=torch.bfloat16), lse

    with use_kernel(kernel, abi):
        if version == "0.6.12" and backend == "cute-dsl":
            with pytest.raises(FlashInferVersionError, match=r"LSE from cute-dsl"):
                decode_mla(**call(), backend=backend, return_lse=True)
            return
        state = decode_mla(**call(), backend=backend, return_lse=True, lse_base=base)
    torch.testing.assert_close(state.lse, torch.full((2, 1, 16), expected))


def test_the_conversion_is_in_place_in_the_callers_buffer() -> None:
    lse = torch.empty(2, 1, 16)
    with use_kernel(mock_kernel("0.7.0"), recorded("0.7.0")):
        state = decode_mla(**call(), backend="trtllm-gen", return_lse=True, lse=lse)
    assert state.lse is lse
    torch.testing.assert_close(lse, torch.full((2, 1, 16), math.log(2)))


@pytest.mark.parametrize("flat", [False, True])
def test_the_kernel_gets_the_callers_buffers_in_its_own_layout(flat: bool) -> None:
    shape = (6, 16) if flat else (2, 3, 16)
    out, lse = torch.empty(*shape, 512, dtype=torch.bfloat16), torch.empty(shape)
    given = call(q_len=3)
    if flat:
        given["query"] = given["query"].flatten(0, 1)
    kernel = mock_kernel("0.6.17")
    with use_kernel(kernel, recorded("0.6.17")):
        state = decode_mla(**given, dcp=dcp_of(), out=out, lse=lse)
    got = kernel.call_args.kwargs
    assert (got["out"].shape, got["lse"].shape) == ((2, 3, 16, 512), (6, 16))
    assert got["out"].data_ptr() == out.data_ptr()
    assert got["lse"].data_ptr() == lse.data_ptr()
    assert state.out is out
    assert state.lse is lse


def test_a_cache_with_a_head_axis_is_passed_as_it_is() -> None:
    kernel, given = mock_kernel("0.7.4"), call()
    four_d = given["kv_cache"].unsqueeze(1)
    with use_kernel(kernel, recorded("0.7.4")):
        decode_mla(**(given | {"kv_cache": four_d}))
        assert kernel.call_args.kwargs["kv_cache"] is four_d
        decode_mla(**given)
    assert kernel.call_args.kwargs["kv_cache"].shape == four_d.shape


def test_one_layers_view_of_a_pool_of_layers_is_a_cache() -> None:
    pool = torch.zeros(4, 3, 64, 576).bfloat16()
    kernel = mock_kernel("0.7.4")
    with use_kernel(kernel, recorded("0.7.4")):
        decode_mla(**call(kv_cache=pool[:, 1]))
    assert kernel.call_args.kwargs["kv_cache"].stride(0) == 3 * 64 * 576


@pytest.mark.parametrize("dcp", [False, True])
@pytest.mark.parametrize("layout", ["4-D", "flat", "compact"])
def test_an_empty_batch_gives_empty_results_without_a_kernel_call(dcp: bool, layout: str) -> None:
    given = call(batch=0, block_tables=torch.zeros(0, 2, dtype=torch.int32))
    shape: tuple[int, ...] = (0, 1, 16)
    if layout != "4-D":
        given["query"], shape = torch.zeros(0, 16, 576).bfloat16(), (0, 16)
    if layout == "compact":
        given |= {"cum_seq_lens_q": torch.zeros(1, dtype=torch.int32), "max_q_len": 1}
    kernel = mock_kernel("0.7.4")
    with use_kernel(kernel, recorded("0.7.4")):
        state = decode_mla(**given, dcp=dcp_of(batch=0) if dcp else None, return_lse=True)
    kernel.assert_not_called()
    assert (state.out.shape, state.out.dtype) == ((*shape, 512), torch.bfloat16)
    assert (state.lse.shape, state.lse.dtype) == (shape, torch.float32)


def test_an_empty_batch_is_still_refused_where_the_configuration_is() -> None:
    # Another rank of the group, with requests, would raise: this one must too.
    given = call(batch=0, block_tables=torch.zeros(0, 2, dtype=torch.int32))
    with (
        use_kernel(mock_kernel("0.6.16"), recorded("0.6.16")),
        pytest.raises(FlashInferVersionError, match=r"0\.6\.17"),
    ):
        decode_mla(**given, dcp=dcp_of(batch=0))


def test_a_group_of_one_is_the_path_without_dcp_and_returns_the_lse() -> None:
    kernel = mock_kernel("0.6.16")
    with use_kernel(kernel, recorded("0.6.16")):
        state = decode_mla(**call(), dcp=DCP(1, 0, torch.tensor([7, 7], dtype=torch.int32), 64))
    assert isinstance(state, MLAState)
    assert "enable_dcp" not in kernel.call_args.kwargs
    assert kernel.call_args.kwargs["return_lse"] is True


def test_a_non_causal_block_becomes_rows_of_one_token() -> None:
    given = call(q_len=3, seq_lens=torch.tensor([5, 7], dtype=torch.int32))
    kernel = mock_kernel("0.7.4")
    with use_kernel(kernel, recorded("0.7.4")):
        out = decode_mla(**given, causal=False)
        got = kernel.call_args.kwargs
        assert out.shape == (2, 3, 16, 512)
        assert got["query"].shape == (6, 1, 16, 576)
        assert got["seq_lens"].tolist() == [5, 5, 5, 7, 7, 7]
        assert got["block_tables"].tolist() == [[0, 1]] * 3 + [[2, 3]] * 3
        decode_mla(**call(q_len=1), causal=False)
    assert kernel.call_args.kwargs["query"].shape == (2, 1, 16, 576)


def test_xqa_gets_the_softmax_scale_without_the_output_scale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
    monkeypatch.setattr(preparation, "_gpu", lambda device: preparation._Gpu((12, 0), 148))
    kernel = mock_kernel("0.7.4")
    out = torch.empty(2, 1, 128, 512, dtype=torch.bfloat16)
    given = call(heads=128, dtype=torch.float8_e4m3fn, bmm1_scale=0.1, bmm2_scale=0.5, out=out)
    with use_kernel(kernel, recorded("0.7.4")):
        assert decode_mla(**given) is out
    got = kernel.call_args.kwargs
    # mla_sm120.cu:464 multiplies the scores by both scales.
    assert got["bmm1_scale"] * got["bmm2_scale"] == pytest.approx(0.1)
    assert got["bmm2_scale"] == 0.5
    assert got["backend"] == "xqa"
    assert got["out"].shape == (2, 128, 512)


def test_the_function_is_found_where_stacks_patch_it(monkeypatch: pytest.MonkeyPatch) -> None:
    package, module = types.ModuleType("flashinfer"), types.ModuleType("flashinfer.decode")
    package.__dict__.update(__version__="0.6.17", __path__=[], decode=module)
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.decode", module)
    first, second = mock_kernel("0.6.17"), mock_kernel("0.6.17")
    monkeypatch.setattr(module, FUNCTION, first, raising=False)
    decode_mla(**call(), dcp=dcp_of())
    # No cache_clear: what is kept is kept per function object.
    monkeypatch.setattr(module, FUNCTION, second)
    decode_mla(**call(), dcp=dcp_of())
    assert (first.call_count, second.call_count) == (1, 1)
    assert probe().version == "0.6.17"
    # A mock is of its own release, whatever is installed.
    monkeypatch.setattr(module, FUNCTION, mock_kernel("0.6.16"))
    with pytest.raises(FlashInferVersionError, match=r"0\.6\.16, whose function lacks"):
        decode_mla(**call(), dcp=dcp_of())
    lost = recorded("0.6.17")
    kept = tuple(parameter for parameter in lost.parameters if parameter.name != "cp_rank")
    monkeypatch.setattr(module, FUNCTION, mock_kernel(lost._replace(parameters=kept)))
    with pytest.raises(FlashInferSignatureError, match="lacks cp_rank"):
        decode_mla(**call(), dcp=dcp_of())


def test_use_kernel_reads_the_abi_from_the_signature_and_puts_everything_back() -> None:
    outer, inner = mock_kernel("0.7.4"), mock_kernel("0.6.16")
    with use_kernel(outer) as abi:
        assert abi.parameters == recorded("0.7.4").parameters
        with use_kernel(inner), pytest.raises(FlashInferVersionError, match=r"0\.6\.16, whose"):
            decode_mla(**call(), dcp=dcp_of())
        decode_mla(**call(), dcp=dcp_of())
    assert (outer.call_count, inner.call_count) == (1, 0)


@pytest.mark.parametrize(
    "shapes", [((3,), (3,)), ((2, 1, 16, 512), (3,)), ((2, 1, 8, 512), (2, 8))]
)
def test_a_result_of_another_shape_is_named(shapes: tuple[tuple[int, ...], ...]) -> None:
    def kernel(**got: Any) -> Any:
        return tuple(torch.ones(shape) for shape in shapes)

    with (
        use_kernel(kernel, recorded("0.7.4")),
        pytest.raises(FlashInferSignatureError, match="something else") as raised,
    ):
        decode_mla(**call(), dcp=dcp_of())
    assert str(list(shapes[1])) in raised.value.found


class Stand:
    """A stand-in for the kernel that gives one answer after the other."""

    def __init__(self, *answers: Any) -> None:
        self.answers = iter(answers)

    def __call__(self, **arguments: Any) -> Any:
        return next(self.answers)


OUT, LSE = torch.ones(2, 1, 16, 512, dtype=torch.bfloat16), torch.ones(2, 16)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        (OUT,),
        (OUT, LSE, LSE),
        (OUT, None),
        (None, LSE),
        (OUT[:1], LSE),
        (OUT[:1], LSE[:1]),
        (OUT, LSE[:1]),
        OUT,
    ],
    ids=lambda answer: type(answer).__name__,
)
@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_stand_ins_answer_of_another_form_is_named_whatever_it_answered_before(
    answer: Any, before: int
) -> None:
    given = call(return_lse=True)
    with use_kernel(Stand(*[(OUT, LSE)] * before, answer, (OUT, LSE)), recorded("0.7.4")):
        for _ in range(before):
            assert decode_mla(**given).lse.shape == (2, 1, 16)
        with pytest.raises(FlashInferSignatureError, match=r"something else than it was asked"):
            decode_mla(**given)
        assert decode_mla(**given).lse.shape == (2, 1, 16)


@pytest.mark.parametrize("answer", [None, [], (), (None, LSE), OUT[:1]], ids=lambda a: type(a))
def test_without_an_lse_only_an_output_is_an_answer(answer: Any) -> None:
    given = call()
    with use_kernel(Stand(OUT, (OUT, LSE), answer, OUT), recorded("0.7.4")):
        for _ in range(2):
            assert decode_mla(**given).shape == OUT.shape
        with pytest.raises(FlashInferSignatureError, match=r"something else than it was asked"):
            decode_mla(**given)
        assert decode_mla(**given).shape == OUT.shape


def test_a_list_is_as_good_as_a_tuple_every_time() -> None:
    given = call(return_lse=True)
    with use_kernel(Stand(*[[OUT, LSE]] * 3), recorded("0.7.4")):
        for _ in range(3):
            assert decode_mla(**given).lse.shape == (2, 1, 16)


def test_a_decoder_takes_nothing_for_a_cache_that_is_gone() -> None:
    given = call(return_lse=True)
    step = ("query", "kv_cache", "block_tables", "seq_lens", "max_seq_len", "workspace_buffer")
    with use_kernel(Stand((OUT, LSE), (OUT, LSE)), recorded("0.7.4")):
        decoder = prepare_decode_mla(
            page_size=64, dtype=torch.bfloat16, bmm1_scale=0.05, return_lse=True
        )
        for _ in range(2):
            decoder.run(*(given[name] for name in step))
        given["kv_cache"] = None
        with pytest.raises(InvalidInputError, match="kv_cache must be"):
            decoder.run(*(given[name] for name in step))


def test_a_call_with_buffers_says_nothing_of_the_views_without() -> None:
    given, flat = call(return_lse=True), (OUT.flatten(0, 1), LSE)
    out = torch.zeros_like(OUT)
    with use_kernel(Stand((out, LSE), flat, flat, flat), recorded("0.7.4")):
        assert decode_mla(**given, out=out).out is out
        for _ in range(3):
            state = decode_mla(**given)
            assert (state.out.shape, state.lse.shape) == (OUT.shape, OUT.shape[:-1])


def test_a_kernel_that_raised_once_leaves_no_step_behind_that_has_no_views() -> None:
    given = call(return_lse=True)

    failures = [RuntimeError("once")]

    def raising(**arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return OUT, LSE

    with use_kernel(raising, recorded("0.7.4")):
        with pytest.raises(RuntimeError, match="once"):
            decode_mla(**given)
        assert decode_mla(**given).lse.shape == (2, 1, 16)


def test_a_buffer_of_inference_mode_is_scaled_outside_of_it() -> None:
    with torch.inference_mode():
        lse = torch.ones(2, 1, 16)
    with use_kernel(Stand((OUT, lse.view(2, 16))), recorded("0.7.0")):
        state = decode_mla(**call(backend="trtllm-gen", return_lse=True, lse=lse))
    assert state.lse is lse
    assert lse.allclose(torch.full_like(lse, math.log(2.0)))


def test_a_kernel_without_an_lse_is_named() -> None:
    def kernel(**got: Any) -> Any:
        return torch.ones(2, 1, 16, 512)

    with (
        use_kernel(kernel, recorded("0.7.4")),
        pytest.raises(FlashInferSignatureError, match=r"something else than it was asked for"),
    ):
        decode_mla(**call(), dcp=dcp_of())


def test_other_errors_of_the_kernel_pass_through() -> None:
    def kernel(**got: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with use_kernel(kernel, recorded("0.7.4")), pytest.raises(RuntimeError) as raised:
        decode_mla(**call())
    assert type(raised.value) is RuntimeError


@pytest.mark.parametrize(
    "error",
    [
        AttributeError("module 'cutlass.cute.core' has no attribute 'ThrMma'"),
        ModuleNotFoundError("No module named 'cutlass'", name="cutlass"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_cute_dsl_that_does_not_fit_is_an_import_failure(error: Exception) -> None:
    def kernel(**got: Any) -> Any:
        raise error

    with (
        use_kernel(kernel, recorded("0.6.12")),
        pytest.raises(FlashInferImportError, match="importing it fails") as raised,
    ):
        decode_mla(**call(), backend="cute-dsl")
    assert raised.value.__cause__ is error
    assert "nvidia-cutlass-dsl" in raised.value.fix


@pytest.mark.parametrize("error", [AttributeError("no attribute 'x'"), ImportError("no y")])
def test_another_import_or_attribute_error_of_the_kernel_passes_through(error: Exception) -> None:
    def kernel(**got: Any) -> Any:
        raise error

    with use_kernel(kernel, recorded("0.7.4")), pytest.raises(type(error)) as raised:
        decode_mla(**call())
    assert raised.value is error


WIDE = 24  # heads of the tensor that the query is a slice of
SLICED = [
    ("0.6.12", "trtllm-gen", 2, True),
    ("0.6.12", "cute-dsl", 1, True),
    ("0.6.13", "cute-dsl", 1, True),
    ("0.6.13", "cute-dsl", 2, False),
    ("0.6.13", "auto", 2, False),
    ("0.6.13", "trtllm-gen", 2, True),
    ("0.6.15.post1", "cute-dsl", 4, False),
    ("0.6.15.post1", "cute-dsl", 5, False),
    ("0.6.16", "cute-dsl", 4, True),
    ("0.7.4", "cute-dsl", 4, True),
]


@pytest.mark.parametrize("flat", [False, True], ids=["4-D", "flat"])
@pytest.mark.parametrize(("version", "backend", "q_len", "runs"), SLICED)
def test_heads_that_are_a_slice_are_refused_where_they_are_misread(
    version: str, backend: Any, q_len: int, runs: bool, flat: bool
) -> None:
    query = torch.zeros(2, q_len, WIDE, 576, dtype=torch.bfloat16)[:, :, :16]
    if flat:
        query = torch.zeros(2 * q_len, WIDE, 576, dtype=torch.bfloat16)[:, :16]
    given = call(q_len=q_len) | {"query": query, "backend": backend}
    kernel = mock_kernel(version)
    with use_kernel(kernel, recorded(version)):
        if runs:
            decode_mla(**given)
            return
        with pytest.raises(InvalidInputError, match="right behind the last one's") as raised:
            decode_mla(**given)
        kernel.assert_not_called()
        assert raised.value.fix == "pass query.contiguous()."
        decode_mla(**(given | {"query": query.contiguous()}))
        if not flat:
            decode_mla(**(given | {"causal": False}))


def test_a_decoder_is_prepared_for_tensor_scales_that_fewer_heads_may_have() -> None:
    scale = torch.tensor([0.1])
    with use_kernel(mock_kernel("0.6.13"), recorded("0.6.13")):
        decoder = prepare_decode_mla(
            page_size=64, dtype=torch.bfloat16, backend="trtllm-gen", bmm1_scale=scale
        )
        given = call(heads=16)
        names = ("query", "kv_cache", "block_tables", "seq_lens", "max_seq_len", "workspace_buffer")
        decoder.run(*(given[name] for name in names))
        given = call(heads=64)
        with pytest.raises(FlashInferVersionError, match="a tensor bmm1_scale"):
            decoder.run(*(given[name] for name in names))


@pytest.mark.parametrize(("version", "named"), [("0.7.1", False), ("0.7.2", True), ("0.7.4", True)])
def test_not_prepared_names_max_seq_len_where_it_is_part_of_the_key(
    version: str, named: bool
) -> None:
    def kernel(**got: Any) -> Any:
        raise RuntimeError("CuTe DSL MLA must be prepared before CUDA graph capture")

    with (
        use_kernel(kernel, recorded(version)),
        pytest.raises(NotPreparedError, match="inside a CUDA-graph capture") as raised,
    ):
        decode_mla(**call(), dcp=dcp_of())
    assert ("keep max_seq_len constant" in raised.value.fix) is named


def test_the_reference_is_never_picked_by_auto_and_never_replaced() -> None:
    requests = random_batch([2, 2], [37, 60], page_size=64, num_heads=16)
    given: dict[str, Any] = {"query": requests.query(), "bmm1_scale": requests.scale}
    given |= {"workspace_buffer": torch.empty(0, dtype=torch.int8), **requests.paged()}
    kernel = mock_kernel("0.7.4")
    with use_kernel(kernel, recorded("0.7.4")):
        out = decode_mla(**given, backend="reference")
    kernel.assert_not_called()
    expected = requests.expected()[0] / requests.output_scale
    torch.testing.assert_close(out.double().flatten(0, 1), expected, rtol=2**-7, atol=2**-7)


def test_a_prepared_decoder_refuses_at_start_up_what_no_step_can_mend() -> None:
    settings: dict[str, Any] = {"page_size": 64, "dtype": torch.bfloat16, "bmm1_scale": 0.1}
    with use_kernel(mock_kernel("0.6.16"), recorded("0.6.16")):
        prepare_decode_mla(**settings)
        with pytest.raises(FlashInferVersionError, match=r"0\.6\.17"):
            prepare_decode_mla(**settings, dcp_world_size=8, dcp_rank=3)
        with pytest.raises(UnsupportedConfigError, match="pages of 256 tokens"):
            prepare_decode_mla(**(settings | {"page_size": 256}))
        with pytest.raises(InvalidInputError, match="bmm2_scale must be given"):
            prepare_decode_mla(**(settings | {"dtype": torch.float8_e4m3fn}))


def test_a_prepared_decoder_calls_the_kernel_like_decode_mla() -> None:
    kernel, given = mock_kernel("0.7.4"), call(q_len=2, heads=24)
    dcp = dcp_of()
    with use_kernel(kernel, recorded("0.7.4")):
        decode_mla(**given, dcp=dcp)
        once = kernel.call_args.kwargs
        decoder = prepare_decode_mla(
            page_size=64,
            dtype=torch.bfloat16,
            dcp_world_size=8,
            dcp_rank=3,
            bmm1_scale=given["bmm1_scale"],
        )
        result = decoder.run(
            given["query"],
            given["kv_cache"],
            given["block_tables"],
            given["seq_lens"],
            given["max_seq_len"],
            given["workspace_buffer"],
            causal_seqlens_kv_global=dcp.causal_seqlens_kv_global,
        )
    assert [tuple(t.shape) for t in result if t is not None] == [(2, 2, 24, 512), (2, 2, 24)]
    again = kernel.call_args.kwargs
    assert once.keys() == again.keys()
    for name, value in once.items():
        if name == "kv_cache":
            assert again[name].data_ptr() == value.data_ptr()
        else:
            assert again[name] is value or again[name] == value


def test_a_prepared_decoder_refuses_another_cache() -> None:
    with use_kernel(mock_kernel("0.7.4"), recorded("0.7.4")):
        decoder = prepare_decode_mla(page_size=64, dtype=torch.bfloat16, bmm1_scale=0.1)
        given = call(page_size=32)
        rest = (given["block_tables"], given["seq_lens"], 7, given["workspace_buffer"])
        with pytest.raises(InvalidInputError, match="pages of 64 tokens, which the decoder was"):
            decoder.run(given["query"], given["kv_cache"], *rest)
        with pytest.raises(InvalidInputError, match=r"query must be torch\.bfloat16, which the"):
            decoder.run(given["query"].half(), given["kv_cache"].half(), *rest)
