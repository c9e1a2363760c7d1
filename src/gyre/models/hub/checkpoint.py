"""Checkpoint: the weights of a hub-layout folder under our names, read in runs. In: a folder or hub
name. Out: a TensorSource whose names and shapes were checked before reading. Files are mapped: a
run touches only its own pages."""

# N numbers of a run, R rows, C columns

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from gyre.core.errors import InputError
from gyre.core.files import read_json
from gyre.core.rounding import ceil_div
from gyre.models.hub.files import StoredTensor, is_float, listed, open_tensors
from gyre.models.hub.folders import CONFIG_FILE, find_folder
from gyre.models.names import HubEntry, hub_entries
from gyre.models.spec import ModelSpec, spec_from_hub_config

SAMPLE = 64  # numbers at either end of a tensor by which checkpoints are distinguished
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class Checkpoint:
    """An open checkpoint, until `close`. Implements `weights.tensor_source.TensorSource`."""

    def __init__(self, folder_or_name: str | Path) -> None:
        """Open a folder, or a hub name (downloaded or cached), and check all names and shapes."""
        folder = find_folder(folder_or_name)
        self.origin = str(folder)
        self.spec = spec_from_hub_config(read_json(folder / CONFIG_FILE))
        entries = hub_entries(self.spec)
        with ExitStack() as files:
            self._tensors = open_tensors(folder, files)
            check_names_and_shapes(entries, self._tensors, self.spec, self.origin)
            self._files = files.pop_all()
        self._parts: dict[str, list[HubEntry]] = {}
        for entry in entries:
            self._parts.setdefault(entry.name, []).append(entry)

    def close(self) -> None:
        self._tensors = {}
        self._files.close()

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        """Return the files' tensors by hub name."""
        return self._tensors

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self.spec.parameter_shapes()

    def sample_digest(self) -> str:
        """Return a digest of the model's sizes and of a few numbers of each stored tensor. Training
        changes nearly all numbers, so versions of a model differ in it without being read whole."""
        digest = hashlib.sha256(repr(self.spec).encode())
        for name, stored in sorted(self._tensors.items()):
            size = math.prod(stored.shape)
            digest.update(f"{name} {stored.dtype} {stored.shape}".encode())
            for first in (0, max(size - SAMPLE, 0)):
                sample_N = read_run(stored, first, min(first + SAMPLE, size))
                digest.update(sample_N.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    @torch.no_grad()
    def read(self, name: str, start: int, stop: int, out_N: Tensor) -> None:
        """Write numbers [start, stop) of our tensor into `out_N`, from all hub tensors fused in it.
        Raises InputError if a duplicate head of tied embeddings differs."""
        for hub_name, first, last, at in self._cut(name, start, stop):
            run_N = read_run(self._tensors[hub_name], first, last)
            if hub_name == EMBEDDING and self.spec.tied and HEAD in self._tensors:
                self._check_tied(run_N, read_run(self._tensors[HEAD], first, last))
            out_N[at : at + last - first].copy_(run_N)

    def _cut(self, name: str, start: int, stop: int) -> Iterator[tuple[str, int, int, int]]:
        """Yield (hub tensor, its run, offset in the request) for each part of the request."""
        for entry in self._parts[name]:
            columns = math.prod(entry.shape[1:])
            low, high = entry.row_start * columns, entry.row_stop * columns
            first, last = max(start, low), min(stop, high)
            if first < last:
                yield entry.hub_name, first - low, last - low, first - start

    def _check_tied(self, embedding_N: Tensor, head_N: Tensor) -> None:
        if not torch.equal(embedding_N, head_N):
            raise InputError(
                f"{self.origin}: config.json ties the head to the embedding, but {HEAD} differs "
                "from it",
                hint="set tie_word_embeddings to false in config.json if the head was trained "
                "apart",
            )


def read_run(stored: StoredTensor, start: int, stop: int) -> Tensor:
    """Return numbers [start, stop) of a stored tensor, flat, reading only the rows that contain
    them."""
    columns = math.prod(stored.shape[1:])
    first, last = start // columns, ceil_div(stop, columns)
    rows_RC = stored.read_rows(first, last)
    return rows_RC.reshape(-1)[start - first * columns : stop - first * columns]


def check_names_and_shapes(
    entries: Iterable[HubEntry], tensors: Mapping[str, StoredTensor], spec: ModelSpec, origin: str
) -> None:
    wanted = {entry.hub_name: entry.shape for entry in entries}
    if spec.tied and HEAD in tensors:
        wanted[HEAD] = wanted[EMBEDDING]
    ours = {name: tensors[name] for name in wanted if name in tensors}
    faults = {
        "missing": [name for name in wanted if name not in tensors],
        f"not part of a {spec.family} model of this config": sorted(
            name
            for name in tensors
            if name not in wanted and not name.endswith("rotary_emb.inv_freq")
        ),
        "no floating-point weights, as quantized models have": [
            f"{name} is {stored.dtype}" for name, stored in ours.items() if not is_float(stored)
        ],
        "of another shape": [
            f"{name} is {list(stored.shape)}, config.json says {list(wanted[name])}"
            for name, stored in ours.items()
            if stored.shape != wanted[name]
        ],
    }
    found = [f"{what}: {listed(names)}" for what, names in faults.items() if names]
    if found:
        raise InputError(
            f"checkpoint {origin} does not fit its config.json. " + ". ".join(found),
            hint="config.json and the weights must be of the same model; copy both again",
        )
