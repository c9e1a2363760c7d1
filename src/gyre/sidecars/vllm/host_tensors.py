"""Host tensors: a version's tensors in host memory under the hub's names, from wherever an offer
has them. In: an Offer, the model's spec. Out: (hub name, rows) pairs, verified; an offer as JSON,
which is all that crosses into vLLM's processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec
import torch
from torch import Tensor

from gyre.core.codec import decode_json
from gyre.core.errors import InputError
from gyre.core.offers import FolderTensors, Offer, RegisteredShards
from gyre.core.records import Manifest
from gyre.models.hub.checkpoint import Checkpoint
from gyre.models.hub.verified import open_verified
from gyre.models.names import hub_entries
from gyre.models.spec import ModelSpec
from gyre.weights.transports.opened import OpenTensors, PartOpener


class OfferText(msgspec.Struct):
    """An offer as JSON."""

    manifest: Manifest
    folder: str = ""
    shards: RegisteredShards | None = None


def encode_offer(offer: Offer) -> str:
    """Write where a version is. InputError for one that vLLM's processes cannot open."""
    match offer.source:
        case FolderTensors(folder=folder):
            text = OfferText(manifest=offer.manifest, folder=folder)
        case RegisteredShards() as shards:
            text = OfferText(manifest=offer.manifest, shards=shards)
        case source:
            raise InputError(
                f"version {offer.version} is given as {type(source).__name__}, and vLLM takes a "
                "folder or registered shards",
                hint="register the version in shared memory, or export it to a folder",
            )
    return msgspec.json.encode(text).decode()


def decode_offer(text: str) -> Offer:
    found = decode_json(text, OfferText)
    source = FolderTensors(folder=found.folder) if found.shards is None else found.shards
    return Offer(manifest=found.manifest, source=source)


@contextmanager
def open_tensors(
    offer: Offer, spec: ModelSpec, opener: PartOpener
) -> Iterator[Mapping[str, Tensor]]:
    """Give a version's whole tensors by our names, each read and verified when it is asked for. At
    the end SnapshotError where the version was overwritten meanwhile."""
    if isinstance(offer.source, FolderTensors):
        with open_verified(offer.source.folder, spec=spec) as checkpoint:
            yield FolderView(checkpoint)
        return
    _check_shapes(offer, spec)
    with opener.open_parts(offer) as parts:
        yield OpenTensors(offer.manifest, parts)
        for part in parts:
            part.reader.check()


def _check_shapes(offer: Offer, spec: ModelSpec) -> None:
    found = {entry.name: entry.shape for entry in offer.manifest.entries}
    wanted = {name: tuple(shape) for name, shape in spec.parameter_shapes().items()}
    wrong = sorted(
        name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name)
    )
    if wrong:
        raise InputError(
            f"{len(wrong)} tensors of version {offer.version} do not fit vLLM's model: "
            f"{', '.join(wrong[:3])}",
            hint="publish weights of the model that vLLM was started with",
        )


class FolderView(Mapping[str, Tensor]):
    """Tensors of a checkpoint, read when they are asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._shapes = checkpoint.shapes

    def __len__(self) -> int:
        return len(self._shapes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __getitem__(self, name: str) -> Tensor:
        whole = torch.empty(self._shapes[name], dtype=torch.float32)
        self._checkpoint.read(name, 0, whole.numel(), whole.view(-1))
        return whole


def hub_rows(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield every hub tensor of the model: its rows of our fused tensors, without a copy."""
    name, whole = "", torch.empty(0)
    for entry in hub_entries(spec):
        if entry.name != name:  # each is read once; its entries follow each other
            name, whole = entry.name, tensors[entry.name]
        yield entry.hub_name, whole[entry.row_start : entry.row_stop]
