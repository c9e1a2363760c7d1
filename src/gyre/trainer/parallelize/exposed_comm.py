"""Exposed: how long the computation waits for collectives that FSDP2 runs beside it on a CUDA
device. In: FSDP2's groups of one model and their collectives. Out: pairs of marks in a Traffic:
when the computation came to a wait, when what it waited for was done.

FSDP2 lets the computation's stream wait for events that it does not show, so the same two moments
are marked beside them: by hooks that run just before its own, and right behind each collective. Not
seen is one wait per backward pass, for the sum of the first layer's gradient, between the
embedding's gradient and its sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gyre.distributed.comm_stats import Traffic
from gyre.trainer.offload.copy_streams import CopyEvent, CopyStream


class Exposed:
    """Of one model. `computing` is the stream that computes, `beside` gives the one that a
    collective runs on."""

    def __init__(
        self, traffic: Traffic, computing: CopyStream, beside: Callable[[], CopyStream]
    ) -> None:
        self.traffic, self.computing, self.beside = traffic, computing, beside
        # the newest sum of gradients that nothing has waited for
        self.summed: CopyEvent | None = None

    def before_sum(self) -> None:
        """A group's gradients are there: FSDP2 waits for the sum of the group before, then begins
        this one's."""
        if self.summed is not None:
            self.traffic.awaited(self.computing.mark(), self.summed)
            self.summed = None


class ExposedCommWatch:
    """Of one group. `ahead`: its weights are gathered in the backward pass too, before they are
    needed; else only when they are."""

    def __init__(self, model: Exposed, *, ahead: bool) -> None:
        self._model, self._ahead = model, ahead
        self._needed: CopyEvent | None = None  # a need of what is not gathered yet
        self._gathered: CopyEvent | None = None  # gathered, and not needed yet

    def hook(self, module: nn.Module) -> None:
        """After FSDP2 has hooked the module."""
        if self._ahead:
            module.register_forward_pre_hook(lambda *_: self._need(), prepend=True)
            module.register_forward_hook(self._before_backward, prepend=True)
        module.register_forward_pre_hook(self._behind_backward)

    def gathering(self) -> None:
        if not self._ahead:
            self._needed = self._model.computing.mark()

    def gathered(self) -> None:
        """Called where the collective was."""
        done = self._model.beside().mark()
        if self._needed is None:
            self._gathered = done
        else:
            self._model.traffic.awaited(self._needed, done)
            self._needed = None

    def summing(self, *, last: bool) -> CopyEvent | None:
        """Returns what `summed` wants to know: where the computation was, if it has nothing to do
        but wait."""
        return self._model.computing.mark() if last else None

    def summed(self, since: CopyEvent | None) -> None:
        """Called where the collective was."""
        done = self._model.beside().mark()
        if since is not None:
            self._model.traffic.awaited(since, done)
        self._model.summed = done if since is None else None

    def _need(self) -> None:
        reached = self._model.computing.mark()
        if self._gathered is None:
            self._needed = reached
        else:
            self._model.traffic.awaited(reached, self._gathered)
            self._gathered = None

    def _before_backward(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: self._need())

    def _behind_backward(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        for tensor in inputs:
            if isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled():
                tensor.register_hook(lambda _: self._model.before_sum())
