"""Snapshot store: what is read back, and what any damage, crash or full disk does to it."""

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
from gyre.trainer.snapshot import SnapshotStore

TENSORS = {
    "float": torch.arange(12, dtype=torch.float32).reshape(3, 4).t(),  # not contiguous
    "half": torch.tensor([1.5, float("nan"), -0.0], dtype=torch.bfloat16),
    "ints": torch.tensor([2**60], dtype=torch.int64),
    "flag": torch.tensor(True),
    "empty": torch.empty(0, 7),
}
STATE = {"step": 3, "cursor": {"epoch": 1, "order": [3, 1, 2]}, "text": "naïve"}
BLOBS = {"rollouts.msgpack": bytes(range(256)), "empty": b""}


def store_of(folder: Path, keep: int = 2) -> tuple[SnapshotStore, list]:
    events: list = []
    return SnapshotStore(folder, keep=keep, emit=lambda name, **fields: events.append((name, fields))), events


def save(store: SnapshotStore, step: int) -> Path:
    return store.save(step, tensors=TENSORS, state={**STATE, "step": step}, blobs=BLOBS)


def test_everything_comes_back_to_the_bit(tmp_path):
    store, events = store_of(tmp_path)
    save(store, 7)
    found = store.load_latest()
    assert found.step == 7 and found.state == {**STATE, "step": 7} and found.blobs == BLOBS
    assert found.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        got = found.tensors[name]
        assert got.dtype == tensor.dtype and got.shape == tensor.shape
        assert got.contiguous().view(-1).view(torch.uint8).equal(tensor.contiguous().view(-1).view(torch.uint8)), name
    assert [name for name, _ in events] == ["snapshot.saved"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.uint8]),
)
def test_the_tensor_file_is_what_the_safetensors_package_writes_and_reads(shapes, dtype, tmp_path):
    tensors = {f"t{i}": (torch.randn(shape) * 9).to(dtype) for i, shape in enumerate(shapes)}
    store, _ = store_of(tmp_path)
    path = store.save(0, tensors=tensors, state={}, blobs={})
    read = safetensors.torch.load((path / "tensors.safetensors").read_bytes())
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) and read[name].dtype == dtype for name, tensor in tensors.items())


def test_only_the_newest_are_kept(tmp_path):
    store, _ = store_of(tmp_path, keep=2)
    for step in (1, 2, 30):
        save(store, step)
    assert store.steps() == (2, 30)
    assert store.load_latest().step == 30


def test_no_snapshot_yet(tmp_path):
    assert store_of(tmp_path / "none")[0].load_latest() is None


def damage_cut(path: Path) -> None:
    os.truncate(path / "tensors.safetensors", 100)


def damage_flip(path: Path) -> None:
    data = bytearray((path / "tensors.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "tensors.safetensors").write_bytes(data)


def damage_missing(path: Path) -> None:
    (path / "state.json").unlink()


def damage_blob(path: Path) -> None:
    (path / "blobs" / "rollouts.msgpack").write_bytes(b"x" * 256)


def damage_manifest(path: Path) -> None:
    (path / "manifest.json").write_text('{"format": 1, "fil')


def damage_format(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_cut, "tensors.safetensors has 100 bytes"),
        (damage_flip, "tensors.safetensors does not match its checksum"),
        (damage_missing, "state.json cannot be read"),
        (damage_blob, "blobs/rollouts.msgpack does not match its checksum"),
        (damage_manifest, "manifest.json cannot be read"),
        (damage_format, "format 99"),
    ],
)
def test_a_torn_snapshot_is_passed_over_with_its_reason(damage, reason, tmp_path):
    store, events = store_of(tmp_path)
    save(store, 1)
    damage(save(store, 2))
    assert store.load_latest().step == 1
    name, fields = events[-1]
    assert name == "snapshot.skipped" and fields["path"] == "step-00000002" and reason in fields["reason"]
    save(store, 2)  # the resumed run comes to step 2 again
    assert store.load_latest().step == 2
    assert "snapshot.replaced" in [name for name, _ in events]


KILLED = """
import os, sys, torch
from gyre.trainer import snapshot
from pathlib import Path
store = snapshot.SnapshotStore(Path(sys.argv[1]), keep=2, emit=lambda *a, **k: None)
calls = 0
def watch(event, args):
    global calls
    if event in ("open", "os.rename", "os.mkdir") and sys.argv[1] in str(args[0]):
        calls += 1
        if calls == int(sys.argv[2]):
            os.kill(os.getpid(), 9)
sys.addaudithook(watch)
store.save(2, tensors={"a": torch.ones(1000)}, state={}, blobs={"b": b"1"})
"""


@pytest.mark.parametrize("moment", [1, 2, 4, 6, 8])
def test_a_kill_while_writing_leaves_the_one_before(moment, tmp_path):
    store, _ = store_of(tmp_path)
    save(store, 1)
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(moment)], check=False)
    assert done.returncode == -9
    assert store.load_latest().step in (1, 2)
    save(store, 3)
    assert store.load_latest().step == 3
    assert not list(tmp_path.glob("writing-*"))


FULL = """
import resource, signal, sys, torch
from gyre.core.errors import SnapshotError
from gyre.trainer.snapshot import SnapshotStore
from pathlib import Path
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
store = SnapshotStore(Path(sys.argv[1]), keep=2, emit=lambda *a, **k: None)
try:
    store.save(2, tensors={"a": torch.ones(100_000)}, state={}, blobs={})
except SnapshotError as error:
    print(error.message, "|", error.hint)
"""


def test_a_file_that_cannot_grow_is_an_error_with_a_hint(tmp_path):
    """The kernel refuses to write on, as when the disk is full."""
    store, _ = store_of(tmp_path)
    save(store, 1)
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], check=True, capture_output=True, text=True)
    assert "snapshot of step 2 could not be written" in done.stdout and "free space" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert store.load_latest().step == 1


def test_a_full_disk_is_an_error_with_a_hint(tmp_path):
    """A real file system of one megabyte, where this machine lets a user mount one."""
    body = FULL.replace("resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))", "").replace("100_000", "400_000")
    mount = f'mount -t tmpfs -o size=1m none {tmp_path} && exec {sys.executable} -c "$0" {tmp_path}'
    done = subprocess.run(["unshare", "-rm", "sh", "-c", mount, body], check=False, capture_output=True, text=True)
    if done.returncode != 0 and ("unshare" in done.stderr or "mount" in done.stderr):
        pytest.skip(f"no user mounts here: {done.stderr.strip()[:80]}")
    assert "No space left on device" in done.stdout and "free space" in done.stdout, done.stderr


def test_an_unwritable_folder_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SnapshotError, match="could not be written"):
        save(store_of(tmp_path / "file" / "snapshots")[0], 1)


def test_bytes_that_do_not_come_back_are_an_error(tmp_path, monkeypatch):
    """A disk that lies: what is read is not what was written."""
    store, _ = store_of(tmp_path)
    save(store, 1)
    from gyre.trainer import snapshot

    honest = snapshot.write_bytes

    def lying(path: Path, data: bytes):
        summed = honest(path, data)
        if path.name == "state.json":
            path.write_bytes(data[::-1])
        return summed

    monkeypatch.setattr(snapshot, "write_bytes", lying)
    with pytest.raises(SnapshotError, match=r"not what was written: state\.json"):
        save(store, 2)
    assert store.steps() == (1,)
