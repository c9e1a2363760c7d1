"""Optimiser state in flat buffers and AdamW over them. In: named parameters, then gradients by
autograd's hooks. Out: new weights, in place.

One float32 buffer each for master weights, gradients and the two moments, whatever the number of
parameters; matrices lie first and what takes no weight decay after them, so decay is one slice; of
the matrices those whose moments are codes of 8 bits lie before the others. With float32 parameters
the master buffer IS the parameters' storage; otherwise the parameters are low-precision copies,
refreshed after every update.

FlatOptimizer is that of a rank that holds everything; trainer.optim.sharded has those that hold a
part. Master weights of their own, moments and gradients lie where `trainer.offload.state_placement`
puts them: on the device, or away from it and streamed.
"""

# N numbers of a flat buffer

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from gyre.distributed.mesh import Mesh
from gyre.distributed.process_group import RankGroup
from gyre.kernels.float8 import Amax
from gyre.trainer.adamw.adamw import Numbers, Span, UpdateSpans, update_spans
from gyre.trainer.adamw.blocks import block_layout, is_coded
from gyre.trainer.offload.host_gradients import HostGradients
from gyre.trainer.offload.state_fields import StateField
from gyre.trainer.offload.state_placement import StatePlacement
from gyre.trainer.offload.state_stream import Sent
from gyre.trainer.offload.weight_stream import carve, room_bytes
from gyre.trainer.parallelize.sharded_module import local_part
from gyre.weights.shards import Place, Shape, ShardLayout, align, whole_layout

NORM_NUMBERS = 1 << 24  # whose squares are added in float32
# of a gradient in host memory that visit the device at a time to be summed over ranks
REDUCE_NUMBERS = 1 << 25


def takes_decay(name: str, parameter: Tensor) -> bool:
    """Matrices decay. Norm weights, biases and scalar heads don't."""
    return parameter.dim() >= 2 and parameter.shape[0] > 1 and not name.endswith(".bias")


class AdamW(ABC):
    """What every split of the state has in common. `layout` says who holds what; `starts` and
    `file_size` place the tensors in a flat buffer that holds all of them."""

    layout: ShardLayout
    grad_N: Tensor
    fields: tuple[StateField, ...]  # of the moments
    moments: dict[str, Tensor]  # by field

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        mesh: Mesh,
        home: StatePlacement | None = None,
        codes: bool = False,
        update_spans: UpdateSpans = update_spans,
    ) -> None:
        """Without a `home` everything is on the device. `codes`: moments are codes of 8 bits where
        they can be. `update_spans` updates moments and weights."""
        self.parameters = dict(parameters)
        self.betas, self.eps, self.weight_decay, self.mesh = betas, eps, weight_decay, mesh
        self.num_updates = 0
        self.decays = {
            name: takes_decay(name, parameter) for name, parameter in self.parameters.items()
        }
        self.shapes: dict[str, Shape] = {
            name: tuple(parameter.shape) for name, parameter in self.parameters.items()
        }
        self.coded = frozenset(
            name
            for name, shape in self.shapes.items()
            if codes and self.decays[name] and is_coded(shape)
        )
        self.starts, self.coded_stop, self.decay_stop, self.file_size = lay_out(
            self.shapes, self.decays, self.coded
        )
        device = next(iter(self.parameters.values())).device
        self.home = home or StatePlacement("", device if device.type != "meta" else mesh.device)
        self.device = self.home.device
        self._update_spans = update_spans
        self._laid: list[Span] | None = None  # `spans` of the update to come
        # sums over ranks need the device
        self.reduces_by_parts = self.home.gradients and self.device.type == "cuda"
        self.gathers_by_parts = self.home.weights and self.device.type == "cuda"
        self.reduce_numbers = REDUCE_NUMBERS
        self._hooks: list = []

    def make_buffers(
        self, *, gradient_size: int, keeps_master: bool, num_coded: int
    ) -> Tensor | None:
        """Make moments, of which those of the first `num_coded` numbers are codes, and gradient.
        Return master weights of their own; None if the compute weights are these."""
        made = self.home.make(
            self.layout.size,
            gradient_size=gradient_size,
            keeps_master=keeps_master,
            num_coded=num_coded if self.coded else None,
        )
        self.grad_N = made["grad"]
        self.fields = tuple(field for field in self.home.fields if field.name != "master")
        self.moments = {field.name: made[field.name] for field in self.fields}
        return made.get("master")

    def span(
        self,
        first: int,
        weight_N: Tensor,
        grad_N: Tensor,
        *,
        decays: bool,
        amax: Amax | None = None,
    ) -> Span:
        """Numbers from `first` on of this rank's state, whose moments are of one kind."""
        last = first + len(weight_N)
        found = {
            field.serves: self.moments[field.name][field.at(first, last)]
            for field in self.fields
            if field.covers(first, last)
        }
        return Span(
            first=first, weight_N=weight_N, grad_N=grad_N, decays=decays, amax=amax, **found
        )

    def hook(self, grads: Mapping[str, Tensor]) -> None:
        """Collect each parameter's gradient in `grads` as soon as it is complete."""
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(_collector(grads[name], self.home.sums))
            for name, parameter in self.parameters.items()
        ]

    @abstractmethod
    def take_masters(self) -> None:
        """Begin with the weights that the forward pass computes with. The constructor does it where
        it finds numbers; after parameters of the meta device got theirs, whoever filled them
        does."""
        ...

    @abstractmethod
    def masters(self) -> dict[str, Tensor]:
        """Float32 weights that this rank holds, by name: all, or its run of each."""
        ...

    @abstractmethod
    def spans(self) -> Iterator[Span]: ...

    @abstractmethod
    def reduce(self) -> None:
        """Sum the gradient over the ranks, in float32; each needs it only where it updates."""
        ...

    @abstractmethod
    def refresh_compute(self) -> None:
        """Bring the weights of the forward pass to the master weights, on all ranks."""
        ...

    @abstractmethod
    def round_masters(self, first: int, master_N: Tensor) -> None:
        """Bring this rank's compute weights to master weights that lie at `first` of its flat
        state."""
        ...

    @abstractmethod
    def rounded(self, first: int, master_N: Tensor) -> list[Sent]:
        """As `round_masters`, for weights in host memory: the copies that do it."""
        ...

    @abstractmethod
    def share_compute(self) -> None:
        """After `round_masters` of all of its state: bring the compute weights to those of all
        ranks."""
        ...

    @abstractmethod
    def compute_tensors(self) -> dict[str, Tensor]:
        """Every tensor that lives in the storage of the compute weights, so that all can be given
        another one."""
        ...

    @abstractmethod
    def master_tensors(self) -> dict[str, Tensor]:
        """Master weights that have a storage of their own."""
        ...

    @abstractmethod
    def squared_norm(self) -> Tensor:
        """Of the summed gradient where this rank updates it, float64, [1], summed over the shard
        group."""
        ...

    @property
    def places(self) -> Mapping[str, Place]:
        """Which numbers of each parameter this rank holds and updates."""
        return self.layout.ranks[self.mesh.shard.rank]

    def runs(self, flat_N: Tensor) -> dict[str, Tensor]:
        """A flat buffer of this rank's, with an item per number, by parameter."""
        return {
            name: flat_N[place.at : place.at + place.stop - place.start]
            for name, place in self.places.items()
        }

    def field_layout(self, field: StateField) -> ShardLayout:
        """Who holds which items of a field of the moments."""
        layout = self.layout.of(
            [name for name in self.layout.shapes if (name in self.coded) is field.coded]
        )
        return block_layout(layout) if field.block > 1 else layout

    def field_runs(self, field: StateField, flat: Tensor) -> dict[str, Tensor]:
        """A field of the moments, or a copy of it, by parameter."""
        found = {}
        for name, place in self.places.items():
            if (name in self.coded) is field.coded:
                size = place.stop - place.start
                found[name] = flat[field.at(place.at, place.at + size)] if size else flat[:0]
        return found

    def zero_grad(self) -> None:
        self._laid = None
        if self.home.sums is not None:
            self.home.sums.zero()
        else:
            self.grad_N.zero_()

    def settle_gradients(self) -> None:
        """Wait for gradients that are still on their way to the sum."""
        if self.home.sums is not None:
            self.home.sums.settle()

    def all_reduce(self, group: RankGroup, x_N: Tensor) -> None:
        """Sum over the group; what lies in host memory beside a GPU goes through it a part at a
        time."""
        if group.size == 1 or not self.reduces_by_parts:
            group.all_reduce(x_N)
            return
        for part_N in x_N.split(self.reduce_numbers):
            there_N = part_N.to(group.device)
            group.all_reduce(there_N)
            part_N.copy_(there_N)
            self.home.progress()

    def grad_norm(self) -> float:
        """Global 2-norm of the summed gradient; infinite or NaN when a gradient is. The same on
        every rank."""
        norm = self.squared_norm().sqrt()
        # before a GPU is waited for: it has work until then, and none after
        self._laid = list(self.spans())
        return float(norm)

    def update(self, *, learning_rate: float, grad_scale: float) -> None:
        """AdamW with the summed gradient × grad_scale, then refresh the compute weights and clear
        the gradient."""
        self.num_updates += 1
        spans, self._laid = self._laid or list(self.spans()), None
        numbers = Numbers(
            learning_rate=learning_rate,
            grad_scale=grad_scale,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            num_updates=self.num_updates,
        )
        stream, own_masters = self.home.stream, bool(self.master_tensors())
        if stream is None:
            self._update_spans(spans, numbers)
            self.refresh_compute()
            return

        def update_part(part: Span) -> None:
            self._update_spans([part], numbers)
            if own_masters and not self.home.weights:
                self.round_masters(part.first, part.weight_N)  # while they are on the device

        def beside(part: Span) -> list[Sent]:
            return self.rounded(part.first, part.weight_N) if self.home.weights else []

        stream.run(spans, update_part, beside)
        self.share_compute()
        self.zero_grad()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self.home.close()


class FlatOptimizer(AdamW):
    """Everything on this rank. `grad_N` collects the gradient of a loss over any number of backward
    passes until `update` consumes it; ranks of `mesh.replica` hold the same and see other parts of
    the batch."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], **settings) -> None:
        super().__init__(parameters, **settings)
        self.layout = whole_layout(self.shapes, self.starts, self.file_size)
        all_wide = all(p.dtype == torch.float32 for p in self.parameters.values())
        self.master_is_compute = all_wide and not self.home.weights
        own_N = self.make_buffers(
            gradient_size=self.file_size,
            keeps_master=not self.master_is_compute,
            num_coded=self.coded_stop,
        )
        self.master_N = torch.zeros(self.file_size, device=self.device) if own_N is None else own_N
        self._masters = views(self.master_N, self.starts, self.shapes)
        self._grads = views(self.grad_N, self.starts, self.shapes)
        blank = any(parameter.is_meta for parameter in self.parameters.values())
        rooms = self._host_rooms()
        for name, parameter in self.parameters.items():
            if self.home.weights:
                move_in(parameter, rooms[name])
            elif self.master_is_compute:
                move_in(parameter, self._masters[name])
            elif parameter.is_meta:
                move_in(
                    parameter,
                    torch.empty(parameter.shape, dtype=parameter.dtype, device=self.device),
                )
        if not blank:
            self.take_masters()
        self.hook(self._grads)

    @torch.no_grad()
    def take_masters(self) -> None:
        if not self.master_is_compute:
            torch._foreach_copy_(
                [self._masters[name] for name in self.parameters], list(self.parameters.values())
            )

    def masters(self) -> dict[str, Tensor]:
        return self._masters

    def grads(self) -> dict[str, Tensor]:
        return self._grads

    def spans(self) -> Iterator[Span]:
        for first, last in pairwise((0, self.coded_stop, self.decay_stop, self.file_size)):
            if first < last:
                yield self.span(
                    first,
                    self.master_N[first:last],
                    self.grad_N[first:last],
                    decays=last <= self.decay_stop,
                )

    def reduce(self) -> None:
        self.settle_gradients()
        self.all_reduce(self.mesh.replica, self.grad_N)

    def squared_norm(self) -> Tensor:
        return squared_norm_of(self.grad_N)

    def compute_tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = dict(self.parameters)
        if self.master_is_compute:
            tensors |= {"master": self.master_N} | {
                f"master.{name}": view for name, view in self._masters.items()
            }
        return tensors

    def master_tensors(self) -> dict[str, Tensor]:
        return {} if self.master_is_compute else {"master": self.master_N}

    @torch.no_grad()
    def refresh_compute(self) -> None:
        """Round the master weights into the parameters, in place."""
        if not self.master_is_compute:
            torch._foreach_copy_(
                list(self.parameters.values()), [self._masters[name] for name in self.parameters]
            )

    def _host_rooms(self) -> dict[str, Tensor]:
        if not self.home.weights:
            return {}
        parameters = list(self.parameters.values())
        rooms = carve(self.home.room_for_weights(room_bytes(parameters)), parameters)
        return dict(zip(self.parameters, rooms, strict=True))

    @torch.no_grad()
    def round_masters(self, first: int, master_N: Tensor) -> None:
        copy_all(self.rounded(first, master_N))

    def rounded(self, first: int, master_N: Tensor) -> list[Sent]:
        return overlaps(self.parameters, self.starts, first, master_N)

    def share_compute(self) -> None:
        """Every rank has rounded all of it."""


def squared_norm_of(x_N: Tensor) -> Tensor:
    """Float64, []. On a CPU by parts, since one float32 sum of billions of squares loses the small
    ones."""
    parts = x_N.split(NORM_NUMBERS) if x_N.device.type == "cpu" else (x_N,)
    squares = [torch.linalg.vector_norm(part_N).double().square() for part_N in parts]
    return torch.stack(squares).sum()


def overlaps(
    parameters: Mapping[str, Tensor], starts: Mapping[str, int], first: int, flat_N: Tensor
) -> list[Sent]:
    """Where numbers that lie at `first` of a flat buffer belong in whole tensors that begin at
    `starts` there: (part of a tensor, numbers)."""
    last, found = first + len(flat_N), []
    for name, parameter in parameters.items():
        low, high = max(first, starts[name]), min(last, starts[name] + parameter.numel())
        if low < high:
            target_N = parameter.detach().view(-1)[low - starts[name] : high - starts[name]]
            found.append((target_N, flat_N[low - first : high - first]))
    return found


def copy_all(sent: Sequence[Sent]) -> None:
    if sent:
        torch._foreach_copy_([target_N for target_N, _ in sent], [source_N for _, source_N in sent])


def views(
    flat_N: Tensor, starts: Mapping[str, int], shapes: Mapping[str, Shape]
) -> dict[str, Tensor]:
    """The tensors that lie in a flat buffer."""
    return {
        name: flat_N[starts[name] : starts[name] + math.prod(shape)].view(shape)
        for name, shape in shapes.items()
    }


def lay_out(
    shapes: Mapping[str, Shape], decays: Mapping[str, bool], coded: Collection[str] = ()
) -> tuple[dict[str, int], int, int, int]:
    """Place tensors in a flat buffer: (start by name, end of the part whose moments are codes, of
    the part that decays, size). Tensors with codes decay; they are whole blocks, so each begins on
    one."""
    starts: dict[str, int] = {}
    stops, at = [], 0
    for wanted in ((True, True), (False, True), (False, False)):
        for name, shape in shapes.items():
            if (name in coded, decays[name]) == wanted:
                starts[name] = at
                at += align(math.prod(shape))
        stops.append(at)
    coded_stop, decay_stop, size = stops
    return starts, coded_stop, decay_stop, size


@torch.no_grad()
def move_in(parameter: nn.Parameter, home: Tensor) -> None:
    """Make `home` the parameter's storage. Its numbers come along; one of the meta device has none,
    and stays the same object all the same."""
    if parameter.is_meta:
        torch.utils.swap_tensors(
            parameter, nn.Parameter(home, requires_grad=parameter.requires_grad)
        )
        return
    home.copy_(parameter)
    parameter.data = home


def _collector(grad: Tensor, sums: HostGradients | None):
    """A hook that moves a parameter's gradient into its place in the flat buffer."""

    def collect(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if sums is None:
            grad.add_(local_part(parameter.grad))
        else:
            sums.add(grad.view(-1), local_part(parameter.grad))
        parameter.grad = None

    return collect
