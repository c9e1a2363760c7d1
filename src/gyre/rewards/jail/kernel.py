"""Kernel: the system calls that Python 3.11 has no name for. In: plain values. Out: OSError or done.

Namespaces, mounts, capabilities and the seccomp filter, through libc. Knows nothing of programs or limits.
Callers: jail.view, jail.zygote, jail.program.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
_ANY_NAMESPACE = 0x7E020000  # every CLONE_NEW* flag that clone takes

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x1, 0x2, 0x4, 0x8
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 0x1, 0x2, 0x4

_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 4, 22, 36, 38
_PR_SET_PDEATHSIG = 1
_SYS_MOUNT_SETATTR = 442  # one number on every architecture
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000

_libc = ctypes.CDLL(None, use_errno=True)

# Refused to programs. Either they would open a door (mounts, namespaces, tracing, kernel code), or they would hold
# memory that no limit counts (memfd, SysV segments), or they would outlive the process (keyrings).
# name: (x86_64, aarch64); numbers from 424 on are the same everywhere.
_DENIED = {
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "fanotify_init": (300, 262),
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "swapon": (167, 224),
    "reboot": (169, 142),
    "syslog": (103, 116),
}
_ARCHITECTURES = {"x86_64": (0, 0xC000003E, 56), "aarch64": (1, 0xC00000B7, 220)}  # column, audit number, clone
_SYS_CLONE3 = 435


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


def mount(source: str | None, target: str, kind: str | None, flags: int = 0, data: str | None = None) -> None:
    arguments = _bytes(source), _bytes(target), _bytes(kind), ctypes.c_ulong(flags), _bytes(data)
    _check(_libc.mount(*arguments), f"mount {kind or 'bind'} on {target}")


def restrict_mount(target: str, attributes: int, *, recursive: bool) -> None:
    """Add attributes (read-only, …) to a mount, and to those below it. Linux 5.12 and later."""
    request = struct.pack("QQQQ", attributes, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    number, size = ctypes.c_long(_SYS_MOUNT_SETATTR), ctypes.c_size_t(len(request))
    _check(_libc.syscall(number, _AT_FDCWD, _bytes(target), flags, request, size), f"mount_setattr {target}")


def pivot_into(new_root: str) -> None:
    """Make `new_root` the root and let go of the old one."""
    os.chdir(new_root)
    _check(_libc.pivot_root(b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", MNT_DETACH), "umount2")
    os.chdir("/")


def _prctl(option: int, value: int, what: str, pointer: bytes | None = None) -> None:
    zero = ctypes.c_ulong(0)
    _check(_libc.prctl(option, ctypes.c_ulong(value), zero if pointer is None else pointer, zero, zero), what)


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


def map_one_user(inside: int, outside: int, group_outside: int) -> None:
    """Map one user and one group into the user namespace just made."""
    for path, text in (
        ("/proc/self/setgroups", "deny"),
        ("/proc/self/uid_map", f"{inside} {outside} 1"),
        ("/proc/self/gid_map", f"{inside} {group_outside} 1"),
    ):
        fd = os.open(path, os.O_WRONLY)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)


class CallFilter:
    """The seccomp filter, ready to be installed by a fork: denied calls answer EPERM; clone3 answers ENOSYS, so that
    libc uses clone, whose arguments a filter can read."""

    def __init__(self) -> None:
        code = b"".join(struct.pack("HBBI", *line) for line in _filter_lines())
        self._code = ctypes.create_string_buffer(code, len(code))
        self._header = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(self._code))

    def open_at(self, fd: int) -> None:
        """Make the filter readable at this file number, for bwrap --seccomp."""
        made = os.memfd_create("filter")
        os.write(made, self._code.raw)
        os.lseek(made, 0, os.SEEK_SET)
        os.dup2(made, fd)
        os.set_inheritable(fd, True)  # made may itself be fd, which dup2 then leaves as it is

    def install(self) -> None:
        """Apply it to this process and all that it starts. Needs no_new_privs."""
        _prctl(_PR_SET_SECCOMP, 2, "seccomp", self._header)


def _filter_lines() -> list[tuple[int, int, int, int]]:
    """BPF as (code, jump if true, jump if false, constant)."""
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no system call filter for {machine}")
    column, audit, clone = _ARCHITECTURES[machine]
    load, equal, at_least, masked, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, missing = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS

    lines = [(load, 0, 0, 4), (equal, 1, 0, audit), (answer, 0, 0, refuse), (load, 0, 0, 0)]
    lines += [(at_least, 0, 1, 0x40000000), (answer, 0, 0, refuse)]  # the x32 numbers of x86_64
    lines += [(equal, 0, 1, _SYS_CLONE3), (answer, 0, 0, missing)]
    for numbers in _DENIED.values():
        lines += [(equal, 0, 1, numbers[column]), (answer, 0, 0, refuse)]
    # clone is allowed unless it asks for a namespace; offset 16 is the low half of its first argument
    lines += [(equal, 0, 3, clone), (load, 0, 0, 16), (masked, 0, 1, _ANY_NAMESPACE), (answer, 0, 0, refuse)]
    return [*lines, (answer, 0, 0, allow)]
