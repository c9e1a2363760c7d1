"""Hub files: finds a checkpoint's folder and opens its files. In: a folder or hub name. Out: parsed config and readers
of single tensors; what cannot be read is an InputError that says so. Callers: load, export.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from gyre.core.errors import InputError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SCALAR_HEAD_FILE = "scalar_head.safetensors"
SCALAR_HEAD_TENSOR = "scalar_head.weight"
CHECKSUMS_FILE = "gyre_checksums.json"
HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of an open file, read when asked."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    read_rows: Callable[[int, int], Tensor]  # [first, stop) of them; the rest of a mapped file is not touched


def find_folder(folder_or_name: str | Path) -> Path:
    """Return a local folder with a config.json, fetching a hub name when it is no folder."""
    folder = Path(folder_or_name).expanduser()
    if folder.is_dir():
        if not (folder / CONFIG_FILE).is_file():
            raise InputError(
                f"{folder} has no {CONFIG_FILE}",
                hint=f"a hub-layout folder holds {CONFIG_FILE} and {WEIGHTS_FILE} (or shards with {INDEX_FILE})",
            )
        return folder
    name = str(folder_or_name)
    looks_like_hub = name.count("/") == 1 and not name.startswith((".", "/", "~"))
    if not looks_like_hub:
        raise InputError(
            f"model folder {name} does not exist", hint='give an existing folder, or a hub name "owner/model"'
        )
    from huggingface_hub import snapshot_download  # deferred: only hub names need it
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as fault:
        raise InputError(
            f"{name} is neither a folder here nor a model that the hub gave us: {fault}",
            hint="check the name, the network, and HF_TOKEN for gated models; or point at a local folder",
        ) from fault


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as fault:
        raise InputError(f"cannot read {path}: {fault}", hint="copy the file again from its source") from fault
    if not isinstance(content, dict):
        raise InputError(f"{path} holds {type(content).__name__}, not a mapping")
    return content


def open_file(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (OSError, SafetensorError) as fault:
        raise InputError(
            f"cannot read {path}: {fault}", hint="the file is missing, torn or no safetensors file; copy it again"
        ) from fault


def open_tensors(folder: Path, files: ExitStack) -> dict[str, StoredTensor]:
    """Open one file or all shards; return their tensors by hub name."""
    index_path = folder / INDEX_FILE
    if index_path.is_file():
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict):
            raise InputError(f"{index_path} lacks weight_map")
    elif (folder / WEIGHTS_FILE).is_file():
        weight_map = None
    else:
        raise InputError(
            f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}",
            hint="convert pickled weights first: AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)",
        )
    names = sorted(set(weight_map.values())) if weight_map is not None else [WEIGHTS_FILE]
    tensors: dict[str, StoredTensor] = {}
    for name in names:
        file = files.enter_context(open_file(folder / name))
        for key in file.keys():  # noqa: SIM118  safe_open is no mapping
            stored = file.get_slice(key)
            tensors[key] = StoredTensor(
                shape=tuple(stored.get_shape()),
                read=lambda file=file, key=key: file.get_tensor(key),
                read_rows=lambda first, stop, stored=stored: stored[first:stop],
            )
    lost = sorted(str(name) for name in weight_map or () if name not in tensors)
    if lost:
        raise InputError(f"{index_path} names tensors that its shards lack: {listed(lost)}")
    return tensors


def listed(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
