"""Weight change: one version after another on every engine of a pool, or on none. In: an offer, a
commit policy. Out: the pool's version; after an error it is the last one.

    prepared on all ──▶ [drain: running requests end; new ones wait] ────▶ committed on all
         │ fails on one         │ past its deadline                           │ fails on one
         └──────────────────────┴──▶ rolled back on all ◀─────────────────────┘
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

from gyre.cluster.engine_pool.pool import EnginePool
from gyre.core.errors import InputError, RankError
from gyre.core.offers import Offer

ChangePolicy = Literal["drain", "continue"]


async def change_weights(
    pool: EnginePool,
    offer: Offer,
    *,
    policy: ChangePolicy,
    drain_deadline_s: float,
    rollback_deadline_s: float,
) -> None:
    """Change all engines to the version. drain: requests under way end on the version that they
    began with, and new ones wait meanwhile. continue: they go on with the new weights.
    DeadlineError where they have not ended in time, RankError where no engine is up, InputError for
    a version that an engine cannot take."""
    async with _unless_it_fails(pool, rollback_deadline_s):
        await _prepare_on_all(pool, offer)
    if policy == "continue":
        await pool.commit(offer.version, policy=policy)
        return
    lives = pool.router.all()
    with pool.router.holding():
        async with _unless_it_fails(pool, rollback_deadline_s):
            await pool.router.until_gone(lives, drain_deadline_s)
        await pool.commit(offer.version, policy=policy)


async def _prepare_on_all(pool: EnginePool, offer: Offer) -> None:
    """Prepare on each. One that is lost meanwhile is an error: the version may have ended it."""
    members = [member for member in pool.members.values() if member.state == "up"]
    if not members:
        raise RankError("no engine is up to take new weights", hint="try again once one is")
    await pool.prepare(offer)
    lost = [member.name for member in members if member.prepared != offer.version]
    if lost:
        raise InputError(
            f"{', '.join(lost)} was lost while it read version {offer.version}",
            hint="the log says why it ended (engine.lost); if the files are whole, try again",
        )


@asynccontextmanager
async def _unless_it_fails(pool: EnginePool, deadline_s: float) -> AsyncIterator[None]:
    """Roll back on every engine after an error."""
    try:
        yield
    except Exception:
        await pool.rollback(deadline_s=deadline_s)
        raise
