"""SamplerState: the rows' sampling rules as tensors on the device, made again only when rows come
or go, and choosing by them. In: rows, logits. Out: a Choice.
"""

# N rows that choose, L rows that look back at their tokens, W widest of those, V vocabulary

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gyre.engine.kv_cache.pool import to_device
from gyre.engine.sampling.logits_processors import Past, Shaping, make_shaping
from gyre.engine.sampling.sampler import Rules, SamplerOutput, choose, make_rules
from gyre.engine.sampling.shard_sampler import ShardSampler
from gyre.engine.sampling.token_history import History
from gyre.engine.scheduler.slots import InputBatch
from gyre.engine.scheduler.step import Step


class SamplerState:
    """Keeps the last Rules, and the token histories of rows whose rules look back."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        *,
        rows_at_once: int,
        sharded: ShardSampler | None = None,
    ) -> None:
        """Make the state. With `sharded`, logits are this rank's part, and all ranks choose
        together."""
        self._vocab_size = vocab_size
        self._device = device
        self._choose = choose if sharded is None else sharded.choose
        self._own_ids = None if sharded is None else sharded.shard.ids
        # of logits, where alternatives or penalties need more than one
        self._rows_at_once = rows_at_once
        self._history = History(device)
        # the history of the rows that the rules were made for
        self._back_slots: Tensor | None = None
        self._rules: Rules | None = None
        # row revision and rows that the rules were made for
        self._rules_of: tuple[int, bytes] | None = None

    def choose(
        self, logits_NV: Tensor, rows: InputBatch, step: Step, uniform_N: Tensor
    ) -> tuple[SamplerOutput, Rules]:
        """Choose one token for each sampling row; logits are float32. Rows that look back remember
        what they chose."""
        rules = self._rules_for(rows, step.sample_rows)
        shaping = rules.shaping
        if shaping is None:
            return self._choose(logits_NV, rules, uniform_N), rules
        chosen_N = to_device(step.sample_positions - rows.prompt_R[step.sample_rows], self._device)
        if self._back_slots is None or shaping.back_L is None:
            return self._choose(logits_NV, rules, uniform_N, chosen_N=chosen_N), rules
        back = np.asarray(shaping.back_places)
        at_L = step.sample_positions[back]
        length_L = to_device(at_L, self._device)
        past = Past(
            ids_LW=self._history.ids(self._back_slots, int(at_L.max())),
            prompt_L1=to_device(rows.prompt_R[step.sample_rows[back]], self._device)[:, None],
            length_L1=length_L[:, None],
        )
        choice = self._choose(logits_NV, rules, uniform_N, chosen_N=chosen_N, past=past)
        tokens_L = choice.tokens_N[shaping.places_M[shaping.back_L]]
        self._history.append(self._back_slots, length_L, tokens_L)
        return choice, rules

    def _rules_for(self, rows: InputBatch, rows_N: np.ndarray) -> Rules:
        wanted = (rows.revision, rows_N.tobytes())
        if self._rules is None or self._rules_of != wanted:
            self._rules_of = wanted
            shaping = self._shaping_for(rows, rows_N)
            self._rules = make_rules(
                rows.temperature_R[rows_N],
                rows.top_k_R[rows_N],
                rows.top_p_R[rows_N],
                rows.min_p_R[rows_N],
                rows.truncated_R[rows_N],
                vocab_size=self._vocab_size,
                device=self._device,
                shaping=shaping,
                num_top_N=rows.num_top_R[rows_N],
                rows_at_once=self._rows_at_once,
            )
        return self._rules

    def _shaping_for(self, rows: InputBatch, rows_N: np.ndarray) -> Shaping | None:
        self._back_slots = None
        places = np.flatnonzero(rows.shaped_R[rows_N]).tolist()
        if not places:
            return None
        asking = [rows.sequence_at(int(rows_N[place])) for place in places]
        shaping = make_shaping(
            places,
            [(sequence.request.sampling, sequence.stop_ids) for sequence in asking],
            device=self._device,
            own=self._own_ids,
        )
        if shaping.back_places:
            self._back_slots = self._history.slots(rows, rows_N[np.asarray(shaping.back_places)])
        return shaping
