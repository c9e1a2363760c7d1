"""A running server's keys follow the file, and survive a file that is not whole."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gyre.core.errors import ConfigError
from gyre.core.events import check_event
from gyre.server.gateway.key_store import LOOK_S, KeyStore
from gyre.server.gateway.keys import create_key, revoke_key
from gyre.server.gateway.limits import KeyLimits


class Watched:
    """A store over a clock that the test moves."""

    def __init__(self, path: Path) -> None:
        self.now_s, self.events = 100.0, []
        self.store = KeyStore(path, emit=self.emit, clock_s=lambda: self.now_s)

    def emit(self, kind: str, /, **fields: Any) -> None:
        check_event(kind, list(fields))
        self.events.append((kind, fields))

    def later(self, secret: str) -> bool:
        """Whether the secret is a key's, after the next look."""
        self.now_s += LOOK_S
        return self.store.find(secret) is not None


def create(path: Path) -> tuple[str, str]:
    key, secret = create_key(path, name="", role="user", limits=KeyLimits())
    return key.key_id, secret


def test_new_and_revoked_keys_count_after_the_next_look(tmp_path) -> None:
    path = tmp_path / "keys.json"
    first_id, first = create(path)
    watched = Watched(path)
    assert watched.later(first) and not watched.later("gyre-" + "a" * 43)
    _, second = create(path)
    revoke_key(path, first_id)
    watched.now_s += LOOK_S / 2
    assert watched.store.find(first) is not None and watched.store.find(second) is None
    assert watched.later(second) and not watched.later(first)
    ((kind, fields),) = watched.events
    assert kind == "serve.keys_loaded" and (fields["keys"], fields["usable"]) == (2, 1)


def test_a_key_ends_when_it_expires_without_a_look_at_the_file(tmp_path) -> None:
    path, begun = tmp_path / "keys.json", datetime(2030, 1, 1, tzinfo=UTC)
    limits = KeyLimits()
    _, secret = create_key(
        path, name="", role="user", limits=limits, valid_days=1, now=lambda: begun
    )
    moments = iter([begun, begun + timedelta(hours=23.9), begun + timedelta(days=1)])
    store = KeyStore(path, emit=print, clock_s=lambda: 0.0, now=lambda: next(moments))
    assert [store.find(secret) is not None for _ in range(3)] == [True, True, False]


def test_a_file_that_breaks_leaves_the_keys_and_is_said_once(tmp_path) -> None:
    path = tmp_path / "keys.json"
    _, secret = create(path)
    whole = path.read_bytes()
    watched = Watched(path)
    path.write_text('{"version": 1')
    assert all(watched.later(secret) for _ in range(3))
    path.unlink()
    assert all(watched.later(secret) for _ in range(3))
    kinds = [kind for kind, _ in watched.events]
    assert kinds == ["serve.keys_unreadable"] * 2  # no JSON, then not there
    path.write_bytes(whole)
    assert watched.later(secret)
    assert [kind for kind, _ in watched.events][2:] == ["serve.keys_loaded"]


def test_at_the_start_it_must_be_whole(tmp_path) -> None:
    with pytest.raises(ConfigError):
        Watched(tmp_path / "keys.json")


@pytest.mark.parametrize("secret", ["", "gyre-", "ü", "\udcff", "a" * 100_000])
def test_what_is_no_key_is_unknown(secret, tmp_path) -> None:
    create(tmp_path / "keys.json")
    assert not Watched(tmp_path / "keys.json").later(secret)
