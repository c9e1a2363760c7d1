"""Tensor engine: what the processes of an engine over ranks do alike, in a pod and behind a server.
In: the group of an engine's ranks. Out: how its rows are summed, and the ways between its ranks.
"""

from __future__ import annotations

from gyre.core.events import Emit
from gyre.distributed.process_group import RankGroup
from gyre.engine.tensor_group import EntryStream, Followers, enlist, lead
from gyre.launch.factories import Machine
from gyre.models.layers.tensor_parallel import ReplicatedRows
from gyre.models.spec import ModelSpec


def make_rows(group: RankGroup, spec: ModelSpec, machine: Machine, emit: Emit) -> ReplicatedRows:
    """Return what sums the ranks' rows: on GPUs few of them by peers' memory. All ranks call it."""
    if machine.device.type != "cuda":
        return ReplicatedRows(group)
    from gyre.engine.runners.peer_memory import meet_peers  # needs Triton

    sizes = {"width": spec.hidden_size, "dtype": machine.dtype}
    return ReplicatedRows(group, meet_peers(group, **sizes, emit=emit))


def connect(
    group: RankGroup, emit: Emit, *, have_trainers: bool = False
) -> tuple[Followers | None, EntryStream | None]:
    """Connect the ranks of an engine: the first gets the others, another its way to hear.
    `have_trainers`: each process has a trainer's rank as well."""
    if group.rank == 0:
        timeout_s = group.timeout_s
        return lead(group, timeout_s=timeout_s, emit=emit, have_trainers=have_trainers), None
    return None, enlist(group, timeout_s=group.timeout_s)
