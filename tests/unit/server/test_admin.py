"""POST /admin/weights: who may, and what each end of a change answers."""

from __future__ import annotations

import asyncio
import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from gyre.core.errors import (
    ConfigError,
    DeadlineError,
    InputError,
    MemoryBudgetError,
    RankError,
    SnapshotError,
)
from gyre.server.admin import ChangeRunning, admin_routes, check_key, read_key_digest
from gyre.server.app import make_app
from gyre.server.metrics.server_metrics import ServerMetrics

KEY = "k" * 20


class Changer:
    """Does as it is told."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.asked = error, []

    async def change(self, folder: Path, policy: str) -> int:
        self.asked.append((folder, policy))
        if self.error is not None:
            raise self.error
        return 3


def make(changer: Changer | None, events: list[Any]) -> Starlette:
    def emit(kind: str, /, **fields: Any) -> None:
        events.append((kind, fields))

    digest = hashlib.sha256(KEY.encode()).hexdigest()
    routes = (
        () if changer is None else admin_routes(partial(check_key, key_digest=digest), changer, "m")
    )
    no: Any = None  # neither engine nor model is asked
    metrics = ServerMetrics("m", context_tokens=8, inspect=no)
    return make_app(no, no, emit=emit, metrics=metrics, more_routes=routes)


def post(
    changer: Changer | None, body: Any = None, header: str = f"Bearer {KEY}"
) -> httpx.Response:
    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(make(changer, []), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
            headers = {"authorization": header} if header else {}
            sent = {"path": "/a/b"} if body is None else body
            return await client.post("/admin/weights", json=sent, headers=headers)

    return asyncio.run(main())


def test_the_key_changes_the_weights() -> None:
    changer = Changer()
    answer = post(changer, {"path": "/a/b", "policy": "continue"})
    assert (answer.status_code, answer.json()) == (200, {"version": 3, "model": "m"})
    assert post(changer).status_code == 200
    assert changer.asked == [(Path("/a/b"), "continue"), (Path("/a/b"), "drain")]


@pytest.mark.parametrize(
    "header", ["", f"Basic {KEY}", "Bearer", "Bearer x", f"Bearer {KEY}x", KEY]
)
def test_without_the_key_nothing_is_changed_or_read(header) -> None:
    changer = Changer()
    answer = post(changer, {"what": "no body of ours"}, header)
    assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    assert KEY not in answer.text and not changer.asked


def test_without_a_key_file_there_is_no_route() -> None:
    assert post(None).status_code == 404


@pytest.mark.parametrize(
    "body",
    [{}, {"path": 3}, {"path": "/a", "policy": "keep_prefix"}, {"path": "/a", "force": True}],
)
def test_a_body_that_does_not_fit_is_refused(body) -> None:
    changer = Changer()
    assert post(changer, body).status_code == 400 and not changer.asked


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InputError("a shard is missing"), 400, "invalid_value"),
        (SnapshotError("a shard is missing"), 400, "invalid_value"),
        (ChangeRunning("a shard is missing"), 409, "change_running"),
        (RankError("a shard is missing"), 503, "engine_unavailable"),
        (MemoryBudgetError("a shard is missing"), 503, "engine_unavailable"),
        (DeadlineError("a shard is missing"), 504, "deadline_exceeded"),
        (RuntimeError("of ours"), 500, "server_fault"),
    ],
)
def test_a_change_that_fails_says_why(error, status, code) -> None:
    answer = post(Changer(error))
    assert answer.status_code == status and answer.json()["error"]["code"] == code
    assert ("a shard is missing" in answer.json()["error"]["message"]) == (status != 500)


def key_file(folder: Path, content: bytes, mode: int = 0o600) -> Path:
    path = folder / "key"
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_key_file_is_read(tmp_path, mode) -> None:
    path = key_file(tmp_path, f"{KEY}\n".encode(), mode)
    assert read_key_digest(path) == hashlib.sha256(KEY.encode()).hexdigest()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_a_key_file_that_others_can_use_is_refused(tmp_path, mode) -> None:
    with pytest.raises(ConfigError, match="others than its owner") as refused:
        read_key_digest(key_file(tmp_path, KEY.encode(), mode))
    assert "chmod 600" in refused.value.hint


@pytest.mark.parametrize(
    "content", [b"", b"short", b"two words of a key here", b"a" * 20 + b"\nb", b"\xff" * 20]
)
def test_a_key_file_without_a_key_is_refused(tmp_path, content) -> None:
    with pytest.raises(ConfigError, match="admin-key-file"):
        read_key_digest(key_file(tmp_path, content))
    with pytest.raises(ConfigError, match="cannot read"):
        read_key_digest(tmp_path / "none")
