"""TrainedModel: one trained model (actor, critic or reward model) with its optimizer state and
memory components. In: a Decoder, an optional ScalarHead, their layout over ranks, initial weights.
Out: updated weights, named tensors, storage pools."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gyre.core.events import Emit
from gyre.core.records import Checkpointing, Projection, Tier
from gyre.distributed.mesh import ModelSharding
from gyre.memory.pools.cuda_vmm import find_driver
from gyre.memory.pools.fixed import FixedPool
from gyre.memory.pools.storage import StoragePool
from gyre.models.decoder import Decoder, ScalarHead
from gyre.trainer.adamw.adamw import update_spans
from gyre.trainer.adamw.adamw_8bit import CodedUpdate
from gyre.trainer.adamw.blocks import check_codes, check_parts
from gyre.trainer.checkpoint.shards import Holding, PartSource, sharers
from gyre.trainer.config import TrainerConfig, refuse_cut
from gyre.trainer.offload.state_placement import StatePlacement
from gyre.trainer.offload.weight_stream import WeightStream
from gyre.trainer.optim.flat import AdamW, FlatOptimizer
from gyre.trainer.optim.sharded import RowOptimizer, SlicedOptimizer
from gyre.trainer.parallelize.float8_gather import float8_projections, float8_shard, share_amaxes
from gyre.trainer.parallelize.sharded_module import begin_chunk, is_sharded, local_tensors, reshard
from gyre.trainer.roles.materialize import cut_weights, is_blank, place_constants, table_of
from gyre.weights.boxes import local_source
from gyre.weights.gather import ShardSource
from gyre.weights.shards import row_layout
from gyre.weights.tensor_source import TensorSource, fill, whole_places

HEAD_PREFIX = "scalar_head."


class TrainedModel:
    """Decoder, scalar head (or None) and optimizer under one name, the prefix of components and
    snapshot keys."""

    def __init__(
        self,
        name: str,
        decoder: Decoder,
        head: ScalarHead | None,
        config: TrainerConfig,
        split: ModelSharding,
        *,
        folder: Path | None,
        emit: Emit,
        progress: Callable[[], None],
        weights: TensorSource | None = None,
    ) -> None:
        """Allocate the model. `folder`: of the disk tier, for offloaded state; `progress` as in
        StatePlacement. A meta-device decoder is filled from `weights`, or stays uninitialized until
        `restore`."""
        self.name = name
        self.decoder = decoder
        self.head = head
        self.split = split
        self.checkpointing: Checkpointing = config.checkpointing
        self.dtype = decoder.dtype  # that the forward pass computes in
        self.float8 = float8_projections(decoder, config.matmul, split.mesh.device)
        assert weights is None or is_blank(decoder)
        if name in config.offload_parameters:
            refuse_cut(name, zero=split.zero, ranks=split.mesh.shard.size)
        coded = config.moments == "8_bit"
        table = table_of(decoder)
        if coded:
            check_codes(name, [tuple(parameter.shape) for parameter in decoder.parameters()])
            check_parts(name, table)
        if split.shards_weights:
            cut_weights(decoder, split, trains=True, float8=self.float8)
        parameters = dict(decoder.named_parameters())
        if head is not None:
            heads = {HEAD_PREFIX + key: parameter for key, parameter in head.named_parameters()}
            parameters |= heads
            table = table and table.with_whole({key: tuple(p.shape) for key, p in heads.items()})
        # than on the device that it computes on
        elsewhere = is_blank(decoder) or name in config.offload_parameters
        device = split.mesh.device if elsewhere else decoder.device
        self.home = StatePlacement(
            name, device, config, folder=folder, emit=emit, progress=progress
        )
        self.optimizer = _optimizer_of(split)(
            parameters,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mesh=split.mesh,
            table=table,
            home=self.home,
            codes=coded,
            update_spans=CodedUpdate(device) if coded else update_spans,
        )  # which gives a blank decoder that is not cut the storage that it computes with
        place_constants(decoder, split.mesh.device)
        if weights is not None:
            self._fill(weights)
        self.stream = WeightStream(decoder, head, self.home.device) if self.home.weights else None
        self.weights_changed()

    def _fill(self, weights: TensorSource) -> None:
        weights = local_source(weights, self.optimizer.layout.model, self.split.mesh.tensor.rank)
        cut = self.split.shards_weights
        places = self.optimizer.places if cut else whole_places(weights.shapes)
        fill(local_tensors(self.decoder), places, weights, dtype=self.dtype)
        self.optimizer.take_masters()

    def shards(self, *, of_part: bool = False) -> ShardSource:
        """Return this rank's runs of weights that no rank holds whole. Where each data rank has its
        tensor rank's part whole, each gives an equal share of it. `of_part`: of that part alone,
        among the ranks that hold it together."""
        optimizer, mesh = self.optimizer, self.split.mesh
        names = [name for name in optimizer.shapes if not name.startswith(HEAD_PREFIX)]
        layout, local, group = optimizer.layout.of(names), optimizer.masters(), mesh.holders
        if of_part:
            assert self.split.shards_weights, "each data rank holds its tensor rank's part whole"
            return ShardSource(layout.local, local, group=mesh.shard, dtype=self.dtype)
        if not self.split.shards_weights:
            shapes = {name: optimizer.shapes[name] for name in names}
            shares = row_layout(shapes, num_ranks=mesh.data.size)
            layout, group = replace(shares, table=layout.table), mesh.all_ranks
            local = {
                name: optimizer.parameters[name].detach().view(-1)[place.start : place.stop]
                for name, place in layout.ranks[mesh.data.rank].items()
            }
        return ShardSource(layout, local, group=group, dtype=self.dtype)

    def begin_chunk(self, *, last: bool) -> None:
        """Prepare the forward pass of an update's micro-batch."""
        begin_chunk(self.decoder, self.split, last=last, reads_head=self.head is None)

    def update(self, *, learning_rate: float, grad_scale: float) -> None:
        """Take one optimizer step with the summed gradient × grad_scale."""
        self.optimizer.update(learning_rate=learning_rate, grad_scale=grad_scale)
        self.weights_changed()

    def weights_changed(self) -> None:
        """Refresh the scales of shards gathered in 8 bits: the whole weight's largest magnitude.
        Collective."""
        mesh = self.split.mesh
        groups = (mesh.shard, mesh.tensor)
        share_amaxes(self.optimizer.parameters.values(), self.dtype, groups)

    def gathers_in_float8(self, projection: Projection) -> bool:
        """Return whether the ranks exchange this matrix's weights in 8 bits."""
        return float8_shard(getattr(self.decoder.layers[0], projection).weight) is not None

    def let_go(self) -> None:
        """Free weights that an interrupted pass has left gathered."""
        reshard(self.decoder)

    def pools(self, folder: Path | None) -> list[StoragePool | FixedPool]:
        """Return one pool per component.

        With float32 weights the master is the compute weights and has no separate pool. Whole
        compute weights keep their addresses, which an engine may have captured in graphs. Offloaded
        state stays in place; the slots that bring it to the device are a component too.
        """
        optimizer, device = (
            self.optimizer,
            self.home.device if self.stream is not None else self.decoder.device,
        )
        contents: dict[str, Mapping[str, Tensor]] = {}
        if self.stream is None:
            contents["params"] = optimizer.compute_tensors()
        else:
            contents["layer_buffers"] = {"layer_buffers": self.stream.buffers_B}
        if not self.home.gradients:
            contents["grads"] = {"grad": optimizer.grad_N}
        if self.home.state == "none":
            contents["optimizer"] = optimizer.moments
            if masters := optimizer.master_tensors():
                contents["master"] = masters
        if self.home.staging_X is not None:
            contents["staging"] = {"slots": self.home.staging_X}
        # zero, or of no meaning, between steps: nothing to keep
        brief: tuple[Tier, ...] = ("device", "none")
        tiers = {"grads": brief, "staging": brief, "layer_buffers": brief}
        keeps_addresses = not is_sharded(self.decoder)
        return [
            StoragePool(
                f"{self.name}.{kind}",
                tensors,
                tiers=tiers.get(kind, ("device", "host", "disk")),
                folder=folder,
                device=device,
                driver=find_driver(device) if kind == "params" and keeps_addresses else None,
            )
            for kind, tensors in contents.items()
        ] + self.home.fixed_pools()

    def holdings(self) -> list[Holding]:
        """Return this rank's share of the model's snapshot. Gradients do not outlive a step.
        Offloaded state is accessed in place: in host memory or the mapped file."""
        self.home.check()
        optimizer, split = self.optimizer, self.split
        hold = partial(
            Holding,
            rank=split.mesh.shard.rank,
            tensor_rank=split.mesh.tensor.rank,
            sharers=sharers(optimizer.layout, split.mesh),
        )
        masters = hold(
            component=f"{self.name}.{'master' if optimizer.master_tensors() else 'params'}",
            prefix=f"{self.name}.master.",
            layout=optimizer.layout,
            dtype=torch.float32,
            tensors={name: tensor.detach() for name, tensor in optimizer.masters().items()},
        )
        moments = [
            hold(
                component=f"{self.name}.optimizer",
                prefix=f"{self.name}.{field.name}.",
                layout=optimizer.field_layout(field),
                dtype=field.dtype,
                tensors={"flat": optimizer.moments[field.name]},
                cut=lambda flat, field=field: optimizer.field_runs(field, flat["flat"]),
            )
            for field in optimizer.fields
        ]
        return [masters, *moments]

    def restore(self, source: PartSource, num_updates: int) -> None:
        """Load this rank's part of a compatible snapshot, in place. Collective: all ranks get the
        new weights."""
        self.optimizer.zero_grad()
        self.let_go()
        for holding in self.holdings():
            holding.load(source)
        self.home.flush()
        self.optimizer.num_updates = num_updates
        self.optimizer.refresh_compute()
        self.weights_changed()


def _optimizer_of(split: ModelSharding) -> type[AdamW]:
    """Return the class that keeps the state as it is split."""
    if not split.shards_state:
        return FlatOptimizer
    return RowOptimizer if split.shards_weights else SlicedOptimizer
