"""Chunks: the trainer's C kernels, on tensors. In: rows of a packed micro-batch on a CPU. Out: new
tensors. The callers use torch instead where `chunks_for` returns None: in float64, at widths that
are not whole vectors, without a compiler."""

# T tokens, E features of a row, R = (H + 2K)·D rows of qkv, J = H + K heads that turn, M mlp size,
# V vocabulary, N rows, W threads

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gyre.core.rounding import round_up
from gyre.kernels.cpu import build
from gyre.kernels.cpu.build import CompiledLibrary, InstructionSet, Unavailable
from gyre.kernels.cpu.library import DTYPES

if TYPE_CHECKING:
    from gyre.kernels.float8 import Amax

WHOLE = 16  # numbers: whole vectors of every instruction set
FUNCTIONS = {  # numbers first, then addresses; "f" marks a float among the numbers
    "gyre_norm": ("iiif", 4),
    "gyre_norm_backward": ("iii", 7),
    "gyre_heads": ("iiiiif", 8),
    "gyre_heads_backward": ("iiiiii", 11),
    "gyre_silu": ("iii", 2),
    "gyre_silu_backward": ("iii", 3),
    "gyre_logprobs": ("iii", 6),
    "gyre_logits_gradient": ("iii", 8),
}


class CAttention(ctypes.Structure):
    """`Attention` of scores.h."""

    _fields_ = [
        *((name, c_int64) for name in ("tokens", "heads", "kv_heads", "dim", "value_stride")),
        *((name, c_void_p) for name in ("q", "k", "v", "out", "log_total")),
        *((name, c_void_p) for name in ("grad_out", "grad_q", "grad_k", "grad_v")),
    ]


def chunks_for(tensor: Tensor, *widths: int, unit: int = WHOLE) -> ChunkKernels | None:
    """Return the kernels for rows like these, whose widths must be whole vectors; None where torch
    is used."""
    if (
        tensor.device.type != "cpu"
        or tensor.dtype not in DTYPES
        or any(width % unit for width in widths)
    ):
        return None
    found = load_chunks(tensor.dtype)
    return found if isinstance(found, ChunkKernels) else None


@functools.cache
def load_chunks(
    dtype: torch.dtype, instructions: InstructionSet | None = None
) -> ChunkKernels | Unavailable:
    if dtype not in DTYPES:
        return Unavailable(reason=f"there is none for {dtype}")
    built = build.load("trainer.c", bf16=DTYPES[dtype], instructions=instructions)
    return built if isinstance(built, Unavailable) else ChunkKernels(built)


class ChunkKernels:
    """The functions of trainer.c for one dtype. None of them computes `amax`."""

    def __init__(self, built: CompiledLibrary) -> None:
        library = built.functions
        self.instructions = built.instructions
        for name, (numbers, addresses) in FUNCTIONS.items():
            function = getattr(library, name)
            kinds = {"i": c_int64, "f": c_float}
            function.restype = None
            function.argtypes = [*(kinds[n] for n in numbers), *[c_void_p] * addresses]
        library.gyre_attention_scratch.restype = c_int64
        library.gyre_attention_scratch.argtypes = [c_int64] * 3
        library.gyre_attention.restype = None
        library.gyre_attention.argtypes = [
            c_int64, ctypes.POINTER(CAttention), c_int64, c_void_p, c_void_p, c_int64, c_int64,
        ]  # fmt: skip
        self._library = library

    def _call(self, name: str, *arguments: Tensor | float | None) -> None:
        """Call a function with the tensors' addresses and keep the tensors alive until it
        returns."""
        for tensor in arguments:
            assert not isinstance(tensor, Tensor) or tensor.is_contiguous(), (
                name,
                tensor.shape,
                tensor.stride(),
            )
        getattr(self._library, name)(
            threads(),
            *(part.data_ptr() if isinstance(part, Tensor) else part for part in arguments),
        )

    def norm(
        self, x_TE: Tensor, weight_E: Tensor, eps: float, amax: Amax | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the normalized rows and rstd with a last axis of 1."""
        x_TE = x_TE.contiguous()
        y_TE, width = torch.empty_like(x_TE), x_TE.shape[-1]
        rstd_T1 = torch.empty(*x_TE.shape[:-1], 1, dtype=torch.float32)
        self._call(
            "gyre_norm", rstd_T1.numel(), width, eps, x_TE, weight_E.contiguous(), y_TE, rstd_T1
        )
        return y_TE, rstd_T1

    def norm_backward(
        self,
        grad_TE: Tensor,
        x_TE: Tensor,
        rstd_T1: Tensor,
        weight_E: Tensor,
        through_TE: Tensor | None,
        amax: Amax | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of x (plus through_TE) and of the weight."""
        grad_TE, x_TE, width = grad_TE.contiguous(), x_TE.contiguous(), x_TE.shape[-1]
        through_TE = None if through_TE is None else through_TE.contiguous()
        grad_x_TE, partial_WE = torch.empty_like(x_TE), torch.zeros(threads(), width)
        self._call(
            "gyre_norm_backward",
            rstd_T1.numel(),
            width,
            grad_TE,
            x_TE,
            weight_E.contiguous(),
            rstd_T1.contiguous(),
            through_TE,
            grad_x_TE,
            partial_WE,
        )
        return grad_x_TE, partial_WE.sum(0).to(weight_E.dtype)

    def heads(
        self,
        qkv_TR: Tensor,
        q_norm_D: Tensor | None,
        k_norm_D: Tensor | None,
        cos_T1D: Tensor,
        sin_T1D: Tensor,
        heads: tuple[int, int],
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return q_THD and k_TKD, normalized and rotated, and rstd_TJ1."""
        tokens, dim = len(qkv_TR), cos_T1D.shape[-1]
        q_THD, k_TKD = (torch.empty(tokens, count, dim, dtype=qkv_TR.dtype) for count in heads)
        rstd_TJ1 = (
            None if q_norm_D is None else torch.empty(tokens, sum(heads), 1, dtype=torch.float32)
        )
        self._call(
            "gyre_heads", tokens, *heads, dim, eps,
            qkv_TR, q_norm_D, k_norm_D, cos_T1D, sin_T1D, q_THD, k_TKD, rstd_TJ1,
        )  # fmt: skip
        return q_THD, k_TKD, rstd_TJ1

    def heads_backward(
        self,
        grads: Sequence[Tensor],
        qkv_TR: Tensor,
        rstd_TJ1: Tensor | None,
        q_norm_D: Tensor | None,
        k_norm_D: Tensor | None,
        cos_T1D: Tensor,
        sin_T1D: Tensor,
        heads: tuple[int, int],
        amax: Amax | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the gradients of qkv and of both norm weights."""
        grad_q, grad_k, grad_v = (grad.contiguous() for grad in grads)
        dim, grad_qkv_TR = cos_T1D.shape[-1], torch.empty_like(qkv_TR)
        partial_W2D = torch.zeros(threads(), 2, dim)
        self._call(
            "gyre_heads_backward",
            len(qkv_TR),
            *heads,
            dim,
            heads[1] * dim,
            grad_q,
            grad_k,
            grad_v,
            qkv_TR,
            q_norm_D,
            k_norm_D,
            rstd_TJ1,
            cos_T1D,
            sin_T1D,
            grad_qkv_TR,
            partial_W2D,
        )
        if q_norm_D is None:
            return grad_qkv_TR, None, None
        grad_norms_2D = partial_W2D.sum(0).to(qkv_TR.dtype)
        return grad_qkv_TR, grad_norms_2D[0], grad_norms_2D[1]

    def silu(self, gate_up_T2M: Tensor, amax: Amax | None = None) -> Tensor:
        tokens, width = len(gate_up_T2M), gate_up_T2M.shape[1] // 2
        product_TM = torch.empty(tokens, width, dtype=gate_up_T2M.dtype)
        self._call("gyre_silu", tokens, width, gate_up_T2M, product_TM)
        return product_TM

    def silu_backward(
        self, grad_TM: Tensor, gate_up_T2M: Tensor, amax: Amax | None = None
    ) -> tuple[Tensor, None]:
        """Return the gradient of gate_up, without recomputing the product."""
        grad_gate_up_T2M, grad_TM = torch.empty_like(gate_up_T2M), grad_TM.contiguous()
        self._call("gyre_silu_backward", *grad_TM.shape, grad_TM, gate_up_T2M, grad_gate_up_T2M)
        return grad_gate_up_T2M, None

    def logprobs(
        self, logits_NV: Tensor, temperature_N: Tensor, targets_N: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the targets' log-probs, entropies, and log Σ exp of each row."""
        outputs = [torch.empty(len(logits_NV), dtype=torch.float32) for _ in range(3)]
        given = (logits_NV, temperature_N.contiguous(), targets_N.contiguous())
        self._call("gyre_logprobs", *logits_NV.shape, *given, *outputs)
        return outputs[0], outputs[1], outputs[2]

    def logits_gradient(
        self,
        logits_NV: Tensor,
        temperature_N: Tensor,
        targets_N: Tensor,
        total_N: Tensor,
        scale_N: Tensor,
        at_target_N: Tensor,
        bonus_N: Tensor | None,
        entropy_N: Tensor | None,
        start: int,
    ) -> None:
        """Overwrite logits of the whole vocabulary by their gradient, computed from
        `kernels.logprobs.Slopes`."""
        assert start == 0
        rows = (
            targets_N,
            total_N,
            *(None if row is None else row.float() for row in (scale_N, at_target_N, bonus_N)),
        )
        given = (
            row if row is None else row.contiguous() for row in (temperature_N, *rows, entropy_N)
        )
        self._call("gyre_logits_gradient", *logits_NV.shape, logits_NV, *given)

    def attention(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, offsets: Tensor, longest: int
    ) -> tuple[Tensor, Tensor]:
        """Return attended values and log_total_TH, for the backward pass."""
        out_THD, log_total_TH = (
            torch.empty_like(q_THD),
            torch.empty(q_THD.shape[:2], dtype=torch.float32),
        )
        record = attention_record(q_THD, k_TKD, v_TKD, out_THD, log_total_TH)
        self._attend(record, offsets, longest, backward=False)
        return out_THD, log_total_TH

    def attention_backward(
        self,
        grad_THD: Tensor,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        out_THD: Tensor,
        log_total_TH: Tensor,
        offsets: Tensor,
        longest: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        record = attention_record(q_THD, k_TKD, v_TKD, out_THD, log_total_TH)
        grads = (
            torch.empty_like(q_THD),
            torch.empty_like(k_TKD),
            torch.empty(v_TKD.shape, dtype=v_TKD.dtype),
        )
        grad_THD = grad_THD.contiguous()
        parts = (grad_THD, *grads)
        record.grad_out, record.grad_q, record.grad_k, record.grad_v = (
            part.data_ptr() for part in parts
        )
        self._attend(record, offsets, longest, backward=True)
        return grads

    def _attend(self, record: CAttention, offsets: Tensor, longest: int, *, backward: bool) -> None:
        size = self._library.gyre_attention_scratch(
            longest, record.dim, record.heads // record.kv_heads
        )
        scratch = torch.empty(threads() * size + 64, dtype=torch.uint8)
        begin = round_up(scratch.data_ptr(), 64)
        self._library.gyre_attention(
            threads(),
            ctypes.byref(record),
            len(offsets) - 1,
            offsets.data_ptr(),
            begin,
            size,
            int(backward),
        )


def attention_record(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, out_THD: Tensor, log_total_TH: Tensor
) -> CAttention:
    """Build the attention record. q and k are dense; values may be part of wider rows."""
    assert (
        q_THD.is_contiguous()
        and k_TKD.is_contiguous()
        and v_TKD.stride()[1:] == (q_THD.shape[2], 1)
    )
    addresses = (part.data_ptr() for part in (q_THD, k_TKD, v_TKD, out_THD, log_total_TH))
    return CAttention(*q_THD.shape[:2], k_TKD.shape[1], q_THD.shape[2], v_TKD.stride(0), *addresses)


def threads() -> int:
    return torch.get_num_threads()
