"""What a serving stack asks at start-up, in the words of its own configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from .abi import FlashInferABI
from .config import interleave_reason
from .errors import FlashInferCompatError, InvalidInputError
from .guards import Backend, check
from .limits import AUTO_BACKENDS, CUTE_DSL_PAGE_SIZES, FEW_HEADS, TRTLLM_GEN_PAGE_SIZES
from .probing import probe
from .releases import newest

if TYPE_CHECKING:
    import torch

__all__ = [
    "Capabilities",
    "ParallelConfig",
    "capabilities",
    "supports_combination",
    "validate_dcp_config",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """One release's answers to the questions stacks ask of an attention backend.

    Attributes
    ----------
    lse_base_on_e : bool
        Read by what merges the ranks' states: the base of their LSE. Always True, `decode_mla`
        returns the natural log unless asked otherwise.
    can_return_lse_for_decode : bool
        Read before DCP, or a cascade, is switched on: states are merged by their LSE.
    supports_dcp : bool
        Read when a parallel configuration with DCP is accepted for this backend.
    supports_dcp_with_varlen : bool
        Read when speculative decoding is combined with DCP: several query tokens a request, all
        requests alike.
    supports_dcp_compact_varlen : bool
        Read by the scheduler: whether requests of different query lengths may share a DCP batch
        (``cum_seq_lens_q``) or have to be padded.
    supports_non_causal_dcp : bool
        Read when a drafter has a non-causal block. Always False; `flatten_query_rows` makes causal
        calls of one.
    query_len_support : {"single_only", "uniform", "varlen"}
        Read where decodes are split from prefills: what a decode without DCP takes.
    page_sizes, dcp_page_sizes : tuple of int
        Read when the KV cache's block size is chosen: tokens per page, without and with DCP.
    compute_capability_majors : tuple of int
        Read when the backend is selected: of the GPUs that have a kernel. DCP runs on 10 only.
    """

    lse_base_on_e: bool
    can_return_lse_for_decode: bool
    supports_dcp: bool
    supports_dcp_with_varlen: bool
    supports_dcp_compact_varlen: bool
    supports_non_causal_dcp: bool
    query_len_support: Literal["single_only", "uniform", "varlen"]
    page_sizes: tuple[int, ...]
    dcp_page_sizes: tuple[int, ...]
    compute_capability_majors: tuple[int, ...]


def capabilities(abi: FlashInferABI) -> Capabilities:
    """Return what `decode_mla` can do on `abi`."""

    def runs(dcp_world_size: int = 1, *, varlen: bool = False, return_lse: bool = False) -> bool:
        return not check(
            abi,
            num_heads=FEW_HEADS,
            q_len=2,
            page_size=TRTLLM_GEN_PAGE_SIZES[-1],
            dtype="bfloat16",
            dcp_world_size=dcp_world_size,
            varlen=varlen,
            return_lse=return_lse,
        )

    plain, dcp = runs(), runs(2)
    return Capabilities(
        lse_base_on_e=True,
        can_return_lse_for_decode=runs(return_lse=True),
        supports_dcp=dcp,
        supports_dcp_with_varlen=dcp,
        supports_dcp_compact_varlen=runs(2, varlen=True),
        supports_non_causal_dcp=False,
        query_len_support="varlen" if runs(varlen=True) else "uniform",
        page_sizes=CUTE_DSL_PAGE_SIZES if plain else (),
        dcp_page_sizes=CUTE_DSL_PAGE_SIZES if dcp else (),
        compute_capability_majors=tuple(AUTO_BACKENDS) if plain else (),
    )


def supports_combination(
    *,
    num_heads: int,
    page_size: int | None = None,
    dtype: torch.dtype | str,
    kv_dtype: torch.dtype | str | None = None,
    dcp_world_size: int = 1,
    interleave_size: int = 1,
    q_len: int = 1,
    varlen: bool = False,
    causal: bool = True,
    backend: Backend = "auto",
    return_lse: bool = False,
    sinks: bool = False,
    skip_softmax: bool = False,
    tensor_scales: bool = False,
    kv_lora_rank: int = 512,
    qk_rope_head_dim: int = 64,
    compute_capability: Sequence[int] | None = None,
    block_table_width: int | None = None,
    batch: int | None = None,
    abi: FlashInferABI | None = None,
) -> str | None:
    """Return why this combination cannot run, as text, or None if it can. It never raises.

    Parameters
    ----------
    page_size : int, optional
        Left out: any page size that every backend takes.
    abi : FlashInferABI, optional
        Left out: the installed FlashInfer; one that is absent, broken or old is a reason too.

    The other parameters are those of `check`.
    """
    try:
        found = check(
            probe() if abi is None and backend != "reference" else abi or newest(),
            num_heads=num_heads,
            q_len=q_len,
            page_size=TRTLLM_GEN_PAGE_SIZES[-1] if page_size is None else page_size,
            dtype=dtype,
            kv_dtype=kv_dtype,
            dcp_world_size=dcp_world_size,
            interleave_size=interleave_size,
            causal=causal,
            backend=backend,
            varlen=varlen,
            return_lse=return_lse,
            sinks=sinks,
            skip_softmax=skip_softmax,
            tensor_scales=tensor_scales,
            kv_lora_rank=kv_lora_rank,
            qk_rope_head_dim=qk_rope_head_dim,
            compute_capability=compute_capability,
            block_table_width=block_table_width,
            batch=batch,
        )
    except FlashInferCompatError as exc:
        return str(exc)
    return "\n".join(map(str, found)) or None


_FIELDS = ("decode_context_parallel_size", "cp_kv_cache_interleave_size")


class ParallelConfig(Protocol):
    """The two fields of a stack's parallel configuration that DCP depends on."""

    @property
    def decode_context_parallel_size(self) -> int: ...
    @property
    def cp_kv_cache_interleave_size(self) -> int: ...


def validate_dcp_config(parallel_config: ParallelConfig) -> None:
    """Refuse at start-up a parallel configuration whose KV layout cannot be decoded natively.

    Any object with the two fields will do: vLLM's ``ParallelConfig``, or a dataclass. A stack that
    has no interleave, as SGLang, calls ``check(probe(), dcp_world_size=...)`` alone.

    Raises
    ------
    UnsupportedConfigError
        ``cp_kv_cache_interleave_size`` is above 1 with more than one DCP rank.
    InvalidInputError
        A field is missing, or no int of at least 1.
    """
    from .dcp import check_ranks

    sizes: list[int] = []
    for name in _FIELDS:
        if not hasattr(parallel_config, name):
            raise InvalidInputError(
                f"The parallel configuration has no {name}.",
                found=f"{type(parallel_config).__name__}.",
                needed=f"an object with {' and '.join(_FIELDS)}.",
                fix="pass the stack's parallel configuration.",
                argument=name,
            )
        sizes.append(getattr(parallel_config, name))
    world_size, interleave_size = sizes
    check_ranks(world_size, 0, interleave_size, (_FIELDS[0], "rank", _FIELDS[1]))
    reason = interleave_reason(world_size, interleave_size)
    if reason is not None:
        raise reason.exception()
