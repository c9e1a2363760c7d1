"""Library: the C kernels' structs and functions in ctypes. In: a dtype; an instruction set other
than the processor's best, if wanted. Out: DecoderLibrary or ChecksumLibrary, or Unavailable."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p

import torch
from torch import Tensor

from gyre.kernels.cpu import build
from gyre.kernels.cpu.build import CompiledLibrary, InstructionSet, Unavailable

PARTS = ("attn_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "out", "mlp_norm", "gate_up", "down")
DTYPES = {torch.bfloat16: True, torch.float32: False}
ANY_PROCESSOR = InstructionSet(name="any", features=(), flags=())
CHECKSUM_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes


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
        library = built.functions
        self.instructions = built.instructions
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


class ChecksumLibrary:
    """The function of checksum.c."""

    def __init__(self, built: CompiledLibrary) -> None:
        self.instructions = built.instructions
        self._sum = built.functions.gyre_checksum
        self._sum.restype = c_int64
        self._sum.argtypes = [c_void_p, *[c_int64] * 6, c_void_p, c_int64]

    def sum_words(
        self, words_W: Tensor, start: int, left: int, width: int, columns: int, weights_T: Tensor
    ) -> int:
        """Return the sum of a run, as the torch form does."""
        return self._sum(
            words_W.data_ptr(), words_W.element_size(), len(words_W), start, left, width, columns,
            weights_T.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip


def load_checksum(instructions: InstructionSet | None = None) -> ChecksumLibrary | Unavailable:
    """Return the library, on a processor without the vectors of the others too: compilers vectorize
    it by themselves."""
    built = build.load("checksum.c", bf16=False, instructions=instructions)
    if isinstance(built, Unavailable) and instructions is None:
        built = build.load("checksum.c", bf16=False, instructions=ANY_PROCESSOR)
    return built if isinstance(built, Unavailable) else ChecksumLibrary(built)
