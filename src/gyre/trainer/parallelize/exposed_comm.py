"""Exposed communication: how long computation waits for FSDP2's overlapped collectives on CUDA. In:
FSDP2's groups of one model and their collectives. Out: pairs of events in Traffic: when the
computation reached a wait, and when the awaited work ended.

FSDP2 makes the compute stream wait for events that it does not expose. The same moments are
therefore recorded nearby: by hooks that run just before its own, and right after each collective.
One wait per backward pass is not recorded: the one for the first layer's gradient sum, between the
embedding's gradient and its sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gyre.distributed.comm_stats import Traffic
from gyre.kernels.device_wait import DeviceEvent
from gyre.trainer.offload.copy_streams import CopyStream


@dataclass
class Exposed:
    """Recorder of one model."""

    traffic: Traffic
    computing: CopyStream  # the compute stream
    beside: Callable[[], CopyStream]  # returns the stream of a collective
    summed: DeviceEvent | None = None  # the newest sum of gradients that nothing has waited for

    def before_sum(self) -> None:
        """Record that a group's gradients are complete: FSDP2 waits for the previous group's sum,
        then starts this one."""
        if self.summed is not None:
            self.traffic.awaited(self.computing.mark(), self.summed)
            self.summed = None


class ExposedCommWatch:
    """Recorder of one group. `ahead`: its weights are prefetched in the backward pass too;
    otherwise gathered on demand."""

    def __init__(self, model: Exposed, *, ahead: bool) -> None:
        self._model = model
        self._ahead = ahead
        self._needed: DeviceEvent | None = None  # a need of what is not gathered yet
        self._gathered: DeviceEvent | None = None  # gathered, and not needed yet

    def hook(self, module: nn.Module) -> None:
        """Install the hooks, after FSDP2 has hooked the module."""
        if self._ahead:
            module.register_forward_pre_hook(lambda *_: self._need(), prepend=True)
            module.register_forward_hook(self._before_backward, prepend=True)
        module.register_forward_pre_hook(self._behind_backward)

    def gathering(self) -> None:
        if not self._ahead:
            self._needed = self._model.computing.mark()

    def gathered(self) -> None:
        """Record the end of a gather, right after the collective."""
        done = self._model.beside().mark()
        if self._needed is None:
            self._gathered = done
        else:
            self._model.traffic.awaited(self._needed, done)
            self._needed = None

    def summing(self, *, last: bool) -> DeviceEvent | None:
        """Return the compute stream's position for `summed`, if it can only wait."""
        return self._model.computing.mark() if last else None

    def summed(self, since: DeviceEvent | None) -> None:
        """Record the end of a sum, right after the collective."""
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
