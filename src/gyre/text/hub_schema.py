"""Schemas of a tokenizer's files: the keys that we and transformers read. In: a folder, or a
mapping. Out: our settings, or an InputError that names file and key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from gyre.core.files import read_json
from gyre.core.schema import Foreign, check

MOST_END_TOKENS, MOST_LAYERS = 1024, 4096

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIds = TokenId | Annotated[list[TokenId], Field(max_length=MOST_END_TOKENS)] | None


class AddedToken(Foreign):
    content: str
    special: bool = False


Token = str | AddedToken | None


class NamedTemplate(Foreign):
    name: str
    template: str


class TokenizerSettings(Foreign):
    """tokenizer_config.json."""

    tokenizer_class: str | None = None
    bos_token: Token = None
    eos_token: Token = None
    pad_token: Token = None
    unk_token: Token = None
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    chat_template: str | list[NamedTemplate] | dict[str, str] | None = None
    added_tokens_decoder: dict[str, AddedToken] | None = None
    model_max_length: float | None = None
    gyre_tokenizer: TokenId | None = None
    gyre_eos_ids: Annotated[list[TokenId], Field(max_length=MOST_END_TOKENS)] | None = None


class SpecialTokens(Foreign):
    """special_tokens_map.json."""

    bos_token: Token = None
    eos_token: Token = None
    pad_token: Token = None
    unk_token: Token = None


class Backend(Foreign):
    """The top level of tokenizer.json; the tokenizers package checks what is inside."""

    model: dict[str, Any]
    added_tokens: list[AddedToken] | None = None


class ModelKeys(Foreign):
    """config.json and generation_config.json: end tokens, and keys that transformers converts to
    lists while loading a tokenizer."""

    num_hidden_layers: Annotated[int, Field(ge=0, le=MOST_LAYERS)] | None = None
    eos_token_id: TokenIds = None


FILES: tuple[tuple[str, type[Foreign]], ...] = (
    ("config.json", ModelKeys),
    ("tokenizer.json", Backend),
    ("special_tokens_map.json", SpecialTokens),
)


def check_tokenizer_files(folder: Path) -> TokenizerSettings:
    """Check the tokenizer files that exist."""
    for name, schema in FILES:
        if (path := folder / name).exists():
            check(read_json(path), schema, str(path))
    path = folder / "tokenizer_config.json"
    return (
        check(read_json(path), TokenizerSettings, str(path))
        if path.exists()
        else TokenizerSettings()
    )


def eos_ids_of(content: Mapping[str, Any], where: str) -> tuple[int, ...]:
    ids = check(content, ModelKeys, where).eos_token_id
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)
