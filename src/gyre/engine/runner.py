"""Runner: one Step on the device. In: roster arrays and a Step. Out: Sampled on the host, after one synchronisation.
Caller: cycle, on the compute thread.
"""

# T tokens of the step, N rows that choose, V vocabulary, E hidden size

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from gyre.engine.attention import KvPool, make_attend, to_device
from gyre.engine.cpu_step import make_cpu_step
from gyre.engine.draws import uniforms
from gyre.engine.layout import lay_out
from gyre.engine.rows import Rows
from gyre.engine.sampler import Choice, Rules, choose, make_rules
from gyre.engine.scheduler import Step
from gyre.engine.settle import Sampled
from gyre.models.decoder import Decoder

NOBODY = np.empty(0, np.float32)


class Runner:
    """Holds the decoder and the KV pool; keeps the rows' sampling rules on the device while the rows stay the same."""

    def __init__(
        self,
        decoder: Decoder,
        pool: KvPool,
        *,
        device: torch.device,
        dtype: torch.dtype,
        emit: Callable[..., None],
        c_kernels: bool,
    ) -> None:
        self.decoder, self.pool, self.device, self.dtype = decoder, pool, device, dtype
        self._cpu = make_cpu_step(decoder, pool, device=device, dtype=dtype, emit=emit) if c_kernels else None
        self._rules: Rules | None = None
        self._rules_of: tuple[int, bytes] | None = None  # row revision and rows that the rules were made for

    @torch.inference_mode()
    def run(self, rows: Rows, step: Step) -> Sampled:
        """Forward pass, choice of one token for each sampling row, page copies."""
        samples = len(step.sample_rows)
        rules = self._rules_for(rows, step.sample_rows) if samples else None
        uniform_N = self._draws(rows, step)
        if self._cpu is not None and (rules is None or rules.is_plain):
            sampled = self._cpu.choose(rows, step, rules.inverse_N if rules else NOBODY, uniform_N)
            self.pool.copy_pages(step.copies)
            return sampled
        logits_NV = self._logits_by_torch(rows, step) if self._cpu is None else self._cpu.logits(rows, step)
        self.pool.copy_pages(step.copies)
        if rules is None:
            return Sampled(tokens=np.empty(0, np.int32), logprobs=NOBODY, raw_logprobs=NOBODY, supports={})
        return _fetch(choose(logits_NV.float(), rules, to_device(uniform_N, self.device)), rules)

    def _logits_by_torch(self, rows: Rows, step: Step) -> Tensor:
        spec = self.decoder.spec
        layout = lay_out(rows, step, num_kv_heads=spec.num_kv_heads)
        attend = make_attend(self.pool, layout, num_heads=spec.num_heads, device=self.device, dtype=self.dtype)
        hidden_TE = self.decoder.hidden(
            to_device(layout.tokens_T, self.device), to_device(layout.positions_T, self.device), attend
        )
        if layout.source_N is not None:
            hidden_TE = hidden_TE.index_select(0, to_device(layout.source_N, self.device))
        return self.decoder.logits(hidden_TE)

    def _draws(self, rows: Rows, step: Step) -> np.ndarray:
        position_N = rows.length_R[step.sample_rows] - rows.prompt_R[step.sample_rows]
        return uniforms(rows.key_R[step.sample_rows], position_N)

    def _rules_for(self, rows: Rows, rows_N: np.ndarray) -> Rules:
        wanted = (rows.revision, rows_N.tobytes())
        if self._rules is None or self._rules_of != wanted:
            self._rules_of = wanted
            self._rules = make_rules(
                rows.temperature_R[rows_N],
                rows.top_k_R[rows_N],
                rows.top_p_R[rows_N],
                rows.min_p_R[rows_N],
                rows.truncated_R[rows_N],
                vocab_size=self.decoder.spec.vocab_size,
                device=self.device,
            )
        return self._rules


def _fetch(choice: Choice, rules: Rules) -> Sampled:
    """Bring the choice to the host in one transfer, and the truncation sets in two more when there are any."""
    packed = torch.stack([choice.tokens_N.double(), choice.logprobs_N.double(), choice.raw_logprobs_N.double()])
    tokens, logprobs, raw = packed.cpu().numpy()
    supports: dict[int, np.ndarray] = {}
    if choice.kept_MV is not None:
        counts = choice.kept_MV.sum(dim=-1).cpu().numpy()
        ids = choice.kept_MV.nonzero()[:, 1].to(torch.int32).cpu().numpy()
        supports = dict(zip(rules.truncated_places, np.split(ids, np.cumsum(counts)[:-1]), strict=True))
    return Sampled(
        tokens=tokens.astype(np.int32),
        logprobs=logprobs.astype(np.float32),
        raw_logprobs=raw.astype(np.float32),
        supports=supports,
    )
