"""Inputs that decode_mla refuses although neither FlashInfer's Python nor tvm-ffi does."""

from __future__ import annotations

from .refusals import FP16, KERNELS, LAUNCHER, MONO, Entry, Line

MLA_DECODE = f"{MONO}/mla_decode.py"
KERNEL_PARAMS = "data/include/flashinfer/trtllm/fmha/kernelParams.h"
ALLOCATOR = "data/include/flashinfer/allocator.h"
GEN, DSL = "trtllm-gen", "cute-dsl"

# fmt: off
INPUTS_THAT_RUN = (
    Entry(
        GEN, ("strided query", "strided cache"), "wrong",
        "a TMA descriptor has no stride for the last dimension",
        (Line("0.6.12", KERNEL_PARAMS, 606, "ignores the stride of the first dimension"),
         Line("0.7.4", KERNEL_PARAMS, 626, "ignores the stride of the first dimension")),
    ),
    Entry(
        GEN, ("strided out",), "wrong",
        "the launcher hands on no stride of the output",
        (Line("0.6.12", LAUNCHER, 426, "out.data_ptr(),"),
         Line("0.7.4", LAUNCHER, 707, "out.data_ptr(),")),
    ),
    Entry(
        GEN, ("unaligned query", "unaligned cache", "unaligned out"), "late",
        "CUDA makes no TMA descriptor of the address",
        (Line("0.6.12", KERNEL_PARAMS, 631, "Failed to initialize the TMA descriptor"),),
    ),
    Entry(
        GEN, ("int64 block table", "row-sliced block table", "strided block table"), "wrong",
        "the launcher casts the pointer to int*, rows as long as the table is wide",
        (Line("0.6.12", LAUNCHER, 427, "static_cast<int*>(block_tables.data_ptr())"),
         Line("0.6.12", LAUNCHER, 338, "max_num_blocks_per_seq = block_tables.size(-1)"),
         Line("0.7.4", LAUNCHER, 710, "static_cast<int*>(block_tables.data_ptr())")),
    ),
    Entry(
        GEN, ("int64 lengths", "strided lengths"), "wrong",
        "the launcher casts the pointer to int*",
        (Line("0.6.12", LAUNCHER, 428, "static_cast<int*>(seq_lens.data_ptr())"),
         Line("0.7.4", LAUNCHER, 711, "static_cast<int*>(seq_lens.data_ptr())")),
    ),
    Entry(
        GEN, ("strided offsets",), "wrong",
        "the launcher casts the pointer to int*",
        (Line("0.6.12", LAUNCHER, 324, "static_cast<int*>(cum_seq_lens_q.value().data_ptr())"),
         Line("0.7.4", LAUNCHER, 564, "static_cast<int*>(cum_seq_lens_q.value().data_ptr())")),
        since="0.6.14",
    ),
    Entry(
        GEN, ("strided sinks", "sinks of another length"), "wrong",
        "the launcher reads a float* of as many as there are heads",
        (Line("0.6.12", LAUNCHER, 392, "static_cast<float*>(attention_sinks.value().data_ptr())"),
         Line("0.7.4", LAUNCHER, 632, "static_cast<float*>(attention_sinks.value().data_ptr())")),
    ),
    Entry(
        GEN, ("bf16 sinks",), "late",
        "the launcher takes float32 alone",
        (Line("0.6.12", LAUNCHER, 391, "attention_sinks must be a float tensor"),
         Line("0.7.4", LAUNCHER, 631, "attention_sinks must be a float tensor")),
    ),
    Entry(
        GEN, ("two sinks",), "late",
        "the launcher takes one tensor, not a list",
        (Line("0.6.12", LAUNCHER, 307, "Optional<TensorView> attention_sinks"),
         Line("0.7.4", LAUNCHER, 545, "Optional<TensorView> attention_sinks")),
    ),
    Entry(
        GEN, ("two scales",), "wrong",
        "the launcher reads the first number",
        (Line("0.6.12", LAUNCHER, 402, "bmm1_scale.as<ffi::Tensor>()"),),
    ),
    Entry(
        GEN, ("max_seq_len of 0", "negative max_seq_len"), "undefined",
        "the launcher divides by a number of CTAs that comes to 0",
        (Line("0.7.4", KERNELS, 914, "ceil_div(params.mMaxSeqLenKv, 256)"),
         Line("0.7.4", KERNELS, 923, "ceil_div(params.mMaxSeqLenKv, numCtasPerSeqKv)")),
    ),
    Entry(
        GEN, ("max_seq_len as a tensor",), "late",
        "the launcher takes an int64_t; with 0.6.13 the tuner comes before it, and refuses",
        (Line("0.6.12", LAUNCHER, 303, "int64_t max_kv_len"),),
        until="0.6.12",
    ),
    Entry(
        GEN, ("max_seq_len as a tensor",), "late",
        "the launcher takes an int64_t; an explicit trtllm-gen has left the tuner again",
        (Line("0.7.4", LAUNCHER, 541, "int64_t max_kv_len"),),
        since="0.7.4",
    ),
    Entry(
        GEN, ("workspace of 1 KiB",), "late",
        "the launcher takes its scratch out of it",
        (Line("0.6.12", LAUNCHER, 199, "float_allocator(workspace_buffer, workspace_size)"),
         Line("0.7.4", ALLOCATOR, 68, "Buffer overflow when allocating memory")),
    ),
    Entry(
        GEN, ("unaligned counters",), "late",
        "the launcher checks the address, the host from 0.6.16 on",
        (Line("0.6.15", LAUNCHER, 242, "counter buffer must be 16-byte aligned"),),
        since="0.6.15", until="0.6.15.post1",
    ),
    Entry(
        GEN, ("lse without return_lse",), "wrong",
        "the buffer is left as it was",
        (Line("0.6.12", "mla/_core.py", 1284, "lse = None"),),
    ),
    Entry(
        GEN, ("compact query of too many tokens",), "wrong",
        "no CTA is launched for tokens beyond max_q_len",
        (Line("0.6.14", KERNELS, 425, "numCtasPerSeqQ = (params.mMaxSeqLenQ"),),
        since="0.6.14",
    ),
    Entry(
        DSL, ("compact query of too many tokens",), "wrong",
        "no CTA is launched for tokens beyond max_q_len, which the kernel is compiled for",
        (Line("0.7.4", "mla/_core.py", 3396, "if max_q_len is None:"),),
        since="0.6.16",
    ),
    Entry(
        GEN, ("fp8 cache without its scale",), "wrong",
        "the default is 1.0 whatever the cache was scaled by",
        (Line("0.6.12", "mla/_core.py", 1067, "bmm2_scale: Union[float, torch.Tensor] = 1.0"),),
    ),
    Entry(
        DSL, ("fp8 cache without its scale",), "wrong",
        "the default is 1.0 whatever the cache was scaled by",
        (Line("0.6.12", "mla/_core.py", 1067, "bmm2_scale: Union[float, torch.Tensor] = 1.0"),),
    ),
    Entry(
        GEN, ("scale of 0", "scale that is no number"), "wrong",
        "no release looks at the number", ("no check of a float scale in 0.6.12 to 0.7.4",),
    ),
    Entry(
        DSL, ("scale of 0", "scale that is no number"), "wrong",
        "no release looks at the number", ("no check of a float scale in 0.6.12 to 0.7.4",),
    ),
    Entry(
        DSL, ("query of fewer requests",), "late",
        "the compiled kernel has one batch for query and table; the host looks from 0.6.13 on",
        (Line("0.6.12", MLA_DECODE, 187, "(sym_batch, sym_seq_q, sym_heads, sym_latent)"),
         Line("0.6.12", MLA_DECODE, 217, "(sym_batch, sym_page_count)")),
        until="0.6.12",
    ),
    Entry(
        DSL, ("cache of another width",), "late",
        "the compiled kernel has one rope size for query and cache; the host looks from 0.6.13 on",
        (Line("0.6.12", MLA_DECODE, 194, "(sym_batch, sym_seq_q, sym_heads, sym_rope)"),
         Line("0.6.12", MLA_DECODE, 210, "(sym_kv_batch, sym_seq_kv, sym_rope)")),
        until="0.6.12",
    ),
    Entry(
        DSL, ("flat out",), "late",
        "the compiled kernel has four dimensions; the host looks from 0.6.13 on",
        (Line("0.6.12", MLA_DECODE, 224, "(sym_batch, sym_seq_q, sym_heads, sym_latent)"),),
        until="0.6.12",
    ),
    Entry(
        DSL, ("fp16 out",), "stricter",
        "0.6.12 writes fp16 too; decode_mla keeps to what it would allocate",
        (Line("0.6.12", FP16, 3512, "out_dtype not in [cutlass.Float16, cutlass.BFloat16]"),),
        until="0.6.12",
    ),
    Entry(
        DSL, ("max_seq_len as a tensor",), "stricter",
        "0.6.12 takes it, after a synchronisation",
        (Line("0.6.12", MLA_DECODE, 391, "if max_seq_len <= 0:"),),
        until="0.6.12",
    ),
    Entry(
        DSL, ("strided query",), "stricter",
        "the host copies it on each call",
        (Line("0.6.16", MLA_DECODE, 553, "query = query.contiguous()"),
         Line("0.7.4", MLA_DECODE, 723, "query = query.contiguous()")),
        since="0.6.16",
    ),
    Entry(
        DSL, ("strided offsets",), "stricter",
        "the host copies them on each call",
        (Line("0.6.16", MLA_DECODE, 541, "cum_seq_lens_q = cum_seq_lens_q.contiguous()"),
         Line("0.7.4", MLA_DECODE, 647, "cum_seq_lens_q = cum_seq_lens_q.contiguous()")),
        since="0.6.16",
    ),
    Entry(
        DSL, ("int64 lengths",), "stricter",
        "the host converts them on each call",
        (Line("0.6.12", MLA_DECODE, 426, "seq_lens.to(torch.int32)"),
         Line("0.7.4", MLA_DECODE, 856, "seq_lens.to(torch.int32)")),
    ),
    Entry(
        DSL, ("bf16 sinks",), "stricter",
        "the host converts them on each call",
        (Line("0.6.12", "cute_dsl/attention/wrappers/batch_mla.py", 862, ".to(torch.float32)"),
         Line("0.7.4", "cute_dsl/attention/wrappers/batch_mla.py", 898, ".to(torch.float32)")),
    ),
    Entry(
        GEN, ("offsets without max_q_len",), "stricter",
        "the host copies the offsets back, which no capture takes",
        (Line("0.6.14", "mla/_core.py", 2894, "cum_seq_lens_q.cpu()"),
         Line("0.7.4", "mla/_core.py", 3397, "cum_seq_lens_q.cpu()")),
        since="0.6.14",
    ),
    Entry(
        DSL, ("offsets without max_q_len",), "stricter",
        "the host copies the offsets back, which no capture takes",
        (Line("0.6.16", "mla/_core.py", 3084, "cum_seq_lens_q.cpu()"),
         Line("0.7.4", "mla/_core.py", 3397, "cum_seq_lens_q.cpu()")),
        since="0.6.16",
    ),
    Entry(
        DSL, ("lse without return_lse",), "stricter",
        "the buffer is written, and nothing returned",
        (Line("0.6.13", MLA_DECODE, 548, "if return_lse:"),),
        since="0.6.13",
    ),
    Entry(
        GEN, ("cache with gaps between tokens",), "stricter",
        "the launcher hands the stride on; no backend documents it",
        (Line("0.6.12", LAUNCHER, 351, "key_cache.stride(-2)"),
         Line("0.7.4", LAUNCHER, 591, "key_cache.stride(-2)")),
    ),
    Entry(
        DSL, ("cache with gaps between tokens",), "stricter",
        "the compiled kernel takes any stride; no backend documents it",
        (Line("0.6.12", MLA_DECODE, 204, "stride=(cute.sym_int(), cute.sym_int(), 1)"),),
    ),
    Entry(
        GEN, ("unaligned block table", "unaligned lengths"), "stricter",
        "an int* needs four bytes; the other backend of auto asserts sixteen",
        (Line("0.6.12", LAUNCHER, 427, "static_cast<int*>"),),
    ),
    Entry(
        GEN, ("strided lse", "unaligned lse"), "stricter",
        "the launcher hands the strides on; the other backend of auto refuses them",
        (Line("0.6.12", LAUNCHER, 310, "Optional<TensorView> lse, int64_t lse_stride_tokens"),),
        since="0.6.13",
    ),
    Entry(
        GEN, ("lengths in two dimensions", "too many lengths"), "stricter",
        "the launcher reads as many as there are requests; the other backend of auto refuses more",
        (Line("0.6.12", LAUNCHER, 428, "static_cast<int*>(seq_lens.data_ptr())"),),
    ),
    Entry(
        GEN, ("unaligned workspace", "strided workspace"), "stricter",
        "the launcher aligns its parts itself; the other backend of auto refuses both",
        (Line("0.7.4", ALLOCATOR, 61, "std::align(alignment, size, cur_ptr, remaining_space)"),),
    ),
)
# fmt: on
