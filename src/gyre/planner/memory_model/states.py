"""States: how one training job is spread over GPUs, and the model state that each rank then holds.
In: a Layout, sizes of the model. Out: bytes per rank by component. Pure.

ZeRO-0 and ZeRO-1 run trainer/optim/flat.py's flat buffers: compute weights and a float32 gradient
for every parameter on every rank; ZeRO-1 splits master weights and moments. ZeRO-2 and ZeRO-3 run
FSDP2: float32 parameters, gradients and moments in shards, and compute weights gathered, all of
them (2) or a layer at a time (3). Hybrid: shard_ranks is less than gpus; states are split within a
group and repeated by each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from gyre.core.records import Checkpointing, Matmul, Moments
from gyre.core.rounding import ceil_div
from gyre.distributed.config import SumGradients, Zero
from gyre.planner.memory_model.activations import ITEM_BYTES
from gyre.planner.plan import DeviceKind, Dtype, ModelNumbers, Shards
from gyre.trainer.adamw.blocks import BLOCK, is_coded
from gyre.trainer.offload.slices import (
    GRADIENT_BUFFERS,
    LAYER_BUFFERS,
    SLOTS,
    numbers_per_cut,
    staging_bytes,
)

Offload = Literal["none", "host", "disk"]

FLOAT = 4  # bytes of a float32 number
MOMENTS = 2 * FLOAT
CODED_BYTES = 2 * (BLOCK + FLOAT)  # both moments of a block: codes, and a scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One way to train."""

    gpus: int  # ranks in all
    zero: Zero
    shard_ranks: int  # ranks that split the states of one copy; divides data_ranks; 1 for ZeRO-0
    checkpointing: Checkpointing
    tokens_per_chunk: int
    offload_optimizer: Offload  # where master weights of their own and moments live
    offload_gradients: bool  # whether the float32 gradient lives in host memory
    moments: Moments = "float32"
    offload_parameters: tuple[str, ...] = ()  # models whose compute weights live in host memory
    sum_gradients: SumGradients = "chunk"  # when ZeRO-2 and 3 sum them over ranks
    apart: Mapping[str, Shards] = field(default_factory=dict)  # models unlike the actor
    tensor_ranks: int = 1  # that share the trainer's layers, and so their sequences
    engine_tensor_ranks: int = 1  # that share the layers of an engine

    def of(self, owner: str) -> Layout:
        """Return the layout of one model."""
        if owner not in self.apart:
            return self
        one = self.apart[owner]
        return replace(self, zero=one.zero, shard_ranks=one.ranks)

    @property
    def sums_once(self) -> bool:
        """Return whether ranks that hold shards sum their gradients once per update."""
        return self.zero >= 2 and self.sum_gradients == "update"

    @property
    def data_ranks(self) -> int:
        """Return the groups of ranks that have sequences of their own."""
        return self.gpus // self.tensor_ranks

    @property
    def replicas(self) -> int:
        return self.data_ranks // self.shard_ranks

    @property
    def hybrid(self) -> bool:
        return self.zero > 0 and self.shard_ranks < self.data_ranks

    def words(self) -> str:
        return (
            f"{self._ranks_words()}, checkpointing {self.checkpointing}, chunks of "
            f"{self.tokens_per_chunk:,} tokens"
            f"{self._state_words()}"
        )

    def _ranks_words(self) -> str:
        kinds = [f"tensor ranks {self.tensor_ranks}"] if self.tensor_ranks > 1 else []
        if self.data_ranks > 1:
            split = f" in {self.replicas} groups of {self.shard_ranks}" if self.hybrid else ""
            kinds.append(("data parallel" if self.zero == 0 else f"ZeRO-{self.zero}") + split)
        engines = self.engine_tensor_ranks
        over = f", engines over {engines} GPUs" if engines > 1 else ""
        return (" × ".join(kinds) or "one GPU") + over

    def _state_words(self) -> str:
        place = {"none": "", "host": "on the host", "disk": "on disk"}[self.offload_optimizer]
        moments = ", moments in 8 bits" if self.moments == "8_bit" else ""
        optimizer = f", optimizer state {place}" if place else ""
        gradients = ", gradients on the host" if self.offload_gradients else ""
        weights = (
            f", weights of {' and '.join(self.offload_parameters)} on the host"
            if self.offload_parameters
            else ""
        )
        once = ", gradients summed once per update" if self.sums_once else ""
        return moments + optimizer + gradients + weights + once

    def holds_weights(self, owner: str) -> bool:
        """Return whether a model's weights are on the device, of one that is whole."""
        return owner not in self.offload_parameters


def state_bytes(
    model: ModelNumbers, dtype: Dtype, layout: Layout, owner: str = "actor"
) -> dict[str, int]:
    """Bytes per rank of one trained model, by component, all of it wherever it is."""
    count, shard = model.num_parameters, _shard(model.num_parameters, layout)
    if layout.zero >= 2:
        sizes = {"params": FLOAT * shard, "grads": FLOAT * shard}
    else:
        sizes = {"params": ITEM_BYTES[dtype] * count, "grads": FLOAT * count}
    sizes["optimizer"] = moment_bytes(model, layout)
    if _own_masters(dtype, layout, owner):
        sizes["master"] = FLOAT * shard
    return {f"{owner}.{name}": size for name, size in sizes.items()}


def moment_bytes(model: ModelNumbers, layout: Layout) -> int:
    """Return both moments of one trained model, on the rank that has most of them: what has no
    codes may fill a slice of ZeRO-1."""
    shard, wide = (
        _shard(model.num_parameters, layout),
        model.num_parameters - coded_parameters(model, layout.moments),
    )
    wide = min(shard, wide) if layout.zero < 2 else _shard(wide, layout)
    return MOMENTS * wide + CODED_BYTES * ((shard - wide) // BLOCK)


def coded_parameters(model: ModelNumbers, moments: Moments) -> int:
    """Parameters whose moments are codes."""
    return (
        sum(math.prod(shape) for shape in matrix_shapes(model) if is_coded(shape))
        if moments == "8_bit"
        else 0
    )


def matrix_shapes(model: ModelNumbers) -> list[tuple[int, int]]:
    """Return the shape of every matrix of a model."""
    m, hidden = model, model.hidden_size
    heads = m.query_size + 2 * m.kv_size
    layer = [
        (heads, hidden),
        (hidden, m.query_size),
        (2 * m.mlp_size, hidden),
        (hidden, m.mlp_size),
    ]
    return [(m.vocab_size, hidden)] * (1 if m.tied else 2) + m.num_layers * layer


def away_bytes(states: dict[str, int], layout: Layout) -> dict[str, int]:
    """Return the part of the states that does not live on the device, on the host or on disk.
    Shards of FSDP2 are compute weights and master weights at once, so they stay."""
    return host_state_bytes(states, layout) | disk_state_bytes(states, layout)


def host_state_bytes(states: dict[str, int], layout: Layout) -> dict[str, int]:
    """Return the part that lives in host memory."""
    kinds = ("optimizer", "master") if layout.offload_optimizer == "host" else ()
    weights = {
        name: size
        for name, size in _of_kinds(states, ("params",)).items()
        if _is_away(name, layout)
    }
    return _of_kinds(states, kinds + (("grads",) if layout.offload_gradients else ())) | weights


def disk_state_bytes(states: dict[str, int], layout: Layout) -> dict[str, int]:
    """Return the part that lives in a file."""
    return _of_kinds(states, ("optimizer", "master") if layout.offload_optimizer == "disk" else ())


def layer_buffer_bytes(model: ModelNumbers, dtype: Dtype) -> int:
    """Places on the device of a model whose weights live in host memory: for what is outside the
    layers, and for the layers in turn."""
    around = model.num_parameters - model.num_layers * model.layer_parameters
    return ITEM_BYTES[dtype] * (around + LAYER_BUFFERS * model.layer_parameters)


def device_staging_bytes(
    model: ModelNumbers, dtype: Dtype, layout: Layout, cut_bytes: int, *, owner: str = "actor"
) -> int:
    """Return the bytes of the slots on the device through which one model's offloaded state
    passes."""
    visiting = _visiting_bytes(dtype, layout, owner) + (
        FLOAT * BLOCK if layout.offload_gradients else 0
    )
    size = _shard(model.num_parameters, layout)
    return staging_bytes(cut_bytes, block_bytes=visiting, size=size) if visiting else 0


def host_staging_bytes(
    model: ModelNumbers,
    dtype: Dtype,
    layout: Layout,
    cut_bytes: int,
    *,
    owner: str = "actor",
    device: DeviceKind = "cuda",
) -> int:
    """Return the host bytes of one trained model's buffers: between a file and a GPU, and between
    gradients and their sum."""
    visiting, size = _visiting_bytes(dtype, layout, owner), _shard(model.num_parameters, layout)
    found = 0
    if layout.offload_optimizer == "disk" and device == "cuda":
        shown = visiting + (FLOAT * BLOCK if layout.offload_gradients else 0)
        found += (
            SLOTS * numbers_per_cut(cut_bytes, block_bytes=shown, size=size) // BLOCK * visiting
        )
    if layout.offload_gradients:
        count = size if layout.zero >= 2 else model.num_parameters
        found += GRADIENT_BUFFERS * min(cut_bytes, FLOAT * count)
    return found


def _visiting_bytes(dtype: Dtype, layout: Layout, owner: str) -> int:
    """Return the bytes of a slot on the device for a block of optimizer state. A slot has room for
    moments of both kinds."""
    if layout.offload_optimizer == "none":
        return 0
    master = FLOAT if _own_masters(dtype, layout, owner) else 0
    return (master + MOMENTS) * BLOCK + (CODED_BYTES if layout.moments == "8_bit" else 0)


def _own_masters(dtype: Dtype, layout: Layout, owner: str) -> bool:
    """Return whether master weights are others than those that are computed with."""
    return layout.zero < 2 and (dtype != "float32" or not layout.holds_weights(owner))


def _is_away(params: str, layout: Layout) -> bool:
    return not layout.holds_weights(params.removesuffix(".params"))


def _of_kinds(states: dict[str, int], kinds: tuple[str, ...]) -> dict[str, int]:
    return {name: size for name, size in states.items() if name.rpartition(".")[2] in kinds}


def frozen_bytes(
    model: ModelNumbers, dtype: Dtype, layout: Layout, *, average: bool = False
) -> int:
    """Return a reference or reward model per rank: in shards of the compute dtype under ZeRO-2 and
    3, whole otherwise. A reference that is a moving `average` keeps that beside it, in float32."""
    count = _shard(model.num_parameters, layout) if layout.zero >= 2 else model.num_parameters
    return (ITEM_BYTES[dtype] + (FLOAT if average else 0)) * count


def layer_item_bytes(dtype: Dtype, matmul: Matmul) -> int:
    """Per weight of a layer that FSDP2 gathers: norms, which stay wider in 8-bit training, are a
    few thousandths."""
    return 1 if matmul == "fp8" else ITEM_BYTES[dtype]


def gathered_bytes(
    model: ModelNumbers, dtype: Dtype, layout: Layout, matmul: Matmul = "same"
) -> int:
    """Compute weights that FSDP2 holds whole as the loss is found: those of the root group, from
    the first layer's forward pass to the end of the backward one; a head of its own, to the end of
    its backward pass; and under ZeRO-2 every layer."""
    if layout.zero < 2:
        return 0
    layers = model.num_layers * model.layer_parameters if layout.zero == 2 else 0
    around = root_parameters(model) + head_parameters(model)
    return ITEM_BYTES[dtype] * around + layer_item_bytes(dtype, matmul) * layers


def root_parameters(model: ModelNumbers) -> int:
    """Return the parameters of the root group, embedding and final norm, without the head."""
    return model.num_parameters - model.num_layers * model.layer_parameters - head_parameters(model)


def head_parameters(model: ModelNumbers) -> int:
    """Return the parameters of a head that is not the embedding."""
    return 0 if model.tied else model.embedding_parameters


def layer_group_bytes(
    model: ModelNumbers, dtype: Dtype, layout: Layout, matmul: Matmul = "same"
) -> int:
    """Return what FSDP2 needs around the layer whose backward pass runs. These are its weights and
    the next one's, gathered (ZeRO-3), and its gradients in the compute dtype. Four bytes per
    parameter are for the reduction: a buffer each way in a 16-bit dtype, or one in float32."""
    if layout.zero < 2:
        return 0
    item, count = ITEM_BYTES[dtype], model.layer_parameters
    gathered = 2 * layer_item_bytes(dtype, matmul) * count if layout.zero == 3 else 0
    return gathered + item * count + FLOAT * count


def most_chunks(tokens: int, *, longest: int, ranks: int, tokens_per_chunk: int) -> int:
    """Return the most chunks of a rank in an update of `tokens`, when every sequence is as long as
    the longest."""
    sequences, per_chunk = ceil_div(tokens, longest * ranks), max(1, tokens_per_chunk // longest)
    return max(1, ceil_div(sequences, per_chunk))


def unsummed_bytes(model: ModelNumbers, layout: Layout, chunks: int) -> int:
    """Return the bytes of one model's float32 gradient that a rank holds whole. It does so from an
    update's first chunk to the backward pass of its last: FSDP2 keeps them until they are summed
    over ranks."""
    return FLOAT * model.num_parameters if layout.sums_once and chunks > 1 else 0


def on_one_gpu(layout: Layout) -> Layout:
    return replace(layout, gpus=1, zero=0, shard_ranks=1, tensor_ranks=1)


def _shard(count: int, layout: Layout) -> int:
    return ceil_div(count, layout.shard_ranks)
