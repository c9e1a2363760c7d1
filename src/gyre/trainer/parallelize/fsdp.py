"""FSDP: shards a Decoder over a shard group by FSDP2, with one group per layer, one for an untied
head, one for the rest. In: a Decoder, on the meta device, or whole and equal on all ranks. Out: the
same Decoder, in place, holding its shards.

The root group holds embedding and final norm. Its weights stay gathered from the first layer to the
end of the backward pass, since a tied head is read after `hidden` returned. An untied head is
gathered while the layers run. Its gradient is summed while theirs are computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from gyre.core.records import Projection
from gyre.distributed.comm_stats import Kind, Traffic
from gyre.distributed.mesh import ModelSharding
from gyre.distributed.process_group import RankGroup
from gyre.kernels.sums import add_up
from gyre.models.decoder import NOTHING, Decoder
from gyre.trainer.offload.copy_streams import compute_lane
from gyre.trainer.parallelize.exposed_comm import Exposed, ExposedCommWatch
from gyre.trainer.parallelize.float8_gather import gather_in_float8
from gyre.trainer.parallelize.sharded_module import is_shard


def shard_decoder(
    decoder: Decoder, split: ModelSharding, *, trains: bool, float8: frozenset[Projection] = NOTHING
) -> None:
    """Shard the weights over the ranks of `split.mesh.shard`.

    Trained shards are float32, the master weights themselves. Layers are gathered in the decoder's
    original dtype, or in 8 bits for the projections of `float8`. Gradients are summed in float32.
    They are sent in the compute dtype if each comes from one micro-batch. The optimizer
    synchronizes replicas once per update.
    """
    assert split.mesh.torch_mesh is not None and split.shards_weights
    dtype, mesh = decoder.dtype, split.mesh.torch_mesh["shard"]
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if trains and dtype != torch.float32:
        policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    as_computed = dtype if trains and split.sum_gradients == "chunk" else torch.float32
    group = split.mesh.shard
    exposed = make_exposed(group.traffic, group.device)

    def cut(module: Any, *, reshard: bool) -> None:
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        watch = None if exposed is None else ExposedCommWatch(exposed, ahead=reshard)
        if watch is not None and module is not decoder:
            watch.hook(module)
        # losses are divided by the denominator of all ranks already
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_custom_all_gather(CountedGather(group, watch))
        module.set_custom_reduce_scatter(
            CountedScatter(group, watch, sends=as_computed, last=module is decoder)
        )

    for layer in decoder.layers:
        _to_master(layer, trains)
        gather_in_float8(layer, float8, split.mesh.shard.size)
        cut(layer, reshard=split.zero == 3)
    if not decoder.spec.tied:  # gathered once: its backward pass comes right after its forward pass
        _to_master(decoder.head, trains)
        cut(decoder.head, reshard=False)
    _to_master(decoder, trains)
    cut(decoder, reshard=False)
    register_fsdp_forward_method(decoder, "hidden")


def make_exposed(traffic: Traffic, device: torch.device) -> Exposed | None:
    """Return a recorder of exposed communication, or None on a CPU, where collectives block."""
    if device.type == "cpu":
        return None
    return Exposed(traffic, compute_lane(device), lambda: compute_lane(device))


class _Counted:
    """An FSDP2 collective with counts and timing: `ranks` on a CPU, `watch` on a GPU. When the call
    returns, it is complete or enqueued on the stream."""

    def __init__(self, ranks: RankGroup, watch: ExposedCommWatch | None) -> None:
        self._ranks = ranks
        self._watch = watch

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def run(self, kind: Kind, whole: Tensor, start: Callable[[], Any]) -> Any:
        """Start the collective; counted where it moves `whole` on a GPU."""
        if self._watch is not None:
            self._ranks.traffic.count(kind, whole.numel() * whole.element_size(), self._ranks.size)
        return start()


class CountedGather(_Counted):
    """FSDP2's all-gather of a group's weights."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        assert not async_op, "a mark behind the call would not be behind the collective"
        if self._watch is None:
            return self.run(
                "all_gather",
                output_tensor,
                lambda: self._ranks.all_gather(output_tensor, input_tensor),
            )
        self._watch.gathering()
        start = partial(dist.all_gather_into_tensor, output_tensor, input_tensor, group=group)
        work = self.run("all_gather", output_tensor, start)
        self._watch.gathered()
        return work


class CountedScatter(_Counted):
    """FSDP2's reduce-scatter of a group's gradients, summed in float32.

    Gradients computed in the narrower dtype `sends` are sent in it, one slice per rank. The
    receiver adds them in float32, in rank order. This equals a float32 exchange at half the bytes.
    For the `last` group the computation only waits.
    """

    def __init__(
        self, ranks: RankGroup, watch: ExposedCommWatch | None, *, sends: torch.dtype, last: bool
    ) -> None:
        super().__init__(ranks, watch)
        self._sends = sends
        self._last = last
        self._asked = 0  # numbers that there is room for to send, until there is room for their sum

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory. FSDP2 calls it twice: for this rank's gradients, then for the sum."""
        numbers = math.prod(size)
        if numbers >= self._asked:
            self._asked = numbers
            return super().allocate(
                size, dtype=self._sends if dtype == torch.float32 else dtype, device=device
            )
        self._asked = 0
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM and not async_op, (
            "a mark behind the call would not be behind the collective"
        )
        narrow = input_tensor.dtype != output_tensor.dtype

        def wait_here() -> None:
            if narrow:
                add_up(self._ranks.exchange(input_tensor).view(self._ranks.size, -1), output_tensor)
            else:
                output_tensor.copy_(self._ranks.reduce_scatter(input_tensor))

        def queue() -> None:
            if not narrow:
                dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group)
                return
            parts_RN = torch.empty_like(input_tensor).view(self._ranks.size, -1)
            dist.all_to_all_single(parts_RN.view(-1), input_tensor, group=group)
            add_up(parts_RN, output_tensor)

        if self._watch is None:
            self.run("reduce_scatter", input_tensor, wait_here)
            return
        since = self._watch.summing(last=self._last)
        self.run("reduce_scatter", input_tensor, queue)
        self._watch.summed(since)


def _to_master(module: nn.Module, trains: bool) -> None:
    """Convert unsharded parameters to float32."""
    if not trains:
        return
    for parameter in module.parameters():
        if not is_shard(parameter):
            parameter.data = parameter.data.float()
