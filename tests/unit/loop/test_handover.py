"""The hand-over's second try: parts that were damaged since they were registered are registered
again; nothing else is tried twice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gyre.core.errors import InputError, RankError, SnapshotError
from gyre.core.offers import FolderTensors, Offer, RegisteredShards, WeightSource
from gyre.core.records import Manifest
from gyre.loop.handover import Handover

PARTS = RegisteredShards(parts=())


class Registrar:
    """A trainer at version 4 that counts what it registers."""

    def __init__(self, source: WeightSource) -> None:
        self.source, self.count = source, 0

    async def register(self, *, epoch: int) -> Offer:
        self.count += 1
        manifest = Manifest(version=4, entries=(), shared=False, epoch=epoch)
        return Offer(manifest=manifest, source=self.source)


class Receiver:
    """An engine that fails with these errors first."""

    def __init__(self, at: str, errors: list[Exception]) -> None:
        self.at, self.errors = at, errors
        self.calls: list[str] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.at and self.errors:
            raise self.errors.pop(0)

    async def prepare(self, offer: Offer) -> None:
        self._call("prepare")

    async def commit(self, version: int, *, policy: str) -> None:
        self._call("commit")

    async def rollback(self) -> None:
        self._call("rollback")


def publish(registrar: Any, receiver: Any) -> list[str]:
    told: list[str] = []
    handover = Handover(registrar, receiver, emit=lambda kind, **_: told.append(kind), epoch=1)
    try:
        assert asyncio.run(handover.publish(step=4)) == 4
    except Exception as error:  # noqa: BLE001  it is looked at by its name
        told.append(type(error).__name__)
    return told


@pytest.mark.parametrize("at", ["prepare", "commit"])
@pytest.mark.parametrize("error", [SnapshotError("torn"), InputError("of another run")])
def test_damaged_parts_are_registered_once_more(at: str, error: Exception) -> None:
    registrar, receiver = Registrar(PARTS), Receiver(at, [error])
    assert publish(registrar, receiver) == ["retry.version_registered", "weights.published"]
    assert registrar.count == 2
    first = ["prepare"] if at == "prepare" else ["prepare", "commit"]
    assert receiver.calls == [*first, "rollback", "prepare", "commit"]


def test_a_second_damage_ends_the_hand_over() -> None:
    registrar = Registrar(PARTS)
    receiver = Receiver("prepare", [SnapshotError("torn"), SnapshotError("torn again")])
    told = publish(registrar, receiver)
    assert told == ["retry.version_registered", "weights.publish_failed", "SnapshotError"]
    assert registrar.count == 2 and receiver.calls == ["prepare", "rollback"] * 2


@pytest.mark.parametrize(
    ("source", "error"),
    [(PARTS, RankError("lost")), (FolderTensors(folder="x"), SnapshotError("torn"))],
)
def test_nothing_else_is_tried_twice(source: WeightSource, error: Exception) -> None:
    registrar, receiver = Registrar(source), Receiver("prepare", [error])
    assert publish(registrar, receiver) == ["weights.publish_failed", type(error).__name__]
    assert registrar.count == 1 and receiver.calls == ["prepare", "rollback"]
