"""Serving: the plan of a served model as text. In: ServingPlan. Out: tables of so many columns.
Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gyre.memory.errors import words
from gyre.planner.report.explain import COLUMNS, NOTHING, table
from gyre.planner.serving import RankPlan, ServingPlan, fewest_ranks


def describe_serving(plan: ServingPlan, kernels: str, columns: int = COLUMNS) -> str:
    """Return the whole plan for people. `kernels` names what runs a step."""
    ranks, on_gpu = plan.tensor_ranks, plan.device == "cuda"
    each = "each" if ranks == 1 else "each rank"
    place = f"{each} on a GPU of its own" if on_gpu else "on the cores of this host"
    cut = "" if ranks == 1 else f" of {ranks} ranks"
    engines = f"{plan.replicas} engine{'s' if plan.replicas > 1 else ''}{cut}, {place}"
    one = "one engine" if ranks == 1 else "one rank"
    parts = [
        f"What runs\n  {engines}, in {plan.dtype}, by {kernels}",
        f"Memory of {one}\n{table(('what', 'bytes', 'where from'), _memory(plan), columns)}",
        f"Limits of one engine\n{table(('what', 'most', 'where from'), _limits(plan), columns)}",
    ]
    return "\n\n".join([*parts, *_notes(plan)]) + "\n"


def describe_ranks(plans: Sequence[RankPlan], *, num_gpus: int, columns: int = COLUMNS) -> str:
    """Return an engine over one GPU and over several, and how many to take on a host that has
    `num_gpus`."""
    rows = [
        (
            str(one.tensor_ranks),
            words(one.plan.needed_bytes),
            words(one.plan.weights_bytes),
            f"{one.plan.kv_tokens:,}" if one.plan.fits else NOTHING,
            f"{1e3 * one.token_s:.1f} ms" if one.plan.fits and one.token_s else NOTHING,
            "fits" if one.plan.fits else f"more than the free {words(one.plan.free_bytes)}",
        )
        for one in plans
    ]
    head = ("GPUs", "each needs", "of it weights", "KV tokens", "a token", "")
    found = fewest_ranks(plans)
    if found is None:
        advice = "No number of GPUs of a host holds it: take larger ones, or a smaller model."
    elif found <= num_gpus:
        advice = f"Set engine.tensor_ranks = {found}."
    else:
        advice = f"Take {found} of these GPUs, here {num_gpus}, and engine.tensor_ranks = {found}."
    return f"One engine over several GPUs\n{table(head, rows, columns)}\n\n{advice}\n"


def _memory(plan: ServingPlan) -> list[tuple[str, str, str]]:
    pages = f"{plan.kv_pages:,} pages of {plan.page_tokens} tokens: {plan.kv_decided_by}"
    rows = [
        ("weights", plan.weights_bytes, ""),
        ("KV pages", plan.kv_pool_bytes, pages),
        ("a step", plan.working_bytes, "engine.token_budget, engine.max_running; a bound"),
        ("graphs and buffers", plan.fixed_bytes, "engine.max_running"),
        ("KV on the host", plan.kv_host_bytes, "engine.kv_host_bytes"),
    ]
    return [(name, words(size), why) for name, size, why in rows if size]


def _limits(plan: ServingPlan) -> list[tuple[str, str, str]]:
    rows = [
        ("tokens of a prompt and its answer", plan.context_tokens, "the model and the KV pages"),
        ("tokens at once", plan.kv_tokens, "the KV pages"),
        ("sequences of full length at once", plan.full_sequences, "the KV pages"),
        ("completions that run", plan.max_running, "engine.max_running"),
        ("completions that wait", plan.max_queued, "engine.max_queued"),
        ("prompt tokens that wait", plan.max_queued_tokens, "engine.max_queued_tokens"),
    ]
    return [(name, f"{value:,}", why) for name, value, why in rows]


def _notes(plan: ServingPlan) -> list[str]:
    device = "the GPU" if plan.device == "cuda" else "this host"
    compared = f"{words(plan.needed_bytes)} of {words(plan.free_bytes)} that are free on {device}"
    if plan.fits:
        notes = [f"It fits: it needs {compared}."]
    else:
        notes = [
            f"It may not fit: it needs up to {compared}. Lower engine.max_running or "
            "engine.kv_bytes, or take fewer replicas."
        ]
    if plan.kv_follows_free_bytes:
        notes.append(
            "The KV pages follow the memory that is free at the start: set engine.kv_bytes for a "
            "number that stays."
        )
    return notes
