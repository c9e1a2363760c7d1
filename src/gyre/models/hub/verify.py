"""Verify: checks that a folder in hub layout holds a sharded model. In: a folder, runs of the
model's tensors. Out: nothing, or SnapshotError with the first tensors that differ. For a model on
one device, `load.verify_export` compares logits too."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import torch

from gyre.core.errors import GyreError, SnapshotError
from gyre.core.files import read_json
from gyre.models.hub.export import Run
from gyre.models.hub.files import open_tensors
from gyre.models.hub.folders import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE
from gyre.models.hub.tensors import HubTensors
from gyre.models.hub_schema import read_weight_map
from gyre.models.names import HubEntry, hub_entries
from gyre.models.spec import ModelSpec, spec_from_hub_config


@torch.no_grad()
def verify_runs(folder: str | Path, spec: ModelSpec, runs: Iterable[Run]) -> None:
    """Compare the files with every number that `runs` yields, in the export's dtype. The config
    must describe the same model, and the safetensors package must find each tensor with its
    shape."""
    folder, entries = Path(folder), hub_entries(spec)
    try:
        config = read_json(folder / CONFIG_FILE)
        dtype = getattr(torch, config["dtype"])
        same_model = spec_from_hub_config(config) == spec
        with ExitStack() as stack:
            shapes = {name: stored.shape for name, stored in open_tensors(folder, stack).items()}
    except (GyreError, KeyError, AttributeError) as fault:
        raise SnapshotError(
            f"export {folder} does not load: {fault}", hint="export again"
        ) from fault
    wrong = [entry.hub_name for entry in entries if shapes.pop(entry.hub_name, None) != entry.shape]
    if not same_model or wrong or shapes:
        what = ", ".join([*wrong, *shapes][:4]) or CONFIG_FILE
        raise SnapshotError(f"export {folder} is of another model: {what}", hint="export again")
    changed: dict[str, None] = {}
    with HubTensors(folder, _files_of(folder, entries), dtype, new=False) as tensors:
        for name, run, values_N in runs:
            if tensors.differs(name, run, values_N):
                changed[name] = None
    if changed:
        raise SnapshotError(
            f"export {folder}: content of {', '.join(list(changed)[:4])} is not that of the model "
            f"({len(changed)} tensors)",
            hint="the folder holds another version or is damaged; export again",
        )


def _files_of(folder: Path, entries: Iterable[HubEntry]) -> dict[str, list[HubEntry]]:
    """Return the hub tensors of each file, in export order."""
    index = folder / INDEX_FILE
    weight_map = read_weight_map(index) if index.is_file() else {}
    files: dict[str, list[HubEntry]] = {}
    for entry in entries:
        files.setdefault(weight_map.get(entry.hub_name, WEIGHTS_FILE), []).append(entry)
    return files
