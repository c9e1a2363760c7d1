"""Verified: opens a checkpoint that is to replace the weights of a running model. In: a folder, the
model's spec. Out: an open Checkpoint of the same model whose bytes match its checksums.

A checkpoint of Gyre has checksums and is read twice: to verify and to use. One without them is
verified by its names, shapes and file sizes alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from gyre.core.errors import InputError, SnapshotError
from gyre.core.files import read_json
from gyre.models.hub.checkpoint import Checkpoint
from gyre.models.hub.export import checksum
from gyre.models.hub.files import listed
from gyre.models.hub.folders import CHECKSUMS_FILE, SCALAR_HEAD_FILE
from gyre.models.spec import ModelSpec


@contextmanager
def open_verified(folder: str | Path, *, spec: ModelSpec) -> Iterator[Checkpoint]:
    """Yield the open checkpoint. InputError for another model, or for files that do not fit each
    other; SnapshotError for bytes that do not match their checksums."""
    folder = Path(folder)
    if not folder.is_dir():  # a name would be looked up on the hub
        raise InputError(f"{folder} is no folder on this host", hint="give a checkpoint's folder")
    if (folder / SCALAR_HEAD_FILE).is_file():
        raise InputError(f"{folder} is a reward model: it scores answers and gives none")
    with closing(Checkpoint(folder)) as source:
        _refuse_other_model(source.spec, spec, folder)
        if (folder / CHECKSUMS_FILE).exists():
            _verify_checksums(source, folder)
        yield source


def _refuse_other_model(found: ModelSpec, wanted: ModelSpec, folder: Path) -> None:
    """InputError where the architecture differs. The ids that begin and end a text are those of the
    tokenizer."""
    alike = replace(found, bos_id=wanted.bos_id, eos_ids=wanted.eos_ids)
    if alike == wanted:
        return
    theirs, ours = asdict(alike), asdict(wanted)
    wrong = [
        f"{name} is {theirs[name]}, not {ours[name]}" for name in ours if theirs[name] != ours[name]
    ]
    raise InputError(
        f"checkpoint {folder} is of another model: {listed(wrong)}",
        hint="give a checkpoint of the model that runs, or start with the other one",
    )


def _verify_checksums(source: Checkpoint, folder: Path) -> None:
    sums = read_json(folder / CHECKSUMS_FILE)
    found = source.stored
    wrong = sorted(sums.keys() ^ found.keys())
    wrong += [
        name
        for name, stored in found.items()
        if name in sums and checksum(stored.read()) != sums[name]
    ]
    if wrong:
        raise SnapshotError(
            f"checkpoint {folder}: {listed(wrong, 3)} does not match {CHECKSUMS_FILE}",
            hint="the folder is damaged or mixed from two; copy or export it again",
        )
