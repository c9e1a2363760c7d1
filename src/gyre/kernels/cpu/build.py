"""Build: the C sources of this folder as one shared library per dtype. In: the system's C compiler. Out: a loaded
library, or Unavailable with the reason. Callers: library, cli.doctor.

A library is compiled once and kept in the user's cache folder under a name that holds a hash of the sources, the
compiler, its flags and the processor. It is built aside and renamed, so that processes may race.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

LIBRARIES = ("decoder.c", "trainer.c")
SOURCES = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fopenmp")
DEADLINE_S = 120.0
COMPILERS = ("cc", "gcc", "clang")
NEEDED = "__AVX512BW__"  # a macro of the compiler: with narrower vectors these kernels would lose to torch's


@dataclass(frozen=True, slots=True, kw_only=True)
class Unavailable:
    """Why there is no library."""

    reason: str


def find_compiler() -> str | None:
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gyre" / "kernels"


def load(source: str, *, bf16: bool) -> ctypes.CDLL | Unavailable:
    """Return the library of one C file, compiling it where the cache has none."""
    compiler = find_compiler()
    if compiler is None:
        return Unavailable(reason=f"there is no C compiler (looked for {', '.join(COMPILERS)})")
    flags = (*FLAGS, f"-DGYRE_BF16={int(bf16)}")
    try:
        if NEEDED not in _macros(compiler):
            return Unavailable(reason="the kernels are written for AVX-512, and this processor or compiler has none")
        path = cache_folder() / f"{Path(source).stem}-{_key(compiler, flags)}.so"
        if not path.is_file():
            _compile(compiler, flags, SOURCES / source, path)
        return ctypes.CDLL(str(path))
    except subprocess.CalledProcessError as error:
        return Unavailable(reason=f"{compiler} failed: {error.stderr.strip()[-300:]}")
    except (OSError, subprocess.TimeoutExpired) as error:
        return Unavailable(reason=f"{type(error).__name__}: {error}")


@functools.cache
def _macros(compiler: str) -> str:
    """What the compiler defines for this processor."""
    command = [compiler, *FLAGS, "-dM", "-E", "-x", "c", os.devnull]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=DEADLINE_S).stdout


def _key(compiler: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode() + path.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=DEADLINE_S)
    for part in (compiler, version.stdout, *flags, _processor(), str(_threads_library())):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def _threads_library() -> Path | None:
    """The OpenMP runtime that torch brings and has loaded, so that there is one team of threads and not two."""
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return found[0] if found else None


def _compile(compiler: str, flags: tuple[str, ...], source: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    threads = _threads_library()
    link = [str(threads)] if threads else ["-fopenmp"]
    with tempfile.TemporaryDirectory(dir=path.parent) as aside:
        made, built = Path(aside) / "made.o", Path(aside) / "made.so"
        for command in (
            [compiler, *flags, "-c", str(source), "-o", str(made)],
            [compiler, "-shared", str(made), *link, "-lm", "-o", str(built)],
        ):
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=DEADLINE_S)
        os.replace(built, path)
