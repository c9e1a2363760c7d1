"""Who may join: the handshake over real sockets, and what listens for members. Both sides prove the
token; a wrong one, a replay, noise and silence end alike: refused, told, and nothing kept."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.cluster.members import AdmittedMember, MemberListener
from gyre.cluster.process_cluster import ProcessCluster
from gyre.cluster.worker import frames
from gyre.cluster.worker.handshake import (
    ADMITTED,
    JoinRequest,
    ask_to_join,
    check_answer,
    pack_answer,
    pack_ask,
    read_ask,
)
from gyre.cluster.worker.link import LinkHandle
from gyre.core.errors import DeadlineError, InputError, WorkerLost
from gyre.core.records import RoleSpec

TOKEN, OTHER = b"t" * 32, b"o" * 32
HELLO, NONCE = b"GYREMBR1" + b"h" * 32, b"n" * 32
WHO = JoinRequest(name="a", place="there, pid 7")


class Door:
    """A listener on loopback, and what came of it."""

    def __init__(self, **options: Any) -> None:
        self.admitted: list[AdmittedMember] = []
        self.refused: list[dict[str, Any]] = []
        self.listener = MemberListener(
            host="127.0.0.1",
            port=0,
            token=TOKEN,
            refuse=options.pop("refuse", lambda request: None),
            on_admitted=self.admitted.append,
            emit=lambda kind, **fields: self.refused.append(fields),
            **options,
        )
        host, _, port = self.listener.place.rpartition(":")
        self.at = (host, int(port))

    def connect(self) -> socket.socket:
        link = socket.create_connection(self.at, 10)
        link.settimeout(10)
        return link

    async def join(self, token: bytes = TOKEN, name: str = "a") -> socket.socket:
        link = self.connect()
        try:
            request = JoinRequest(name=name, place="there, pid 7")
            await asyncio.to_thread(ask_to_join, link, token, request, deadline_s=10)
        except BaseException:
            link.close()
            raise
        return link

    async def until_told(self) -> dict[str, Any]:
        async with asyncio.timeout(10):
            while not self.refused:
                await asyncio.sleep(0.01)
        return self.refused[0]


def go(work: Callable[[Door], Awaitable[None]], **options: Any) -> Door:
    async def main() -> Door:
        door = Door(**options)
        try:
            async with asyncio.timeout(30):
                await work(door)
        finally:
            await door.listener.close()
            for one in door.admitted:
                one.link.close()
        return door

    return asyncio.run(main())


def test_a_member_with_the_token_is_admitted() -> None:
    async def work(door: Door) -> None:
        (await door.join()).close()
        assert [one.request for one in door.admitted] == [WHO]
        assert door.admitted[0].link.getblocking() and not door.refused

    go(work)


def test_another_token_is_refused_and_told() -> None:
    async def work(door: Door) -> None:
        with pytest.raises(InputError, match="token"):
            await door.join(OTHER)
        told = await door.until_told()
        assert "token" in told["reason"] and told["peer"] == "127.0.0.1"
        assert OTHER.decode() not in str(told) and TOKEN.decode() not in str(told)
        assert not door.admitted

    go(work)


def test_what_was_said_once_does_not_admit_again() -> None:
    async def work(door: Door) -> None:
        async with asyncio.timeout(10):
            heard = await asyncio.to_thread(record_a_joining, door)
        link = door.connect()
        with link:
            hello = await asyncio.to_thread(link.recv, 40, socket.MSG_WAITALL)
            assert hello != heard[0]
            link.sendall(heard[1])
            answer = await asyncio.to_thread(link.recv, 289, socket.MSG_WAITALL)
        assert answer[0] != ADMITTED and len(door.admitted) == 1

    go(work)


def record_a_joining(door: Door) -> tuple[bytes, bytes]:
    """What driver and member say, as one who listens between them has it."""
    with door.connect() as link:
        hello = link.recv(40, socket.MSG_WAITALL)
        ask = pack_ask(TOKEN, hello, NONCE, WHO)
        link.sendall(ask)
        assert link.recv(289, socket.MSG_WAITALL)[0] == ADMITTED
    return hello, ask


def test_silence_ends_at_the_deadline_and_keeps_no_room() -> None:
    async def work(door: Door) -> None:
        with door.connect() as silent:
            told = await door.until_told()
            assert "0.2 s" in told["reason"]
            ended = await asyncio.to_thread(silent.recv, 100)  # the greeting
            assert len(ended) == 40 and await asyncio.to_thread(silent.recv, 1) == b""
        (await door.join()).close()
        assert len(door.admitted) == 1

    go(work, handshake_s=0.2)


def test_so_many_handshakes_and_no_more() -> None:
    async def work(door: Door) -> None:
        first, second = door.connect(), door.connect()
        with first, second:
            assert await asyncio.to_thread(first.recv, 40, socket.MSG_WAITALL)
            with suppress(ConnectionResetError):
                assert await asyncio.to_thread(second.recv, 1) == b""
            assert "in their handshakes" in (await door.until_told())["reason"]

    go(work, most_handshakes=1)


def test_a_refusal_reaches_the_member_in_words() -> None:
    def refuse(request: JoinRequest) -> None:
        raise InputError(f"a member named {request.name} is there", hint="another name")

    async def work(door: Door) -> None:
        with pytest.raises(InputError, match="a member named a is there"):
            await door.join()
        assert not door.admitted

    go(work, refuse=refuse)


def test_refusals_are_told_once_with_their_number() -> None:
    async def work(door: Door) -> None:
        for _ in range(20):
            with pytest.raises(InputError):
                await door.join(OTHER)

    told = go(work).refused
    assert sum(one["count"] for one in told) == 20 and len(told) < 20


def test_a_driver_without_the_token_is_not_obeyed() -> None:
    listening = socket.create_server(("127.0.0.1", 0))

    def pretend() -> None:
        link, _ = listening.accept()
        with link:
            link.sendall(HELLO)
            ask = link.recv(272, socket.MSG_WAITALL)
            link.sendall(pack_answer(OTHER, HELLO, ask, ADMITTED))

    with listening, socket.create_connection(listening.getsockname(), 10) as link:
        threading.Thread(target=pretend, daemon=True).start()
        with pytest.raises(InputError, match="does not have the run's token"):
            ask_to_join(link, TOKEN, WHO, deadline_s=10)


def test_a_silent_driver_is_a_deadline() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname(), 10) as link,
        pytest.raises(DeadlineError),
    ):
        ask_to_join(link, TOKEN, WHO, deadline_s=0.1)


@given(at=st.integers(0, 271), bit=st.integers(0, 7))
def test_no_bit_of_the_question_can_be_changed(at: int, bit: int) -> None:
    ask = bytearray(pack_ask(TOKEN, HELLO, NONCE, WHO))
    assert read_ask(TOKEN, HELLO, bytes(ask)) == WHO
    ask[at] ^= 1 << bit
    with pytest.raises(InputError):
        read_ask(TOKEN, HELLO, bytes(ask))


@given(at=st.integers(1, 32), bit=st.integers(0, 7))
def test_no_bit_of_the_driver_s_proof_can_be_changed(at: int, bit: int) -> None:
    ask = pack_ask(TOKEN, HELLO, NONCE, WHO)
    answer = bytearray(pack_answer(TOKEN, HELLO, ask, ADMITTED))
    check_answer(TOKEN, HELLO, ask, bytes(answer))
    answer[at] ^= 1 << bit
    with pytest.raises(InputError):
        check_answer(TOKEN, HELLO, ask, bytes(answer))


@pytest.mark.parametrize("name", ["", "-a", "A", "a b", "a/../b", "a" * 47 + "-"])
def test_names_that_are_none_are_refused(name: str) -> None:
    ask = pack_ask(TOKEN, HELLO, NONCE, JoinRequest(name=name, place=""))
    with pytest.raises(InputError, match="no name"):
        read_ask(TOKEN, HELLO, ask)


def test_another_gyre_is_refused(monkeypatch) -> None:
    with monkeypatch.context() as older:
        older.setattr("gyre.cluster.worker.handshake.VERSION", "0.0.1")
        ask = pack_ask(TOKEN, HELLO, NONCE, WHO)
    with pytest.raises(InputError, match=r"it has Gyre 0\.0\.1"):
        read_ask(TOKEN, HELLO, ask)


def test_a_frame_that_is_too_large_ends_the_link_and_not_the_driver() -> None:
    async def main() -> str:
        ours, theirs = socket.socketpair()
        cluster = ProcessCluster(gpus=0, on_event=lambda worker, kind, **fields: None)
        spec = RoleSpec(name="member-a", builder="x:y", deadline_s=20.0)
        handle = LinkHandle(
            spec, ours, place="there", on_event=lambda *_, **__: None, most_bytes=1000
        )
        with theirs:
            theirs.sendall(frames.framed(1, bytes(1001))[:16])  # its head alone
            with pytest.raises(WorkerLost, match="1001 bytes"):
                await cluster.adopt(handle, spec)
        return await cluster.watch(handle)

    assert "at most 1000" in asyncio.run(main())
