"""Environment: vLLM's own Python environment, made, verified and looked at. In: a build, a folder.
Out: a folder with a virtual environment, and what is in it. Imports neither torch nor vLLM.

A folder is whole when it has its record, which is written last. One that was left half-made is
removed and made anew. A folder that is not ours is never touched.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from gyre.core.errors import ConfigError, DeadlineError
from gyre.core.files import read_json, write_text
from gyre.distributed.environment import show_gyre_alone, variables_for
from gyre.sidecars.vllm.versions import VllmBuild

RECORD, HALF_MADE = "gyre-sidecar.json", "gyre-sidecar.half-made"
INSTALL_S, VERIFY_S, LOCK_S = 1800.0, 600.0, 1800.0
READY_S = 7 * 24 * 3600  # of vLLM's own wait for its engine process
ROOM_BYTES = {"cpu": 6 << 30, "cuda": 16 << 30}  # that an environment takes, with room to unpack
# what a sidecar imports of ours and of vLLM's
CHECK = """
import importlib, importlib.metadata, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps({name: importlib.metadata.version(name) for name in ("torch", "transformers")}))
"""
# whether what a sidecar needs at once is there: without an import, which takes seconds
LOOK = """
import importlib.util, json, sys
print(json.dumps([name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]))
"""
NEEDED = ("vllm", "torch", "transformers", "numpy", "msgspec", "psutil", "pydantic")
LOOK_S = 60.0
CHECKED = (
    "vllm.engine.arg_utils",
    "vllm.v1.engine.async_llm",
    "gyre.cluster.worker.process",
    "gyre.launch.placement.vllm_worker",
    "gyre.sidecars.vllm.worker_side",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentRecord:
    """What an environment has."""

    distribution: str
    version: str  # of vLLM
    torch: str
    python: str
    made_s: float  # seconds that its making took


def default_folder(build: VllmBuild) -> Path:
    """Return where the environment is unless another folder is given: beside those of other tools
    of the user."""
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "gyre" / "sidecars" / f"{build.distribution}-{build.version}"


def python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def find_environment(folder: Path) -> EnvironmentRecord | None:
    """Return what a whole environment has; None where there is none."""
    if not (folder / RECORD).is_file() or not python_of(folder).exists():
        return None
    found = read_json(folder / RECORD)
    return EnvironmentRecord(**{name: found[name] for name in EnvironmentRecord.__slots__})


def install(build: VllmBuild, folder: Path, *, say: Callable[[str], None]) -> EnvironmentRecord:
    """Make the environment in `folder` unless it is there, and verify it. ConfigError where a
    command fails or a package is missing."""
    with _locked(folder):
        found = find_environment(folder)
        if found is not None and found.version == build.version:
            say(f"{folder} has vLLM {found.version}; verifying")
            verify(folder)
            return found
        _clear(folder, say)
        _refuse_full_disk(folder, build)
        begun_s = time.monotonic()
        _make(build, folder, say)
        say("verifying: importing what a sidecar needs")
        versions = verify(folder)
        record = EnvironmentRecord(
            distribution=build.distribution,
            version=build.version,
            torch=versions["torch"],
            python=f"{sys.version_info.major}.{sys.version_info.minor}",
            made_s=round(time.monotonic() - begun_s, 1),
        )
        write_text(folder / RECORD, json.dumps(asdict(record), indent=2) + "\n", durable=False)
        (folder / HALF_MADE).unlink()
        return record


def verify(folder: Path) -> Mapping[str, str]:
    """Import in the environment what a sidecar imports; return versions. ConfigError names what is
    missing."""
    with tempfile.TemporaryDirectory(prefix="gyre-package-") as package:
        show_gyre_alone(Path(package))
        done = _run(
            [str(python_of(folder)), "-P", "-c", CHECK, *CHECKED],
            limit_s=VERIFY_S,
            environment=variables_for(
                Path(package), {**os.environ, "CUDA_VISIBLE_DEVICES": "", **QUIET, **KEEP_BYTECODE}
            ),
        )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ConfigError(
            f"the environment in {folder} is not whole: {last}",
            hint=f"remove {folder} and run: gyre sidecar install vllm",
        )
    return json.loads(done.stdout.strip().splitlines()[-1])


def refuse_missing(folder: Path) -> None:
    """Look for packages that were removed since the environment was made. ConfigError names them;
    the sidecar's start names what is missing deeper."""
    # -I: none of the variables of this process
    command = [str(python_of(folder)), "-I", "-c", LOOK, *NEEDED]
    hint = f"remove {folder} and run: gyre sidecar install vllm"
    try:
        done = _run(command, limit_s=LOOK_S, environment=os.environ)
    except OSError as error:
        raise ConfigError(
            f"the Python of the environment in {folder} cannot be started: {error.strerror}",
            hint=hint,
        ) from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ConfigError(f"the environment in {folder} is not whole: {last}", hint=hint)
    if missing := json.loads(done.stdout.strip().splitlines()[-1]):
        raise ConfigError(
            f"the environment in {folder} is not whole: it lacks {', '.join(missing)}", hint=hint
        )


QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
# pip compiled nothing: the first import of a module does, for all later starts, whatever the user
# has for other Pythons; without it each process compiles thousands of files
KEEP_BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}


def process_variables(build: VllmBuild, *, threads: int, eager: bool) -> dict[str, str]:
    """Return the variables that vLLM's processes are started with. Pure."""
    found = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", **KEEP_BYTECODE}
    # a start waits for its memory as long as the policy trains; the sidecar has its own deadline
    found["VLLM_ENGINE_READY_TIMEOUT_S"] = str(READY_S)
    if build.device == "cpu":
        found |= {
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the cores are the role's
        }
        if eager:
            # without it the sampler alone would be compiled, which takes as long as a start
            found["TORCHDYNAMO_DISABLE"] = "1"
    return found


def _make(build: VllmBuild, folder: Path, say: Callable[[str], None]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / HALF_MADE).touch()
    say(f"making a virtual environment in {folder}")
    _need([sys.executable, "-m", "venv", str(folder)], "making the environment")
    pip = [str(python_of(folder)), "-m", "pip", "--disable-pip-version-check", "install"]
    pip += ["--quiet", "--no-compile"]
    wanted = f"{build.distribution}=={build.version}"
    if build.requirements is None:
        say(f"installing {wanted} and what it needs")
        _need([*pip, wanted], f"installing {wanted}")
        return
    needs = Path(__file__).with_name(build.requirements)
    say(f"installing {wanted} and torch {build.torch}, by the versions of {needs.name}")
    # --no-deps: the file has them all, and vLLM's own pins name a torch of another index
    _need([*pip, "--no-deps", wanted, "-r", str(needs)], f"installing {wanted}")


def _clear(folder: Path, say: Callable[[str], None]) -> None:
    """Remove an environment of ours that is half-made or of another version."""
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not ((folder / HALF_MADE).exists() or (folder / RECORD).exists()):
        raise ConfigError(
            f"{folder} exists and is no environment of ours",
            hint="give another --folder, or remove it first",
        )
    say(f"removing what an earlier installation left in {folder}")
    shutil.rmtree(folder)


def _refuse_full_disk(folder: Path, build: VllmBuild) -> None:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free, need = shutil.disk_usage(there).free, ROOM_BYTES[build.device]
    if free < need:
        raise ConfigError(
            f"{there} has {free / 2**30:.1f} GiB free, and vLLM's environment needs about "
            f"{need / 2**30:.0f}",
            hint="free disk space, or give another --folder",
        )


def _need(command: Sequence[str], what: str) -> None:
    done = _run(command, limit_s=INSTALL_S, environment=dict(os.environ))
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        told = next((line for line in said if line.startswith("ERROR")), (said or [""])[-1])
        raise ConfigError(
            f"{what} failed with exit code {done.returncode}: {told}",
            hint="look at the network and the package index, and run the command again",
        )


def _run(
    command: Sequence[str], *, limit_s: float, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            list(command),
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=limit_s,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DeadlineError(
            f"{Path(command[0]).name} had not ended after {limit_s:g} s",
            hint="see what else uses network, disk and cores, and run the command again",
        ) from None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time make an environment."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    until_s = time.monotonic() + LOCK_S
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until_s:
                    raise DeadlineError(
                        f"another process was making {folder} for {LOCK_S:g} s",
                        hint="wait for it, or end it",
                    ) from None
                time.sleep(0.5)
        yield
