"""Nothing is silent: each event of the code is one that the report counts, or is known to be the
ordinary course."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import gyre
from gyre.observability.events import count_events, is_counted

SOURCE = Path(gyre.__file__).parent
COUNTED = [
    "data.exhausted",
    "drop.equal_groups",
    "drop.groups_without_pair",
    "drop.rows",
    "drop.spans",
    "drop.stale",
    "drop.truncated",
    "drop.unscored",
    "fallback.device_reading",
    "fallback.filter_by_score",
    "rollouts.refills_exhausted",
    "sandbox.call_refused",
    "sandbox.weak",
    "engine.failed",
    "engine.refused",
    "engine.preempted",
    "engine.swap_voided",
    "engine.hits_recomputed",
    "engine.graphs_recaptured",
    "engine.nccl_sums",
    "engine.stranger",
    "engine.torch_kernels",
    "engine.wide_truncation",
    "engine.nonfinite",
    "engine.deadline",
    "engine.completion_failed",
    "engine.lost",
    "engine.ejected",
    "engine.ejections_ignored",
    "member.refused",
    "rank.failed",
    "rank.hung",
    "rendezvous.failover",
    "rendezvous.lost",
    "rendezvous.lease_lost",
    "rendezvous.not_told",
    "drop.rendezvous_notes",
    "rendezvous.replaced",
    "rendezvous.rewound",
    "rendezvous.rewritten",
    "rendezvous.stale_offer",
    "rendezvous.superseded",
    "rendezvous.watch_reopened",
    "retry.request_requeued",
    "retry.version_registered",
    "reward.worker_replaced",
    "reward.fork_server_replaced",
    "reward.fork_server_killed",
    "reward.retried",
    "reward.output_dropped",
    "snapshot.skipped",
    "snapshot.replaced",
    "snapshot.leftover_removed",
    "snapshot.prune_failed",
    "trainer.offload_leftover_removed",
    "trainer.torch_kernels",
    "trainer.update_skipped",
    "trainer.nothing_to_train",
    "trainer.oversized_chunks",
    "trainer.idle_ranks",
    "warn.collector_failed",
    "warn.reference_rounded",
    "warn.reward_failed",
    "warn.staleness_uncorrected",
    "weights.commit_failed",
    "weights.publish_failed",
    "weights.populate_unsupported",
    "weights.slot_replaced",
    "weights.reader_lost",
    "weights.reader_refused",
    "weights.slot_failed",
    "weights.slot_used",
]
ORDINARY_ENDINGS = (
    "started",
    "ended",
    "done",
    "made",
    "loaded",
    "saved",
    "staged",
    "committed",
    "published",
    "verified",
    "terminated",
)
ORDINARY = {
    "rollouts.staleness": "a reading",
    "cluster.memory": "a reading",
    "cluster.starting": "planned",
    "member.listening": "at the start",
    "member.joined": "planned",
    "member.left": "planned; engine.lost tells a loss",
    "engine.answered": "planned",
    "engine.c_kernels": "a choice by what the processor has, told once",
    "engine.graphs_captured": "at the start",
    "engine.installing": "asked for, by engine.kind",
    "engine.prefill_kernel": "a choice by measurement, told once",
    "engine.prefix_cleared": "old versions' pages never match again",
    "engine.rejoined": "its loss was counted",
    "engine.returning": "its ejection or loss was counted",
    "engine.resumed": "its preemption was counted",
    "engine.waits_for_weights": "its loss was counted",
    "memory": "a reading",
    "memory.move": "planned",
    "pod.activity": "a reading",
    "policy.left": "told once per stage, with the way",
    "rendezvous.back": "its loss was counted",
    "rendezvous.opened": "at the start",
    "reward.*": "one rollout's outcome; warn.reward_failed counts them by step",
    "reward.window": "a reading",
    "step.roles": "a reading",
    "rollouts.carried": "they go on in the next step",
    "rollouts.repetition_stopped": "asked for, by rollout.stop_repetition",
    "rollouts.refilled": "the groups that were replaced are counted",
    "run.resumed": "asked for; warn.steps_lost counts the steps that are done again",
    "run.stopped": "asked for, by a signal",
    "serve.access": "asked for, by --access-log",
    "serve.ready": "at the start",
    "serve.weights_updated": "asked for, by an administrator or --follow",
    "snapshot.begun": "planned, with how long it took",
    "snapshot.copied": "likewise",
    "snapshot.held": "how long an update or a move waited for the copy, a reading",
    "snapshot.waited": "for the one before it, which was still being written",
    "snapshot.waiting": "likewise",
    "step.broken_off": "a stop came; the resumed run goes on from its tokens, so nothing is lost",
    "trace.written": "asked for",
    "trainer.attention_kernel": "a choice, told once; it says itself that it counts where another "
    "kernel broke",
    "trainer.offload": "where state lives, told once",
    "trainer.offload_parameters": "whose weights live in host memory, told once",
    "trainer.c_kernels": "a choice, like the engine's",
    "trainer.float8": "a choice, told once; it says itself that it counts where a matrix stays "
    "wide",
    "trainer.loss_scale": "a change; trainer.update_skipped counts what it cost",
    "trainer.moments": "which are codes of 8 bits, told once",
    "trainer.reference_refreshed": "planned",
    "weights.gathered": "planned",
    "weights.leftovers_removed": "of dead processes, whose ends were counted where they were seen",
    "weights.read": "planned",
}


def emitted(source: str) -> set[str]:
    """Names in calls of `emit`; what is put into an f-string is "*"."""
    kinds: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called = (
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        )
        if called not in ("emit", "_emit"):
            continue
        kind = node.args[0]
        if isinstance(kind, ast.Name):  # passes on what another room named
            continue
        parts = kind.values if isinstance(kind, ast.JoinedStr) else [kind]
        kinds.add(
            "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in parts)
        )
    return kinds


def unknown(kinds: set[str]) -> list[str]:
    """Names that are neither counted nor known to be ordinary."""
    return sorted(
        kind
        for kind in kinds
        if not (is_counted({"kind": kind}) or kind.endswith(ORDINARY_ENDINGS) or kind in ORDINARY)
    )


def test_each_event_of_the_code_is_counted_or_known_to_be_ordinary() -> None:
    kinds = set().union(
        *[emitted(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))]
    )
    assert "*" not in kinds, "a name that nobody can search for"
    assert unknown(kinds) == [], "count it (observability/events.py), or say in ORDINARY why not"
    assert sorted(set(COUNTED) - kinds) == [], "nobody emits it any more"
    assert sorted(set(ORDINARY) - kinds) == [], "nobody emits it any more"


def test_the_search_finds_names_and_knows_a_fallback_that_nobody_counts() -> None:
    found = emitted(
        'emit("a.slow_path", x=1)\nself._emit(f"b.{why}")\nroster.emit(\n    '
        '"c.done",\n)\nprint("d.e")'
    )
    assert found == {"a.slow_path", "b.*", "c.done"}
    assert unknown(found) == ["a.slow_path", "b.*"]


@pytest.mark.parametrize("kind", COUNTED)
def test_what_fell_back_was_lost_or_was_done_again_is_counted(kind: str) -> None:
    assert (
        is_counted({"kind": kind}) and not kind.endswith(ORDINARY_ENDINGS) and kind not in ORDINARY
    )


def test_the_ordinary_course_is_not_counted() -> None:
    assert [kind for kind in ORDINARY if is_counted({"kind": kind})] == []
    assert [ending for ending in ORDINARY_ENDINGS if is_counted({"kind": f"engine.{ending}"})] == []


def test_counted_events_are_counted_by_what_they_stand_for() -> None:
    rows = [
        {"kind": "drop.rollout", "count": 3},
        {"kind": "drop.rollout"},
        {"kind": "snapshot.skipped"},
        {"kind": "rewards.note", "counted": True},
        {"kind": "warn.quiet", "counted": False},
        {"kind": "step.done", "count": 4},
    ]
    assert count_events(rows) == {"drop.rollout": 4, "snapshot.skipped": 1, "rewards.note": 1}
