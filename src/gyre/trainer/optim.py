"""Optimiser state in flat buffers and AdamW over them. In: named parameters, then gradients by autograd's hooks.
Out: new weights, in place. Callers: trainer.native, trainer.actor.

One float32 buffer each for master weights, gradients and the two moments, whatever the number of parameters; matrices
lie first and what takes no weight decay after them, so decay is one slice. With float32 parameters the master buffer
IS the parameters' storage; otherwise the parameters are low-precision copies, refreshed after every update.

Letters: N numbers in a flat buffer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from gyre.kernels.choose import load_adamw

ALIGN = 16  # float32 numbers; every tensor starts on a 64-byte line
BLOCK_CPU = 1 << 17  # numbers per pass: five buffers of a block stay in the caches between the passes


def takes_decay(name: str, parameter: Tensor) -> bool:
    """Matrices decay. Norm weights, biases and scalar heads don't."""
    return parameter.dim() >= 2 and parameter.shape[0] > 1 and not name.endswith(".bias")


class FlatOptimizer:
    """Master weights, gradients and Adam moments of a set of parameters.

    `grad_N` collects the gradient of a loss over any number of backward passes until `update` consumes it.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        self.parameters = dict(parameters)
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.num_updates = 0
        self.master_is_compute = all(p.dtype == torch.float32 for p in self.parameters.values())
        self._layout, self._decay_stop, size = lay_out(self.parameters)
        device = next(iter(self.parameters.values())).device
        self.master_N, self.grad_N, self.exp_avg_N, self.exp_avg_sq_N = (
            torch.zeros(size, dtype=torch.float32, device=device) for _ in range(4)
        )
        self._masters = self._views(self.master_N)
        self._grads = self._views(self.grad_N)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                self._masters[name].copy_(parameter)
                if self.master_is_compute:
                    parameter.data = self._masters[name]
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._collector(name))
            for name, parameter in self.parameters.items()
        ]

    def _views(self, flat_N: Tensor) -> dict[str, Tensor]:
        views = {}
        for name, (start, shape) in self._layout.items():
            views[name] = flat_N[start : start + math.prod(shape)].view(shape)
        return views

    def _collector(self, name: str):
        """Return a hook that moves a parameter's gradient into the flat buffer as soon as it is complete."""

        def collect(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self._grads[name].add_(parameter.grad)
            parameter.grad = None

        return collect

    def masters(self) -> dict[str, Tensor]:
        """Float32 weights by name, as views of the flat buffer."""
        return self._masters

    def compute_tensors(self) -> dict[str, Tensor]:
        """Every tensor that lives in the storage of the compute weights, so that all can be given another one."""
        tensors: dict[str, Tensor] = dict(self.parameters)
        if self.master_is_compute:
            tensors |= {"master": self.master_N} | {f"master.{name}": view for name, view in self._masters.items()}
        return tensors

    def grads(self) -> dict[str, Tensor]:
        return self._grads

    def zero_grad(self) -> None:
        self.grad_N.zero_()

    def grad_norm(self) -> float:
        """Global 2-norm of the collected gradient; infinite or NaN when a gradient is."""
        return float(torch.linalg.vector_norm(self.grad_N))

    def update(self, *, learning_rate: float, grad_scale: float) -> None:
        """AdamW with the collected gradient × grad_scale, then refresh the compute weights and clear the gradient."""
        self.num_updates += 1
        size = self.master_N.numel()
        fused = load_adamw() if self.master_N.is_cuda else None
        if fused is not None:
            fused(
                self.master_N, self.grad_N, self.exp_avg_N, self.exp_avg_sq_N,
                decay_stop=self._decay_stop, learning_rate=learning_rate, grad_scale=grad_scale, betas=self.betas,
                eps=self.eps, weight_decay=self.weight_decay, num_updates=self.num_updates,
            )  # fmt: skip
        else:
            block = BLOCK_CPU if self.master_N.device.type == "cpu" else size
            for start in range(0, size, block):
                self._update_block(start, min(start + block, size), learning_rate, grad_scale)
        self.refresh_compute()

    def _update_block(self, start: int, stop: int, learning_rate: float, grad_scale: float) -> None:
        """Same order of operations as torch.optim.AdamW. The gradient's place serves as scratch and is left zero."""
        beta1, beta2 = self.betas
        weight_N, grad_N = self.master_N[start:stop], self.grad_N[start:stop]
        exp_avg_N, exp_avg_sq_N = self.exp_avg_N[start:stop], self.exp_avg_sq_N[start:stop]
        if grad_scale != 1.0:
            grad_N.mul_(grad_scale)
        if self.weight_decay and start < self._decay_stop:
            weight_N[: self._decay_stop - start].mul_(1.0 - learning_rate * self.weight_decay)
        exp_avg_N.lerp_(grad_N, 1.0 - beta1)
        exp_avg_sq_N.mul_(beta2).addcmul_(grad_N, grad_N, value=1.0 - beta2)
        torch.sqrt(exp_avg_sq_N, out=grad_N)
        grad_N.div_(math.sqrt(1.0 - beta2**self.num_updates)).add_(self.eps)
        weight_N.addcdiv_(exp_avg_N, grad_N, value=-learning_rate / (1.0 - beta1**self.num_updates))
        grad_N.zero_()

    @torch.no_grad()
    def refresh_compute(self) -> None:
        """Round the master weights into the parameters, in place."""
        if not self.master_is_compute:
            torch._foreach_copy_(list(self.parameters.values()), [self._masters[name] for name in self.parameters])

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def lay_out(parameters: Mapping[str, Tensor]) -> tuple[dict[str, tuple[int, tuple[int, ...]]], int, int]:
    """Place tensors in a flat buffer: (start and shape by name, end of the part that decays, size)."""
    layout: dict[str, tuple[int, tuple[int, ...]]] = {}
    at = 0
    decay_stop = 0
    for decays in (True, False):
        for name, parameter in parameters.items():
            if takes_decay(name, parameter) is decays:
                layout[name] = (at, tuple(parameter.shape))
                at += -(-parameter.numel() // ALIGN) * ALIGN
        decay_stop = at if decays else decay_stop
    return layout, decay_stop, at
