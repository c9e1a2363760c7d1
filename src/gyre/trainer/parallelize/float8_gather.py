"""Float8: which projections a trainer multiplies in 8 bits, and shards gathered in 8 bits, half the
bytes of BF16. In: a Decoder, the config. Out: names of projections; parameters that FSDP2 gathers
in 8 bits.

A shard stays float32, the master weight itself. Before the gather it is rounded to the compute
dtype and then to 8 bits, scaled by the whole weight's largest magnitude. Every layout therefore
multiplies the same 8-bit numbers. One all-reduce after each update finds the largest magnitudes of
all weights, and another over tensor ranks, each of which has a part.
"""

# O output features of a shard or a weight, I input features

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from gyre.core.errors import ConfigError
from gyre.core.records import Matmul, Projection
from gyre.distributed.process_group import RankGroup
from gyre.kernels.float8 import (
    E4M3,
    MULTIPLE,
    Amax,
    Float8Weight,
    fits,
    largest,
    quantize,
    scale_of,
    why_not,
)
from gyre.models.decoder import Decoder
from gyre.models.layers.layer import Layer

PROJECTIONS: tuple[Projection, ...] = get_args(Projection)
HINT = "leave trainer.matmul out: the compute dtype multiplies any shape on any device"
SCALE_STRIDE = 4  # numbers: cuBLAS refuses a scale that is not at a multiple of 16 bytes
KEEP_KIND = (
    torch.ops.aten.detach.default, torch.ops.aten.new_zeros.default, torch.ops.aten.slice.Tensor,
    torch.ops.aten.copy_.default, torch.ops.aten.view.default, torch.ops.aten.as_strided.default,
    torch.ops.aten.split.Tensor, torch.ops.aten.clone.default, torch.ops.aten.empty_like.default,
)  # fmt: skip


def float8_projections(
    decoder: Decoder, matmul: Matmul, device: torch.device
) -> frozenset[Projection]:
    """Return the projections multiplied in 8 bits on this device. Raises ConfigError where the
    device cannot, or no matrix has a suitable shape."""
    if matmul == "same":
        return frozenset()
    if (reason := why_not(device, decoder.dtype)) is not None:
        raise ConfigError(f"trainer.matmul = 'fp8': {reason}", hint=HINT)
    shapes = projection_shapes(decoder)
    found: frozenset[Projection] = frozenset(name for name in PROJECTIONS if fits(shapes[name]))
    if not found:
        raise ConfigError(
            f"trainer.matmul = 'fp8': no matrix of a layer has sizes that {MULTIPLE} divides, got "
            f"{shapes}",
            hint=HINT,
        )
    return found


def projection_shapes(decoder: Decoder) -> dict[Projection, tuple[int, int]]:
    """Return (outputs, inputs) of a layer's whole matrices."""
    layer = decoder.layers[0]
    assert isinstance(layer, Layer)
    return {name: tuple(getattr(layer, name).weight.shape) for name in PROJECTIONS}


class Float8Shard(torch.Tensor):
    """A float32 shard of a weight that defines what FSDP2 gathers and how it uses the result."""

    wide_OI: Tensor
    # of the whole weight, rounded to the compute dtype; `share_amaxes` sets it, and
    amax: Tensor | None
    # of the scale that follows from it: made there, since FSDP2 gathers on a stream of its own
    inverse: Tensor | None
    own: Amax | None  # of this shard, where its next writer may find it on the way

    @staticmethod
    def __new__(cls, wide_OI: Tensor) -> Float8Shard:
        return torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls,
            wide_OI.size(),
            strides=wide_OI.stride(),
            storage_offset=wide_OI.storage_offset(),
            dtype=wide_OI.dtype,
            device=wide_OI.device,
            requires_grad=wide_OI.requires_grad,
        )

    def __init__(self, wide_OI: Tensor) -> None:
        self.wide_OI = wide_OI
        self.amax = None
        self.inverse = None
        self.own = None

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Float8Shard({self.wide_OI})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        bare_args, bare_kwargs = tree_map_only(cls, lambda x: x.wide_OI, (args, kwargs or {}))
        result = func(*bare_args, **bare_kwargs)
        return tree_map_only(Tensor, cls, result) if func in KEEP_KIND else result

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Return (tensors to gather, metadata for the receiver)."""
        assert self.amax is not None, "share_amaxes comes before the first pass"
        dtype = mp_policy.param_dtype or self.wide_OI.dtype
        shard = quantize(self.wide_OI.to(dtype), E4M3, rows=True, amax=self.amax)
        assert shard.rows_NK is not None
        return (shard.rows_NK,), (self.amax, self.inverse)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> Any:
        """Return (the weight, the tensors that own its storage), or refresh the weight `out` in
        that storage."""
        (data_OI,), (amax, inverse) = all_gather_outputs, metadata
        if out is None:
            return Float8Weight(data_OI, amax, inverse, param_dtype), (data_OI,)
        assert isinstance(out, Float8Weight)
        out.amax, out.inverse = amax, inverse
        return None


def gather_in_float8(layer: nn.Module, projections: Iterable[Projection], num_ranks: int) -> None:
    """Make FSDP2 gather a layer's float32 matrices in 8 bits; call it before sharding. Rows that do
    not divide evenly would be padded; such a matrix is gathered in the wide dtype and rounded
    afterwards."""
    for name in projections:
        holder = getattr(layer, name)
        if len(holder.weight) % num_ranks == 0:
            wide_OI = holder.weight.data
            assert wide_OI.dtype == torch.float32
            holder.weight = nn.Parameter(Float8Shard(wide_OI))


def float8_shard(parameter: Tensor) -> Float8Shard | None:
    """Return a parameter's Float8Shard on this rank, or None."""
    # of a DTensor, whose module is heavy to import
    found = getattr(parameter, "_local_tensor", parameter)
    return found if isinstance(found, Float8Shard) else None


def begin_amax(parameter: Tensor) -> Amax | None:
    """Return where an update may store the largest magnitude, if it will be needed. Call it before
    the update writes the parameter."""
    shard = float8_shard(parameter)
    if shard is None:
        return None
    shard.own = Amax()
    return shard.own


def share_amaxes(
    parameters: Iterable[Tensor], dtype: torch.dtype, groups: Iterable[RankGroup]
) -> None:
    """Compute the largest magnitude of each weight over the ranks of all groups, after shards have
    changed. Collective where there are any."""
    shards = [shard for parameter in parameters if (shard := float8_shard(parameter)) is not None]
    if not shards:
        return
    amaxes = torch.stack([_take_amax(shard) for shard in shards])
    for group in groups:
        group.all_reduce(amaxes, "max")
    amaxes = amaxes.to(dtype).float()
    inverses = amaxes.new_empty(len(shards), SCALE_STRIDE)[:, 0]
    inverses.copy_(scale_of(amaxes, E4M3).reciprocal())
    for shard, amax, inverse in zip(shards, amaxes.unbind(), inverses.unbind(), strict=True):
        shard.amax, shard.inverse = amax, inverse


def _take_amax(shard: Float8Shard) -> Tensor:
    """Return the largest magnitude found by the newest update, or compute it from the shard."""
    own, shard.own = shard.own, None
    return largest(shard.wide_OI) if own is None or own.found is None else own.found
