"""Two cores that are built alike and play the same journal make the same steps and choose the same
tokens, whatever the journal says and however it was kept."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from engine_device import PAGE_TOKENS, FakeDevice, FakeFlight, make_core
from gyre.core.errors import SnapshotError
from gyre.core.records import Partial, Request, Sampling, TokenChunk
from gyre.engine.scheduler.core import EngineCore, Partials
from gyre.engine.scheduler.journal import (
    Abort,
    Add,
    Commit,
    Entry,
    Expire,
    Flush,
    Interrupt,
    JournalWriter,
    MoveComponent,
    Recapture,
    Start,
    Steps,
    decode_entry,
    encode_entry,
    read_journal,
)
from gyre.engine.scheduler.slots import InputBatch
from gyre.engine.scheduler.state import SchedulerState
from gyre.engine.scheduler.step import Step
from gyre.engine.scheduler.swap import SwapRates

NAMES = [f"r{number}" for number in range(8)]
SLOTS = 12


class NotingDevice(FakeDevice):
    """Keeps every step that it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []

    def launch(self, rows: InputBatch, step: Step) -> FakeFlight:
        self.steps.append(step)
        return super().launch(rows, step)


class Player:
    """A core on a device without arithmetic, and all that came of a journal."""

    def __init__(self, *, depth: int, num_pages: int, num_slots: int) -> None:
        self.device = NotingDevice()
        self.events: list[tuple[str, dict]] = []
        state = SchedulerState(
            max_running=4,
            num_pages=num_pages,
            page_tokens=PAGE_TOKENS,
            prefix_cache=True,
            emit=lambda kind, **fields: self.events.append((kind, fields)),
            num_slots=num_slots,
            clock=lambda: 0.0,  # a time is not part of what they must agree on
            rates=SwapRates(page_bytes=1, swap_bytes_per_s=2.0, prefill_tokens_per_s=1.5),
        )
        self.core: EngineCore = make_core(state, self.device, budget=10, depth=depth)
        self.chunks: list[TokenChunk] = []
        self.partials: list[Partials] = []

    def play(self, entry: Entry) -> None:
        kept = isinstance(entry, MoveComponent) and entry.num_slots
        partials, chunks = self.core.play(entry, self.device.pool if kept else None)
        if isinstance(entry, Commit) and entry.policy == "keep_prefix":
            self.device.oldest_version = entry.version
        self.partials.append(partials)
        self.chunks += chunks
        self.core.state.check()


def plain(value: object) -> object:
    """Records and arrays as plain values, which compare by what they hold."""
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}  # type: ignore[arg-type]
    return value


@st.composite
def requests(draw: st.DrawFn, name: str) -> Request:
    prompt = [draw(st.integers(0, 1))] * draw(st.integers(1, 14)) + [draw(st.integers(0, 4))]
    n = draw(st.integers(1, 3))
    begun = draw(st.integers(0, 3))
    return Request(
        request_id=name,
        tokens=np.asarray(prompt, np.int32),
        sampling=Sampling(max_tokens=draw(st.integers(begun + 1, 12)), n=n),
        seed=draw(st.sampled_from([0, 7, -3, 2**80])),
        priority=draw(st.integers(-1, 1)),
        chunk_tokens=draw(st.integers(0, 3)),
        partials=(_begun(begun),) if begun else (),
    )


def _begun(count: int) -> Partial:
    return Partial(
        index=0,
        tokens=np.zeros(count, np.int32),
        logprobs=np.zeros(count, np.float32),
        raw_logprobs=np.zeros(count, np.float32),
        versions=np.zeros(count, np.int32),
    )


@st.composite
def journals(draw: st.DrawFn) -> list[Entry]:
    """Any entries that an engine may write, in any order; who is named may be gone."""
    names = st.lists(st.sampled_from([*NAMES, "nobody"]), max_size=3).map(tuple)
    unused, version = list(NAMES), 0
    entries: list[Entry] = []
    for kind in draw(
        st.lists(st.sampled_from(["add", "add", "steps", "steps", "other"]), max_size=40)
    ):
        if kind == "add" and unused:
            entries.append(Add.of(draw(requests(unused.pop(0)))))
        elif kind == "steps":
            entries.append(Steps(count=draw(st.integers(1, 9))))
        else:
            version += 1
            other = st.one_of(
                st.builds(Abort, request_ids=names, reason=st.just("test")),
                st.builds(Expire, request_ids=names),
                st.just(Interrupt()),
                st.just(Flush()),
                st.just(Recapture()),
                st.builds(
                    Commit,
                    version=st.just(version),
                    policy=st.sampled_from(["drain", "keep_prefix", "continue"]),
                ),
                st.just(MoveComponent(component="engine.kv", tier="none", forgets_kv=True)),
                st.just(MoveComponent(component="engine.kv", tier="host")),
                st.builds(
                    MoveComponent,
                    component=st.just("engine.kv_host"),
                    tier=st.just("host"),
                    num_slots=st.sampled_from([0, SLOTS]),
                ),
            )
            entries.append(draw(other))
    return [*entries, Steps(count=400)]


SETTINGS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
PLAYED = given(
    entries=journals(),
    depth=st.integers(0, 2),
    num_pages=st.sampled_from([9, 12, 40]),
    num_slots=st.sampled_from([0, SLOTS]),
)


@settings(SETTINGS, max_examples=60)
@PLAYED
def test_two_cores_play_the_same_journal_alike(
    entries: list[Entry], depth: int, num_pages: int, num_slots: int
) -> None:
    play_alike(entries, depth, num_pages, num_slots)


@pytest.mark.slow
@settings(SETTINGS, max_examples=400)
@PLAYED
def test_two_cores_play_many_journals_alike(
    entries: list[Entry], depth: int, num_pages: int, num_slots: int
) -> None:
    play_alike(entries, depth, num_pages, num_slots)


def play_alike(entries: list[Entry], depth: int, num_pages: int, num_slots: int) -> None:
    """One plays the entries, the other what was read back of them, a step at a time."""
    first, second = (
        Player(depth=depth, num_pages=num_pages, num_slots=num_slots) for _ in range(2)
    )
    for entry in entries:
        first.play(entry)
    for entry in map(decode_entry, map(encode_entry, entries)):
        for part in [Steps(count=1)] * entry.count if isinstance(entry, Steps) else [entry]:
            second.play(part)
    event(f"preempted: {first.core.state.counters.preemptions > 0}")
    assert first.core.is_idle and second.core.is_idle, "everyone is answered"
    assert plain(first.device.steps) == plain(second.device.steps)
    assert plain(first.chunks) == plain(second.chunks)
    assert [plain(dict(one)) for one in first.partials if one] == [
        plain(dict(one)) for one in second.partials if one
    ]
    assert first.events == second.events
    assert first.device.captures == second.device.captures
    assert first.core.state.counters == second.core.state.counters


def test_entries_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    request = Request(request_id="a", tokens=np.arange(3, dtype=np.int64), sampling=Sampling())
    written: list[Entry] = [
        Start(settings={"max_running": 2}, num_pages=9, num_slots=0, version=3, eos_ids=(1,)),
        Add.of(replace(request, sampling=Sampling(temperature=1), seed=np.int64(4))),  # type: ignore[arg-type]
        Add.of(replace(request, request_id="b", seed=-(2**70))),
        Steps(count=3),
        Expire(request_ids=("a", "b")),
    ]
    writer = JournalWriter(tmp_path, buffer_bytes=200)
    for entry in written:
        writer.write(entry)
    held = writer.path.stat().st_size
    writer.flush()
    assert 0 < held < writer.path.stat().st_size, "a full buffer is written, the rest when asked"
    read = list(read_journal(writer.path))
    assert [type(entry) for entry in read] == [type(entry) for entry in written]
    assert (read[0], read[3:]) == (written[0], written[3:])
    first, second = read[1], read[2]
    assert isinstance(first, Add) and isinstance(second, Add)
    assert (first.whole().seed, second.whole().seed) == (4, -(2**70))
    assert first.whole().tokens.dtype == np.int64


def test_a_second_engine_of_a_folder_has_a_file_of_its_own(tmp_path: Path) -> None:
    assert JournalWriter(tmp_path).path != JournalWriter(tmp_path).path


def test_a_torn_journal_gives_what_is_whole_and_says_where_it_ends(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path)
    for count in (1, 2):
        writer.write(Steps(count=count))
    writer.flush()
    for left in range(1, writer.path.stat().st_size // 2):
        torn = tmp_path / "torn"
        torn.write_bytes(writer.path.read_bytes()[:-left])
        read = []
        with pytest.raises(SnapshotError, match="ends within an entry"):
            for entry in read_journal(torn):
                read.append(entry)
        assert read == [Steps(count=1)]
