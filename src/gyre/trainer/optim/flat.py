"""Optimizer state in flat buffers, and AdamW over them. In: named parameters, then gradients from
autograd hooks. Out: new weights, in place. Past 500 lines: all of it reads one layout of offsets.

Master weights, gradients and the two moments have one float32 buffer each, whatever the number of
parameters. Matrices come first and parameters without weight decay last, so decay is one slice. Of
the matrices, those with 8-bit moments come first. With float32 parameters the master buffer IS the
parameters' storage. Otherwise the parameters are low-precision copies, refreshed after every
update.

FlatOptimizer holds everything on each rank; trainer.optim.sharded has the sharded ones.
`trainer.offload.state_placement` places separate master weights, moments and gradients: on the
device, or offloaded and streamed.
"""

# N numbers of a flat buffer

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from gyre.distributed.layout import ModelLayout
from gyre.distributed.mesh import Mesh
from gyre.distributed.process_group import RankGroup
from gyre.kernels.float8 import Amax
from gyre.trainer.adamw.adamw import Numbers, Span, UpdateSpans, update_spans
from gyre.trainer.adamw.blocks import block_layout, is_coded
from gyre.trainer.offload.host_gradients import HostGradients
from gyre.trainer.offload.state_fields import StateField
from gyre.trainer.offload.state_placement import StatePlacement
from gyre.trainer.offload.state_stream import Sent
from gyre.trainer.offload.weight_stream import carve, carved_bytes
from gyre.trainer.optim.copies import Copies, counted_runs, plan_copies, sum_copies
from gyre.trainer.parallelize.sharded_module import local_part
from gyre.weights.shards import Place, Shape, ShardLayout, align, whole_layout

NORM_NUMBERS = 1 << 24  # whose squares are added in float32
# of a gradient in host memory that visit the device at a time to be summed over ranks
REDUCE_NUMBERS = 1 << 25


def takes_decay(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter decays. Matrices do; norm weights, biases and scalar heads do
    not."""
    return parameter.dim() >= 2 and parameter.shape[0] > 1 and not name.endswith(".bias")


class AdamW(ABC):
    """Base of all shardings of the state. `layout` assigns numbers to ranks; `starts` and
    `file_size` place the tensors in a flat buffer of all of them. Over tensor ranks all these are
    of local tensors."""

    layout: ShardLayout
    copies: Copies  # of which other tensor ranks have a copy
    grad_N: Tensor
    fields: tuple[StateField, ...]  # of the moments
    moments: dict[str, Tensor]  # by field
    master_is_compute: bool  # or the masters are apart, in `master_N`
    master_N: Tensor

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        mesh: Mesh,
        table: ModelLayout | None = None,
        home: StatePlacement | None = None,
        codes: bool = False,
        update_spans: UpdateSpans = update_spans,
    ) -> None:
        """Allocate the state. `table`: of the parameters over several tensor ranks. Without a
        `home` everything is on the device. `codes`: use 8-bit moments where possible.
        `update_spans` updates moments and weights."""
        self.parameters = dict(parameters)
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.mesh = mesh
        self.num_updates = 0
        self._table = table
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

    def take_layout(self, layout: ShardLayout) -> None:
        """Set which numbers each rank holds, and find those that other tensor ranks hold, too."""
        self.layout = replace(layout, table=self._table)
        coordinate = self.mesh.coordinate
        self.copies = plan_copies(
            self.layout, shard=coordinate.shard, tensor_rank=coordinate.tensor
        )
        starts = {name: place.at for name, place in self.places.items()}
        self._counted = counted_runs(self.copies, starts, self.layout.size)

    def make_buffers(
        self, *, gradient_size: int, keeps_master: bool, num_coded: int
    ) -> Tensor | None:
        """Allocate gradient and moments, the first `num_coded` numbers coded. Returns the master
        weights, or None if the compute weights are the masters."""
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
        """Return the state from number `first`, whose moments are of one kind."""
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
        """Initialize the masters from the compute weights.

        The constructor calls it where the parameters have values. For parameters of the meta
        device, their initializer calls it.
        """
        ...

    @abstractmethod
    def masters(self) -> dict[str, Tensor]:
        """Return this rank's float32 weights by name: all, or its run of each."""
        ...

    @abstractmethod
    def spans(self) -> Iterator[Span]: ...

    def reduce(self) -> None:
        """Sum the gradient over the ranks, in float32. Each rank needs only the part that it
        updates."""
        self.settle_gradients()
        self.reduce_data()
        sum_copies(self.copies, self.own_gradients(), self.mesh.tensor)

    @abstractmethod
    def reduce_data(self) -> None:
        """Sum the gradient over the ranks that see other data."""
        ...

    @abstractmethod
    def own_gradients(self) -> dict[str, Tensor]:
        """Return the gradient of the numbers that this rank updates, by parameter, flat."""
        ...

    @abstractmethod
    def refresh_compute(self) -> None:
        """Update the compute weights from the master weights, on all ranks."""
        ...

    @torch.no_grad()
    def round_masters(self, first: int, master_N: Tensor) -> None:
        """Round master weights at `first` of the flat state into this rank's compute weights."""
        copy_all(self.rounded(first, master_N))

    @abstractmethod
    def rounded(self, first: int, master_N: Tensor) -> list[Sent]:
        """Return the copies that `round_masters` would make, for weights in host memory."""
        ...

    @abstractmethod
    def share_compute(self) -> None:
        """Gather the compute weights of all ranks, after `round_masters` of all of this rank's
        state."""
        ...

    @abstractmethod
    def compute_tensors(self) -> dict[str, Tensor]:
        """Return every tensor in the compute weights' storage, so that all can be moved to
        another."""
        ...

    def master_tensors(self) -> dict[str, Tensor]:
        """Return master weights with a separate storage."""
        return {} if self.master_is_compute else {"master": self.master_N}

    @abstractmethod
    def squared_norm(self) -> Tensor:
        """Return the squared norm of this rank's summed gradient, float64, [1], summed over the
        shard group. Of copies on several tensor ranks the owner alone counts."""
        ...

    def counted(self, grad_N: Tensor, first: int, last: int) -> list[Tensor]:
        """Return the parts of `grad_N`, which is of numbers [first, last) of the state, that this
        rank counts in a norm."""
        clipped = [(max(low, first), min(high, last)) for low, high in self._counted]
        return [grad_N[low - first : high - first] for low, high in clipped if low < high]

    @property
    def places(self) -> Mapping[str, Place]:
        """Return the numbers of each parameter that this rank holds and updates."""
        return self.layout.ranks[self.mesh.shard.rank]

    def runs(self, flat_N: Tensor) -> dict[str, Tensor]:
        """Split a flat buffer of this rank, with one item per number, by parameter."""
        return {
            name: flat_N[place.at : place.at + place.stop - place.start]
            for name, place in self.places.items()
        }

    def field_layout(self, field: StateField) -> ShardLayout:
        """Return the layout of a moments field over the ranks."""
        layout = self.layout.of(
            [name for name in self.layout.shapes if (name in self.coded) is field.coded]
        )
        return block_layout(layout) if field.block > 1 else layout

    def field_runs(self, field: StateField, flat: Tensor) -> dict[str, Tensor]:
        """Split a moments field, or a copy of it, by parameter."""
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
        """Wait for gradients in transfer to the sum."""
        if self.home.sums is not None:
            self.home.sums.settle()

    def all_reduce(self, group: RankGroup, x_N: Tensor) -> None:
        """Sum over the group. Host memory beside a GPU passes through it in parts."""
        if group.size == 1 or not self.reduces_by_parts:
            group.all_reduce(x_N)
            return
        for part_N in x_N.split(self.reduce_numbers):
            there_N = part_N.to(group.device)
            group.all_reduce(there_N)
            part_N.copy_(there_N)
            self.home.progress()

    def grad_norm(self) -> float:
        """Return the global 2-norm of the summed gradient; infinite or NaN when a gradient is.
        Equal on every rank."""
        squared = self.squared_norm()
        self.mesh.tensor.all_reduce(squared)
        norm = squared.sqrt()
        # before a GPU is waited for: it has work until then, and none after
        self._laid = list(self.spans())
        return float(norm)

    def update(self, *, learning_rate: float, grad_scale: float) -> None:
        """Apply AdamW with the summed gradient × grad_scale, refresh the compute weights and zero
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
    """Holds the whole state on this rank. `grad_N` accumulates gradients until `update` consumes
    them. Ranks of `mesh.replica` hold the same state and process other parts of the batch."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], **settings) -> None:
        super().__init__(parameters, **settings)
        self.take_layout(whole_layout(self.shapes, self.starts, self.file_size))
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
        buffers = self._host_weights()
        for name, parameter in self.parameters.items():
            if self.home.weights:
                move_in(parameter, buffers[name])
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

    def reduce_data(self) -> None:
        self.all_reduce(self.mesh.replica, self.grad_N)

    def own_gradients(self) -> dict[str, Tensor]:
        return self.runs(self.grad_N)

    def squared_norm(self) -> Tensor:
        found = squared_norm_of(self.counted(self.grad_N, 0, self.file_size))
        return found.view(1).to(self.device)

    def compute_tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = dict(self.parameters)
        if self.master_is_compute:
            tensors |= {"master": self.master_N} | {
                f"master.{name}": view for name, view in self._masters.items()
            }
        return tensors

    @torch.no_grad()
    def refresh_compute(self) -> None:
        """Round the master weights into the parameters, in place."""
        if not self.master_is_compute:
            torch._foreach_copy_(
                list(self.parameters.values()), [self._masters[name] for name in self.parameters]
            )

    def _host_weights(self) -> dict[str, Tensor]:
        if not self.home.weights:
            return {}
        parameters = list(self.parameters.values())
        buffers = carve(self.home.weights_buffer(carved_bytes(parameters)), parameters)
        return dict(zip(self.parameters, buffers, strict=True))

    def rounded(self, first: int, master_N: Tensor) -> list[Sent]:
        return overlaps(self.parameters, self.starts, first, master_N)

    def share_compute(self) -> None:
        """Do nothing: every rank has rounded all weights."""


def squared_norm_of(runs: Sequence[Tensor]) -> Tensor:
    """Return the squared norm of all runs together, float64, []. On a CPU it is computed in parts:
    one float32 sum of billions of squares loses small ones."""
    parts = [
        part_N
        for run_N in runs
        for part_N in (run_N.split(NORM_NUMBERS) if run_N.device.type == "cpu" else (run_N,))
    ]
    if not parts:  # all that this rank has is another one's, too
        return torch.zeros((), dtype=torch.float64)
    squares = [torch.linalg.vector_norm(part_N).double().square() for part_N in parts]
    return torch.stack(squares).sum()


def overlaps(
    parameters: Mapping[str, Tensor], starts: Mapping[str, int], first: int, flat_N: Tensor
) -> list[Sent]:
    """Return (part of a tensor, numbers) for the overlap of numbers at `first` with tensors at
    `starts`."""
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
    """Return the tensors of a flat buffer as views."""
    return {
        name: flat_N[starts[name] : starts[name] + math.prod(shape)].view(shape)
        for name, shape in shapes.items()
    }


def lay_out(
    shapes: Mapping[str, Shape], decays: Mapping[str, bool], coded: Collection[str] = ()
) -> tuple[dict[str, int], int, int, int]:
    """Place tensors in a flat buffer. Returns (start by name, end of the coded part, end of the
    decayed part, size). Coded tensors decay and are whole blocks, so each begins on a block."""
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
    """Make `home` the parameter's storage and copy its values. A meta parameter has none; it stays
    the same object."""
    if parameter.is_meta:
        torch.utils.swap_tensors(
            parameter, nn.Parameter(home, requires_grad=parameter.requires_grad)
        )
        return
    home.copy_(parameter)
    parameter.data = home


def _collector(grad: Tensor, sums: HostGradients | None):
    """Return a hook that moves a parameter's gradient into the flat buffer."""

    def collect(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if sums is None:
            grad.add_(local_part(parameter.grad))
        else:
            sums.add(grad.view(-1), local_part(parameter.grad))
        parameter.grad = None

    return collect
