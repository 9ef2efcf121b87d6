"""FlashInfer's real host code on this CPU, as if on a Blackwell GPU.

Only the boundary to the compiled kernels is replaced; what arrives there is recorded. The tensors
stay CPU tensors that say ``is_cuda``. A seam of another release shows up here, not in a test.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Literal

import torch

from . import kernels

# They remember facts of the device; modules of flashinfer.mla remember kernels too.
_REMEMBERING = ("flashinfer.utils", "flashinfer.cute_dsl.utils")


@dataclass(frozen=True)
class Launch:
    """One kernel launch that the argument checks let through.

    ``arguments`` are the kernel's own, by name, DSL scalars unwrapped; ``compile_key`` holds the
    keywords that the cute-dsl getter was asked for, and nothing for trtllm-gen.
    """

    backend: Literal["cute-dsl", "trtllm-gen"]
    arguments: dict[str, object]
    compile_key: dict[str, object]


@dataclass
class Simulation:
    """What FlashInfer launched, and the switches of the simulated device.

    ``compiled`` holds the compile keys seen in this simulation: while ``capturing`` is true a
    release that refuses to compile inside a capture (0.7.4) refuses any other key. ``reached``
    names the kernel of each call that FlashInfer's Python let through to the boundary, whether or
    not the boundary then refused it; nothing is computed there unless ``compute``.
    """

    release: str
    compute: bool = True
    capturing: bool = False
    reached: list[str] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    compiled: set[frozenset[tuple[str, object]]] = field(default_factory=set)

    def clear(self) -> None:
        """Forget the launches, not the compiled kernels."""
        self.launches.clear()
        self.reached.clear()


@contextmanager
def simulated_flashinfer(
    *, compute_capability: tuple[int, int] = (10, 0), sm_count: int = 148, compute: bool = True
) -> Iterator[Simulation]:
    """Run the importable FlashInfer on a simulated GPU; undo everything but its import."""
    simulation = Simulation(release="", compute=compute)
    with ExitStack() as stack:
        _pose_as_gpu(stack, simulation, compute_capability, sm_count)
        modules = _import_flashinfer(stack)
        # XQA compares it with a minimum, and a CPU build has None; FlashInfer's import may not see
        # it, for it then looks for a toolkit.
        _set(stack, torch.version, "cuda", "13.0")
        simulation.release = str(modules["flashinfer"].__version__)
        swaps = _seams(modules, simulation, compute_capability, sm_count)
        # By identity, wherever they were imported by value; also undone in modules imported
        # meanwhile.
        stack.callback(_forget_device_facts)
        stack.callback(_swap, [(fake, original) for original, fake in swaps])
        _swap(swaps)
        _forget_device_facts()
        yield simulation


def _pose_as_gpu(
    stack: ExitStack, simulation: Simulation, capability: tuple[int, int], sm_count: int
) -> None:
    properties = SimpleNamespace(
        name=f"simulated sm_{capability[0]}{capability[1]}",
        major=capability[0],
        minor=capability[1],
        multi_processor_count=sm_count,
        total_memory=192 << 30,
        warp_size=32,
        shared_memory_per_block_optin=227 << 10,
        L2_cache_size=126 << 20,
    )
    _set(stack, torch.cuda, "get_device_properties", lambda device=None: properties)
    _set(stack, torch.cuda, "get_device_capability", lambda device=None: capability)
    _set(stack, torch.cuda, "get_device_name", lambda device=None: properties.name)
    _set(stack, torch.cuda, "is_current_stream_capturing", lambda: simulation.capturing)
    # On the subclass that Python code sees; the C++ property below it comes back on delete.
    _set(stack, torch.Tensor, "is_cuda", property(lambda self: True))


def _import_flashinfer(stack: ExitStack) -> dict[str, ModuleType]:
    """Import what a call would import lazily, so that the swaps find it; deprecations muted."""
    modules: dict[str, ModuleType] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        core, cute = (importlib.import_module(f"cutlass.{name}") for name in ("cute.core", "cute"))
        # FlashInfer 0.6.12 annotates with names that a newer CuTe DSL has moved.
        for name in ("ThrMma", "ThrCopy"):
            if not hasattr(core, name):
                _set(stack, core, name, getattr(cute, name))
        # FlashInfer 0.7.2 and later read a name on each call that CuTe DSL 4.8 warns about.
        arch = importlib.import_module("cutlass.base_dsl.arch")
        _set(stack, arch, "Arch", arch.Arch)
        for name in (
            "flashinfer",
            "flashinfer.utils",
            "flashinfer.decode",
            "flashinfer.xqa",
            "flashinfer.jit.xqa",
            "flashinfer.mla._core",
            "flashinfer.cute_dsl.utils",
            "flashinfer.cute_dsl.attention",
            "flashinfer.cute_dsl.attention.monolithic.mla_decode",
            "flashinfer.cute_dsl.attention.wrappers.batch_mla",
        ):
            modules[name] = importlib.import_module(name)
        moved = "flashinfer.mla._batch_mla._backends.trtllm_gen_backend"
        try:
            modules[moved] = importlib.import_module(moved)
        except ModuleNotFoundError as error:  # before 0.7.4
            if not moved.startswith(error.name or "?"):
                raise
    # Its checks of the configuration are host code; the sources behind them are not looked for.
    generator = modules["flashinfer.jit.xqa"]
    flags = SimpleNamespace(get_nvcc_flags_list=lambda **versions: [])
    _set(stack, generator, "CompilationContext", lambda: flags)
    _set(stack, generator, "gen_jit_spec", lambda *sources, **options: None)
    return modules


def _seams(
    modules: dict[str, ModuleType],
    simulation: Simulation,
    capability: tuple[int, int],
    sm_count: int,
) -> list[tuple[object, object]]:
    """Pair everything that has to be replaced with its replacement."""
    utils, mono = modules["flashinfer.utils"], _monolithic(modules)
    modular = functools.partial(_launch_modular, simulation)
    generate = modules["flashinfer.jit.xqa"].gen_xqa_module_mla
    xqa = SimpleNamespace(xqa_mla=functools.partial(_launch_xqa, simulation))
    swaps: list[tuple[object, object]] = [
        (utils.get_compute_capability, lambda device: capability),
        (utils.get_device_sm_count, lambda device: sm_count),
        (utils.device_support_pdl, lambda device: capability[0] >= 9),
        (modules["flashinfer.cute_dsl.utils"].get_num_sm, lambda device: sm_count),
        (mono._get_compiled_mla_kernel, _cute_dsl_getter(mono, simulation)),
        (_modular(modules)._compile_mla_kernel, lambda **key: modular),
        (modules["flashinfer.xqa"].get_xqa_module_mla, lambda *key: generate(*key) or xqa),
    ]
    module = SimpleNamespace(
        trtllm_paged_attention_decode=functools.partial(_launch_trtllm_gen, simulation)
    )
    for name, owner in modules.items():
        # decode.py has another module's getter under the same name.
        if name.startswith("flashinfer.mla.") and hasattr(owner, "get_trtllm_gen_fmha_module"):
            swaps.append((owner.get_trtllm_gen_fmha_module, lambda: module))
    return swaps


def _monolithic(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["flashinfer.cute_dsl.attention.monolithic.mla_decode"]


def _modular(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["flashinfer.cute_dsl.attention.wrappers.batch_mla"]


def _cute_dsl_getter(mono: ModuleType, simulation: Simulation) -> Callable[..., object]:
    real = inspect.unwrap(mono._get_compiled_mla_kernel)
    refuses_in_capture = "is_current_stream_capturing" in real.__code__.co_names
    # The causal mask and the LSE came together, in 0.6.13.
    decode = mono.cute_dsl_mla_decode.__code__
    causal = "return_lse" in decode.co_varnames[: decode.co_argcount]

    @functools.wraps(real)  # a simulation inside this one unwraps it again
    def get_compiled_kernel(**key: object) -> Callable[..., None]:
        compiled = frozenset(key.items())
        if compiled not in simulation.compiled and simulation.capturing and refuses_in_capture:
            raise RuntimeError("CuTe DSL MLA must be prepared before CUDA graph capture")
        simulation.compiled.add(compiled)

        def launch(*values: object) -> None:
            simulation.reached.append("cute-dsl")
            arguments = kernels.cute_dsl_arguments(values)
            kernels.check_cute_dsl(arguments)
            simulation.launches.append(Launch("cute-dsl", arguments, dict(key)))
            if simulation.compute:
                kernels.run_cute_dsl(arguments, key, causal=causal)

        return launch

    return get_compiled_kernel


def _launch_modular(simulation: Simulation, *values: object) -> None:
    """Stand for the cute-dsl kernel that takes sinks: it masks nothing between query tokens."""
    simulation.reached.append("cute-dsl")
    arguments = kernels.cute_dsl_arguments(values[:-1])
    kernels.check_cute_dsl(arguments)
    arguments["sinks"] = values[-1]
    simulation.launches.append(Launch("cute-dsl", arguments, {}))
    if simulation.compute:
        kernels.run_cute_dsl(arguments, {}, causal=False)


def _launch_xqa(simulation: Simulation, *values: object) -> None:
    simulation.reached.append("xqa")
    if simulation.compute:
        raise NotImplementedError("xqa is not emulated, only reached")


def _launch_trtllm_gen(simulation: Simulation, *values: object) -> None:
    simulation.reached.append("trtllm-gen")
    arguments = kernels.trtllm_gen_arguments(values)
    kernels.check_trtllm_gen(arguments)
    simulation.launches.append(Launch("trtllm-gen", arguments, {}))
    if simulation.compute:
        kernels.run_trtllm_gen(arguments)


def _swap(pairs: list[tuple[object, object]]) -> None:
    replacements = {id(old): new for old, new in pairs}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "flashinfer" or not isinstance(module, ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            if id(value) in replacements:
                setattr(module, attribute, replacements[id(value)])


def _forget_device_facts() -> None:
    """Clear what is_sm12x_supported and its like remember, of a device or of its kernels."""
    for name, module in list(sys.modules.items()):
        if name in _REMEMBERING or name.startswith("flashinfer.mla."):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def _set(stack: ExitStack, owner: object, name: str, value: object) -> None:
    """Set an attribute until the stack unwinds; one that was inherited is deleted again."""
    if name in vars(owner):
        stack.callback(setattr, owner, name, vars(owner)[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, value)
