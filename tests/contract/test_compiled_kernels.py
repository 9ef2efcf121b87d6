"""The kernels that `decode_mla` would launch, compiled for sm_100a by the release's own code.

Slow: about four seconds a kernel. The last test runs the others on 0.6.17, where DCP began.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fi_dcp_compat import DCP, decode_mla
from tests.hostsim import kernels
from tests.hostsim.batches import random_batch
from tests.hostsim.compiling import (
    MONOLITHIC,
    Compiled,
    compile_kernel,
    compiling_flashinfer,
    has_cuda_driver,
)
from tests.hostsim.simulation import simulated_flashinfer
from tests.wheels import unpacked

from .release import HAS, RELEASE, arguments

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(has_cuda_driver(), reason="the driver would be given CPU memory"),
]

DTYPES = [
    pytest.param(torch.bfloat16, id="bf16"),
    pytest.param(torch.float8_e4m3fn, id="fp8"),
]
WORLDS = [1, 2, 8]
PARAMETERS = {"0.6.17": 16, "0.7.4": 17}

Decode = Callable[..., Compiled]


@pytest.fixture(scope="module")
def decode() -> Decode:
    """Decode on the first and the last rank; return the kernel that both launched."""

    @functools.cache
    def decode_once(world: int, dtype: torch.dtype, *, compact: bool = False) -> Compiled:
        # Split over the keys, so that the reducer is compiled too; the same split on every world.
        requests = random_batch(
            [1, 3] if compact else [2, 2], [300 * world, 7], dtype=dtype, num_heads=16
        )
        workspace = torch.zeros(128 << 20, dtype=torch.int8)
        with compiling_flashinfer() as compilation:
            assert compilation.simulation.release == RELEASE
            for rank in sorted({0, world - 1}):
                given = arguments(requests, workspace, rank, world)
                if compact:
                    given |= requests.varlen()
                if world > 1:
                    decode_mla(**given, dcp=DCP(world, rank, requests.bounds()))
                else:
                    decode_mla(**given, backend="cute-dsl", return_lse=True)
        (compiled,) = compilation.kernels
        ranks = [kernels.cute_dsl_arguments(values)["cp_rank"] for values in compiled.launches]
        assert ranks == sorted({0, world - 1})
        return compiled

    return decode_once


def test_the_getter_is_the_one_of_the_release_under_test() -> None:
    with simulated_flashinfer() as simulation:
        getter = inspect.unwrap(importlib.import_module(MONOLITHIC)._get_compiled_mla_kernel)
    assert simulation.release == RELEASE
    assert RELEASE in PARAMETERS
    if "FI_DCP_TEST_RELEASE" in os.environ:
        home = os.environ["PYTHONPATH"].split(os.pathsep)[0]
    else:
        home = str(distribution("flashinfer-python").locate_file(""))
    assert Path(getter.__code__.co_filename) == Path(home, *MONOLITHIC.split(".")).with_suffix(
        ".py"
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", WORLDS)
def test_a_kernel_for_sm_100a_comes_out(decode: Decode, world: int, dtype: torch.dtype) -> None:
    compiled = decode(world, dtype)
    assert re.findall(r"^\.target (.*)$", compiled.ptx, re.MULTILINE) == ["sm_100a"]
    kind = "f16" if dtype is torch.bfloat16 else "f8f6f4"
    assert set(re.findall(r"tcgen05\.mma\S*\.kind::(\w+)", compiled.ptx)) == {kind}
    entries = re.findall(r"^\.visible \.entry (\w+)", compiled.ptx, re.MULTILINE)
    assert [re.findall("split_kv|reduction", entry) for entry in entries] == [
        ["split_kv"],
        ["reduction"],
    ]
    assert compiled.cubin.startswith(b"\x7fELF")
    machine, flags = (
        struct.unpack_from(code, compiled.cubin, at)[0] for code, at in (("<H", 18), ("<I", 48))
    )
    assert (machine, flags >> 8 & 0xFF) == (190, 100)  # EM_CUDA; the flags have no "a"
    assert set(re.findall(rb"\bsm_\w+", compiled.cubin)) == {b"sm_100a"}
    for entry in entries:
        assert b"\0.text." + entry.encode() + b"\0" in compiled.cubin


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_world_size_is_compiled_in(decode: Decode, dtype: torch.dtype) -> None:
    two, eight = decode(2, dtype), decode(8, dtype)
    assert (two.key["cp_world"], eight.key["cp_world"]) == (2, 8)
    assert two.key | {"cp_world": 8} == eight.key
    assert two.key["enable_dcp"] is True
    assert two.ptx != eight.ptx
    # The compiler says the same twice: the difference is the key's.
    assert _compile(two.key).ptx == two.ptx


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", WORLDS)
def test_the_kernel_takes_what_the_host_passes(
    decode: Decode, world: int, dtype: torch.dtype
) -> None:
    compiled = decode(world, dtype)
    parameters = compiled.parameters()
    # Each launch has passed the object's own checks already.
    for values in compiled.launches:
        assert len(values) == len(parameters) == PARAMETERS[RELEASE]
        assert list(kernels.cute_dsl_arguments(values)) == list(parameters)
    element = str(dtype).removeprefix("torch.")
    assert parameters["q_latent"] == f"Tensor([n0, n1, n2, n3], {element})"
    assert parameters["c_latent"] == f"Tensor([n5, n6, n3], {element})"
    assert parameters["o"] == "Tensor([n0, n1, n2, n3], bfloat16)"
    assert parameters["lse"] == "Tensor([n0, n1, n2], float32)"
    assert parameters["cp_rank"] == "int32"
    bounds = "None" if world == 1 else "Tensor([n0], int32)"
    assert parameters["causal_seqlens_kv_global"] == bounds


def test_compact_queries_compile_too(decode: Decode) -> None:
    compiled = decode(8 if HAS.varlen_dcp else 1, torch.bfloat16, compact=True)
    assert compiled.key["is_var_q"] is True
    parameters = compiled.parameters()
    assert parameters["q_latent"] == "Tensor([n0, n1, n2], bfloat16)"
    assert parameters["lse"] == "Tensor([n0, n1], float32)"
    assert re.fullmatch(r"Tensor\(\[n\d+\], int32\)", parameters["cum_seq_lens_q"])


def test_the_kernel_refuses_what_the_emulation_refuses(decode: Decode) -> None:
    compiled = decode(2, torch.bfloat16)
    names = list(compiled.parameters())
    values = kernels.cute_dsl_arguments(compiled.launches[0])

    def change(name: str, tensor: Tensor) -> tuple[object, ...]:
        position = names.index(name)
        launch = compiled.launches[0]
        return (*launch[:position], tensor, *launch[position + 1 :])

    integers = ("page_table", "cache_seqs", "causal_seqlens_kv_global")
    given = {name: kernels.tensor(values, name) for name in (*integers, "lse", "o", "q_latent")}
    workspace = kernels.tensor(values, "workspace")
    refused = [
        *((name, given[name].long()) for name in integers),
        *((name, _misaligned(tensor, 8)) for name, tensor in given.items() if name not in integers),
        ("page_table", _misaligned(given["page_table"], 4)),
        ("cache_seqs", _misaligned(given["cache_seqs"], 4)),
        ("workspace", workspace[16:]),
        ("lse", given["lse"].double()),
        ("cache_seqs", torch.zeros(3, dtype=torch.int32)),
        ("causal_seqlens_kv_global", torch.zeros(3, dtype=torch.int32)),
        *((name, given[name].repeat_interleave(2, -1)[..., ::2]) for name in integers),
    ]
    for name, tensor in refused:
        changed = change(name, tensor)
        with pytest.raises(ValueError, match=f"argument #{names.index(name)} ") as real:
            compiled.check(*changed)
        with pytest.raises(ValueError, match=f"argument #{names.index(name)} ") as emulated:
            kernels.check_cute_dsl(kernels.cute_dsl_arguments(changed))
        assert _complaint(real.value) == _complaint(emulated.value)
    accepted = [
        ("causal_seqlens_kv_global", _misaligned(given["causal_seqlens_kv_global"], 4)),
        ("page_table", given["page_table"].repeat(1, 2)[:, : given["page_table"].shape[1]]),
    ]
    for name, tensor in accepted:
        compiled.check(*change(name, tensor))
        kernels.check_cute_dsl(kernels.cute_dsl_arguments(change(name, tensor)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 256}, "size in shape to be strictly positive"),
        ({"num_heads": 129}, r"num_heads \(129\) must not exceed"),
    ],
    ids=["page size", "heads"],
)
def test_what_the_kernel_cannot_do_does_not_compile(
    decode: Decode, change: dict[str, object], message: str
) -> None:
    key = decode(2, torch.bfloat16).key
    with pytest.raises(ValueError, match=message):
        _compile(key | change)


@pytest.mark.skipif("FI_DCP_TEST_RELEASE" in os.environ, reason="this is that process")
def test_the_first_release_with_dcp_compiles_too(wheels_folder: Path) -> None:
    release = "0.6.17"
    environment = os.environ | {
        "PYTHONPATH": str(unpacked(release, wheels_folder)),
        "FI_DCP_TEST_RELEASE": release,
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "compiles",
        "-p",
        "no:cacheprovider",
        __file__,
    ]
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert run.returncode == 0, run.stdout + run.stderr
    # All of this file but this test.
    assert re.search(r"^\d\d passed, 1 skipped in ", run.stdout, re.MULTILINE), run.stdout


def _compile(key: dict[str, object]) -> Compiled:
    with simulated_flashinfer():
        return compile_kernel(**key)


def _complaint(error: ValueError) -> tuple[str, str]:
    """Split what is wrong and what was expected off; of equal lengths either may be named."""
    wrong, expected = re.findall(r"^(.+?) on argument .*, expected (.+)$", str(error))[0]
    return wrong, re.sub(r"(?<=match )\w+(?=\.shape)", "", expected)


def _misaligned(tensor: Tensor, offset: int) -> Tensor:
    """Copy a tensor to an address that is ``offset`` bytes beyond a multiple of 64."""
    size = tensor.numel() * tensor.element_size()
    room = torch.zeros(size + 128, dtype=torch.uint8)
    start = -room.data_ptr() % 64 + offset
    data = room[start : start + size].view(tensor.dtype).view(tensor.shape)
    return data.copy_(tensor)
