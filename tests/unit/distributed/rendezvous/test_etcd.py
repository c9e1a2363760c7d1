"""A rendezvous on a real etcd: what others see of it, TLS, and what it says when history is gone."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from certificates import make_certificate
from etcd_process import EtcdProcess
from gyre.core.errors import ConfigError
from gyre.distributed.rendezvous.contract import HistoryLost, KeyPut
from gyre.distributed.rendezvous.etcd import EtcdRendezvous
from gyre.distributed.rendezvous.etcd_gateway import EtcdGateway, TlsFiles, make_context
from gyre.distributed.rendezvous.metadata_store import MetadataStore
from offers import registered_offer
from rendezvous_cases import SOON_S, Meeting, go, meet_at_etcd

PREFIX = "/gyre/run/"


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    process = EtcdProcess(tmp_path)
    yield process
    process.close()


def test_a_watch_from_a_compacted_revision_says_so(etcd) -> None:
    async def main(meeting: Meeting) -> None:
        one = meeting.join()
        for number in range(5):
            last = await one.commit(KeyPut(key="a", value=f"{number}"), deadline_s=SOON_S)
        etcd.ctl("compact", f"{last}")
        with pytest.raises(HistoryLost, match=f"up to {last} were compacted"):
            async with aclosing(one.watch("a", after=1, deadline_s=SOON_S)) as changes:
                await anext(changes)
        async with aclosing(one.watch("a", after=last - 1, deadline_s=SOON_S)) as changes:
            assert (await anext(changes)).changes[0].value == "4"

    go(meet_at_etcd([etcd.url]), main)


def test_a_killed_member_is_gone_after_its_lease(etcd) -> None:
    """A process without torch, as a sidecar may be."""
    member = subprocess.Popen(
        [sys.executable, "-c", MEMBER, etcd.url, PREFIX], stdout=subprocess.PIPE, text=True
    )

    async def main(meeting: Meeting) -> None:
        gateway = EtcdGateway([etcd.url], emit=meeting.emit)
        end = EtcdRendezvous(gateway, prefix=PREFIX, emit=meeting.emit)
        meeting.joined.append(end)
        store = MetadataStore(end, name="one", emit=meeting.emit, deadline_s=SOON_S)
        assert (await asyncio.to_thread(member.stdout.readline)).strip() == "joined, torch False"
        async with aclosing(store.watch_members()) as changes:
            assert set(await anext(changes)) == {"sidecar"}
            member.kill()
            async for members in changes:
                if not members:
                    return

    try:
        go(meet_at_etcd([etcd.url]), main)
    finally:
        member.kill()
        member.wait(20)


MEMBER = """
import asyncio, sys
from gyre.distributed.rendezvous.etcd import EtcdRendezvous
from gyre.distributed.rendezvous.etcd_gateway import EtcdGateway
from gyre.distributed.rendezvous.local import LocalRendezvous
from gyre.distributed.rendezvous.metadata_store import MetadataStore

def emit(kind, **fields):
    raise AssertionError(kind)

async def main():
    end = EtcdRendezvous(EtcdGateway([sys.argv[1]], emit=emit), prefix=sys.argv[2], emit=emit)
    store = MetadataStore(end, name="sidecar", emit=emit, lease_s=2.0)
    await store.join("engine", "here")
    print("joined, torch", "torch" in sys.modules, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_what_is_written_is_plain_to_etcds_own_command(etcd) -> None:
    async def main(meeting: Meeting) -> None:
        gateway = EtcdGateway([etcd.url], emit=meeting.emit)
        end = EtcdRendezvous(gateway, prefix=PREFIX, emit=meeting.emit)
        meeting.joined.append(end)
        store = MetadataStore(end, name="trainer", emit=meeting.emit, lease_s=7.0)
        await store.join("trainer", "host/1")
        await store.claim_epoch(2)
        await store.publish_offer(registered_offer(7, epoch=2))
        keys = etcd.ctl("get", PREFIX, "--prefix", "--keys-only").split()
        assert keys == [
            f"{PREFIX}{key}"
            for key in (
                "pieces/000002/000000007/0000",
                "state/epoch",
                "state/members/trainer",
                "state/offers/000002/000000007",
                "state/versions/000002/000000007",
            )
        ]
        text = etcd.ctl("get", f"{PREFIX}state/versions/", "--prefix", "--print-value-only")
        assert json.loads(text) == {"epoch": 2, "version": 7, "state": "registered"}
        text = etcd.ctl("get", f"{PREFIX}state/members/trainer", "--print-value-only")
        assert json.loads(text)["place"] == "host/1"
        ((lease,),) = [etcd.ctl("lease", "list").split()[-1:]]
        told = etcd.ctl("lease", "timetolive", lease, "--keys")
        assert "granted with TTL(7s)" in told and f"[{PREFIX}state/members/trainer]" in told
        # and what the command writes is plain to us
        etcd.ctl("put", f"{PREFIX}note", "by hand")
        assert (await end.get("note", deadline_s=SOON_S)).value == "by hand"
        await store.leave()
        assert "found 0 leases" in etcd.ctl("lease", "list")

    go(meet_at_etcd([etcd.url]), main)


def test_tls_with_a_certificate_of_the_client(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path / "tls")
    files = [
        f"--{name}={path}"
        for name, path in (("cert-file", cert), ("key-file", key), ("trusted-ca-file", cert))
    ]
    etcd = EtcdProcess(tmp_path, *files, "--client-cert-auth", scheme="https")
    tls = TlsFiles(ca=str(cert), cert=str(cert), key=str(key))

    async def ask(tls: TlsFiles) -> Any:
        gateway = EtcdGateway([etcd.url], emit=lambda kind, **fields: None, tls=tls)
        end = EtcdRendezvous(gateway, prefix=PREFIX, emit=lambda kind, **fields: None)
        try:
            await end.commit(KeyPut(key="a", value="1"), deadline_s=1.0)
            return await end.get("a", deadline_s=1.0)
        finally:
            await end.close()

    try:
        assert asyncio.run(ask(tls)).value == "1"
        with pytest.raises(ConfigError, match=r"certificate of .* is not trusted"):
            asyncio.run(ask(TlsFiles()))
        with pytest.raises(ConfigError, match="does not take this client's certificate"):
            asyncio.run(ask(TlsFiles(ca=str(cert))))
    finally:
        etcd.close()


def test_a_file_that_does_not_load_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.pem")
    with pytest.raises(ConfigError, match=r"cluster\.rendezvous\.ca_file = .*missing\.pem"):
        make_context(TlsFiles(ca=missing))
    cert, key = make_certificate(tmp_path / "tls", passphrase="secret")
    with pytest.raises(ConfigError, match=r"cluster\.rendezvous\.cert_file = .*passphrase"):
        make_context(TlsFiles(ca=str(cert), cert=str(cert), key=str(key)))
