"""Gate: who may ask, and how much. In: a request's headers, then the most that it may cost and the
tokens that it used. Out: the request let through, with its limits in the answer's headers; or a
refusal in the shape of OpenAI's API.

Health routes and the open paths need no key; every other one does, also one that does not exist.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gyre.server.bodies.schema import ApiError
from gyre.server.gateway.key_store import KeyStore
from gyre.server.gateway.keys import ApiKey
from gyre.server.gateway.limits import KeyLimits, KeyMeter, LimitRefusal
from gyre.server.generation import TokenUsage

SCOPE_KEY = "gyre.api_key"  # where a request's scope has its ApiKey


class Gate(Protocol):
    """What the routes need to know of keys and limits."""

    def guard(self, app: ASGIApp, *, count: Callable[[str], None]) -> ASGIApp:
        """Return the application, behind the check of keys. `count` gets the code of each request
        without a valid one."""
        ...

    def reserve(
        self, scope: Scope, most_tokens: int, usage: TokenUsage
    ) -> AbstractContextManager[None]:
        """Return a context for the request's time in the engine, which costs `most_tokens` at most.
        Entering raises ApiError where a limit is reached; leaving gives back what `usage` does not
        have."""
        ...


class OpenGate:
    """Lets everybody through, but no page of another site that a user has open in a browser."""

    def __init__(self, *, loopback_only: bool = False) -> None:
        """`loopback_only`: the server listens there. A page whose own name leads to it (DNS
        rebinding) counts as this site for a browser, and is known by that name."""
        self._loopback_only = loopback_only

    def guard(self, app: ASGIApp, *, count: Callable[[str], None]) -> ASGIApp:
        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                error = cross_site_error() if is_from_another_site(scope) else None
                if self._loopback_only and not is_for_loopback(scope):
                    error = wrong_host_error()
                if error is not None:
                    count(error.code)
                    await error.response()(scope, receive, send)
                    return
            await app(scope, receive, send)

        return guarded

    def reserve(
        self, scope: Scope, most_tokens: int, usage: TokenUsage
    ) -> AbstractContextManager[None]:
        return nullcontext()


class KeyGate:
    """Lets through who has a key, within its limits."""

    def __init__(
        self,
        store: KeyStore,
        *,
        open_paths: Collection[str] = (),
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`open_paths`, each as a whole, need no key."""
        self._store = store
        self._clock_ns = clock_ns
        self._open_paths = frozenset(open_paths)
        self._meters: dict[str, KeyMeter] = {}  # by key id: as many as the file has keys

    def guard(self, app: ASGIApp, *, count: Callable[[str], None]) -> ASGIApp:
        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or self._is_open(scope["path"]):
                await app(scope, receive, send)
                return
            try:
                key = scope[SCOPE_KEY] = self._authenticate(Headers(scope=scope))
            except ApiError as error:
                count(error.code)
                await error.response()(scope, receive, send)
                return
            meter = self._meter(key)

            async def send_with_limits(message: Message) -> None:
                if message["type"] == "http.response.start":
                    told = limit_headers(meter, self._clock_ns())
                    message = {**message, "headers": [*message.get("headers", ()), *told]}
                await send(message)

            await app(scope, receive, send_with_limits)

        return guarded

    @contextmanager
    def reserve(self, scope: Scope, most_tokens: int, usage: TokenUsage) -> Iterator[None]:
        meter = self._meter(scope[SCOPE_KEY])
        admitted = meter.admit(most_tokens, self._clock_ns())
        if isinstance(admitted, LimitRefusal):
            raise refusal_error(admitted, meter.limits, most_tokens)
        used: int | None = None
        try:
            yield
        except ApiError as error:
            # what the engines had no room for, or lost, before its first token costs nothing
            if error.status in (429, 503) and not usage.completion_tokens:
                used = 0
            raise
        finally:
            spent = usage.prompt_tokens + usage.completion_tokens if used is None else used
            meter.end(admitted, spent, self._clock_ns())

    def require_admin(self, scope: Scope) -> None:
        """ApiError unless the request's key has the role admin."""
        if scope[SCOPE_KEY].role != "admin":
            raise ApiError(403, "this needs a key of role admin: gyre keys create --admin")

    def _is_open(self, path: str) -> bool:
        return path in self._open_paths or is_health(path)

    def _authenticate(self, headers: Headers) -> ApiKey:
        secret = read_secret(headers)
        if not secret:
            raise key_error("no API key is given: send Authorization: Bearer KEY")
        key = self._store.find(secret)
        if key is None:
            raise key_error("the API key is not valid; ask for one that is")
        return key

    def _meter(self, key: ApiKey) -> KeyMeter:
        """Return the key's meter: a new, full one where its limits were changed in the file."""
        meter = self._meters.get(key.key_id)
        if meter is None or meter.limits != key.limits:
            meter = self._meters[key.key_id] = KeyMeter(key.limits, self._clock_ns())
        return meter


def is_health(path: str) -> bool:
    """Return whether a path is one of the health routes."""
    return path == "/health" or path.startswith("/health/")


def is_from_another_site(scope: Scope) -> bool:
    """Return whether a browser says that a page of another site asks. Links to a page are no such
    case. Browsers alone send these headers, and pages cannot change them. Over plain HTTP beyond
    loopback they send `Origin` alone."""
    if scope["method"] in ("GET", "HEAD"):
        return False
    headers = Headers(scope=scope)
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None or origin is None:
        return site == "cross-site"
    return origin.partition("://")[2] != headers.get("host", "")


def is_for_loopback(scope: Scope) -> bool:
    """Return whether a request's `Host` names this machine's loopback interface, or is missing: no
    browser leaves it out."""
    host = Headers(scope=scope).get("host", "localhost").lower()
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def wrong_host_error() -> ApiError:
    """Return the refusal of a request that names another host than this one."""
    return ApiError(
        403,
        "Host names another machine, and the server listens on loopback without keys: ask "
        "localhost or 127.0.0.1, or start it with --keys",
        code="wrong_host",
    )


def cross_site_error() -> ApiError:
    """Return the refusal of a request that another site's page sends to a server without keys."""
    return ApiError(
        403,
        "a page of another site sent this, and the server has no keys: start it with --keys, and "
        "send a key",
        code="cross_site",
    )


def read_secret(headers: Headers) -> str:
    """Return the key that a client sent, "" where there is none."""
    scheme, _, secret = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and secret.strip():
        return secret.strip()
    return headers.get("x-api-key", "").strip()


def key_error(message: str) -> ApiError:
    """Return the refusal of a request without a valid key."""
    return ApiError(401, message, headers={"www-authenticate": "Bearer"})


def refusal_error(refusal: LimitRefusal, limits: KeyLimits, most: int) -> ApiError:
    """Return the refusal of a request that a limit does not admit."""
    limit = getattr(limits, refusal.limit)
    if refusal.retry_ns is None:
        return ApiError(
            400,
            f"the request may cost {most} tokens, and the key's tokens_per_minute is {limit}: "
            "lower max_tokens or n, or shorten the prompt",
            param="max_tokens",
            code="request_too_large",
        )
    seconds = max(1, -(-refusal.retry_ns // 10**9))
    cost = f"; the request may cost {most} tokens" if refusal.limit == "tokens_per_minute" else ""
    return ApiError(
        429,
        f"the key's limit {refusal.limit} = {limit} is reached{cost}. Try again in {seconds} s",
        code="rate_limit_exceeded",
        headers={"retry-after": str(seconds)},
    )


def limit_headers(meter: KeyMeter, now_ns: int) -> list[tuple[bytes, bytes]]:
    """Return the headers that tell a client its limits and what is left of them."""
    requests, tokens = meter.remaining(now_ns)
    told: dict[str, Any] = {}
    if requests is not None:
        told["x-ratelimit-limit-requests"] = meter.limits.requests_per_minute
        told["x-ratelimit-remaining-requests"] = requests
    if tokens is not None:
        told["x-ratelimit-limit-tokens"] = meter.limits.tokens_per_minute
        told["x-ratelimit-remaining-tokens"] = tokens
    return [(name.encode(), str(value).encode()) for name, value in told.items()]
