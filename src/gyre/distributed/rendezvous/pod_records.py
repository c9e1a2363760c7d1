"""Pod records: what a pod keeps at its rendezvous, as JSON that people can read. In: an Offer, who
is there, what is under way. Out: keys and texts, and the decisions which of two is newer. Pure.

    state/epoch                    the publisher and its epoch; commits of an older one are refused
    state/versions/EPOCH/VERSION   registered, or committed by every receiver
    state/offers/EPOCH/VERSION     where the version's parts are
    pieces/EPOCH/VERSION/N         the manifest's tensors; a value of etcd has a limit
    state/members/NAME             with the member's lease
    state/receivers/NAME           likewise: the version that it has
    state/operation                likewise: what is under way, and by whom
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from gyre.core.codec import decode_json
from gyre.core.errors import InputError, RankError
from gyre.core.offers import Offer, RegisteredPart, RegisteredShards
from gyre.core.records import Manifest, TensorEntry
from gyre.distributed.rendezvous.contract import KeyCheck, KeyEntry

STATE, OFFERS, VERSIONS, PIECES = "state/", "state/offers/", "state/versions/", "pieces/"
MEMBERS, RECEIVERS = "state/members/", "state/receivers/"
EPOCH, OPERATION = "state/epoch", "state/operation"
PIECE_BYTES = 512 << 10  # etcd takes 1.5 MiB in one commit

OperationKind = Literal["register", "update", "start", "rollout", "terminate"]
VersionState = Literal["registered", "committed"]
ReceptionState = Literal["prepared", "committed", "failed"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRecord:
    """Who may publish: the process of the newest attempt."""

    epoch: int
    publisher: str
    process: str  # unique, however often a name is used


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """What has become of a version."""

    epoch: int
    version: int
    state: VersionState


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferRecord:
    """An offer without its manifest's tensors, which follow in pieces."""

    epoch: int
    version: int
    shared: bool
    homes: tuple[str, ...]
    parts: tuple[RegisteredPart, ...]
    num_pieces: int

    @property
    def order(self) -> tuple[int, int]:
        return self.epoch, self.version


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRecord:
    """A process of the pod, for as long as its lease."""

    name: str
    role: str  # "trainer", "engine", "server"
    place: str  # host and process id, for people
    process: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverRecord:
    """Which version a receiver has, and how far it is with it."""

    name: str
    epoch: int
    version: int
    state: ReceptionState
    process: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRecord:
    """What is under way in the pod. One at a time."""

    kind: OperationKind
    by: str
    epoch: int
    version: int
    process: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRecord:
    """A record that this process answers for, and writes again when the store has lost it."""

    key: str
    value: str
    has_lease: bool = False
    is_published: bool = False  # only under this process's epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class RewritePlan:
    """What to write again. `replaced`: keys that another process of this name has now.
    `superseded_by`: the newer publisher, where there is one."""

    writes: tuple[tuple[OwnRecord, KeyCheck], ...]
    replaced: tuple[str, ...]
    superseded_by: EpochRecord | None


class Superseded(RankError):
    """A newer attempt publishes; what an older one offers is refused."""

    def __init__(self, own: EpochRecord, newer: EpochRecord) -> None:
        super().__init__(
            f"'{own.publisher}' may not publish under epoch {own.epoch}: '{newer.publisher}' "
            f"publishes under epoch {newer.epoch}",
            hint="end this process; a later attempt of the run has its place",
        )
        self.newer = newer


def to_text(record: Any) -> str:
    return msgspec.json.encode(record).decode()


def from_text(text: str, kind: type[T], key: str) -> T:
    """Return the record of a key. InputError for a text of another writer."""
    try:
        return decode_json(text, kind)
    except msgspec.DecodeError as error:
        raise InputError(
            f"rendezvous key '{key}' holds no {kind.__name__}: {error}",
            hint="only processes of one version of Gyre may use the run's keys",
        ) from error


def path_of(prefix: str, epoch: int, version: int) -> str:
    """Return the key of a version, so that keys are in the order of versions."""
    return f"{prefix}{epoch:06}/{version:09}"


def encode_offer(offer: Offer, *, piece_bytes: int = PIECE_BYTES) -> dict[str, str]:
    """Return an offer's keys and texts: its pieces, and last its record."""
    assert offer.registered is not None, offer.kind
    manifest = offer.manifest
    pieces = [*cut_pieces([to_text(entry) for entry in manifest.entries], piece_bytes)]
    record = OfferRecord(
        epoch=manifest.epoch,
        version=manifest.version,
        shared=manifest.shared,
        homes=tuple(sorted(offer.homes)),
        parts=offer.registered.parts,
        num_pieces=len(pieces),
    )
    texts = dict(zip(keys_of_pieces(record), pieces, strict=True))
    return {**texts, path_of(OFFERS, *record.order): to_text(record)}


def keys_of_pieces(record: OfferRecord) -> list[str]:
    below = path_of(PIECES, *record.order)
    return [f"{below}/{number:04}" for number in range(record.num_pieces)]


def cut_pieces(texts: Sequence[str], most_bytes: int) -> Iterable[str]:
    """Yield JSON lists of JSON texts, of at most so many bytes or one text each."""
    piece: list[str] = []
    size_bytes = 2
    for text in texts:
        text_bytes = len(text.encode()) + 1
        if piece and size_bytes + text_bytes > most_bytes:
            yield f"[{','.join(piece)}]"
            piece, size_bytes = [], 2
        piece.append(text)
        size_bytes += text_bytes
    if piece:
        yield f"[{','.join(piece)}]"


def decode_offer(record: OfferRecord, pieces: Sequence[KeyEntry]) -> Offer | None:
    """Return the offer, or None while some of its pieces are gone: a newer one has replaced it."""
    if len(pieces) != record.num_pieces:
        return None
    entries = [
        entry
        for piece in pieces
        for entry in from_text(piece.value, tuple[TensorEntry, ...], piece.key)
    ]
    manifest = Manifest(
        version=record.version, entries=tuple(entries), shared=record.shared, epoch=record.epoch
    )
    source = RegisteredShards(parts=record.parts)
    return Offer(manifest=manifest, source=source, homes=frozenset(record.homes))


def find_old(keys: Iterable[str], prefix: str, newest: tuple[int, int], kept: int) -> list[str]:
    """Return the keys under a prefix of all versions but the `kept` newest up to `newest`, and of
    those that would come after it: an older publisher's epoch was cut off."""
    found = {key: order_of(key, prefix) for key in keys}
    known = sorted({order for order in found.values() if order <= newest} | {newest})
    keep = set(known[-kept:])
    return [key for key, order in found.items() if order not in keep]


def order_of(key: str, prefix: str) -> tuple[int, int]:
    """Return epoch and version of a key that `path_of` made, or one below it."""
    epoch, version = key.removeprefix(prefix).split("/")[:2]
    return int(epoch), int(version)


def find_newer(own: EpochRecord, found: KeyEntry | None) -> EpochRecord | None:
    """Return the publisher that `own` may not follow, or None. Of an epoch the first stays."""
    if found is None:
        return None
    there = from_text(found.value, EpochRecord, EPOCH)
    is_newer = there.epoch > own.epoch
    is_other = there.epoch == own.epoch and there.process != own.process
    return there if is_newer or is_other else None


def plan_rewrites(
    own: Mapping[str, OwnRecord],
    found: Mapping[str, KeyEntry],
    *,
    process: str,
    lease_id: int,
    rewound: bool,
) -> RewritePlan:
    """Compare what this process has written with what is there. After the store went back to older
    data any difference is older; otherwise another process of the same name made it."""
    newer = None
    if EPOCH in own:
        newer = find_newer(from_text(own[EPOCH].value, EpochRecord, EPOCH), found.get(EPOCH))
    writes, replaced = [], []
    for key in sorted(own, key=lambda key: (key != EPOCH, key.startswith(STATE), key)):
        record, there = own[key], found.get(key)
        if record.is_published and newer is not None:
            continue
        if there is None:
            writes.append((record, KeyCheck(key=key, revision=0)))
        elif there.value != record.value:
            is_ours = rewound or record.is_published or process in there.value
            if is_ours and not (key == OPERATION and process not in there.value):
                writes.append((record, KeyCheck(key=key, revision=there.revision)))
            else:
                replaced.append(key)
        elif record.has_lease and there.lease_id != lease_id:
            writes.append((record, KeyCheck(key=key, revision=there.revision)))
    return RewritePlan(writes=tuple(writes), replaced=tuple(replaced), superseded_by=newer)
