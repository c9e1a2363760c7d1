"""Frames: what crosses the socket comes back as it was; everything else is refused, by name."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.cluster.worker import frames
from gyre.core.errors import InputError, WorkerLost
from gyre.core.offers import FolderTensors, LocalTensors, Offer, RegisteredPart, RegisteredShards
from gyre.core.records import Health, Manifest, Request, Sampling, Support, TokenChunk

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(0, 9) | st.tuples(st.text()), inner)
    ),
    max_leaves=20,
)


def there_and_back(value: Any) -> Any:
    return frames.decode(frames.encode(value))


@given(PLAIN)
def test_plain_values_keep_their_types(value) -> None:
    back = there_and_back(value)
    assert back == value and repr(back) == repr(value)


@given(st.lists(st.binary(max_size=40), max_size=6), st.lists(st.integers(1, 30), max_size=40))
def test_frames_arrive_whole_however_their_bytes_are_cut(payloads, cuts) -> None:
    sent = list(enumerate(payloads, 1))
    data, inbox, found = b"".join(frames.framed(*frame) for frame in sent), frames.Inbox(), []
    for size in cuts:
        part, data = data[:size], data[size:]
        found += inbox.take(part)
    found += inbox.take(data)
    assert found == sent


@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8", "bool", "float16"])
def test_arrays_keep_dtype_shape_and_bits(dtype) -> None:
    array = np.arange(12).reshape(3, 4).astype(dtype)[:, ::2]
    back = there_and_back([array])[0]
    assert back.dtype == array.dtype and back.shape == array.shape
    assert back.tobytes() == array.tobytes() and back.flags.writeable


def test_records_come_back_as_their_class() -> None:
    support = Support(offsets=np.array([0, 2]), ids=np.array([3, 5], np.int32))
    chunk = TokenChunk.end("a", 1, "length", "")
    request = Request(
        request_id="ü",
        tokens=np.arange(4, dtype=np.int32),
        sampling=Sampling(stop=("x",), logit_bias=((3, 1.5),)),
        deadline_s=2.0,
    )
    found = there_and_back({"chunks": (chunk, support), "request": request})
    assert found["chunks"][0].finish == "length" and found["chunks"][1].ids.tolist() == [3, 5]
    assert found["request"].sampling == request.sampling
    assert found["request"].tokens.tolist() == [0, 1, 2, 3]


def test_errors_come_back_with_what_a_user_needs() -> None:
    refused = there_and_back(InputError("this", hint="that"))
    assert type(refused) is InputError and (refused.message, refused.hint) == ("this", "that")
    full = there_and_back(OSError(errno.ENOSPC, "no space", "/full"))
    assert (full.errno, full.filename) == (errno.ENOSPC, "/full")


PARTS = (RegisteredPart(addresses=("shm://host/a", "tcp://127.0.0.1:7/a"), size_bytes=64),)


@pytest.mark.parametrize("source", [FolderTensors(folder="/a/ü"), RegisteredShards(parts=PARTS)])
def test_a_version_crosses_by_its_address_and_never_as_tensors(source) -> None:
    manifest = Manifest(version=3, entries=(), shared=False, epoch=1)
    homes = frozenset({"engine-0"})
    offer = Offer(manifest=manifest, source=source, homes=homes)
    (back,) = there_and_back((offer,))
    assert (back.manifest, back.source, back.homes) == (manifest, offer.source, homes)
    with pytest.raises(TypeError, match="as registered shards, got LocalTensors"):
        frames.encode(Offer(manifest=manifest, source=LocalTensors(tensors={})))
    wrong = msgspec.msgpack.encode([manifest, True, {"folder": 3}, []])
    with pytest.raises(frames.FrameError):
        frames.decode(msgspec.msgpack.encode(msgspec.msgpack.Ext(frames.OFFER, wrong)))


@pytest.mark.parametrize("value", [threading.Lock(), object, {1, 2}, lambda: 0])
def test_other_objects_are_not_sent(value) -> None:
    with pytest.raises(TypeError, match="plain values, arrays and records"):
        frames.encode([1, {"a": value}])


@pytest.mark.parametrize(
    "name", ["os:system", "gyre.core.files:os", "subprocess:Popen", "gyre.core.errors:errno.x"]
)
def test_a_name_that_is_no_record_of_ours_runs_nothing(name) -> None:
    for code in (frames.RECORD, frames.ERROR):
        inner = msgspec.msgpack.encode([name, "", ""][: 2 if code == frames.RECORD else 3])
        with pytest.raises(frames.FrameError):
            frames.decode(msgspec.msgpack.encode(msgspec.msgpack.Ext(code, inner)))


def test_a_record_whose_fields_do_not_fit_is_refused() -> None:
    wrong: Any = "yes"
    with pytest.raises(frames.FrameError, match="bool"):
        there_and_back(Health(ok=wrong))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_a_frame_error(data) -> None:
    with contextlib.suppress(frames.FrameError):
        frames.decode(data)


def test_frames_of_any_size_arrive_whole_and_in_order() -> None:
    ours, theirs = socket.socketpair()
    payloads = [b"", b"x" * 10, b"y" * (3 << 20), b"z"]

    def write() -> None:
        for number, payload in enumerate(payloads):
            frames.send(ours, number, payload)
        ours.close()

    writer = threading.Thread(target=write)
    writer.start()
    assert [frames.receive(theirs) for _ in payloads] == list(enumerate(payloads))
    with pytest.raises(WorkerLost):
        frames.receive(theirs)
    writer.join()
    theirs.close()
