"""gyre sidecar: engines beside a run. In: the run's address and its token. Out: an engine that
works for the run until it ends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from gyre.cli.answer import answer, loading

app = typer.Typer(no_args_is_help=True, help="Run engines beside a run, on this host.")


@app.callback()
def options() -> None:
    """Run engines beside a run, on this host."""


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
