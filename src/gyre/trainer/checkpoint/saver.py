"""Saver: a snapshot by all ranks together. In: each rank's parts, the loop's state. Out: a snapshot
on a disk that all ranks see, or one SnapshotError, the same on every rank.

Ranks agree by collectives until each has memory for its parts, and through the key-value store
afterwards. A background thread may use no collective, and a slow rank must not block others in one.
A rank that fails stores an error; the others poll for it before every block and stop. A full disk
on one rank thus ends the save on all ranks in seconds. In the background training continues once
all have placed their parts; changes to the state wait until it is copied.

    first rank makes a folder ─▶ all place ─▶ copy ─▶ write their file
        ─▶ first rank writes the manifest ─▶ outcome
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gyre.core.errors import DeadlineError, GyreError, SnapshotError, is_disk_full
from gyre.core.events import Emit
from gyre.core.files import sync
from gyre.distributed.process_group import RankGroup
from gyre.trainer.checkpoint.manifest import (
    SavedFile,
    SnapshotManifest,
    from_text,
    join_manifests,
    saved_tensors,
    to_text,
)
from gyre.trainer.checkpoint.shard_file import Extent, ReadBackError, write_bytes, write_shard
from gyre.trainer.checkpoint.shards import Part
from gyre.trainer.checkpoint.staging import StagedParts, StagingBuffer
from gyre.trainer.checkpoint.store import BLOBS, STATE, SnapshotStore

POLL_S = 0.05
# notes that say that another rank has copied its part; the first goes with the save
AHEAD = ("copied", "outcome")
# how long ranks have to stop after one has failed, before what they wrote is removed
LAST_WORDS_S = 10.0
COPY_FAILED = "snapshot of step {step} could not be copied to the host"
NO_MEMORY = "if the host lacks memory, set snapshot.background = false: then nothing is staged"

LiveParts = Callable[[Callable[[], None] | None], Mapping[str, Any]]
"""Gives {"tensors": this rank's Parts by key, "state"}. The parts are live. Where they are read
beside training it gets a function that whoever is about to change them calls first, and which
returns when they are no longer read."""


ShardWriter = Callable[[Path, Sequence[Part], Callable[[], None]], Sequence[Extent]]
"""Writes a rank's parts to a file, and calls the function before each block; it may raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One save, on one rank."""

    step: int
    aside: Path
    parts: Sequence[Part]
    state: Mapping[str, Any]
    blobs: Mapping[str, bytes]
    placed: StagedParts | None = None  # where `parts` must be copied to before they are written
    copied: threading.Event  # also set while no copy runs

    def key(self, what: str) -> str:
        return f"{self.aside.name}/{what}"


class Stopped(Exception):
    """Raised when another rank has failed."""


class Saver:
    """Saves snapshots. All ranks call `save` and `finish` in the same order, each from one
    thread."""

    def __init__(
        self,
        store: SnapshotStore,
        group: RankGroup,
        *,
        background: bool,
        deadline_s: float,
        emit: Emit,
        progress: Callable[[], None] = lambda: None,
        staging: StagingBuffer | None = None,
        write: ShardWriter = write_shard,
    ) -> None:
        """Bind the store and the ranks. In the background `save` returns once the copies have
        memory, and `finish` once the last snapshot is on disk. `progress` is called while a step
        waits for a copy or the disk, which may take long. Copies go to `staging`, and `write`
        writes a rank's file."""
        self._store = store
        self._group = group
        self._background = background
        self._deadline_s = deadline_s
        self._emit = emit
        self._progress = progress
        self._staging = staging or StagingBuffer(group.device, deadline_s=deadline_s)
        self._write_shard = write
        self._has_memory = False
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._writing = -1  # step in flight
        self._outcome = ""  # the note that ends it
        self._last_outcome = ""  # its note, which a rank may still be about to read

    def save(
        self,
        step: int,
        *,
        parts: LiveParts,
        state: Mapping[str, Any],
        blobs: Mapping[str, bytes],
    ) -> None:
        """Save a snapshot, or start to in the background. Raises SnapshotError for this save or the
        previous background one, and DeadlineError on a timeout."""
        with self._group.guard(f"snapshot of step {step}"):
            self._settle(step)
            aside = self._begin(step)
            job = self._place(step, aside, parts, state, blobs)
            if not self._background:
                self._write(job)
                return
            self._writing, self._outcome = step, job.key("outcome")
            self._thread = threading.Thread(
                target=self._write_apart, args=(job,), name=f"snapshot-{step}", daemon=True
            )
            job.copied.clear()
            try:
                self._thread.start()
            except RuntimeError:  # the system has no thread left
                job.copied.set()
                self._thread = None
                raise

    def prepare(self, size_bytes: int) -> None:
        """Start to allocate the host memory for a background save of `size_bytes`."""
        if self._background:
            self._staging.prepare(size_bytes)

    def finish(self) -> None:
        """Wait for the save in flight. Raises as `save` does."""
        with self._group.guard("end of the last snapshot"):
            self._settle(None)

    # On the calling thread, all ranks together
    # ----------------------------------------------------------------------------------------------

    def _settle(self, next_step: int | None) -> None:
        """Join the previous save and re-raise its error on every rank. If one rank's disk hangs,
        the others learn of it through the store instead of blocking in a collective."""
        thread, began = self._thread, time.monotonic()
        until, heard = began + self._deadline_s, False
        tells = (
            thread is not None
            and thread.is_alive()
            and next_step is not None
            and self._group.rank == 0
        )
        if tells:
            self._emit("snapshot.waiting", step=next_step, writing=self._writing)
        while thread is not None and thread.is_alive() and time.monotonic() < until:
            self._group.check("snapshot")
            self._progress()
            thread.join(POLL_S)
            if not heard and self._group.notes.get(self._outcome) is not None:
                heard, until = True, min(until, time.monotonic() + LAST_WORDS_S)
        failure = self._failure
        if thread is not None and thread.is_alive():
            hint = "the disk is slow or stuck: raise snapshot.deadline_s, or snapshot less often"
            waited_s = time.monotonic() - began
            failure = DeadlineError(
                f"the snapshot of step {self._writing} is not written after {waited_s:.3g} s of "
                "waiting",
                hint="this rank's disk is stuck: the other ranks are done with it"
                if heard
                else hint,
            )
        elif thread is not None:
            if tells:
                self._emit("snapshot.waited", step=next_step, seconds=time.monotonic() - began)
            self._thread = self._failure = None
        self._agree(failure)

    def _begin(self, step: int) -> Path:
        """Return the shared folder of this snapshot; the first rank creates it."""
        made, failure = "", None
        if self._group.rank == 0:
            try:
                made = str(self._store.begin(step, uuid.uuid4().hex[:8]))
            except OSError as error:
                failure = self._cannot_write(step, error)
        return Path(self._agree(failure, made)[0])

    def _place(
        self,
        step: int,
        aside: Path,
        parts: LiveParts,
        state: Mapping[str, Any],
        blobs: Mapping[str, bytes],
    ) -> _Job:
        """Collect all parts to write. In the background each part is copied before it may be
        overwritten."""
        began, failure, job = time.monotonic(), None, None
        copied = threading.Event()
        copied.set()
        try:
            own = parts(partial(self._hold, step, aside, copied) if self._background else None)
            mine, placed = list(own["tensors"].values()), None
            if self._background:
                placed = self._staging.place(mine)
                mine = placed.staged
            whole = {"loop": state, "trainer": own["state"]}
            job = _Job(
                step=step,
                aside=aside,
                parts=mine,
                state=whole,
                blobs=blobs,
                placed=placed,
                copied=copied,
            )
        # RuntimeError: torch has no common type for lack of memory
        except (OSError, RuntimeError, GyreError) as error:
            failure = self._named(COPY_FAILED.format(step=step), error)
        numbers = [time.monotonic() - began, self._staging.size_bytes]
        if self._background and not self._has_memory:
            self._meet(step, aside)
        try:
            answers = self._agree(failure, numbers)
        except SnapshotError:
            if self._group.rank == 0:
                shutil.rmtree(aside, ignore_errors=True)
            raise
        if self._background and self._group.rank == 0:
            seconds, sizes = (list(column) for column in zip(*answers, strict=True))
            self._emit("snapshot.begun", step=step, seconds=max(seconds), buffer_bytes=sum(sizes))
        assert job is not None
        self._has_memory = True
        return job

    def _meet(self, step: int, aside: Path) -> None:
        """Wait until every rank has allocated its memory or failed to. The allocation can outlast a
        collective's timeout. The collective that follows names a rank that never arrives."""
        notes, keys = self._group.notes, _placed_keys(aside, self._group.size)
        notes.put(keys[self._group.rank], "")
        there = lambda: all(notes.get(key) is not None for key in keys) or None  # noqa: E731
        self._group.look_for(
            f"snapshot of step {step}", there, self._deadline_s + LAST_WORDS_S, self._progress
        )

    def _hold(self, step: int, aside: Path, copied: threading.Event) -> None:
        """Block until the saved state is copied. Called before the state changes; independent of
        other ranks. Ranks that have copied soon wait in a collective, so the error that names this
        rank is raised before their timeout."""
        if copied.is_set():
            return
        began, until = time.monotonic(), time.monotonic() + self._deadline_s
        alone = False  # whether another rank has copied
        while not copied.wait(POLL_S):
            self._progress()
            if not alone and any(
                self._group.notes.get(f"{aside.name}/{note}") is not None for note in AHEAD
            ):
                alone, until = True, min(until, time.monotonic() + self._group.longest_solo_s)
            if time.monotonic() > until:
                why = (
                    f", {self._group.longest_solo_s:g} s after another rank's part" if alone else ""
                )
                by = f" by rank {self._group.rank}" if self._group.size > 1 else ""
                raise DeadlineError(
                    f"the snapshot of step {step} is not copied to the host{by} after "
                    f"{time.monotonic() - began:.3g} s{why}",
                    hint="the host is short of memory or busy: snapshot less often, or set "
                    "snapshot.background = false; where ranks wait for each other, raise "
                    "parallel.timeout_s if it is only slow",
                )
        self._emit(
            "snapshot.held", step=step, rank=self._group.rank, seconds=time.monotonic() - began
        )

    def _agree(self, failure: BaseException | None, value: Any = None) -> list[Any]:
        """Return every rank's value, or raise the first failure on all ranks."""
        mine = None
        if failure is not None:
            # a fault of ours is shared too: the others must not wait
            text, hint = f"{type(failure).__name__}: {failure}", ""
            text = f"rank {self._group.rank} broke in a snapshot: {text}"
            if isinstance(failure, GyreError):
                text, hint = failure.message, failure.hint
            mine = {"message": text, "hint": hint, "late": isinstance(failure, DeadlineError)}
        answers = self._group.share({"failure": mine, "value": value})
        for answer in answers:
            if (first := answer["failure"]) is not None:
                kind = DeadlineError if first["late"] else SnapshotError
                raise kind(first["message"], hint=first["hint"]) from failure
        return [answer["value"] for answer in answers]

    # Beside the collectives, maybe in a thread
    # ----------------------------------------------------------------------------------------------

    def _write_apart(self, job: _Job) -> None:
        try:
            self._write(job)
        except Exception as error:  # noqa: BLE001  raised by the next save or by finish
            self._failure = error

    def _write(self, job: _Job) -> None:
        """Write this rank's file and wait for the outcome of the save. Raises the first rank's
        SnapshotError."""
        notes, rank = self._group.notes, self._group.rank
        written, fault = "", None
        try:
            self._copy(job)
            if job.placed is not None:
                notes.put(job.key("copied"), "")
            written = to_text(self._write_files(job))
        except Stopped:
            pass  # the one that failed has said why
        except Exception as error:  # noqa: BLE001
            # the others must hear of any; ours is raised below
            fault = None if isinstance(error, OSError | SnapshotError) else error
            failure = (
                error if isinstance(error, SnapshotError) else self._cannot_write(job.step, error)
            )
            notes.put(job.key("failed"), _as_note(failure))
        notes.put(job.key(f"done/{rank}"), written)
        if rank == 0:
            self._conclude(job)
        outcome = self._wait_for(
            job, lambda: notes.get(job.key("outcome")), "the first rank has not ended it"
        )
        if fault is not None:
            raise fault
        if outcome:
            raise SnapshotError(**json.loads(outcome))

    def _copy(self, job: _Job) -> None:
        began = time.monotonic()
        try:
            if job.placed is not None:
                self._staging.fill(job.placed)
        except (OSError, RuntimeError) as error:  # as in `_place`
            # holds tensors
            raise self._named(COPY_FAILED.format(step=job.step), error) from error.with_traceback(
                None
            )
        finally:
            if job.placed is not None:
                job.placed.drop()
            job.copied.set()
        if job.placed is not None and self._group.rank == 0:
            self._emit("snapshot.copied", step=job.step, seconds=time.monotonic() - began)

    def _write_files(self, job: _Job) -> SnapshotManifest:
        """Write this rank's files. The first rank also writes the loop's state."""
        name = f"rank-{self._group.rank:05d}.safetensors"
        head, *extents = self._write_shard(job.aside / name, job.parts, lambda: self._look(job))
        size_bytes = sum(extent.size_bytes for extent in (head, *extents))
        files = {name: SavedFile(size_bytes=size_bytes, head=head)}
        if self._group.rank == 0:
            small = {STATE: json.dumps(job.state, allow_nan=True).encode()}
            for key, blob in job.blobs.items():
                assert "/" not in key and key not in (".", ".."), key
                small[f"{BLOBS}/{key}"] = blob
            for key, data in small.items():
                extent = write_bytes(job.aside / key, data)
                files[key] = SavedFile(size_bytes=extent.size_bytes, head=extent)
        sync(job.aside)
        tensors = saved_tensors(name, job.parts, extents)
        return SnapshotManifest(step=job.step, files=files, tensors=tensors)

    def _conclude(self, job: _Job) -> None:
        """Publish the snapshot once all have written, or discard it, and notify the others. First
        rank only."""
        notes, keys = (
            self._group.notes,
            [job.key(f"done/{rank}") for rank in range(self._group.size)],
        )
        found: dict[str, str] = {}

        def look() -> str | None:
            for key in keys:
                if key not in found and (text := notes.get(key)) is not None:
                    found[key] = text
            return notes.get(job.key("failed")) or ("" if len(found) == len(keys) else None)

        outcome, fault = "", None
        try:
            outcome = self._wait_for(job, look, "not all ranks have written their part")
            if not outcome:
                self._store.publish(
                    job.aside, join_manifests(from_text(found[key], whole=False) for key in keys)
                )
        except Exception as error:  # noqa: BLE001
            # the others must hear of any; ours is raised below
            fault = None if isinstance(error, OSError | DeadlineError) else error
            outcome = _as_note(
                error if isinstance(error, DeadlineError) else self._cannot_write(job.step, error)
            )
        if outcome:
            # the outcome stands: this only lets the others stop first
            with contextlib.suppress(DeadlineError):
                self._wait_for(
                    job,
                    lambda: "" if look() is not None and len(found) == len(keys) else None,
                    "not all ranks have stopped",
                    LAST_WORDS_S,
                )
            shutil.rmtree(job.aside, ignore_errors=True)
        old = [job.key("failed"), job.key("copied"), *_placed_keys(job.aside, self._group.size)]
        notes.drop([*keys, *old, self._last_outcome])
        self._last_outcome = job.key("outcome")
        notes.put(self._last_outcome, outcome)
        if fault is not None:
            raise fault

    def _look(self, job: _Job) -> None:
        if not self._background:  # in the background it is no progress of the step beside it
            self._progress()
        if self._group.notes.get(job.key("failed")) is not None:
            raise Stopped

    def _wait_for(
        self, job: _Job, look: Callable[[], str | None], late: str, within_s: float | None = None
    ) -> str:
        """Poll `look` and return its result. Raises early when the group fails."""
        limit_s = self._deadline_s if within_s is None else within_s
        found = self._group.look_for(f"snapshot of step {job.step}", look, limit_s)
        if found is None:
            raise DeadlineError(
                f"the snapshot of step {job.step} is not written after {limit_s:g} s: {late}",
                hint="the disk is slow or stuck: raise snapshot.deadline_s, or snapshot less often",
            )
        return found

    def _cannot_write(self, step: int, error: Exception) -> SnapshotError:
        hint = "check that the folder can be written, then resume from the snapshot before it"
        if is_disk_full(error):
            hint = (
                "free space there and resume from the snapshot before it; snapshot.keep = 1 "
                "needs the least space"
            )
        elif isinstance(error, ReadBackError):
            hint = (
                "the disk returns other bytes than it was given: check it, or point the run "
                "folder elsewhere"
            )
        return self._named(
            f"snapshot of step {step} could not be written to {self._store.folder}", error, hint
        )

    def _named(self, what: str, error: Exception, hint: str = "") -> SnapshotError:
        """Return an error that names this rank, where there are several."""
        by = f" by rank {self._group.rank}" if self._group.size > 1 else ""
        text = (
            error.message
            if isinstance(error, GyreError)
            else getattr(error, "strerror", None) or str(error)
        )
        hint = hint or (error.hint if isinstance(error, GyreError) else "") or NO_MEMORY
        return SnapshotError(f"{what}{by}: {text}", hint=hint)


def _placed_keys(aside: Path, num_ranks: int) -> list[str]:
    return [f"{aside.name}/placed/{rank}" for rank in range(num_ranks)]


def _as_note(error: GyreError) -> str:
    return json.dumps({"message": error.message, "hint": error.hint})
