"""Failures: reward parts that could not score a completion. In: the scored groups of a step or an
evaluation. Out: failures by kind with counts and reasons, scores in which a failure never pays, or
a RewardError. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gyre.core.errors import RewardError
from gyre.core.records import Group, ScorePart
from gyre.core.scores import lower_failed_parts

MOST_KINDS = 8  # of failures of one part that are counted apart; the rest are counted as one


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFailure:
    """One kind of failure of one part: the same exception at the same line, or the same other
    reason."""

    part: str
    outcome: str
    reason: str  # of the first completion that met it, whole
    kind: str  # the reason up to ": ", which is the same for all of them
    count: int
    checks: int  # of this part, failed or not

    def fields(self) -> Mapping[str, object]:
        """Return the fields of the event."""
        return {
            "what": f"{self.part} {self.outcome}",
            "failure": self.kind,
            "reason": self.reason,
            "count": self.count,
            "checks": self.checks,
        }


def find_failures(groups: Sequence[Group]) -> list[RewardFailure]:
    """Return every kind of failure, the most frequent first."""
    parts = [part for group in groups for score in group.scores for part in score.parts]
    checks: dict[str, int] = {}
    kinds: dict[str, dict[tuple[str, str], list[ScorePart]]] = {}
    for part in parts:
        checks[part.name] = checks.get(part.name, 0) + 1
        if part.outcome != "ok":
            key = part.outcome, part.reason.partition(": ")[0]
            kinds.setdefault(part.name, {}).setdefault(key, []).append(part)
    failures = []
    for name, found in kinds.items():
        ranked = sorted(found.items(), key=lambda item: -len(item[1]))
        rest = [part for _, more in ranked[MOST_KINDS:] for part in more]
        for (outcome, kind), failed in [*ranked[:MOST_KINDS], *_as_one(rest)]:
            failures.append(
                RewardFailure(
                    part=name,
                    outcome=outcome,
                    reason=failed[0].reason,
                    kind=kind,
                    count=len(failed),
                    checks=checks[name],
                )
            )
    return sorted(failures, key=lambda failure: -failure.count)


def _as_one(parts: Sequence[ScorePart]) -> list[tuple[tuple[str, str], list[ScorePart]]]:
    """Merge the kinds beyond MOST_KINDS by outcome."""
    outcomes = dict.fromkeys(part.outcome for part in parts)
    return [
        ((it, "further kinds of failure"), [part for part in parts if part.outcome == it])
        for it in outcomes
    ]


def refuse_failures(failures: Sequence[RewardFailure], *, most_share: float, step: int) -> None:
    """Raise RewardError when more than this share of a part's checks failed."""
    for name in dict.fromkeys(failure.part for failure in failures):
        own = [failure for failure in failures if failure.part == name]
        failed, checks = sum(failure.count for failure in own), own[0].checks
        if failed <= most_share * checks:
            continue
        reasons = "; ".join(f"{failure.reason} ({failure.count} times)" for failure in own[:3])
        raise RewardError(
            f"reward part '{name}' failed on {failed} of {checks} completions of step {step}, "
            "more than "
            f"rewards.max_failed_share = {most_share:g} allows: {reasons}",
            hint="mend the reward and go on with gyre train --resume RUN, where RUN/rewards.log "
            "has what it printed; "
            "`gyre score RUN COMPLETIONS.jsonl` tries it on given completions. "
            "rewards.max_failed_share = 1 trains on "
            "what is left",
        )


def lower_failed(groups: Sequence[Group]) -> list[Group]:
    """Lower each failure to the least value that the same part gave to another completion here."""
    lowered = iter(lower_failed_parts([score for group in groups for score in group.scores]))
    return [replace(group, scores=tuple(next(lowered) for _ in group.scores)) for group in groups]
