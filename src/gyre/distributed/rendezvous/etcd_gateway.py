"""etcd gateway: calls of etcd's JSON API over HTTP, with failover and deadlines. In: endpoints, a
path, a message. Out: the answer, or why there is none.

etcd3gw is not used: its watch ends or is cancelled in silence, takes two threads, and it knows one
host.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2
import msgspec

from gyre.core.errors import ConfigError, DeadlineError, RankError
from gyre.core.events import Emit

STILL_S = 3.0  # without a byte from an endpoint, after which the next is asked
FIRST_PAUSE_S = 0.05  # after all endpoints have failed; doubles each time
MOST_PAUSE_S = 1.0
CANCELLED, NOT_FOUND, OUT_OF_RANGE = 1, 5, 11  # of gRPC's codes


class EtcdRefusal(RankError):
    """etcd answered with an error that a repeated call would get again."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(
            f"etcd refused a call: {message or f'code {code}'}",
            hint="see the log of etcd; its limits are flags such as --max-request-bytes",
        )
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdAnswer:
    """An answer. Calls before it may have failed, and may have been carried out all the same."""

    body: Mapping[str, Any]
    was_away: bool  # some endpoint failed before this answer


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files; "" where there is none."""

    ca: str = ""
    cert: str = ""
    key: str = ""


class EtcdGateway:
    """One HTTP client for all endpoints. Used on one event loop."""

    def __init__(
        self, endpoints: Sequence[str], *, emit: Emit, tls: TlsFiles | None = None
    ) -> None:
        assert endpoints, "config.RendezvousConfig wants one"
        self._endpoints = tuple(endpoints)
        self._at = 0
        self._emit = emit
        self._client = httpx2.AsyncClient(
            verify=make_context(tls or TlsFiles()), trust_env=False, timeout=None
        )
        self._lost_s: float | None = None  # since when no endpoint has answered

    async def call(self, path: str, message: Mapping[str, Any], *, deadline_s: float) -> EtcdAnswer:
        """Ask one endpoint after the other until one answers. EtcdRefusal for an error of the
        caller's; DeadlineError when none has answered in time."""
        end_s, pause_s = time.monotonic() + deadline_s, FIRST_PAUSE_S
        failed, reason = 0, "no time was left for a call"
        while (left_s := end_s - time.monotonic()) > 0:
            try:
                body = await self._post(path, message, left_s)
            except (httpx2.TransportError, OSError, TimeoutError, EtcdUnavailable) as error:
                refuse_untrusted(self.endpoint, error)
                reason = f"{self.endpoint}: {str(error) or type(error).__name__}"
                failed += 1
                if self._fail_over(reason, failed):
                    await asyncio.sleep(min(pause_s, max(0.0, end_s - time.monotonic())))
                    pause_s = min(2 * pause_s, MOST_PAUSE_S)
            else:
                self._note_back()
                return EtcdAnswer(body=body, was_away=failed > 0)
        raise DeadlineError(
            f"etcd did not answer {path} within {deadline_s:g} s; last: {reason}",
            hint="see that etcd runs and that cluster.rendezvous.endpoints are its client URLs",
        )

    async def stream(
        self, path: str, message: Mapping[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the messages of an answer without end, from the endpoint that answered last. Ends,
        or raises httpx2.TransportError, when the connection does. EtcdUnavailable as in a call."""
        async with self._client.stream(
            "POST",
            self.endpoint + path,
            content=msgspec.json.encode(message),
            timeout=httpx2.Timeout(None, connect=STILL_S),
        ) as response:
            if response.status_code >= 500:
                raise EtcdUnavailable(f"status {response.status_code}")
            async for line in response.aiter_lines():
                if line.strip():
                    yield msgspec.json.decode(line)

    @property
    def endpoint(self) -> str:
        """The endpoint that is asked next."""
        return self._endpoints[self._at % len(self._endpoints)]

    async def close(self) -> None:
        await self._client.aclose()

    async def _post(self, path: str, message: Mapping[str, Any], left_s: float) -> dict[str, Any]:
        async with asyncio.timeout(left_s):
            response = await self._client.post(
                self.endpoint + path, content=msgspec.json.encode(message), timeout=STILL_S
            )
        if response.status_code >= 500:
            raise EtcdUnavailable(f"status {response.status_code} {response.text[:200].strip()}")
        try:
            body = msgspec.json.decode(response.content)
        except msgspec.DecodeError as error:
            raise EtcdRefusal(0, f"{self.endpoint} speaks no JSON: {error}") from error
        if response.status_code != 200:
            code, reason = int(body.get("code", 0)), str(body.get("message", ""))
            if code == CANCELLED:  # by an etcd that is about to end
                raise EtcdUnavailable(reason)
            raise EtcdRefusal(code, reason)
        return body

    def _fail_over(self, reason: str, failed: int) -> bool:
        """Turn to the next endpoint. Return whether all have failed in this call."""
        self._at += 1
        if failed % len(self._endpoints):
            self._emit("rendezvous.failover", reason=reason, endpoint=self.endpoint)
            return False
        if self._lost_s is None:
            self._lost_s = time.monotonic()
            self._emit("rendezvous.lost", reason=reason)
        return True

    def _note_back(self) -> None:
        if self._lost_s is not None:
            seconds, self._lost_s = time.monotonic() - self._lost_s, None
            self._emit("rendezvous.back", endpoint=self.endpoint, seconds=seconds)


class EtcdUnavailable(Exception):
    """An endpoint that answers, and cannot serve at present."""


def make_context(tls: TlsFiles) -> ssl.SSLContext:
    """Return what a connection is checked by. ConfigError names the file that does not load."""
    try:
        context = ssl.create_default_context(cafile=tls.ca or None)
    except (OSError, ssl.SSLError) as error:
        raise _unreadable("ca_file", tls.ca, error) from error
    if tls.cert:
        try:
            context.load_cert_chain(tls.cert, tls.key or None, password=_refuse_passphrase)
        except (OSError, ssl.SSLError, ValueError) as error:
            raise _unreadable("cert_file", f"{tls.cert}, {tls.key}", error) from error
    return context


def refuse_untrusted(endpoint: str, error: BaseException) -> None:
    """Raise ConfigError where a certificate is why a connection failed: no repeated call would mend
    that."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, ssl.SSLCertVerificationError):
        raise ConfigError(
            f"the certificate of {endpoint} is not trusted: {cause.verify_message}",
            hint="name the authority that signed it in cluster.rendezvous.ca_file",
        ) from error
    if cause is not None and "CERTIFICATE" in (cause.reason or ""):
        raise ConfigError(
            f"{endpoint} does not take this client's certificate: {cause.reason}",
            hint="give one that etcd trusts in cluster.rendezvous.cert_file and key_file",
        ) from error


def _refuse_passphrase() -> str:
    raise ValueError("the key has a passphrase, which nobody could enter")


def _unreadable(key: str, path: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"cluster.rendezvous.{key} = {path!r} cannot be used: {error}",
        hint="give PEM files: the authority that signed etcd's certificate, and a certificate of "
        "this client with its key",
    )
