"""Full MLA attention over unpaged keys, in float64: what every decode has to come to."""

from __future__ import annotations

import torch
from torch import Tensor


def full_attention(
    query: Tensor,
    keys: Tensor,
    *,
    kv_lora_rank: int,
    scale: float,
    output_scale: float = 1.0,
    causal: bool = True,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend from the newest tokens of one request to all of its keys.

    Parameters
    ----------
    query : Tensor, [q_len, H, D], any float dtype
        ``D = kv_lora_rank + qk_rope_head_dim``; the last token is the newest.
    keys : Tensor, [L, D], any float dtype
        Unpaged, in order; their first ``kv_lora_rank`` columns are the values.
    scale : float
        The whole softmax scale.
    output_scale : float
        Multiplies the output.
    causal : bool
        Token ``i`` sees the first ``L - (q_len - 1 - i)`` keys, else all ``L``.
    sinks : Tensor, [H], natural log, optional
        One more exponential per head in the denominator, and so in the LSE too.

    Returns
    -------
    tuple of Tensor
        ``[q_len, H, kv_lora_rank]`` and the LSE ``[q_len, H]``, natural log, both float64. A
        token that sees nothing is 0 and -inf.
    """
    q_len, num_heads, _ = query.shape
    out = torch.zeros(q_len, num_heads, kv_lora_rank, dtype=torch.float64)
    lse = torch.full((q_len, num_heads), -torch.inf, dtype=torch.float64)
    for token in range(q_len):
        visible = keys.shape[0] - (q_len - 1 - token) if causal else keys.shape[0]
        if visible <= 0:
            continue
        seen = keys[:visible].double()
        scores = query[token].double() @ seen.T * scale
        lse[token] = torch.logsumexp(scores, dim=-1)
        if sinks is not None:
            lse[token] = torch.logaddexp(lse[token], sinks.double())
        weights = torch.exp(scores - lse[token, :, None])
        out[token] = weights @ seen[:, :kv_lora_rank] * output_scale
    return out, lse
