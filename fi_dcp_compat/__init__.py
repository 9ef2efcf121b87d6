"""One stable, typed MLA decode call over every FlashInfer release, DCP included.

Importing this package imports neither torch nor flashinfer: each name is loaded when first used.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing would double what importing this package costs
if TYPE_CHECKING:
    from .abi import FlashInferABI, Parameter
    from .dcp import (
        DCP,
        FlatRows,
        TokenSlots,
        causal_bounds,
        flatten_query_rows,
        local_seq_lens,
        token_positions,
        token_slots,
    )
    from .debug import debug_checks
    from .decode import decode_mla
    from .decode_dcp import decode_mla_dcp
    from .distributed import CombineMode, combine, combine_buffers, gather_query_heads
    from .errors import (
        FlashInferCompatError,
        FlashInferCompatWarning,
        FlashInferImportError,
        FlashInferNotFoundError,
        FlashInferSignatureError,
        FlashInferVersionError,
        InvalidInputError,
        NotPreparedError,
        Reason,
        UnsupportedConfigError,
        raise_first,
    )
    from .features import Features, LseBase
    from .guards import Backend, check
    from .lse import MLAState, merge_dcp_states
    from .prepared import MLADecoder, prepare_decode_mla
    from .probing import probe
    from .releases import recorded
    from .scales import BmmScales, bmm_scales
    from .sizes import counter_bytes, min_workspace_bytes
    from .startup import (
        Capabilities,
        ParallelConfig,
        capabilities,
        supports_combination,
        validate_dcp_config,
    )

    __version__: str

__all__ = [
    "DCP",
    "Backend",
    "BmmScales",
    "Capabilities",
    "CombineMode",
    "Features",
    "FlashInferABI",
    "FlashInferCompatError",
    "FlashInferCompatWarning",
    "FlashInferImportError",
    "FlashInferNotFoundError",
    "FlashInferSignatureError",
    "FlashInferVersionError",
    "FlatRows",
    "InvalidInputError",
    "LseBase",
    "MLADecoder",
    "MLAState",
    "NotPreparedError",
    "ParallelConfig",
    "Parameter",
    "Reason",
    "TokenSlots",
    "UnsupportedConfigError",
    "__version__",
    "bmm_scales",
    "capabilities",
    "causal_bounds",
    "check",
    "combine",
    "combine_buffers",
    "counter_bytes",
    "debug_checks",
    "decode_mla",
    "decode_mla_dcp",
    "flatten_query_rows",
    "gather_query_heads",
    "local_seq_lens",
    "merge_dcp_states",
    "min_workspace_bytes",
    "prepare_decode_mla",
    "probe",
    "raise_first",
    "recorded",
    "supports_combination",
    "token_positions",
    "token_slots",
    "validate_dcp_config",
]

_HOME = {
    "Backend": "guards",
    "BmmScales": "scales",
    "Capabilities": "startup",
    "CombineMode": "distributed",
    "DCP": "dcp",
    "Features": "features",
    "FlashInferABI": "abi",
    "FlashInferCompatError": "errors",
    "FlashInferCompatWarning": "errors",
    "FlashInferImportError": "errors",
    "FlashInferNotFoundError": "errors",
    "FlashInferSignatureError": "errors",
    "FlashInferVersionError": "errors",
    "FlatRows": "dcp",
    "InvalidInputError": "errors",
    "LseBase": "features",
    "MLADecoder": "prepared",
    "MLAState": "lse",
    "NotPreparedError": "errors",
    "ParallelConfig": "startup",
    "Parameter": "abi",
    "Reason": "errors",
    "TokenSlots": "dcp",
    "UnsupportedConfigError": "errors",
    "bmm_scales": "scales",
    "capabilities": "startup",
    "causal_bounds": "dcp",
    "check": "guards",
    "combine": "distributed",
    "combine_buffers": "distributed",
    "counter_bytes": "sizes",
    "debug_checks": "debug",
    "decode_mla": "decode",
    "decode_mla_dcp": "decode_dcp",
    "flatten_query_rows": "dcp",
    "gather_query_heads": "distributed",
    "local_seq_lens": "dcp",
    "merge_dcp_states": "lse",
    "min_workspace_bytes": "sizes",
    "prepare_decode_mla": "prepared",
    "probe": "probing",
    "raise_first": "errors",
    "recorded": "releases",
    "supports_combination": "startup",
    "token_positions": "dcp",
    "token_slots": "dcp",
    "validate_dcp_config": "startup",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        value: object = version("fi-dcp-compat")
    elif name in _HOME:
        from importlib import import_module

        value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
