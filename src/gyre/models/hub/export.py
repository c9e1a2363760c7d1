"""Export: our decoder to a folder in hub layout. In: a decoder, or runs of its tensors in any
order; a folder. Out: a folder that transformers and vLLM load. Written to a temporary folder,
synced and renamed, so it appears atomically.

Weights are streamed: each run is written to its file position on arrival, so a model sharded over
many ranks is never whole in memory.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from gyre.core.errors import InputError, SnapshotError
from gyre.core.files import replacing_folder
from gyre.distributed.layout import BoxRun
from gyre.models.decoder import Decoder, ScalarHead
from gyre.models.hub.files import SCALAR_HEAD_TENSOR
from gyre.models.hub.folders import (
    CHECKSUMS_FILE,
    CONFIG_FILE,
    INDEX_FILE,
    SCALAR_HEAD_FILE,
    WEIGHTS_FILE,
)
from gyre.models.hub.tensors import HubTensors, plan_shards
from gyre.models.names import HubEntry, hub_entries
from gyre.models.spec import ModelSpec, hub_config_from_spec

SHARD_BYTES = 5_000_000_000
Run = tuple[str, BoxRun, Tensor]  # our parameter; which of its numbers; their values, flat
TORCH_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@torch.no_grad()
def export_hub(
    decoder: Decoder,
    folder: str | Path,
    *,
    dtype: torch.dtype,
    tokenizer_files: Path | None,
    scalar_head: ScalarHead | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the decoder in hub layout. See `export_runs`."""
    export_runs(
        decoder.spec,
        lambda: decoder_runs(decoder),
        folder,
        dtype=dtype,
        tokenizer_files=tokenizer_files,
        scalar_head=scalar_head,
        shard_bytes=shard_bytes,
    )


def decoder_runs(decoder: Decoder) -> Iterable[Run]:
    """Return every parameter of a decoder as one run."""
    return (
        (name, BoxRun(start=0, stop=p.numel()), p.detach().reshape(-1))
        for name, p in decoder.named_parameters()
    )


@torch.no_grad()
def export_runs(
    spec: ModelSpec,
    runs: Callable[[], Iterable[Run]],
    folder: str | Path,
    *,
    dtype: torch.dtype,
    tokenizer_files: Path | None,
    scalar_head: ScalarHead | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model in hub layout. `runs` yields every number of every parameter once, in any
    order. `tokenizer_files` is a folder whose files are copied. Replaces an earlier export at the
    same path; refuses anything else there."""
    folder = Path(folder)
    if folder.exists() and not (folder / CHECKSUMS_FILE).is_file():
        raise InputError(
            f"{folder} exists and is no export of ours",
            hint="give a new folder, or remove it first",
        )
    config = hub_config_from_spec(spec) | {
        "dtype": TORCH_NAMES[dtype],
        "torch_dtype": TORCH_NAMES[dtype],
    }
    try:
        with replacing_folder(folder, durable=True) as aside:
            if tokenizer_files is not None:
                copy_tokenizer(tokenizer_files, aside)
            write_json(aside / CONFIG_FILE, config)
            sums = write_weights(spec, runs(), aside, dtype, shard_bytes)
            write_json(aside / CHECKSUMS_FILE, sums)
            if scalar_head is not None:
                save_scalar_head(scalar_head, aside)
    except (OSError, SafetensorError) as fault:
        raise SnapshotError(
            f"export to {folder} failed: {fault}",
            hint="free disk space or choose another folder; nothing was replaced",
        ) from fault


def save_scalar_head(head: ScalarHead, folder: Path) -> None:
    weight_1E = head.weight.detach().float().cpu().contiguous()
    save_file({SCALAR_HEAD_TENSOR: weight_1E}, folder / SCALAR_HEAD_FILE, metadata={"format": "pt"})


def write_weights(
    spec: ModelSpec, runs: Iterable[Run], folder: Path, dtype: torch.dtype, shard_bytes: int
) -> dict[str, str]:
    """Write one file, or shards with an index; return the checksum of each hub tensor on disk."""
    entries = hub_entries(spec)
    sizes = [dtype.itemsize * torch.Size(entry.shape).numel() for entry in entries]
    shards = plan_shards(sizes, shard_bytes)
    files: dict[str, list[HubEntry]] = {}
    for number, members in enumerate(shards, start=1):
        name = (
            WEIGHTS_FILE
            if len(shards) == 1
            else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        files[name] = [entries[i] for i in members]
    with HubTensors(folder, files, dtype) as tensors:
        for name, run, values_N in runs:
            tensors.write(name, run, values_N)
        sums = tensors.checksums()
    if len(shards) > 1:
        weight_map = {entry.hub_name: name for name, members in files.items() for entry in members}
        write_json(
            folder / INDEX_FILE, {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        )
    return sums


def rows_of(decoder: Decoder, entry: HubEntry) -> Tensor:
    return decoder.get_parameter(entry.name).detach()[entry.row_start : entry.row_stop]


def checksum(tensor: Tensor) -> str:
    """Return 16 hex digits of blake2b over the tensor's bytes."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=8).hexdigest()


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy tokenizer files, but no weights or config next to them."""
    for path in sorted(source.iterdir()):
        ours = path.name in (CONFIG_FILE, INDEX_FILE, CHECKSUMS_FILE) or path.suffix in (
            ".safetensors",
            ".bin",
        )
        if path.is_file() and not ours:
            shutil.copyfile(path, folder / path.name)


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
