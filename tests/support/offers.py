"""Offers of whole tensors in this process, and faults amid a swap, for tests. In: a version and
tensors. Out: an Offer, a mode in which one operation fails."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gyre.core.offers import (
    LocalTensors,
    Offer,
    RegisteredPart,
    RegisteredShards,
    RemoteTensors,
    SharedStorage,
)
from gyre.core.records import Manifest, Segment, TensorEntry
from gyre.weights.manifest import make_manifest

WRITES = ("aten.copy_.default", "aten._foreach_copy_.default")


class Fault(RuntimeError): ...


class FailAt(TorchDispatchMode):
    """The n-th operation on tensors fails: before it begins, or with what it writes torn."""

    def __init__(self, number: int, *, torn: bool) -> None:
        super().__init__()
        self.left, self.torn = number, torn

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == 0:
            if self.torn and str(func) in WRITES:
                written = args[0] if isinstance(args[0], list) else [args[0]]
                for tensor in written[: len(written) // 2 + 1]:
                    torch.ops.aten.fill_.Scalar(tensor, torch.nan)
            raise Fault
        return func(*args, **(kwargs or {}))


def offer_of(
    version: int,
    tensors: dict[str, torch.Tensor],
    *,
    shared: bool = False,
    checksums: bool = False,
    epoch: int = 0,
) -> Offer:
    """A version of these tensors, in this process."""
    source = SharedStorage(tensors=tensors) if shared else LocalTensors(tensors=tensors)
    manifest = make_manifest(version, tensors, shared=shared, checksums=checksums, epoch=epoch)
    return Offer(manifest=manifest, source=source)


async def tensors_in(offer: Offer) -> dict[str, torch.Tensor]:
    """The whole tensors of an offer, wherever they are."""
    if isinstance(offer.source, RemoteTensors):
        offer = await offer.source.fetch()
    return offer.source.tensors  # type: ignore[union-attr]


def registered_offer(version: int, *, epoch: int = 1, entries: int = 3) -> Offer:
    """A version of so many tensors, registered by two owners."""
    tensors = tuple(
        TensorEntry(
            name=f"layers.{number}", dtype="bfloat16", shape=(2, 3), size_bytes=12,
            segments=(Segment(start=0, stop=6, owner=number % 2, checksum="0123456789abcdef"),),
        )
        for number in range(entries)
    )  # fmt: skip
    parts = tuple(
        RegisteredPart(addresses=(f"shm://host/gyre-{epoch}-{version}-{rank}",), size_bytes=64)
        for rank in range(2)
    )
    manifest = Manifest(version=version, entries=tensors, shared=False, epoch=epoch)
    return Offer(manifest=manifest, source=RegisteredShards(parts=parts))


def same_offer(one: Offer | None, other: Offer) -> bool:
    return one is not None and (one.manifest, one.source) == (other.manifest, other.source)
