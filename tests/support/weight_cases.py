"""Cases for weights in host memory, on any number of ranks: the same run with them there and on the
device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gyre.distributed.process_group import RankGroup
from zero_cases import batch_for, evaluate, train, trainer_on, whole

ALL = ("actor", "critic", "reference", "reward")
SMALL = {"offload_optimizer": "host", "offload_cut_bytes": 8192, "offload_deadline_s": 60.0}


def equal_weights_away(
    group: RankGroup | None, kind: str, *, models: Sequence[str] = ALL, **settings: Any
) -> list[str]:
    """What differs, in any bit, of metrics, a snapshot or an evaluation, when the weights are in
    host memory."""
    settings = {
        "sequences_per_update": 6,
        "weight_decay": 0.1,
        "grad_clip": 0.5,
        "spec": "odd",
        **settings,
    }
    there = {**SMALL, **settings, "offload_parameters": tuple(models)}
    (reports, state), (own_reports, own_state) = (
        train(group, kind, **settings),
        train(group, kind, **there),
    )
    wrong = [
        f"metrics {r.metrics} {o.metrics}"
        for r, o in zip(reports, own_reports, strict=True)
        if r.metrics != o.metrics
    ]
    assert own_state.keys() == state.keys()
    wrong += [name for name, tensor in state.items() if not np.array_equal(tensor, own_state[name])]
    asked = {"ppo": ("policy", "critic", "reward"), "rm": ("reward",), "sft": (), "dpo": ()}
    for which in asked.get(kind, ("policy", "reference", "reward")):
        found, own = (evaluate(group, kind, which, **given) for given in (settings, there))
        same = len(found) == len(own) and all(
            np.array_equal(a, b) for a, b in zip(found, own, strict=True)
        )
        wrong += [] if same else [f"evaluation of {which}"]
    return wrong


def gathered_by_parts(group: RankGroup, **settings: Any) -> list[str]:
    """Tensors that differ when new weights in host memory go through the device a part at a time,
    as beside a GPU."""
    found = []
    for by_parts in (False, True):
        trainer = trainer_on(group, "rm", **SMALL, offload_parameters=("actor",), **settings)
        optimizer = trainer.models.actor.optimizer
        optimizer.gathers_by_parts, optimizer.reduce_numbers = by_parts, 1000
        for step in range(2):
            trainer.step_now(batch_for(8, seed=step))
        weights = {
            name: tensor.float().numpy()
            for name, tensor in trainer.register_now().source.tensors.items()
        }
        found.append(whole(trainer) | weights)
    return [name for name, tensor in found[0].items() if not np.array_equal(tensor, found[1][name])]


def refused(group: RankGroup, **settings: Any) -> str:
    """What the trainer says."""
    try:
        trainer_on(group, "grpo", **SMALL, **settings)
    except Exception as error:  # noqa: BLE001  the test reads it
        return f"{type(error).__name__}: {error}"
    return ""
