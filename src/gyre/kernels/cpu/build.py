"""Build: the C sources of this folder as one shared library per dtype and instruction set. In: the
system's C compiler. Out: a loaded library, or Unavailable with the reason.

The processor decides once: the first of INSTRUCTION_SETS that it and the compiler support. A
library is compiled once and cached in the user's cache folder. Its name contains the instruction
set and a hash of the sources, compiler, flags and processor. It is built in a temporary file and
renamed, so that processes may race.
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
FLAGS = (
    "-O3", "-std=gnu11", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fopenmp",
    "-ffp-contract=off",  # see fused() of lanes.h
    "-fno-strict-aliasing",  # panels and tiles are read as floats, as pairs of bfloat16 and as bits
)  # fmt: skip
DEADLINE_S = 120.0
COMPILERS = ("cc", "gcc", "clang")


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionSet:
    """The target of lanes.h. `features` are the processor's; the compiler names them by macros."""

    name: str
    features: tuple[str, ...]
    flags: tuple[str, ...]

    def missing(self, macros: frozenset[str]) -> list[str]:
        return [feature for feature in self.features if f"__{feature.upper()}__" not in macros]


INSTRUCTION_SETS = (  # best first
    InstructionSet(
        name="avx512_bf16", features=("avx512f", "avx512bw", "avx512bf16"), flags=("-march=native",)
    ),
    InstructionSet(
        name="avx512", features=("avx512f", "avx512bw"), flags=("-march=native", "-mno-avx512bf16")
    ),
    InstructionSet(
        name="avx2", features=("avx2", "fma"), flags=("-mavx2", "-mfma", "-mtune=native")
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unavailable:
    """Reason for a missing library."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledLibrary:
    """A loaded library and its target."""

    functions: ctypes.CDLL
    instructions: InstructionSet


def choose_instructions(macros: frozenset[str]) -> InstructionSet | Unavailable:
    """Return the best set that the processor fully supports, from its compiler's macros."""
    found = next((one for one in INSTRUCTION_SETS if not one.missing(macros)), None)
    if found is not None:
        return found
    least = INSTRUCTION_SETS[-1]
    return Unavailable(
        reason="the kernels are written for AVX-512 (F and BW) and for AVX2 with FMA; "
        f"this processor or compiler lacks {' and '.join(least.missing(macros))}"
    )


def find_compiler() -> str | None:
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gyre" / "kernels"


def load(
    source: str, *, bf16: bool, instructions: InstructionSet | None = None
) -> CompiledLibrary | Unavailable:
    """Return the library of one C file, compiled if not cached. `instructions` defaults to the
    processor's best."""
    compiler = find_compiler()
    if compiler is None:
        return Unavailable(reason=f"there is no C compiler (looked for {', '.join(COMPILERS)})")
    try:
        macros = _macros(compiler)
        taken = instructions or choose_instructions(macros)
        if isinstance(taken, Unavailable):
            return taken
        if missing := taken.missing(macros):
            return Unavailable(
                reason=f"{taken.name}: this processor or compiler lacks {' and '.join(missing)}"
            )
        flags = (*FLAGS, *taken.flags, f"-DGYRE_BF16={int(bf16)}")
        path = cache_folder() / f"{Path(source).stem}-{taken.name}-{_key(compiler, flags)}.so"
        if not path.is_file():
            _compile(compiler, flags, SOURCES / source, path)
        return CompiledLibrary(functions=ctypes.CDLL(str(path)), instructions=taken)
    except subprocess.CalledProcessError as error:
        return Unavailable(reason=f"{compiler} failed: {error.stderr.strip()[-300:]}")
    except (OSError, subprocess.TimeoutExpired) as error:
        return Unavailable(reason=f"{type(error).__name__}: {error}")


@functools.cache
def _macros(compiler: str) -> frozenset[str]:
    """Return the compiler's macros for this processor."""
    command = [compiler, "-march=native", "-dM", "-E", "-x", "c", os.devnull]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=DEADLINE_S)
    return frozenset(
        line.split()[1] for line in ran.stdout.splitlines() if line.startswith("#define ")
    )


def _key(compiler: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode() + path.read_bytes())
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=True, timeout=DEADLINE_S
    )
    for part in (compiler, version.stdout, *flags, processor_properties(), str(_threads_library())):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def processor_properties() -> str:
    """Return the processor properties that -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def _threads_library() -> Path | None:
    """Return the OpenMP runtime that torch has loaded, so that there is one thread team instead of
    two."""
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
