"""Cases for the objectives' tests: random sequences, their chunks as LossInputs, and slow loss
functions written as loops over sequences and tokens, straight from the papers, in float64. In: a
seed. Out: tensors and scalars.

The slow functions share no code with `gyre.objectives`: they follow each paper's own equation,
sequence by sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from gyre.objectives.inputs import LossInputs


@dataclass
class Sequence:
    """One sequence's targets; everything float64 [length]."""

    logprobs: Tensor
    old: Tensor
    behavior: Tensor
    reference: Tensor
    advantages: Tensor
    values: Tensor
    old_values: Tensor
    returns: Tensor
    entropy: Tensor
    score: Tensor  # scalar
    leaves: tuple[Tensor, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.leaves = (self.logprobs, self.values, self.score, self.entropy)

    def __len__(self) -> int:
        return len(self.logprobs)

    def clear(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None

    def grads(self) -> np.ndarray:
        return np.concatenate(
            [
                (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad).numpy().reshape(-1)
                for leaf in self.leaves
            ]
        )


def random_sequences(
    seed: int, lengths: list[int], *, per_token: bool = False, spread: float = 0.4
) -> list[Sequence]:
    rng = np.random.default_rng(seed)
    made = []
    for length in lengths:
        logprobs = -rng.exponential(1.0, length)
        noisy = lambda scale, base=logprobs: base + rng.normal(0.0, scale, len(base))  # noqa: E731
        advantages = rng.normal(0.0, 1.0, length) if per_token else np.full(length, rng.normal())
        values = rng.normal(0.0, 1.0, length)
        made.append(
            Sequence(
                logprobs=torch.tensor(logprobs, requires_grad=True),
                old=torch.tensor(noisy(spread)),
                behavior=torch.tensor(noisy(spread)),
                reference=torch.tensor(noisy(spread)),
                advantages=torch.tensor(advantages),
                values=torch.tensor(values, requires_grad=True),
                old_values=torch.tensor(values + rng.normal(0.0, 0.3, length)),
                returns=torch.tensor(rng.normal(0.0, 1.0, length)),
                entropy=torch.tensor(rng.exponential(1.0, length), requires_grad=True),
                score=torch.tensor(rng.normal(), dtype=torch.float64, requires_grad=True),
            )
        )
    return made


def chunk_inputs(sequences: list[Sequence], *, old: bool = True) -> LossInputs:
    """Pack sequences into one chunk. As pairs, neighbors are (chosen, rejected)."""
    lengths = [len(s) for s in sequences]
    cat = lambda name: torch.cat([getattr(s, name) for s in sequences])  # noqa: E731
    return LossInputs(
        num_sequences=len(sequences),
        sequence_index_N=torch.repeat_interleave(
            torch.arange(len(sequences)), torch.tensor(lengths)
        ),
        target_counts_S=torch.tensor(lengths),
        logprobs_N=cat("logprobs"),
        entropy_N=cat("entropy"),
        advantages_N=cat("advantages"),
        behavior_logprobs_N=cat("behavior"),
        old_logprobs_N=cat("old") if old else None,
        reference_logprobs_N=cat("reference"),
        values_N=cat("values"),
        old_values_N=cat("old_values"),
        returns_N=cat("returns"),
        scores_S=torch.stack([s.score for s in sequences]),
        chosen_P=torch.arange(0, len(sequences) - 1, 2),
        rejected_P=torch.arange(1, len(sequences), 2),
    )


def number(tensor: Tensor | float) -> float:
    """The stop-gradient of the papers: a value that nothing flows through."""
    return tensor.item() if isinstance(tensor, Tensor) else tensor


def constant(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def slow_clip(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    """PPO eq. 7 for one ratio, written as cases: no gradient where the clipped branch is the
    smaller one."""
    if advantage >= 0:
        objective = (
            ratio * advantage if number(ratio) <= 1.0 + high else constant((1.0 + high) * advantage)
        )
    else:
        objective = (
            ratio * advantage if number(ratio) >= 1.0 - low else constant((1.0 - low) * advantage)
        )
    return -objective


def slow_kl(estimator: str, logprob: Tensor, reference: float) -> Tensor:
    """Schulman's three estimators for one token; k3_plus by its definition: value of k3, gradient
    of k2."""
    log_r = reference - logprob
    k2, k3 = log_r**2 / 2, torch.exp(log_r) - 1 - log_r
    if estimator == "k3_plus":
        return k2 + number(k3) - number(k2)
    return {"k1": -log_r, "k2": k2, "k3": k3}[estimator]


def slow_bounded_kl(config, logprob: Tensor, reference: float) -> Tensor:
    """Past kl_clamp the estimate is that constant; k3_plus keeps k2's gradient there (verl)."""
    kl = slow_kl(config.kl_estimator, logprob, reference)
    if not config.kl_clamp or abs(number(kl)) <= config.kl_clamp:
        return kl
    if config.kl_estimator == "k3_plus":
        return kl - number(kl) + config.kl_clamp
    return constant(config.kl_clamp)


def slow_average(per_sequence: list[list[Tensor]], aggregation: str, fixed_length: int) -> Tensor:
    """Mean of token losses over a whole batch, from the words of each paper."""
    live = [tokens for tokens in per_sequence if tokens]
    if aggregation == "token":
        flat = [loss for tokens in live for loss in tokens]
        return torch.stack(flat).sum() / len(flat)
    if aggregation == "sequence":
        return torch.stack(
            [torch.stack(tokens).sum() / len(tokens) for tokens in live]
        ).sum() / len(live)
    return torch.stack([torch.stack(tokens).sum() / fixed_length for tokens in live]).sum() / len(
        live
    )


def slow_weight(config, s: Sequence, t: int) -> float:
    """Truncated importance weight of a token, 0 outside the band; the engine's log-probs are
    `behavior`."""
    gaps = [number(gap) for gap in s.old - s.behavior]
    ratios = {
        "token": math.exp(gaps[t]),
        "sequence": math.exp(sum(gaps)),
        "sequence_mean": math.exp(sum(gaps) / len(s)),
    }
    low, high = config.rejection_band
    if config.rejection_level != "none" and not low <= ratios[config.rejection_level] <= high:
        return 0.0
    return min(ratios[config.importance_level], config.tis_cap) if config.tis_cap else 1.0


def slow_policy(config, sequences: list[Sequence]) -> Tensor:
    """GRPO (2402.03300 eq. 3), DAPO (2503.14476 eq. 8), Dr. GRPO (2503.20783), GSPO (2507.18071 eq.
    5), CISPO (2506.13585 eq. 4), REINFORCE; truncated importance weights, the off-policy sequence
    mask (2512.02556), chi^2 to the engine, KL in the loss, entropy bonus."""
    per_sequence: list[list[Tensor]] = []
    corrects = config.tis_cap > 0.0 or config.rejection_level != "none"
    for s in sequences:
        tokens: list[Tensor] = []
        if config.ratio == "sequence" and len(s):  # eq. 7
            whole = torch.exp((s.logprobs - s.old).sum() / len(s))
            alike = not corrects and len(set(s.advantages.tolist())) == 1
        for t in range(len(s)):
            advantage = number(s.advantages[t])
            token_ratio = torch.exp(s.logprobs[t] - s.old[t])
            if config.ratio == "sequence" and alike:  # eq. 5
                ratio = whole
            # eq. 14, GSPO-token, where tokens of a sequence differ
            elif config.ratio == "sequence":
                ratio = number(whole) * torch.exp(s.logprobs[t] - number(s.logprobs[t]))
            else:
                ratio = token_ratio
            low, high = config.clip_low, config.clip_high
            if config.surrogate == "clip":
                loss = slow_clip(ratio, advantage, low, high)
                if (
                    config.dual_clip
                    and advantage < 0
                    and number(loss) > config.dual_clip * -advantage
                ):
                    loss = constant(config.dual_clip * -advantage)
            elif config.surrogate == "cispo":
                loss = -min(max(number(ratio), 1 - low), 1 + high) * advantage * s.logprobs[t]
            else:
                loss = -advantage * s.logprobs[t]
            loss = loss * slow_weight(config, s, t)
            gaps = [number(s.behavior[i]) - number(s.logprobs[i]) for i in range(len(s))]
            delta = config.off_policy_mask_threshold
            if delta and advantage < 0 and sum(gaps) / len(s) > delta:
                loss = 0.0 * s.logprobs[t]
            if config.chi2_coef:
                ratio_to_engine = torch.exp(s.logprobs[t] - number(s.behavior[t]))
                loss = loss + config.chi2_coef * (ratio_to_engine - 1) ** 2
            if config.kl_coef and config.kl_in == "loss":
                kl = slow_bounded_kl(config, s.logprobs[t], number(s.reference[t]))
                # 2512.02556: the plain ratio, whose gradient counts, but not at a bound
                if config.kl_ratio_weighted:
                    weight = whole if config.ratio == "sequence" else token_ratio
                    kl = kl * (weight if kl.requires_grad else number(weight))
                loss = loss + config.kl_coef * kl
            if config.entropy_coef:  # by no ratio and no correction
                loss = loss - config.entropy_coef * s.entropy[t]
            tokens.append(loss)
        per_sequence.append(tokens)
    return slow_average(per_sequence, config.aggregation, config.fixed_length_tokens)


def slow_values(config, sequences: list[Sequence]) -> Tensor:
    """Half of the larger of the plain and the clipped squared error."""
    per_sequence = []
    for s in sequences:
        tokens = []
        for t in range(len(s)):
            plain = (s.values[t] - s.returns[t]) ** 2
            moved = number(s.values[t] - s.old_values[t])
            if config.value_clip and abs(moved) > config.value_clip:
                held = s.old_values[t] + math.copysign(config.value_clip, moved)
                plain = (
                    plain
                    if number(plain) >= number((held - s.returns[t]) ** 2)
                    else (held - s.returns[t]) ** 2
                )
            tokens.append(plain / 2)
        per_sequence.append(tokens)
    return slow_average(per_sequence, config.aggregation, config.fixed_length_tokens)


def slow_dpo(config, sequences: list[Sequence]) -> Tensor:
    """DPO (2305.18290 eq. 7), cDPO, IPO (2310.12036 eq. 17), with the chosen answer's likelihood
    (2404.19733 eq. 1)."""
    losses = []
    for chosen, rejected in zip(sequences[::2], sequences[1::2], strict=True):
        ratios = []
        for s in (chosen, rejected):
            total = s.logprobs.sum() - s.reference.sum()
            ratios.append(total / len(s) if config.average_logprobs else total)
        h = ratios[0] - ratios[1]
        if config.loss == "ipo":
            loss = (h - 1 / (2 * config.beta)) ** 2
        else:
            right, e = 1 / (1 + torch.exp(-config.beta * h)), config.label_smoothing
            loss = -(1 - e) * torch.log(right) - e * torch.log(1 - right)
        losses.append(loss + config.sft_coef * -chosen.logprobs.sum() / len(chosen))
    return torch.stack(losses).sum() / len(losses)


def slow_rm(config, sequences: list[Sequence]) -> Tensor:
    """InstructGPT eq. 1 with the centring term."""
    losses = []
    for chosen, rejected in zip(sequences[::2], sequences[1::2], strict=True):
        gap = chosen.score - rejected.score
        losses.append(
            torch.log(1 + torch.exp(-gap))
            + config.center_coef * (chosen.score + rejected.score) ** 2
        )
    return torch.stack(losses).sum() / len(losses)


def slow_sft(config, sequences: list[Sequence]) -> Tensor:
    return slow_average([[-p for p in s.logprobs] for s in sequences], config.aggregation, 0)
