"""CPU runner: one Step through the C kernels, done when `launch` returns. In: rows and a Step. Out:
a Flight. Chosen by runners; decode inputs come from the rows, so nothing may be in flight when a
step is launched."""

# N rows that choose, Q prompt tokens scored, C chunks

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from gyre.engine.kv_cache.pool import KvPool
from gyre.engine.runners.cpu_step import CpuStep
from gyre.engine.runners.torch_runner import TorchFlight
from gyre.engine.sampling.prompt_scoring import find_targets, score
from gyre.engine.sampling.sampler_state import SamplerState
from gyre.engine.scheduler.random import uniforms
from gyre.engine.scheduler.slots import InputBatch
from gyre.engine.scheduler.step import Flight, SampledTokens, Step
from gyre.models.decoder import Decoder


class Landed:
    """A step whose results are on the host already."""

    def __init__(self, sampled: SampledTokens) -> None:
        self._sampled = sampled

    def fetch(self) -> SampledTokens:
        return self._sampled


class CpuRunner:
    """Rows that ask for nothing but a temperature are served by one call; others choose by torch,
    on its logits."""

    def __init__(self, decoder: Decoder, pool: KvPool, *, rows_at_once: int) -> None:
        self.decoder = decoder
        self.pool = pool
        self._step = CpuStep(decoder, pool)
        self.instructions = self._step.instructions
        self._rows_at_once = rows_at_once  # of logits, where prompts are scored
        self._rules = SamplerState(
            decoder.spec.vocab_size, decoder.device, rows_at_once=rows_at_once
        )

    @torch.inference_mode()
    def launch(self, rows: InputBatch, step: Step) -> Flight:
        row_N = step.sample_rows
        uniform_N = uniforms(rows.key_R[row_N], step.sample_positions - rows.prompt_R[row_N])
        targets = find_targets(rows, step, _places(step))
        chosen = self._step.choose(
            rows,
            step,
            _inverse(rows.temperature_R[row_N]),
            uniform_N,
            None if targets is None else targets.place_Q,
        )
        self.pool.copy_pages(step.copies)
        ruled_N = rows.has_rules(row_N)
        if targets is None and not ruled_N.any():
            return Landed(chosen.sampled)
        scores = None
        if targets is not None:
            scores = score(
                targets, chosen.hidden_QE, self.decoder.logits, rows_at_once=self._rows_at_once
            )
        if not ruled_N.any():
            pieces = TorchFlight(None, None, scores).fetch().pieces
            return Landed(replace(chosen.sampled, pieces=pieces))
        choice, rules = self._rules.choose(
            chosen.logits_NV, rows, step, torch.from_numpy(uniform_N)
        )
        by_rules = TorchFlight(choice, rules, scores).fetch()
        return Landed(_merge(by_rules, chosen.sampled, ruled_N))

    def has_moved(self) -> bool:
        """Never: the kernels are given the addresses of the moment."""
        return False

    def recapture(self) -> None:
        """There are no graphs."""


def _merge(by_rules: SampledTokens, plain: SampledTokens, ruled_N: np.ndarray) -> SampledTokens:
    """Let rows without rules keep what the kernels chose."""
    return replace(
        by_rules,
        tokens=np.where(ruled_N, by_rules.tokens, plain.tokens),
        logprobs=np.where(ruled_N, by_rules.logprobs, plain.logprobs),
        raw_logprobs=np.where(ruled_N, by_rules.raw_logprobs, plain.raw_logprobs),
    )


def _places(step: Step) -> np.ndarray:
    """Return the position in the step of each chunk's first token, after the decoding tokens."""
    count_C = np.asarray([chunk.count for chunk in step.chunks], dtype=np.int64)
    return len(step.decode_rows) + np.cumsum(count_C) - count_C


def _inverse(temperature_N: np.ndarray) -> np.ndarray:
    """1 / temperature in float32; 0 where greedy."""
    inverse_N = np.zeros(len(temperature_N), dtype=np.float32)
    return np.divide(np.float32(1.0), temperature_N, out=inverse_N, where=temperature_N > 0.0)
