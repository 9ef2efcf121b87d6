"""Random requests, laid out in pages as one rank holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .oracle import full_attention

KV_LORA_RANK, HEAD_DIM = 512, 576


@dataclass(frozen=True)
class Batch:
    """Requests by their unpaged queries [q_len, H, 576] and keys [context, 576].

    The softmax scale and the output scale are fixed, so that a call and ``expected`` agree.
    """

    queries: list[Tensor]
    keys: list[Tensor]
    page_size: int
    scale: float = 0.05
    output_scale: float = 1.25

    def paged(self, rank: int = 0, world: int = 1) -> dict[str, Tensor | int]:
        """Lay out every ``world``-th key from ``rank`` on: the cache arguments of one rank's call.

        Pages are shuffled and hold large values beyond the keys; tails of the table hold -1.
        """
        held = [keys[rank::world] for keys in self.keys]
        # cute-dsl wants whole tiles of 128 tokens.
        width = max(1, *(-(-len(keys) // 128) for keys in held)) * (128 // self.page_size)
        order = torch.randperm(len(held) * width + 3, generator=torch.Generator().manual_seed(7))
        pool = torch.full((len(order), self.page_size, HEAD_DIM), 200.0).to(self.keys[0].dtype)
        table = torch.full((len(held), width), -1, dtype=torch.int32)
        for request, keys in enumerate(held):
            for page, chunk in enumerate(torch.split(keys, self.page_size) if len(keys) else ()):
                number = int(order[request * width + page])
                pool[number, : len(chunk)] = chunk
                table[request, page] = number
        lengths = torch.tensor([len(keys) for keys in held], dtype=torch.int32)
        return {
            "kv_cache": pool,
            "block_tables": table,
            "seq_lens": lengths,
            "max_seq_len": max(1, int(lengths.max())),
        }

    def query(self) -> Tensor:
        """[B, q_len, H, D], or [num_tokens, H, D] when the lengths differ."""
        if len({len(query) for query in self.queries}) == 1:
            return torch.stack(self.queries)
        return torch.cat(self.queries)

    def varlen(self) -> dict[str, Tensor | int]:
        """Return the arguments that go with a compact query."""
        lengths = torch.tensor([0, *map(len, self.queries)])
        return {
            "cum_seq_lens_q": lengths.cumsum(0, dtype=torch.int32),
            "max_q_len": int(lengths.max()),
        }

    def bounds(self) -> Tensor:
        """Return the global lengths, [B] int32."""
        return torch.tensor([len(keys) for keys in self.keys], dtype=torch.int32)

    def expected(
        self, *, causal: bool = True, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Full attention: [num_tokens, H, 512] and natural LSE [num_tokens, H], float64."""
        states = [
            full_attention(
                query.float(),
                keys.float(),
                kv_lora_rank=KV_LORA_RANK,
                scale=self.scale,
                output_scale=self.output_scale,
                causal=causal,
                sinks=sinks,
            )
            for query, keys in zip(self.queries, self.keys, strict=True)
        ]
        return torch.cat([out for out, _ in states]), torch.cat([lse for _, lse in states])


def random_batch(
    q_lens: Sequence[int],
    contexts: Sequence[int],
    *,
    page_size: int = 32,
    dtype: torch.dtype = torch.bfloat16,
    num_heads: int = 4,
) -> Batch:
    """Draw a batch; the same arguments draw the same one."""
    random = torch.Generator().manual_seed(1000 * sum(q_lens) + sum(contexts))
    queries = [torch.randn(q, num_heads, HEAD_DIM, generator=random).to(dtype) for q in q_lens]
    keys = [torch.randn(length, HEAD_DIM, generator=random).to(dtype) for length in contexts]
    return Batch(queries, keys, page_size)
