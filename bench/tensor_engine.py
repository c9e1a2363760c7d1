"""A tensor rank of an engine in a process of its own: its part of the tensors on a device, filled
from the devices of the trainer's ranks. In: commands over a pipe. Out: what each took. Caller:
bench/weights_tensor.py, which starts one on each GPU.
"""

from __future__ import annotations

import functools
import json
import sys
from collections import Counter
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from engine import SHAPES as ENGINE_SHAPES
from gyre.cluster.worker.frames import decode
from gyre.core.offers import Offer, RegisteredShards
from gyre.distributed.init import RankSpec, join
from gyre.kernels.checksum import checksum as sum_of
from gyre.models.layout import model_layout
from gyre.models.spec import ModelSpec
from gyre.weights.registered import BUCKET_BYTES, ReadOver, free_bytes_of
from gyre.weights.tensor_part import TensorPart
from gyre.weights.transports.addresses import GROUP_SCHEMES, host_id
from gyre.weights.transports.opened import PartOpener, Reading
from gyre.weights.transports.part_layout import all_numbers, plan_reads
from pod_engine import Engine, serve
from ranks import COLLECTIVE_S
from train_ranks import SHAPES as TRAIN_SHAPES

SHAPES = ENGINE_SHAPES | TRAIN_SHAPES  # the trainer's, and 32b and 70b of the engine's


def spec_of(shape: str, layers: int) -> ModelSpec:
    spec = SHAPES[shape]
    return replace(spec, num_layers=min(layers, spec.num_layers)) if layers else spec


class TensorEngine(Engine):
    """One rank of the tensor axis. Every public method is a command; all ranks are asked at once to
    be ready and to read."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(given)
        task, place = self._task, Path(self._task["folder"])
        self._scheme = task["scheme"]
        # by this way alone: a version that does not come by it is an error, and not read elsewhere
        self._opener = PartOpener(
            Reading(
                host_id=host_id(place),
                folder=place,
                preference=(self._scheme,),
                pin=self._is_cuda,
                device=self._device,
            )
        )
        group = join(
            RankSpec(
                rank=given["rank"],
                world_size=task["size"],
                store_host="127.0.0.1",
                store_port=task["port"],
                round_id="engine",
                backend="nccl" if self._is_cuda else "gloo",
                device=self._device,
                timeout_s=COLLECTIVE_S,
            )
        )
        spec = spec_of(task["shape"], task["layers"])
        self._held = TensorPart(table=model_layout(spec, task["size"]), group=group)

    def read(self, frame: bytes, *, undo_on_host: bool = False) -> dict[str, Any]:
        """Take a version that is on the trainer's devices: this rank's part of it, verified with
        the other ranks. `undo_on_host`: keep the last version there, as on a full device."""
        offer, told, times = decode(frame), {}, {}

        def prepare() -> ReadOver:
            with self._held.agreed(f"version {offer.version}"):  # before any rank reads
                return ReadOver(
                    offer,
                    self._own,
                    parts=self._opener,
                    emit=lambda kind, **fields: told.update(fields),
                    free_bytes=(lambda device: 0) if undo_on_host else free_bytes_of,
                    held=self._held,
                )

        swap = self._timed(times, "prepare", prepare)
        self._timed(times, "swap", swap.run)
        self._timed(times, "verify", swap.verify)
        self._timed(times, "settle", swap.settle)
        return {"times": times, **told}

    def read_on_host(self, frame: bytes) -> dict[str, Any]:
        return self.read(frame, undo_on_host=True)

    def count_bytes(self, frame: bytes) -> dict[str, Any]:
        """Return the bytes of this rank's part, and those that it reads of each owner's: of a
        broadcast all of it."""
        offer: Offer = decode(frame)
        assert isinstance(offer.source, RegisteredShards)
        by_rows = functools.partial(self._held.wanted, by_rows=True)
        wanted = all_numbers if self._scheme in GROUP_SCHEMES else by_rows
        buckets = plan_reads(
            offer.manifest.entries,
            owners=range(len(offer.source.parts)),
            bucket_bytes=BUCKET_BYTES,
            wanted=lambda owner: wanted,
        )
        read = Counter[int]()
        for bucket in buckets:
            read[bucket.owner] += bucket.size_bytes
        part_bytes = sum(tensor.nbytes for tensor in self._own.values())
        return {"part_bytes": part_bytes, "read_bytes": [read[one] for one in sorted(read)]}

    def sums(self, names: list[str]) -> list[int]:
        """Sum this rank's tensors by name, to be compared."""
        return [int(sum_of(self._own[name].view(-1))) for name in names]

    def trim(self) -> None:
        """Give back memory that is kept for later."""
        if self._is_cuda:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), json.loads(sys.argv[2]), TensorEngine)
