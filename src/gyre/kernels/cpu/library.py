"""Library: the C kernels' structs and functions in ctypes. In: a dtype; an instruction set other
than the processor's best, if wanted. Out: DecoderLibrary, or Unavailable."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p

import torch

from gyre.kernels.cpu import build
from gyre.kernels.cpu.build import CompiledLibrary, InstructionSet, Unavailable

PARTS = ("attn_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "out", "mlp_norm", "gate_up", "down")
DTYPES = {torch.bfloat16: True, torch.float32: False}


class CModel(ctypes.Structure):
    """`Model` of decoder.c."""

    _fields_ = [
        *(
            (name, c_int64)
            for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "mlp", "vocab")
        ),
        ("norm_eps", c_double),
        *(
            (name, c_void_p)
            for name in ("embed", "final_norm", "head", "weights", "cosines", "sines")
        ),
    ]


class CStep(ctypes.Structure):
    """`Step` of decoder.c."""

    _fields_ = [
        *((name, c_int64) for name in ("sequences", "tokens", "samples", "threads", "projected")),
        *((name, c_void_p) for name in ("row_S", "start_S", "count_S", "tokens_RW", "table_RP")),
        *((name, c_int64) for name in ("width", "pages_width")),
        *((name, c_void_p) for name in ("source_N", "pool")),
        *((name, c_int64) for name in ("layer_stride", "page_stride", "page_tokens")),
        *((name, c_void_p) for name in ("logits_NV", "residual_NE")),
        ("chooses", c_int64),
        *(
            (name, c_void_p)
            for name in ("inverse_N", "uniform_N", "token_N", "logprob_N", "raw_N", "scratch")
        ),
    ]


class DecoderLibrary:
    """The functions of decoder.c for one dtype."""

    def __init__(self, built: CompiledLibrary) -> None:
        library, self.instructions = built.functions, built.instructions
        self.scratch_bytes = library.gyre_scratch_bytes
        self.scratch_bytes.restype = c_int64
        self.scratch_bytes.argtypes = [ctypes.POINTER(CModel), c_int64, c_int64, c_int64, c_int64]
        self.step = library.gyre_step
        self.step.restype = None
        self.step.argtypes = [ctypes.POINTER(CModel), ctypes.POINTER(CStep)]


def load_decoder(
    dtype: torch.dtype, instructions: InstructionSet | None = None
) -> DecoderLibrary | Unavailable:
    if dtype not in DTYPES:
        return Unavailable(reason=f"there is none for {dtype}")
    built = build.load("decoder.c", bf16=DTYPES[dtype], instructions=instructions)
    return built if isinstance(built, Unavailable) else DecoderLibrary(built)
