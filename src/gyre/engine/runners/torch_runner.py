"""Runner: one Step on the device. In: rows and a Step. Out: a Flight, which becomes
Sampled when the results are on the host.

`StepRunner` is what the core asks of any runner; `Runner` is the one in plain torch, for every
device. With `tokenwise` it computes token by token, so that a token's bits do not depend on others.
"""

# T tokens of the step, N rows that choose, R rows, V vocabulary, E hidden size

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gyre.engine.kv_cache.pool import KvPool, to_device
from gyre.engine.runners.batch_layout import StepLayout, lay_out
from gyre.engine.runners.device_events import ResultEvent
from gyre.engine.runners.torch_attention import make_attend, make_token_attend
from gyre.engine.sampling.prompt_scoring import Scores, pieces_of, score_prompts
from gyre.engine.sampling.sampler import Rules, SamplerOutput
from gyre.engine.sampling.sampler_state import SamplerState
from gyre.engine.sampling.shard_sampler import ShardSampler
from gyre.engine.scheduler.random import uniforms
from gyre.engine.scheduler.slots import InputBatch
from gyre.engine.scheduler.step import SampledTokens, Step
from gyre.models.decoder import Decoder
from gyre.models.layers.layer import Attend
from gyre.models.tokenwise_forward import TokenwiseForward


class TorchFlight:
    """Results on their way to pinned host memory; on a CPU they are there already, and need no
    arrival."""

    def __init__(
        self,
        choice: SamplerOutput | None,
        rules: Rules | None,
        scores: Scores | None,
        arrival: ResultEvent | None = None,
    ) -> None:
        self._choice = choice
        self._rules = rules
        self._scores = scores
        self._arrival = arrival
        self._packed_3N: Tensor | None = None
        self._top_A2K: Tensor | None = None
        self._scored: Tensor | None = None
        if choice is not None:
            packed = torch.stack(
                [
                    choice.tokens_N.double(),
                    choice.logprobs_N.double(),
                    choice.raw_logprobs_N.double(),
                ]
            )
            self._packed_3N = self._send(packed)
            if choice.best is not None:
                best = choice.best
                self._top_A2K = self._send(
                    torch.cat([best.ids_NK.double(), best.logprobs_NK.double()], dim=1)
                )
        if scores is not None:
            self._scored = self._send(scores.numbers)

    def _send(self, numbers: Tensor) -> Tensor:
        """Start the transfer, which lands in pinned memory; the last one sent marks the arrival."""
        there = numbers.to("cpu", non_blocking=True)
        if numbers.is_cuda:
            assert self._arrival is not None
            self._arrival.mark()
        return there

    def fetch(self) -> SampledTokens:
        """Wait once and copy the results; truncation sets add two copies."""
        if self._arrival is not None:
            self._arrival.wait()
        pieces = ()
        if self._scores is not None and self._scored is not None:
            pieces = pieces_of(self._scores, self._scored.numpy())
        if self._choice is None or self._rules is None or self._packed_3N is None:
            none = np.empty(0, np.float32)
            return SampledTokens(
                tokens=none.astype(np.int32),
                logprobs=none,
                raw_logprobs=none,
                supports={},
                pieces=pieces,
            )
        tokens, logprobs, raw = self._packed_3N.numpy()
        return SampledTokens(
            tokens=tokens.astype(np.int32),
            logprobs=logprobs.astype(np.float32),
            raw_logprobs=raw.astype(np.float32),
            supports=self._fetch_supports(self._choice, self._rules),
            top_logprobs={}
            if self._top_A2K is None
            else _split_top(self._top_A2K.numpy(), self._rules),
            pieces=pieces,
        )

    def _fetch_supports(self, choice: SamplerOutput, rules: Rules) -> dict[int, np.ndarray]:
        if choice.kept_MV is None:
            return {}
        if self._arrival is not None:  # the transfers wait for what was launched since
            self._arrival.mark()
            self._arrival.wait()
        counts = choice.kept_MV.sum(dim=-1).cpu().numpy()
        ids = choice.kept_MV.nonzero()[:, 1].to(torch.int32).cpu().numpy()
        return dict(zip(rules.truncated_places, np.split(ids, np.cumsum(counts)[:-1]), strict=True))


class Runner:
    """Holds the decoder, the KV pool, the rows' sampling rules and each row's last chosen token."""

    def __init__(
        self,
        decoder: Decoder,
        pool: KvPool,
        *,
        max_running: int,
        device: torch.device,
        dtype: torch.dtype,
        rows_at_once: int = 64,
        deadline_s: float,
        tokenwise: bool = False,
        sharded: ShardSampler | None = None,
    ) -> None:
        """Make the runner. `sharded` chooses from this rank's part of the logits; without it, ranks
        gather them."""
        self.decoder = decoder
        self.pool = pool
        self.device = device
        self.dtype = dtype
        self._forward = TokenwiseForward(decoder) if tokenwise else decoder
        self._logits = self._forward.logits if sharded is None else decoder.own_logits
        self._deadline_s = deadline_s  # of a step
        # of logits, where prompts, alternatives or penalties need more than one
        self._rows_at_once = rows_at_once
        self.last_token_R = torch.zeros(max_running, dtype=torch.int64, device=device)
        self._shard = None if sharded is None else sharded.shard
        self._rules = SamplerState(
            decoder.whole_spec.vocab_size, device, rows_at_once=rows_at_once, sharded=sharded
        )

    @torch.inference_mode()
    def launch(self, rows: InputBatch, step: Step) -> TorchFlight:
        """Forward pass, choice of one token for each sampling row, page copies."""
        arrival = ResultEvent(step, self._deadline_s) if self.device.type == "cuda" else None
        layout = lay_out(rows, step, num_kv_heads=self.decoder.spec.num_kv_heads)
        tokens_T = self._input_tokens(rows, step, layout)
        hidden_TE = self._forward.hidden(
            tokens_T, to_device(layout.positions_T, self.device), self._attend(layout)
        )
        if step.copies:
            self.pool.copy_pages(step.copies)
        scores = score_prompts(
            rows,
            step,
            layout.chunk_places_C,
            hidden_TE,
            self._logits,
            rows_at_once=self._rows_at_once,
            shard=self._shard,
        )
        if len(step.sample_rows) == 0:
            return TorchFlight(None, None, scores, arrival)
        if layout.source_N is not None:
            hidden_TE = hidden_TE.index_select(0, to_device(layout.source_N, self.device))
        position_N = step.sample_positions - rows.prompt_R[step.sample_rows]
        uniform_N = to_device(uniforms(rows.key_R[step.sample_rows], position_N), self.device)
        choice, rules = self._rules.choose(self._logits(hidden_TE).float(), rows, step, uniform_N)
        self.last_token_R.index_copy_(0, to_device(step.sample_rows, self.device), choice.tokens_N)
        return TorchFlight(choice, rules, scores, arrival)

    def _attend(self, layout: StepLayout) -> Attend:
        if isinstance(self._forward, TokenwiseForward):
            return make_token_attend(self.pool, layout, device=self.device)
        spec = self.decoder.spec
        return make_attend(
            self.pool,
            layout,
            num_heads=spec.num_heads,
            device=self.device,
            dtype=self.dtype,
            window=spec.window_tokens,
            first_window_layer=spec.first_window_layer,
        )

    def has_moved(self) -> bool:
        """Never: nothing is held by address."""
        return False

    def recapture(self) -> None:
        """There are no graphs."""

    def _input_tokens(self, rows: InputBatch, step: Step, layout: StepLayout) -> Tensor:
        """Known tokens from the host; decoding rows' from the last choice, which only the device
        may know yet."""
        tokens_T = to_device(layout.tokens_T, self.device)
        num_decode = len(step.decode_rows)
        if num_decode == 0:
            return tokens_T
        if len(step.restored_rows):
            restored = rows.tokens_RW[
                step.restored_rows, rows.computed_R[step.restored_rows]
            ].astype(np.int64)
            self.last_token_R.index_copy_(
                0, to_device(step.restored_rows, self.device), to_device(restored, self.device)
            )
        decode_tokens = self.last_token_R.index_select(0, to_device(step.decode_rows, self.device))
        if layout.source_N is None:  # tokens are in the order of the rows
            tokens_T[:num_decode] = decode_tokens
            return tokens_T
        return tokens_T.index_copy_(
            0, to_device(layout.source_N[:num_decode], self.device), decode_tokens
        )


def _split_top(top_A2K: np.ndarray, rules: Rules) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    ids_AK, logprobs_AK = np.split(top_A2K, 2, axis=1)
    pairs = zip(ids_AK.astype(np.int32), logprobs_AK.astype(np.float32), strict=True)
    return dict(zip(rules.top_places, pairs, strict=True))
