"""Distributed config: how models are sharded over ranks, and where processes meet. In: TOML tables
`[parallel]` with its sub-tables, `[cluster.rendezvous]`. Out: frozen sections. No torch here."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from gyre.core.config import Section

Zero = Literal[0, 1, 2, 3]
SumGradients = Literal["chunk", "update"]


class SplitConfig(Section):
    """Sharding of one model; omitted keys inherit from `[parallel]`."""

    zero: Zero | None = None
    """As `parallel.zero`."""
    shard_ranks: int | None = Field(default=None, ge=0)
    """As `parallel.shard_ranks`."""


class ParallelConfig(Section):
    """Sharding over the trainer's ranks. A single process holds everything regardless."""

    zero: Zero = 1
    """What is sharded: 0 nothing, 1 optimizer state, 2 also gradients and, between updates,
    weights, 3 also weights during an update. A frozen model has weights only: it is whole with 0
    and 1."""
    shard_ranks: int = Field(default=0, ge=0)
    """Ranks that share one copy of the state; must divide the number of ranks. 0 takes all; less
    makes several copies that are kept equal (hybrid sharding)."""
    tensor_ranks: int = Field(default=1, ge=1)
    """Ranks that compute one layer together, each with some of its heads, MLP columns and
    vocabulary rows; must divide the number of ranks. They are neighbors, to share a host. The other
    keys then speak of what such a rank holds, and of the ranks that see other data.
    docs/parallel.md says what does not go with it."""
    sum_gradients: SumGradients = "chunk"
    """With zero 2 and 3, when gradients are summed over ranks: after each chunk (4 bytes per
    parameter, sharded), or once per update (4 more bytes per parameter on every rank while an
    update has several chunks, less traffic)."""
    timeout_s: float = Field(default=120.0, gt=0.0)
    """Longest that a rank waits for the others in one collective; then the step ends and names who
    was missing."""
    critic: SplitConfig = Field(default_factory=SplitConfig)
    """The critic."""
    reference: SplitConfig = Field(default_factory=SplitConfig)
    """The reference model."""
    reward: SplitConfig = Field(default_factory=SplitConfig)
    """The reward model."""

    def of(self, model: Literal["actor", "critic", "reference", "reward"]) -> tuple[Zero, int]:
        """Return (zero, shard_ranks) of a model."""
        own = SplitConfig() if model == "actor" else getattr(self, model)
        zero = self.zero if own.zero is None else own.zero
        return zero, self.shard_ranks if own.shard_ranks is None else own.shard_ranks


class RendezvousConfig(Section):
    """Where the processes of a pod meet: who is there, which version is offered, what is under
    way."""

    kind: Literal["store", "etcd"] = "store"
    """store: a TCPStore of the driver, which ends with it. etcd: outlives the driver."""
    endpoints: tuple[str, ...] = ()
    """Client URLs of etcd's members, "http://HOST:PORT" or "https://HOST:PORT"; the next one is
    asked when one does not answer."""
    lease_s: float = Field(default=10.0, ge=1.0)
    """Seconds without a sign of life after which a member counts as gone, with its records."""
    deadline_s: float = Field(default=60.0, gt=0.0)
    """Longest time that a call tries to reach the rendezvous."""
    ca_file: str = ""
    """PEM file of the authority that signed etcd's certificate; without it the system's count."""
    cert_file: str = ""
    """PEM file of this client's certificate, where etcd asks for one."""
    key_file: str = ""
    """PEM file of that certificate's key, without a passphrase."""

    @field_validator("endpoints")
    @classmethod
    def refuse_other_urls(cls, endpoints: tuple[str, ...]) -> tuple[str, ...]:
        for url in endpoints:
            if reason := why_no_endpoint(url):
                raise ValueError(f"'{url.rpartition('@')[2]}': {reason}")
        return endpoints

    @model_validator(mode="after")
    def refuse_keys_of_others(self) -> RendezvousConfig:
        if self.kind == "etcd" and not self.endpoints:
            raise ValueError("kind = 'etcd' needs endpoints, such as ['http://127.0.0.1:2379']")
        if self.kind != "etcd" and (self.endpoints or self.ca_file or self.cert_file):
            raise ValueError("endpoints and files are for kind = 'etcd'")
        if bool(self.cert_file) != bool(self.key_file):
            raise ValueError("cert_file and key_file come together")
        return self


def why_no_endpoint(url: str) -> str:
    """Return why a text is no client URL of etcd, or ""."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return str(error)
    if parts.scheme not in ("http", "https") or not parts.hostname or port is None:
        return "need http://HOST:PORT or https://HOST:PORT"
    if parts.username is not None or parts.password is not None:
        return "a user and a password are not supported; give etcd a client certificate"
    if parts.path.strip("/") or parts.query or parts.fragment:
        return "need a host and a port, and nothing after them"
    return ""
