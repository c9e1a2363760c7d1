"""Optimiser state in flat buffers and AdamW over them. In: named parameters, then gradients by autograd's hooks.
Out: new weights, in place. Callers: trainer.learner, trainer.native.

One float32 buffer each for master weights, gradients and the two moments, whatever the number of parameters; matrices
lie first and what takes no weight decay after them, so decay is one slice. With float32 parameters the master buffer
IS the parameters' storage; otherwise the parameters are low-precision copies, refreshed after every update.

FlatOptimizer is that of a rank that holds everything; trainer.optim_sharded has those that hold a part.
"""

# N numbers of a flat buffer

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gyre.kernels.choose import load_adamw
from gyre.parallel.mesh import Mesh
from gyre.trainer.parallelise import local_part
from gyre.weights.shards import Place, Shape, ShardLayout, align, whole_layout

BLOCK_CPU = 1 << 17  # numbers per pass: five buffers of a block stay in the caches between the passes


def takes_decay(name: str, parameter: Tensor) -> bool:
    """Matrices decay. Norm weights, biases and scalar heads don't."""
    return parameter.dim() >= 2 and parameter.shape[0] > 1 and not name.endswith(".bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Numbers that this rank updates: views of one length."""

    weight_N: Tensor
    grad_N: Tensor
    exp_avg_N: Tensor
    exp_avg_sq_N: Tensor
    decays: bool


class AdamW(ABC):
    """What every split of the state has in common. `layout` says who holds what; `starts` and `file_size` place the
    tensors in the flat buffer that a snapshot holds, which is the same for every split."""

    layout: ShardLayout
    grad_N: Tensor
    exp_avg_N: Tensor
    exp_avg_sq_N: Tensor

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        mesh: Mesh,
    ) -> None:
        self.parameters = dict(parameters)
        self.betas, self.eps, self.weight_decay, self.mesh = betas, eps, weight_decay, mesh
        self.num_updates = 0
        self.decays = {name: takes_decay(name, parameter) for name, parameter in self.parameters.items()}
        self.shapes: dict[str, Shape] = {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}
        self.starts, self.decay_stop, self.file_size = lay_out(self.shapes, self.decays)
        device = next(iter(self.parameters.values())).device
        self.device = device if device.type != "meta" else mesh.world.device
        self._hooks: list = []

    def buffer(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.float32, device=self.device)

    def hook(self, grads: Mapping[str, Tensor]) -> None:
        """Collect each parameter's gradient in `grads` as soon as it is complete."""
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(_collector(grads[name]))
            for name, parameter in self.parameters.items()
        ]

    @abstractmethod
    def take_masters(self) -> None:
        """Begin with the weights that the forward pass computes with. The constructor does it where it finds numbers;
        after parameters of the meta device got theirs, whoever filled them does."""
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
    def compute_tensors(self) -> dict[str, Tensor]:
        """Every tensor that lives in the storage of the compute weights, so that all can be given another one."""
        ...

    @abstractmethod
    def master_tensors(self) -> dict[str, Tensor]:
        """Master weights that have a storage of their own."""
        ...

    @abstractmethod
    def squared_norm(self) -> Tensor:
        """Of the summed gradient where this rank updates it, float64, [1], summed over the shard group."""
        ...

    @property
    def places(self) -> Mapping[str, Place]:
        """Which numbers of each parameter this rank holds and updates."""
        return self.layout.ranks[self.mesh.shard.rank]

    def runs(self, flat_N: Tensor) -> dict[str, Tensor]:
        """A flat buffer of this rank's (`exp_avg_N`, `exp_avg_sq_N`, or a copy) by parameter."""
        return {name: flat_N[place.at : place.at + place.stop - place.start] for name, place in self.places.items()}

    def zero_grad(self) -> None:
        self.grad_N.zero_()

    def grad_norm(self) -> float:
        """Global 2-norm of the summed gradient; infinite or NaN when a gradient is. The same on every rank."""
        return float(self.squared_norm().sqrt())

    def update(self, *, learning_rate: float, grad_scale: float) -> None:
        """AdamW with the summed gradient × grad_scale, then refresh the compute weights and clear the gradient."""
        self.num_updates += 1
        fused = load_adamw() if self.device.type == "cuda" else None
        settings = {"learning_rate": learning_rate, "grad_scale": grad_scale}
        for span in self.spans():
            size = span.weight_N.numel()
            if fused is not None:
                buffers = span.weight_N, span.grad_N, span.exp_avg_N, span.exp_avg_sq_N
                fused(
                    *buffers, decay_stop=size if span.decays else 0, betas=self.betas, eps=self.eps,
                    weight_decay=self.weight_decay, num_updates=self.num_updates, **settings,
                )  # fmt: skip
                continue
            block = BLOCK_CPU if self.device.type == "cpu" else size
            for start in range(0, size, max(1, block)):
                self._update_block(span, slice(start, min(start + block, size)), **settings)
        self.refresh_compute()

    def _update_block(self, span: Span, at: slice, learning_rate: float, grad_scale: float) -> None:
        """Same order of operations as torch.optim.AdamW. The gradient's place serves as scratch and is left zero."""
        beta1, beta2 = self.betas
        weight_N, grad_N = span.weight_N[at], span.grad_N[at]
        exp_avg_N, exp_avg_sq_N = span.exp_avg_N[at], span.exp_avg_sq_N[at]
        if grad_scale != 1.0:
            grad_N.mul_(grad_scale)
        if self.weight_decay and span.decays:
            weight_N.mul_(1.0 - learning_rate * self.weight_decay)
        exp_avg_N.lerp_(grad_N, 1.0 - beta1)
        exp_avg_sq_N.mul_(beta2).addcmul_(grad_N, grad_N, value=1.0 - beta2)
        torch.sqrt(exp_avg_sq_N, out=grad_N)
        grad_N.div_(math.sqrt(1.0 - beta2**self.num_updates)).add_(self.eps)
        weight_N.addcdiv_(exp_avg_N, grad_N, value=-learning_rate / (1.0 - beta1**self.num_updates))
        grad_N.zero_()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


class FlatOptimizer(AdamW):
    """Everything on this rank. `grad_N` collects the gradient of a loss over any number of backward passes until
    `update` consumes it; ranks of `mesh.replica` hold the same and see other parts of the batch."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], **settings) -> None:
        super().__init__(parameters, **settings)
        self.layout = whole_layout(self.shapes, self.starts, self.file_size)
        self.master_is_compute = all(p.dtype == torch.float32 for p in self.parameters.values())
        self.master_N, self.grad_N, self.exp_avg_N, self.exp_avg_sq_N = (self.buffer(self.file_size) for _ in range(4))
        self._masters = views(self.master_N, self.starts, self.shapes)
        self._grads = views(self.grad_N, self.starts, self.shapes)
        blank = any(parameter.is_meta for parameter in self.parameters.values())
        for name, parameter in self.parameters.items():
            if self.master_is_compute:
                move_in(parameter, self._masters[name])
            elif parameter.is_meta:
                move_in(parameter, torch.empty(parameter.shape, dtype=parameter.dtype, device=self.device))
        if not blank:
            self.take_masters()
        self.hook(self._grads)

    @torch.no_grad()
    def take_masters(self) -> None:
        if not self.master_is_compute:
            torch._foreach_copy_([self._masters[name] for name in self.parameters], list(self.parameters.values()))

    def masters(self) -> dict[str, Tensor]:
        return self._masters

    def grads(self) -> dict[str, Tensor]:
        return self._grads

    def spans(self) -> Iterator[Span]:
        for first, last in ((0, self.decay_stop), (self.decay_stop, self.file_size)):
            yield Span(
                weight_N=self.master_N[first:last],
                grad_N=self.grad_N[first:last],
                exp_avg_N=self.exp_avg_N[first:last],
                exp_avg_sq_N=self.exp_avg_sq_N[first:last],
                decays=first == 0,
            )

    def reduce(self) -> None:
        self.mesh.replica.all_reduce(self.grad_N)

    def squared_norm(self) -> Tensor:
        return torch.linalg.vector_norm(self.grad_N).double().square()

    def compute_tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = dict(self.parameters)
        if self.master_is_compute:
            tensors |= {"master": self.master_N} | {f"master.{name}": view for name, view in self._masters.items()}
        return tensors

    def master_tensors(self) -> dict[str, Tensor]:
        return {} if self.master_is_compute else {"master": self.master_N}

    @torch.no_grad()
    def refresh_compute(self) -> None:
        """Round the master weights into the parameters, in place."""
        if not self.master_is_compute:
            torch._foreach_copy_(list(self.parameters.values()), [self._masters[name] for name in self.parameters])


def views(flat_N: Tensor, starts: Mapping[str, int], shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    """The tensors that lie in a flat buffer."""
    return {name: flat_N[starts[name] : starts[name] + math.prod(shape)].view(shape) for name, shape in shapes.items()}


def lay_out(shapes: Mapping[str, Shape], decays: Mapping[str, bool]) -> tuple[dict[str, int], int, int]:
    """Place tensors in a flat buffer: (start by name, end of the part that decays, size)."""
    starts: dict[str, int] = {}
    at = decay_stop = 0
    for wanted in (True, False):
        for name, shape in shapes.items():
            if decays[name] is wanted:
                starts[name] = at
                at += align(math.prod(shape))
        decay_stop = at if wanted else decay_stop
    return starts, decay_stop, at


@torch.no_grad()
def move_in(parameter: nn.Parameter, home: Tensor) -> None:
    """Make `home` the parameter's storage. Its numbers come along; one of the meta device has none, and stays the same
    object all the same."""
    if parameter.is_meta:
        torch.utils.swap_tensors(parameter, nn.Parameter(home, requires_grad=parameter.requires_grad))
        return
    home.copy_(parameter)
    parameter.data = home


def _collector(grad: Tensor):
    """A hook that moves a parameter's gradient into its place in the flat buffer."""

    def collect(parameter: Tensor) -> None:
        assert parameter.grad is not None
        grad.add_(local_part(parameter.grad))
        parameter.grad = None

    return collect
