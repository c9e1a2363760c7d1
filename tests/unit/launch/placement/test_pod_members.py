"""What a run gives to a member, and what keeps strangers out: the token's file, the address, files
that arrive whole."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from gyre.cluster.worker.handshake import NAME
from gyre.cluster.worker.server import Context, WorkerServer
from gyre.core.errors import InputError
from gyre.core.records import RoleSpec
from gyre.launch.placement.member import MemberEnd, build_member
from gyre.launch.placement.pod_members import (
    digest_files,
    keep_token,
    listening_address,
    name_here,
    read_token,
    split_address,
)


def test_a_token_is_made_once_and_kept_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "members.token"
    before = os.umask(0)
    try:
        token = keep_token(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600 and len(token) == 64
    assert keep_token(path) == token, "a run that is resumed keeps its members' token"
    assert keep_token(tmp_path / "other") != token


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_a_token_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "members.token"
    token = keep_token(path).decode()
    path.chmod(mode)
    with pytest.raises(InputError, match="others may read") as raised:
        keep_token(path)
    assert token not in str(raised.value)


def test_a_token_cut_off_or_missing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "members.token"
    with pytest.raises(InputError, match="cannot be read"):
        read_token(path)
    path.touch(0o600)
    path.write_text("short\n")
    with pytest.raises(InputError, match="5 bytes"):
        read_token(path)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("10.0.0.7:7000", ("10.0.0.7", 7000)),
        ("trainer.pods:0", ("trainer.pods", 0)),
        ("[fd00::7]:7000", ("fd00::7", 7000)),
    ],
)
def test_addresses(text: str, found: tuple[str, int]) -> None:
    assert split_address(text) == found == listening_address(text)


@pytest.mark.parametrize("text", ["", "7000", ":7000", "host:", "host:-1", "a:65536", "fd00::7:1"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(InputError, match="is no address"):
        split_address(text)


@pytest.mark.parametrize("text", ["0.0.0.0:7000", "[::]:7000", "10.0.0.7:65535"])
def test_an_address_is_one_that_members_can_use(text: str) -> None:
    with pytest.raises(InputError, match="members get this host"):
        listening_address(text)


@pytest.mark.parametrize("host", ["node-7.pods", "NODE_7", "-", "x" * 200, "é"])
def test_a_host_gives_a_name_that_is_one(monkeypatch, host: str) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: host)
    assert NAME.fullmatch(name_here())


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({"tokenizer.json": b"other"}, "did not arrive whole"),
        ({"tokenizer.json": b"{}", "more": b""}, "did not arrive whole"),
        ({"../tokenizer.json": b"{}"}, "no file's name"),
    ],
)
def test_files_that_are_damaged_or_reach_elsewhere_are_refused(
    tmp_path: Path, files: dict[str, bytes], match: str
) -> None:
    folder = tmp_path / "member"
    folder.mkdir()
    whole = files if "name" in match else {"tokenizer.json": b"{}"}
    given: dict[str, Any] = {
        "config_json": "{}",
        "model": b"",
        "tokenizer_files": files,
        "digest": digest_files(whole),
        "folder": folder,
        "token": b"t" * 32,
        "drain_s": 1.0,
        "end": MemberEnd(str(folder)),
    }
    with pytest.raises(InputError, match=match):
        asyncio.run(build_member(Context("member-a"), **given))
    assert [path.name for path in tmp_path.iterdir()] == ["member"]


def test_digests_tell_where_a_file_ends() -> None:
    assert digest_files({"a": b"bc"}) != digest_files({"ab": b"c"})
    assert digest_files({"a": b"1", "b": b""}) != digest_files({"a": b"", "b": b"1"})


def test_a_member_builds_nothing_but_a_member() -> None:
    spec = RoleSpec(name="member-a", builder="os:system", arguments={"command": "true"})
    built = asyncio.run(WorkerServer(spec, builders={"x:y": build_member}).build())
    assert built.failure is not None and isinstance(built.failure.error, InputError)
    assert "os:system" in built.failure.error.message
