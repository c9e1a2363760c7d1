"""Calls: which system calls a program may make, as a seccomp filter. In: nothing. Out: BPF lines;
names for events.

An allow-list: what CPython, its standard library, its child processes and numpy need. Everything
else answers ENOSYS, as a kernel without the call would; `_ARGUMENTS` are allowed for some arguments
only. Three kinds are left out on purpose. Mounts, namespaces, tracing and kernel code give access.
System V and POSIX queues, memfd, vmsplice, inotify, io_uring and Landlock rules hold memory that no
limit counts. Keyrings outlive a process. Pure.
"""

from __future__ import annotations

import errno

# METER: allowed, and its kernel memory is counted (sandbox.meter)
ALLOW, REFUSE, METER = "allow", "refuse", "meter"
Line = tuple[int, int, int, int]  # BPF: code, jump if true, jump if false, constant

# name: (x86_64, aarch64); -1: that architecture has no such call.
# fmt: off
ALLOWED = {
    # files
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "pwrite64": (18, 68), "preadv": (295, 69), "pwritev": (296, 70), "preadv2": (327, 286),
    "pwritev2": (328, 287), "open": (2, -1), "openat": (257, 56), "openat2": (437, 437),
    "creat": (85, -1), "close": (3, 57), "close_range": (436, 436), "lseek": (8, 62),
    "dup": (32, 23), "dup2": (33, -1), "dup3": (292, 24), "ioctl": (16, 29), "fcntl": (72, 25),
    "flock": (73, 32), "fsync": (74, 82), "fdatasync": (75, 83), "truncate": (76, 45),
    "ftruncate": (77, 46), "fallocate": (285, 47), "fadvise64": (221, 223), "readahead": (187, 213),
    "sendfile": (40, 71), "copy_file_range": (326, 285), "access": (21, -1), "faccessat": (269, 48),
    "faccessat2": (439, 439), "stat": (4, -1), "lstat": (6, -1), "fstat": (5, 80),
    "newfstatat": (262, 79), "statx": (332, 291), "statfs": (137, 43), "fstatfs": (138, 44),
    "getdents": (78, -1), "getdents64": (217, 61), "getcwd": (79, 17), "chdir": (80, 49),
    "fchdir": (81, 50), "mkdir": (83, -1), "mkdirat": (258, 34), "rmdir": (84, -1),
    "unlink": (87, -1), "unlinkat": (263, 35), "rename": (82, -1), "renameat": (264, 38),
    "renameat2": (316, 276), "link": (86, -1), "linkat": (265, 37), "symlink": (88, -1),
    "symlinkat": (266, 36), "readlink": (89, -1), "readlinkat": (267, 78), "chmod": (90, -1),
    "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, -1),
    "lchown": (94, -1), "fchown": (93, 55), "fchownat": (260, 54), "umask": (95, 166),
    "mknod": (133, -1), "mknodat": (259, 33), "utime": (132, -1), "utimes": (235, -1),
    "utimensat": (280, 88), "futimesat": (261, -1), "getxattr": (191, 8), "lgetxattr": (192, 9),
    "fgetxattr": (193, 10), "listxattr": (194, 11), "llistxattr": (195, 12),
    "flistxattr": (196, 13),
    # memory
    "brk": (12, 214), "mmap": (9, 222), "munmap": (11, 215), "mremap": (25, 216),
    "mprotect": (10, 226), "madvise": (28, 233), "msync": (26, 227), "mincore": (27, 232),
    "mlock": (149, 228), "munlock": (150, 229), "mlock2": (325, 284), "mlockall": (151, 230),
    "munlockall": (152, 231), "membarrier": (324, 283), "pkey_alloc": (330, 289),
    "pkey_free": (331, 290), "pkey_mprotect": (329, 288), "mseal": (462, 462),
    "get_mempolicy": (239, 236), "mbind": (237, 235), "set_mempolicy": (238, 237),
    # processes and threads
    "clone": (56, 220), "fork": (57, -1), "vfork": (58, -1), "execve": (59, 221),
    "execveat": (322, 281), "exit": (60, 93), "exit_group": (231, 94), "wait4": (61, 260),
    "waitid": (247, 95), "set_tid_address": (218, 96), "set_robust_list": (273, 99),
    "get_robust_list": (274, 100), "rseq": (334, 293), "futex": (202, 98),
    "futex_waitv": (449, 449), "gettid": (186, 178), "getpid": (39, 172), "getppid": (110, 173),
    "getpgid": (121, 155), "getpgrp": (111, -1), "setpgid": (109, 154), "getsid": (124, 156),
    "setsid": (112, 157), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "arch_prctl": (158, -1),
    "prctl": (157, 167), "sched_yield": (24, 124), "sched_getaffinity": (204, 123),
    "sched_setaffinity": (203, 122), "sched_getparam": (143, 121), "sched_setparam": (142, 118),
    "sched_getscheduler": (145, 120), "sched_setscheduler": (144, 119),
    "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126),
    "sched_rr_get_interval": (148, 127), "getpriority": (140, 141), "setpriority": (141, 140),
    "getrlimit": (97, 163), "setrlimit": (160, 164), "prlimit64": (302, 261),
    "getrusage": (98, 165), "times": (100, 153), "getcpu": (309, 168),
    # users
    "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "getresuid": (118, 148), "getresgid": (120, 150), "getgroups": (115, 158), "setuid": (105, 146),
    "setgid": (106, 144), "setreuid": (113, 145), "setregid": (114, 143), "setresuid": (117, 147),
    "setresgid": (119, 149), "setgroups": (116, 159), "setfsuid": (122, 151),
    "setfsgid": (123, 152), "capget": (125, 90),
    # signals and time
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136), "rt_sigsuspend": (130, 133), "rt_sigtimedwait": (128, 137),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "sigaltstack": (131, 132),
    "restart_syscall": (219, 128), "pause": (34, -1), "alarm": (37, -1), "getitimer": (36, 102),
    "setitimer": (38, 103), "nanosleep": (35, 101), "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169),
    "time": (201, -1), "timerfd_create": (283, 85), "timerfd_settime": (286, 86),
    "timerfd_gettime": (287, 87), "signalfd": (282, -1), "signalfd4": (289, 74),
    # waiting
    "pipe": (22, -1), "pipe2": (293, 59), "select": (23, -1), "pselect6": (270, 72),
    "poll": (7, -1), "ppoll": (271, 73), "epoll_create": (213, -1), "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21), "epoll_wait": (232, -1), "epoll_pwait": (281, 22),
    "epoll_pwait2": (441, 441), "eventfd": (284, -1), "eventfd2": (290, 19),
    # sockets
    "socket": (41, 198), "socketpair": (53, 199), "bind": (49, 200), "listen": (50, 201),
    "accept": (43, 202), "accept4": (288, 242), "connect": (42, 203), "shutdown": (48, 210),
    "getsockname": (51, 204), "getpeername": (52, 205), "getsockopt": (55, 209),
    "setsockopt": (54, 208), "sendto": (44, 206), "recvfrom": (45, 207), "sendmsg": (46, 211),
    "recvmsg": (47, 212), "sendmmsg": (307, 269), "recvmmsg": (299, 243),
    # system
    "uname": (63, 160), "sysinfo": (99, 179), "getrandom": (318, 278),
}
# Names of well-known calls that are refused, for events. Not listed: named by number.
REFUSED = {
    "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "shmdt": (67, 197),
    "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187),
    "mq_open": (240, 180), "mq_unlink": (241, 181), "mq_timedsend": (242, 182),
    "mq_timedreceive": (243, 183), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "io_setup": (206, 0),
    "io_submit": (209, 2), "fanotify_init": (300, 262), "inotify_init": (253, -1),
    "inotify_init1": (294, 26), "inotify_add_watch": (254, 27), "timer_create": (222, 107),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438), "kcmp": (312, 272), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97), "setns": (308, 268),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsmount": (432, 432),
    "mount_setattr": (442, 442), "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    "seccomp": (317, 277), "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446), "vmsplice": (278, 75), "splice": (275, 76),
    "tee": (276, 77), "sync": (162, 81), "syncfs": (306, 267), "setxattr": (188, 5),
    "fsetxattr": (190, 7), "lsetxattr": (189, 6), "personality": (135, 92), "modify_ldt": (154, -1),
    "quotactl": (179, 60), "swapon": (167, 224), "reboot": (169, 142), "syslog": (103, 116),
    "acct": (163, 89), "init_module": (175, 105), "finit_module": (313, 273),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "iopl": (172, -1), "ioperm": (173, -1),
    "clone3": (435, 435), "migrate_pages": (256, 238), "move_pages": (279, 239),
    "remap_file_pages": (216, 234), "ioprio_set": (251, 30), "process_madvise": (440, 440),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "sethostname": (170, 161), "setdomainname": (171, 162),
}
# fmt: on
# column of the tables, audit number
_COLUMNS = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
MACHINES = tuple(_COLUMNS)

_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6
_PROTOCOLS = (0, 1, 6, 17)  # default, ICMP (or AF_UNIX's own), TCP, UDP
_OPTIONS = {  # level: options; none of them raises a buffer
    1: (2, 3, 4, 5, 6, 9, 10, 12, 13, 15, 16, 20, 21, 29, 66, 67),  # SO_REUSEADDR … SO_SNDTIMEO
    6: (1, 3, 4, 5, 6, 12, 18),  # TCP_NODELAY, TCP_CORK, keep-alive, TCP_QUICKACK, TCP_USER_TIMEOUT
    41: (26,),  # IPV6_V6ONLY
}
# F_OFD_SETLK, F_OFD_SETLKW: belong to no process, so that sandbox.meter could not count them
_ORPHAN_LOCKS = (37, 38)
_FILE_COMMANDS = (1025, 1030, 1032, 1033, 1034)  # from 1024 on; not F_SETLEASE, F_NOTIFY
_SET_PIPE_SIZE, _PIPE_BYTES = 1031, 65536
# FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR, TIOCSTI, TIOCLINUX
_CONTROLS = (0x40086602, 0x401C5820, 0x5412, 0x541C)
# not PR_SET_DUMPABLE, PR_SET_SECCOMP
_PROCESS_OPTIONS = (1, 2, 3, 15, 16, 21, 23, 29, 30, 36, 37, 38, 39, 0x53564D41)
_NAMESPACES = 0x7E020000  # every CLONE_NEW* flag that clone takes
_MAP_SHARED, _MAP_HUGETLB = 0x1, 0x40000
_EPOLL_CTL_ADD = 1

_ERRORS = {
    "socket": errno.EAFNOSUPPORT,
    "socketpair": errno.EAFNOSUPPORT,
    "setsockopt": errno.ENOPROTOOPT,
    "prctl": errno.EINVAL,
    "clone": errno.EPERM,
    "fcntl": errno.EPERM,
    "ioctl": errno.EPERM,
    "mmap": errno.EPERM,
}  # every other refused call: ENOSYS

_LOAD, _JUMP, _EQUAL, _AT_LEAST, _MASKED, _ANSWER = 0x20, 0x05, 0x15, 0x35, 0x45, 0x06
_RET_ALLOW, _RET_NOTIFY, _RET_ERRNO = 0x7FFF0000, 0x7FC00000, 0x00050000


def error_of(name: str) -> int:
    """Return what a refused call answers."""
    return _ERRORS.get(name, errno.ENOSYS)


def decide(name: str, arguments: tuple[int, ...]) -> str:
    """REFUSE or METER, for a call that the filter handed over."""
    low = [argument & 0xFFFFFFFF for argument in arguments]
    metered = (name == "epoll_ctl" and low[1] == _EPOLL_CTL_ADD) or (
        name == "mmap" and low[3] & _MAP_SHARED and not low[3] & _MAP_HUGETLB
    )
    return METER if metered else REFUSE


def describe(name: str, arguments: tuple[int, ...]) -> str:
    """Return a refused call in words, with the argument that it was refused for."""
    shown = {
        "socket": f"family {arguments[0]}, protocol {arguments[2]}",
        "socketpair": f"family {arguments[0]}, protocol {arguments[2]}",
        "setsockopt": f"level {arguments[1] & 0xFFFFFFFF}, option {arguments[2] & 0xFFFFFFFF}",
        "clone": f"flags {arguments[0]:#x}",
        "fcntl": f"command {arguments[1] & 0xFFFFFFFF}",
        "ioctl": f"request {arguments[1] & 0xFFFFFFFF:#x}",
        "prctl": f"option {arguments[0] & 0xFFFFFFFF}",
        "mmap": f"flags {arguments[3]:#x}",
    }.get(name)
    return f"{name}({shown})" if shown else name


def names(machine: str) -> dict[int, str]:
    """Return number → name of every call that has a name here."""
    column = _COLUMNS[machine][0]
    return {
        numbers[column]: name
        for name, numbers in {**REFUSED, **ALLOWED}.items()
        if numbers[column] >= 0
    }


def filter_lines(machine: str, *, notify: bool) -> list[Line]:
    """Return the filter as BPF. `notify`: refused and metered calls go to a listener, which answers
    them; else refused ones answer their error and metered ones are allowed uncounted. OSError for
    an architecture without a table."""
    if machine not in _COLUMNS:
        raise OSError(errno.ENOSYS, f"no system call filter for {machine}")
    column, audit = _COLUMNS[machine]
    refuse = _refuse("", notify=notify)
    plain, special = [], {}
    for name, numbers in ALLOWED.items():
        if numbers[column] >= 0 and name in _ARGUMENTS:
            special[numbers[column]] = _ARGUMENTS[name](
                _refuse(name, notify=notify), _meter(notify=notify)
            )
        elif numbers[column] >= 0:
            plain.append(numbers[column])
    # clone3 keeps its flags where no filter can read them; libc then uses clone. Too common to be
    # an event.
    special[REFUSED["clone3"][column]] = [(_ANSWER, 0, 0, _RET_ERRNO | errno.ENOSYS)]
    leaves = [(low, _range(low, high, refuse)) for low, high in _ranges(sorted(plain))]
    leaves += [
        (number, [(_EQUAL, 0, len(block), number), *block, refuse])
        for number, block in special.items()
    ]
    other_architecture = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, audit),
        (_ANSWER, 0, 0, _RET_ERRNO | errno.ENOSYS),
    ]
    return [*other_architecture, (_LOAD, 0, 0, 0), *_tree(sorted(leaves))]


def _refuse(name: str, *, notify: bool) -> Line:
    return (_ANSWER, 0, 0, _RET_NOTIFY if notify else _RET_ERRNO | error_of(name))


def _meter(*, notify: bool) -> Line:
    return (_ANSWER, 0, 0, _RET_NOTIFY if notify else _RET_ALLOW)


def _ranges(numbers: list[int]) -> list[tuple[int, int]]:
    """Neighboring numbers as (first, last)."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def _range(low: int, high: int, refuse: Line) -> list[Line]:
    return [
        (_AT_LEAST, 0, 2, low),
        (_AT_LEAST, 1, 0, high + 1),
        (_ANSWER, 0, 0, _RET_ALLOW),
        refuse,
    ]


def _tree(leaves: list[tuple[int, list[Line]]]) -> list[Line]:
    """Return a binary search for the leaf, which decides. Installing costs by the length of a path,
    not of the list."""
    if len(leaves) == 1:
        return leaves[0][1]
    middle = len(leaves) // 2
    below, above = _tree(leaves[:middle]), _tree(leaves[middle:])
    return [(_AT_LEAST, 0, 1, leaves[middle][0]), (_JUMP, 0, 0, len(below)), *below, *above]


def _argument(index: int) -> Line:
    """Load the low half of an argument."""
    return (_LOAD, 0, 0, 16 + 8 * index)


def _one_of(values: tuple[int, ...], otherwise: Line) -> list[Line]:
    """Go on behind this when the loaded number is one of `values`."""
    tests = [(_EQUAL, len(values) - place, 0, value) for place, value in enumerate(values)]
    return [*tests, otherwise]


_OK: Line = (_ANSWER, 0, 0, _RET_ALLOW)


def _clone(refuse: Line, meter: Line) -> list[Line]:
    return [_argument(0), (_MASKED, 0, 1, _NAMESPACES), refuse, _OK]


def _socket(refuse: Line, meter: Line) -> list[Line]:
    return [
        _argument(0),
        *_one_of(_FAMILIES, refuse),
        _argument(2),
        *_one_of(_PROTOCOLS, refuse),
        _OK,
    ]


def _setsockopt(refuse: Line, meter: Line) -> list[Line]:
    lines: list[Line] = []
    for level, options in _OPTIONS.items():
        block = [_argument(2), *_one_of(options, refuse), _OK]
        lines += [_argument(1), (_EQUAL, 0, len(block), level), *block]
    return [*lines, refuse]


def _fcntl(refuse: Line, meter: Line) -> list[Line]:
    pipe = [_argument(2), (_AT_LEAST, 0, 1, _PIPE_BYTES + 1), refuse, _OK]
    high = [(_EQUAL, 0, len(pipe), _SET_PIPE_SIZE), *pipe, *_one_of(_FILE_COMMANDS, refuse), _OK]
    return [
        _argument(1),
        (_AT_LEAST, 0, len(high), 1024),
        *high,
        *_one_of(_ORPHAN_LOCKS, _OK),
        refuse,
    ]


def _ioctl(refuse: Line, meter: Line) -> list[Line]:
    return [_argument(1), *_one_of(_CONTROLS, _OK), refuse]


def _mmap(refuse: Line, meter: Line) -> list[Line]:
    return [
        _argument(3),
        (_MASKED, 0, 1, _MAP_HUGETLB),
        refuse,
        (_MASKED, 0, 1, _MAP_SHARED),
        meter,
        _OK,
    ]


def _epoll_ctl(refuse: Line, meter: Line) -> list[Line]:
    return [_argument(1), (_EQUAL, 0, 1, _EPOLL_CTL_ADD), meter, _OK]


def _prctl(refuse: Line, meter: Line) -> list[Line]:
    return [_argument(0), *_one_of(_PROCESS_OPTIONS, refuse), _OK]


_ARGUMENTS = {
    "clone": _clone,
    "socket": _socket,
    "socketpair": _socket,
    "setsockopt": _setsockopt,
    "fcntl": _fcntl,
    "ioctl": _ioctl,
    "mmap": _mmap,
    "epoll_ctl": _epoll_ctl,
    "prctl": _prctl,
}
