"""Hub tokenizers: folders and names that transformers loads. In: a folder or name. Out: its
tokenizer, chat template and end tokens. No Python of a folder is executed
(trust_remote_code=False); its template runs in a separate process. transformers is imported on
first use only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from gyre.core.errors import InputError
from gyre.core.files import read_json
from gyre.core.hub import hub_folder
from gyre.text.chat_template import ChatTemplate
from gyre.text.hub_schema import check_tokenizer_files, eos_ids_of

PATTERNS = ("*.json", "*.model", "*.txt", "*.jinja", "additional_chat_templates/*")
PROBE, QUESTION_PROBE = "Qz7answerprobe", "Qz7questionprobe"  # texts that no template writes itself


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFiles:
    """What transformers makes of a folder's files."""

    backend: tokenizers.Tokenizer
    chat_template: str | Mapping[str, str] | None  # several by name
    special_tokens: Mapping[str, Any]  # by name, as templates read them
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    size: int
    save: Callable[[str], Any] | None = None  # None where another process has read them


@dataclass(frozen=True, slots=True, kw_only=True)
class HubTokenizer:
    hub: HubFiles
    template: ChatTemplate | None
    tool_template: ChatTemplate | None  # of a folder that has another one for tools
    eos_ids: tuple[int, ...]  # the one that ends a turn first


def load_hub_tokenizer(
    folder_or_name: str, *, end_token: str = "", read: Callable[[Path], HubFiles] | None = None
) -> HubTokenizer:
    """Load a tokenizer. `end_token` names the token that ends a turn; "" uses the chat template's.
    `read` gives what transformers makes of a folder; left out, `load` does. Raises InputError for
    an unknown folder or name, malformed files, or a missing end token."""
    folder = Path(folder_or_name)
    if not folder.is_dir():
        folder = hub_folder(folder_or_name, PATTERNS, what="tokenizer")
    settings = check_tokenizer_files(folder)
    hub = (read or load)(folder)
    template = _template_of(hub, folder, "default")
    eos_ids = tuple(settings.gyre_eos_ids or ())
    if end_token:
        eos_ids = tuple(
            dict.fromkeys((_id_of(hub, end_token, folder), *eos_ids, *_named_ends(hub, folder)))
        )
    elif not eos_ids:
        eos_ids = tuple(dict.fromkeys((*_turn_end(hub, template), *_named_ends(hub, folder))))
    if bad := [i for i in eos_ids if not 0 <= i < hub.size]:
        raise InputError(
            f"the files of {folder} name end token {bad[0]}; the tokenizer has {hub.size} entries",
            hint="correct eos_token_id in generation_config.json and config.json, or copy the "
            "folder again",
        )
    if not eos_ids:
        raise InputError(
            f"the tokenizer of {folder} names no end token",
            hint='set "eos_token" in its tokenizer_config.json, or tokenizer.end_token',
        )
    return HubTokenizer(
        hub=hub,
        template=template,
        tool_template=_template_of(hub, folder, "tool_use"),
        eos_ids=eos_ids,
    )


def load(folder: Path) -> HubFiles:
    """Read a folder by transformers. InputError for files of which it makes no fast tokenizer."""
    from transformers import AutoTokenizer

    try:
        hub = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
    # the files are from elsewhere, and the library raises what comes of reading them
    except Exception as error:
        said = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise InputError(
            f"no tokenizer could be loaded from {folder}: {type(error).__name__}: {said[:300]}",
            hint="a folder needs tokenizer.json and tokenizer_config.json of a class that "
            "transformers has; Python "
            "files of a folder are never executed",
        ) from error
    if getattr(hub, "backend_tokenizer", None) is None:
        raise InputError(
            f"the tokenizer of {folder} ({type(hub).__name__}) is not a fast tokenizer",
            hint="convert it with transformers to a folder with tokenizer.json",
        )
    return HubFiles(
        backend=hub.backend_tokenizer,
        chat_template=hub.chat_template,
        special_tokens=hub.special_tokens_map,
        bos_id=hub.bos_token_id,
        eos_id=hub.eos_token_id,
        pad_id=hub.pad_token_id,
        size=len(hub),
        save=hub.save_pretrained,
    )


def _template_of(hub: HubFiles, folder: Path, name: str) -> ChatTemplate | None:
    """Return the template of that name, where a folder has several; a single one is "default"."""
    found = hub.chat_template
    source = (found if isinstance(found, Mapping) else {"default": found}).get(name)
    if not source:
        return None
    file = folder / "chat_template.jinja"
    where = str(file if file.is_file() else folder / "tokenizer_config.json")
    return ChatTemplate(source, hub.special_tokens, where=where)


def _turn_end(hub: HubFiles, template: ChatTemplate | None) -> Iterator[int]:
    """Return the token that the template writes after an assistant's turn, if it is a single
    vocabulary token. It follows the last turn, or else precedes the user's next one.

    In base models it differs from eos_token, which ends documents: <|im_end|> and <|endoftext|> of
    Qwen.
    """
    if template is None:
        return
    turns = [{"role": "user", "content": QUESTION_PROBE}, {"role": "assistant", "content": PROBE}]
    added = hub.backend.get_added_tokens_decoder()
    # ChatML of Qwen1.5 leaves a last turn of the model open
    for further in ([], [{"role": "user", "content": "1"}]):
        (text,) = template.render([[*turns, *further]], {}, generation_prompt=False)
        after = text.rpartition(PROBE)[2].lstrip() if PROBE in text else ""
        names = sorted((token.content.strip(), i) for i, token in added.items())
        begun = [(len(name), i) for name, i in names if name and after.startswith(name)]
        if begun and not (
            further and max(begun)[1] in _openers(hub, text.partition(QUESTION_PROBE)[0])
        ):
            yield max(begun)[1]
            return


def _openers(hub: HubFiles, head: str) -> set[int | None]:
    """Return tokens that open a turn and therefore end none.

    These are BOS, and the first and last added token of `head`, the text before the user's message.
    Those between them may end a system message, which the template itself writes.
    """
    added = hub.backend.get_added_tokens_decoder()
    ids = hub.backend.encode(head, add_special_tokens=False).ids
    inside = [i for i in ids if i in added and i != hub.bos_id]
    return {hub.bos_id, *inside[:1], *inside[-1:]}


def _named_ends(hub: HubFiles, folder: Path) -> Iterator[int]:
    """Return the tokenizer's end token, followed by those that the model's files add."""
    if hub.eos_id is not None:
        yield int(hub.eos_id)
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            yield from eos_ids_of(read_json(folder / name), str(folder / name))


def _id_of(hub: HubFiles, token: str, folder: Path) -> int:
    found = hub.backend.token_to_id(token)
    if found is None:
        raise InputError(
            f"tokenizer.end_token = {token!r} is not an entry of the tokenizer of {folder}",
            hint="name one token as it stands in the vocabulary, such as <|im_end|>",
        )
    return int(found)
