"""Hostile programs, as data: name → source. Each is bounded: it holds at most some 200 MB and
touches nothing outside.

HOSTILE runs in every mode. WALLED only where the program sees no process but its own: it would
signal others. A mode's walls may refuse, end or let a program be; what must hold is in
test_sandbox_drill.
"""

from __future__ import annotations

_C = "import ctypes, errno, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
_PAIR = "import socket, os, array, time\na, b = socket.socketpair()\n"
_SEND = (
    "def send(s, t, *fds):\n  s.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, "
    "array.array('i', [t.fileno(), *fds]))])\n"
)


def _call(number: int, *arguments: object, times: int = 1) -> str:
    """A raw system call of x86_64; elsewhere the number means another call, which is refused or
    harmless, too."""
    given = "".join(f", {argument}" for argument in arguments)
    return (
        _C + f"for _ in range({times}):\n  r = libc.syscall({number}{given})\nprint(r, "
        "ctypes.get_errno())\n"
    )


HOSTILE = {
    # kernel memory that belongs to no process
    "semget": _C + "print([libc.semget(0, 32000, 0o1600) for _ in range(20)])\n",
    "msgget": _C + "print([libc.msgget(0, 0o1600) for _ in range(20)])\n",
    "shmget": _C + "print([libc.shmget(0, 1 << 20, 0o1600) for _ in range(20)])\n",
    "mq_open": _call(240, "b'gyre-test'", "0o102", "0o600", 0, times=20),
    "memfd": _C
    + "for _ in range(20):\n  fd = libc.memfd_create(b'x', 0)\n  os.write(fd, bytes(1 << 20))\n",
    "memfd_secret": _call(447, 0),
    "socketpairs": "import socket, time\nkept = []\n"
    "for _ in range(100):\n  pair = socket.socketpair()\n  kept.append(pair)\n"
    "  for s in pair:\n    s.setblocking(False)\n    try:\n      while True: s.send(bytes(65536))\n"
    "    except OSError: pass\ntime.sleep(30)\n",
    "socket_buffers": "import socket\nfor name in (7, 8, 32, 33):\n  for s in "
    "socket.socketpair():\n"
    "    try: s.setsockopt(socket.SOL_SOCKET, name, 1 << 26); print('raised', name)\n"
    "    except OSError as e: print(e.errno)\n",
    "backlog": "import socket, time\nserver = socket.socket(socket.AF_UNIX)\nserver.bind('s'); "
    "server.listen(4000)\n"
    "for _ in range(600):\n  c = socket.socket(socket.AF_UNIX); c.setblocking(False); "
    "c.connect('s')\n"
    "  try:\n    while True: c.send(bytes(65536))\n  except OSError: pass\n  "
    "c.close()\ntime.sleep(30)\n",
    "datagrams": "import socket, time\nkept = []\nfor n in range(200):\n  r = "
    "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
    "  r.bind(f'd{n}'); kept.append(r)\n  for _ in range(8):\n    s = "
    "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
    "    s.setblocking(False)\n    try: s.sendto(bytes(100000), f'd{n}')\n    except OSError: "
    "pass\n    s.close()\ntime.sleep(30)\n",
    "socketpairs_of_children": "import os, socket, time\nfor _ in range(4):\n  if os.fork() == 0: "
    "break\nkept = []\n"
    "for _ in range(100):\n  pair = socket.socketpair()\n  kept.append(pair)\n  "
    "pair[0].setblocking(False)\n"
    "  try:\n    while True: pair[0].send(bytes(65536))\n  except OSError: pass\ntime.sleep(30)\n",
    "pipes": "import fcntl, os\nfor _ in range(100):\n  r, w = os.pipe()\n  try: fcntl.fcntl(w, "
    "1031, 1 << 20); print('raised')\n"
    "  except OSError: pass\n  os.set_blocking(w, False)\n  try: os.write(w, bytes(1 << 20))\n  "
    "except OSError: pass\n",
    "vmsplice": "import ctypes, mmap, os\n"
    + _C
    + "r, w = os.pipe()\nprint(libc.vmsplice(w, 0, 0, 0), ctypes.get_errno())\n",
    "shared_dontneed": "import mmap, time\nkept = []\nfor _ in range(4):\n  m = mmap.mmap(-1, 40 "
    "<< 20)\n"
    "  for at in range(0, len(m), 4096): m[at] = 1\n  m.madvise(mmap.MADV_DONTNEED)\n  "
    "kept.append(m)\ntime.sleep(30)\n",
    "shared_orphans": "import mmap, os, time\nfor _ in range(4):\n  if os.fork() == 0:\n    m = "
    "mmap.mmap(-1, 40 << 20)\n"
    "    for at in range(0, len(m), 4096): m[at] = 1\n    if os.fork() == 0: time.sleep(30)\n    "
    "os._exit(0)\n"
    "  os.wait()\ntime.sleep(30)\n",
    "shared_trimmed": _C + "import time\nlibc.mmap.restype = ctypes.c_void_p\n"
    "for _ in range(4):\n  at = libc.mmap(None, ctypes.c_size_t(40 << 20), 3, 0x21, -1, 0)\n"
    "  ctypes.memset(at, 1, 40 << 20)\n  libc.munmap(ctypes.c_void_p(at + 4096), "
    "ctypes.c_size_t((40 << 20) - 4096))\ntime.sleep(30)\n",
    "dev_zero": "import mmap, os, time\nkept = []\nfor _ in range(4):\n  fd = "
    "os.open('/dev/zero', os.O_RDWR)\n"
    "  m = mmap.mmap(fd, 40 << 20)\n  os.close(fd)\n  for at in range(0, len(m), 4096): m[at] = 1\n"
    "  m.madvise(mmap.MADV_DONTNEED)\n  kept.append(m)\ntime.sleep(30)\n",
    "file_locks": "import fcntl, struct\nf = open('l', 'wb')\nfor n in range(12000): "
    "fcntl.lockf(f, fcntl.LOCK_EX, 1, 2 * n)\nprint('locked')\nimport time\ntime.sleep(30)\n",
    "epoll": "import os, select\nfds = [os.pipe()[0] for _ in range(40)]\npolls = [select.epoll() "
    "for _ in range(40)]\n"
    "for e in polls:\n  for fd in fds: e.register(fd)\nprint('watched')\n",
    "inotify": _call(294, 0, times=50),
    "fanotify": _call(300, 0, 0),
    "io_uring": _call(425, 64, "ctypes.create_string_buffer(200)"),
    "aio": _call(206, 60000, "ctypes.byref(ctypes.c_ulong())"),
    "timers": _call(222, 0, 0, "ctypes.byref(ctypes.c_int())", times=3000),
    "keys": _call(248, "b'user'", "b'k'", "b'v'", 1, -2, times=50),
    "bpf": _call(321, 0, "ctypes.create_string_buffer(128)", 128),
    "perf": _call(298, "ctypes.create_string_buffer(128)", 0, -1, -1, 0),
    "userfaultfd": _call(323, 0),
    "landlock": _call(444, "ctypes.byref(ctypes.c_ulong(1))", 8, 0),
    "hugetlb": _C
    + "libc.mmap.restype = ctypes.c_void_p\nprint(libc.mmap(None, 2 << 20, 3, 0x40022, -1, 0))\n",
    "inodes": "import os\nfor n in range(20000):\n  os.mkdir(str(n))\n",
    "sparse_pages": "import mmap, time\nm = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE)\nfor "
    "at in range(0, len(m), 4096): m[at] = 1\ntime.sleep(30)\n",
    "signals_queued": "import os, signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, {40})\n"
    + _C
    + "info = ctypes.create_string_buffer(128)\ninfo[8:12] = (-1 & 0xffffffff).to_bytes(4, "
    "'little')\n"
    "for n in range(5000): libc.syscall(129, os.getpid(), 40, info)\n",
    "attributes": "import os\nfor n in range(2000):\n  try: os.setxattr('.', f'user.{n}', "
    "bytes(1000))\n  except OSError as e: print(e.errno); break\n",
    # doors
    "vsock": "import socket\nprint(socket.socket(40, socket.SOCK_STREAM))\n",
    "families": "import socket\nfor n in range(50):\n  try: socket.socket(n, socket.SOCK_RAW); "
    "print('made', n)\n  except OSError: pass\n",
    "namespaces": _C
    + "print(libc.unshare(0x10000000), libc.unshare(0x20000), libc.syscall(56, 0x10000011, 0, 0, "
    "0, 0))\n",
    "mounts": _C + "print(libc.mount(b'x', b'.', b'tmpfs', 0, None), libc.umount2(b'/proc', 2), "
    "libc.chroot(b'.'))\n",
    "ptrace": _C
    + "print(libc.ptrace(16, os.getppid(), 0, 0), libc.syscall(310, os.getppid(), 0, 0, 0, 0, "
    "0))\n",
    "other_abi": _call(0x40000000 + 41, 1, 1, 0),
    "seccomp": _call(317, 0, 0, 0),
    "handles": _call(304, -100, 0, 0),
    # cells and pipes
    "scm_cycle": _PAIR + _SEND + "send(a, b)\nsend(b, a)\nprint('sent')\n",
    "scm_cycle_stdout": _PAIR + _SEND + "send(a, b, 1, 2)\nsend(b, a, 1, 2)\nprint('sent')\n",
    "scm_chain": "import socket, array\n"
    + _SEND
    + "kept = socket.socketpair()\nfor _ in range(200):\n  pair = socket.socketpair()\n"
    "  try:\n    send(pair[0], kept[0], 1)\n    send(pair[0], kept[1], 1)\n  except OSError: "
    "break\n  kept = pair\n",
    "fake_125": "import os\nos.write(2, b'the sandbox could not start the program: "
    "no')\nos._exit(125)\n",
    "fake_status": "import os\nfor fd in range(3, 256):\n  try: os.write(fd, b'failed'); "
    "print('wrote', fd)\n  except OSError: pass\n",
    "hook_raises": "import sys\ndef hook(*a): raise SystemError\nsys.excepthook = hook\n1/0\n",
    "exit_hook_hangs": "import atexit, time\natexit.register(time.sleep, 30)\n",
    "closes_all": "import os, time\nos.closerange(0, 256)\ntime.sleep(30)\n",
    "stops_itself": "import os, signal\nos.kill(os.getpid(), "
    "signal.SIGSTOP)\nos.kill(os.getpid(), signal.SIGTERM)\nimport time\ntime.sleep(30)\n",
    # processes, time, memory
    "forks": "import os, time\nfor _ in range(100):\n  try:\n    if os.fork() == 0: "
    "time.sleep(30)\n  except OSError: break\ntime.sleep(30)\n",
    "daemon": "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: "
    "time.sleep(30)\n  os._exit(0)\nos.wait()\n",
    "threads": "import threading, time\ntry:\n  for _ in range(100): "
    "threading.Thread(target=time.sleep, args=(30,)).start()\n"
    "except RuntimeError: pass\n",
    "spins": "while True: pass\n",
    "ignores_signals": "import signal\nfor n in range(1, 65):\n  try: signal.signal(n, "
    "signal.SIG_IGN)\n  except (OSError, ValueError): pass\nwhile True: pass\n",
    "regex": "import re\nre.match('(a+)+$', 'a' * 40 + 'b')\n",
    "huge_integer": "print(len(str(7 ** (7 ** 9))))\n",
    "memory": "kept = []\nfor _ in range(200): kept.append(b'x' * (1 << 20))\n",
    "memory_of_children": "import os, time\nfor _ in range(4):\n  if os.fork() == 0:\n    kept = "
    "b'x' * (40 << 20)\n    time.sleep(30)\ntime.sleep(30)\n",
    "hides": _C
    + "libc.prctl(4, 0, 0, 0, 0)\nkept = b'x' * (80 << 20)\nimport time\ntime.sleep(0.1)\n",
    # output and files
    "prints": "while True: print('x' * 10000)\n",
    "prints_errors": "import os\nwhile True: os.write(2, b'x' * 10000)\n",
    "many_files": "for n in range(30):\n  with open(f'f{n}', 'wb') as f: f.write(bytes(1 << "
    "20))\nimport time\ntime.sleep(30)\n",
    "removed_files": "import os\nkept = []\nfor n in range(30):\n  f = open('f', 'wb'); "
    "f.write(bytes(1 << 20)); f.flush(); os.unlink('f')\n  kept.append(f)\nimport "
    "time\ntime.sleep(30)\n",
    "deep_folders": "import os\nfor _ in range(1500):\n  os.mkdir('d' * 100)\n  os.chdir('d' * "
    "100)\nopen('f', 'w').write('x')\n",
    "locked_folders": "import os\nos.makedirs('a/b/c')\nopen('a/b/c/f', 'w').write('x')\nfor p in "
    "('a/b/c', 'a/b', 'a', '.'): os.chmod(p, 0)\n",
    "odd_names": "import os\nos.mkfifo('pipe')\nos.symlink('/', 'root')\nos.symlink('loop', "
    "'loop')\nopen(b'\\xff\\n', 'w')\n"
    "os.mkdir('moved-1')\nopen('moved-2', 'w')\nos.makedirs('x/moved-3/y')\n",
    "immutable": "import fcntl\nf = open('f', 'w')\nfcntl.ioctl(f, 0x40086602, (16).to_bytes(8, "
    "'little'))\n",
}

# They signal every process that they see, or open the machine's settings for writing (and write
# nothing).
WALLED = {
    "settings": "import os\nfor folder, _, names in os.walk('/proc/sys'):\n  for name in names:\n"
    "    try: os.close(os.open(os.path.join(folder, name), os.O_WRONLY)); print('opened', folder, "
    "name)\n"
    "    except OSError: pass\n",
    "kill_all": "import os\nfor n in (15, 9):\n  try: os.kill(-1, n)\n  except OSError: pass\n",
    "kill_each": "import os\nfor pid in range(2, 3000):\n  try: os.kill(pid, 9)\n  except "
    "OSError: pass\n",
    "kill_group": "import os\nos.killpg(0, 9)\n",
}

REFUSED = {  # program: a call that must be among the refused ones
    "semget": "semget",
    "msgget": "msgget",
    "shmget": "shmget",
    "mq_open": "mq_open",
    "memfd": "memfd_create",
    "memfd_secret": "memfd_secret",
    "socket_buffers": "setsockopt(level 1, option 32)",
    "vmsplice": "vmsplice",
    "pipes": "fcntl(command 1031)",
    "inotify": "inotify_init1",
    "fanotify": "fanotify_init",
    "io_uring": "io_uring_setup",
    "aio": "io_setup",
    "timers": "timer_create",
    "keys": "add_key",
    "bpf": "bpf",
    "perf": "perf_event_open",
    "userfaultfd": "userfaultfd",
    "landlock": "landlock_create_ruleset",
    "vsock": "socket(family 40, protocol 0)",
    "namespaces": "clone(flags 0x10000011)",
    "mounts": "mount",
    "ptrace": "ptrace",
    "seccomp": "seccomp",
    "handles": "open_by_handle_at",
    "immutable": "ioctl(request 0x40086602)",
    "attributes": "setxattr",
    "other_abi": "call 1073741865",
    "hides": "prctl(option 4)",
    "hugetlb": "mmap(flags 0x40022)",
}
# Kernel memory that belongs to no process counts: without that, these would sleep until their wall
# limit.
COUNTED = {"shared_orphans", "shared_trimmed", "memory_of_children"}
COUNTED_WALLED = {"backlog", "datagrams", "socketpairs_of_children"}
