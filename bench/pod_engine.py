"""An engine of a pod in a process of its own: tensors on a device, filled from registered shared
memory, by staging buckets of the publishers' devices, or by checkpoint-engine. In: commands over a
pipe. Out: what each took. Callers: bench/pod_handover.py, which starts one on each GPU;
bench/tensor_engine.py, which is another kind.
"""

# N bytes

from __future__ import annotations

import ctypes
import functools
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from hashlib import blake2b
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gyre.cluster.worker.frames import decode
from gyre.kernels.checksum import checksum as sum_of
from gyre.weights.read_plan import ReadPlan
from gyre.weights.registered import ReadOver
from gyre.weights.transports.addresses import CUDA_IPC, SHM, host_id
from gyre.weights.transports.device.cuda_ipc import open_cuda
from gyre.weights.transports.opened import OpenPart, PartOpener, Reading
from host_staging import HostStaging
from peers.checkpoint_engine_gpu import receive_from_peer
from ranks import DIE_WITH_PARENT

CHUNK_BYTES = 1 << 30  # of the plain copy
START_S, ANSWER_S = 90.0, 60.0


class EngineProcess:
    """The trainer rank's end."""

    def __init__(
        self,
        *,
        rank: int,
        device: torch.device,
        shapes: dict[str, Any],
        task: Any,
        script: str = __file__,
    ) -> None:
        """`script`: what the process runs; it serves an Engine of its own kind."""
        self._end, theirs = Pipe()
        given = {"rank": rank, "device": str(device), "shapes": shapes, "task": asdict(task)}
        argv = [sys.executable, script, str(theirs.fileno()), json.dumps(given)]
        self._process = subprocess.Popen(argv, pass_fds=[theirs.fileno()])
        theirs.close()

    def ask(self, name: str, *given: Any) -> Any:
        self._end.send((name, given))
        wait_s = START_S if name == "ready" else ANSWER_S
        if not self._end.poll(wait_s):
            raise TimeoutError(f"the engine's process has not answered {name!r} in {wait_s} s")
        answer, error = self._end.recv()
        if error:
            raise RuntimeError(f"in the engine's process: {error}")
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(ANSWER_S)


class Engine:
    """The process itself. Every public method is a command."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._task, self._device = given["task"], torch.device(given["device"])
        self._is_cuda = self._device.type == "cuda"
        if self._is_cuda:
            torch.cuda.set_device(self._device)
        self._own = {
            name: torch.zeros(shape, dtype=torch.bfloat16, device=self._device)
            for name, shape in given["shapes"].items()
        }
        self._told: list[tuple[str, dict[str, Any]]] = []  # events of the last version
        self._is_staged = self._task.get("through") == CUDA_IPC
        place = Path(self._task["folder"])
        self._opener = PartOpener(
            Reading(
                host_id=host_id(place),
                folder=place,
                preference=(CUDA_IPC, SHM) if self._is_staged else (SHM,),
                pin=self._task["pin"] and not self._is_staged,
                device=self._device,
                open_staging=open_cuda if self._is_cuda else HostStaging,
            ),
            emit=self._emit,
        )

    def ready(self) -> bool:
        return True

    def clear(self) -> None:
        for tensor in self._own.values():
            tensor.zero_()

    def read(self, frame: bytes) -> dict[str, Any]:
        """Take a registered version, by the way that is measured and by no other."""
        offer, times = decode(frame), {}
        self._told.clear()
        swap = self._timed(
            times,
            "prepare",
            lambda: ReadOver(offer, self._own, parts=self._opener, emit=self._emit),
        )
        self._timed(times, "swap", swap.run)
        self._timed(times, "settle", swap.settle)
        self._last = offer
        (kind, read), *others = self._told
        assert kind == "weights.read" and not others, self._told
        return {**times, "undo_from": read["undo_from"], "transport": read["transport"]}

    @torch.no_grad()
    def copy_parts(self) -> None:
        """Copy the last version's parts again, neither kept nor verified."""
        with self._opener.open_parts(self._last) as parts:
            if self._is_staged:
                self._copy_staged(parts)
            else:
                self._copy_mapped(parts)
            if self._is_cuda:
                torch.cuda.synchronize()

    def _copy_mapped(self, parts: tuple[OpenPart, ...]) -> None:
        for part in parts:
            for one in part.placed:
                flat_N = self._own[one.entry.name].view(-1)
                home_N = flat_N[one.segment.start : one.segment.stop].view(torch.uint8)
                bytes_N = part.reader.view(one.start, one.stop)
                assert bytes_N is not None, "parts are in shared memory"
                home_N.copy_(bytes_N, non_blocking=True)

    def _copy_staged(self, parts: tuple[OpenPart, ...]) -> None:
        """Copy each bucket as it comes, to one place: the tensors keep what they have."""
        plan = self._opener.plan
        assert isinstance(plan, ReadPlan), "no version was read before"
        longest = max(bucket.read.size_bytes for bucket in plan.buckets)
        room_N = torch.empty(longest, dtype=torch.uint8, device=self._device)
        for bucket in plan.buckets:
            reader = parts[bucket.read.owner].reader
            bytes_N = reader.lend(bucket.read.stretches, next_stretches=bucket.following)
            room_N[: len(bytes_N)].copy_(bytes_N, non_blocking=True)

    def update(self, path: str) -> None:
        """Take what checkpoint-engine sends."""
        receive_from_peer(path, self._own, self._device, site=self._task["peer_site"])

    def sum(self) -> dict[str, Any]:
        """Sum every tensor, as verifying does."""
        sums = [sum_of(tensor.view(-1)) for tensor in self._own.values()]
        found = torch.stack(sums).tolist()
        return {"bytes": blake2b(json.dumps(found).encode(), digest_size=8).hexdigest()}

    def copy_plainly(self) -> dict[str, float]:
        """Copy as many bytes as the weights have from page-locked memory."""
        size_bytes = sum(tensor.nbytes for tensor in self._own.values())
        plain, landed = self._plain(min(CHUNK_BYTES, size_bytes))
        times: dict[str, float] = {}

        def copy() -> None:
            for start in range(0, size_bytes, len(plain)):
                part = slice(0, min(len(plain), size_bytes - start))
                landed[part].copy_(plain[part], non_blocking=True)

        self._timed(times, "plain", copy)
        return {"bytes_per_s": size_bytes / times["plain"]}

    @functools.cache  # noqa: B019  there is one engine
    def _plain(self, size_bytes: int) -> tuple[Tensor, Tensor]:
        plain = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)
        return plain.fill_(1), torch.empty_like(plain, device=self._device)

    def _emit(self, kind: str, /, **fields: Any) -> None:
        self._told.append((kind, fields))

    def _timed(self, times: dict[str, float], name: str, work: Callable[[], Any]) -> Any:
        began_s = time.perf_counter()
        result = work()
        if self._is_cuda:
            torch.cuda.synchronize()
        times[name] = time.perf_counter() - began_s
        return result


def serve(
    end: Connection, given: dict[str, Any], make: Callable[[dict[str, Any]], Any] = Engine
) -> None:
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() == 1:
        return  # the parent was gone already
    if given["device"] == "cpu":
        torch.set_num_threads(1)
    engine = make(given)
    while True:
        try:
            name, arguments = end.recv()
        except EOFError:
            return
        try:
            end.send((getattr(engine, name)(*arguments), ""))
        except Exception as error:  # noqa: BLE001  the parent raises it
            trace = "".join(traceback.format_tb(error.__traceback__)[-3:])
            end.send((None, f"{type(error).__name__}: {str(error)[:600]}\n{trace}"))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), json.loads(sys.argv[2]))
