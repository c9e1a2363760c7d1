"""Weight stream: brings a model's offloaded weights to the device for its passes, layer by layer.
In: a Decoder, host memory for its weights. Out: the same Decoder, with parameters on the device
while they compute; the bytes moved and the time waited.

Between passes every parameter is in host memory only. During a pass the weights outside the layers
have their own buffer on the device, and the layers alternate between two. While one layer computes,
a copy stream fetches the next. A backward pass reverses at the last layer and reuses the two
resident layers. A parameter stays the same object; only its storage changes. Autograd references
parameters as objects, so a layer's backward pass reads the storage of that moment, as FSDP2's does.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gyre.core.rounding import round_up
from gyre.kernels.device_wait import DeviceEvent
from gyre.models.decoder import Decoder
from gyre.trainer.offload.copy_streams import Reached, compute_lane, make_lane, seconds_between
from gyre.trainer.offload.slices import LAYER_BUFFERS
from gyre.trainer.offload.state_stream import OffloadTraffic

ALIGN_BYTES = 256  # of a tensor in a buffer, as torch's own allocator aligns


@dataclass(slots=True)
class LayerBuffer:
    """Device memory for one layer at a time."""

    tensors: list[Tensor]
    layer: int | None = None
    fetched: DeviceEvent = field(default_factory=Reached)


class WeightStream:
    """Streams one model, all of whose parameters are in host memory. Not thread-safe: one pass at a
    time."""

    def __init__(self, decoder: Decoder, head: nn.Module | None, device: torch.device) -> None:
        """Move the parameters of the decoder and the optional `head` to host memory."""
        self._device = device
        self._lane = make_lane(device)
        layers = [list(layer.parameters()) for layer in decoder.layers]
        inside = {id(parameter) for layer in layers for parameter in layer}
        root = [parameter for parameter in decoder.parameters() if id(parameter) not in inside]
        root += [] if head is None else list(head.parameters())
        self._layers = [
            [(parameter, parameter.detach()) for parameter in layer] for layer in layers
        ]
        self._root = [(parameter, parameter.detach()) for parameter in root]
        sizes = [carved_bytes(root), *[carved_bytes(layers[0])] * LAYER_BUFFERS]
        self.buffers_B = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        first_B, *rest_B = self.buffers_B.split(sizes)
        self._root_buffer = carve(first_B, root)
        self._buffers = [LayerBuffer(tensors=carve(buffer_B, layers[0])) for buffer_B in rest_B]
        self._visiting = False
        self._backward_at = -1
        # in which the computation waited for weights
        self._gaps: list[tuple[DeviceEvent, DeviceEvent]] = []
        self._in_bytes = 0
        self._hooks: list[Any] = []
        for index, layer in enumerate(decoder.layers):
            self._hooks.append(layer.register_forward_pre_hook(partial(self._before, index)))
            self._hooks.append(layer.register_forward_hook(partial(self._after, index)))

    @contextlib.contextmanager
    def visit(self) -> Iterator[None]:
        """Run passes of the decoder inside this block. The host weights must not change
        meanwhile."""
        assert not self._visiting, "one visit at a time"
        self._visiting, self._backward_at = True, -1
        try:
            compute = compute_lane(self._device)
            before = compute.mark()
            fetched = self._fetch(self._root, self._root_buffer, before)
            compute.after(fetched)
            self._gaps.append((before, compute.mark()))
            yield
        finally:
            self._rest(self._root)
            for buffer in self._buffers:
                self._empty(buffer)
            self._visiting = False

    def sizes(self) -> dict[str, int]:
        """Return the bytes of the weights in host memory and of the buffers on the device."""
        weights = [host for part in (self._root, *self._layers) for _, host in part]
        return {
            "size_bytes": sum(host.nbytes for host in weights),
            "layer_buffer_bytes": self.buffers_B.nbytes,
        }

    def take_traffic(self) -> OffloadTraffic:
        """Return and reset the bytes moved and the time waited. Waits still running on the device
        are not included."""
        traffic, self._in_bytes = OffloadTraffic(in_bytes=self._in_bytes), 0
        done = [after.query() for _, after in self._gaps]
        traffic.waited_s = sum(
            seconds_between(*gap) for gap, is_done in zip(self._gaps, done, strict=True) if is_done
        )
        self._gaps = [gap for gap, is_done in zip(self._gaps, done, strict=True) if not is_done]
        return traffic

    def close(self) -> None:
        """Stop streaming. Parameters stay in host memory, and the decoder computes there."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, index: int, *_: Any) -> None:
        assert self._visiting, "the weights are in host memory: a pass outside a visit"
        if self._backward_at == index:
            # the layer runs again for its own backward pass, or first after it: it is there, as is
            # the next
            return
        self._backward_at, follower = -1, index + 1
        if not torch.is_grad_enabled():
            follower %= len(self._layers)  # of the next pass; one with a backward pass turns round
        self._enter(index, follower)

    def _after(self, index: int, _: nn.Module, __: Any, output_TE: Tensor) -> None:
        if output_TE.requires_grad:
            output_TE.register_hook(lambda _: self._begin_backward(index))

    def _begin_backward(self, index: int) -> None:
        self._backward_at = index
        self._enter(index, index - 1)

    def _enter(self, index: int, follower: int) -> None:
        """Make the layer resident and prefetch `follower`, if there is one."""
        compute = compute_lane(self._device)
        before = compute.mark()
        buffer = self._buffer_of(index) or self._bring(index, follower, before)
        compute.after(buffer.fetched)
        self._gaps.append((before, compute.mark()))
        if 0 <= follower < len(self._layers) and self._buffer_of(follower) is None:
            self._bring(follower, index, before)

    def _buffer_of(self, index: int) -> LayerBuffer | None:
        return next((buffer for buffer in self._buffers if buffer.layer == index), None)

    def _bring(self, index: int, keep: int, computed: DeviceEvent) -> LayerBuffer:
        """Fetch into the buffer that does not hold `keep`, after computations on its old
        contents."""
        buffer = next(
            buffer for buffer in self._buffers if buffer.layer is None or buffer.layer != keep
        )
        self._empty(buffer)
        buffer.fetched = self._fetch(self._layers[index], buffer.tensors, computed)
        buffer.layer = index
        return buffer

    def _fetch(
        self,
        weights: Sequence[tuple[Tensor, Tensor]],
        buffer: Sequence[Tensor],
        computed: DeviceEvent,
    ) -> DeviceEvent:
        self._lane.after(computed)
        for (parameter, host), there in zip(weights, buffer, strict=True):
            self._lane.copy(there, host)
            parameter.data = there
            self._in_bytes += host.nbytes
        return self._lane.mark()

    def _empty(self, buffer: LayerBuffer) -> None:
        if buffer.layer is not None:
            self._rest(self._layers[buffer.layer])
        buffer.layer = None

    def _rest(self, weights: Sequence[tuple[Tensor, Tensor]]) -> None:
        for parameter, host in weights:
            parameter.data = host


def carved_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of memory that holds all of them."""
    return sum(_aligned(tensor) for tensor in tensors)


def carve(buffer_B: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of the same shapes and dtypes as views of one buffer."""
    found, first = [], 0
    for tensor in tensors:
        flat_N = buffer_B[first : first + tensor.numel() * tensor.element_size()].view(tensor.dtype)
        found.append(flat_N.view(tensor.shape))
        first += _aligned(tensor)
    return found


def _aligned(tensor: Tensor) -> int:
    size_bytes = math.prod(tensor.shape) * tensor.element_size()
    return round_up(size_bytes, ALIGN_BYTES)
