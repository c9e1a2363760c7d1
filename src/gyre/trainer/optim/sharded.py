"""Sharded AdamW: each rank updates a part. In: parameters, whole (ZeRO-1) or sharded by FSDP2
(ZeRO-2, 3). Out: new weights on all ranks.

Parameters of another dtype than the trunk's (a float32 scalar head on a bfloat16 decoder) are
small: every rank holds and updates them.
"""

# N numbers of a flat buffer, S ranks of the shard group

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn

from gyre.trainer.adamw.adamw import Span
from gyre.trainer.adamw.blocks import BLOCK, coded_first
from gyre.trainer.offload.state_stream import Sent
from gyre.trainer.offload.weight_stream import carve, carved_bytes
from gyre.trainer.optim.flat import AdamW, move_in, overlaps, squared_norm_of, views
from gyre.trainer.parallelize.float8_gather import begin_amax
from gyre.trainer.parallelize.sharded_module import is_shard, local_part
from gyre.weights.shards import ALIGN, align, row_layout, slice_layout


class SlicedOptimizer(AdamW):
    """ZeRO-1: compute weights and gradients are whole and flat; each rank of `mesh.shard` owns a
    slice of master weights and moments. Gradients are reduce-scattered once per update, new weights
    gathered in place."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], **settings) -> None:
        super().__init__(parameters, **settings)
        self.dtype = next(iter(self.parameters.values())).dtype
        apart = [
            name for name, parameter in self.parameters.items() if parameter.dtype != self.dtype
        ]
        assert list(self.parameters)[len(self.parameters) - len(apart) :] == apart, (
            "they must lie at the end"
        )
        assert not any(self.decays[name] for name in apart), apart
        size = min((self.starts[name] for name in apart), default=self.file_size)
        shard = self.mesh.shard
        self._apart = apart
        unit = BLOCK if self.coded else ALIGN  # no slice ends within a block of moments
        layout = slice_layout(
            self.shapes,
            self.starts,
            align(size, shard.size * unit),
            num_ranks=shard.size,
            replicated=frozenset(apart),
        )
        self.take_layout(layout)
        tail = sum(align(math.prod(self.shapes[name])) for name in apart)
        self._slice = self.layout.size - tail  # numbers
        self._whole = self._slice * shard.size
        self._low = self._slice * shard.rank
        self.master_is_compute = self.dtype == torch.float32 and not self.home.weights
        self._num_coded = min(max(self.coded_stop - self._low, 0), self._slice)
        own_N = self.make_buffers(
            gradient_size=self._whole + tail,
            keeps_master=not self.master_is_compute,
            num_coded=self._num_coded,
        )
        buffers = self._make_compute()
        self.master_N = self.compute_N if own_N is None else own_N
        self._masters = self.runs(self._own_master_N())
        blank = any(parameter.is_meta for parameter in self.parameters.values())
        trunk = {name: shape for name, shape in self.shapes.items() if name not in apart}
        for name, home in views(self.compute_N, self.starts, trunk).items():
            move_in(self.parameters[name], home)
        for name, buffer in buffers.items():
            move_in(self.parameters[name], buffer)
        if not blank:
            self.take_masters()
        at = dict(self.starts) | {name: self._whole + self._tail_of(name) for name in apart}
        self.hook(views(self.grad_N, at, self.shapes))

    def _make_compute(self) -> dict[str, Tensor]:
        """Allocate the flat compute weights. Returns the locations of separate tensors, if those
        move too."""
        if not self.home.weights:
            self.compute_N = torch.zeros(self._whole, dtype=self.dtype, device=self.device)
            return {}
        flat_N = torch.empty(self._whole, dtype=self.dtype, device="meta")
        like = [flat_N, *(self.parameters[name] for name in self._apart)]
        self.compute_N, *buffers = carve(self.home.weights_buffer(carved_bytes(like)), like)
        return dict(zip(self._apart, buffers, strict=True))

    @torch.no_grad()
    def take_masters(self) -> None:
        if self.master_is_compute:
            return
        for name, master in self.masters().items():
            place = self.places[name]
            master.copy_(self.parameters[name].detach().view(-1)[place.start : place.stop])

    def _tail_of(self, name: str) -> int:
        return self.layout.ranks[0][name].at - self._slice

    def _own_master_N(self) -> Tensor:
        """Return this rank's slice of the master weights, and the weights that all ranks hold after
        it."""
        return (
            self.master_N[self._low : self._low + self._slice]
            if self.master_is_compute
            else self.master_N
        )

    def masters(self) -> dict[str, Tensor]:
        return self._masters

    def spans(self) -> Iterator[Span]:
        weight_N = self._own_master_N()
        decay_stop = min(max(self.decay_stop - self._low, 0), self._slice)
        for first, last in pairwise(
            (0, self._num_coded, decay_stop, self._slice, self.layout.size)
        ):
            if first < last:
                # in the gradient
                at = first + (self._low if first < self._slice else self._whole - self._slice)
                yield self.span(
                    first,
                    weight_N[first:last],
                    self.grad_N[at : at + last - first],
                    decays=last <= decay_stop,
                )

    def reduce_data(self) -> None:
        self._reduce_scatter()
        self.all_reduce(self.mesh.replica, self.grad_N[self._low : self._low + self._slice])
        if self._apart:
            self.all_reduce(self.mesh.data, self.grad_N[self._whole :])

    def own_gradients(self) -> dict[str, Tensor]:
        own = self.runs(self.grad_N[self._low : self._low + self._slice])
        tail_N = self.grad_N[self._whole :]
        for name in self._apart:
            at = self._tail_of(name)
            own[name] = tail_N[at : at + math.prod(self.shapes[name])]
        return own

    def _reduce_scatter(self) -> None:
        """Sum this rank's slice over the shard group. Host memory beside a GPU is processed in
        parts."""
        shard = self.mesh.shard
        if not self.reduces_by_parts:
            shard.reduce_scatter(self.grad_N[: self._whole])
            return
        for part_SN in self._parts(self.grad_N[: self._whole]):
            there_N = shard.reduce_scatter(part_SN.to(shard.device).reshape(-1))
            part_SN[shard.rank].copy_(there_N)

    def squared_norm(self) -> Tensor:
        own_N, tail_N = self.grad_N[self._low : self._low + self._slice], self.grad_N[self._whole :]
        found = squared_norm_of(self.counted(own_N, 0, self._slice)).view(1).to(self.device)
        self.mesh.shard.all_reduce(found)
        tail = self.counted(tail_N, self._slice, self.layout.size)
        return found + squared_norm_of(tail).to(self.device)

    @torch.no_grad()
    def refresh_compute(self) -> None:
        own_N = self.compute_N[self._low : self._low + self._slice]
        if not self.master_is_compute:
            own_N.copy_(self.master_N[: self._slice])
        for name in self._apart:
            self.parameters[name].copy_(self.masters()[name].view(self.shapes[name]))
        self.share_compute()

    def rounded(self, first: int, master_N: Tensor) -> list[Sent]:
        # of the numbers; what is apart follows
        trunk = min(max(self._slice - first, 0), len(master_N))
        apart = {name: self.parameters[name] for name in self._apart}
        tails = {name: self.layout.ranks[0][name].at for name in self._apart}
        own_N = self.compute_N[self._low + first : self._low + first + trunk]
        found = [(own_N, master_N[:trunk])] if trunk else []
        return found + overlaps(apart, tails, first + trunk, master_N[trunk:])

    @torch.no_grad()
    def share_compute(self) -> None:
        if self.gathers_by_parts:
            self._gather_parts()
        else:
            self.mesh.shard.all_gather(
                self.compute_N, self.compute_N[self._low : self._low + self._slice]
            )
        self.zero_grad()  # of what other ranks own, too

    def _gather_parts(self) -> None:
        """Gather compute weights in host memory through the GPU, in parts."""
        shard = self.mesh.shard
        for part_SN in self._parts(self.compute_N):
            there_SN = torch.empty(part_SN.shape, dtype=part_SN.dtype, device=shard.device)
            shard.all_gather(there_SN.view(-1), part_SN[shard.rank].to(shard.device))
            part_SN.copy_(there_SN)

    def _parts(self, whole_N: Tensor) -> Iterator[Tensor]:
        """Yield some numbers of every rank's slice at a time."""
        slices_SN = whole_N.view(self.mesh.shard.size, self._slice)
        step = max(1, self.reduce_numbers // self.mesh.shard.size)
        for first in range(0, self._slice, step):
            yield slices_SN[:, first : first + step]
            self.home.progress()

    def compute_tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {"compute": self.compute_N, **self.parameters}
        if self.master_is_compute:
            tensors |= {f"master.{name}": view for name, view in self._masters.items()}
        return tensors


class RowOptimizer(AdamW):
    """ZeRO-2 and 3: parameters are FSDP2's row shards, float32, and are the master weights. FSDP
    sums gradients over `mesh.shard` during backward; `reduce` sums over replicas."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], **settings) -> None:
        super().__init__(parameters, **settings)
        self._apart = [name for name, p in self.parameters.items() if not is_shard(p)]
        self.master_is_compute = True
        shard = self.mesh.shard
        shapes = coded_first(self.shapes, self.coded)
        replicated = frozenset(self._apart)
        self.take_layout(row_layout(shapes, num_ranks=shard.size, replicated=replicated))
        # they are at the end
        self._cut = self.places[self._apart[0]].at if self._apart else self.layout.size
        for name, master in self.masters().items():
            place = self.places[name]
            assert master.dtype == torch.float32 and len(master) == place.stop - place.start, name
        wide = [place.at for name, place in self.places.items() if name not in self.coded]
        num_coded = min(wide, default=self.layout.size)
        self.make_buffers(gradient_size=self.layout.size, keeps_master=False, num_coded=num_coded)
        grads = self.runs(self.grad_N)
        self.hook(
            {name: grads[name].view(local_part(p).shape) for name, p in self.parameters.items()}
        )

    def take_masters(self) -> None:
        """Do nothing: the parameters are the masters."""

    def masters(self) -> dict[str, Tensor]:
        return {name: local_part(parameter).view(-1) for name, parameter in self.parameters.items()}

    def spans(self) -> Iterator[Span]:
        grads, masters = self.runs(self.grad_N), self.masters()
        for name, place in self.places.items():
            if place.start < place.stop:
                amax = begin_amax(self.parameters[name])
                yield self.span(
                    place.at, masters[name], grads[name], decays=self.decays[name], amax=amax
                )

    def reduce_data(self) -> None:
        if self._apart:
            self.all_reduce(self.mesh.shard, self.grad_N[self._cut :])
        self.all_reduce(self.mesh.replica, self.grad_N)

    def own_gradients(self) -> dict[str, Tensor]:
        return self.runs(self.grad_N)

    def squared_norm(self) -> Tensor:
        shards, rest = (
            squared_norm_of(self.counted(self.grad_N[low:high], low, high))
            for low, high in ((0, self._cut), (self._cut, self.layout.size))
        )
        found = shards.view(1).to(self.device)
        self.mesh.shard.all_reduce(found)
        return found + rest.to(self.device)

    def refresh_compute(self) -> None:
        """Do nothing: weights are gathered from the masters."""

    def rounded(self, first: int, master_N: Tensor) -> list[Sent]:
        assert not self.home.weights, "shards are not offloaded"
        return []

    def share_compute(self) -> None:
        """Do nothing: as in `refresh_compute`."""

    def compute_tensors(self) -> dict[str, Tensor]:
        return {name: local_part(parameter) for name, parameter in self.parameters.items()}
