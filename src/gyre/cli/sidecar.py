"""gyre sidecar: engines in processes of their own. In: an engine's name, or a run's address and its
token. Out: an environment for that engine, or an engine that works for the run until it ends."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from gyre.cli.answer import AsJson, answer, loading

app = typer.Typer(
    no_args_is_help=True, help="Install engines such as vLLM; join a run with an engine."
)


@app.callback()
def options() -> None:
    """Install engines such as vLLM; join a run with an engine."""


@app.command()
def install(
    name: Annotated[str, typer.Argument(metavar="vllm", help="Which engine: vllm.")],
    folder: Annotated[
        Path | None,
        typer.Option(help="Where; left out: beside those of the user's other tools."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Install an engine into a Python environment of its own, and verify it.

    It is the build that Gyre is tested with: for CUDA where there is a GPU, else for the CPU.
    What is there already is verified."""
    answer(lambda: run_install(name, folder, quiet=json), as_json=json)


def run_install(name: str, folder: Path | None, *, quiet: bool) -> Mapping[str, Any]:
    from gyre.core.errors import ConfigError
    from gyre.launch.sidecar import find_device
    from gyre.sidecars.vllm.environment import default_folder, install
    from gyre.sidecars.vllm.versions import build_for

    if name != "vllm":
        raise ConfigError(f"there is no sidecar '{name}'", hint="gyre sidecar install vllm")
    build = build_for(find_device())
    where = (folder or default_folder(build)).absolute()
    stream = sys.stderr if quiet else sys.stdout
    record = install(build, where, say=lambda text: print(text, file=stream, flush=True))
    if not quiet:
        print(
            f"vLLM {record.version} with torch {record.torch} is in {where}"
            + (f'; name it as engine.vllm.environment = "{where}"' if folder else "")
        )
    return {"folder": str(where), **asdict(record)}


@app.command()
def join(
    address: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="Of the run: cluster.members_address.")
    ],
    token_file: Annotated[
        Path, typer.Option(help="Copy of members.token in the run's folder, of mode 600.")
    ],
    name: Annotated[str, typer.Option(help="Of this member; left out: the host's name.")] = "",
    drain_s: Annotated[
        float, typer.Option(min=0.0, help="Seconds for answers under way, after SIGTERM.")
    ] = 30.0,
) -> None:
    """Generate rollouts for a run in a pod on another host, until it ends or a signal comes.

    SIGTERM lets answers under way end; a second one ends them."""
    answer(lambda: run_join(address, token_file, name=name, drain_s=drain_s), as_json=False)


def run_join(address: str, token_file: Path, *, name: str, drain_s: float) -> Mapping[str, Any]:
    with loading():
        from gyre.launch.placement.member import join_run

    join_run(address, token_file, name=name, drain_s=drain_s)
    return {}
