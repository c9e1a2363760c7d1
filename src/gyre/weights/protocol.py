"""Protocol: the messages about a version, and what publisher and receiver do with them. In: a state
and a message. Out: the next state, or InputError for a message that the state refuses. Pure.

    publisher:    registered ──▶ offered ──▶ withdrawn by the next step ──▶ written
                                    │ fetch began          fetches ended ┘
    receiver:     serving ──▶ prepared ──▶ swapping ──▶ serving the next
                     ▲            │            │ failed and undone
                     └────────────┴────────────┘

A version belongs to an epoch: the number of its publisher's attempt at the run. A receiver that has
prepared a version of one epoch refuses all older ones, so a replaced publisher cannot come back.
Where another receiver could not swap, one that has goes back: it is offered its last version again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gyre.core.errors import InputError
from gyre.core.records import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The version of a manifest was checked, and staged or opened; the last one serves."""

    epoch: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapBegan:
    """The numbers of the prepared version begin to take the place of the last one's."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapDone:
    """The prepared version is there whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapFailed:
    """The swap ended early. `undone`: the last version is back to the bit."""

    undone: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack:
    """What was prepared is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The engine's numbers are dummies, or gone."""


ReceiverMessage = Prepared | SwapBegan | SwapDone | SwapFailed | RolledBack | Lost


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverState:
    """What an engine has of the versions. `version` is the newest that it has had whole, and
    `is_whole` says whether it has it still, apart from a swap that is under way."""

    version: int
    is_whole: bool = True
    epoch: int = 0  # the highest of a publisher whose version was prepared
    prepared: Prepared | None = None
    is_swapping: bool = False
    last: int | None = None  # served before `version`; None if nothing was whole then

    def refuse_stale(self, manifest: Manifest) -> None:
        """Raise InputError for an offer of an older publisher, or of a version that is older than
        the newest of the same publisher."""
        if manifest.epoch < self.epoch:
            raise InputError(
                f"version {manifest.version} is of publisher epoch {manifest.epoch}, and epoch "
                f"{self.epoch} has published here since",
                hint="a later attempt at the run has taken over: end the older one",
            )
        if manifest.epoch == self.epoch and manifest.version < self.version:
            raise InputError(
                f"version {manifest.version} is older than version {self.version}, which was "
                f"here under the same epoch {self.epoch}",
                hint="go back to an older version with a new attempt at the run, whose epoch is "
                "higher",
            )

    def refuse(self, manifest: Manifest, *, reverts: bool) -> None:
        """Raise InputError for a manifest that a receiver may not prepare. `reverts`: it is of the
        version that served before."""
        if reverts:
            self.refuse_revert(manifest)
        else:
            self.refuse_stale(manifest)

    def refuse_revert(self, manifest: Manifest) -> None:
        """Raise InputError unless the manifest is of the version that served before this one."""
        if manifest.version != self.last:
            had = "no version" if self.last is None else f"version {self.last}"
            raise InputError(
                f"version {manifest.version} was to be served again, and {had} served before "
                f"version {self.version}",
                hint="offer it as a new version instead",
            )

    def is_prepared(self, version: int) -> bool:
        return self.prepared is not None and self.prepared.version == version

    def after(self, message: ReceiverMessage) -> ReceiverState:
        """Return the state that a message leads to. Messages of a swap come in order, since one
        owner sends them; another order is a fault of that owner. Pure."""
        match message:
            case Prepared(epoch=epoch):
                assert not self.is_swapping, "a version was prepared in the middle of a swap"
                return replace(self, epoch=max(self.epoch, epoch), prepared=message)
            case SwapBegan(version=version):
                assert self.is_prepared(version) and not self.is_swapping, (
                    f"version {version} was swapped in before it was prepared"
                )
                return replace(self, is_swapping=True)
            case SwapDone():
                assert self.is_swapping and self.prepared is not None, "no swap had begun"
                last = self.version if self.is_whole else None
                return ReceiverState(version=self.prepared.version, epoch=self.epoch, last=last)
            case SwapFailed(undone=undone):
                assert self.is_swapping, "no swap had begun"
                return replace(self, is_swapping=False, is_whole=self.is_whole and undone)
            case RolledBack():
                assert not self.is_swapping, "a version was given up in the middle of its swap"
                return replace(self, prepared=None)
            case Lost():
                return replace(self, is_whole=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """A version was offered: its tensors stay as they are until it is withdrawn."""

    epoch: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchBegan:
    """A receiver began to read tensors of the version."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchEnded:
    """A fetch has ended, well or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawn:
    """The tensors are about to change: no fetch may begin any more."""


PublisherMessage = Registered | FetchBegan | FetchEnded | Withdrawn


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherState:
    """What a trainer offers, and who reads it."""

    offered: Registered | None = None
    num_fetches: int = 0  # that have started and not ended, also of a version that was withdrawn

    @property
    def may_write(self) -> bool:
        """Return whether the tensors may change: no receiver reads them or may begin to."""
        return self.offered is None and self.num_fetches == 0

    def refuse_fetch(self, version: int) -> None:
        """Raise InputError unless the version's tensors are there."""
        if self.offered is None or self.offered.version != version:
            now = "past it" if self.offered is None else f"at {self.offered.version}"
            raise InputError(
                f"version {version} was asked for, the trainer is {now}",
                hint="tensors of a version are there until the next step: register again",
            )

    def after(self, message: PublisherMessage) -> PublisherState:
        """Return the state that a message leads to. InputError for a fetch of a version that is not
        offered. Pure."""
        match message:
            case Registered():
                return replace(self, offered=message)
            case FetchBegan(version=version):
                self.refuse_fetch(version)
                return replace(self, num_fetches=self.num_fetches + 1)
            case FetchEnded():
                assert self.num_fetches > 0, "a fetch ended that had not begun"
                return replace(self, num_fetches=self.num_fetches - 1)
            case Withdrawn():
                return replace(self, offered=None)
