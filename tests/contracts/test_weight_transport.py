"""The contract of weight transports: what owners register arrives to the bit in another reader, or
not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gyre.core.errors import InputError, SnapshotError
from gyre.core.offers import FolderTensors, Offer
from gyre.weights.receive import receive
from gyre.weights.swap import VersionBump
from gyre.weights.tensor_source import LiveTensors
from gyre.weights.transports.addresses import (
    CUDA_IPC,
    GLOO,
    GROUP_SCHEMES,
    LIVE_SCHEMES,
    SHM,
    TCP,
    host_id,
)
from gyre.weights.transports.opened import PartOpener, Reading
from gyre.weights.transports.part_layout import part_bytes
from gyre.weights.transports.part_range import PartRange
from gyre.weights.transports.tcp_server import PartServer
from offers import FailAt, Fault, offer_of
from part_cases import (
    RUN,
    TOKEN,
    Memory,
    live_servers,
    open_shards,
    register,
    shared_folder,
    silent,
    stores_of,
    whole_tensors,
    with_wrong_checksum,
)

Publish = Callable[..., Offer]
CPU = torch.device("cpu")
FROM_SLOTS = "cuda-ipc, tensors withdrawn"
TRANSPORTS = [SHM, TCP, GLOO, CUDA_IPC, FROM_SLOTS]


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    with shared_folder() as folder:
        yield folder


@pytest.fixture(params=TRANSPORTS)
def scheme(request) -> str:
    return request.param


def reading_by(scheme: str, folder: Path, *, slot_behind: bool = False) -> Reading:
    """By that scheme alone; what is of the newest version alone may have the slot behind it."""
    scheme = CUDA_IPC if scheme == FROM_SLOTS else scheme
    behind = (SHM,) if slot_behind and scheme in LIVE_SCHEMES else ()
    return Reading(
        host_id=host_id(folder),
        folder=folder,
        preference=(scheme, *behind),
        open_staging=Memory,
        token=TOKEN,
        num_connections=2,
        deadline_s=20.0,
    )


@contextmanager
def publishers(scheme: str, folder: Path, num_ranks: int) -> Iterator[Publish]:
    """Ranks that register, and servers beside them."""
    server = PartServer(run_id=RUN, token=TOKEN, emit=silent, host="127.0.0.1", folder=folder)
    schemes = {CUDA_IPC} if scheme == FROM_SLOTS else {scheme} & set(LIVE_SCHEMES)
    try:
        with (
            stores_of(folder, num_ranks, served_at=(server.place,)) as stores,
            live_servers(folder, num_ranks if schemes else 0, *schemes) as lives,
        ):

            def publish(whole: dict[str, torch.Tensor], **settings) -> Offer:
                if scheme != FROM_SLOTS:
                    return register(stores, whole, lives=lives, **settings)
                trained = {name: tensor.clone() for name, tensor in whole.items()}
                offer = register(stores, trained, lives=lives, **settings)
                for live in lives:
                    live.withdraw()
                for tensor in trained.values():  # the next step
                    tensor.zero_()
                return offer

            yield publish
    finally:
        server.close()


@pytest.fixture
def reading(scheme: str, shared_memory: Path) -> Reading:
    return reading_by(scheme, shared_memory)


@pytest.fixture
def publish(scheme: str, shared_memory: Path) -> Iterator[Publish]:
    with publishers(scheme, shared_memory, 3) as found:
        yield found


def same(found, expected) -> bool:
    """Read each tensor once, in order: a broadcast is not repeated."""
    return found.keys() == expected.keys() and all(
        tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name])
        for name, tensor in found.items()
    )


@pytest.mark.parametrize("sharded", [False, True])
def test_tensors_arrive_to_the_bit(publish, reading, sharded):
    whole = whole_tensors(1, torch.float32 if sharded else torch.bfloat16)
    offer = publish(whole, version=3, sharded=sharded)
    expected = {name: tensor.bfloat16() for name, tensor in whole.items()}
    with open_shards(offer, reading) as tensors:
        assert list(tensors) == list(whole)
        assert same(tensors, expected)


def stretches_of(start: int, stop: int) -> tuple[PartRange, ...]:
    return (PartRange(start=start, stop=stop, at=0),)


@pytest.mark.parametrize("step", [64, 192, 960])
def test_what_is_read_next_may_be_said_before(publish, reading, step):
    whole = whole_tensors(1)
    with PartOpener(reading).open_parts(publish(whole, version=1)) as parts:
        for part in parts:
            found_N = torch.zeros(part_bytes(part.placed), dtype=torch.uint8)
            cuts = list(range(0, len(found_N), step))
            for start, after in zip(cuts, [*cuts[1:], None], strict=True):
                one, following = (
                    () if at is None else stretches_of(at, min(at + step, len(found_N)))
                    for at in (start, after)
                )
                part.reader.read(one, found_N[start : start + step], next_stretches=following)
            part.reader.check()
            for one in part.placed:
                values_N = whole[one.entry.name].view(-1)[one.segment.start : one.segment.stop]
                assert torch.equal(found_N[one.start : one.stop], values_N.view(torch.uint8))


def test_columns_are_cut_out_of_rows(publish, reading, scheme):
    """Of any way by which a reader may choose what it reads."""
    whole = whole_tensors(1)
    rows = PartRange(start=64, stop=64 + 128 + 64, at=64, row_bytes=64, pitch_bytes=128)
    if scheme in GROUP_SCHEMES:  # every reader takes all of a broadcast
        refused = pytest.raises(AssertionError, match="a broadcast is read whole")
        with PartOpener(reading).open_parts(publish(whole, version=1)) as parts, refused:
            parts[0].reader.read([rows], torch.zeros(rows.end, dtype=torch.uint8))
        return
    before = PartRange(start=0, stop=40, at=0)
    for version, num_connections in enumerate((1, 2)):
        by_links = replace(reading, num_connections=num_connections)
        with PartOpener(by_links).open_parts(publish(whole, version=version)) as parts:
            for part in parts:
                part_N = torch.zeros(part_bytes(part.placed), dtype=torch.uint8)
                found_N = torch.zeros(rows.end, dtype=torch.uint8)
                part.reader.read([before, rows], found_N)
                part.reader.check()
                for one in part.placed:
                    values_N = whole[one.entry.name].view(-1)[one.segment.start : one.segment.stop]
                    part_N[one.start : one.stop] = values_N.view(torch.uint8)
                cut = [part_N[64 + row * 128 :][:64] for row in range(2)]
                assert torch.equal(found_N[:40], part_N[:40])
                assert torch.equal(found_N[64:], torch.cat(cut))


def test_the_last_version_is_there_until_the_next_but_one_begins(publish, scheme, shared_memory):
    reading = reading_by(scheme, shared_memory, slot_behind=True)
    offers = [publish(whole_tensors(version), version=version) for version in range(3)]
    for version in (1, 2):
        with open_shards(offers[version], reading) as tensors:
            assert same(tensors, whole_tensors(version))
    gone = pytest.raises(InputError, match="has version 2 of epoch 0, and not version 0")
    with gone, open_shards(offers[0], reading):
        pass


def test_what_is_overwritten_while_it_is_read_ends_in_an_error(publish, reading):
    offer = publish(whole_tensors(1), version=1)
    with pytest.raises(SnapshotError, match="overwritten"), open_shards(offer, reading):
        publish(whole_tensors(2), version=2)
        publish(whole_tensors(3), version=3)


def test_numbers_with_another_checksum_are_not_given(publish, reading):
    offer = with_wrong_checksum(publish(whole_tensors(1), version=1), "big")
    with open_shards(offer, reading) as tensors:
        assert torch.equal(tensors["embed"], whole_tensors(1)["embed"])
        with pytest.raises(SnapshotError, match="big of version 1"):
            tensors["big"]


def test_a_part_of_another_size_is_refused(publish, reading):
    offer = publish(whole_tensors(1), version=1)
    first, *rest = offer.source.parts
    wrong = replace(first, size_bytes=first.size_bytes + 64)
    torn = replace(offer, source=replace(offer.source, parts=(wrong, *rest)))
    refused = pytest.raises(SnapshotError, match=f"registered {first.size_bytes + 64} bytes")
    with refused, open_shards(torn, reading):
        pass


# the same through `receive`, beside sources that need no reader

Give = Callable[[dict[str, torch.Tensor]], Offer]


@pytest.fixture(params=[*TRANSPORTS, "folder", "copy"])
def source(request, shared_memory: Path):
    """Offers version 2 of given tensors, and receives it over others."""
    name = request.param
    given: dict[str, torch.Tensor] = {}

    class Folder:
        def __enter__(self):
            return LiveTensors(given)

        def __exit__(self, *error) -> None: ...

    with ExitStack() as opened, publishers(name, shared_memory, 2) as publish:

        def give(whole: dict[str, torch.Tensor]) -> Offer:
            given.update(whole)
            offer = offer_of(2, whole, checksums=True)
            if name == "copy":
                return offer
            if name == "folder":
                return replace(offer, source=FolderTensors(folder="/given"))
            return publish(whole, version=2)

        def take(offer: Offer, own: dict[str, torch.Tensor]):
            parts = PartOpener(reading_by(name, shared_memory, slot_behind=True))
            opened.close()  # of the swap before, which has settled
            opened.callback(parts.close)
            return receive(
                offer,
                own,
                shared=False,
                device=CPU,
                open_folder=lambda folder: Folder(),
                parts=parts,
                emit=silent,
            )

        yield give, take


def test_a_version_is_received_whole_and_can_be_undone(source):
    give, take = source
    own, new = whole_tensors(1), whole_tensors(2)
    addresses = {name: tensor.data_ptr() for name, tensor in own.items()}
    swap = take(give(new), own)
    assert same(own, whole_tensors(1)), "prepare changes nothing"
    for _ in range(2):
        swap.run()
        assert same(own, new)
        swap.undo()
        assert same(own, whole_tensors(1))
    swap.run()
    swap.settle()
    assert same(own, new)
    assert {name: tensor.data_ptr() for name, tensor in own.items()} == addresses


@pytest.mark.slow
@pytest.mark.parametrize("torn", [False, True])
def test_a_swap_that_fails_at_any_step_is_undone_to_the_bit(source, torn):
    give, take = source
    new, number, failed = whole_tensors(2), 0, True
    offer = give(new)
    while failed:
        number, failed = number + 1, False
        own = whole_tensors(1)
        swap = take(offer, own)
        try:
            with FailAt(number, torn=torn):
                swap.run()
        except Fault:
            failed = True
            swap.undo()
            assert same(own, whole_tensors(1)), number
            swap.run()
        assert same(own, new), number
        swap.settle()
    assert number > 10, "the steps of a swap were not found"


@pytest.mark.parametrize("wrong", ["names", "shapes", "dtypes"])
def test_other_tensors_are_refused_before_anything_changes(source, wrong):
    give, take = source
    own = whole_tensors(1)
    new = whole_tensors(2)
    if wrong == "names":
        new["other"] = new.pop("norm")
    elif wrong == "shapes":
        new["norm"] = new["norm"][:7]
    else:
        new["norm"] = new["norm"].float()
    offer = give(new)
    if isinstance(offer.source, FolderTensors) and wrong == "dtypes":
        return  # files are rounded to the engine's dtypes
    with pytest.raises(InputError, match="do not fit the engine's model"):
        take(offer, own)
    assert same(own, whole_tensors(1))


def test_one_storage_moves_no_byte():
    own = whole_tensors(1)
    swap = receive(
        offer_of(2, own, shared=True),
        own,
        shared=True,
        device=CPU,
        open_folder=lambda folder: pytest.fail("no folder is read"),
        parts=PartOpener(),
        emit=silent,
    )
    assert isinstance(swap, VersionBump) and not swap.moves_bytes
