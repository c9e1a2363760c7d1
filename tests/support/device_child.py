"""An engine's process that reads versions from a publisher's device, to be killed. In: a folder, a
device, schemes; an offer by line, as hex of a frame, and what to do with it. Out: lines of JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gyre.cluster.worker.frames import decode
from gyre.core.offers import Offer
from gyre.memory.pools.cuda_vmm import find_driver, virtual_zeros
from gyre.weights.manifest import checksum
from gyre.weights.registered import BUCKET_BYTES, ReadOver
from gyre.weights.transports.addresses import host_id
from gyre.weights.transports.opened import PartOpener, Reading
from gyre.weights.transports.part_layout import dtype_of


def main() -> None:
    folder, device, schemes = Path(sys.argv[1]), torch.device(sys.argv[2]), sys.argv[3].split(",")
    is_cuda = device.type == "cuda"
    told: list[tuple[str, dict[str, Any]]] = []
    reading = Reading(
        host_id=host_id(folder),
        folder=folder,
        preference=tuple(schemes),
        pin=is_cuda,
        device=device,
        deadline_s=20.0,
    )
    opener = PartOpener(reading, emit=lambda kind, **fields: told.append((kind, fields)))
    own: Stopping | None = None
    say(ready=True)
    for line in sys.stdin:
        order = json.loads(line)
        offer = decode(bytes.fromhex(order["offer"]))
        own = Stopping(make_own(offer, device)) if own is None else own
        swap = ReadOver(
            offer,
            own,
            parts=opener,
            emit=lambda kind, **fields: told.append((kind, fields)),
            bucket_bytes=order.get("bucket_bytes", BUCKET_BYTES),
        )
        say(prepared=True)
        sys.stdin.readline()  # until another has prepared it too
        own.left = order.get("stops_at", 0)
        began_s = time.monotonic()
        swap.run()
        answer: dict[str, Any] = {"seconds": time.monotonic() - began_s}
        if order.get("twice"):
            swap.undo()
            answer["undone"] = sums_of(own)
            swap.run()
        swap.settle()
        say(**answer, sums=sums_of(own), told=told)
        told.clear()


class Stopping(dict[str, Tensor]):
    """An engine's tensors; it stops when one is asked for the `left`-th time, in a bucket."""

    left = 0

    def __getitem__(self, name: str) -> Tensor:
        self.left -= 1
        if self.left == 0:
            say(stopped=True)
            sys.stdin.readline()
        return super().__getitem__(name)


def sums_of(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: checksum(tensor) for name, tensor in tensors.items()}


def make_own(offer: Offer, device: torch.device) -> dict[str, Tensor]:
    """Zeros in virtual memory, as an engine has its weights, where the device has such."""
    driver = find_driver(device)
    own = {}
    for entry in offer.manifest.entries:
        dtype, shape = dtype_of(entry), entry.shape
        if driver is None or not entry.size_bytes:
            own[entry.name] = torch.zeros(shape, dtype=dtype, device=device)
            continue
        own[entry.name] = virtual_zeros(
            shape, device=driver.device, dtype=dtype, driver=driver, owner=entry.name
        )
    return own


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main()
