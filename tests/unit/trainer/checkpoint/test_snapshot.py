"""Snapshots on disk: what is read back, and what any damage, crash or full disk does to them; by
one process and by several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre.core.errors import SnapshotError
from gyre.distributed.layout import BoxRun, find_gap
from gyre.trainer.checkpoint.shards import own_runs
from gyre.trainer.checkpoint.store import Snapshot, SnapshotStore, find_faults, join_faults, load
from gyre.weights.shards import row_layout, slice_layout, whole_layout
from rank_pool import RankPool
from saver_cases import (
    bytes_read_to_restore,
    die_in_a_save,
    fail_on,
    load_and_save,
    load_latest,
    parts_of,
    save_behind_a_stuck_disk,
    save_trained,
    saver_on,
    shares_of_faults,
    wait_for_a_slow_copy,
    written_by,
)
from trainer_cases import assert_same

TENSORS = {
    "float": torch.arange(12, dtype=torch.float32).reshape(3, 4).t(),  # not contiguous
    "half": torch.tensor([1.5, float("nan"), -0.0], dtype=torch.bfloat16),
    "ints": torch.tensor([2**60], dtype=torch.int64),
    "flag": torch.tensor(True),
}
STATE = {"step": 3, "cursor": {"epoch": 1, "order": [3, 1, 2]}, "text": "naïve"}
BLOBS = {"rollouts.msgpack": bytes(range(256)), "empty": b""}
SHARD = "rank-00000.safetensors"


def save(folder: Path, step: int, *, keep: int = 2, tensors=TENSORS) -> tuple[SnapshotStore, list]:
    saver, store, events = saver_on(None, folder, keep=keep)
    saver.save(step, parts=lambda _: parts_of(tensors), state={**STATE, "step": step}, blobs=BLOBS)
    return store, events


def tensors_in(found: Snapshot) -> dict[str, torch.Tensor]:
    read = {
        name: torch.empty(kind.shape, dtype=kind.dtype)
        for name, kind in found.tensors.kinds().items()
    }
    for name, tensor in read.items():
        found.tensors.read(name, BoxRun(start=0, stop=tensor.numel()), tensor.view(-1))
    return read


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_everything_comes_back_to_the_bit(tmp_path):
    store, events = save(tmp_path, 7)
    found = load_latest(store)
    assert found.step == 7 and found.blobs == BLOBS
    assert found.state == {"loop": {**STATE, "step": 7}, "trainer": {"version": 7}}
    read = tensors_in(found)
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        got = read[name]
        assert got.dtype == tensor.dtype and got.shape == tensor.shape
        assert bits(got).equal(bits(tensor)), name
    assert [name for name, _ in events] == ["snapshot.saved"]


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    shapes=st.lists(st.lists(st.integers(1, 5), max_size=3), max_size=4),
    dtype=st.sampled_from(
        [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.uint8]
    ),
)
def test_a_shard_file_is_what_the_safetensors_package_reads(shapes, dtype, tmp_path):
    tensors = {f"t{i}": (torch.randn(shape) * 9).to(dtype) for i, shape in enumerate(shapes)}
    save(tmp_path, 0, tensors=tensors)
    read = safetensors.torch.load((tmp_path / "step-00000000" / SHARD).read_bytes())
    assert read.keys() == {f"{name}[0:{tensor.numel()}]" for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        assert bits(read[f"{name}[0:{tensor.numel()}]"]).equal(bits(tensor))


def test_any_run_is_read_through_blocks_that_are_checked(tmp_path, monkeypatch):
    """Blocks of 64 bytes, so that a run begins and ends inside of one."""
    from gyre.trainer.checkpoint import manifest, shard_file

    monkeypatch.setattr(shard_file, "BLOCK_BYTES", 64)
    monkeypatch.setattr(manifest, "BLOCK_BYTES", 64)
    whole = torch.arange(200, dtype=torch.float32)
    store, _ = save(tmp_path, 1, tensors={"w": whole})
    found = load_latest(store)
    for start, stop in ((0, 200), (3, 4), (15, 17), (16, 32), (150, 200)):
        out_N = torch.zeros(stop - start)
        found.tensors.read("w", BoxRun(start=start, stop=stop), out_N)
        assert out_N.equal(whole[start:stop])
    path = tmp_path / "step-00000001" / SHARD
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # in the last block only
    path.write_bytes(data)
    found.tensors.read("w", BoxRun(start=0, stop=190), torch.zeros(190))
    with pytest.raises(
        SnapshotError, match=rf"{SHARD}, w: bytes \d+ to \d+ do not match their checksum"
    ):
        found.tensors.read("w", BoxRun(start=199, stop=200), torch.zeros(1))


SHAPES = {"a": (5, 3), "b": (7,), "c": (4, 4)}
STARTS = {"a": 0, "b": 16, "c": 32}
LAYOUTS = [
    whole_layout(SHAPES, STARTS, 48),
    row_layout(SHAPES, num_ranks=3, replicated=frozenset({"b"})),
    slice_layout(SHAPES, STARTS, 64, num_ranks=2, replicated=frozenset()),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_copies", [1, 2, 5])
def test_ranks_and_copies_save_each_number_once(layout, num_copies):
    runs = {name: [] for name in SHAPES}
    for rank in range(len(layout.ranks)):
        sizes = []
        for copy in range(num_copies):
            mine = own_runs(layout, rank, copy=copy, num_copies=num_copies)
            sizes.append(sum(stop - start for start, stop in mine.values()))
            for name, run in mine.items():
                runs[name].append(BoxRun(start=run[0], stop=run[1]))
        assert max(sizes) - min(sizes) <= 1, "copies share the work"
    assert [find_gap(SHAPES[name], found) for name, found in runs.items()] == [None, None, None]


def test_only_the_newest_are_kept(tmp_path):
    for step in (1, 2, 30):
        store, _ = save(tmp_path, step)
    assert store.steps() == (2, 30)
    assert load_latest(store).step == 30


@pytest.mark.parametrize("resumed_step", [None, 0])
def test_what_an_attempt_left_ahead_takes_no_place(tmp_path, resumed_step):
    """A run that goes on behind damaged snapshots keeps what it makes, until it has come past them
    and after."""
    for step in (8, 9, 11):
        damage_missing(save(tmp_path, step)[0].paths()[-1])
    saver, store, events = saver_on(None, tmp_path, keep=2, resumed_step=resumed_step)
    for step, left in ((1, (1, 9, 11)), (2, (1, 2, 9, 11)), (3, (2, 3, 9, 11)), (9, (3, 9, 11))):
        saver.save(step, parts=lambda _: parts_of(TENSORS), state=STATE, blobs=BLOBS)
        assert store.steps() == left and load_latest(store).step == step
    saver.save(12, parts=lambda _: parts_of(TENSORS), state=STATE, blobs=BLOBS)
    assert load_latest(store).step == 12
    told = [
        (kind, fields["path"])
        for kind, fields in events
        if kind in ("snapshot.replaced", "snapshot.leftover_removed")
    ]
    assert told == [("snapshot.replaced", "step-00000009")] + [
        ("snapshot.leftover_removed", "step-00000011")
    ] * (resumed_step == 0)
    assert store.steps() == ((9, 12) if resumed_step == 0 else (11, 12)), (
        "one that is known to be damaged has no place"
    )


def test_no_snapshot_yet(tmp_path):
    assert load_latest(saver_on(None, tmp_path / "none")[1]) is None


def damage_cut(path: Path) -> None:
    os.truncate(path / SHARD, 100)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def damage_flip(path: Path) -> None:
    flip(path / SHARD, -1)


def damage_header(path: Path) -> None:
    flip(path / SHARD, 12)


def damage_shard(path: Path) -> None:
    (path / SHARD).unlink()


def damage_missing(path: Path) -> None:
    (path / "state.json").unlink()


def damage_blob(path: Path) -> None:
    (path / "blobs" / "rollouts.msgpack").write_bytes(b"x" * 256)


def damage_manifest(path: Path) -> None:
    (path / "manifest.json").write_text('{"crc32": 1, "bo')


def damage_number(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"step": 2', '"step": 3'))


def old_format(path: Path) -> None:
    (path / "manifest.json").write_text(json.dumps({"format": 1, "step": 2, "files": {}}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_cut, f"{SHARD}: has 100 bytes"),
        (damage_flip, f"{SHARD}, flag: bytes"),
        (damage_header, f"{SHARD}: bytes 0 to"),
        (damage_shard, f"{SHARD}: is not there"),
        (damage_missing, "state.json: is not there"),
        (damage_blob, "blobs/rollouts.msgpack: bytes 0 to 256 do not match their checksum"),
        (damage_manifest, "manifest.json: cannot be read"),
        (damage_number, "manifest.json: does not match its checksum"),
        (old_format, "is of format 1, written whole by one process before snapshots were sharded"),
    ],
)
def test_a_torn_snapshot_is_passed_over_with_its_reason(damage, reason, tmp_path):
    save(tmp_path, 1)
    store, events = save(tmp_path, 2)
    damage(tmp_path / "step-00000002")
    assert load_latest(store).step == 1
    name, fields = events[-1]
    assert (
        name == "snapshot.skipped"
        and fields["path"] == "step-00000002"
        and reason in fields["reason"]
    )
    assert fields["file"] in reason or fields["file"] == "manifest.json"
    store, events = save(tmp_path, 2)  # the resumed run comes to step 2 again
    assert load_latest(store).step == 2
    assert "snapshot.replaced" in [name for name, _ in events]


SAVER = """
import os, sys, torch
from pathlib import Path
from gyre.core.errors import SnapshotError
from gyre.distributed.process_group import alone
from gyre.trainer.checkpoint.shards import Part
from gyre.trainer.checkpoint.saver import Saver
from gyre.trainer.checkpoint.store import SnapshotStore
emit = lambda *_, **__: None
store = SnapshotStore(Path(sys.argv[1]), keep=2, emit=emit)
saver = Saver(store, alone(), background=False, deadline_s=60.0, emit=emit)
part = Part(name="a", shape=(400_000,), start=0, values_N=torch.ones(400_000))
save = lambda: saver.save(2, parts=lambda _: {"tensors": {part.key: part}, "state": {}}, state={}, blobs={"b": b"1"})
"""
KILLED = """
calls = 0
def watch(event, args):
    global calls
    if event in ("open", "os.rename", "os.mkdir") and sys.argv[1] in str(args[0]):
        calls += 1
        if calls == int(sys.argv[2]):
            os.kill(os.getpid(), 9)
sys.addaudithook(watch)
save()
"""


@pytest.mark.parametrize(
    "moment",
    [1, *(pytest.param(number, marks=pytest.mark.slow) for number in (4, 8, 11))],
)
def test_a_kill_while_writing_leaves_the_one_before(moment, tmp_path):
    store, _ = save(tmp_path, 1)
    done = subprocess.run(
        [sys.executable, "-c", SAVER + KILLED, str(tmp_path), str(moment)], check=False
    )
    assert done.returncode == -9
    assert load_latest(store).step in (1, 2)
    save(tmp_path, 3)
    assert load_latest(store).step == 3
    assert not list(tmp_path.glob("writing-*"))


FULL = """
try:
    save()
except SnapshotError as error:
    print(error.message, "|", error.hint)
"""


def test_a_full_disk_is_an_error_with_a_hint(tmp_path):
    """A real file system of one megabyte, where this machine lets a user mount one."""
    mount = f'mount -t tmpfs -o size=1m none {tmp_path} && exec {sys.executable} -c "$0" {tmp_path}'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount, SAVER + FULL],
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0 and ("unshare" in done.stderr or "mount" in done.stderr):
        pytest.skip(f"no user mounts here: {done.stderr.strip()[:80]}")
    assert "No space left on device" in done.stdout and "free space" in done.stdout, done.stderr


def test_an_unwritable_folder_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SnapshotError, match="could not be written"):
        save(tmp_path / "file" / "snapshots", 1)


def test_bytes_that_do_not_come_back_are_an_error(tmp_path, monkeypatch):
    """A disk that lies: what is read is not what was written."""
    store, _ = save(tmp_path, 1)
    from gyre.trainer.checkpoint import shard_file

    honest = shard_file.os.fsync

    def lying(handle: int) -> None:
        honest(handle)
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.name == SHARD:
            flip(path, -1)

    monkeypatch.setattr(shard_file.os, "fsync", lying)
    with pytest.raises(SnapshotError, match=rf"{SHARD} read back is not what was written"):
        save(tmp_path, 2)
    assert store.steps() == (1,) and [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


# By several ranks
# ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_snapshot_goes_from_ranks_to_ranks_to_the_bit(ranks, tmp_path):
    """Through files: 1 process, ZeRO-3 on 4, hybrid, each ZeRO stage, 1 again; nobody writes what
    another one has."""
    settings = {"dtype": "bfloat16", "reference_moving_average": 0.9, "spec": "odd"}
    expected = save_trained(None, str(tmp_path / "0"), "ppo", steps=range(2), **settings)
    whole = written_by(tmp_path / "0" / "step-00000002")[SHARD]
    layouts = ["zero3", "hybrid3", "mixed", "zero0", "zero1", "zero2", "hybrid1"]
    for number, layout in enumerate(layouts):
        source, target = str(tmp_path / str(number)), str(tmp_path / str(number + 1))
        saved = ranks.run(load_and_save, source, target, "ppo", layout=layout, **settings)
        assert_same(saved[0], expected)
        sizes = written_by(tmp_path / str(number + 1) / "step-00000002")
        assert len(sizes) == 4 and sum(sizes.values()) == whole
        assert max(sizes.values()) < 0.4 * whole, (layout, sizes)
    last = str(tmp_path / str(len(layouts)))
    assert_same(load_and_save(None, last, str(tmp_path / "end"), "ppo", **settings), expected)


@pytest.mark.slow
def test_each_rank_reads_only_what_it_needs(ranks, tmp_path, monkeypatch):
    save_trained(None, str(tmp_path), "sft", steps=range(1))
    path = tmp_path / "step-00000001"
    whole = bytes_read_to_restore(None, str(path), "sft")
    ranks.run(load_and_save, str(tmp_path), str(tmp_path / "again"), "sft", layout="zero3")
    counts = ranks.run(
        bytes_read_to_restore, str(tmp_path / "again" / "step-00000001"), "sft", layout="zero3"
    )
    assert all(count < 0.4 * whole for count in counts), (counts, whole)


def test_ranks_look_through_a_snapshot_together(ranks, tmp_path):
    ranks.run(save_trained, str(tmp_path), "sft", steps=range(1), layout="zero1")
    path = tmp_path / "step-00000001"
    assert ranks.run(shares_of_faults, str(path)) == [[], [], [], []]
    flip(path / "rank-00002.safetensors", -1)
    (found,) = [fault for faults in ranks.run(shares_of_faults, str(path)) for fault in faults]
    assert found.startswith("rank-00002.safetensors, actor.exp_avg_sq.")
    with pytest.raises(SnapshotError, match="do not match their checksum"):
        read_moments(path)
    (path / "rank-00001.safetensors").unlink()
    assert str(find_faults(path)[0]) == "rank-00001.safetensors: is not there"
    (path / "rank-00003.safetensors").unlink()
    told = join_faults(find_faults(path, share=share, num_shares=4) for share in range(4))
    assert [str(fault) for fault in told] == [
        f"rank-0000{rank}.safetensors: is not there" for rank in (1, 3)
    ]


def read_moments(path: Path) -> None:
    found = load(path)
    for name, kind in found.tensors.kinds().items():
        if name.startswith("actor.exp_avg_sq."):
            read = torch.empty(kind.shape, dtype=kind.dtype).view(-1)
            found.tensors.read(name, BoxRun(start=0, stop=len(read)), read)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("full", "could not be written to"),
        ("copy", "could not be copied to the host"),
    ],
)
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_fails_fails_the_save_on_all(ranks, tmp_path, how, says, background, victim):
    """And names itself, and leaves the snapshot before it, and the next save succeeds."""
    for answer in ranks.run(fail_on, str(tmp_path), how, victim=victim, background=background):
        assert (
            answer["told"].startswith("SnapshotError: snapshot of step 2 ")
            and says in answer["told"]
        )
        assert f"by rank {victim}: " in answer["told"]
        assert (
            "File too large" in answer["told"] and "free space" in answer["hint"]
        ) or how == "copy"
        assert answer["steps"] == (1,) and answer["after"] == (1, 3)
        assert answer["left"] == ["step-00000001"] and answer["seconds"] < 60


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("copy", ", 4.8 s after another rank's part"),
        ("memory", "the memory that snapshots are staged in is not there after 9 s"),
    ],
)
def test_a_rank_that_waits_too_long_for_its_copy_says_so_itself(tmp_path, what, says):
    """Before the others, who wait for it, lose patience and can only guess."""
    pool = RankPool(2, timeout_s=6.0)
    try:
        told = pool.run(wait_for_a_slow_copy, str(tmp_path), victim=1, what=what)
    finally:
        pool.close()
    assert says in told[0] and says in told[1], told
    if what == "copy":
        assert told[1].startswith(
            "DeadlineError: the snapshot of step 1 is not copied to the host by rank 1 after "
        )
        assert "rank 1 failed: DeadlineError" in told[0]
    else:
        late = "SnapshotError: snapshot of step 1 could not be copied to the host by rank 1: "
        assert told[0].startswith(late) and told[1].startswith(late)


@pytest.mark.slow
def test_ranks_whose_copies_are_all_slow_wait_longer_than_a_collective(tmp_path):
    pool = RankPool(2, timeout_s=6.0)
    try:
        assert pool.run(wait_for_a_slow_copy, str(tmp_path), victim=-1, what="copy") == ["", ""]
    finally:
        pool.close()


@pytest.mark.slow
def test_a_disk_that_is_stuck_on_one_rank_ends_the_wait_on_all(tmp_path):
    """With the verdict, also where that rank began to wait for it late."""
    pool = RankPool(2, timeout_s=6.0)
    try:
        told = pool.run(
            save_behind_a_stuck_disk, str(tmp_path), victim=1, pause_s=8.0, deadline_s=9.0
        )
    finally:
        pool.close()
    late = (
        "SnapshotError: the snapshot of step 1 is not written after 9 s: not all ranks have "
        "written their part"
    )
    assert told == [late, late]


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_a_rank_killed_in_a_save_is_named_and_the_one_before_is_whole(tmp_path, background):
    pool = RankPool(2)
    try:
        pool.send(die_in_a_save, str(tmp_path), victim=1, background=background)
        assert pool.answer(1) == (True, ("Dead", "the process is gone"))
        failed, told = pool.answer(0)
        assert not failed and told.startswith("RankError") and "rank 1" in told, told
    finally:
        pool.close()
    store = saver_on(None, tmp_path)[1]
    assert load_latest(store).step == 1 and store.steps() == (1,)
    assert len(list(tmp_path.glob("writing-*"))) == 1
    store.remove_leftovers()
    assert not list(tmp_path.glob("writing-*"))
