"""gyre keys: create, list, revoke. In: a key file, a key's limits. Out: its secret, once; the keys.
A running server takes the change within a second."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gyre.cli.answer import AsJson, answer

if TYPE_CHECKING:
    from gyre.server.gateway.limits import KeyLimits

app = typer.Typer(no_args_is_help=True, help="Create, list and revoke the API keys of gyre serve.")
KeyFile = Annotated[Path, typer.Option("--file", metavar="KEYS", help="The server's key file.")]
PerMinute = Annotated[int, typer.Option(min=0, help="At most this many a minute; 0 is no limit.")]


@app.command()
def create(
    file: KeyFile,
    name: Annotated[str, typer.Option(help="Whose it is, for the list.")] = "",
    requests_per_minute: PerMinute = 0,
    tokens_per_minute: PerMinute = 0,
    concurrent: Annotated[
        int, typer.Option(min=0, help="Requests at the same time at most; 0 is no limit.")
    ] = 0,
    expires_days: Annotated[
        int | None,
        typer.Option(min=1, max=36500, help="Valid for so many days; without, for ever."),
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="Allow it administration, too.")] = False,
    json: AsJson = False,
) -> None:
    """Make a key and print it, once: the file keeps a digest alone."""

    def body() -> Mapping[str, Any]:
        from gyre.server.gateway.limits import KeyLimits

        limits = KeyLimits(
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            concurrent_requests=concurrent,
        )
        return run_create(file, name, limits, is_admin=admin, valid_days=expires_days, quiet=json)

    answer(body, as_json=json)


@app.command(name="list")
def list_(file: KeyFile, json: AsJson = False) -> None:
    """Print the keys with their limits; their secrets are nowhere."""
    answer(lambda: run_list(file, quiet=json), as_json=json)


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="As gyre keys list prints it.")],
    file: KeyFile,
    json: AsJson = False,
) -> None:
    """Refuse a key from now on; answers under way end as they would."""
    answer(lambda: run_revoke(file, key_id, quiet=json), as_json=json)


def run_create(
    file: Path,
    name: str,
    limits: KeyLimits,
    *,
    is_admin: bool,
    valid_days: int | None,
    quiet: bool,
) -> Mapping[str, Any]:
    from gyre.server.gateway.keys import create_key

    role = "admin" if is_admin else "user"
    key, secret = create_key(file, name=name, role=role, limits=limits, valid_days=valid_days)
    if not quiet:
        print(secret)
        print(f"{key.key_id}: keep the key above; it is not shown again", file=sys.stderr)
    return {"key": secret} | key.as_dict()


def run_list(file: Path, *, quiet: bool) -> Mapping[str, Any]:
    from gyre.server.gateway.keys import as_time, read_keys, utc_now

    keys, now = read_keys(file), as_time(utc_now())
    if not quiet:
        for key in keys:
            limits = [f"{name} {most}" for name, most in key.as_dict()["limits"].items() if most]
            limits += [f"expires {key.expires}"] if key.expires else []
            state = "expired" if key.has_expired(now) else key.role
            state = "revoked" if key.is_revoked else state
            print(f"{key.key_id}  {state:7}  {key.created}  {key.name!r}  {', '.join(limits)}")
    return {"keys": [key.as_dict() for key in keys]}


def run_revoke(file: Path, key_id: str, *, quiet: bool) -> Mapping[str, Any]:
    from gyre.server.gateway.keys import revoke_key

    key = revoke_key(file, key_id)
    if not quiet:
        print(f"{key.key_id} is revoked")
    return key.as_dict()
