"""Admin: the routes that change the server, for a client with the admin key. In: the check of that
key, what changes the weights. Out: routes of the application.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gyre.core.errors import ConfigError, DeadlineError, InputError, MemoryBudgetError, RankError
from gyre.server.bodies.read_body import read_body
from gyre.server.bodies.schema import ApiError
from gyre.server.bodies.strict_body import StrictBody
from gyre.server.gateway.gate import key_error, read_secret
from gyre.server.gateway.keys import digest

LEAST_KEY_CHARS = 16


class ChangeRunning(InputError):
    """The weights are being changed already."""


class WeightChanger(Protocol):
    """Whatever serves the model."""

    async def change(self, folder: Path, policy: Literal["drain", "continue"]) -> int:
        """Serve a checkpoint, and return its version. GyreError leaves the last version there."""
        ...


class WeightsBody(StrictBody):
    """POST /admin/weights."""

    path: str  # of a checkpoint's folder on the server's host
    policy: Literal["drain", "continue"] = "drain"


def admin_routes(
    check: Callable[[HttpRequest], None], weights: WeightChanger, model_name: str
) -> Sequence[Route]:
    """Return the routes. `check` raises ApiError for a request without an administrator's key."""

    async def change_weights(http: HttpRequest) -> Response:
        check(http)
        body = await read_body(http, WeightsBody)
        try:
            version = await weights.change(Path(body.path), body.policy)
        except ChangeRunning as error:
            raise ApiError(409, error.message, code="change_running") from None
        except DeadlineError as error:
            raise ApiError(504, error.message) from None
        except (RankError, MemoryBudgetError) as error:
            raise ApiError(503, error.message) from None
        return JSONResponse({"version": version, "model": model_name})

    return [Route("/admin/weights", change_weights, methods=["POST"])]


def check_key(http: HttpRequest, key_digest: str) -> None:
    """ApiError unless the request has the key."""
    if not hmac.compare_digest(digest(read_secret(http.headers)), key_digest):
        raise key_error("this route needs the admin key: send Authorization: Bearer KEY")


def read_key_digest(path: Path) -> str:
    """Return the SHA-256 of the key in a file. ConfigError for a file that others can read, or one
    without a key."""
    try:
        if path.stat().st_mode & 0o077:
            raise ConfigError(
                f"--admin-key-file {path}: others than its owner may use the file",
                hint=f"chmod 600 {path}",
            )
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read --admin-key-file {path}: {error}") from error
    if len(key) < LEAST_KEY_CHARS or not key.isprintable() or " " in key:
        raise ConfigError(
            f"--admin-key-file {path}: need one line with a key of {LEAST_KEY_CHARS} characters or "
            "more, without spaces",
            hint="make one: openssl rand -hex 32",
        )
    return digest(key)
