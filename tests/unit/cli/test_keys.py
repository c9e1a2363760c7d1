"""gyre keys: what is printed, and what a mistake is answered with."""

from __future__ import annotations

import json
from datetime import date, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gyre.cli.main import app
from gyre.server.gateway.keys import digest


def keys(*argv: str | Path) -> tuple[int, str]:
    """Exit code and stdout of the command."""
    done = CliRunner().invoke(app, ["keys", *map(str, argv)])
    return done.exit_code, done.stdout


def test_a_key_is_printed_once_and_then_listed_and_revoked(tmp_path) -> None:
    file = tmp_path / "keys.json"
    options = ["--name", "ann", "--requests-per-minute", "5", "--tokens-per-minute", "700"]
    code, out = keys("create", "--file", file, *options, "--concurrent", "2")
    (secret,) = out.splitlines()
    assert code == 0 and secret.startswith("gyre-") and len(secret) >= 37
    code, out = keys("create", "--file", file, "--admin", "--json")
    made = json.loads(out)
    assert code == 0 and made["role"] == "admin" and made["key"].startswith("gyre-")
    listed = json.loads(keys("list", "--file", file, "--json")[1])["keys"]
    limits = {"requests_per_minute": 5, "tokens_per_minute": 700, "concurrent_requests": 2}
    assert [(key["name"], key["role"]) for key in listed] == [("ann", "user"), ("", "admin")]
    assert listed[0]["limits"] == limits and not listed[0]["is_revoked"]
    for text in (keys("list", "--file", file)[1], json.dumps(listed), file.read_text()):
        assert secret not in text and made["key"] not in text
    assert digest(secret) in file.read_text()
    code, out = keys("revoke", made["key_id"], "--file", file, "--json")
    assert code == 0 and json.loads(out)["is_revoked"]
    text = keys("list", "--file", file)[1].splitlines()
    assert "'ann'" in text[0] and "tokens_per_minute 700" in text[0] and "revoked" in text[1]


def test_a_key_may_expire(tmp_path) -> None:
    file = tmp_path / "keys.json"
    made = json.loads(keys("create", "--file", file, "--expires-days", "30", "--json")[1])
    assert date.fromisoformat(made["expires"][:10]) - date.fromisoformat(
        made["created"][:10]
    ) == timedelta(days=30)
    assert f"expires {made['expires']}" in keys("list", "--file", file)[1]
    ended = json.loads(file.read_text())
    ended["keys"][0]["expires"] = "2001-01-01T00:00:00+00:00"
    file.write_text(json.dumps(ended))
    assert "  expired  " in keys("list", "--file", file)[1]
    assert keys("create", "--file", file, "--expires-days", "0")[0] == 2


@pytest.mark.parametrize("argv", [["list"], ["revoke", "key-1"]])
def test_a_missing_file_is_an_error_with_what_to_do(argv, tmp_path) -> None:
    code, out = keys(*argv, "--file", tmp_path / "keys.json", "--json")
    error = json.loads(out.splitlines()[-1])["error"]
    assert code == 2 and error["kind"] == "config" and "gyre keys create" in error["hint"]
    assert not (tmp_path / "keys.json").exists()


def test_a_negative_limit_is_refused(tmp_path) -> None:
    code, _ = keys("create", "--file", tmp_path / "keys.json", "--tokens-per-minute", "-1")
    assert code == 2 and not (tmp_path / "keys.json").exists()
