"""Files: whole or as they were, whatever fails in the middle, and locks between processes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gyre.core import files
from gyre.core.files import partial_path, replacing, replacing_folder, try_lock, write_text

FULL = OSError(errno.ENOSPC, "no space left on device")


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_whole(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "plan.json"
    for text in ("one", "two, and longer", ""):
        write_text(path, text, durable=durable)
        assert path.read_text() == text
        assert os.listdir(tmp_path) == ["plan.json"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_call_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "plan.json"
    write_text(path, "old", durable=True)

    def fail(*args: object) -> None:
        raise FULL

    monkeypatch.setattr(files.os, failing, fail)
    with pytest.raises(OSError, match="no space"):
        write_text(path, "new", durable=True)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["plan.json"]


def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(b"old")
    with pytest.raises(OSError, match="no space"), replacing(path, durable=False) as aside:
        aside.write_bytes(b"half of the n")
        raise FULL
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["data.bin"]


def test_what_is_durable_is_synced_before_it_has_its_name_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, calls = tmp_path / "plan.json", []
    fsync, replace = os.fsync, os.replace

    def note_sync(handle: int) -> None:
        calls.append(("sync", Path(os.readlink(f"/proc/self/fd/{handle}")).name))
        fsync(handle)

    def note_replace(source: Path, target: Path) -> None:
        calls.append(("replace", target.name))
        replace(source, target)

    monkeypatch.setattr(files.os, "fsync", note_sync)
    monkeypatch.setattr(files.os, "replace", note_replace)
    write_text(path, "text", durable=False)
    assert calls == [("replace", "plan.json")]
    calls.clear()
    write_text(path, "text", durable=True)
    assert calls == [
        ("sync", "plan.json.partial"),
        ("replace", "plan.json"),
        ("sync", tmp_path.name),
    ]


def test_a_killed_writer_leaves_the_old_file_and_the_next_one_writes_over_its_rest(
    tmp_path: Path,
) -> None:
    path = tmp_path / "plan.json"
    write_text(path, "old", durable=False)
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom gyre.core.files import replacing\n"
        "with replacing(Path(sys.argv[1]), durable=True) as aside:\n"
        "    aside.write_text('half')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(path)], timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert path.read_text() == "old" and partial_path(path).read_text() == "half"
    write_text(path, "new", durable=False)
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["plan.json"]


def test_a_folder_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "export"
    for name in ("one", "two"):
        with replacing_folder(path, durable=True) as aside:
            (aside / name).write_text(name)
        assert os.listdir(path) == [name] and os.listdir(tmp_path) == ["export"]


@pytest.mark.parametrize("failing", ["write", "fsync", "rename", "second rename"])
def test_a_folder_that_fails_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "export"
    with replacing_folder(path, durable=True) as aside:
        (aside / "old").write_text("old")

    def fail(*args: object) -> None:
        raise FULL

    if failing == "fsync":
        monkeypatch.setattr(files.os, "fsync", fail)
    if failing == "rename":
        monkeypatch.setattr(Path, "rename", fail)
    if failing == "second rename":
        rename, renamed = Path.rename, []

        def fail_second(source: Path, target: Path) -> Path:
            renamed.append(target)
            if len(renamed) == 2:
                raise FULL
            return rename(source, target)

        monkeypatch.setattr(Path, "rename", fail_second)
    with pytest.raises(OSError, match="no space"), replacing_folder(path, durable=True) as aside:
        (aside / "new").write_text("new")
        if failing == "write":
            raise FULL
    assert os.listdir(path) == ["old"] and os.listdir(tmp_path) == ["export"]


def test_a_lock_is_one_processes_until_its_handle_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    handle = os.open(path, os.O_RDWR | os.O_CREAT)
    assert try_lock(handle)
    code = (
        "import os, sys\nfrom gyre.core.files import try_lock\n"
        "print(try_lock(os.open(sys.argv[1], os.O_RDWR)))\n"
    )

    def ask() -> str:
        ran = subprocess.run(
            [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60
        )
        return ran.stdout.strip()

    assert ask() == "False"
    os.close(handle)
    assert ask() == "True"
