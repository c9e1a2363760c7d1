"""Root file system: the file system that programs see. In: folders to show read-only. Out: a new
root; per run a work folder.

    /usr /bin /lib … + Python's own folder   the system, read-only.
    /dev                                     null, zero, full, random, urandom; stdin, stdout,
                                             stderr, fd; shm is /work.
    /etc                                     names of root and the program's user, the loader's
                                             cache.
    /proc                                    of the run's own process namespace.
    /work, also called /tmp                  private to one run, in memory, of limited size, gone
                                             with it.

Nothing else exists: no home folders, no run folder, no configuration of the machine.
"""

from __future__ import annotations

import os

from gyre.rewards.fork_server import kernel

WORK = "/work"
WORK_FILES = 4096  # files and folders in it
_LIBRARIES = ("/lib", "/lib32", "/lib64", "/libx32")
_SYSTEM = ("/usr", "/bin", "/sbin", *_LIBRARIES, "/etc/ld.so.cache", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
LINKS = {
    "/dev/shm": WORK,
    "/dev/fd": "/proc/self/fd",
    "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
}
_FIXED_FILES = {
    "/etc/passwd": "root:x:0:0::/work:/bin/sh\nprogram:x:1000:1000::/work:/bin/sh\n",
    "/etc/group": "root:x:0:\nprogram:x:1000:\n",
}


def build_root(folders: list[str]) -> None:
    """Enter a root that holds the system and `folders`, all read-only. Needs a mount namespace of
    its own."""
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    visible = shown(folders)
    # The new root hides what is under its mount point, so every source is opened before.
    sources = {
        path: os.open(path, os.O_PATH)
        for path in [*visible, *DEVICES, "/proc"]
        if not os.path.islink(path)
    }
    links = {path: os.readlink(path) for path in visible if os.path.islink(path)}
    root = "/tmp"
    kernel.mount("view", root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m")
    for path, fd in sources.items():
        _show(
            fd,
            root + path,
            is_folder=os.path.isdir(f"/proc/self/fd/{fd}"),
            as_device=path in (*DEVICES, "/proc"),
        )
        os.close(fd)
    for path, target in links.items():
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        os.symlink(target, root + path)
    for path, text in _FIXED_FILES.items():
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        with open(root + path, "w") as file:
            file.write(text)
    os.mkdir(root + WORK)
    for path, target in LINKS.items():
        os.symlink(target, root + path)
    if not os.path.exists(root + "/tmp"):  # it exists when Python itself lives there
        os.symlink(WORK, root + "/tmp")
    kernel.pivot_into(root)
    kernel.restrict_mount("/", kernel.ATTR_RDONLY, recursive=False)


def shown(folders: list[str]) -> list[str]:
    """List every path of this machine that programs see, parents before children."""
    return [path for path in _SYSTEM if os.path.exists(path)] + _outermost(folders)


def stage(folders: list[str]) -> dict[str, str]:
    """Bind folders under /tmp, where every user can reach them. Returns path → where it is bound.
    Needs a mount namespace of its own."""
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    sources = [os.open(folder, os.O_PATH) for folder in folders]
    kernel.mount("stage", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m")
    for place, fd in enumerate(sources):
        _show(fd, f"/tmp/{place}", is_folder=True, as_device=False)
        os.close(fd)
    return {folder: f"/tmp/{place}" for place, folder in enumerate(folders)}


def _outermost(folders: list[str]) -> list[str]:
    """Leave out what the system folders or another folder already show."""
    kept: list[str] = []
    for folder in sorted({os.path.realpath(folder) for folder in folders}):
        inside = [
            outer for outer in ["/usr", *kept] if folder == outer or folder.startswith(outer + "/")
        ]
        if not inside:
            kept.append(folder)
    return kept


def _show(fd: int, target: str, *, is_folder: bool, as_device: bool) -> None:
    os.makedirs(target if is_folder else os.path.dirname(target), exist_ok=True)
    if not is_folder:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
    kernel.mount(f"/proc/self/fd/{fd}", target, None, kernel.MS_BIND | kernel.MS_REC)
    if not as_device:
        limits = kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV
        kernel.restrict_mount(target, limits, recursive=True)


def mount_proc(*, read_only: bool) -> None:
    """Show only the processes of the caller's process namespace. Read-only, no owner can write the
    settings of the machine or of the run's own namespaces."""
    flags = (
        kernel.MS_NOSUID
        | kernel.MS_NODEV
        | kernel.MS_NOEXEC
        | (kernel.MS_RDONLY if read_only else 0)
    )
    kernel.mount("proc", "/proc", "proc", flags)


def mount_work_folder(size_bytes: int) -> None:
    """Mount an empty folder to write in that dies with the mount namespace."""
    options = f"mode=777,nr_inodes={WORK_FILES},size={size_bytes}"
    kernel.mount("work", WORK, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
