"""`python -O` drops each `assert`; what is refused must not change (S16)."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import fi_dcp_compat
from fi_dcp_compat import (
    DCP,
    FlashInferABI,
    bmm_scales,
    counter_bytes,
    debug_checks,
    decode_mla,
    merge_dcp_states,
    min_workspace_bytes,
    prepare_decode_mla,
    probe,
    recorded,
)
from fi_dcp_compat.testing import use_kernel
from tests import test_backends, test_debug, test_guards
from tests.support import call, dcp_of, stub_result

REPOSITORY = Path(__file__).parents[1]
PACKAGE = Path(fi_dcp_compat.__file__).parent

Outcome = tuple[str, str]
Act = Callable[[], object]


def outcome(act: Act) -> Outcome:
    try:
        act()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def _decode(
    given: dict[str, Any],
    abi: FlashInferABI | None = None,
    kernel: Callable[..., Any] = stub_result,
) -> None:
    with use_kernel(kernel, recorded("0.7.4") if abi is None else abi):
        decode_mla(**given)


@contextmanager
def _installed(source: str | None) -> Iterator[None]:
    """Let `import flashinfer` run that source, or find nothing."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        stack.callback(probe.cache_clear)
        stack.enter_context(patch.dict(sys.modules))
        for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
            del sys.modules[name]
        if source is None:
            sys.modules["flashinfer"] = None  # type: ignore[assignment]  # "not there"
        else:
            package = Path(folder) / "flashinfer"
            package.mkdir()
            (package / "__init__.py").write_text(source, encoding="utf-8")
            stack.enter_context(patch.object(sys, "path", [folder, *sys.path]))
        probe.cache_clear()
        yield


def _without_flashinfer() -> None:
    with _installed(None):
        decode_mla(**call())


def _with_a_broken_flashinfer() -> None:
    with _installed("raise RuntimeError('no kernel image')\n"):
        decode_mla(**call())


def _not_prepared(**got: Any) -> Any:
    raise RuntimeError("CuTe DSL MLA must be prepared before CUDA graph capture")


def _without_lse(**got: Any) -> Any:
    return torch.ones(2, 1, 16, 512)


def _with_nan(**got: Any) -> Any:
    return torch.full((2, 1, 16, 512), float("nan"))


def _debugged(given: dict[str, Any], kernel: Callable[..., Any] = stub_result) -> None:
    with debug_checks():
        _decode(given, kernel=kernel)


def _attempt(abi: FlashInferABI, config: dict[str, Any]) -> None:
    error = test_guards.attempt(abi, config)
    if error is not None:
        raise error


def _around(argument: str) -> dict[str, Any]:
    """What a call needs for the argument to be looked at."""
    if argument == "cum_seq_lens_q":
        return {"query": torch.zeros(4, 16, 576).bfloat16(), "max_q_len": 3}
    if argument == "lse":
        return {"return_lse": True}
    return {"backend": "trtllm-gen"} if argument == "multi_ctas_kv_counter_buffer" else {}


def _zeros(*shape: int, dtype: torch.dtype = torch.int32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _lengths(rows: int) -> tuple[Any, ...]:
    return (
        [7] * rows,
        _zeros(rows, dtype=torch.int64),
        _zeros(rows, dtype=torch.float32),
        _zeros(rows + 1),
        _zeros(rows, 1),
        _zeros(rows, device="meta"),
        _zeros(rows * 2)[::2],
    )


BF16 = torch.bfloat16

# What a call with DCP does not take, or not look at.
WITHOUT_DCP = (
    "sinks",
    "multi_ctas_kv_counter_buffer",
    "dcp",
    "skip_softmax_threshold_scale_factor",
)
# Each argument with values that are wrong in a call of 2 requests of 2 tokens and 16 heads.
INPUTS: dict[str, tuple[Any, ...]] = {
    "query": (
        None,
        _zeros(2, 576, dtype=BF16),
        _zeros(2, 2, 16, 512, dtype=BF16),
        _zeros(3, 2, 16, 576, dtype=BF16),
        _zeros(5, 16, 576, dtype=BF16),
        _zeros(2, 2, 16, 1152, dtype=BF16)[..., ::2],
        _zeros(2, 2, 16, 576, dtype=torch.float32),
        _zeros(2, 2, 0, 576, dtype=BF16),
        _zeros(2, 2, 16, 576, dtype=BF16, device="meta"),
    ),
    "kv_cache": (
        None,
        _zeros(4, 576, dtype=BF16),
        _zeros(4, 64, 512, dtype=BF16),
        _zeros(4, 2, 64, 576, dtype=BF16),
        _zeros(4, 0, 576, dtype=BF16),
        _zeros(4, 256, 576, dtype=BF16),
        _zeros(4, 64, 576, dtype=torch.float16),
        _zeros(4, 128, 576, dtype=BF16)[:, ::2],
        _zeros(4, 64, 576, dtype=BF16, device="meta"),
    ),
    "block_tables": (
        None,
        _zeros(4),
        _zeros(3, 2),
        _zeros(2, 2, dtype=torch.int64),
        _zeros(2, 4)[:, ::2],
        _zeros(2, 2, device="meta"),
    ),
    "seq_lens": (None, *_lengths(2)),
    "causal_seqlens_kv_global": (None, *_lengths(2)),
    "cum_seq_lens_q": _lengths(3),
    "max_seq_len": (-1, True, 7.0, None, torch.tensor(7)),
    "max_q_len": (0, 3, True, "2"),
    "workspace_buffer": (
        None,
        _zeros(1 << 20, dtype=torch.int8, device="meta"),
        _zeros(1 << 20, dtype=torch.int8)[1:],
        _zeros(1 << 20, 2, dtype=torch.int8)[:, 0],
    ),
    "out": (
        [],
        _zeros(2, 2, 16, 512, dtype=torch.float32),
        _zeros(4, 16, 512, dtype=BF16),
        _zeros(2, 2, 16, 1024, dtype=BF16)[..., ::2],
    ),
    "lse": (
        [],
        _zeros(2, 2, 16, dtype=BF16),
        _zeros(4, 16, dtype=torch.float32),
        _zeros(2, 2, 32, dtype=torch.float32)[..., ::2],
    ),
    "sinks": (1.0, [], _zeros(16, dtype=BF16), _zeros(8, dtype=torch.float32)),
    "multi_ctas_kv_counter_buffer": (7, _zeros(1), _zeros(4096, device="meta")),
    "bmm1_scale": (0, -1.0, float("nan"), True, None, _zeros(1, dtype=torch.float64)),
    "bmm2_scale": (0, -1.0, float("inf"), False, "1", _zeros(2, dtype=torch.float32)),
    "kv_lora_rank": (0, 512.0, True, [512]),
    "qk_rope_head_dim": (-1, 64.0, None),
    "qk_nope_head_dim": (-1, 128.0, None),
    "causal": (1, None, [True]),
    "return_lse": (1, None, [True]),
    "enable_pdl": (1, "no"),
    "dcp": (8, (8, 3)),
    "backend": (None, "fa3", "xqa"),
    "lse_base": ("basee", None, 2),
    "skip_softmax_threshold_scale_factor": (-1, True, float("nan")),
}


def acts() -> dict[str, Act]:
    """Single faults, each of a call that is right without it."""
    found: dict[str, Act] = {}
    right = call(q_len=2)
    for argument, values in INPUTS.items():
        for index, value in enumerate(values):
            for dcp in (None,) if argument in WITHOUT_DCP else (None, dcp_of()):
                given: dict[str, Any] = right | {"dcp": dcp} | _around(argument) | {argument: value}
                if argument == "causal_seqlens_kv_global":
                    given.pop(argument)
                    given["dcp"] = DCP(8, 3, value)
                name = f"{argument}, {index}, {'plain' if dcp is None else 'dcp'}"
                found[name] = partial(_decode, given)
    for name, refused in (test_guards.FAULTS | test_backends.FAULTS).items():
        config = test_guards.config_of(**refused.changes)
        abi = test_guards.abi_of(refused.abi)
        found[f"configuration: {name}"] = partial(_attempt, abi, config)
    for name, (make, *_) in test_debug.WRONG.items():
        found[f"debug: {name}"] = partial(_debugged, make())
    lens = torch.tensor([55, 55], dtype=torch.int32)
    anything: Any = None
    found |= {
        "NaN": lambda: _debugged(call(), _with_nan),
        "interleave 2": lambda: DCP(8, 3, lens, 2),
        "rank outside": lambda: DCP(8, 8, lens),
        "rank True": lambda: DCP(8, True, lens),
        "world of 0": lambda: DCP(0, 0, lens),
        "prepared, dtype": lambda: _prepare(dtype="bfloat16"),
        "prepared, scale": lambda: _prepare(bmm1_scale=-1.0),
        "prepared, pages": lambda: _prepare(page_size=256),
        "prepared, group": lambda: _prepare(dcp_world_size=8, dcp_rank=8),
        "bmm_scales, missing": lambda: bmm_scales(0.1, torch.float8_e4m3fn),
        "bmm_scales, superfluous": lambda: bmm_scales(0.1, torch.bfloat16, k_scale=0.5),
        "merge, base": lambda: merge_dcp_states(
            torch.ones(2, 1, 4), torch.ones(2, 1), lse_base=anything
        ),
        "merge, shapes": lambda: merge_dcp_states(torch.ones(2, 1, 4), torch.ones(3, 1)),
        "sizes, batch": lambda: min_workspace_bytes(
            "cute-dsl",
            abi=recorded("0.7.4"),
            batch=0,
            q_len=1,
            num_heads=1,
            return_lse=False,
            sm_count=148,
        ),
        "sizes, counters": lambda: counter_bytes(0, 1, 148),
        "no such release": lambda: recorded("0.7.3"),
        "no FlashInfer": _without_flashinfer,
        "a broken FlashInfer": _with_a_broken_flashinfer,
        "no LSE from the kernel": lambda: _decode(call(dcp=dcp_of()), kernel=_without_lse),
        "a first call in a capture": lambda: _decode(call(dcp=dcp_of()), kernel=_not_prepared),
    }
    return found


def _prepare(**changes: Any) -> None:
    settings: dict[str, Any] = {"page_size": 64, "dtype": torch.bfloat16, "bmm1_scale": 0.1}
    with use_kernel(stub_result, recorded("0.7.4")):
        prepare_decode_mla(**(settings | changes))


def outcomes() -> dict[str, Outcome]:
    return {name: outcome(act) for name, act in acts().items()}


OPTIMISED = """
import json, sys
import warnings
assert False, "only python -O gets past this"
warnings.simplefilter("error")
sys.path.insert(0, sys.argv[1])
from tests.test_optimised import outcomes
print(json.dumps({"debug": __debug__, "optimize": sys.flags.optimize, "outcomes": outcomes()}))
"""


def run_python(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *flags, "-B", "-c", OPTIMISED, str(REPOSITORY)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_the_script_proves_that_it_is_optimised() -> None:
    done = run_python()
    assert done.returncode == 1
    assert "only python -O gets past this" in done.stderr


def test_optimised_python_refuses_each_fault_with_the_same_words() -> None:
    done = run_python("-O")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert (answer["debug"], answer["optimize"]) == (False, 1)
    expected = outcomes()
    assert len(expected) > 250
    assert answer["outcomes"].keys() == expected.keys()
    differing = {
        name: (found, answer["outcomes"][name])
        for name, found in expected.items()
        if list(found) != answer["outcomes"][name]
    }
    assert differing == {}
    passed = [name for name, (error, _) in expected.items() if error == "nothing"]
    assert passed == []
    # Every class that the package raises is among them, and nothing but those and their texts.
    kinds = {error for error, _ in expected.values()}
    assert kinds >= {
        "FlashInferNotFoundError",
        "FlashInferImportError",
        "FlashInferVersionError",
        "FlashInferSignatureError",
        "UnsupportedConfigError",
        "InvalidInputError",
        "NotPreparedError",
    }
    assert kinds <= set(fi_dcp_compat.__all__)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.name)
def test_no_module_of_the_package_asserts_or_asks_whether_it_is_optimised(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        where = f"{path.name}:{getattr(node, 'lineno', 0)}"
        assert not isinstance(node, ast.Assert), where
        assert not (isinstance(node, ast.Name) and node.id == "__debug__"), where
