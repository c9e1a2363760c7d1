"""Receive: the one place that knows how to take each source of a version. In: an Offer, and the
tensors of the engine or the names that another process wants. Out: a Swap that is checked and ready
to run, or an Offer of host copies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from gyre.core.errors import InputError, MemoryBudgetError
from gyre.core.events import Emit
from gyre.core.offers import (
    FolderTensors,
    LocalShards,
    LocalTensors,
    Offer,
    RegisteredShards,
    RemoteTensors,
    SharedStorage,
)
from gyre.core.records import Manifest, TensorEntry
from gyre.weights.manifest import dtype_name, make_manifest
from gyre.weights.registered import ReadOver
from gyre.weights.shards import Shape
from gyre.weights.swap import Exchange, GatherOver, Swap, VersionBump, shares_storage, stage
from gyre.weights.tensor_part import TensorPart
from gyre.weights.tensor_source import TensorSource
from gyre.weights.transports.opened import PartOpener

# opens a checkpoint folder and verifies its files; InputError or SnapshotError
OpenFolder = Callable[[str], AbstractContextManager[TensorSource]]


def receive(
    offer: Offer,
    own: Mapping[str, Tensor],
    *,
    shared: bool,
    device: torch.device,
    open_folder: OpenFolder,
    parts: PartOpener,
    emit: Emit,
    held: TensorPart | None = None,
) -> Swap:
    """Check a version, and stage or open it; nothing of `own` is written. What is only opened is
    verified as the swap runs.
    `shared`: the engine was built on its trainer's tensors. `parts` opens what was registered.
    `held`: what a tensor rank's `own` is of the whole tensors. InputError for a version that the
    engine cannot take, SnapshotError for one that is not whole."""
    if held is not None and not offer.is_per_rank:
        refuse_local(offer)
    match offer.source:
        case SharedStorage(tensors=tensors) if shared and shares_storage(tensors, own):
            return VersionBump()
        case LocalTensors(tensors=tensors) if not shared:
            _check_shapes({name: tuple(tensor.shape) for name, tensor in tensors.items()}, own)
            _refuse([name for name, tensor in own.items() if tensors[name].dtype != tensor.dtype])
            return Exchange(stage(offer.manifest, tensors, device=device, emit=emit), own)
        case LocalShards(shards=shards) if not shared:
            _check_shapes(shards.layout.model.shapes, own)
            return GatherOver(offer.version, shards, own, emit=emit)
        case FolderTensors(folder=folder) if not shared:
            with open_folder(folder) as source:
                _check_shapes(source.shapes, own, held)
                staged = _read_beside(source if held is None else held.cut(source), own)
            size_bytes = sum(tensor.nbytes for tensor in staged.values())
            emit(
                "weights.staged", version=offer.version, size_bytes=size_bytes, buckets=len(staged)
            )
            return Exchange(staged, own)
        case RegisteredShards() if not shared:
            _check_entries(offer.manifest.entries, own, held)
            return ReadOver(offer, own, parts=parts, emit=emit, held=held)
        case RemoteTensors():
            raise InputError(
                f"version {offer.version} is in another process",
                hint="fetch it first (`carry`), and prepare what that gives",
            )
        case source:
            is_shared = isinstance(source, SharedStorage)
            built_on = "shared weights" if shared else "weights of its own"
            raise InputError(
                f"version {offer.version} is {'shared' if is_shared else 'a copy'}, "
                f"but the engine was built on {built_on}"
                + (", and not on the tensors given here" if is_shared and shared else ""),
                hint="build engine and trainer on one decoder, or make both with "
                "shared weights off",
            )


def refuse_local(offer: Offer) -> None:
    """Raise InputError for a version that tensor ranks in processes of their own cannot read."""
    if offer.addressed is None:
        raise InputError(
            f"version {offer.version} is in the memory of one process, and each tensor rank of "
            "the engine reads its own part",
            hint="give a folder, or shards registered in shared memory",
        )


async def carry(offer: Offer) -> Offer:
    """Bring a version to where it can be sent to other processes: whole tensors, with checksums
    wherever it crosses a process."""
    match offer.source:
        case RemoteTensors(fetch=fetch):
            return await fetch()
        case LocalTensors() | FolderTensors() | RegisteredShards():
            return offer
        case _:
            return copy_out(offer, [entry.name for entry in offer.manifest.entries])


def copy_out(offer: Offer, names: Collection[str]) -> Offer:
    """Copy some of a version's tensors to host memory, with a checksum of each. InputError for a
    version of which this process holds only a part."""
    match offer.source:
        case SharedStorage(tensors=tensors) | LocalTensors(tensors=tensors):
            copies = {name: tensors[name].detach().cpu().clone() for name in names}
        case _:
            raise InputError(
                f"this process does not hold the tensors of version {offer.version} whole",
                hint="shards reach only engines beside a trainer rank",
            )
    epoch = offer.manifest.epoch
    manifest = make_manifest(offer.version, copies, shared=False, checksums=True, epoch=epoch)
    return Offer(manifest=manifest, source=LocalTensors(tensors=copies))


def join_offers(manifest: Manifest, parts: Iterable[Offer]) -> Offer:
    """Make one offer of copies that came in blocks; `manifest` is their owner's."""
    tensors: dict[str, Tensor] = {}
    entries: list[TensorEntry] = []
    for part in parts:
        assert isinstance(part.source, LocalTensors)
        tensors |= part.source.tensors
        entries += part.manifest.entries
    whole = replace(manifest, entries=tuple(entries), shared=False)
    return Offer(manifest=whole, source=LocalTensors(tensors=tensors))


@torch.no_grad()
def _read_beside(source: TensorSource, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read every tensor of a source into new memory, rounded to the dtypes of `own` as at the
    engine's start. MemoryBudgetError where the device has no room for it."""
    try:
        staged = {name: torch.empty_like(tensor) for name, tensor in own.items()}
    except torch.OutOfMemoryError as error:
        size_bytes = sum(tensor.nbytes for tensor in own.values())
        raise MemoryBudgetError(
            f"no room for {size_bytes} bytes of new weights beside the running ones",
            hint="leave more to them: lower engine.num_pages",
        ) from error
    for name, tensor in staged.items():
        source.read(name, 0, tensor.numel(), tensor.view(-1))
    return staged


def _check_shapes(
    shapes: Mapping[str, Shape], own: Mapping[str, Tensor], held: TensorPart | None = None
) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in own.items()}
    wanted = wanted if held is None else held.shapes
    _refuse(
        sorted(shapes.keys() ^ wanted.keys())
        or [name for name, shape in wanted.items() if tuple(shapes[name]) != tuple(shape)]
    )


def _check_entries(
    entries: Sequence[TensorEntry], own: Mapping[str, Tensor], held: TensorPart | None
) -> None:
    _check_shapes({entry.name: entry.shape for entry in entries}, own, held)
    _refuse([entry.name for entry in entries if entry.dtype != dtype_name(own[entry.name].dtype)])


def _refuse(wrong: Sequence[str]) -> None:
    if wrong:
        raise InputError(
            f"{len(wrong)} tensors do not fit the engine's model (names, shapes and dtypes "
            f"must agree): {', '.join(wrong[:3])}",
            hint="publish weights of the same model and dtype as the engine was built with",
        )
