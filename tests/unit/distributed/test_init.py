"""The store that ranks meet at: where it listens, and for how long."""

from __future__ import annotations

import socket
import uuid
from datetime import timedelta

import psutil
import pytest
import torch
from torch.distributed import TCPStore

from beside_cases import neighbors_of
from gyre.core.errors import ConfigError
from gyre.distributed.init import hold_store
from gyre.distributed.process_group import RankGroup
from rank_pool import RankPool


def heard_at(port: int) -> list[str]:
    """Addresses on which this process listens at a port."""
    places = psutil.Process().net_connections("inet")
    return [
        place.laddr.ip
        for place in places
        if place.status == psutil.CONN_LISTEN and place.laddr.port == port
    ]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost"])
def test_a_store_listens_on_the_address_that_it_is_told(host: str) -> None:
    store = hold_store(host, timeout_s=20.0)
    assert heard_at(store.port) in (["::1"], [socket.gethostbyname(host)])
    other = TCPStore(
        host, store.port, is_master=False, timeout=timedelta(seconds=20), use_libuv=True
    )
    other.set("key", "value")
    assert store.get("key") == b"value"


def test_a_store_is_gone_with_its_owner_and_leaves_its_descriptor_to_nobody() -> None:
    before = psutil.Process().num_fds()
    store = hold_store(timeout_s=20.0)
    port = store.port
    del store
    assert heard_at(port) == [] and psutil.Process().num_fds() <= before


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1") as refused:
        hold_store("192.0.2.1")
    assert "node-ip-address" in refused.value.hint


def broken_pair(group: RankGroup, port: int, round_id: str) -> tuple[float, str]:
    """Sum over two neighbors, of which the first pair breaks; then over all ranks."""
    neighbors, sum_N = neighbors_of(group, 2, port, round_id), torch.ones(1) + group.rank
    neighbors.all_reduce(sum_N)
    text = ""
    try:
        with neighbors.guard("work of two"):
            if group.rank == 0:
                raise ValueError("of its own")
            neighbors.barrier()
    except Exception as error:  # noqa: BLE001  the test reads it
        text = f"{type(error).__name__}: {error}"
    with group.guard("work of all"):
        group.barrier()
    neighbors.close()
    return float(sum_N), text


def test_neighbors_are_a_group_whose_failures_are_its_own(ranks: RankPool) -> None:
    """The other pair and the group of all work on."""
    found = ranks.run(broken_pair, ranks.port, uuid.uuid4().hex)
    assert [total for total, _ in found] == [3.0, 3.0, 7.0, 7.0]
    assert found[0][1] == "ValueError: of its own"
    assert "rank 0 failed: ValueError: of its own" in found[1][1]
    assert found[2][1] == found[3][1] == ""
