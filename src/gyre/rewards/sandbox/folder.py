"""Folder: a weak run's work folder on disk. In: its path. Out: what is in it; gone at the end.

A program may nest folders past the longest path that the kernel takes, and lock them. So nothing
here follows a long path: folders are opened by their names in their parents, and moved up before
they are removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def make() -> str:
    """Return a new folder, of one run alone."""
    folder = f"/tmp/gyre-program-{os.urandom(8).hex()}"
    os.mkdir(folder, 0o700)
    return folder


def used(folder: str, pids: list[int], most_entries: int) -> tuple[int, int]:
    """Bytes of files on disk and number of entries, with removed files that a process holds open.

    Stops counting past `most_entries`. What the program has locked or moves meanwhile is seen at
    the end, by `remove`.
    """
    size_bytes = entries = 0
    device = os.stat(folder).st_dev
    fd = _open(folder)
    # names not yet looked at, for each folder from the top to this one
    waiting: list[list[str]] = [os.listdir(fd)]
    try:
        while waiting and entries <= most_entries:
            if not waiting[-1]:
                waiting.pop()
                fd = _step(fd, "..") if waiting else fd
                continue
            name = waiting[-1].pop()
            with contextlib.suppress(OSError):  # gone, or locked
                entries += 1
                found = os.lstat(name, dir_fd=fd)
                if not stat.S_ISDIR(found.st_mode):
                    size_bytes += 512 * found.st_blocks // found.st_nlink
                    continue
                fd = _step(fd, name)
                waiting.append([])
                waiting[-1] = os.listdir(fd)
    except OSError:
        pass  # the way up is gone: the program moves its folders
    finally:
        os.close(fd)
    removed = {found.st_ino: found for found in _removed(pids) if found.st_dev == device}
    return size_bytes + sum(found.st_blocks * 512 for found in removed.values()), entries + len(
        removed
    )


def _step(fd: int, name: str) -> int:
    """Exchange an open folder for one beside it."""
    there = os.open(name, _FOLDER, dir_fd=fd)
    os.close(fd)
    return there


def remove(folder: str) -> int:
    """Remove the folder with what the program left in it, however deep and locked. OSError when
    that fails.

    Returns the bytes that its files held on disk.
    """
    top = _open(folder)
    number = size_bytes = 0
    try:
        while names := os.listdir(top):
            for name in names:
                found = os.lstat(name, dir_fd=top)
                if not stat.S_ISDIR(found.st_mode):
                    size_bytes += 512 * found.st_blocks // found.st_nlink
                    os.unlink(name, dir_fd=top)
                    continue
                if not _remove_empty(name, top):
                    inner = _open(name, within=top)
                    try:
                        number = _move_up(inner, top, number)
                    finally:
                        os.close(inner)
                    os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(folder)
    return size_bytes


def _remove_empty(name: str, within: int) -> bool:
    """Remove a folder if nothing is in it, and return whether it was so."""
    try:
        os.rmdir(name, dir_fd=within)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # POSIX allows either
            return False
        raise
    return True


def _move_up(inner: int, top: int, number: int) -> int:
    """Move what a folder holds to `top`, under names that nothing there has."""
    for name in os.listdir(inner):
        if stat.S_ISDIR(os.lstat(name, dir_fd=inner).st_mode):
            os.chmod(name, 0o700, dir_fd=inner)  # a locked folder cannot be moved
        while True:
            number += 1
            if not _exists(f"moved-{number}", top):  # the program may have chosen that name, too
                break
        os.rename(name, f"moved-{number}", src_dir_fd=inner, dst_dir_fd=top)
    return number


def _exists(name: str, within: int) -> bool:
    try:
        os.lstat(name, dir_fd=within)
    except FileNotFoundError:
        return False
    return True


def _open(name: str, within: int | None = None) -> int:
    """Open a folder, after unlocking it. Not through a link."""
    os.chmod(name, 0o700, dir_fd=within)
    return os.open(name, _FOLDER, dir_fd=within)


def _removed(pids: list[int]) -> list[os.stat_result]:
    """Files without a name that processes hold open."""
    found = []
    for pid in pids:
        # it ended meanwhile
        with contextlib.suppress(FileNotFoundError, PermissionError, ProcessLookupError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(f"/proc/{pid}/fd/{name}")
                    if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                        found.append(status)
    return found
