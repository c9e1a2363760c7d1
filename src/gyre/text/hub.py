"""Hub tokenizers: folders and names that transformers loads. In: a folder or name. Out: its tokenizer, end tokens and
rendered conversations. transformers is imported on first use only. Caller: tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gyre.core.errors import InputError


def load_hub_tokenizer(folder_or_name: str) -> tuple[Any, tuple[int, ...]]:
    """Return (transformers fast tokenizer, ids of its end tokens with the one of the chat template first)."""
    from transformers import AutoTokenizer

    try:
        hub = AutoTokenizer.from_pretrained(folder_or_name)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InputError(
            f"no tokenizer could be loaded from {folder_or_name}: {str(error).strip().splitlines()[0]}",
            hint="a folder needs tokenizer.json and tokenizer_config.json; a hub name needs network access or a cache",
        ) from error
    if getattr(hub, "backend_tokenizer", None) is None:
        raise InputError(
            f"the tokenizer of {folder_or_name} ({type(hub).__name__}) is not a fast tokenizer",
            hint="convert it with transformers to a folder with tokenizer.json",
        )
    eos_ids = _hub_eos_ids(folder_or_name, hub)
    if not eos_ids:
        raise InputError(
            f"the tokenizer of {folder_or_name} names no end token",
            hint='set "eos_token" in its tokenizer_config.json',
        )
    return hub, eos_ids


def _hub_eos_ids(folder_or_name: str, hub: Any) -> tuple[int, ...]:
    """End token of the tokenizer first (the chat template writes it), then those that the model's files add."""
    saved = hub.init_kwargs.get("gyre_eos_ids")
    if saved:
        return tuple(saved)
    found: list[Any] = [hub.eos_token_id]
    for name in ("generation_config.json", "config.json"):
        eos = read_json(_hub_file(folder_or_name, name)).get("eos_token_id")
        found += eos if isinstance(eos, list) else [eos]
    return tuple(dict.fromkeys(int(i) for i in found if i is not None))


def _hub_file(folder_or_name: str, name: str) -> Path | None:
    if Path(folder_or_name).is_dir():
        return Path(folder_or_name) / name
    from transformers.utils.hub import cached_file

    found = cached_file(
        folder_or_name,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return Path(found) if found else None


def hub_chat(hub: Any, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any]) -> str:
    from jinja2.exceptions import TemplateError

    try:
        return hub.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True, **options
        )
    except TemplateError as error:
        raise InputError(
            f"the chat template refused the conversation: {error}",
            hint="some models take no system message or need user and assistant to alternate; see data.system",
        ) from error


def read_json(path: Path | None) -> dict[str, Any]:
    if path is None or not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path} is not readable JSON: {error}", hint="restore the file or download it again"
        ) from error
    return content if isinstance(content, dict) else {}
