"""Score: a config's rewards on given completions, without a model. In: a RunConfig, a JSONL file of
completions. Out: each part's value, outcome, reason and time. Loads no torch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, cast, get_args

import numpy as np
import tokenizers

from gyre.core.errors import ConfigError, InputError
from gyre.core.events import Emit
from gyre.core.records import Finish, Prompt, Rollout, Sampling, Score
from gyre.data.config import DataConfig
from gyre.data.rows import as_json, check_values, read_rows
from gyre.launch.run_folder.run_folder import read_overrides
from gyre.observability.events import count_events
from gyre.rewards.score import RuleScorer, without_end
from gyre.runconfig.run_config import RunConfig, load_run_config

_NOT_TASK = ("completion", "prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What the rewards said of a file."""

    wheres: tuple[str, ...]  # FILE:LINE
    completions: tuple[str, ...]
    scores: tuple[Score, ...]
    notes: tuple[str, ...]  # what a reader must know beside the numbers


def read_score_order(target: Path, overrides: list[str]) -> tuple[RunConfig, Path]:
    """(config, folder with the tokenizer of a run) of a TOML file or a run folder."""
    if target.is_dir():
        return load_run_config(
            target / "config.toml", [*read_overrides(target), *overrides]
        ), target / "tokenizer"
    return load_run_config(target, overrides), target.parent / "tokenizer"


def score_file(config: RunConfig, completions: Path, *, tokenizer: Path) -> Scored:
    """Score every row. InputError for a file or a row that cannot be read, with its line."""
    rules = [part for part in config.rewards.parts if part.kind != "model"]
    if not rules:
        raise ConfigError(
            "gyre score runs rule rewards, and the config has none",
            hint='add one: [[rewards.parts]] kind = "answer"; a reward model needs the trainer',
        )
    notes = [
        f"left out: part '{part.name}', a reward model"
        for part in config.rewards.parts
        if part.kind == "model"
    ]
    rows = list(read_rows(DataConfig(source="jsonl", path=str(completions))))
    if not rows:
        raise InputError(
            f"{completions} has no rows", hint='write {"completion": …, "answer": …, …}, one a line'
        )
    folders = (str(tokenizer), config.tokenizer.path, config.model.path)
    lengths = _Lengths(
        count=_find_counter([Path(folder).expanduser() for folder in folders if folder]),
        needed_by=next((part.name for part in rules if part.needs_num_tokens), ""),
        end_markers=config.rewards.end_markers,
    )
    if lengths.count is None and any(part.kind == "function" for part in rules):
        notes.append("no tokenizer is here: num_tokens counts words, unless a row says it")
    rollouts = [_read_row(where, row, lengths) for where, row in rows]
    events: list[dict[str, Any]] = []
    scores = asyncio.run(
        _score(config, rollouts, lambda kind, **fields: events.append({"kind": kind, **fields}))
    )
    notes += [f"{kind} × {number}" for kind, number in count_events(events).items()]
    return Scored(
        wheres=tuple(where for where, _ in rows),
        completions=tuple(rollout.text for rollout in rollouts),
        scores=tuple(scores),
        notes=tuple(notes),
    )


async def _score(config: RunConfig, rollouts: Sequence[Rollout], emit: Emit) -> Sequence[Score]:
    scorer = RuleScorer(config.rewards, emit=emit, clock=time.monotonic)
    longest_s = sum(part.total_limit_s for part in config.rewards.parts) * len(rollouts)
    try:
        return await scorer.score(rollouts, deadline_s=config.rewards.deadline_s + longest_s)
    finally:
        await scorer.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lengths:
    """Says how many tokens a completion has, as a run counts them: with the end token."""

    count: Callable[[str], int] | None  # tokens of a text; None: no tokenizer is here
    needed_by: str  # a part that judges by the number of tokens, or ""
    end_markers: Sequence[str]

    def find(self, where: str, row: Mapping[str, Any], text: str, finish: Finish) -> int:
        """Return what the row says, else what the tokenizer counts, else the words. InputError
        where a part needs tokens and only words are there."""
        if (told := _read_num_tokens(where, row)) is not None:
            return told
        if self.count is not None:
            # a text lacks the end token that the policy chose
            return self.count(without_end(text, self.end_markers)) + (finish == "stop")
        if self.needed_by:
            raise InputError(
                f"{where}: part '{self.needed_by}' judges by the number of tokens, and there is "
                "neither num_tokens nor a tokenizer here",
                hint='add "num_tokens" to the row, or set tokenizer.path to a folder with '
                "tokenizer.json",
            )
        return len(text.split())


def _read_row(where: str, row: Mapping[str, Any], lengths: _Lengths) -> Rollout:
    text, prompt = row.get("completion"), row.get("prompt") or ""
    if not isinstance(text, str):
        state = "is missing" if "completion" not in row else f"is {type(text).__name__}"
        raise InputError(
            f"{where}: field 'completion' {state}; the row has {', '.join(row) or 'no fields'}",
            hint='each row needs a text: {"completion": "…", "answer": …, further fields of the '
            "task}",
        )
    if not isinstance(prompt, str):
        raise InputError(
            f"{where}: field 'prompt' is {type(prompt).__name__}",
            hint="give a text, or leave it out",
        )
    finish = row.get("finish", "stop")
    if finish not in get_args(Finish):
        accepted = ", ".join(get_args(Finish))
        raise InputError(
            f"{where}: finish = {finish!r}; need one of {accepted}",
            hint="correct it, or leave it out",
        )
    num_tokens = lengths.find(where, row, text, finish)
    check_values(row, where)
    sampled, zeros = np.ones(num_tokens, dtype=bool), np.zeros(num_tokens, dtype=np.float32)
    tokens = np.zeros(num_tokens, dtype=np.int32)  # rewards see text and a number of tokens
    task = {name: as_json(value) for name, value in row.items() if name not in _NOT_TASK}
    return Rollout(
        rollout_id=where,
        group_id="score",
        prompt=Prompt(
            prompt_id=where, tokens=tokens[:0], text=prompt, task=task, source="gyre score"
        ),
        tokens=tokens,
        sampled=sampled,
        logprobs=zeros,
        raw_logprobs=zeros,
        versions=tokens,
        sampling=Sampling(),
        finish=cast(Finish, finish),
        text=text,
    )


def _read_num_tokens(where: str, row: Mapping[str, Any]) -> int | None:
    """Return the row's `num_tokens`, else the number of its `tokens`, as samples.jsonl has them;
    None where it has neither. InputError for a number that no completion has."""
    num_tokens, tokens = row.get("num_tokens"), row.get("tokens")
    if num_tokens is None:
        return len(tokens) if _is_token_list(tokens) else None
    if (
        not isinstance(num_tokens, int)
        or isinstance(num_tokens, bool)
        or not 0 <= num_tokens < 1 << 24
    ):
        raise InputError(
            f"{where}: num_tokens = {num_tokens!r}",
            hint="give a whole number of tokens, 0 to 16,777,215",
        )
    return num_tokens


def _is_token_list(value: Any) -> TypeGuard[list[int]]:
    """Return whether a field `tokens` holds token ids, not something else of the task. Pure."""
    return isinstance(value, list) and all(type(token) is int for token in value)


def _find_counter(folders: Sequence[Path]) -> Callable[[str], int] | None:
    """Return a function that counts a text's tokens, by the first tokenizer that is present."""
    for folder in folders:
        file = folder / "tokenizer.json"
        if file.is_file():
            try:
                backend = tokenizers.Tokenizer.from_file(str(file))
            # the library raises plain Exception for every fault of the file
            except Exception as error:
                raise InputError(
                    f"{file} cannot be read: {error}", hint="set tokenizer.path to another one"
                ) from error
            return lambda text: len(backend.encode(text, add_special_tokens=False).ids)
    return None
