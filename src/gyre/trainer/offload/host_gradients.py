"""Host gradients: the float32 sum of gradients in host memory. In: each parameter's gradient on the
device, as soon as it is complete. Out: the sum, with the device memory freed.

A copy stream moves a gradient, concurrently with the backward pass, into one of a few pinned
buffers. A thread adds it in the order of the micro-batches, as on the device. When all buffers are
full the backward pass blocks.
"""

# N numbers of a gradient

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from concurrent.futures import TimeoutError as TooLate

import torch
from torch import Tensor

from gyre.core.errors import DeadlineError
from gyre.kernels.device_wait import DeviceEvent
from gyre.trainer.offload.copy_streams import compute_lane, make_lane, make_thread, wait_for


class HostGradients:
    """Accumulates gradients on the host. The compute thread calls `add`, `zero` and `settle`, one
    at a time."""

    def __init__(
        self, sum_N: Tensor, buffers: Sequence[Tensor], device: torch.device, deadline_s: float
    ) -> None:
        """Bind the sums `sum_N` and the transfer `buffers`, uint8 of equal size."""
        self._sum_N = sum_N
        self._device = device
        self._deadline_s = deadline_s
        self._free: queue.Queue[Tensor] = queue.Queue(len(buffers))
        for buffer in buffers:
            self._free.put(buffer)
        self._buffer_bytes = min(len(buffer) for buffer in buffers)
        self._lane = make_lane(device)
        self._adder = make_thread("host-gradients", device)
        self._failure: BaseException | None = None
        self._is_zero = True
        # sent, and waited for by the computation, since last set to 0
        self.out_bytes = 0
        self.waited_s = 0.0

    def add(self, sum_N: Tensor, grad: Tensor) -> None:
        """Enqueue the addition of a complete gradient. `grad` may be freed when this returns."""
        grad_N = grad.reshape(-1)
        self._is_zero = False
        self._lane.after(compute_lane(self._device).mark())
        self._lane.holds(grad_N)
        step = self._buffer_bytes // grad_N.element_size()
        for first in range(0, len(grad_N), step):
            part_N, buffer = grad_N[first : first + step], self._next_buffer()
            host_N = buffer[: part_N.numel() * part_N.element_size()].view(part_N.dtype)
            self._lane.copy(host_N, part_N)
            self._adder.submit(
                self._add, sum_N[first : first + step], host_N, buffer, self._lane.mark()
            )
        self.out_bytes += grad_N.numel() * grad_N.element_size()

    def zero(self) -> None:
        """Zero the sums, after pending additions and before later ones."""
        if not self._is_zero:
            self._adder.submit(self._sum_N.zero_)
        self._is_zero = True

    def settle(self) -> None:
        """Wait until all additions are complete and re-raise their error. The caller may then
        change the sums."""
        began = time.perf_counter()
        try:
            self._adder.submit(lambda: None).result(self._deadline_s)
        except TooLate:
            raise self._late() from None
        self.waited_s += time.perf_counter() - began
        self._is_zero = False
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        self._adder.shutdown(wait=True)

    def _next_buffer(self) -> Tensor:
        began = time.perf_counter()
        try:
            return self._free.get(timeout=self._deadline_s)
        except queue.Empty:
            raise self._late() from None
        finally:
            self.waited_s += time.perf_counter() - began

    def _add(self, sum_N: Tensor, host_N: Tensor, buffer: Tensor, copied: DeviceEvent) -> None:
        try:
            wait_for(copied, lambda: "a gradient's copy to the host", self._deadline_s)
            sum_N.add_(host_N)
        except Exception as error:  # noqa: BLE001  raised by settle
            self._failure = error
        finally:
            self._free.put(buffer)

    def _late(self) -> DeadlineError:
        return DeadlineError(
            f"gradients were not added in host memory within {self._deadline_s:g} s",
            hint="the host is short of cores or memory bandwidth: raise trainer.offload_deadline_s",
        )
