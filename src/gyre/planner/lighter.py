"""Lighter: the changes of a run's settings that ask less of the device. Pure.

In: PlanInputs. Out: Ways by kind, the cheapest kind first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from gyre.distributed.config import Zero
from gyre.planner.batch_sizes import longest_sequence
from gyre.planner.memory_model.job import MODELS
from gyre.planner.memory_model.states import Offload
from gyre.planner.plan import PlanInputs, Shards
from gyre.planner.search.candidates import CHECKPOINTING
from gyre.planner.ways import CHEAPEST_FIRST, Way

Found = TypeVar("Found")
Change = tuple[str, PlanInputs]  # words, what is asked with it
STAGES: tuple[Zero, ...] = (1, 2, 3)


def lighter(inputs: PlanInputs) -> list[Iterator[Way[PlanInputs, object]]]:
    """Kinds of change that the config would take."""
    kinds: Mapping[str, Callable[[PlanInputs], Iterator[Change]]] = {
        "checkpointing": _less_kept,
        "tokens_per_chunk": _smaller_chunks,
        "zero": _more_in_shards,
        "offload_optimizer": _more_offloaded,
    }
    return [_as_ways(kinds[name](inputs)) for name in CHEAPEST_FIRST if name in kinds]


def _as_ways(changes: Iterator[Change]) -> Iterator[Way[PlanInputs, object]]:
    for text, changed in changes:
        yield Way(asked=changed, words=lambda _, text=text: text)


def _less_kept(inputs: PlanInputs) -> Iterator[Change]:
    """Yield what recomputes more. A batch-invariant policy keeps layer inputs alone anyway."""
    if inputs.batch_invariant:
        return
    for mode in CHECKPOINTING[CHECKPOINTING.index(inputs.checkpointing) + 1 :]:
        yield f'trainer.checkpointing = "{mode}"', replace(inputs, checkpointing=mode)


def _smaller_chunks(inputs: PlanInputs) -> Iterator[Change]:
    """Halves, down to the longest sequence. Where the chunk was left open all of them have been
    tried."""
    longest, tokens = longest_sequence(inputs), inputs.tokens_per_chunk or 0
    while tokens > longest:
        tokens = max(longest, tokens // 2)
        yield f"trainer.tokens_per_chunk = {tokens}", replace(inputs, tokens_per_chunk=tokens)


def _more_in_shards(inputs: PlanInputs) -> Iterator[Change]:
    """Return a higher ZeRO stage for every model that follows the actor's. The engine's kernels, in
    batch-invariant training, engines beside no rank, and what is offloaded need whole weights."""
    lie = {model: inputs.shards.get(model, Shards()) for model in MODELS}
    actor = lie["actor"]
    follow = [model for model in MODELS if model not in inputs.lie_apart]
    needs_whole = (
        inputs.batch_invariant
        or inputs.engines_alone
        or set(follow) & set(inputs.offload_parameters)
    )
    split = "" if actor.zero else f" with parallel.shard_ranks = {inputs.ranks}"
    for zero in STAGES[actor.zero :] if inputs.ranks > 1 else ():
        if zero >= 2 and needs_whole:
            return
        higher = {
            model: Shards(zero=zero, ranks=lie[model].ranks if actor.zero else inputs.ranks)
            for model in follow
        }
        shared = inputs.shared_weights and zero < 2
        yield (
            f"parallel.zero = {zero}{split}",
            replace(inputs, shards=lie | higher, shared_weights=shared),
        )


def _more_offloaded(inputs: PlanInputs) -> Iterator[Change]:
    """Return what could be offloaded beside what is, the least first."""
    places: tuple[Offload, ...] = ("none", "host", "disk") if inputs.disk_tier else ("none", "host")
    for place in places[places.index(inputs.offload_optimizer) :]:
        for gradients in (False, True):
            changed = replace(
                inputs,
                offload_optimizer=place,
                offload_gradients=gradients or inputs.offload_gradients,
            )
            if changed == inputs or (place == "none" and gradients):
                continue
            also = " and trainer.offload_gradients = true" if changed.offload_gradients else ""
            yield f'trainer.offload_optimizer = "{place}"{also}', changed
    yield from _weights_offloaded(inputs, places)


def _weights_offloaded(inputs: PlanInputs, places: Sequence[Offload]) -> Iterator[Change]:
    """Weights too, of the models that may: of those that are not trained, then of all, with all
    other state."""
    may = {
        "actor": not inputs.online,
        "critic": inputs.critic,
        "reference": inputs.reference
        and not inputs.reference_average
        and not inputs.batch_invariant,
        "reward": inputs.reward_model is not None,
    }
    chosen = set(inputs.offload_parameters)
    every = [
        name
        for name in may
        if name in chosen or (may[name] and inputs.shards.get(name, Shards()).zero < 2)
    ]
    frozen = [name for name in every if name in chosen or name in ("reference", "reward")]
    if len(frozen) > len(chosen):
        changed = replace(inputs, offload_parameters=tuple(frozen))
        yield f"trainer.offload_parameters = {json.dumps(frozen)}", changed
    for place in (
        places[max(1, places.index(inputs.offload_optimizer)) :] if len(every) > len(frozen) else ()
    ):
        all_else = f'trainer.offload_optimizer = "{place}", trainer.offload_gradients = true'
        changed = replace(
            inputs, offload_optimizer=place, offload_gradients=True, offload_parameters=tuple(every)
        )
        yield f"{all_else} and trainer.offload_parameters = {json.dumps(every)}", changed
