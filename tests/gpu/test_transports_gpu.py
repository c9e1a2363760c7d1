"""Versions from the device of a publisher to that of an engine's process: by CUDA IPC on one GPU and
between two, by NCCL between two. Prints GB/s."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import device_child
from gyre.cluster.worker.frames import encode
from gyre.core.offers import Offer
from gyre.core.records import Segment, TensorEntry
from gyre.distributed.environment import child_environment
from gyre.memory.pools.cuda_vmm import find_driver, virtual_zeros
from gyre.weights.manifest import checksum
from gyre.weights.transports.addresses import CUDA_IPC, NCCL, SHM
from gyre.weights.transports.device import reader_ring
from gyre.weights.transports.device.cuda_ipc import CudaStaging
from gyre.weights.transports.device.live_part import LivePart
from gyre.weights.transports.device.served_part import SlotPart
from gyre.weights.transports.part_layout import place_part
from gyre.weights.transports.part_range import PartRange, bucket_size
from part_cases import live_servers, register, shared_folder, stores_of, whole_tensors

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
DEADLINE_S = 60.0
MIB = 1 << 20
BIG_NUMBERS = 256 << 20  # of bfloat16: 512 MiB
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
WAYS = [
    pytest.param(CUDA_IPC, 0, id="cuda-ipc on one GPU"),
    pytest.param(CUDA_IPC, 1, id="cuda-ipc between two", marks=TWO_GPUS),
    pytest.param(NCCL, 1, id="nccl between two", marks=TWO_GPUS),
]


@pytest.fixture(autouse=True)
def nccl_of_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the processes of a pod have it."""
    for name, value in {**child_environment(), "NCCL_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)


class Engine:
    """A process of its own that sees one GPU alone, as a pod's engines do."""

    def __init__(self, folder, gpu: int, *schemes: str) -> None:
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": visible(gpu)}
        env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        program = [sys.executable, device_child.__file__, str(folder), "cuda:0", ",".join(schemes)]
        self.process = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=env
        )

    def answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        assert line, f"the engine's process ended with {self.process.wait(DEADLINE_S)}"
        return json.loads(line)

    def begin(self, offer: Offer, **order: Any) -> None:
        self.tell({"offer": encode(offer).hex(), **order})
        assert self.answer() == {"prepared": True}

    def tell(self, order: dict[str, Any]) -> None:
        self.process.stdin.write(json.dumps(order) + "\n")

    def take(self, offer: Offer, **order: Any) -> dict[str, Any]:
        self.begin(offer, **order)
        self.tell({})
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=DEADLINE_S)


def visible(gpu: int) -> str:
    """The name of a GPU for a child, where this process may see a part of the host's."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",")[gpu] if given else str(gpu)


@contextmanager
def engines(folder, gpus: list[int], *schemes: str) -> Iterator[list[Engine]]:
    with ExitStack() as stack:
        found = []
        for gpu in gpus:
            found.append(Engine(folder, gpu, *schemes))
            stack.callback(found[-1].kill)
        for engine in found:
            assert engine.answer() == {"ready": True}
        yield found


@contextmanager
def publisher(scheme: str, num_ranks: int = 1, **settings):
    """Ranks of this process, which has GPU 0, with their slots and servers."""
    given = {"device": torch.device("cuda", 0), "make_staging": CudaStaging, **settings}
    with (
        shared_folder() as folder,
        stores_of(folder, num_ranks, pin=True) as stores,
        live_servers(folder, num_ranks, scheme, **given) as lives,
    ):
        yield folder, stores, lives


def on_gpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to("cuda:0") for name, tensor in tensors.items()}


def sums_of(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: checksum(tensor.bfloat16()) for name, tensor in tensors.items()}


def kinds(told: dict[str, Any]) -> list[str]:
    return [kind for kind, _ in told["told"]]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("scheme", "gpu"), WAYS)
def test_versions_go_from_device_to_device(scheme, gpu, sharded):
    """To the bit, from two ranks; undone from the engine's own copy; a second run of the same swap
    reads staging buckets again, and after a broadcast the slot."""
    dtype = torch.float32 if sharded else torch.bfloat16
    with (
        publisher(scheme, 2, bucket_bytes=256) as (folder, stores, lives),
        engines(folder, [gpu], scheme, SHM) as (engine,),
    ):
        before = sums_of({name: torch.zeros_like(t) for name, t in whole_tensors(0).items()})
        for version in range(1, 4):
            for live in lives:
                live.withdraw()
            whole = on_gpu(whole_tensors(version, dtype))
            offer = register(stores, whole, version=version, sharded=sharded, lives=lives)
            told = engine.take(offer, twice=True)
            assert told["undone"] == before
            before = sums_of(whole)
            assert told["sums"] == before
            again = ["weights.slot_used"] * 2 if scheme == NCCL else []
            assert kinds(told) == ["weights.read", *again, "weights.read"]
        if scheme == NCCL:
            assert [live.broadcaster.generation for live in lives] == [3, 3]


@pytest.fixture
def slot_fills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each bucket that a slot has filled. Readers wait for each other as long as need be."""
    monkeypatch.setattr(reader_ring, "LAG_S", DEADLINE_S)
    found, plain = [], SlotPart.begin

    def begin(self, stretches, out_N):
        found.append(len(stretches))
        return plain(self, stretches, out_N)

    monkeypatch.setattr(SlotPart, "begin", begin)
    return found


BOTH = [pytest.param([0, 0], id="of one GPU"), pytest.param([0, 1], id="of two", marks=TWO_GPUS)]


def take_from_slots(lives, both: list[Engine], offer: Offer, whole: dict[str, Tensor]):
    """Have the tensors changed, as by the next step, and the version read by both at once."""
    for live in lives:
        live.withdraw()
    for tensor in whole.values():
        tensor.zero_()
    for engine in both:
        engine.begin(offer)
    for engine in both:
        engine.tell({})
    return [engine.answer() for engine in both]


@pytest.mark.parametrize("gpus", BOTH)
def test_engines_share_what_is_filled_from_a_slot(gpus, slot_fills):
    with (
        publisher(CUDA_IPC, 2, bucket_bytes=256) as (folder, stores, lives),
        engines(folder, gpus, CUDA_IPC) as both,
    ):
        for version in range(1, 4):
            whole = on_gpu(whole_tensors(version))
            expected = sums_of(whole)
            offer = register(stores, whole, version=version, lives=lives)
            slot_fills.clear()
            for told in take_from_slots(lives, both, offer, whole):
                assert told["sums"] == expected and kinds(told) == ["weights.read"]
            assert len(slot_fills) == sum(-(-one.size_bytes // 256) for one in offer.source.parts)


@pytest.mark.parametrize("gpus", BOTH)
def test_rate_of_one_large_tensor_from_a_slot(gpus, slot_fills, capsys):
    """512 MiB over one link, to two engines."""
    rates = []
    with (
        publisher(CUDA_IPC, bucket_bytes=32 * MIB) as (folder, stores, lives),
        engines(folder, gpus, CUDA_IPC) as both,
    ):
        for version in range(1, 5):
            row = torch.randn(1024, device="cuda:0").to(torch.bfloat16) * version
            whole = {"big": row.repeat(BIG_NUMBERS // 1024, 1)}
            size_bytes, expected = whole["big"].nbytes, sums_of(whole)
            offer = register(stores, whole, version=version, lives=lives)
            found = take_from_slots(lives, both, offer, whole)
            assert [told["sums"] for told in found] == [expected] * 2
            seconds = max(told["seconds"] for told in found)
            rates.append(round(size_bytes / seconds / 1e9, 1))
    assert len(slot_fills) == 4 * size_bytes // (32 * MIB)
    with capsys.disabled():
        print(f"\na slot to engines of GPUs {gpus}: a swap with undo copy and check, GB/s: {rates}")


@TWO_GPUS
def test_a_group_of_nccl_is_kept():
    with (
        publisher(NCCL, 2, bucket_bytes=256) as (folder, stores, lives),
        engines(folder, [1], NCCL) as (engine,),
    ):
        for version in range(1, 4):
            for live in lives:
                live.withdraw()
            whole = on_gpu(whole_tensors(version))
            told = engine.take(register(stores, whole, version=version, lives=lives))
            assert told["sums"] == sums_of(whole) and kinds(told) == ["weights.read"]
        assert [live.broadcaster.generation for live in lives] == [1, 1]


@pytest.mark.parametrize(("scheme", "gpu"), WAYS)
def test_rate_of_one_large_tensor(scheme, gpu, capsys):
    """512 MiB in virtual memory on both sides, as weights lie in a run."""
    driver = find_driver(torch.device("cuda", 0))
    assert driver is not None
    big = virtual_zeros(
        (BIG_NUMBERS // 1024, 1024),
        device=torch.device("cuda", 0),
        dtype=torch.bfloat16,
        driver=driver,
        owner="test.weights",
    )
    rates = []
    with (
        publisher(scheme, bucket_bytes=32 * MIB) as (folder, stores, lives),
        engines(folder, [gpu], scheme, SHM) as (engine,),
    ):
        for version in range(1, 4):
            lives[0].withdraw()
            big.copy_(torch.randn(1024, device="cuda:0").to(torch.bfloat16) * version)
            told = engine.take(register(stores, {"big": big}, version=version, lives=lives))
            assert told["sums"] == {"big": checksum(big)}
            assert told["told"][0][1]["transport"] == scheme
            rates.append(round(big.nbytes / told["seconds"] / 1e9, 1))
    with capsys.disabled():
        print(f"\n{scheme} to GPU {gpu}: a swap with undo copy and check at {rates} GB/s")


@pytest.mark.parametrize(("scheme", "gpu"), WAYS)
def test_a_reader_that_is_killed_does_not_harm_the_next_version(scheme, gpu):
    with publisher(scheme, bucket_bytes=256, deadline_s=10.0) as (folder, stores, lives):
        with engines(folder, [gpu], scheme) as (engine,):
            offer = register(stores, on_gpu(whole_tensors(1)), version=1, lives=lives)
            engine.begin(offer, stops_at=3, bucket_bytes=128)
            engine.tell({})
            assert engine.answer() == {"stopped": True}
            engine.kill()
        lives[0].withdraw()
        with engines(folder, [gpu], scheme, SHM) as (engine,):
            whole = on_gpu(whole_tensors(2))
            told = engine.take(register(stores, whole, version=2, lives=lives))
            assert told["sums"] == sums_of(whole) and kinds(told)[0] == "weights.read"
        torch.cuda.synchronize()


def test_staging_buckets_are_given_back():
    """After 20 versions the device has as much free as after the second."""
    free = []
    with (
        publisher(CUDA_IPC, bucket_bytes=16 * MIB) as (folder, stores, lives),
        engines(folder, [0], CUDA_IPC) as (engine,),
    ):
        for version in range(1, 21):
            lives[0].withdraw()
            whole = on_gpu(whole_tensors(version))
            told = engine.take(register(stores, whole, version=version, lives=lives))
            assert told["sums"] == sums_of(whole)
            gc.collect()
            torch.cuda.empty_cache()
            free.append(torch.cuda.mem_get_info(0)[0])
    assert max(free[2:]) - min(free[2:]) <= 2 * 64 * MIB, free
    assert free[-1] >= free[2] - 64 * MIB, free


ROWS_SHAPE = 4096, 12288  # a matrix of the 8B shape, of which an engine over two ranks wants halves


def timed_fill(begin, stretches, out_N: Tensor, what: str) -> None:
    """Fill a bucket twice, and print the rate of the second time."""
    for _ in range(2):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        begin(stretches, out_N).synchronize()
        took_s = time.perf_counter() - began_s
    print(f"{what}: {bucket_size(stretches) / took_s / 1e9:.0f} GB/s")


@pytest.mark.parametrize("source", ["masters", "a slot"])
def test_columns_are_cut_on_their_way_into_a_bucket(source: str) -> None:
    """To the bit what rows have there, behind bytes that are copied as they are."""
    rows, columns = ROWS_SHAPE
    values_N = torch.randn(rows * columns, device="cuda")
    entry = TensorEntry(
        name="down",
        dtype="bfloat16",
        shape=ROWS_SHAPE,
        size_bytes=2 * len(values_N),
        segments=(Segment(start=0, stop=len(values_N)),),
    )
    placed = place_part([entry], 0)
    rounded_RC = values_N.bfloat16().view(rows, columns)
    if source == "masters":
        part = LivePart(epoch=0, version=1, placed=placed, runs=[values_N])
    else:
        bytes_N = rounded_RC.view(-1).view(torch.uint8).cpu().pin_memory()
        part = SlotPart(epoch=0, version=1, bytes_N=bytes_N, check=lambda: None)
    half, pitch = columns, 2 * columns  # bytes
    before = PartRange(start=0, stop=4096, at=0)
    cut = PartRange(start=half, stop=rows * pitch, at=4096, row_bytes=half, pitch_bytes=pitch)
    assert before.is_sound and cut.is_sound and cut.num_rows == rows
    bucket_N = torch.zeros(cut.end, dtype=torch.uint8, device="cuda")
    timed_fill(part.begin, [before, cut], bucket_N, f"columns of {source}")
    found_RC = bucket_N[4096:].view(torch.bfloat16).view(rows, columns // 2)
    assert torch.equal(found_RC, rounded_RC[:, columns // 2 :])
    assert torch.equal(bucket_N[:4096].view(torch.bfloat16), rounded_RC.view(-1)[:2048])
    with ThreadPoolExecutor(1) as another:  # that has called nothing of CUDA
        alone_N = torch.zeros_like(bucket_N)
        another.submit(lambda: part.begin([cut], alone_N).synchronize()).result(DEADLINE_S)
    assert torch.equal(alone_N[4096:], bucket_N[4096:])
    whole = PartRange(start=0, stop=cut.size_bytes, at=0)
    timed_fill(part.begin, [whole], bucket_N, f"rows of {source}")
    assert torch.equal(
        bucket_N[: whole.end].view(torch.bfloat16), rounded_RC.view(-1)[: whole.end // 2]
    )
