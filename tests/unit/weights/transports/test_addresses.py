"""Addresses: shared memory on the same host, else TCP, else an error that names what there was."""

from __future__ import annotations

import pytest

from gyre.core.errors import InputError
from gyre.weights.transports.addresses import LIVE_SCHEMES, choose_address, host_id, parse
from part_cases import shared_folder

OFFERED = ("shm://aaaa/gyre-1-0-0", "tcp://10.0.0.1:7000/gyre-1-0-0")


@pytest.mark.parametrize(
    ("host", "preference", "scheme"),
    [
        ("aaaa", ("shm", "tcp"), "shm"),
        ("bbbb", ("shm", "tcp"), "tcp"),
        ("aaaa", ("tcp", "shm"), "tcp"),
        ("aaaa", ("tcp",), "tcp"),
    ],
)
def test_the_first_that_can_be_opened_is_chosen(host, preference, scheme):
    found = choose_address(OFFERED, host=host, preference=preference)
    assert found.scheme == scheme and str(found) in OFFERED


def test_what_cannot_be_opened_is_named():
    with pytest.raises(
        InputError, match=r"at shm://aaaa/gyre-1-0-0, and none can be opened from host bbbb"
    ):
        choose_address(OFFERED[:1], host="bbbb")
    with pytest.raises(InputError, match="no address"):
        choose_address((), host="bbbb")
    for scheme in LIVE_SCHEMES:
        with pytest.raises(InputError, match=f"at {scheme}://aaaa/x, and none .* from host bbbb"):
            choose_address((f"{scheme}://aaaa/x",), host="bbbb", preference=(scheme,))


@pytest.mark.parametrize(
    "wrong", ["", "shm://x", "file:///etc/passwd", "shm://h/../x", "shm://h/a b"]
)
def test_other_texts_are_no_addresses(wrong):
    with pytest.raises(InputError, match="no address of a part"):
        parse(wrong)


def test_a_host_is_named_by_its_shared_memory():
    with shared_folder() as one, shared_folder() as other:
        assert host_id(one) == host_id(one) != host_id(other)
