"""Environment of the peers: TRL, verl and lm-eval beside the torch of `.venv`. In: a script and its cases.
Out: its answer.

    python tests/peers/environment.py FOLDER      makes it (`make peers`, part of `make test-all`; about 10 seconds)
    ask(script, cases)                            runs a script in it, from a test

The environment holds the packages named here and nothing else. All other modules are those of
`.venv`, seen through a .pth file: there is one torch, and both sides of a comparison compute with
it. Tests never import TRL, verl or lm-eval themselves; what calls them is a script `ask_*.py`, started as
`python -P SCRIPT CASES.json ANSWER.json`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

PEERS = ("trl==1.16.0", "verl==0.9.1", "lm_eval==0.4.13")
NEEDS = (
    "accelerate==1.15.0",  # trl's trainers, lm-eval's models
    "codetiming==1.4.0",  # this and those up to tensordict: verl.trainer.ppo
    "cloudpickle==3.1.2",
    "omegaconf==2.4.0",
    "orjson==3.13.0",
    "pyvers==0.2.3",
    "tensordict==0.15.3",
    "sacrebleu==2.6.0",  # this and those up to lxml: lm-eval's metrics
    "colorama==0.4.6",
    "portalocker==4.4.2",
    "lxml==6.1.3",
    "tenacity==9.2.1",  # this and all below: lm-eval's client of an API
    "aiohttp==3.14.5",
    "aiohappyeyeballs==2.7.1",
    "aiosignal==1.4.0",
    "frozenlist==1.8.0",
    "multidict==7.2.1",
    "propcache==0.5.4",
    "yarl==1.25.1",
)
"""What the modules that we call import and `.venv` lacks."""

FOLDER = Path(__file__).parents[2] / ".venvs" / "peers"


def build(folder: Path) -> None:
    """Make the environment in `folder`, from scratch. A command that fails raises
    CalledProcessError."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True
    )
    python = str(folder / "bin" / "python")
    where = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    )
    (Path(where.strip()) / "gyre_venv.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "--quiet",
        "--disable-pip-version-check",
    ]
    subprocess.run([*pip, "install", "--no-compile", "--no-deps", *PEERS, *NEEDS], check=True)


def ask(script: Path, cases: Any, *, more: tuple[str, ...] = (), limit_s: float = 240.0) -> Any:
    """Run `script` in the environment: `cases` go in and its answer comes out as JSON files. `more`
    are arguments after these two.

    Fails with AssertionError when there is no environment or the script fails.
    """
    python = FOLDER / "bin" / "python"
    missing = (
        f"no environment of the peers in {FOLDER.parent.name}/{FOLDER.name}: run `make "
        "peers` with the package index in reach"
    )
    assert (FOLDER / ".installed").exists(), missing
    with tempfile.TemporaryDirectory() as folder:
        given, answer = Path(folder, "cases.json"), Path(folder, "answer.json")
        given.write_text(json.dumps(cases))
        command = [str(python), "-P", str(script), str(given), str(answer), *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
        assert done.returncode == 0, (
            f"{script.name} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        )
        return json.loads(answer.read_text())


if __name__ == "__main__":
    build(Path(sys.argv[1]))
