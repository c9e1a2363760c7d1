"""Handover: the one place that decides when a version goes out to the engine. In: a trainer whose
step has returned. Out: an engine that answers with that version, whole.

    trainer.register ──▶ lifecycle.prepare (stage or open) ──▶ lifecycle.commit (swap)

Two ways to leave the rollout phase: keep the engine (its components are parked by the ledger), or
terminate it and start it again on dummy weights, as Kimi k1.5 does; a restarted engine takes no
work before it has the current version. Waits: for the trainer's offer and the engine's prepare and
commit, by their own deadlines.
"""

from __future__ import annotations

from gyre.core.contracts import CommitPolicy, EngineLifecycle, PolicyTrainer
from gyre.core.errors import InputError, SnapshotError
from gyre.core.events import Emit
from gyre.core.offers import Offer
from gyre.loop.ports import VersionLog


class Handover:
    """Carries versions from one trainer to one engine."""

    def __init__(
        self,
        trainer: PolicyTrainer,
        lifecycle: EngineLifecycle,
        *,
        emit: Emit,
        epoch: int,
        restart_engine: bool = False,
        versions: VersionLog | None = None,
    ) -> None:
        """`epoch` marks each version with the attempt at the run that publishes it."""
        self._versions = versions
        self._trainer = trainer
        self._lifecycle = lifecycle
        self._emit = emit
        self._epoch = epoch
        self._restart_engine = restart_engine
        self._running = True

    async def leave_rollout(self, *, step: int) -> None:
        """End an engine that restarts at each hand-over: the device is wanted for scoring and
        training. No request is in flight."""
        if self._restart_engine and self._running:
            await self._lifecycle.terminate()
            self._running = False
            self._emit("handover.engine_terminated", step=step)

    async def publish(self, *, step: int, policy: CommitPolicy = "drain") -> int:
        """Bring the engine to the trainer's version, and return it; the engine has it whole, or
        keeps the old one and this raises. Registered parts that engines could not read, or refused,
        are registered once more. `policy` decides about requests in flight."""
        if not self._running:
            await self._lifecycle.start(dummy=True)
            self._running = True
            self._emit("handover.engine_started", dummy=True, step=step)
        offer = await self._register()
        try:
            await self._update(offer, policy)
        except BaseException as error:
            if not may_register_again(offer, error):
                await self._fail(offer, error, step)
                raise
            told = {"step": step, "version": offer.version, "error": repr(error)}
            self._emit("retry.version_registered", **told)
            await self._roll_back(step)
            offer = await self._register()
            try:
                await self._update(offer, policy)
            except BaseException as again:
                await self._fail(offer, again, step)
                raise
        manifest = offer.manifest
        if self._versions is not None:
            await self._versions.committed(offer)
        self._emit(
            "weights.published",
            step=step,
            version=manifest.version,
            epoch=manifest.epoch,
            tensors=len(manifest.entries),
            copied_bytes=0
            if manifest.shared
            else sum(entry.size_bytes for entry in manifest.entries),
        )
        return manifest.version

    async def _register(self) -> Offer:
        offer = await self._trainer.register(epoch=self._epoch)
        if self._versions is not None:
            await self._versions.offered(offer)
        return offer

    async def _update(self, offer: Offer, policy: CommitPolicy) -> None:
        await self._lifecycle.prepare(offer)
        await self._lifecycle.commit(offer.version, policy=policy)

    async def _fail(self, offer: Offer, error: BaseException, step: int) -> None:
        told = {"step": step, "version": offer.version, "error": repr(error)}
        self._emit("weights.publish_failed", **told)
        await self._roll_back(step)

    async def _roll_back(self, step: int) -> None:
        """Roll back after a publication that failed. That error is the one to be raised; an error
        of the rollback is an event."""
        try:
            await self._lifecycle.rollback()
        except Exception as error:  # noqa: BLE001  it is an event
            self._emit("warn.rollback_failed", step=step, error=repr(error))


def may_register_again(offer: Offer, error: BaseException) -> bool:
    """Return whether receivers could not read what was registered, or refused it; its publisher
    still has the version. Pure."""
    return offer.registered is not None and isinstance(error, SnapshotError | InputError)
