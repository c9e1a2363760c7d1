"""FSDP: a Decoder cut over the ranks of a shard group by FSDP2, a group per layer, one for a head of its own, one for
the rest. In: a Decoder, on the meta device, or whole and alike on all ranks. Out: the same Decoder, in place, holding
its shards. Caller: trainer.start, which imports this file only where weights are cut.

The root group holds embedding and final norm; its weights stay gathered from the first layer to the end of the backward
pass, since a tied head is read after `hidden` has returned. A head of its own is gathered while the layers run, and its
gradient is summed while those of the layers are found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from gyre.core.records import Projection
from gyre.models.decoder import NOTHING, Decoder
from gyre.parallel.mesh import Split
from gyre.parallel.traffic import Kind, Traffic
from gyre.trainer.float8 import gather_in_float8
from gyre.trainer.parallelise import is_shard, sharded_parts


def shard_decoder(decoder: Decoder, split: Split, *, trains: bool, float8: frozenset[Projection] = NOTHING) -> None:
    """Cut the weights over the ranks of `split.mesh.shard`. Trained shards are float32, the master weights themselves:
    layers are gathered in the dtype that the decoder had, or in 8 bits the projections of `float8`; gradients are
    summed in float32. Copies on other replicas are kept equal by the optimiser, once per update."""
    assert split.mesh.torch_mesh is not None and split.shards_weights
    dtype, mesh = decoder.dtype, split.mesh.torch_mesh["shard"]
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if trains and dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in decoder.layers:
        _to_master(layer, trains)
        gather_in_float8(layer, float8, split.mesh.shard.size)
        fully_shard(layer, mesh=mesh, reshard_after_forward=split.zero == 3, mp_policy=policy)
    if not decoder.spec.tied:  # gathered once: its backward pass comes right after its forward pass
        _to_master(decoder.head, trains)
        fully_shard(decoder.head, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    _to_master(decoder, trains)
    fully_shard(decoder, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    register_fsdp_forward_method(decoder, "hidden")
    traffic = split.mesh.shard.traffic
    for module in sharded_parts(decoder):
        module.set_gradient_divide_factor(1.0)  # losses are divided by the denominator of all ranks already
        module.set_force_sum_reduction_for_comms(True)
        module.set_custom_all_gather(CountedGather(traffic))
        module.set_custom_reduce_scatter(CountedScatter(traffic))


class _Counted:
    """A collective of FSDP2 that `traffic` counts. On a CPU it is waited for in the call; on a GPU it runs beside the
    computation."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def _run(self, kind: Kind, whole: Tensor, group: dist.ProcessGroup, start: Any) -> dist.Work | None:
        size_bytes = whole.numel() * whole.element_size()
        if whole.device.type != "cpu":
            self._traffic.count(kind, size_bytes, group.size())
            self._traffic.overlapped()
            return start()
        with self._traffic.collective(kind, size_bytes, group.size(), whole.device):
            return start()


class CountedGather(_Counted):
    """FSDP2's all-gather of a layer's weights."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        tensors = output_tensor, input_tensor
        return self._run(
            "all_gather",
            output_tensor,
            group,
            lambda: dist.all_gather_into_tensor(*tensors, group=group, async_op=async_op),
        )


class CountedScatter(_Counted):
    """FSDP2's reduce-scatter of a layer's gradients."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        tensors = output_tensor, input_tensor
        return self._run(
            "reduce_scatter",
            input_tensor,
            group,
            lambda: dist.reduce_scatter_tensor(*tensors, op=op, group=group, async_op=async_op),
        )


def _to_master(module: nn.Module, trains: bool) -> None:
    """Parameters that are not sharded yet become float32."""
    if not trains:
        return
    for parameter in module.parameters():
        if not is_shard(parameter):
            parameter.data = parameter.data.float()
