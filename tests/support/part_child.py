"""A publisher or a receiver of parts in a process of its own, to be killed. In: a folder, the id of
a run, schemes by which it serves from its tensors; a command by line, as JSON. Out: a line for
each."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gyre.cluster.worker.frames import decode, encode
from gyre.core.offers import Offer
from gyre.weights.registered import ReadOver
from gyre.weights.transports.addresses import SHM, host_id
from gyre.weights.transports.device.live_server import LiveServer
from gyre.weights.transports.opened import PartOpener, Reading
from gyre.weights.transports.shared_memory import SharedMemoryStore
from part_cases import Memory, filled, live_servers, register, silent, whole_tensors


def main() -> None:
    folder, run_id, *schemes = Path(sys.argv[1]), *sys.argv[2:]
    with live_servers(folder, 1 if schemes else 0, *schemes) as lives:
        serve(folder, run_id, lives)


def serve(folder: Path, run_id: str, lives: list[LiveServer]) -> None:
    store = SharedMemoryStore(run_id=run_id, owner=0, emit=silent, folder=folder)
    for line in sys.stdin:
        command = json.loads(line)
        match command.pop("do"):
            case "register":
                version, epoch = command["version"], command["epoch"]
                offer = register(
                    [store], whole_tensors(version), version=version, epoch=epoch, lives=lives
                )
                answer = encode(offer).hex()
            case "churn":
                for version in range(1, command["count"] + 1):
                    say(encode(register([store], filled(version), version=version)).hex())
                answer = "end"
            case "write half":
                size_bytes = command.pop("size_bytes")
                with store.writing(**command, size_bytes=size_bytes) as slot:
                    slot.bytes_N[: size_bytes // 2] = 7
                    say("half is written")
                    sys.stdin.readline()  # it is killed here
                raise AssertionError("it lives")
            case "receive":
                preference = tuple(command.get("preference", (SHM,)))
                receive_half(folder, decode(bytes.fromhex(command["offer"])), preference)
                raise AssertionError("it lives")
            case other:
                raise AssertionError(other)
        say(answer)


def receive_half(folder: Path, offer: Offer, preference: tuple[str, ...]) -> None:
    """Open the version, and on the next line read it. Stop after the first buckets, when the next
    one asks for a tensor of the engine's."""

    class Stopping(dict):
        left = 0

        def __getitem__(self, name: str):
            self.left -= 1
            if self.left == 0:
                say("in a bucket")
                sys.stdin.readline()
            return super().__getitem__(name)

    reading = Reading(
        host_id=host_id(folder), folder=folder, preference=preference, open_staging=Memory
    )
    own = Stopping(whole_tensors(0))
    swap = ReadOver(offer, own, parts=PartOpener(reading), emit=silent, bucket_bytes=128)
    if preference != (SHM,):
        say("opened")
        sys.stdin.readline()
    own.left = 3
    swap.run()


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
