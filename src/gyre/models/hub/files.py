"""Hub files: finds a checkpoint's folder and opens its files. In: a folder or hub name. Out: parsed
config and readers of single tensors. An unreadable file raises InputError with the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from gyre.core.errors import InputError
from gyre.models.hub.folders import INDEX_FILE, WEIGHTS_FILE
from gyre.models.hub_schema import read_weight_map

SCALAR_HEAD_TENSOR = "scalar_head.weight"
FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names of the types that weights have


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of an open file, read on request."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors names it
    read: Callable[[], Tensor]
    # [first, stop) of them; the rest of a mapped file is not touched
    read_rows: Callable[[int, int], Tensor]


def open_file(path: Path) -> Any:
    if not path.is_file():
        raise InputError(
            f"{path} is not there, or is no regular file",
            hint="copy the folder again, with all its files",
        )
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (OSError, SafetensorError) as fault:
        raise InputError(
            f"cannot read {path}: {fault}",
            hint="the file is missing, torn or no safetensors file; copy it again",
        ) from fault


def open_tensors(folder: Path, files: ExitStack) -> dict[str, StoredTensor]:
    """Open one file or all shards; return their tensors by hub name."""
    index_path = folder / INDEX_FILE
    weight_map: Mapping[str, str] | None = None
    if index_path.is_file():
        weight_map = read_weight_map(index_path)
    elif not (folder / WEIGHTS_FILE).is_file():
        raise InputError(
            f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}",
            hint="convert pickled weights first: "
            "AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)",
        )
    names = sorted(set(weight_map.values())) if weight_map is not None else [WEIGHTS_FILE]
    tensors: dict[str, StoredTensor] = {}
    for name in names:
        file = files.enter_context(open_file(folder / name))
        for key in file.keys():  # noqa: SIM118  safe_open is no mapping
            stored = file.get_slice(key)
            tensors[key] = StoredTensor(
                shape=tuple(stored.get_shape()),
                dtype=str(stored.get_dtype()),
                read=lambda file=file, key=key: file.get_tensor(key),
                read_rows=lambda first, stop, stored=stored: stored[first:stop],
            )
    lost = sorted(name for name in weight_map or () if name not in tensors)
    if lost:
        raise InputError(f"{index_path} names tensors that its shards lack: {listed(lost)}")
    return tensors


def is_float(stored: StoredTensor) -> bool:
    """Return whether the dtype is one that weights are read from."""
    return stored.dtype in FLOATS


def listed(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
