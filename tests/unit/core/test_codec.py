"""Records to bytes and back: every record, every bit; and what is not one is refused."""

from __future__ import annotations

import collections.abc
import dataclasses
import subprocess
import sys
import types
import typing
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from gyre.core import records
from gyre.core.codec import CODEC_VERSION, decode, encode
from gyre.core.errors import SnapshotError
from gyre.core.records import Health, Partial, Prompt, Rollout, Sampling, Score, Support, TrainBatch
from gyre.loop.collect import InFlightGroup

KINDS = sorted(
    (
        kind
        for kind in vars(records).values()
        if dataclasses.is_dataclass(kind) and isinstance(kind, type)
    ),
    key=lambda kind: kind.__name__,
)
DTYPES = st.sampled_from(
    [
        "bool",
        "int8",
        "uint8",
        "int32",
        "int64",
        "uint64",
        "float16",
        "float32",
        "float64",
        ">f4",
        ">i2",
    ]
)
ARRAYS = DTYPES.flatmap(
    lambda dtype: arrays.arrays(
        dtype, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
    )
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NUMBERS = st.floats(allow_nan=False)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """A strategy for any type that a record's field may have."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return PLAIN
    if kind is np.ndarray:
        return ARRAYS
    if dataclasses.is_dataclass(kind):
        return records_of(kind)
    if origin is typing.Literal:
        return st.sampled_from(inner)
    if origin is tuple:
        if inner[-1] is Ellipsis:
            return st.lists(values_of(inner[0]), max_size=3).map(tuple)
        return st.tuples(*map(values_of, inner))
    if origin in (dict, collections.abc.Mapping):
        return st.dictionaries(values_of(inner[0]), values_of(inner[1]), max_size=3)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values_of, inner))
    plain = {
        int: st.integers(-(2**63), 2**63 - 1),
        float: NUMBERS,
        str: TEXTS,
        bool: st.booleans(),
        type(None): st.none(),
    }
    return plain[kind]


def records_of(kind: Any) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind)
    return st.builds(
        kind, **{field.name: values_of(hints[field.name]) for field in dataclasses.fields(kind)}
    )


def same(left: Any, right: Any) -> bool:
    """Equal to the last bit, with the same types throughout."""
    if isinstance(left, np.ndarray):
        return (
            isinstance(right, np.ndarray)
            and (left.dtype, left.shape) == (right.dtype, right.shape)
            and left.tobytes() == right.tobytes()
        )
    if type(left) is not type(right):
        return False
    if dataclasses.is_dataclass(left):
        return all(
            same(getattr(left, f.name), getattr(right, f.name)) for f in dataclasses.fields(left)
        )
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[name], right[name]) for name in left)
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


@pytest.mark.parametrize("kind", [*KINDS, InFlightGroup], ids=lambda kind: kind.__name__)
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_record_comes_back_to_the_last_bit(kind, data):
    record = data.draw(records_of(kind))
    assert same(decode(encode(record), kind), record)


def test_the_list_covers_the_records_that_the_design_names():
    names = {kind.__name__ for kind in KINDS}
    assert {
        "Prompt",
        "Request",
        "TokenChunk",
        "Completion",
        "Partial",
        "Rollout",
        "Score",
        "Group",
    } <= names
    assert {"TrainBatch", "StepReport", "Manifest"} <= names


@given(ARRAYS)
def test_arrays_keep_dtype_shape_and_bits_even_nan_payloads(array):
    # not contiguous
    support = Support(offsets=array, ids=array[..., ::-1] if array.ndim else array)
    back = decode(encode(support), Support)
    assert same(back, support)
    assert back.offsets.flags.writeable and back.offsets.flags.owndata


def test_empty_arrays_and_signed_zeros_survive():
    odd = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 5e-324])
    nan_with_payload = np.array([0x7FF8000000000123], dtype=np.uint64).view(np.float64)
    empty = np.empty((0, 3), dtype=np.int32)
    partial = Partial(
        index=0, tokens=empty, logprobs=odd, raw_logprobs=nan_with_payload, versions=np.array(7)
    )
    assert same(decode(encode(partial), Partial), partial)


def test_numpy_scalars_are_plain_numbers_afterwards():
    score = Score(rollout_id="r", value=np.float64(0.25), parts=())  # type: ignore[arg-type]
    assert decode(encode(score), Score) == Score(rollout_id="r", value=0.25, parts=())


@pytest.mark.parametrize(
    "bad", [np.array([object()]), np.array(["text"]), np.zeros(2, dtype="i4,f8"), {1, 2}.__iter__()]
)
def test_what_is_no_plain_value_is_refused_when_written(bad):
    with pytest.raises(NotImplementedError, match="plain values and arrays of numbers"):
        encode(Support(offsets=bad, ids=np.zeros(1)))


def test_another_version_is_refused_and_says_which():
    data = encode(Health(ok=True))
    other = data[:3] + bytes([CODEC_VERSION + 1]) + data[4:]
    with pytest.raises(SnapshotError, match=f"codec version {CODEC_VERSION}") as caught:
        decode(other, Health)
    assert "another version" in caught.value.hint
    for nonsense in (b"", b"GY", b"not ours at all"):
        with pytest.raises(SnapshotError):
            decode(nonsense, Health)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_record_of_another_kind_is_refused(data):
    kind, other = data.draw(st.sampled_from(KINDS)), data.draw(st.sampled_from(KINDS))
    names = [{field.name for field in dataclasses.fields(each)} for each in (kind, other)]
    record = data.draw(records_of(kind))
    if names[0] == names[1]:
        return
    with pytest.raises(SnapshotError):
        decode(encode(record), other)


def test_a_kind_with_defaults_for_everything_does_not_swallow_another():
    prompt = Prompt(prompt_id="p", tokens=np.zeros(2, np.int32), text="", task={}, source="")
    with pytest.raises(SnapshotError, match="other fields than a Sampling"):
        decode(encode(prompt), Sampling)
    with pytest.raises(SnapshotError):
        decode(encode([prompt]), list[Sampling])


@given(st.integers(0, 400), st.binary(min_size=1, max_size=3))
def test_damaged_bytes_give_a_record_of_the_kind_or_a_snapshot_error(place, junk):
    whole = (
        encode(TrainBatch(sequences=(), step=3))
        + encode(Support(offsets=np.arange(5), ids=np.arange(3, dtype=np.int32)))[4:]
    )
    data = encode(Support(offsets=np.arange(5), ids=np.arange(3, dtype=np.int32)))
    place = 4 + place % (len(data) - 4)
    for damaged in (
        data[:place],
        data[:place] + junk + data[place + len(junk) :],
        data + junk,
        whole,
    ):
        try:
            assert isinstance(decode(damaged, Support), Support)
        except SnapshotError as error:
            assert error.hint


def test_the_bytes_are_messagepack_behind_four_bytes():
    data = encode(Health(ok=False, reason="r"))
    assert data[:4] == b"GYR" + bytes([CODEC_VERSION])
    assert msgspec.msgpack.decode(data[4:]) == {"ok": False, "reason": "r"}


def test_rollouts_of_one_prompt_share_nothing_after_a_round_trip():
    zeros = np.zeros(3, np.float32)
    prompt = Prompt(
        prompt_id="p", tokens=np.zeros(2, np.int32), text="", task={"answer": "4"}, source=""
    )
    rollout = Rollout(
        rollout_id="1.0.0",
        group_id="1.0",
        prompt=prompt,
        tokens=np.zeros(3, np.int32),
        sampled=zeros > 0,
        logprobs=zeros,
        raw_logprobs=zeros,
        versions=np.zeros(3, np.int32),
        sampling=Sampling(stop=("a",)),
        finish="stop",
        text="4",
    )
    first, second = decode(encode([rollout, rollout]), list[Rollout])
    first.tokens[0] = 9
    assert second.tokens[0] == 0 and rollout.tokens[0] == 0


MEETING = """
from __future__ import annotations
import sys, threading, types
from gyre.core.codec import decode_json, decode_msgpack

SOURCE = '''
from __future__ import annotations
from dataclasses import dataclass
@dataclass(frozen=True, slots=True)
class Part:
    key: str
    lease: int | None = None
@dataclass(frozen=True, slots=True)
class Whole:
    writer: str
    puts: tuple[Part, ...] = ()
'''
sys.setswitchinterval(1e-6)
for number in range(100):
    module = types.ModuleType(f"records_{number}")
    sys.modules[module.__name__] = module
    exec(SOURCE, module.__dict__)
    found, start = [], threading.Barrier(6)

    def read(reader, data, kind):
        start.wait()
        found.append(reader(data, kind))

    whole, part = b'{"writer":"a","puts":[{"key":"k"}]}', bytes([0x81, 0xA3]) + b"key" + bytes([0xA1]) + b"k"
    given = [(decode_json, whole, module.Whole), (decode_msgpack, part, module.Part)] * 3
    threads = [threading.Thread(target=read, args=each) for each in given]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert sorted(map(str, found)) == ["Part(key='k', lease=None)"] * 3 + [
        "Whole(writer='a', puts=(Part(key='k', lease=None),))"
    ] * 3
"""


def test_threads_meet_a_type_for_the_first_time_together():
    """Decoders that are not built one at a time end this process by a segmentation fault."""
    ran = subprocess.run(
        [sys.executable, "-c", MEETING], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
