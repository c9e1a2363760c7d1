"""Records of a pod: an offer survives its way as text, and nothing older takes the place of what is
newer."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.core.errors import InputError
from gyre.core.offers import Offer, RegisteredPart, RegisteredShards
from gyre.core.records import Manifest, Segment, TensorEntry
from gyre.distributed.rendezvous.contract import KeyEntry
from gyre.distributed.rendezvous.pod_records import (
    EPOCH,
    OFFERS,
    OPERATION,
    EpochRecord,
    OfferRecord,
    OperationRecord,
    OwnRecord,
    cut_pieces,
    decode_offer,
    encode_offer,
    find_newer,
    find_old,
    from_text,
    order_of,
    path_of,
    plan_rewrites,
    to_text,
)

NUMBERS = st.integers(0, 2**40)
SEGMENTS = st.builds(
    Segment, start=NUMBERS, stop=NUMBERS, owner=st.integers(0, 63),
    columns=st.none() | st.tuples(NUMBERS, NUMBERS), checksum=st.none() | st.text("0123456789abcdef", min_size=16, max_size=16),
)  # fmt: skip
ENTRIES = st.builds(
    TensorEntry, name=st.text(), dtype=st.just("bfloat16"), shape=st.lists(NUMBERS, max_size=3).map(tuple), size_bytes=NUMBERS,
    segments=st.lists(SEGMENTS, max_size=3).map(tuple),
)  # fmt: skip
OFFERED = st.builds(
    Offer,
    manifest=st.builds(
        Manifest, version=st.integers(0, 10**8), epoch=st.integers(0, 10**5), shared=st.booleans(), entries=st.lists(ENTRIES, max_size=6).map(tuple)
    ),
    source=st.builds(
        RegisteredShards,
        parts=st.lists(
            st.builds(RegisteredPart, addresses=st.lists(st.text(), max_size=2).map(tuple), size_bytes=NUMBERS), max_size=3
        ).map(tuple),
    ),
    homes=st.frozensets(st.text(), max_size=3),
)  # fmt: skip
ORDERS = st.tuples(st.integers(0, 20), st.integers(0, 200))


@given(OFFERED, st.integers(2, 2000))
def test_an_offer_comes_back_whole_from_texts_of_any_length(offer: Offer, piece_bytes: int) -> None:
    texts = encode_offer(offer, piece_bytes=piece_bytes)
    *pieces, last = [KeyEntry(key=key, value=text, revision=1) for key, text in texts.items()]
    assert sorted(texts)[:-1] == [piece.key for piece in pieces], "keys are in order"
    record = from_text(last.value, OfferRecord, last.key)
    assert order_of(last.key, OFFERS) == record.order
    for piece in pieces:
        assert len(piece.value.encode()) <= piece_bytes or len(json.loads(piece.value)) == 1
    found = decode_offer(record, pieces)
    assert found is not None
    assert (found.manifest, found.source, found.homes) == (
        offer.manifest,
        offer.source,
        offer.homes,
    )
    if pieces:
        assert decode_offer(record, pieces[:-1]) is None


@given(st.lists(st.text(max_size=20), max_size=20), st.integers(2, 60))
def test_pieces_are_one_json_list_in_order(texts, most_bytes) -> None:
    pieces = [
        json.loads(piece) for piece in cut_pieces([json.dumps(text) for text in texts], most_bytes)
    ]
    assert [text for piece in pieces for text in piece] == texts and all(pieces)


def test_a_record_is_json_that_people_can_read() -> None:
    part = RegisteredPart(
        addresses=("shm://host/gyre-7-0", "tcp://10.0.0.1:9/gyre-7-0"), size_bytes=64
    )
    entry = TensorEntry(
        name="embed",
        dtype="float32",
        shape=(2, 2),
        size_bytes=16,
        segments=(Segment(start=0, stop=4),),
    )
    offer = Offer(
        manifest=Manifest(version=7, epoch=2, shared=False, entries=(entry,)), source=RegisteredShards(parts=(part,))
    )  # fmt: skip
    texts = encode_offer(offer)
    assert list(texts) == ["pieces/000002/000000007/0000", "state/offers/000002/000000007"]
    assert json.loads(texts["state/offers/000002/000000007"]) == {
        "epoch": 2, "version": 7, "shared": False, "homes": [], "num_pieces": 1,
        "parts": [{"addresses": ["shm://host/gyre-7-0", "tcp://10.0.0.1:9/gyre-7-0"], "size_bytes": 64}],
    }  # fmt: skip
    with pytest.raises(InputError, match="'state/epoch' holds no EpochRecord"):
        from_text('{"epoch": "two"}', EpochRecord, EPOCH)


@given(st.lists(ORDERS, unique=True), ORDERS, st.integers(1, 4))
def test_the_newest_versions_are_kept_and_none_beyond(orders, newest, kept) -> None:
    keys = {path_of(OFFERS, *order): order for order in orders}
    old = find_old(keys, OFFERS, newest, kept)
    left = {order for key, order in keys.items() if key not in old}
    expected = sorted({order for order in orders if order <= newest} | {newest})[-kept:]
    assert left == set(expected) & set(orders)


@given(ORDERS, ORDERS)
def test_keys_are_in_the_order_of_epochs_then_versions(one, other) -> None:
    assert (path_of(OFFERS, *one) < path_of(OFFERS, *other)) == (one < other)


def publisher(epoch: int, process: str) -> EpochRecord:
    return EpochRecord(epoch=epoch, publisher=f"driver-{process}", process=process)


@given(st.integers(0, 5), st.integers(0, 5), st.sampled_from("ab"))
def test_of_two_publishers_exactly_one_stays(mine, theirs, process) -> None:
    own, there = publisher(mine, "a"), publisher(theirs, process)
    newer = find_newer(own, KeyEntry(key=EPOCH, value=to_text(there), revision=1))
    if mine == theirs and process == "a":
        assert newer is None
    elif mine == theirs:
        assert newer == there, "the first of an epoch"
    else:
        assert newer == (there if theirs > mine else None)


OWN = {
    record.key: record
    for record in (
        OwnRecord(key=EPOCH, value=to_text(publisher(4, "a")), is_published=True),
        OwnRecord(key="pieces/4/7/0", value="[]", is_published=True),
        OwnRecord(key="state/offers/4/7", value="seven", is_published=True),
        OwnRecord(key="state/members/one", value='{"process":"a","n":2}', has_lease=True),
        OwnRecord(
            key=OPERATION, has_lease=True,
            value=to_text(OperationRecord(kind="update", by="one", epoch=4, version=7, process="a")),
        ),
    )
}  # fmt: skip
FOUND_EPOCHS = st.builds(publisher, st.integers(2, 6), st.sampled_from("ab")).map(to_text)


@st.composite
def stores(draw) -> dict[str, KeyEntry]:
    """What a store may hold at our keys: ours, ours from before, another's, or nothing."""
    found = {}
    for key, record in OWN.items():
        value = record.value
        older = value.replace('"n":2', '"n":1').replace('"version":7', '"version":6')
        other = value.replace('"process":"a"', '"process":"b"')
        texts = st.sampled_from([None, value, older, other])
        if key == EPOCH:
            texts = st.none() | FOUND_EPOCHS
        if (text := draw(texts)) is not None:
            lease_id = draw(st.sampled_from([0, 1, 2])) if record.has_lease else 0
            found[key] = KeyEntry(
                key=key, value=text, revision=draw(st.integers(1, 9)), lease_id=lease_id
            )
    return found


@given(stores(), st.booleans())
def test_what_is_written_again(found, rewound) -> None:
    plan = plan_rewrites(OWN, found, process="a", lease_id=2, rewound=rewound)
    writes = {record.key: check for record, check in plan.writes}
    newer = find_newer(publisher(4, "a"), found.get(EPOCH))
    assert plan.superseded_by == newer
    for key, record in OWN.items():
        there = found.get(key)
        if record.is_published and newer:
            assert key not in writes, "an older publisher writes nothing"
        elif there is None:
            assert writes[key].revision == 0
        elif key in writes:
            assert writes[key].revision == there.revision and there != replace(
                there, value=record.value, lease_id=2
            )
        elif key in plan.replaced:
            assert '"process":"b"' in there.value and (not rewound or key == OPERATION)
        else:
            assert there.value == record.value
    order = [record.key for record, _ in plan.writes]
    assert order == sorted(order, key=lambda key: (key != EPOCH, not key.startswith("pieces/")))
    # once it is written, nothing is left to do
    after = {key: OWN[key].value if key in writes else there.value for key, there in found.items()}
    after |= {key: OWN[key].value for key in writes}
    entries = {
        key: KeyEntry(key=key, value=text, revision=1, lease_id=2) for key, text in after.items()
    }
    left = {key: record for key, record in OWN.items() if key not in plan.replaced}
    assert plan_rewrites(left, entries, process="a", lease_id=2, rewound=False).writes == ()
