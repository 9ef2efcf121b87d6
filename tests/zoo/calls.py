"""Ask an installation what needs torch: the calls, each installation in a forked process.

``python -m`` this reads one `Request` a line and prints one `Calls`. torch takes seconds to import,
so it is imported once and the process forks before it looks at an installation.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import site
import subprocess
import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace, TracebackType
from typing import Any, TypedDict

from tests.fakes import REPOSITORY
from tests.zoo.answers import Found, Told, told

__all__ = ["Calls", "Fork", "Request"]


class Request(TypedDict):
    """One installation: folders before and after torch's, and whether its kernel is a fake."""

    path: list[str]
    sites: list[str]
    prelude: str
    environment: dict[str, str]
    fake: bool


class Calls(TypedDict):
    """What each call gave; None for a call that ran."""

    plain: Told
    dcp: Told
    prepare: Told
    dropin: Told
    dropin_dcp: Told
    reference: Told


class Fork:
    """The process that forks; a context manager."""

    def __init__(self, *path: str) -> None:
        environment = {name: text for name, text in os.environ.items() if "FI_DCP" not in name}
        environment["PYTHONPATH"] = os.pathsep.join([*path, str(REPOSITORY)])
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-m", "tests.zoo.calls"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=REPOSITORY,
            text=True,
        )

    def __enter__(self) -> Fork:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, at: TracebackType | None
    ) -> None:
        self.process.communicate()

    def ask(self, request: Request) -> Calls:
        """Fork, and return what the calls gave in the child."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        calls: Calls | None = json.loads(self.process.stdout.readline())
        assert calls is not None
        return calls


def _pose_as_gpu() -> None:
    import torch

    # A fake FlashInfer is taken for the real one, which has no kernel for CPU tensors.
    properties = SimpleNamespace(multi_processor_count=148)
    changes: Mapping[str, object] = {
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (10, 0),
        "is_current_stream_capturing": lambda: False,
    }
    for name, change in changes.items():
        setattr(torch.cuda, name, change)
    torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment]


def _calls(request: Request) -> Calls:
    from fi_dcp_compat import decode_mla, prepare_decode_mla
    from fi_dcp_compat.dropin import trtllm_batch_decode_with_kv_cache_mla
    from tests.support import SCALE, call, dcp_of

    sys.path[:0] = request["path"]
    for folder in request["sites"]:
        site.addsitedir(folder)
    importlib.invalidate_caches()
    os.environ.update(request["environment"])
    exec(request["prelude"], {})
    given = call()
    step, dcp = call(dcp=dcp_of()), dcp_of()
    flashinfers: dict[str, Any] = given | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    with_dcp: dict[str, Any] = flashinfers | {
        "enable_dcp": True,
        "cp_world": dcp.world_size,
        "cp_rank": dcp.rank,
        "causal_seqlens_kv_global": dcp.causal_seqlens_kv_global,
        "return_lse": True,
    }
    if request["fake"]:
        _pose_as_gpu()

    def ran(function: Callable[..., object], arguments: dict[str, Any]) -> Told:
        def run() -> Found | str | None:
            function(**arguments)
            return None

        return told(run)

    prepared = {"page_size": 64, "dtype": given["query"].dtype, "bmm1_scale": SCALE}
    return {
        "plain": ran(decode_mla, given),
        "dcp": ran(decode_mla, step),
        "prepare": ran(prepare_decode_mla, prepared | {"dcp_world_size": 8, "dcp_rank": 3}),
        "dropin": ran(trtllm_batch_decode_with_kv_cache_mla, flashinfers),
        "dropin_dcp": ran(trtllm_batch_decode_with_kv_cache_mla, with_dcp),
        "reference": ran(decode_mla, step | {"backend": "reference"}),
    }


def _serve() -> None:
    import torch

    # Before the fork, as all that imports torch.
    import fi_dcp_compat.dropin  # noqa: F401
    import tests.support  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                # What FlashInfer prints is no answer.
                with contextlib.redirect_stdout(sys.stderr):
                    calls = _calls(json.loads(line))
                print(json.dumps(calls), flush=True)
                code = 0
            finally:
                os._exit(code)
        if os.waitpid(child, 0)[1] != 0:
            print("null", flush=True)  # its traceback is in stderr


if __name__ == "__main__":
    _serve()
