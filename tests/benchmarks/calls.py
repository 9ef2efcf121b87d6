"""The arms: a DCP call as a stack writes it today, and through this package.

The direct call has the 17 keywords that a stack sets. "4-D" is a query [B, q_len, H, D] and a cache
[num_pages, 1, page_size, D], "flat" a query [num_tokens, H, D] and a cache without the 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fi_dcp_compat import DCP, MLADecoder, decode_mla, prepare_decode_mla, recorded
from fi_dcp_compat.testing import use_kernel

from .rounds import Arms, Row, measure, microseconds, ratio

RELEASE = "0.7.4"
WORLD, RANK, PAGE, SCALE = 8, 3, 128, 0.1
Kernel = Callable[..., Any]


@dataclass
class Step:
    """One step's tensors; of zeros, for no arm reads them."""

    batch: int = 2
    q_len: int = 3
    heads: int = 24
    flat: bool = False
    width: int = 1
    query: Tensor = field(init=False)
    cache: Tensor = field(init=False)
    tables: Tensor = field(init=False)
    lens: Tensor = field(init=False)
    bounds: Tensor = field(init=False)
    workspace: Tensor = field(init=False)
    dcp: DCP = field(init=False)

    def __post_init__(self) -> None:
        query = torch.zeros(self.batch, self.q_len, self.heads, 576, dtype=torch.bfloat16)
        cache = torch.zeros(2, 1, PAGE, 576, dtype=torch.bfloat16)
        self.query = query.flatten(0, 1) if self.flat else query
        self.cache = cache.squeeze(1) if self.flat else cache
        self.tables = torch.zeros(self.batch, self.width, dtype=torch.int32)
        self.lens = torch.ones(self.batch, dtype=torch.int32)
        self.bounds = torch.full((self.batch,), 31, dtype=torch.int32)
        self.workspace = torch.zeros(1 << 20, dtype=torch.int8)
        self.dcp = DCP(WORLD, RANK, self.bounds)

    def result(self, *, shaped: bool) -> tuple[Tensor, Tensor]:
        """Return what the kernel answers; FlashInfer's LSE is [B * q_len, H]."""
        out = torch.zeros(self.batch, self.q_len, self.heads, 512, dtype=torch.bfloat16)
        lse = torch.zeros(self.batch * self.q_len, self.heads)
        return out, lse.view(self.batch, self.q_len, self.heads) if shaped else lse


def no_op(result: tuple[Tensor, Tensor]) -> Kernel:
    """Return a function with the release's exact signature that returns `result`."""
    parameters = ", ".join(
        parameter.name if parameter.default is None else f"{parameter.name}={parameter.default}"
        for parameter in recorded(RELEASE).parameters
    )
    names: dict[str, Any] = {"result": result}
    exec(f"def kernel({parameters}): return result", names)  # of our own record
    kernel: Kernel = names["kernel"]
    return kernel


def direct(kernel: Kernel, step: Step) -> Callable[[], object]:
    """Return the call without anything around it."""

    def call() -> object:
        return kernel(
            query=step.query,
            kv_cache=step.cache,
            workspace_buffer=step.workspace,
            qk_nope_head_dim=128,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            block_tables=step.tables,
            seq_lens=step.lens,
            max_seq_len=9,
            bmm1_scale=SCALE,
            bmm2_scale=1.0,
            backend="cute-dsl",
            return_lse=True,
            enable_dcp=True,
            cp_world=WORLD,
            cp_rank=RANK,
            causal_seqlens_kv_global=step.bounds,
        )

    return call


def prepared_decoder() -> MLADecoder:
    return prepare_decode_mla(
        page_size=PAGE,
        dtype=torch.bfloat16,
        dcp_world_size=WORLD,
        dcp_rank=RANK,
        bmm1_scale=SCALE,
    )


def prepared(decoder: MLADecoder, step: Step) -> Callable[[], object]:
    def call() -> object:
        return decoder.run(
            step.query,
            step.cache,
            step.tables,
            step.lens,
            9,
            step.workspace,
            causal_seqlens_kv_global=step.bounds,
        )

    return call


def one_shot(step: Step) -> Callable[[], object]:
    def call() -> object:
        return decode_mla(
            step.query,
            step.cache,
            workspace_buffer=step.workspace,
            block_tables=step.tables,
            seq_lens=step.lens,
            max_seq_len=9,
            bmm1_scale=SCALE,
            dcp=step.dcp,
        )

    return call


def one_shot_each(step: Step) -> Callable[[], object]:
    """Return the same with a DCP made in each call, where one for a step's layers would do."""

    def call() -> object:
        return decode_mla(
            step.query,
            step.cache,
            workspace_buffer=step.workspace,
            block_tables=step.tables,
            seq_lens=step.lens,
            max_seq_len=9,
            bmm1_scale=SCALE,
            dcp=DCP(WORLD, RANK, step.bounds),
        )

    return call


def decode(step: Step, **changes: Any) -> object:
    """Call `decode_mla` with another argument or two."""
    arguments: dict[str, Any] = {
        "workspace_buffer": step.workspace,
        "block_tables": step.tables,
        "seq_lens": step.lens,
        "max_seq_len": 9,
        "bmm1_scale": SCALE,
        "dcp": step.dcp,
    }
    return decode_mla(step.query, step.cache, **(arguments | changes))


def _layer(step: Step) -> tuple[SimpleNamespace, SimpleNamespace]:
    """Return what a backend reads its arguments from: the layer, and the step's metadata."""
    layer = SimpleNamespace(
        qk_nope_head_dim=128,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        bmm1_scale=SCALE,
        bmm2_scale=1.0,
        workspace_buffer=step.workspace,
        dcp_world_size=WORLD,
        dcp_rank=RANK,
    )
    decode = SimpleNamespace(
        block_table=step.tables, seq_lens=step.lens, dcp_tot_seq_lens=step.bounds, max_seq_len=9
    )
    return layer, SimpleNamespace(num_decodes=step.batch, decode=decode)


def wrapper(kernel: Kernel, step: Step) -> Callable[[], object]:
    """Return the direct call inside what vLLM's MLA backends have around it: views and chains."""
    layer, metadata = _layer(step)

    def forward(self: Any, q: Tensor, kv_c_and_k_pe_cache: Tensor, attn_metadata: Any) -> object:
        q = q.view(attn_metadata.num_decodes, -1, q.shape[-2], q.shape[-1])
        o, lse = kernel(
            query=q,
            kv_cache=kv_c_and_k_pe_cache.unsqueeze(1),
            workspace_buffer=self.workspace_buffer,
            qk_nope_head_dim=self.qk_nope_head_dim,
            kv_lora_rank=self.kv_lora_rank,
            qk_rope_head_dim=self.qk_rope_head_dim,
            block_tables=attn_metadata.decode.block_table,
            seq_lens=attn_metadata.decode.seq_lens,
            max_seq_len=attn_metadata.decode.max_seq_len,
            bmm1_scale=self.bmm1_scale,
            bmm2_scale=self.bmm2_scale,
            backend="cute-dsl",
            return_lse=True,
            enable_dcp=self.dcp_world_size > 1,
            cp_world=self.dcp_world_size,
            cp_rank=self.dcp_rank,
            causal_seqlens_kv_global=attn_metadata.decode.dcp_tot_seq_lens,
        )
        return o.view(-1, o.shape[-2], o.shape[-1]), lse.view(-1, o.shape[-2])

    return lambda: forward(layer, step.query, step.cache, metadata)


def wrapped(decoder: MLADecoder, step: Step) -> Callable[[], object]:
    """Return a prepared call inside the same frame and chains."""
    layer, metadata = _layer(step)
    layer.decoder = decoder

    def forward(self: Any, q: Tensor, kv_c_and_k_pe_cache: Tensor, attn_metadata: Any) -> object:
        return self.decoder.run(
            q,
            kv_c_and_k_pe_cache,
            attn_metadata.decode.block_table,
            attn_metadata.decode.seq_lens,
            attn_metadata.decode.max_seq_len,
            self.workspace_buffer,
            causal_seqlens_kv_global=attn_metadata.decode.dcp_tot_seq_lens,
        )

    return lambda: forward(layer, step.query, step.cache, metadata)


def no_op_rows(rounds: int) -> tuple[list[Row], dict[str, list[float]]]:
    """Return the rows of the no-op kernel, and the times of its arms with all views counted."""
    step = Step()
    rows = []
    with use_kernel(no_op(step.result(shaped=True)), recorded(RELEASE)):
        kernel = no_op(step.result(shaped=True))
        base = direct(kernel, step)
        arms: Arms = {
            "direct": base,
            "null": base,
            "prepared": prepared(prepared_decoder(), step),
            "one-shot": one_shot(step),
        }
        times = measure(arms, rounds)
    rows += [
        microseconds("the direct call, no-op kernel", times, "direct"),
        ratio("null: direct / direct, no-op kernel", times, "null", "direct"),
        ratio("prepared / direct, 4-D, no views", times, "prepared", "direct", 3.3),
        ratio("decode_mla / direct, 4-D, no views", times, "one-shot", "direct", 5.0),
    ]
    flat = Step(flat=True)
    kernel = no_op(step.result(shaped=False))
    with use_kernel(kernel, recorded(RELEASE)):
        base = wrapper(kernel, flat)
        arms = {
            "wrapper": base,
            "null": base,
            "prepared": prepared(prepared_decoder(), flat),
            "wrapped": wrapped(prepared_decoder(), flat),
            "one-shot": one_shot(flat),
            "each": one_shot_each(flat),
        }
        times = measure(arms, rounds)
        label = "wrapper, flat, all counted"
        rows += [
            microseconds("a vLLM-like wrapper, flat, no-op kernel", times, "wrapper"),
            ratio("null: wrapper / wrapper", times, "null", "wrapper"),
            ratio(f"prepared / {label}", times, "prepared", "wrapper", 1.0),
            ratio(f"prepared in the same frame / {label}", times, "wrapped", "wrapper"),
            ratio(f"decode_mla / {label}", times, "one-shot", "wrapper"),
            ratio(f"decode_mla with a DCP of its own / {label}", times, "each", "wrapper"),
        ]
        arms = {
            "direct": direct(kernel, step),
            "prepared": prepared(prepared_decoder(), step),
            "one-shot": one_shot(step),
        }
        return rows, measure(arms, rounds)
