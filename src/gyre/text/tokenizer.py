"""Tokenizer: text to token ids and back, from our own files or from any hub folder with a fast
tokenizer.

In: a folder, a hub name, or texts to train on. Out: `Tokenizer`. Ours is byte-level BPE. Digits and
a number's minus sign are separate tokens, while whole clauses between digits may be one token,
which shortens procedural prompts. transformers is imported only for hub folders.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from gyre.core.errors import ConfigError, InputError
from gyre.core.files import read_json
from gyre.core.hub import is_hub_name, near_folders
from gyre.text.chat_template import ChatTemplate, Messages
from gyre.text.hub import HubFiles, load_hub_tokenizer
from gyre.text.messages import Tool, as_turns
from gyre.text.token_chars import find_most_token_chars

PAD, END = "<|pad|>", "<|end|>"
SPECIAL = (PAD, END, "<think>", "</think>", "<answer>", "</answer>")

# Each turn is its text and a newline; what the model says ends with the end token instead.
# `plain_chat` is the same function in Python, so that our own tokenizer needs neither jinja nor
# transformers.
PLAIN_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}{{- message['content'] + '" + END + "' -}}"
    "{%- else -%}{{- message['content'] + '\\n' -}}{%- endif -%}"
    "{%- endfor -%}"
)

# How Qwen2 cuts text. transformers ≥ 5 reads any tokenizer.json beside a config.json of model_type
# "qwen2" as a Qwen2Tokenizer, which takes vocabulary and merges from the file, but normalizer and
# cuts from its own code: whatever else the file says is ignored. So a tokenizer for that family is
# made with these, and all readers agree.
QWEN2_CUTS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
Style = Literal["clauses", "qwen2"]
_PIECE_CHARS = 1 << 14
_SYSTEM_PROBE = "Qz7systemprobe"  # a text that no template writes itself

# A digit; the minus sign of a number (one between spaces is an operator and may merge with them);
# and what stands between the letters of a spelled-out word, so that each of them is one token.
_ISOLATED = r"[0-9]|-(?=[0-9])|(?<=\b[A-Za-z])[ \n](?=[A-Za-z]\b)"


class Tokenizer:
    """Ids and text of one vocabulary. Immutable after construction."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: tuple[int, ...],
        bos_id: int | None,
        pad_id: int,
        chat_template: str,
        hub: HubFiles | None = None,
        template: ChatTemplate | None = None,
        tool_template: ChatTemplate | None = None,
    ) -> None:
        assert eos_ids, "a tokenizer without an end token cannot end a response"
        self.backend = backend
        self.eos_ids = eos_ids  # the first one ends the responses that we write
        self.bos_id = bos_id
        self.pad_id = pad_id
        self.chat_template = chat_template  # jinja; "" when the folder has none
        self._hub = hub  # of a folder that is not ours
        self._template = template  # what renders chat_template
        self._tool_template = tool_template or template  # the same for conversations with tools
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self.prefix_ids = _prefix_ids(backend)  # BOS, where used
        self.is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        self._special_ids = frozenset(
            i for i, t in backend.get_added_tokens_decoder().items() if t.special
        )
        self._pieces: dict[int, bytes] = {}

    @property
    def end_id(self) -> int:
        """The token that ends a rendered response."""
        return self.eos_ids[0]

    @property
    def fingerprint(self) -> str:
        """16 hex digits over everything that determines ids: equal for equal behavior, in any
        process."""
        parts = [
            self.backend.to_str(),
            str(self.eos_ids),
            str(self.bos_id),
            str(self.pad_id),
            self.chat_template,
        ]
        return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of `text` as int32. Special tokens spelled in it become their ids; none is
        added."""
        self.check_text(text)
        if len(text) <= _PIECE_CHARS:
            ids = self.backend.encode(text, add_special_tokens=False).ids
            return np.asarray(ids, dtype=np.int32)
        # only this form lets other threads run meanwhile
        ids = self.backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return _as_array(ids)

    def check_text(self, text: str) -> None:
        """InputError for a text that UTF-8 cannot hold."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(
                f"text with a lone surrogate at character {error.start}: {text[:40]!r} … cannot "
                "be encoded",
                hint="give both halves of the character, as valid UTF-8; a half comes from an "
                "emoji that was cut in JSON escapes",
            ) from error

    @functools.cached_property
    def most_token_chars(self) -> int | None:
        """Characters of a text that a token stands for at most; None where nothing bounds them."""
        return find_most_token_chars(self.backend)

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = False) -> str:
        """Return the text of `ids`. `skip_special` omits pad and end, never <think> or <answer>.
        Unknown ids yield nothing."""
        plain = [int(i) for i in ids]
        if len(plain) <= _PIECE_CHARS:
            return self.backend.decode(plain, skip_special_tokens=skip_special)
        # only this form lets other threads run meanwhile
        return self.backend.decode_batch([plain], skip_special_tokens=skip_special)[0]

    @property
    def special_ids(self) -> dict[str, int]:
        """The special tokens by their text."""
        added = self.backend.get_added_tokens_decoder()
        return {added[i].content: i for i in sorted(self._special_ids)}

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def piece_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token of a byte-level vocabulary adds to the text; b"" for an
        unknown id."""
        assert self.is_byte_level
        if token_id not in self._pieces:
            token = self.backend.id_to_token(token_id)
            self._pieces[token_id] = b"" if token is None else _byte_level_bytes(token)
        return self._pieces[token_id]

    @property
    def tool_template_source(self) -> str:
        """The template that renders conversations with tools; "" when there is none."""
        template = self._tool_template
        return self.chat_template if template is None else template.source

    @property
    def runs_template(self) -> bool:
        """Return whether conversations are rendered by a program of the model's folder, which may
        take its time."""
        return self._template is not None

    @property
    def takes_tools(self) -> bool:
        """Return whether the chat template shows tools: it reads the variable `tools`."""
        return self._tool_template is not None and self._tool_template.uses("tools")

    def render_chat(
        self,
        messages: Messages,
        *,
        options: Mapping[str, Any] | None = None,
        tools: Sequence[Tool] = (),
    ) -> str:
        """Return the text of a conversation up to the model's turn. `options` are passed to the
        chat template of a hub folder."""
        return self.render_chats([messages], options=options, tools=tools)[0]

    def render_chats(
        self,
        conversations: Sequence[Messages],
        *,
        options: Mapping[str, Any] | None = None,
        tools: Sequence[Tool] = (),
        generation_prompt: bool = True,
    ) -> list[str]:
        """Render several conversations at once, which is faster than `render_chat` on each. Without
        `generation_prompt` the beginning of the model's turn is left out. InputError for tools that
        the chat template does not show."""
        if tools and not self.takes_tools:
            raise InputError(
                "the model's chat template shows no tools",
                hint="leave the tools out, or use a model whose chat template reads `tools`",
            )
        if self._hub is None:
            return [plain_chat(as_turns(messages)) for messages in conversations]
        template = self._tool_template if tools else self._template
        if template is None:
            raise InputError(
                "this tokenizer has no chat template",
                hint='set data.template to a text with {prompt}, for example "{prompt}\\n", or '
                "use an instruct model",
            )
        return template.render(
            conversations, options or {}, generation_prompt=generation_prompt, tools=tools
        )

    def takes_system(
        self, options: Mapping[str, Any] | None = None, *, roles: Sequence[str] = ("system", "user")
    ) -> bool:
        """Return whether the chat template shows each system message of a conversation with these
        roles. Raises InputError if it rejects one."""
        probes = [
            f"{_SYSTEM_PROBE}{i}." if role == "system" else "1" for i, role in enumerate(roles)
        ]
        turns = [
            {"role": role, "content": probe} for role, probe in zip(roles, probes, strict=True)
        ]
        text = self.render_chat(turns, options=options)
        return all(probe in text for probe in probes if probe != "1")

    def is_longer(self, text: str, num_tokens: int) -> bool:
        """Return whether `text` certainly has more than `num_tokens` tokens, without encoding all
        of it.

        Pieces are encoded until they have twice as many. Encoding takes some 200 times the text's
        memory, this only a piece's share.
        """
        found = 0
        for start in range(0, len(text), _PIECE_CHARS):
            piece = text[start : start + _PIECE_CHARS]
            found += len(self.backend.encode_batch_fast([piece], add_special_tokens=False)[0])
            # a cut between pieces adds a few tokens, never as many again
            if found > 2 * num_tokens + _PIECE_CHARS:
                return True
        return False

    def save(self, folder: str | Path) -> None:
        """Write files that `load_tokenizer` and transformers.AutoTokenizer load with the same
        ids."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config_path = folder / "tokenizer_config.json"
        if self._hub is None:
            self.backend.save(str(folder / "tokenizer.json"))
            (folder / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")
            config = _own_config(self)
        else:
            assert self._hub.save is not None, "a server's tokenizer is not saved"
            self._hub.save(str(folder))
            config = json.loads(config_path.read_text(encoding="utf-8"))
        # generation_config.json, where hub folders keep further end tokens, belongs to the model
        # and not to us.
        config["gyre_eos_ids"] = list(self.eos_ids)
        config_path.write_text(
            json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )


def _as_array(ids: list[int]) -> np.ndarray:
    """Return int32 ids. A long list goes piece by piece: other threads wait for each."""
    pieces = [
        np.asarray(ids[start : start + _PIECE_CHARS], dtype=np.int32)
        for start in range(0, len(ids), _PIECE_CHARS)
    ]
    return np.concatenate(pieces) if pieces else np.zeros(0, np.int32)


def plain_chat(messages: Sequence[Mapping[str, str]]) -> str:
    """Render PLAIN_TEMPLATE in Python."""
    return "".join(m["content"] + (END if m["role"] == "assistant" else "\n") for m in messages)


def train_tokenizer(
    texts: Iterable[str],
    *,
    vocab_size: int,
    min_share: float = 0.1,
    style: Style = "clauses",
) -> Tokenizer:
    """Train our own tokenizer on rendered prompts and responses. A pure function of its arguments.

    The ids of SPECIAL are 0, 1, … in order. A merge needs `min_share` occurrences per text. Style
    "qwen2" splits text into words as that family's readers do; see QWEN2_CUTS.
    """
    smallest = len(SPECIAL) + 256
    if vocab_size < smallest:
        raise InputError(
            f"tokenizer.vocab_size = {vocab_size}: {len(SPECIAL)} special tokens and 256 bytes "
            f"need {smallest}",
            hint=f"set it to {smallest} or more; 512 suits one procedural task",
        )
    splitter = re.compile("|".join(re.escape(token) for token in SPECIAL))
    texts = list(texts)
    if not texts:
        raise InputError(
            "no text to train a tokenizer on", hint="check data.num_problems or the data file"
        )
    backend = _bare_backend(style)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=max(2, round(min_share * len(texts))),
        special_tokens=[AddedToken(token, normalized=False) for token in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # The trainer would merge across special tokens spelled in the text, and the encoder never sees
    # such pieces.
    backend.train_from_iterator(
        (
            # a long text at once takes many times its size in memory
            piece[start : start + _PIECE_CHARS]
            for text in texts
            for piece in splitter.split(text)
            for start in range(0, len(piece), _PIECE_CHARS)
        ),
        trainer,
    )
    return _own_tokenizer(_unmark_tags(backend))


def is_misread(tokenizer: Tokenizer, family: str) -> bool:
    """Return whether transformers would produce other ids from these files next to a model of that
    family."""
    if family != "qwen2":
        return False
    mine, theirs = (
        json.loads(backend.to_str()) for backend in (tokenizer.backend, _bare_backend("qwen2"))
    )
    return any(mine[part] != theirs[part] for part in ("normalizer", "pre_tokenizer"))


def load_tokenizer(
    folder_or_name: str | Path,
    *,
    end_token: str = "",
    read: Callable[[Path], HubFiles] | None = None,
) -> Tokenizer:
    """Load our own or a hub tokenizer from a local folder, or a hub name. `end_token` names the
    token that ends a turn, in place of the one that the chat template writes. `read` reads a hub
    folder's files (`text/hub.py`)."""
    folder = Path(folder_or_name).expanduser()
    if not folder.is_dir():
        in_folder_of_ours = len(folder.parts) == 2 and folder.parent.is_dir()
        if not is_hub_name(str(folder_or_name)) or in_folder_of_ours or folder.exists():
            raise InputError(
                f"tokenizer folder {folder_or_name} is not a folder{near_folders(folder)}",
                hint="give a folder in hub format (tokenizer.json beside config.json) or a hub "
                "name (Qwen/Qwen3-0.6B)",
            )
        return _hub_tokenizer(str(folder_or_name), end_token, read)
    config_path = folder / "tokenizer_config.json"
    if config_path.is_file() and read_json(config_path).get("gyre_tokenizer"):
        if end_token not in ("", END):
            raise ConfigError(
                f"tokenizer.end_token = {end_token!r}: our own tokenizer ends turns with {END}",
                hint="leave it out",
            )
        return _own_from(folder / "tokenizer.json")
    return _hub_tokenizer(str(folder), end_token, read)


def _own_from(path: Path) -> Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for every fault of the file
        raise InputError(
            f"{path} cannot be read: {error}",
            hint="the folder is damaged; export the model again or take an earlier snapshot",
        ) from error
    if backend.token_to_id(END) is None or backend.token_to_id(PAD) is None:
        raise InputError(f"{path} has no {END} or {PAD}", hint="export the model again")
    return _own_tokenizer(backend)


def _hub_tokenizer(
    folder_or_name: str, end_token: str, read: Callable[[Path], HubFiles] | None
) -> Tokenizer:
    loaded = load_hub_tokenizer(folder_or_name, end_token=end_token, read=read)
    hub, eos_ids = loaded.hub, loaded.eos_ids
    spare = hub.eos_id if hub.eos_id is not None else eos_ids[0]
    return Tokenizer(
        hub.backend,
        eos_ids=eos_ids,
        bos_id=hub.bos_id,
        pad_id=hub.pad_id if hub.pad_id is not None else spare,
        chat_template=hub.chat_template
        if isinstance(hub.chat_template, str)
        else _all_templates(hub.chat_template),
        hub=hub,
        template=loaded.template,
        tool_template=loaded.tool_template,
    )


def _all_templates(by_name: Any) -> str:
    return json.dumps(by_name, sort_keys=True) if by_name else ""


def _prefix_ids(backend: tokenizers.Tokenizer) -> tuple[int, ...]:
    """Return the ids that the vocabulary's own rule prepends to a text: BOS, or none. Its suffix is
    not ours to add."""
    whole, bare = (backend.encode("a", add_special_tokens=special).ids for special in (True, False))
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return tuple(whole[:start])
    return ()


def _bare_backend(style: Style) -> tokenizers.Tokenizer:
    """Return the pre-tokenization, without a vocabulary."""
    backend = tokenizers.Tokenizer(models.BPE())
    if style == "qwen2":
        backend.normalizer = normalizers.NFC()
    cuts = Regex(_ISOLATED if style == "clauses" else QWEN2_CUTS)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(cuts, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _own_tokenizer(backend: tokenizers.Tokenizer) -> Tokenizer:
    end_id, pad_id = backend.token_to_id(END), backend.token_to_id(PAD)
    assert end_id is not None and pad_id is not None
    return Tokenizer(
        backend, eos_ids=(end_id,), bos_id=None, pad_id=pad_id, chat_template=PLAIN_TEMPLATE
    )


def _own_config(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": END,
        "unk_token": None,  # bytes leave nothing unknown; Qwen2Tokenizer would add one of its own
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(1e9),
        "chat_template": tokenizer.chat_template,
        "gyre_tokenizer": 1,
    }


def _unmark_tags(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Keep <think> and the other tags when special tokens are skipped: rewards read them. The
    trainer marks all of them."""
    state = json.loads(backend.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] in (PAD, END)
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def _byte_level_table() -> dict[str, int]:
    """Return character → byte of the byte-level alphabet: printable Latin-1 maps to itself, the
    rest is shifted up."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(moved)}


_BYTE_OF = _byte_level_table()


def _byte_level_bytes(token: str) -> bytes:
    """Decode as the ByteLevel decoder does: by the alphabet, or literally when a character is
    outside it."""
    if all(character in _BYTE_OF for character in token):
        return bytes(_BYTE_OF[character] for character in token)
    return token.encode("utf-8")
