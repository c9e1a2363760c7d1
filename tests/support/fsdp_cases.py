"""Cases of what FSDP2 exchanges and frees, for trainers on several ranks, as zero_cases.py has
them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

from gyre.distributed.process_group import RankGroup
from gyre.models.decoder import Decoder
from gyre.trainer.parallelize import fsdp
from gyre.trainer.parallelize.exposed_comm import Exposed
from gyre.trainer.parallelize.sharded_module import sharded_parts
from gyre.trainer.passes.forward import chunk_logprobs
from zero_cases import batch_for, trainer_on


def group_of(module: Any) -> Any:
    """FSDP2's own record of a module's group, which it has no public name for."""
    return fully_shard.state(module)._fsdp_param_group


def gathered_dtypes(group: RankGroup, matmul: str) -> tuple[list[str], list[str], int]:
    """What FSDP2 exchanges of a layer: dtypes after a step and after the next; and bytes of the
    whole layer."""
    trainer, found = trainer_on(group, "sft", layout="zero3", dtype="bfloat16", matmul=matmul), []
    layer = trainer.models.actor.decoder.layers[0]
    inputs: list[torch.Tensor] = []
    for step in range(2):
        trainer.step_now(batch_for(8, seed=step))
        cut = group_of(layer).fsdp_params
        inputs = [tensor for parameter in cut for tensor in parameter.all_gather_inputs]
        found.append([str(tensor.dtype).removeprefix("torch.") for tensor in inputs])
    return *found, sum(t.nbytes for t in inputs) * group.size


def freed_between_passes(group: RankGroup) -> tuple[list[int], list[int], bool]:
    """Bytes under each layer's gathered weights as its forward pass sees them, and when the forward
    pass of all layers is over; and whether backward then gave a gradient. What backward saved is
    those weights."""
    trainer = trainer_on(group, "sft", layout="zero3")
    decoder, seen = trainer.models.actor.decoder, []
    for layer in decoder.layers:
        layer.register_forward_pre_hook(lambda layer, _: seen.append(layer.qkv.weight))
    (update,) = trainer.plan(batch_for(8, seed=0)).updates
    logprobs_N, _ = chunk_logprobs(decoder, update.chunks[0])
    during = [weight.numel() * weight.element_size() for weight in seen]
    after = [weight.untyped_storage().nbytes() for weight in seen]
    logprobs_N.sum().backward()
    return during, after, bool(trainer.models.actor.optimizer.grad_N.any())


def order_of_collectives(group: RankGroup, spec: str) -> list[str]:
    """FSDP2's of a step, by the module that they are of."""
    trainer, told = trainer_on(group, "sft", layout="zero3", spec=spec), []
    decoder = trainer.models.actor.decoder
    note_collectives(decoder, told)
    (update,) = trainer.plan(batch_for(8, seed=0)).updates
    told.clear()
    logprobs_N, _ = chunk_logprobs(decoder, update.chunks[0])
    told.append("loss")
    logprobs_N.sum().backward()
    return told


def note_collectives(decoder: Decoder, told: list[str]) -> dict[str, Any]:
    """Write each into `told`, with the group that it is of, from now on; returns FSDP2's state of
    each group."""
    names, states = {module: name or "root" for name, module in decoder.named_modules()}, {}
    for module in sharded_parts(decoder):
        state = states[names[module]] = group_of(module)
        for kind, comm in (("gather", state._all_gather_comm), ("sum", state._reduce_scatter_comm)):
            comm.run = noting(told, f"{kind} {names[module]}", comm.run)
    return states


def noting(told: list[str], name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        told.append(name)
        return run(*args, **kwargs)

    return noted


class Numbered:
    """A lane whose marks are places in a log that all lanes share."""

    def __init__(self, told: list[str], name: str) -> None:
        self._told, self._name = told, name

    def mark(self) -> Any:
        self._told.append(self._name)
        return len(self._told) - 1


class Pairs:
    """Of marks, as a Traffic is told them."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int]] = []

    def awaited(self, reached: Any, done: Any) -> None:
        self.found.append((reached, done))


def waits(group: RankGroup, layout: str, spec: str) -> tuple[list[str], list[tuple[int, int]]]:
    """FSDP2's collectives of a chunk, its own waits for weights, and the marks around them, as on a
    GPU; which marks are the two ends of a wait."""
    told, pairs = [], Pairs()
    kept, computing = fsdp.make_exposed, Numbered(told, "computing")
    fsdp.make_exposed = lambda *_: Exposed(pairs, computing, lambda: Numbered(told, "beside"))  # pyright: ignore
    try:
        trainer = trainer_on(group, "sft", layout=layout, spec=spec)
    finally:
        fsdp.make_exposed = kept
    decoder = trainer.models.actor.decoder
    for name, state in note_collectives(decoder, told).items():
        state.wait_for_unshard = noting(told, f"wait {name}", state.wait_for_unshard)
    (update,) = trainer.plan(batch_for(8, seed=0)).updates
    told.clear()
    chunk_logprobs(decoder, update.chunks[0])[0].sum().backward()
    return told, pairs.found


def waited_for_a_late_device(group: RankGroup, layout: str) -> tuple[float, float]:
    """Seconds of a step as the trainer says them, that all ranks are told: the longest wait,
    without and with one device that begins about half a second late."""
    trainer = trainer_on(group, "sft", layout=layout, dtype="bfloat16")
    trainer.step_now(batch_for(8, seed=0))
    found = []
    for cycles in (0, 10**9):
        if cycles and group.rank == 1:
            torch.cuda._sleep(cycles)
        found.append(trainer.step_now(batch_for(8, seed=1)).measured["communication_wait_seconds"])
    return found[0], found[1]


def held_between_chunks(
    group: RankGroup, *, tokens_per_chunk: int, **settings: Any
) -> tuple[list[int], dict[str, float]]:
    """Bytes of gradients that wait on this rank to be summed, as each chunk of an update begins;
    what was sent."""
    trainer = trainer_on(group, "sft", tokens_per_chunk=tokens_per_chunk, **settings)
    learner, held = trainer.models.actor, []
    begin = learner.begin_chunk

    def count_and_begin(*, last: bool) -> None:
        groups = [group_of(part) for part in sharded_parts(learner.decoder)]
        waiting = [p.unsharded_accumulated_grad for group in groups for p in group.fsdp_params]
        held.append(sum(grad.nbytes for grad in waiting if grad is not None))
        begin(last=last)

    learner.begin_chunk = count_and_begin
    report = trainer.step_now(batch_for(12, seed=0))
    return held, {
        name.removeprefix("sent_bytes/"): size
        for name, size in report.measured.items()
        if "sent_" in name
    }
