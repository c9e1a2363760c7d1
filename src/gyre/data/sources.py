"""Sources: problems become prompts, and records become an endless, resumable order. In: DataConfig and a tokenizer.
Out: `PromptSet`, and `ShuffledSource`, which implements PromptSource for prompts and for training sequences.

Everything dropped is counted in one event, data.loaded. Callers: examples, pairs, wire, cli.data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from gyre.core.errors import InputError, SnapshotError
from gyre.core.records import Prompt, TrainSequence
from gyre.core.seeds import derive_seed
from gyre.data.config import DataConfig
from gyre.data.problems import Problem, Split, by_prompt, prompt_key, split_by_file, split_by_hash
from gyre.data.rows import read_rows, to_problems
from gyre.data.tasks import Emit, generate_problems
from gyre.text.render import render_prompt
from gyre.text.tokenizer import Tokenizer

Record = TypeVar("Record")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """Prompts for online objectives and evaluation; no prompt text is in both halves."""

    source: str
    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]


def load_prompts(config: DataConfig, tokenizer: Tokenizer, *, emit: Emit) -> PromptSet:
    """Read or generate, split, render and encode."""
    split = read_split(config, emit=emit, with_answers=True)
    source = source_name(config)
    overlong = Overlong(config)
    halves = []
    for problems in (split.train, split.held_out):
        prompts = (encode_prompt(problem, config, tokenizer) for problem in problems)
        halves.append(tuple(p for p, at in zip(prompts, problems, strict=True) if overlong.keeps_prompt(p, at)))
    report_loaded(config, split, overlong, train=halves[0], held_out=halves[1], emit=emit)
    return PromptSet(source=source, train=halves[0], held_out=halves[1])


def source_name(config: DataConfig) -> str:
    """Short name of the source, for records and reports."""
    if config.source == "reasoning_gym":
        return f"reasoning_gym/{config.task}"
    return f"{config.source}/{Path(config.path).name}"


def read_split(
    config: DataConfig, *, emit: Emit, identity: Callable[[Problem], Hashable] = by_prompt, with_answers: bool = False
) -> Split:
    """All problems, divided. `identity` says which of them are repeats."""
    if config.source == "reasoning_gym":
        return split_by_hash(generate_problems(config, emit=emit), config.held_out_fraction, identity)
    problems = to_problems(read_rows(config), config, with_answers=with_answers)
    if config.held_out_path or config.held_out_split:
        held_out = to_problems(read_rows(config, held_out=True), config, with_answers=with_answers)
        return split_by_file(problems, held_out, identity)
    return split_by_hash(problems, config.held_out_fraction, identity)


def encode_prompt(problem: Problem, config: DataConfig, tokenizer: Tokenizer) -> Prompt:
    try:
        tokens, text = render_prompt(
            tokenizer,
            problem.prompt,
            template=config.template,
            system=config.system,
            options=config.template_options,
        )
    except InputError as error:
        raise InputError(f"{problem.where}: {error.message}", hint=error.hint) from error
    source = source_name(config)
    prompt_id = f"{derive_seed(source, prompt_key(problem.prompt)):016x}"
    return Prompt(prompt_id=prompt_id, tokens=tokens, text=text, task=problem.task, source=source)


class Overlong:
    """Applies max_prompt_tokens and max_sequence_tokens: an error that says where, or a counted drop."""

    def __init__(self, config: DataConfig) -> None:
        self._config = config
        self.num_dropped = 0

    def keeps_prompt(self, prompt: Prompt, problem: Problem) -> bool:
        return self._keeps(prompt.tokens.size, self._config.max_prompt_tokens, "prompt", problem.where)

    def keeps_sequence(self, num_tokens: int, problem: Problem) -> bool:
        return self._keeps(num_tokens, self._config.max_sequence_tokens, "sequence", problem.where)

    def _keeps(self, num_tokens: int, limit: int, what: str, where: str) -> bool:
        if limit == 0 or num_tokens <= limit:
            return True
        if self._config.overlong == "error":
            raise InputError(
                f"{where}: the {what} has {num_tokens} tokens; data.max_{what}_tokens = {limit}",
                hint=f'shorten the row, set data.overlong = "drop", or raise data.max_{what}_tokens; '
                "left open, it is what the model's context has room for",
            )
        self.num_dropped += 1
        return False


def report_loaded(
    config: DataConfig,
    split: Split,
    overlong: Overlong,
    *,
    train: Sequence[Any],
    held_out: Sequence[Any],
    emit: Emit,
    **dropped: int,
) -> None:
    """Emit what was kept and dropped; refuse a half that should not be empty."""
    reasons = {
        "duplicate": split.num_duplicates,
        "in_held_out": split.num_overlapping,
        "overlong": overlong.num_dropped,
        **dropped,
    }
    source = source_name(config)
    emit("data.loaded", source=source, train=len(train), held_out=len(held_out), dropped=reasons)
    if count := sum(reasons.values()):
        emit("drop.rows", source=source, count=count, **{reason: n for reason, n in reasons.items() if n})
    wants_held_out = config.held_out_fraction > 0 or config.held_out_path or config.held_out_split
    for half, records in (("train", train), ("held-out", held_out)):
        if not records and (half == "train" or wants_held_out):
            raise InputError(
                f"{source_name(config)}: the {half} half is empty "
                f"({len(train)} to train on, {len(held_out)} held out, {overlong.num_dropped} overlong)",
                hint="give more rows, or change data.held_out_fraction (0 holds nothing out)",
            )


class ShuffledSource(Generic[Record]):
    """PromptSource over records in memory: each epoch is a new order, a pure function of seed, name and epoch."""

    def __init__(self, records: Sequence[Record], seed: int, name: str) -> None:
        if not records:
            raise InputError(f"source '{name}' holds no records", hint="check the data section that it is made from")
        self._records = tuple(records)
        self._seed = seed
        self._name = name
        self._fingerprint = fingerprint(self._records)
        self._position = 0  # records taken since the beginning, over all epochs
        self._epoch = -1
        self._order = np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        """Records in one epoch."""
        return len(self._records)

    def take(self, n: int) -> Sequence[Any]:
        assert n > 0, n
        return [self._next() for _ in range(n)]

    def state(self) -> Mapping[str, Any]:
        return {
            "name": self._name,
            "seed": self._seed,
            "fingerprint": self._fingerprint,
            "position": self._position,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        mine = self.state()
        for key in ("name", "seed", "fingerprint"):
            if state.get(key) != mine[key]:
                raise SnapshotError(
                    f"the snapshot's data cursor has {key} {state.get(key)!r}, the data given now has {mine[key]!r}",
                    hint="resume with the data, tokenizer and seed that the run began with, or start a new run",
                )
        position = state.get("position")
        if not isinstance(position, int) or position < 0:
            raise SnapshotError(
                f"the snapshot's data cursor has position {position!r}; need a number of records",
                hint="the snapshot is damaged; resume from an earlier one",
            )
        self._position = position

    def _next(self) -> Record:
        epoch, offset = divmod(self._position, len(self._records))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._shuffled(epoch)
        self._position += 1
        return self._records[self._order[offset]]

    def _shuffled(self, epoch: int) -> np.ndarray:
        # Raw PCG64 output is stable over numpy versions; Generator.permutation is not promised to be.
        bits = np.random.PCG64(derive_seed(self._seed, "order", self._name, epoch))
        return np.argsort(bits.random_raw(len(self._records)), kind="stable")


class PairSource(ShuffledSource[tuple[TrainSequence, TrainSequence]]):
    """Preference pairs: take(n) returns n pairs as 2n sequences, chosen before rejected.

    pair_id is the pair's number since the beginning of the run: unique in any batch, also over epochs.
    """

    def take(self, n: int) -> Sequence[Any]:
        assert n > 0, n
        flat = []
        for _ in range(n):
            pair_id = self._position
            flat += [replace(sequence, pair_id=pair_id) for sequence in self._next()]
        return flat


def fingerprint(records: Sequence[Any]) -> str:
    """16 hex digits over tokens, masks and ids of all records, in order."""
    digest = hashlib.blake2b(digest_size=8)
    for record in records:
        for part in record if isinstance(record, tuple) else (record,):
            digest.update(len(part.tokens).to_bytes(4, "little") + part.tokens.tobytes())
            if isinstance(part, TrainSequence):
                for name in sorted(part.columns):
                    digest.update(name.encode() + part.columns[name].tobytes())
            else:
                digest.update(part.prompt_id.encode())
    return digest.hexdigest()
