"""Names: whether the folders, files and hub names of a config are there, before anything heavy is
imported. In: a RunConfig. Out: nothing, or an InputError that says what was looked for. Nothing is
downloaded.
"""

from __future__ import annotations

from pathlib import Path

from gyre.core.errors import InputError
from gyre.core.hub import is_hub_name, near_folders, refuse_unknown
from gyre.data.config import DataConfig
from gyre.data.rows import refuse_missing_data
from gyre.models.hub import folders
from gyre.runconfig.run_config import RunConfig


def refuse_missing_names(config: RunConfig) -> None:
    """InputError for the first of model, tokenizer, reward model and data that is not there."""
    if config.model.path:
        folders.refuse_missing(config.model.path)
    if config.tokenizer.path:
        _refuse_missing_tokenizer(config.tokenizer.path)
    part = config.rewards.model_part()
    if part is not None and not (Path(part.path) / "export").is_dir():
        folders.refuse_missing(part.path)
    for data in (config.data, config.cold_start_data):
        if data is not None:
            _refuse_missing_data(data)


def refuse_missing_data_of(config: RunConfig) -> None:
    """Check the data of an evaluation like `refuse_missing_names`; its model is given
    separately."""
    _refuse_missing_data(config.data)


def _refuse_missing_data(data: DataConfig) -> None:
    if data.source != "reasoning_gym":
        refuse_missing_data(data)


def _refuse_missing_tokenizer(path: str) -> None:
    folder = Path(path).expanduser()
    if folder.is_dir():
        return
    if folder.exists() or not is_hub_name(path):
        raise InputError(
            f"tokenizer folder {path} is not a folder{near_folders(folder)}",
            hint="give a folder in hub format (tokenizer.json beside config.json) or a hub name "
            "(Qwen/Qwen3-0.6B)",
        )
    refuse_unknown(path, "tokenizer")
