"""Access: where a server listens, who may ask it, and who may change it. In: an address, key files.
Out: a listening socket, a gate, the routes of administrators. ConfigError for what cannot be had.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from starlette.requests import Request as HttpRequest
from starlette.routing import Route

from gyre.core.errors import ConfigError
from gyre.launch.serving.served_weights import ServedWeights
from gyre.launch.serving.telemetry import write_server_event
from gyre.server.admin import admin_routes, check_key, read_key_digest
from gyre.server.gateway.gate import Gate, KeyGate, OpenGate
from gyre.server.gateway.key_store import KeyStore


@dataclass(frozen=True, slots=True)
class Access:
    """Who may ask, and who may change the server."""

    gate: Gate
    check_admin: Callable[[HttpRequest], None] | None  # None: no one may

    def admin_routes(self, weights: ServedWeights, name: str) -> Sequence[Route]:
        """Return the routes that change the server, empty without an administrator."""
        return () if self.check_admin is None else admin_routes(self.check_admin, weights, name)


def make_access(
    keys: Path | None,
    admin_key_file: Path | None,
    *,
    host: str = "127.0.0.1",
    open_paths: Collection[str] = (),
) -> Access:
    """Return who may do what, of a server that listens on `host`. With keys, those of role admin
    are for administrators; without, the key of a file is. `open_paths` need none. ConfigError for a
    file that is not whole."""
    if keys is not None:
        if admin_key_file is not None:
            raise ConfigError(
                "--admin-key-file with --keys: a server with keys has administrators among them",
                hint=f"leave it out, and make a key: gyre keys create --admin --file {keys}",
            )
        gate = KeyGate(KeyStore(keys, emit=write_server_event), open_paths=open_paths)
        return Access(gate, lambda http: gate.require_admin(http.scope))
    gate = OpenGate(loopback_only=is_loopback(host))
    if admin_key_file is None:
        return Access(gate, None)
    return Access(gate, partial(check_key, key_digest=read_key_digest(admin_key_file)))


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address to listen on."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def refuse_open_bind(host: str, *, insecure: bool, has_keys: bool) -> None:
    """ConfigError for an address that others can reach, while no key is needed."""
    if not (is_loopback(host) or insecure or has_keys):
        raise ConfigError(
            f"--host {host}: others could use the model, and no key is asked for",
            hint="listen on 127.0.0.1, give --keys, or --insecure where the network is trusted",
        )


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. ConfigError where the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
        return listener
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            hint="give another --port, or 0 for a free one",
        ) from error


def find_url(listener: socket.socket, *, has_tls: bool) -> str:
    """Return the address that clients ask."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if has_tls else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
