"""Layouts: how one training job is spread over GPUs, and the model state that each rank then holds. Pure.

In: a Layout, sizes of the model. Out: bytes per rank by component. Callers: `planner.moments`, `planner.search`,
`planner.checklist`.

ZeRO-0 and ZeRO-1 run trainer/optim.py's flat buffers: compute weights and a float32 gradient for every parameter on
every rank; ZeRO-1 splits master weights and moments. ZeRO-2 and ZeRO-3 run FSDP2: float32 parameters, gradients and
moments in shards, and compute weights gathered, all of them (2) or a layer at a time (3). Hybrid: shard_ranks is less
than gpus; states are split within a group and repeated by each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from gyre.core.records import Checkpointing, Matmul
from gyre.parallel.config import Zero
from gyre.planner.activations import ITEM_BYTES
from gyre.planner.plan import Dtype, ModelNumbers

Offload = Literal["none", "optimizer", "all"]

FLOAT = 4  # bytes of a float32 number
MOMENTS = 2 * FLOAT


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One way to train."""

    gpus: int  # ranks in all; each has its own sequences
    zero: Zero
    shard_ranks: int  # ranks that split the states of one copy; divides gpus; 1 for ZeRO-0
    checkpointing: Checkpointing
    tokens_per_chunk: int
    offload: Offload  # what lives in host memory while losses and gradients are computed

    @property
    def replicas(self) -> int:
        return self.gpus // self.shard_ranks

    @property
    def hybrid(self) -> bool:
        return self.zero > 0 and self.shard_ranks < self.gpus

    def words(self) -> str:
        kind = "data parallel" if self.zero == 0 else f"ZeRO-{self.zero}"
        kind = "one GPU" if self.gpus == 1 else kind
        split = f" in {self.replicas} groups of {self.shard_ranks}" if self.hybrid else ""
        offload = "" if self.offload == "none" else f", {self.offload} state on the host"
        return f"{kind}{split}, checkpointing {self.checkpointing}, chunks of {self.tokens_per_chunk:,} tokens{offload}"


def state_bytes(model: ModelNumbers, dtype: Dtype, layout: Layout, owner: str = "actor") -> dict[str, int]:
    """Bytes per rank of one trained model, by component, all of it wherever it is. With one rank they are those of
    `planner.memory.predict_components`."""
    count, shard = model.num_parameters, _shard(model.num_parameters, layout)
    if layout.zero >= 2:
        sizes = {"params": FLOAT * shard, "grads": FLOAT * shard, "optimizer": MOMENTS * shard}
    else:
        sizes = {"params": ITEM_BYTES[dtype] * count, "grads": FLOAT * count, "optimizer": MOMENTS * shard}
        if dtype != "float32":
            sizes["master"] = FLOAT * shard
    return {f"{owner}.{name}": size for name, size in sizes.items()}


def away_bytes(states: dict[str, int], layout: Layout) -> dict[str, int]:
    """The part of the states that lives in host memory during forward and backward passes. FSDP2 offloads parameters
    and gradients by shards; flat gradients are summed on the device, so they stay."""
    kinds: dict[Offload, tuple[str, ...]] = {
        "none": (),
        "optimizer": ("optimizer", "master"),
        "all": ("optimizer", "master", "params", "grads") if layout.zero >= 2 else ("optimizer", "master"),
    }
    return {name: size for name, size in states.items() if name.rpartition(".")[2] in kinds[layout.offload]}


def frozen_bytes(model: ModelNumbers, dtype: Dtype, layout: Layout) -> int:
    """A reference or reward model per rank: in shards of the compute dtype under ZeRO-2 and 3, whole otherwise."""
    count = _shard(model.num_parameters, layout) if layout.zero >= 2 else model.num_parameters
    return ITEM_BYTES[dtype] * count


def layer_item_bytes(dtype: Dtype, matmul: Matmul) -> int:
    """Per weight of a layer that FSDP2 gathers: norms, which stay wider in 8-bit training, are a few thousandths."""
    return 1 if matmul == "fp8" else ITEM_BYTES[dtype]


def gathered_bytes(model: ModelNumbers, dtype: Dtype, layout: Layout, matmul: Matmul = "same") -> int:
    """Compute weights that FSDP2 holds whole from the first layer's forward pass to the end of the backward one: the
    root group (embedding, head, final norm), and under ZeRO-2 every layer too."""
    if layout.zero < 2:
        return 0
    root = root_parameters(model)
    layers = model.num_parameters - root if layout.zero == 2 else 0
    return ITEM_BYTES[dtype] * root + layer_item_bytes(dtype, matmul) * layers


def root_parameters(model: ModelNumbers) -> int:
    """Of the group around the layers."""
    return model.num_parameters - model.num_layers * model.layer_parameters


def layer_group_bytes(model: ModelNumbers, dtype: Dtype, layout: Layout, matmul: Matmul = "same") -> int:
    """What FSDP2 needs around the layer whose backward pass runs: its weights and the next one's, gathered (ZeRO-3);
    its gradients in the compute dtype; the float32 buffer that is reduced."""
    if layout.zero < 2:
        return 0
    item, count = ITEM_BYTES[dtype], model.layer_parameters
    gathered = 2 * layer_item_bytes(dtype, matmul) * count if layout.zero == 3 else 0
    return gathered + item * count + FLOAT * count


def on_one_gpu(layout: Layout) -> Layout:
    return replace(layout, gpus=1, zero=0, shard_ranks=1)


def _shard(count: int, layout: Layout) -> int:
    return -(-count // layout.shard_ranks)
