"""Export: the trained policy in hub layout, written and compared. In: a policy on one device, or
its shards over ranks. Out: a folder that is the model to the bit.

Of shards the first rank writes what all send it, twice: to write and to compare. Before each pass
it works at the disk by itself, for minutes if the model is large: checksums, syncs. The others wait
for its note then and not in a collective, which ends after `parallel.timeout_s`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from gyre.core.errors import DeadlineError
from gyre.distributed.process_group import RankGroup
from gyre.launch.factories import Machine, Policy
from gyre.models.decoder import ScalarHead
from gyre.models.hub.export import decoder_runs, export_hub, export_runs
from gyre.models.hub.load import verify_export
from gyre.models.hub.verify import verify_runs
from gyre.models.spec import ModelSpec
from gyre.weights.gather import ShardSource, TensorRun


def export_policy(
    policy: Policy, head: ScalarHead | None, folder: Path, machine: Machine, tokenizer_files: Path
) -> None:
    export_hub(
        policy.decoder,
        folder,
        dtype=machine.dtype,
        tokenizer_files=tokenizer_files,
        scalar_head=head,
    )
    verify_export(folder, policy.decoder)


def export_live(
    policy: Policy, head: ScalarHead | None, folder: Path, machine: Machine, tokenizer_files: Path
) -> None:
    """Export a model that is being trained, like `export_policy`. The files are compared with its
    numbers a block at a time: a second model may not fit beside a trainer."""
    export_hub(
        policy.decoder,
        folder,
        dtype=machine.dtype,
        tokenizer_files=tokenizer_files,
        scalar_head=head,
    )
    verify_runs(folder, policy.spec, decoder_runs(policy.decoder))


def export_shards(
    spec: ModelSpec,
    head: ScalarHead | None,
    source: ShardSource,
    group: RankGroup,
    folder: Path,
    machine: Machine,
    tokenizer_files: Path,
    *,
    deadline_s: float,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Export weights that are in shards, like `export_policy`. All ranks call it; the first one
    writes, bucket by bucket. `deadline_s` bounds the wait of the others for the start of a pass.
    `progress` is called at each run that arrives and at each poll for the first rank's note."""
    with group.guard("export"):
        passes = _Passes(source, group, folder, deadline_s, progress)
        if group.rank:
            passes.follow("write")
            passes.follow("compare")
            return
        export_runs(
            spec,
            lambda: passes.lead("write"),
            folder,
            dtype=machine.dtype,
            tokenizer_files=tokenizer_files,
            scalar_head=head,
        )
        verify_runs(folder, spec, passes.lead("compare"))


class _Passes:
    """All ranks' passes over the shards. Notes stay: a rank of another replica may read one
    late."""

    def __init__(
        self,
        source: ShardSource,
        group: RankGroup,
        folder: Path,
        deadline_s: float,
        progress: Callable[[], None],
    ) -> None:
        self._source = source
        self._group = group
        self._folder = folder
        self._deadline_s = deadline_s
        self._progress = progress
        # differs from that of an export before
        self._key = f"export/{group.share(uuid.uuid4().hex)[0]}"

    def lead(self, what: str) -> Iterator[TensorRun]:
        """Announce a pass on the first rank, when the first run is requested."""
        self._group.notes.put(f"{self._key}/{what}", "begun")
        for run in self._source.gather_buckets():
            self._progress()
            yield run

    def follow(self, what: str) -> None:
        """Take part in a pass on another rank. The host waits for each bucket. A GPU would queue
        the gathers of both passes, each with a deadline that starts then."""
        self._wait_for(what)
        device = self._group.device
        for _ in self._source.gather_buckets():
            self._progress()
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def _wait_for(self, what: str) -> None:
        """DeadlineError if the first rank leaves no note."""
        begun = partial(self._group.notes.get, f"{self._key}/{what}")
        if self._group.look_for("export", begun, self._deadline_s, self._progress) is None:
            raise DeadlineError(
                f"rank 0 has not begun to {what} the export {self._folder} after "
                f"{self._deadline_s:g} s",
                hint="the disk is slow or stuck: raise snapshot.deadline_s, or point the run "
                "folder elsewhere",
            )
