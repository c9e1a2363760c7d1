"""Limits: whether a key's next request fits its limits. In: limits, the most that a request may
cost, a monotonic clock's value. Out: a reservation, or a refusal with the seconds until it fits.

A limit per minute is a token bucket. It begins full, and refills at its rate up to the limit of one
minute. A request reserves the most that it may cost, and gets back at its end what it has not used.
So the limit binds while requests run. Those admitted in any span of time use at most

    limit × (1 + span in minutes).

Amounts are integers, in tokens × nanoseconds of a minute,
so nothing is lost to rounding.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

MINUTE_NS = 60 * 10**9
CONCURRENT_RETRY_NS = 10**9  # nobody knows when a running request ends
Amount = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """What a key may ask for; 0 is no limit."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    requests_per_minute: Amount = 0
    tokens_per_minute: Amount = 0  # of prompts and answers
    concurrent_requests: Amount = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """An admitted request, and what it may cost."""

    number: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitRefusal:
    """Why a request does not fit. `retry_ns` is the time until it does, None for never."""

    limit: Literal["requests_per_minute", "tokens_per_minute", "concurrent_requests"]
    retry_ns: int | None


class TokenBucket:
    """A limit per minute: what is left of it, and what running requests may give back."""

    def __init__(self, per_minute: int, now_ns: int) -> None:
        self.per_minute = per_minute
        self._capacity = per_minute * MINUTE_NS
        self._level = self._capacity
        self._now_ns = now_ns
        # by reservation, oldest first. Invariant: level + refundable <= capacity
        self._refundable: dict[int, int] = {}
        self._all_refundable = 0

    def remaining(self, now_ns: int) -> int:
        """Return what can be taken now; below zero where a request cost more than it reserved."""
        self._refill(now_ns)
        return self._level // MINUTE_NS

    def wait_ns(self, amount: int, now_ns: int) -> int | None:
        """Return how long until `amount` can be taken, None where the bucket never holds it."""
        self._refill(now_ns)
        if amount > self.per_minute:
            return None
        return max(0, -((self._level - amount * MINUTE_NS) // self.per_minute))

    def take(self, amount: int) -> None:
        """Take `amount` for good, after `wait_ns` gave 0 for it at this time."""
        self._level -= amount * MINUTE_NS

    def reserve(self, number: int, amount: int) -> None:
        """Take `amount`, of which the request `number` may give some back."""
        self.take(amount)
        self._refundable[number] = amount * MINUTE_NS
        self._all_refundable += amount * MINUTE_NS

    def give_back(self, number: int, unused: int, now_ns: int) -> None:
        """Give back what the request did not use, as far as refilling has not replaced it. A
        negative `unused` is taken."""
        self._refill(now_ns)
        refundable = self._refundable.pop(number, 0)
        self._all_refundable -= refundable
        self._level += min(refundable, unused * MINUTE_NS)

    def _refill(self, now_ns: int) -> None:
        """Refill up to the capacity. A surplus shrinks what the oldest requests may give back:
        otherwise a short span could see a full bucket, and then a refund from before it."""
        assert now_ns >= self._now_ns, "the clock went back"
        self._level += self.per_minute * (now_ns - self._now_ns)
        self._now_ns = now_ns
        surplus = self._level + self._all_refundable - self._capacity
        while surplus > 0 and self._refundable:  # oldest first
            number = next(iter(self._refundable))
            lost = min(surplus, self._refundable[number])
            surplus -= lost
            self._all_refundable -= lost
            self._refundable[number] -= lost
            if not self._refundable[number]:
                del self._refundable[number]
        self._level = min(self._level, self._capacity)


class KeyMeter:
    """What one key has left, and its running requests."""

    def __init__(self, limits: KeyLimits, now_ns: int) -> None:
        self.limits = limits
        self._requests = _bucket(limits.requests_per_minute, now_ns)
        self._tokens = _bucket(limits.tokens_per_minute, now_ns)
        self._running: dict[int, Reservation] = {}
        self._numbers = itertools.count()

    @property
    def running(self) -> int:
        """Return how many requests were admitted and have not ended."""
        return len(self._running)

    def admit(self, tokens: int, now_ns: int) -> Reservation | LimitRefusal:
        """Reserve `tokens`, the most that a request may cost, or say why not. A refusal takes
        nothing."""
        requests, bucket = self._requests, self._tokens
        token_wait = 0 if bucket is None else bucket.wait_ns(tokens, now_ns)
        if token_wait is None:
            return LimitRefusal(limit="tokens_per_minute", retry_ns=None)
        if requests is not None and (wait := requests.wait_ns(1, now_ns)):
            return LimitRefusal(limit="requests_per_minute", retry_ns=wait)
        if token_wait:
            return LimitRefusal(limit="tokens_per_minute", retry_ns=token_wait)
        most = self.limits.concurrent_requests
        if most and self.running >= most:
            return LimitRefusal(limit="concurrent_requests", retry_ns=CONCURRENT_RETRY_NS)
        reservation = Reservation(number=next(self._numbers), tokens=tokens)
        self._running[reservation.number] = reservation
        if requests is not None:
            requests.take(1)
        if bucket is not None:
            bucket.reserve(reservation.number, tokens)
        return reservation

    def end(self, reservation: Reservation, used_tokens: int, now_ns: int) -> None:
        """End a request, once, and give back what it has not used."""
        del self._running[reservation.number]
        if self._tokens is not None:
            unused = reservation.tokens - used_tokens
            self._tokens.give_back(reservation.number, unused, now_ns)

    def remaining(self, now_ns: int) -> tuple[int | None, int | None]:
        """Return the requests and the tokens that could be admitted now; None is no limit."""
        buckets = (self._requests, self._tokens)
        requests, tokens = (bucket and max(0, bucket.remaining(now_ns)) for bucket in buckets)
        return requests, tokens


def _bucket(per_minute: int, now_ns: int) -> TokenBucket | None:
    return TokenBucket(per_minute, now_ns) if per_minute else None
