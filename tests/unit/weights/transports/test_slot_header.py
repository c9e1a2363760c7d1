"""Slot headers: a version is found if and only if the slot has it, whole, and a changed header is
another one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.core.errors import GyreError, InputError, SnapshotError
from gyre.weights.transports.slot_header import (
    SlotHeader,
    find_version,
    name_parts,
    pack,
    slot_name,
    still_whole,
    unpack,
)

HEADERS = st.builds(
    SlotHeader,
    run_id=st.text("abcXYZ019", min_size=1, max_size=32),
    owner=st.integers(0, 2**32 - 1),
    sequence=st.integers(0, 2**64 - 1),
    epoch=st.integers(-5, 5),
    version=st.integers(-1, 5),
    size_bytes=st.integers(0, 2**40),
)


@given(HEADERS, st.integers(0, 1))
def test_a_header_is_read_as_it_was_written(header, slot):
    assert unpack(pack(header)) == header
    name = slot_name(header.run_id, header.owner, slot)
    assert name_parts(name) == (header.run_id, header.owner, slot)


@given(HEADERS, st.integers(0), st.integers(1, 255))
def test_any_changed_byte_is_another_header(header, at, change):
    page = bytearray(pack(header))
    page[at % len(page)] ^= change
    assert unpack(bytes(page)) != header
    still_whole(pack(header), "it", header)
    with pytest.raises(SnapshotError, match="overwritten"):
        still_whole(bytes(page), "it", header)


@given(HEADERS, HEADERS, st.integers(0, 2**41))
def test_a_version_is_found_where_it_is_whole(header, wanted, room):
    name = slot_name(header.run_id, header.owner, 0)
    is_there = (
        header.is_whole
        and (header.epoch, header.version) == (wanted.epoch, wanted.version)
        and header.size_bytes == wanted.size_bytes <= room
    )
    asked = {
        "epoch": wanted.epoch,
        "version": wanted.version,
        "size_bytes": wanted.size_bytes,
        "room": room,
    }
    try:
        found = find_version(pack(header), name, **asked)
    except GyreError:
        assert not is_there
    else:
        assert is_there and found == header
    own = {
        "epoch": header.epoch,
        "version": header.version,
        "size_bytes": header.size_bytes,
        "room": header.size_bytes,
    }
    whole = replace(header, sequence=header.sequence // 2 * 2 or 2)
    assert find_version(pack(whole), name, **own) == whole
    with pytest.raises(InputError, match="or of another run"):
        find_version(pack(whole), slot_name("other", header.owner + 1, 0), **own)


@pytest.mark.parametrize("page", [b"", b"GyrePart", b"\0" * 4096, b"GyrePart" + b"\xff" * 4088])
def test_other_pages_are_no_headers(page):
    assert unpack(page) is None


@pytest.mark.parametrize(
    "name", ["", "gyre", "gyre-a-0", "gyre-a-0-", "gyre-a/b-0-0", "gyre-..-0-0", "other-a-0-0"]
)
def test_other_names_are_no_slots(name):
    assert name_parts(name) is None
