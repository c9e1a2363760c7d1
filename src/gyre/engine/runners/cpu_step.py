"""CPU step: one Step as one call of the C kernels. In: rows and a Step. Out: logits, or sampled
tokens at once when rows use temperature only.

The kernels read the rows' tokens and block tables in place. They read weights and pages by their
present addresses, so these may move or change without notice.
"""

# S sequences of a step, N rows that choose, V vocabulary, F = head dim / 2

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gyre.core.rounding import round_up
from gyre.engine.kv_cache.pool import KvPool
from gyre.engine.scheduler.slots import InputBatch
from gyre.engine.scheduler.step import SampledTokens, Step
from gyre.kernels.cpu.build import Unavailable
from gyre.kernels.cpu.library import PARTS, CModel, CStep, DecoderLibrary, load_decoder
from gyre.kernels.norm import rms_norm
from gyre.kernels.rope import rope_tables
from gyre.models.decoder import Decoder

FIRST_POSITIONS = 1024  # rows of the first rotary table; it doubles when a position is past it


def why_not_c(decoder: Decoder) -> str | None:
    """Return why torch must do the work of a step on a CPU, or None."""
    spec = decoder.spec
    odd = {
        name: size
        for name in ("hidden_size", "mlp_size", "head_dim")
        if (size := getattr(spec, name)) % 2
    }
    if odd:
        return f"sizes must be even, got {odd}"
    library = load_decoder(decoder.dtype)
    return library.reason if isinstance(library, Unavailable) else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepOutput:
    """What a step gave. The logits are overwritten by the next step."""

    sampled: SampledTokens
    logits_NV: Tensor
    hidden_QE: Tensor


class CpuStep:
    """Scratch, rotary tables and argument records, reused between steps. Scratch and logits are no
    component of the ledger: the planner counts them in a rollout's working memory."""

    def __init__(self, decoder: Decoder, pool: KvPool) -> None:
        library = load_decoder(decoder.dtype)
        assert isinstance(library, DecoderLibrary), "ask why_not_c first"
        self._decoder = decoder
        self._pool = pool
        self._library = library
        self.instructions = library.instructions.name
        spec = decoder.spec
        self._model = CModel()
        self._step = CStep()
        model = self._model
        model.layers = spec.num_layers
        model.hidden = spec.hidden_size
        model.mlp = spec.mlp_size
        model.heads = spec.num_heads
        model.kv_heads = spec.num_kv_heads
        model.head_dim = spec.head_dim
        model.vocab = spec.vocab_size
        model.norm_eps = spec.norm_eps
        self._parts = list_parts(decoder)
        self._ends = (decoder.embed.weight, decoder.final_norm.weight, decoder.head_weight)
        self._weights_P = np.zeros(len(self._parts), dtype=np.uint64)  # addresses
        self.scratch = torch.empty(0, dtype=torch.uint8)
        self.logits_buffer = torch.empty(0)
        self._sizes = (0, 0, 0, 0)
        self._cosines, self._sines = self._tables(min(FIRST_POSITIONS, spec.context_tokens))

    def logits(self, rows: InputBatch, step: Step) -> Tensor:
        """Run the step; return logits_NV, overwritten by the next step."""
        row_S, start_S, count_S, source_N = _sequences(rows, step)
        self._run(rows, (row_S, start_S, count_S), source_N, np.empty(0, np.int64))
        return self._last_logits(len(source_N))

    def choose(
        self,
        rows: InputBatch,
        step: Step,
        inverse_N: np.ndarray,
        uniform_N: np.ndarray,
        place_Q: np.ndarray | None = None,
    ) -> StepOutput:
        """Run the step and choose a token per row: greedy where inverse_N (1 / temperature,
        float32) is 0. With place_Q, also give the hidden states of these tokens of the step."""
        row_S, start_S, count_S, source_N = _sequences(rows, step)
        num_samples = len(source_N)
        place_Q = np.empty(0, np.int64) if place_Q is None else place_Q
        token_N = np.empty(num_samples, np.int32)
        logprob_N, raw_N = np.empty(num_samples, np.float32), np.empty(num_samples, np.float32)
        record, decoder = self._step, self._decoder
        record.inverse_N, record.uniform_N = _at(inverse_N), _at(uniform_N)
        record.token_N, record.logprob_N, record.raw_N = _at(token_N), _at(logprob_N), _at(raw_N)
        residual_QE = self._run(rows, (row_S, start_S, count_S), source_N, place_Q, chooses=True)
        return StepOutput(
            sampled=SampledTokens(
                tokens=token_N, logprobs=logprob_N, raw_logprobs=raw_N, supports={}
            ),
            logits_NV=self._last_logits(num_samples),
            hidden_QE=rms_norm(
                residual_QE.to(decoder.dtype), decoder.final_norm.weight, decoder.spec.norm_eps
            ),
        )

    def _last_logits(self, count: int) -> Tensor:
        return self.logits_buffer[: count * self._model.vocab].view(-1, self._model.vocab)

    def _run(
        self,
        rows: InputBatch,
        sequences: tuple[np.ndarray, np.ndarray, np.ndarray],
        source_N: np.ndarray,
        place_Q: np.ndarray,
        *,
        chooses: bool = False,
    ) -> Tensor:
        """Leave logits of source_N behind; return the residual stream of place_Q."""
        (row_S, start_S, count_S), source = sequences, np.concatenate([source_N, place_Q])
        residual_QE = torch.empty(len(place_Q), self._decoder.spec.hidden_size)
        record, pool = self._step, self._pool.tensor
        record.sequences, record.tokens, record.samples = (
            len(row_S),
            int(count_S.sum()),
            len(source),
        )
        record.projected, record.residual_NE = len(source_N), residual_QE.data_ptr()
        record.threads = torch.get_num_threads()
        record.row_S, record.start_S, record.count_S = _at(row_S), _at(start_S), _at(count_S)
        record.tokens_RW, record.width = _at(rows.tokens_RW), rows.tokens_RW.shape[1]
        record.table_RP, record.pages_width = _at(rows.table_RP), rows.table_RP.shape[1]
        record.source_N = _at(source)
        record.pool, record.page_tokens = pool.data_ptr(), rows.page_tokens
        record.layer_stride, record.page_stride = pool.stride(0), pool.stride(1)
        record.chooses = int(chooses)
        self._provide(int((start_S + count_S).max()))
        self._library.step(ctypes.byref(self._model), ctypes.byref(record))
        return residual_QE

    def _provide(self, num_positions: int) -> None:
        """Weights, rotary tables, room for the work and for logits, as this step needs them."""
        model, record = self._model, self._step
        self._weights_P[:] = [0 if part is None else part.data_ptr() for part in self._parts]
        model.weights = _at(self._weights_P)
        model.embed, model.final_norm, model.head = (end.data_ptr() for end in self._ends)
        if num_positions > len(self._cosines):
            self._cosines, self._sines = self._tables(max(num_positions, 2 * len(self._cosines)))
        model.cosines, model.sines = self._cosines.data_ptr(), self._sines.data_ptr()
        sizes = (record.tokens, record.sequences, record.samples, record.threads)
        if sizes != self._sizes:
            needed = self._library.scratch_bytes(ctypes.byref(model), *sizes) + 64
            if needed > self.scratch.numel():
                self.scratch = torch.zeros(needed, dtype=torch.uint8)
            self._sizes = sizes
        if record.projected * model.vocab > self.logits_buffer.numel():
            self.logits_buffer = torch.empty(record.projected * model.vocab)
        record.scratch, record.logits_NV = (
            round_up(self.scratch.data_ptr(), 64),
            self.logits_buffer.data_ptr(),
        )

    def _tables(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin of every position [position, F], rounded as the decoder's own."""
        dtype = self._decoder.dtype
        cos_T1D, sin_T1D = rope_tables(torch.arange(num_positions), self._decoder.inv_freq_F, dtype)
        half = cos_T1D.shape[-1] // 2
        return cos_T1D[:, 0, :half].float().contiguous(), sin_T1D[:, 0, half:].float().contiguous()


def list_parts(decoder: Decoder) -> list[Tensor | None]:
    """Weights of all layers in the order of PARTS."""
    named = dict(decoder.named_parameters())
    names = [
        part.replace("qkv_bias", "qkv.bias") if "bias" in part else f"{part}.weight"
        for part in PARTS
    ]
    return [
        named.get(f"layers.{i}.{name}") for i in range(decoder.spec.num_layers) for name in names
    ]


def _sequences(
    rows: InputBatch, step: Step
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Row, first position and number of tokens of each sequence; and the token that each sampling
    row continues."""
    decode = step.decode_rows
    if not step.chunks:
        count = len(decode)
        return decode, rows.computed_R[decode], np.ones(count, np.int64), np.arange(count)
    row_S = np.concatenate([decode, np.asarray([chunk.row for chunk in step.chunks], np.int64)])
    start_S = np.concatenate(
        [rows.computed_R[decode], np.asarray([chunk.start for chunk in step.chunks], np.int64)]
    )
    count_S = np.ones(len(row_S), np.int64)
    count_S[len(decode) :] = [chunk.count for chunk in step.chunks]
    last_S = np.cumsum(count_S) - 1
    source_N = last_S[np.concatenate([np.arange(len(decode)), len(decode) + step.sample_chunks])]
    return row_S, start_S, count_S, source_N


def _at(array: np.ndarray) -> int:
    assert array.flags.c_contiguous
    return array.__array_interface__["data"][0]  # a fifth of the time of array.ctypes
