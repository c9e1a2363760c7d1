"""gyre sidecar: make the environments that engines of other projects run in. In: a name, a folder.
Out: what the environment has."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from gyre.cli.answer import AsJson, answer

app = typer.Typer(no_args_is_help=True, help="Make the environments of engines such as vLLM.")


@app.callback()
def options() -> None:
    """Make the environments of engines such as vLLM."""


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
