"""Describe: a Choice as plain text tables and as a JSON-able mapping. Pure.

In: a Choice, checklist lines. Out: text; a mapping.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any

from gyre.memory.errors import words
from gyre.planner.memory_model.peaks import device_bytes_of
from gyre.planner.report.advice import advice_mapping, advice_text, short_words
from gyre.planner.report.checklist import Line
from gyre.planner.report.explain import COLUMNS, NOTHING, table, wide_table
from gyre.planner.search.candidates import Candidate
from gyre.planner.search.search import SearchResult
from gyre.planner.search.speed import FP8_GAIN, chunks_per_update, sent_bytes


def describe(
    choice: SearchResult,
    training: Sequence[Line],
    inference: Sequence[Line],
    columns: int = COLUMNS,
) -> str:
    """Return the whole choice for people."""
    cluster, best = choice.cluster, choice.best
    head = (
        f"{cluster.gpus} × {cluster.gpu.name}: {best.layout.words()}\n"
        f"  needs {words(best.device_bytes)} of {words(cluster.device_budget_bytes)} per GPU "
        f"(92% of {words(cluster.gpu.device_bytes)}), at moment '{best.peak.name}'"
    )
    moments = ("for", *(moment.name for moment in best.moments))
    parts = [
        ("Memory per GPU by moment", wide_table(moments, _moment_rows(choice), columns)),
        (
            "Time of one update, predicted",
            table(("what", "seconds", "why"), _time_rows(choice), columns),
        ),
        ("What the reference says", advice_text(choice, columns)),
        (
            "Why this layout",
            "\n".join(_fold(reason, columns, "  - ", "    ") for reason in reasons(choice)),
        ),
        ("Training checklist", _checklist(training, columns)),
        ("Inference checklist", _checklist(inference, columns)),
    ]
    return head + "\n\n" + "\n\n".join(f"{title}\n{text}" for title, text in parts) + "\n"


def as_mapping(
    choice: SearchResult, training: Sequence[Line], inference: Sequence[Line]
) -> dict[str, Any]:
    """Return the same for programs."""
    return {
        "gpus": choice.cluster.gpus,
        "gpu": choice.cluster.gpu.name,
        "device_budget_bytes": choice.cluster.device_budget_bytes,
        "host_budget_bytes_per_gpu": choice.cluster.host_budget_bytes,
        "best": _candidate(choice, choice.best),
        "next_best": [_candidate(choice, candidate) for candidate in choice.next_best],
        "discarded": [_candidate(choice, candidate) for candidate in choice.discarded],
        "reasons": reasons(choice),
        "advice": advice_mapping(choice),
        "checklists": {
            "training": [dataclasses.asdict(line) for line in training],
            "inference": [dataclasses.asdict(line) for line in inference],
        },
    }


def reasons(choice: SearchResult) -> list[str]:
    """Return why the best is the best: the faster ones that do not fit, then the ones that fit and
    are slower."""
    best = choice.best
    said = [f"{_took(best, choice)}, the fastest of those that fit: {best.layout.words()}"]
    layout = best.layout
    if layout.offload_optimizer != "none" or layout.offload_gradients or layout.offload_parameters:
        said.append(f"{words(best.host_bytes)} of pinned host memory per GPU")
    if best.disk_bytes:
        said.append(f"{words(best.disk_bytes)} of disk per GPU, under memory.disk_folder")
    if best.residency == "phase":
        said.append(f"between phases {words(best.host_bytes)} per GPU park on the host")
    for candidate in choice.discarded:
        said.append(
            f"{_took(candidate, choice)}, discarded: {candidate.layout.words()}: "
            f"{short_words(candidate)}"
        )
    for candidate in choice.next_best:
        said.append(
            f"{_took(candidate, choice)}, {words(candidate.device_bytes)}, fits too: "
            f"{candidate.layout.words()}"
        )
    return said


def _took(candidate: Candidate, choice: SearchResult) -> str:
    rate = choice.job.tokens_per_update / choice.cluster.gpus / candidate.time.seconds
    return f"{candidate.time.seconds:.2f} s ({rate:,.0f} tokens/s per GPU)"


def _moment_rows(choice: SearchResult) -> list[tuple[str, ...]]:
    moments, layout = choice.best.moments, choice.best.layout
    names = list(dict.fromkeys(name for moment in moments for name in moment.parts))
    rows = [
        (name, *(words(m.parts[name]) if name in m.parts else NOTHING for m in moments))
        for name in names
    ]
    rows.append(("allocated", *(words(moment.allocated_bytes) for moment in moments)))
    rows.append(
        (
            "with allocator and context",
            *(words(device_bytes_of(moment, layout)) for moment in moments),
        )
    )
    return rows


def _time_rows(choice: SearchResult) -> list[tuple[str, ...]]:
    best, gpu = choice.best, choice.cluster.gpu
    time, layout = best.time, best.layout
    job = choice.job.of_rank(layout)
    sent, exchanged = (
        ", ".join(
            f"{name} {words(size)}"
            for name, size in sent_bytes(job, layout).items()
            if name.startswith("tensor ") is exchanges
        )
        for exchanges in (False, True)
    )
    sheet, fp8 = (
        gpu.bf16_flops or gpu.fp16_flops,
        f", FP8 products × {FP8_GAIN}" if job.matmul == "fp8" else "",
    )
    chunks = chunks_per_update(job, layout)
    pieces = f"{chunks} chunk{'s' if chunks > 1 else ''}"
    rows = [
        (
            "compute",
            time.compute_s,
            f"{gpu.training_share:.0%} of {sheet / 1e12:.0f} TFLOP/s{fp8}; {pieces}",
        ),
        ("computed again", time.again_s, "checkpointing, and logits by blocks"),
        ("exposed communication", time.exposed_s, f"of {time.traffic_s:.3f} s: {sent}"),
        ("exposed exchanges", time.waited_s, f"of {time.exchange_s:.3f} s: {exchanged}"),
        ("optimizer and gradient sums", time.memory_s, "bound by device memory"),
        ("offload", time.host_s, "copies of state to and from host or disk"),
        ("switches", time.switch_s, "parking and waking between rollout and training"),
        ("rollouts", time.rollout_s, _rollout_words(choice)),
    ]
    return [(name, f"{seconds:.3f}", why) for name, seconds, why in rows if seconds]


def _rollout_words(choice: SearchResult) -> str:
    engine, best = choice.job.of_rank(choice.best.layout).engine, choice.best
    if engine is None:
        return ""
    ranks = best.layout.engine_tensor_ranks
    over = f"over {ranks} GPUs" if ranks > 1 else "on each GPU"
    return (
        f"{engine.sequences:,} completions by an engine {over}, {best.running:,} at the same time"
    )


def _checklist(lines: Sequence[Line], columns: int) -> str:
    """Return a state, a name and why."""
    indent = " " * (2 + len("not built") + 2 + 2)
    return "\n".join(
        _fold(f"{line.name}: {line.reason}", columns, f"  {line.state:<9}  ", indent)
        for line in lines
    )


def _fold(text: str, columns: int, first: str, indent: str) -> str:
    return textwrap.fill(
        text, columns, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False
    )


def _candidate(choice: SearchResult, candidate: Candidate) -> dict[str, Any]:
    layout = candidate.layout
    return {
        "layout": dataclasses.asdict(layout),
        "residency": candidate.residency,
        "running_per_gpu": candidate.running,
        "seconds_per_update": candidate.time.seconds,
        "time_s": dataclasses.asdict(candidate.time),
        "tokens_per_s_per_gpu": choice.job.tokens_per_update
        / choice.cluster.gpus
        / candidate.time.seconds,
        "sent_bytes": sent_bytes(choice.job.of_rank(layout), layout),
        "device_bytes": candidate.device_bytes,
        "host_bytes": candidate.host_bytes,
        "disk_bytes": candidate.disk_bytes,
        "short_device_bytes": candidate.short_device_bytes,
        "short_host_bytes": candidate.short_host_bytes,
        "peak": candidate.peak.name,
        "moments": {
            moment.name: {"allocated_bytes": moment.allocated_bytes, "parts": dict(moment.parts)}
            for moment in candidate.moments
        },
    }
