"""Certificates that serve, and what is said of those that do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from certificates import make_certificate
from gyre.core.errors import ConfigError
from gyre.server.gateway.tls import check_tls_files


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


def test_a_pair_serves_and_none_is_plain(files) -> None:
    assert check_tls_files(*files) and not check_tls_files(None, None)


def test_one_alone_is_refused(files) -> None:
    for pair in ((files[0], None), (None, files[1])):
        with pytest.raises(ConfigError, match="is given alone"):
            check_tls_files(*pair)


def test_files_that_do_not_serve_are_named(files, tmp_path) -> None:
    cert, key = files
    other = make_certificate(tmp_path)
    locked = make_certificate(tmp_path / "locked", passphrase="a passphrase")
    text = tmp_path / "text"
    text.write_text("no PEM")
    for pair in ((cert, other[1]), (cert, text), (text, key), (key, cert), locked):
        with pytest.raises(ConfigError, match="do not serve") as caught:
            check_tls_files(*pair)
        assert "private key" in caught.value.hint
    for pair in ((tmp_path / "nothing", key), (cert, tmp_path / "nothing"), (cert, tmp_path)):
        with pytest.raises(ConfigError, match="cannot be read"):
            check_tls_files(*pair)
