"""TLS: the server's certificate and key, checked before anything starts. In: two files, or none.
Out: whether there is TLS; ConfigError for files that do not serve."""

from __future__ import annotations

import ssl
from pathlib import Path

from gyre.core.errors import ConfigError


def check_tls_files(cert: Path | None, key: Path | None) -> bool:
    """Return whether the server speaks TLS. ConfigError for one file without the other, and for
    files that cannot be read, are no PEM, need a passphrase, or do not belong together."""
    if cert is None and key is None:
        return False
    if cert is None or key is None:
        given = "--tls-key" if cert is None else "--tls-cert"
        raise ConfigError(
            f"{given} is given alone", hint="give both --tls-cert and --tls-key, or neither"
        )
    for option, path in (("--tls-cert", cert), ("--tls-key", key)):
        try:
            path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"{option} {path} cannot be read: {error.strerror or error}",
                hint="give a PEM file that this user may read",
            ) from error
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key, password=lambda: "")  # never ask the terminal
    except ssl.SSLError as error:
        raise ConfigError(
            f"--tls-cert {cert} and --tls-key {key} do not serve: {error.reason or error}",
            hint="give a PEM certificate chain, and its own private key without a passphrase",
        ) from error
    return True
