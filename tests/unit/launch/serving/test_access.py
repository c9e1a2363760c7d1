"""Where a server listens, and who may change it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import Response

from gyre.core.errors import ConfigError
from gyre.launch.serving.access import Access, bind, make_access, refuse_open_bind
from gyre.server.admin import admin_routes
from gyre.server.bodies.schema import ApiError
from gyre.server.gateway.keys import create_key
from gyre.server.gateway.limits import KeyLimits


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_what_others_reach_is_refused_without_insecure(host) -> None:
    with pytest.raises(ConfigError, match="no key is asked for"):
        refuse_open_bind(host, insecure=False, has_keys=False)
    refuse_open_bind(host, insecure=True, has_keys=False)
    refuse_open_bind(host, insecure=False, has_keys=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_is_not(host) -> None:
    refuse_open_bind(host, insecure=False, has_keys=False)


@pytest.mark.parametrize(
    ("listens_on", "asks_for", "status"),
    [
        ("127.0.0.1", "127.0.0.1:8000", 200),
        ("127.0.0.1", "LOCALHOST:8000", 200),
        ("127.0.0.1", "app.localhost", 200),
        ("::1", "[::1]:8000", 200),
        ("127.0.0.1", "other.example:8000", 403),
        ("localhost", "127.0.0.1.other.example", 403),
        ("127.0.0.1", "localhost.other.example", 403),
        ("127.0.0.1", "[2001:db8::1]:8000", 403),
        ("0.0.0.0", "model.example:8000", 200),
    ],
)
def test_a_page_whose_name_leads_to_loopback_asks_nothing(listens_on, asks_for, status) -> None:
    """A browser takes it for this site, so its name alone tells."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await Response("fine")(scope, receive, send)

    async def ask() -> int:
        counted: list[str] = []
        app = make_access(None, None, host=listens_on).gate.guard(answer, count=counted.append)
        headers = {"host": asks_for, "sec-fetch-site": "same-origin"}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
            got = await client.get("http://127.0.0.1/v1/models", headers=headers)
        assert counted == (["wrong_host"] if got.status_code == 403 else [])
        return got.status_code

    assert asyncio.run(ask()) == status


def test_a_taken_port_is_said() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            bind("127.0.0.1", port)


def test_only_administrators_change_the_weights(tmp_path) -> None:
    """With keys, those of role admin; without, the key of a file; else nobody."""
    keys, file = tmp_path / "keys.json", tmp_path / "admin.key"
    secrets = {
        role: create_key(keys, name=role, role=role, limits=KeyLimits())[1]
        for role in ("user", "admin")
    }
    file.write_text("k" * 32)
    file.chmod(0o600)
    assert make_access(None, None).check_admin is None
    cases = [((keys, None), secrets["admin"]), ((None, file), "k" * 32)]
    for given, secret in cases:
        statuses = {
            sent: asyncio.run(change_weights(make_access(*given), sent))
            for sent in (secret, secrets["user"], "x" * 32, "")
        }
        assert statuses.pop(secret) == 200
        assert set(statuses.values()) <= {401, 403}, statuses
    with pytest.raises(ConfigError, match="--admin-key-file with --keys"):
        make_access(keys, file)


async def change_weights(access: Access, secret: str) -> int:
    """The status of a change that is asked for with this key."""

    class Weights:
        async def change(self, folder: Path, policy: str) -> int:
            return 1

    assert access.check_admin is not None
    app = Starlette(
        routes=admin_routes(access.check_admin, Weights(), "m"),
        middleware=[Middleware(access.gate.guard, count=lambda code: None)],
        exception_handlers={ApiError: refuse},
    )
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://127.0.0.1"
    ) as client:
        headers = {"authorization": f"Bearer {secret}"} if secret else {}
        answer = await client.post("/admin/weights", json={"path": "/a"}, headers=headers)
    return answer.status_code


async def refuse(http: Any, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()
