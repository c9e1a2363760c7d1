"""Cases for trainers on several ranks; functions here run in rank processes (rank_pool), or in the
test's own. Past 500 lines: they share how a model is split, trained and compared."""

from __future__ import annotations

import functools
import gc
import os
import signal
import time
import tracemalloc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gyre.core.errors import ConfigError
from gyre.core.offers import LocalShards
from gyre.core.records import StepReport, TrainBatch, Which
from gyre.distributed.config import ParallelConfig, Zero
from gyre.distributed.devices import DeviceRecord, refuse_mixture
from gyre.distributed.process_group import RankGroup, alone
from gyre.models.decoder import Decoder, ScalarHead
from gyre.models.hub import tensors as hub_tensors
from gyre.models.hub.export import export_runs
from gyre.models.hub.verify import verify_runs
from gyre.models.init import init_weights
from gyre.trainer.metrics.throughput import ThroughputMeter
from gyre.trainer.trainer import NativeTrainer
from gyre.weights.boxes import local_source
from gyre.weights.gather import gather_runs, homes_of
from gyre.weights.tensor_source import LiveTensors, fill
from trainer_cases import (
    OF_THE_MACHINE,
    SPEC,
    make_batch,
    make_trainer,
    truncated,
    whole_tensors,
)

# No size divides by 4: shards are uneven, and the last rank has no row of some tensors.
ODD = replace(
    SPEC,
    vocab_size=50,
    mlp_size=23,
    tied=False,
    qkv_bias=True,
    num_layers=3,
    head_dim=10,
    hidden_size=18,
)
# Rows of whole blocks of 8-bit moments, but for `out`; ranks share out no matrix evenly.
BLOCKS = replace(SPEC, hidden_size=256, mlp_size=256, vocab_size=50)
DEEP = replace(SPEC, num_layers=5)
# Of four tensor ranks two hold each KV head, and the last one has two rows of padding; shards of
# their parts are uneven.
PARTED = replace(ODD, num_heads=4, num_kv_heads=2, mlp_size=24, num_layers=2)
# Of two tensor ranks each has whole blocks of every matrix.
BLOCKS_PARTED = replace(BLOCKS, num_heads=4, num_kv_heads=1, head_dim=128, mlp_size=512)
# As these, and no rank has a part of another's KV head.
BLOCKS_APART = replace(BLOCKS_PARTED, num_kv_heads=2)
SPECS = {
    "blocks_parted": BLOCKS_PARTED,
    "blocks_apart": BLOCKS_APART,
    "tied": SPEC,
    "odd": ODD,
    "blocks": BLOCKS,
    "deep": DEEP,
    "parted": PARTED,
}
LAYOUTS = {
    "zero0": ParallelConfig(zero=0),
    "zero1": ParallelConfig(zero=1),
    "zero2": ParallelConfig(zero=2),
    "zero3": ParallelConfig(zero=3),
    "zero3_once": ParallelConfig(zero=3, sum_gradients="update"),
    "hybrid1": ParallelConfig(zero=1, shard_ranks=2),
    "hybrid2": ParallelConfig(zero=2, shard_ranks=2),
    "hybrid3": ParallelConfig(zero=3, shard_ranks=2),
    "hybrid3_once": ParallelConfig(zero=3, shard_ranks=2, sum_gradients="update"),
    "mixed": ParallelConfig.model_validate(
        {
            "zero": 1,
            "critic": {"zero": 3},
            "reference": {"zero": 2, "shard_ranks": 2},
            "reward": {"zero": 3},
        }
    ),
}
# Ranks that share layers, alone and beside ZeRO over the ranks that see other data.
TENSOR_LAYOUTS = {
    "tensor4": ParallelConfig(tensor_ranks=4),
    **{f"zero{zero}_tensor2": ParallelConfig(zero=zero, tensor_ranks=2) for zero in get_args(Zero)},
    "zero3_once_tensor2": ParallelConfig(zero=3, sum_gradients="update", tensor_ranks=2),
    "mixed_tensor2": ParallelConfig.model_validate(
        {"zero": 1, "tensor_ranks": 2, "critic": {"zero": 3}, "reference": {"zero": 2}}
    ),
}

# Of eight ranks: replicas of shards of parts.
HYBRID_TENSOR_LAYOUTS = {
    f"hybrid{zero}_tensor2": ParallelConfig(zero=zero, shard_ranks=2, tensor_ranks=2)
    for zero in (1, 3)
}
# Where four ranks share layers, none sees other data: ZeRO has nothing to share out.
WIDE_LAYOUTS = {
    f"zero{zero}_tensor4": ParallelConfig(zero=zero, tensor_ranks=4) for zero in (0, 2, 3)
}
ANY_LAYOUT = LAYOUTS | TENSOR_LAYOUTS | HYBRID_TENSOR_LAYOUTS | WIDE_LAYOUTS


def decoder_on(device: torch.device, dtype: torch.dtype, *, spec: str, seed: int = 0) -> Decoder:
    decoder = Decoder(SPECS[spec], device=device, dtype=dtype)
    init_weights(decoder, seed)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.mul_(3.0)
    return decoder


def scored_model(
    device: torch.device, dtype: torch.dtype, *, spec: str, seed: int
) -> tuple[Decoder, ScalarHead]:
    head = ScalarHead(SPECS[spec].hidden_size, device=device)
    with torch.no_grad():
        head.weight.copy_(
            torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(seed))
        )
    return decoder_on(device, dtype, spec=spec, seed=seed), head


def trainer_on(
    group: RankGroup | None,
    kind: str,
    *,
    layout: str = "zero0",
    spec: str = "tied",
    dtype: str = "float32",
    **settings: Any,
) -> NativeTrainer:
    """A trainer whose heads are not zero, so that all paths matter."""
    group, kept = group or alone(), getattr(torch, dtype)
    extra: dict[str, Any] = {"reward_model": scored_model(group.device, kept, spec=spec, seed=7)}
    if kind == "ppo":
        extra["critic"] = scored_model(group.device, kept, spec=spec, seed=3)
    if kind == "rm":
        extra["head"] = scored_model(group.device, kept, spec=spec, seed=5)[1]
    decoder = decoder_on(group.device, kept, spec=spec)
    settings = {"learning_rate": 1e-3, **settings}
    return make_trainer(
        kind,
        decoder=decoder,
        group=group,
        parallel=ANY_LAYOUT[layout],
        **extra,
        **settings,
    )


def batch_for(num_sequences: int, seed: int) -> TrainBatch:
    """A batch that brings reference log-probs of another model, so that KL and DPO have a
    gradient."""
    batch, rng = make_batch(num_sequences, seed=seed, step=seed), np.random.default_rng(seed + 100)
    sequences = []
    for sequence in batch.sequences:
        values = np.where(
            sequence.columns["loss_mask"], rng.normal(-3.8, 0.3, len(sequence.tokens)), 0.0
        )
        columns = {**sequence.columns, "reference_logprobs": values.astype(np.float32)}
        sequences.append(replace(sequence, columns=columns))
    return replace(batch, sequences=tuple(sequences))


def whole(trainer: NativeTrainer) -> dict[str, np.ndarray]:
    """What a snapshot holds; on rank 0."""
    parts = gathered_parts(trainer.mesh.all_ranks, trainer.snapshot_now()["tensors"])
    return {name: tensor.float().numpy() for name, tensor in whole_tensors(parts.values()).items()}


def gathered_parts(group: RankGroup, own: dict[str, Any]) -> dict[str, Any]:
    """The parts of all ranks, on rank 0; {} on the others."""
    if group.size == 1:
        return dict(own)
    found: list[Any] = [None] * group.size
    torch.distributed.all_gather_object(found, own, group=group.process_group)
    assert sum(len(parts) for parts in found) == len({key for parts in found for key in parts}), (
        "saved twice"
    )
    return {key: part for parts in found for key, part in parts.items()} if group.rank == 0 else {}


def taken(trainer: NativeTrainer) -> dict[str, Any]:
    """A snapshot of all ranks, on rank 0."""
    state = trainer.snapshot_now()
    return {
        "tensors": gathered_parts(trainer.mesh.all_ranks, state["tensors"]),
        "state": state["state"],
    }


@functools.cache
def of_one_process(case: Callable[..., Any], *given: Any, **settings: Any) -> Any:
    """What a case gives without ranks, computed once for all layouts that are compared with it.
    Nobody changes it."""
    return case(None, *given, **settings)


def train(
    group: RankGroup | None, kind: str, *, steps: int = 2, num_sequences: int = 12, **settings: Any
) -> tuple[list[StepReport], dict[str, np.ndarray]]:
    """Reports of some steps, and everything that a snapshot holds afterwards."""
    trainer = trainer_on(group, kind, **settings)
    reports = [trainer.step_now(batch_for(num_sequences, seed=step)) for step in range(steps)]
    return reports, whole(trainer)


def gradients(
    group: RankGroup | None,
    kind: str,
    *,
    num_sequences: int = 12,
    longer_than: int = 0,
    divided_by: int = 1,
    narrow: bool = False,
    **settings: Any,
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """The summed gradient of one update by parameter (on rank 0), and the norms; of sequences whose
    tokens and targets this number divides, which so many ranks do not pad. Every second one of
    `narrow` rollouts was truncated."""
    trainer = trainer_on(group, kind, **settings)
    batch = batch_for(num_sequences, seed=0)
    batch = replace(
        batch,
        sequences=tuple(
            s
            for s in batch.sequences
            if len(s.tokens) > longer_than
            and not len(s.tokens) % divided_by
            and not s.columns["loss_mask"].sum() % divided_by
        ),
    )
    if narrow:
        rng = np.random.default_rng(4)
        pairs = zip(batch.sequences[::2], batch.sequences[1::2], strict=True)
        mixed = tuple(each for one, other in pairs for each in (truncated(one, rng), other))
        batch = replace(batch, sequences=mixed)
    (update,) = trainer.plan(batch).updates
    trainer.forward_backward(update)
    found, norms = {}, {}
    for learner in trainer.models.learners:
        optimizer = learner.optimizer
        optimizer.reduce()
        norms[learner.name] = optimizer.grad_norm()
        own_N = torch.zeros(optimizer.layout.size)
        for span in optimizer.spans():
            own_N[span.first : span.last] = span.grad_N
        joined = {name: torch.empty(shape) for name, shape in optimizer.layout.model.shapes.items()}
        group = optimizer.mesh.holders
        for run in gather_runs(
            optimizer.layout, optimizer.runs(own_N), group=group, dtype=torch.float32
        ):
            for home, values in zip(*homes_of(joined, [run]), strict=True):
                home.copy_(values)
        found |= {f"{learner.name}.{name}": tensor.numpy() for name, tensor in joined.items()}
    return found, norms


def copied(
    group: RankGroup, kind: str, **settings: Any
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The master weights of which several tensor ranks have a copy, after two steps: this rank's,
    and those of the ranks that own them."""
    trainer = trainer_on(group, kind, **settings)
    for step in range(2):
        trainer.step_now(batch_for(12, seed=step))
    held, owned = {}, {}
    for learner in trainer.models.learners:
        copies, mesh = learner.optimizer.copies, learner.optimizer.mesh
        sums_C = torch.zeros(copies.size, device=group.device)
        for run in copies.runs:
            master_N = learner.optimizer.masters()[run.name].detach().view(-1)[run.start : run.stop]
            held[f"{learner.name}.{run.name}.{run.start}"] = master_N.cpu().numpy()
            if run.owned:
                sums_C[run.at : run.at + len(master_N)] = master_N
        mesh.tensor.all_reduce(sums_C)
        for run in copies.runs:
            values_N = sums_C[run.at : run.at + run.stop - run.start].cpu()
            owned[f"{learner.name}.{run.name}.{run.start}"] = values_N.numpy()
    return held, owned


def evaluate(
    group: RankGroup | None, kind: str, which: Which, *, num_sequences: int = 9, **settings: Any
) -> list[np.ndarray]:
    """What a model says of a batch, before and after a step, which must not have left old weights
    behind."""
    trainer, found = trainer_on(group, kind, **settings), []
    for _ in range(2):
        evaluation = trainer.evaluate_now(batch_for(num_sequences, seed=1), which)
        found += list(evaluation.per_token)
        found += [] if evaluation.per_sequence is None else [evaluation.per_sequence]
        trainer.step_now(batch_for(num_sequences + 1, seed=2))
    return found


def gathered(
    group: RankGroup | None, *, bucket_bytes: int, **settings: Any
) -> tuple[Any, dict[str, np.ndarray]]:
    """The version that `register` hands out after a step, written into tensors of an engine's."""
    trainer = trainer_on(group, "grpo", **settings)
    trainer.step_now(batch_for(8, seed=0))
    offer = trainer.register_now()
    manifest = offer.manifest
    if not isinstance(offer.source, LocalShards):
        tensors = offer.source.tensors
        return manifest, {name: tensor.float().cpu().numpy() for name, tensor in tensors.items()}
    source = offer.source.shards
    device = group.device if group else torch.device("cpu")
    engine = {
        entry.name: torch.full(
            entry.shape, float("nan"), dtype=getattr(torch, entry.dtype), device=device
        )
        for entry in manifest.entries
    }
    source.gather_into(engine, bucket_bytes=bucket_bytes)
    return manifest, {name: tensor.float().cpu().numpy() for name, tensor in engine.items()}


def registered(
    group: RankGroup, **settings: Any
) -> tuple[Any, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The manifest of a version after two steps, what an engine of whole tensors gets of it, and
    what a snapshot of the same moment holds (on rank 0)."""
    trainer = trainer_on(group, "rm", **settings)
    for step in range(2):
        trainer.step_now(batch_for(8, seed=step))
    manifest = trainer.register_now().manifest
    engine = {
        entry.name: torch.full(entry.shape, float("nan"), dtype=getattr(torch, entry.dtype))
        for entry in manifest.entries
    }
    trainer.shards().gather_into(engine, bucket_bytes=1000)
    found = {name: tensor.float().numpy() for name, tensor in engine.items()}
    return manifest, found, whole(trainer)


def resume(
    group: RankGroup | None, state: dict[str, Any], kind: str, *, steps: range, **settings: Any
) -> tuple[list[StepReport], dict[str, np.ndarray], dict[str, Any]]:
    """Go on from a snapshot of any number of ranks; with no steps, what is read back is what was
    written."""
    trainer = trainer_on(group, kind, **settings)
    trainer.restore_now(state)
    reports = [trainer.step_now(batch_for(12, seed=step)) for step in steps]
    return reports, whole(trainer), taken(trainer)


def resume_first(
    group: RankGroup | None, kind: str, *, state: dict[str, Any], **settings: Any
) -> Any:
    return resume(group, state, kind, **settings)


def saved(group: RankGroup | None, kind: str, *, steps: int, **settings: Any) -> dict[str, Any]:
    trainer = trainer_on(group, kind, **settings)
    for step in range(steps):
        trainer.step_now(batch_for(12, seed=step))
    return taken(trainer)


def carry_on(
    group: RankGroup | None, state: dict[str, Any], kind: str, *, step: int, **settings: Any
) -> tuple[dict[str, np.ndarray], StepReport, dict[str, Any]]:
    """What a layout reads of another's snapshot, the report of one more step, and the snapshot
    after it."""
    trainer = trainer_on(group, kind, **settings)
    trainer.restore_now(state)
    read = whole(trainer)
    report = trainer.step_now(batch_for(12, seed=step))
    return read, report, taken(trainer)


def moved(group: RankGroup | None, kind: str, **settings: Any) -> dict[str, np.ndarray]:
    """Train with every component parked between the steps, and a snapshot taken while they are."""
    trainer = trainer_on(group, kind, **settings)
    names = [one.name for one in trainer.components() if {"device", "host"} <= set(one.tiers)]
    brief = [one.name for one in trainer.components() if one.tiers == ("device", "none")]
    for step in range(2):
        trainer.step_now(batch_for(12, seed=step))
        trainer.move(names, "host")
        trainer.move(brief, "none")
        assert all(trainer.measure()[name].device_bytes == 0 for name in names)
        state = whole(trainer)
        trainer.move(names, "device")
    return state


AWAY = {
    "host": {"offload_optimizer": "host"},
    "disk": {"offload_optimizer": "disk"},
    "gradients": {"offload_gradients": True},
    "host and gradients": {"offload_optimizer": "host", "offload_gradients": True},
    "disk and gradients": {"offload_optimizer": "disk", "offload_gradients": True},
}


def away(
    group: RankGroup | None,
    case: Callable[..., Any],
    kind: str,
    how: str,
    folder: str,
    **settings: Any,
) -> Any:
    """A case with state away from the device, in cuts that are far smaller than the model."""
    rank = group.rank if group is not None else 0
    return case(
        group,
        kind,
        disk_folder=Path(folder) / f"rank-{rank}",
        offload_cut_bytes=8192,
        offload_deadline_s=60.0,
        **AWAY[how],
        **settings,
    )


def equal_away(
    group: RankGroup | None, kind: str, hows: Sequence[str], folder: str, **settings: Any
) -> list[str]:
    """What differs, in any bit, of the metrics or of a snapshot, between training with state away
    and without."""
    settings = {"sequences_per_update": 6, "weight_decay": 0.1, "grad_clip": 0.5, **settings}
    reports, state = train(group, kind, **settings)
    wrong = []
    for how in hows:
        own_reports, own_state = away(group, train, kind, how, f"{folder}/{how}", **settings)
        for report, own in zip(reports, own_reports, strict=True):
            wrong += (
                []
                if own.metrics == report.metrics
                else [f"{how}: metrics {own.metrics} {report.metrics}"]
            )
            assert (
                own.measured["offload_in_bytes"] > 0 and own.measured["offload_wait_seconds"] >= 0.0
            )
        assert own_state.keys() == state.keys()
        wrong += [
            f"{how}: {name}"
            for name, tensor in state.items()
            if not np.array_equal(tensor, own_state[name])
        ]
    return wrong


def coded_updates(
    group: RankGroup | None,
    *,
    layout: str = "zero0",
    spec: str = "blocks",
    dtype: str,
    how: str | None = None,
    folder: str = "",
) -> tuple[dict[str, np.ndarray], list[str]]:
    """What a snapshot holds after updates with 8-bit moments from gradients that are the same in
    every layout, and which moments this rank has."""
    settings: dict[str, Any] = {
        "spec": spec,
        "dtype": dtype,
        "layout": layout,
        "moments": "8_bit",
    }
    if how is not None:
        rank = group.rank if group is not None else 0
        place = Path(folder) / f"{layout}-{how}-{dtype}" / f"rank-{rank}"
        settings |= {
            "disk_folder": place,
            "offload_cut_bytes": 16_384,
            "offload_deadline_s": 60.0,
            **AWAY[how],
        }
    trainer = trainer_on(group, "sft", weight_decay=0.1, **settings)
    optimizer = trainer.models.actor.optimizer
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        state_N, table = torch.zeros(optimizer.layout.size), optimizer.layout.model
        drawn = {
            name: torch.randn(table.shapes[name], generator=generator)
            for name in sorted(table.shapes)
        }
        source = local_source(LiveTensors(drawn), table, optimizer.mesh.tensor.rank)
        fill(optimizer.runs(state_N), optimizer.places, source, dtype=torch.float32)
        optimizer.settle_gradients()
        for span in optimizer.spans():
            span.grad_N.copy_(state_N[span.first : span.last])
            assert not span.weight_N.requires_grad, (
                "the library's kernel is an operator that autograd knows"
            )
        optimizer.update(learning_rate=1e-2, grad_scale=0.5)
    found = whole(trainer)
    trainer.close_now()
    return found, sorted(optimizer.moments)


def sums_by_parts(group: RankGroup, *, layout: str) -> float:
    """How far sums over ranks are from those on the device, as a part of the largest, when
    gradients in host memory go through it a part at a time."""
    found = []
    for by_parts in (False, True):
        trainer = trainer_on(
            group, "rm", layout=layout, dtype="bfloat16", offload_gradients=by_parts
        )
        (update,) = trainer.plan(batch_for(8, seed=0)).updates
        trainer.forward_backward(update)
        optimizer = trainer.models.actor.optimizer
        optimizer.reduces_by_parts, optimizer.reduce_numbers = by_parts, 1000
        optimizer.reduce()
        found.append(torch.cat([span.grad_N.cpu() for span in optimizer.spans()]))
    assert found[0].any()
    return float((found[0] - found[1]).abs().max() / found[0].abs().max())


def held_bytes(group: RankGroup | None, kind: str, **settings: Any) -> dict[str, int]:
    return {
        component.name: component.size_bytes
        for component in trainer_on(group, kind, **settings).components()
    }


def broken_step(group: RankGroup, how: str, *, victim: int, layout: str) -> tuple[float, str]:
    """A step in which one rank fails; returns after how many seconds this rank knew, and what it
    was told."""
    trainer = trainer_on(group, "grpo", layout=layout)
    trainer.step_now(batch_for(8, seed=0))
    batch = batch_for(8, seed=1)
    if how == "all":
        batch = replace(
            batch, sequences=tuple(replace(s, temperature=0.0) for s in batch.sequences)
        )
    elif group.rank == victim:
        if how == "raise":
            hook = trainer.models.actor.optimizer
            hook.reduce = raiser
        elif how == "die":
            trainer.models.actor.optimizer.reduce = lambda: os.kill(os.getpid(), signal.SIGKILL)
        elif how == "hang":
            trainer.models.actor.optimizer.reduce = lambda: time.sleep(1000)
    started = time.monotonic()
    try:
        trainer.step_now(batch)
    except Exception as error:  # noqa: BLE001  the test reads it
        return time.monotonic() - started, f"{type(error).__name__}: {error}"
    return time.monotonic() - started, ""


def raiser() -> None:
    raise ValueError("a fault of its own")


def steps_again(group: RankGroup) -> int:
    return trainer_on(group, "sft", layout="zero3").step_now(batch_for(8, seed=0)).num_updates


def with_a_bad_number(
    group: RankGroup | None, kind: str, **settings: Any
) -> tuple[list[Any], list[str], bool]:
    """A step whose gradient is not finite where one sequence lies, then a step of fewer sequences
    than ranks: updates of both, what was told, and whether the first left the weights alone."""
    events: list = []
    trainer = trainer_on(group, kind, events=events, **settings)
    before, batch = whole(trainer), batch_for(9, seed=0)
    batch.sequences[4].columns["advantages"][-1] = np.nan
    updates = [trainer.step_now(batch).num_updates]
    after = whole(trainer)
    updates.append(trainer.step_now(batch_for(2, seed=1)).num_updates)
    same = all(np.array_equal(before[name], after[name]) for name in before)
    return updates, [name for name, _ in events if name not in OF_THE_MACHINE], same


def overflowed(group: RankGroup | None, **settings: Any) -> tuple[list[Any], dict[str, np.ndarray]]:
    """Steps in float16, the second with an advantage whose gradient is beyond its range; what a
    snapshot holds."""
    trainer, reports = trainer_on(group, "grpo", dtype="float16", **settings), []
    for step in range(3):
        batch = batch_for(8, seed=step)
        batch.sequences[3].columns["advantages"][-1] *= 1e9 if step == 1 else 1.0
        reports.append(trainer.step_now(batch))
    return [
        (r.num_updates, r.metrics["loss_scale"], r.metrics.get("grad_norm")) for r in reports
    ], whole(trainer)


BIG = replace(SPEC, vocab_size=4000, hidden_size=128, mlp_size=512, tied=False)


def storage_id(tensor: torch.Tensor) -> int:
    """Which storage a tensor lies in, as long as it lives."""
    return StorageWeakRef(tensor.untyped_storage()).cdata


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations make while it is active, and the most that live
    together."""

    def __init__(self) -> None:
        super().__init__()
        self._holders: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        given = {storage_id(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self._watch(tensor, given)
        return found

    def _watch(self, tensor: torch.Tensor, given: set[int]) -> None:
        key = storage_id(tensor)
        if key in given and key not in self._sizes:
            return  # a view of what was there before
        self._sizes[key] = tensor.untyped_storage().nbytes()
        self._holders[key] = self._holders.get(key, 0) + 1
        weakref.finalize(tensor, self._let_go, key)
        self.peak_bytes = max(self.peak_bytes, sum(self._sizes.values()))

    def _let_go(self, key: int) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key], self._sizes[key]


def exported(group: RankGroup, folder: str, *, layout: str) -> dict[str, Any]:
    """Train a step with the weights in shards, export them; the bytes that this took beside them,
    on this rank."""
    hub_tensors.BLOCK_BYTES = 1 << 14
    decoder = Decoder(BIG, device=group.device, dtype=torch.float32)
    init_weights(decoder, 1)
    trainer = make_trainer("sft", decoder=decoder, group=group, parallel=LAYOUTS[layout])
    trainer.step_now(batch_for(8, seed=0))
    source = trainer.shards()

    def runs():
        return source.gather_buckets(bucket_bytes=1 << 17)

    tracemalloc.start()
    with LiveBytes() as live:
        if group.rank == 0:
            export_runs(
                BIG, runs, folder, dtype=torch.float32, tokenizer_files=None, shard_bytes=1_500_000
            )
            verify_runs(folder, BIG, runs())
        else:
            for _ in range(2):
                for _ in runs():
                    pass
    python_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    whole = {
        entry.name: torch.empty(entry.shape) for entry in trainer.register_now().manifest.entries
    }
    source.gather_into(whole)
    tensors = {name: tensor.numpy() for name, tensor in whole.items()}
    return {"tensors": tensors, "tensor_bytes": live.peak_bytes, "python_bytes": python_bytes}


def measures(
    group: RankGroup | None, kind: str, *, folder: str = "", **settings: Any
) -> dict[str, Any]:
    """What this rank counted in a step of 12 sequences, what all were told, and what was traced
    where."""
    if folder:
        settings |= {"trace_folder": Path(folder) / "traces", "trace_steps": (1,)}
    events: list = []
    trainer = trainer_on(group, kind, events=events, peak_flops=1e12, **settings)
    counted, take = {}, ThroughputMeter.take

    def note(meter: ThroughputMeter, *, step_s: float) -> dict[str, Any]:
        own = take(meter, step_s=step_s)
        counted.update(flops=own["flops"])
        return own

    with patch.object(ThroughputMeter, "take", note):
        report = trainer.step_now(replace(batch_for(12, seed=0), step=1))
    return {**counted, "measured": dict(report.measured), "events": events}


def alive_bytes(group: RankGroup | None, kind: str, **settings: Any) -> tuple[dict[str, int], int]:
    """Bytes of a trainer between two steps: by component, and of all tensors alive that were not
    before."""
    gc.collect()
    before = storages_alive()  # held, so that no new storage takes the place of one of these
    trainer = trainer_on(group, kind, **settings)
    for step in range(2):
        trainer.step_now(batch_for(12, seed=step))
    told = {name: usage.device_bytes for name, usage in trainer.measure().items()}
    # by then the back end's threads have let go of the last collectives' tensors
    ends = time.monotonic() + 3.0
    while (alive := _bytes_beside(before)) > sum(told.values()) + 1024 and time.monotonic() < ends:
        time.sleep(0.05)
    return told, alive


def _bytes_beside(before: dict[int, torch.Tensor]) -> int:
    gc.collect()
    return sum(
        tensor.untyped_storage().nbytes()
        for key, tensor in storages_alive().items()
        if key not in before
    )


def storages_alive() -> dict[int, torch.Tensor]:
    """A tensor of every storage on the CPU that this process holds, by the storage's identity."""
    kinds = torch.Tensor, torch.nn.Parameter
    tensors = [
        thing for thing in gc.get_objects() if type(thing) in kinds and thing.device.type == "cpu"
    ]
    return {storage_id(tensor): tensor for tensor in tensors}


def refused_mixture(group: RankGroup, names: list[str]) -> str:
    """What ranks say whose devices have these names."""
    record = DeviceRecord(
        host=f"node-{group.rank // 2}",
        name=names[group.rank],
        capability="9.0",
        memory_bytes=1 << 30,
    )
    try:
        refuse_mixture(group, record)
    except ConfigError as error:
        return error.message
    return ""


def warmed(group: RankGroup) -> float:
    """The sum of all ranks' numbers after a warm-up, which must leave the ranks in step."""
    group.warm_up(largest=1000)
    x_N = torch.full((3,), float(group.rank + 1), device=group.device)
    group.all_reduce(x_N)
    return float(x_N[0])


def shared(group: RankGroup, sizes: list[int]) -> list[Any]:
    """What ranks share when one has so much to say and the others little."""
    return [
        group.share({"text": "é" * (size if group.rank == 1 else 1), "rank": group.rank})
        for size in sizes
    ]
