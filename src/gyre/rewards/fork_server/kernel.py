"""Kernel: the system calls that Python 3.11 has no name for. In: plain values. Out: OSError or
done.

Namespaces, mounts, capabilities and seccomp, through libc. Knows nothing of programs or limits.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x1, 0x2, 0x4, 0x8
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 0x1, 0x2, 0x4

_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 4, 36, 38
_PR_SET_PDEATHSIG = 1
_SYS_MOUNT_SETATTR = 442  # one number on every architecture
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000

_libc = ctypes.CDLL(None, use_errno=True)

_SYS_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SECCOMP_SET_MODE_FILTER, _SECCOMP_NEW_LISTENER = 1, 8


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else os.fsencode(text)


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, flags: int) -> None:
    _check(_libc.setns(fd, flags), "setns")


def mount(
    source: str | None, target: str, kind: str | None, flags: int = 0, data: str | None = None
) -> None:
    arguments = _bytes(source), _bytes(target), _bytes(kind), ctypes.c_ulong(flags), _bytes(data)
    _check(_libc.mount(*arguments), f"mount {kind or 'bind'} on {target}")


def restrict_mount(target: str, attributes: int, *, recursive: bool) -> None:
    """Add attributes (read-only, …) to a mount, and to those below it. Linux 5.12 and later."""
    request = struct.pack("QQQQ", attributes, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    number, size = ctypes.c_long(_SYS_MOUNT_SETATTR), ctypes.c_size_t(len(request))
    _check(
        _libc.syscall(number, _AT_FDCWD, _bytes(target), flags, request, size),
        f"mount_setattr {target}",
    )


def pivot_into(new_root: str) -> None:
    """Make `new_root` the root and unmount the old one."""
    os.chdir(new_root)
    _check(_libc.pivot_root(b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", MNT_DETACH), "umount2")
    os.chdir("/")


def _prctl(option: int, value: int, what: str) -> None:
    zero = ctypes.c_ulong(0)
    _check(_libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero), what)


def forbid_new_privileges() -> None:
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, "no_new_privs")


def become_subreaper() -> None:
    """Orphans below this process become its children, so that it can end them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, "subreaper")


def die_with_parent(signal_number: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal_number, "pdeathsig")


def stay_readable() -> None:
    """Own /proc/self files again after a change of user, which hides them."""
    _prctl(_PR_SET_DUMPABLE, 1, "dumpable")


def drop_capabilities() -> None:
    header = struct.pack("Ii", 0x20080522, 0)
    _check(_libc.capset(header, bytes(24)), "capset")


def map_one_user(
    inside: int, outside: int, group_outside: int, own_folder: int | None = None
) -> None:
    """Map one user and one group into the user namespace just made. `own_folder`: an open
    /proc/self."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside} {outside} 1"),
        ("gid_map", f"{inside} {group_outside} 1"),
    ):
        fd = os.open(
            f"/proc/self/{name}" if own_folder is None else name, os.O_WRONLY, dir_fd=own_folder
        )
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)


def install_filter(head: bytes, *, listen: bool) -> int:
    """Apply a seccomp filter to this process and all that it starts. Returns the listener, or -1
    without `listen`."""
    number = ctypes.c_long(_SYS_SECCOMP[platform.machine()])
    flags = ctypes.c_ulong(_SECCOMP_NEW_LISTENER if listen else 0)
    result = _libc.syscall(number, ctypes.c_ulong(_SECCOMP_SET_MODE_FILTER), flags, head)
    _check(result, "seccomp")
    return result if listen else -1
