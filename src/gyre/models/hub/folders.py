"""Model folders: finds a checkpoint's folder. In: a folder or hub name. Out: the folder. Imports no
torch, so that an unknown name fails at once."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from gyre.core.errors import InputError
from gyre.core.hub import hub_folder, is_hub_name, near_folders, refuse_unknown

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CHECKSUMS_FILE = "gyre_checksums.json"
SCALAR_HEAD_FILE = "scalar_head.safetensors"
LoadFormat = Literal["auto", "dummy"]  # read a folder's weights, or draw some without reading
LOAD_FORMATS = get_args(LoadFormat)
HUB_PATTERNS = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


def find_folder(folder_or_name: str | Path, *, revision: str | None = None) -> Path:
    """Return a local folder with a config.json; a name that is not a folder is fetched from the
    hub, at `revision`. InputError for the revision of a folder."""
    folder = look_for_folder(folder_or_name)
    if folder is None:
        name = str(folder_or_name)
        folder = hub_folder(name, HUB_PATTERNS, what="model", revision=revision)
        check_folder(folder)
    elif revision is not None:
        raise InputError(
            f"revision {revision!r}: {folder_or_name} is a folder, which has no revisions",
            hint='leave it out, or give a hub name "owner/model"',
        )
    return folder


def look_for_folder(folder_or_name: str | Path) -> Path | None:
    """Return the folder, or None for a hub name. Raises InputError for anything else."""
    folder, name = Path(folder_or_name).expanduser(), str(folder_or_name)
    if folder.is_dir():
        check_folder(folder)
        return folder
    if "/" in name and is_hub_name(name) and not folder.exists():
        return None
    raise InputError(
        f"model folder {name} "
        f"{'is no folder' if folder.exists() else 'does not exist'}{near_folders(folder)}",
        hint='give an existing folder, or a hub name "owner/model"',
    )


def refuse_missing(folder_or_name: str | Path) -> None:
    """Raise InputError for a missing folder, or a name that is not available anywhere. Downloads
    nothing."""
    if look_for_folder(folder_or_name) is None:
        refuse_unknown(str(folder_or_name), "model")


def check_folder(folder: Path) -> None:
    if not (folder / CONFIG_FILE).is_file():
        raise InputError(
            f"{folder} has no {CONFIG_FILE}",
            hint=f"a hub-layout folder holds {CONFIG_FILE} and {WEIGHTS_FILE} (or shards with "
            f"{INDEX_FILE})",
        )


def refuse_reward_model(folder: Path) -> None:
    """Refuse an export of objective rm: it gives scores and cannot answer."""
    if (folder / SCALAR_HEAD_FILE).is_file():
        raise InputError(
            f"{folder} is a reward model: it scores answers and gives none",
            hint='use it as a reward, [[rewards.parts]] kind = "model"; the run\'s report has its '
            "pair accuracy",
        )
