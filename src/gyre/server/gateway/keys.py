"""Keys: the API keys of a server, kept in a file. In: the file's path, what a command asks for.
Out: the keys; the file, replaced whole; a new secret, once.

A secret is `gyre-` and 43 random characters. The file has its SHA-256 alone. A slow hash, as for
passwords, would protect nothing more: 256 random bits cannot be guessed, however fast one tries.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from gyre.core.errors import ConfigError, InputError
from gyre.core.files import read_json, replacing, try_lock
from gyre.server.gateway.limits import KeyLimits

PREFIX = "gyre-"
SECRET_BYTES = 32
MOST_FILE_BYTES = 16 << 20
LOCK_S = 10.0  # longest wait for another command that changes the file
LOCK_POLL_S = 0.02
Role = Literal["user", "admin"]
TIME = r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00)?$"  # as `as_time` writes it


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One key, without its secret."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    key_id: Annotated[str, Field(min_length=1, max_length=64)]
    name: Annotated[str, Field(max_length=200)]
    role: Role
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]  # of the secret
    created: str  # UTC, ISO 8601
    limits: KeyLimits
    is_revoked: bool = False
    # UTC, ISO 8601; "" is never
    expires: Annotated[str, Field(pattern=TIME)] = ""

    def is_valid(self, now: str) -> bool:
        """Return whether it lets its client in. `now` has the form of `created`, in which the order
        of texts is that of times. Pure."""
        return not self.is_revoked and not self.has_expired(now)

    def has_expired(self, now: str) -> bool:
        """Return whether its time is over. Pure."""
        return bool(self.expires) and now >= self.expires

    def as_dict(self) -> dict[str, Any]:
        """Return what may be shown of it."""
        return {name: value for name, value in asdict(self).items() if name != "sha256"}


class _KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    version: Literal[1]
    keys: list[ApiKey]


def as_time(moment: datetime) -> str:
    """Return a time as the key file has it: UTC, ISO 8601, to the second."""
    return moment.astimezone(UTC).isoformat(timespec="seconds")


def utc_now() -> datetime:
    return datetime.now(UTC)


def digest(secret: str) -> str:
    """Return what the file keeps of a secret."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """Return all keys of the file, revoked ones too. ConfigError where it is not whole."""
    hint = f"make one with: gyre keys create --file {path}; or restore the file"
    try:
        rows = read_json(path, max_bytes=MOST_FILE_BYTES)
        found = _KeyFile.model_validate_json(json.dumps(rows))
    except InputError as error:
        raise ConfigError(f"key file: {error.message}", hint=hint) from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"key file {path}: {place}: {first['msg']}", hint=hint) from None
    for name in ("key_id", "sha256"):
        if len({getattr(key, name) for key in found.keys}) < len(found.keys):
            raise ConfigError(f"key file {path}: two keys have the same {name}", hint=hint)
    return tuple(found.keys)


def create_key(
    path: Path,
    *,
    name: str,
    role: Role,
    limits: KeyLimits,
    valid_days: int | None = None,
    now: Callable[[], datetime] = utc_now,
) -> tuple[ApiKey, str]:
    """Add a key to the file, which is made where it is missing. Return the key and its secret,
    which is kept nowhere. With `valid_days` it expires so long after now."""
    created = now()
    secret = PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    key = ApiKey(
        key_id=f"key-{secrets.token_hex(6)}",
        name=name,
        role=role,
        sha256=digest(secret),
        created=as_time(created),
        limits=limits,
        expires="" if valid_days is None else as_time(created + timedelta(days=valid_days)),
    )
    with _locked(path):
        _write(path, [*(read_keys(path) if path.exists() else ()), key])
    return key, secret


def revoke_key(path: Path, key_id: str) -> ApiKey:
    """Mark a key as revoked, and return it; one that is revoked stays so. ConfigError where no key
    has the id."""
    with _locked(path):
        keys = read_keys(path)
        found = next((key for key in keys if key.key_id == key_id), None)
        if found is None:
            raise ConfigError(
                f"no key has the id {key_id[:64]!r}", hint=f"gyre keys list --file {path}"
            )
        revoked = replace(found, is_revoked=True)
        _write(path, [revoked if key is found else key for key in keys])
    return revoked


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other commands from changing the file meanwhile. The lock is on a file beside it, which
    stays: the key file itself is replaced."""
    lock = path.with_name(f".{path.name}.lock")
    try:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        ends_s = time.monotonic() + LOCK_S
        while not try_lock(handle):
            if time.monotonic() > ends_s:
                raise ConfigError(
                    f"key file {path}: another command has held its lock for {LOCK_S:g} s",
                    hint=f"end that command; it holds {lock}",
                )
            time.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(handle)


def _write(path: Path, keys: Sequence[ApiKey]) -> None:
    """Replace the file; its owner alone may read it."""
    rows = TypeAdapter(list[ApiKey]).dump_json(list(keys), indent=1)
    try:
        with replacing(path.resolve(), durable=True) as aside:
            aside.unlink(missing_ok=True)  # of a command that was killed
            handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(b'{"version": 1, "keys": ' + rows + b"}\n")
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"key file {path} cannot be written: {error.strerror or error}",
        hint="give a --file in a folder that exists and can be written",
    )
