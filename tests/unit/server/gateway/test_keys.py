"""The key file: what it holds, who may read it, and that commands at the same time lose nothing."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.core.errors import ConfigError
from gyre.server.gateway import keys as module
from gyre.server.gateway.keys import as_time, create_key, read_keys, revoke_key
from gyre.server.gateway.limits import KeyLimits

LIMITS = KeyLimits(requests_per_minute=3, tokens_per_minute=40, concurrent_requests=2)


def create(path: Path, **fields: Any) -> tuple[module.ApiKey, str]:
    return create_key(path, **{"name": "a", "role": "user", "limits": LIMITS} | fields)


def test_a_key_comes_back_with_its_limits_and_without_its_secret(tmp_path) -> None:
    path = tmp_path / "keys.json"
    first, secret = create(path, name="über\n")
    second, other = create(path, role="admin", limits=KeyLimits())
    assert read_keys(path) == (first, second)
    assert re.fullmatch(r"gyre-[A-Za-z0-9_-]{43}", secret) and secret != other
    content = path.read_text()
    assert secret not in content and secret.removeprefix("gyre-") not in content
    assert first.sha256 in content and "sha256" not in first.as_dict()
    assert path.stat().st_mode & 0o777 == 0o600
    assert {one.name for one in tmp_path.iterdir()} == {"keys.json", ".keys.json.lock"}


def test_a_key_expires_at_its_second(tmp_path) -> None:
    begun = datetime(2030, 2, 27, 23, 30, 0, tzinfo=UTC)
    path = tmp_path / "keys.json"
    key, _ = create(path, valid_days=2, now=lambda: begun)
    assert key.expires == "2030-03-01T23:30:00+00:00" and read_keys(path) == (key,)
    end = begun + timedelta(days=2)
    assert key.is_valid(as_time(end - timedelta(seconds=1))) and not key.is_valid(as_time(end))
    other = end.astimezone(timezone(timedelta(hours=5)))  # the same moment elsewhere
    assert not key.is_valid(as_time(other))
    assert not revoke_key(path, key.key_id).is_valid(as_time(begun))
    assert create(path)[0].is_valid(as_time(begun + timedelta(days=99999)))


@given(
    st.datetimes(datetime(1970, 1, 1), datetime(9999, 12, 30), timezones=st.timezones()), st.data()
)
def test_the_order_of_texts_is_that_of_times(first, data) -> None:
    second = data.draw(st.datetimes(datetime(1970, 1, 1), datetime(9999, 12, 30)))
    second = second.replace(tzinfo=UTC, microsecond=0)
    whole = first.astimezone(UTC).replace(microsecond=0)
    assert (as_time(first) < as_time(second)) == (whole < second)


def test_a_file_that_others_could_read_is_theirs_no_more(tmp_path) -> None:
    path = tmp_path / "keys.json"
    create(path)
    path.chmod(0o644)
    (tmp_path / "keys.json.partial").write_text("left by a command that was killed")
    create(path)
    assert path.stat().st_mode & 0o777 == 0o600 and len(read_keys(path)) == 2


def test_a_link_stays_a_link(tmp_path) -> None:
    path, link = tmp_path / "keys.json", tmp_path / "link.json"
    create(path)
    link.symlink_to(path)
    create(link)
    assert link.is_symlink() and len(read_keys(path)) == 2


def test_a_revoked_key_stays_in_the_file(tmp_path) -> None:
    path = tmp_path / "keys.json"
    first, second = create(path)[0], create(path)[0]
    for _ in range(2):
        assert revoke_key(path, first.key_id).is_revoked
    assert [key.is_revoked for key in read_keys(path)] == [True, False]
    assert read_keys(path)[1] == second
    with pytest.raises(ConfigError, match="no key has the id 'nobody'"):
        revoke_key(path, "nobody")


def test_commands_at_the_same_time_lose_no_key(tmp_path) -> None:
    path = tmp_path / "keys.json"
    code = (
        "import sys; from pathlib import Path\n"
        "from gyre.server.gateway.keys import create_key\n"
        "from gyre.server.gateway.limits import KeyLimits\n"
        "for _ in range(8):\n"
        "    create_key(Path(sys.argv[1]), name='', role='user', limits=KeyLimits())\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    many = [
        subprocess.Popen([sys.executable, "-c", code, str(path)], env=environment) for _ in range(3)
    ]
    assert [one.wait(60) for one in many] == [0, 0, 0]
    assert len(read_keys(path)) == 24


def test_a_lock_that_is_held_is_not_waited_for_for_ever(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module, "LOCK_S", 0.05)
    with (tmp_path / ".keys.json.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="held its lock"):
            create(tmp_path / "keys.json")
    create(tmp_path / "keys.json")


def row(**fields: Any) -> dict[str, Any]:
    limits = {"requests_per_minute": 0, "tokens_per_minute": 0, "concurrent_requests": 0}
    key = {"key_id": "k", "name": "", "role": "user", "sha256": "0" * 64, "created": ""}
    return key | {"limits": limits, "is_revoked": False, "expires": ""} | fields


BAD = {
    "no JSON": ("{", "not readable JSON"),
    "a list": ("[]", "not a mapping"),
    "another version": (json.dumps({"version": 2, "keys": []}), "version"),
    "an unknown limit": (
        json.dumps({"version": 1, "keys": [row(limits={"images_per_minute": 1})]}),
        "images_per_minute",
    ),
    "a negative limit": (
        json.dumps({"version": 1, "keys": [row(limits={"tokens_per_minute": -1})]}),
        "greater than or equal to 0",
    ),
    "text for a number": (
        json.dumps({"version": 1, "keys": [row(limits={"tokens_per_minute": "9"})]}),
        "valid integer",
    ),
    "an unknown role": (json.dumps({"version": 1, "keys": [row(role="root")]}), "role"),
    "no digest": (json.dumps({"version": 1, "keys": [row(sha256="abc")]}), "sha256"),
    "one digest twice": (
        json.dumps({"version": 1, "keys": [row(), row(key_id="l")]}),
        "same sha256",
    ),
    "one id twice": (
        json.dumps({"version": 1, "keys": [row(), row(sha256="1" * 64)]}),
        "same key_id",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_is_not_whole_is_refused_and_not_replaced(case, tmp_path) -> None:
    text, said = BAD[case]
    path = tmp_path / "keys.json"
    path.write_text(text)
    for act in (lambda: read_keys(path), lambda: create(path), lambda: revoke_key(path, "k")):
        with pytest.raises(ConfigError, match=said):
            act()
    assert path.read_text() == text


def test_the_good_row_of_those_cases_is_read(tmp_path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"version": 1, "keys": [row()]}))
    assert read_keys(path)[0].key_id == "k"


def test_a_missing_file_and_a_missing_folder_are_said(tmp_path) -> None:
    with pytest.raises(ConfigError, match="is not there") as caught:
        read_keys(tmp_path / "keys.json")
    assert "gyre keys create" in caught.value.hint
    with pytest.raises(ConfigError, match="cannot be written"):
        create(tmp_path / "nowhere" / "keys.json")
