"""Log-sum-exp: its base, the states that carry it, and the merge of partial states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import InvalidInputError
from .features import LseBase
from .validation import kept

__all__ = ["MLAState", "merge_dcp_states"]

# Multiply an LSE of the first base by this to get the second.
_SCALE: dict[tuple[str, str], float] = {("2", "e"): math.log(2.0), ("e", "2"): math.log2(math.e)}


class MLAState(NamedTuple):
    """A partial attention result that can be merged with others.

    Attributes
    ----------
    out : Tensor, [B, q_len, H, kv_lora_rank] or [num_tokens, H, kv_lora_rank]
        Normalised over the keys it saw; 0 in a row that saw none.
    lse : Tensor, [B, q_len, H] or [num_tokens, H], float32
        Log-sum-exp of the scaled scores, in the base asked for; -inf in a row that saw none.
    """

    out: Tensor
    lse: Tensor


def check_lse_base(base: str) -> None:
    """Raise InvalidInputError unless `base` is one of the two spellings."""
    given: object = base
    if isinstance(given, str) and given in ("e", "2"):
        return
    shown = kept(given)
    raise InvalidInputError(
        "lse_base must be 'e' or '2'.",
        found=f"{shown!r}." if shown is given else f"{shown}.",
        needed="'e' (natural log) or '2' (log2).",
        fix="pass 'e' where FlashInfer says 'basee', '2' where it says 'base2'.",
        argument="lse_base",
        value=shown,
    )


def lse_factor(found: LseBase, wanted: LseBase) -> float | None:
    """Return what turns an LSE of base `found` into base `wanted`; None: nothing to do."""
    return _SCALE.get((found, wanted))


def scale_lse(lse: Tensor, factor: float) -> None:
    """Multiply in place, a buffer made under ``torch.inference_mode`` too."""
    if lse.is_inference() and not torch.is_inference_mode_enabled():
        with torch.inference_mode():
            lse.mul_(factor)
    else:
        lse.mul_(factor)


def merge_dcp_states(
    outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor], lse_base: LseBase = "e"
) -> MLAState:
    """Merge the partial states of the ranks, all held here, into the whole context's.

    Parameters
    ----------
    outs : Tensor, [W, .., H, D], or a sequence of W tensors [.., H, D]
    lses : Tensor, [W, .., H], or a sequence of W tensors [.., H]
        In base `lse_base`. A state whose LSE is NaN or infinite counts as empty, whatever its
        output holds.
    lse_base : {"e", "2"}
        Base of `lses` and of the result.

    Returns
    -------
    MLAState
        ``out`` [.., H, D] in the dtype of `outs`, accumulated in float32; ``lse`` [.., H]
        float32. A row that is empty on every rank is (0, -inf).

    Raises
    ------
    InvalidInputError
        The shapes do not fit, or `lse_base` is neither "e" nor "2".
    """
    check_lse_base(lse_base)
    outs, lses = _stacked("outs", outs), _stacked("lses", lses)
    if outs.ndim < 2 or outs.shape[:-1] != lses.shape or outs.shape[0] == 0:
        raise _misfit("lses", f"outs {list(outs.shape)}, lses {list(lses.shape)}")
    weights, lse = merge_weights(lses, lse_base)
    weights = weights.unsqueeze(-1)
    # An empty state's weight is 0, but its output may be NaN.
    out = torch.where(weights > 0, outs, 0.0).float().mul_(weights).sum(dim=0)
    return MLAState(out.to(outs.dtype), lse)


def merge_weights(lses: Tensor, lse_base: LseBase) -> tuple[Tensor, Tensor]:
    """Return each state's weight [W, .., H] in the merged output, and the merged LSE [.., H]."""
    # In its own base, so that one state alone keeps its LSE to the bit.
    power, log = (torch.exp, torch.log) if lse_base == "e" else (torch.exp2, torch.log2)
    lse = torch.where(lses.isfinite(), lses.float(), -torch.inf)
    top = lse.amax(dim=0)
    # With every rank empty the maximum is -inf, and -inf - (-inf) would be NaN.
    top = torch.where(top.isfinite(), top, 0.0)
    weights = power(lse - top)
    total = weights.sum(dim=0)
    return weights / total.clamp(min=1.0), top + log(total)


def _stacked(argument: str, states: Tensor | Sequence[Tensor]) -> Tensor:
    if isinstance(states, Tensor):
        return states
    try:
        return torch.stack(list(states))
    except (RuntimeError, TypeError) as exc:
        raise _misfit(argument, f"{argument}: {exc}") from exc


def _misfit(argument: str, found: str) -> InvalidInputError:
    return InvalidInputError(
        "outs and lses do not describe the same states.",
        found=f"{found}.",
        needed="outs [W, .., H, D] and lses [W, .., H] with W at least 1.",
        fix="stack the ranks in front of both; FlashInfer's own LSE is flat: "
        "lse.view(out.shape[:-1]).",
        argument=argument,
    )
