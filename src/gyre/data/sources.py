"""Sources: problems to prompts, and records to an endless, resumable sequence. In: DataConfig and a
tokenizer. Out: `PromptSet`, and `ShuffledSource`, which implements PromptSource for prompts and for
training sequences.

One event, data.loaded, counts everything dropped. It also counts conversations whose last,
assistant turn was split from the prompt (split_turns).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from gyre.core.errors import InputError, SnapshotError
from gyre.core.events import Emit
from gyre.core.records import Prompt, TrainSequence
from gyre.core.seeds import derive_seed
from gyre.data.config import DataConfig
from gyre.data.problems import Problem, Split, by_prompt, prompt_key, split_by_file, split_by_hash
from gyre.data.rows import read_rows, to_problems
from gyre.data.tasks import generate_problems
from gyre.data.turns import is_split
from gyre.text.render import check_system, check_template, encode_rendered, render_texts
from gyre.text.tokenizer import Tokenizer

Record = TypeVar("Record")

BATCH_ROWS, BATCH_CHARS = 64, 1 << 20  # rendered at once
LONG_CHARS = 1 << 15  # a text of fewer characters is encoded without a look at its length


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
        halves.append(
            tuple(prompt for _, prompt in encode_prompts(problems, config, tokenizer, overlong))
        )
    report_loaded(config, split, overlong, train=halves[0], held_out=halves[1], emit=emit)
    return PromptSet(source=source, train=halves[0], held_out=halves[1])


def source_name(config: DataConfig) -> str:
    """Return a short name of the source, for records and reports."""
    if config.source == "reasoning_gym":
        return f"reasoning_gym/{config.task}"
    return f"{config.source}/{Path(config.path).name}"


def read_split(
    config: DataConfig,
    *,
    emit: Emit,
    identity: Callable[[Problem], Hashable] = by_prompt,
    with_answers: bool = False,
) -> Split:
    """Read all problems and split them. `identity` decides which are duplicates."""
    if config.source == "reasoning_gym":
        return split_by_hash(
            generate_problems(config, emit=emit), config.held_out_fraction, identity
        )
    problems = to_problems(read_rows(config), config, with_answers=with_answers)
    if config.held_out_path or config.held_out_split:
        held_out = to_problems(read_rows(config, held_out=True), config, with_answers=with_answers)
        return split_by_file(problems, held_out, identity)
    return split_by_hash(problems, config.held_out_fraction, identity)


def encode_prompts(
    problems: Iterable[Problem], config: DataConfig, tokenizer: Tokenizer, overlong: Overlong
) -> Iterator[tuple[Problem, Prompt]]:
    """Render and encode. Overlong prompts are dropped, or raise an error, before they are fully
    encoded."""
    check_template(config.template, config.system)
    checked, source, template = False, source_name(config), config.template
    for batch in _batches(
        problem
        for problem in problems
        if overlong.keeps_text(_last_text(problem), tokenizer, problem)
    ):
        if (
            template == "chat"
            and not checked
            and (config.system or any(_has_system(problem) for problem in batch))
        ):
            check_system(tokenizer, config.template_options)
            checked = True
        for problem, text in zip(batch, _render(batch, config, tokenizer), strict=True):
            if not overlong.keeps_text(text, tokenizer, problem):
                continue
            try:
                tokens = encode_rendered(tokenizer, text, template=template)
            except InputError as error:
                raise InputError(f"{problem.where}: {error.message}", hint=error.hint) from error
            prompt_id = f"{derive_seed(source, prompt_key(problem.prompt)):016x}"
            prompt = Prompt(
                prompt_id=prompt_id, tokens=tokens, text=text, task=problem.task, source=source
            )
            if overlong.keeps_prompt(prompt, problem):
                yield problem, prompt


def _render(batch: Sequence[Problem], config: DataConfig, tokenizer: Tokenizer) -> list[str]:
    """Render the texts of a batch. On an error, renders one by one to name the row."""

    def render(problems: Sequence[Problem]) -> list[str]:
        prompts, system = [problem.prompt for problem in problems], config.system
        return render_texts(
            tokenizer,
            prompts,
            template=config.template,
            system=system,
            options=config.template_options,
        )

    try:
        return render(batch)
    except InputError as error:
        for problem in batch if len(batch) > 1 else ():
            _render([problem], config, tokenizer)
        raise InputError(f"{batch[0].where}: {error.message}", hint=error.hint) from error


def _batches(problems: Iterable[Problem]) -> Iterator[list[Problem]]:
    """Yield batches of BATCH_ROWS problems, or fewer when their prompts are long."""
    batch: list[Problem] = []
    num_chars = 0
    for problem in problems:
        batch.append(problem)
        num_chars += sum(map(len, _texts(problem)))
        if len(batch) == BATCH_ROWS or num_chars > BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def _texts(problem: Problem) -> list[str]:
    prompt = problem.prompt
    return [prompt] if isinstance(prompt, str) else [turn.content for turn in prompt]


def _last_text(problem: Problem) -> str:
    return _texts(problem)[-1]


def _has_system(problem: Problem) -> bool:
    return not isinstance(problem.prompt, str) and any(
        turn.role == "system" for turn in problem.prompt
    )


class Overlong:
    """Applies max_prompt_tokens and max_sequence_tokens: an error with its location, or a counted
    drop."""

    def __init__(self, config: DataConfig) -> None:
        self._config = config
        self.num_dropped = 0

    def keeps_text(self, text: str, tokenizer: Tokenizer, problem: Problem) -> bool:
        """Return whether a prompt's text may be short enough. Checked before full encoding, which
        takes many times the text's size in memory."""
        return self._keeps_text(
            text, tokenizer, self._config.max_prompt_tokens, "prompt", problem.where
        )

    def keeps_response(self, text: str, tokenizer: Tokenizer, problem: Problem) -> bool:
        """Return whether a response may be short enough, as `keeps_text` does."""
        return self._keeps_text(
            text, tokenizer, self._config.max_sequence_tokens, "sequence", problem.where
        )

    def keeps_prompt(self, prompt: Prompt, problem: Problem) -> bool:
        return self._keeps(
            prompt.tokens.size, self._config.max_prompt_tokens, "prompt", problem.where
        )

    def keeps_sequence(self, num_tokens: int, problem: Problem) -> bool:
        return self._keeps(num_tokens, self._config.max_sequence_tokens, "sequence", problem.where)

    def _keeps_text(
        self, text: str, tokenizer: Tokenizer, limit: int, what: str, where: str
    ) -> bool:
        if limit == 0 or len(text) <= LONG_CHARS or not tokenizer.is_longer(text, limit):
            return True
        return self._refuse(f"more than {limit}", limit, what, where)

    def _keeps(self, num_tokens: int, limit: int, what: str, where: str) -> bool:
        return (
            limit == 0 or num_tokens <= limit or self._refuse(str(num_tokens), limit, what, where)
        )

    def _refuse(self, num_tokens: str, limit: int, what: str, where: str) -> bool:
        if self._config.overlong == "error":
            raise InputError(
                f"{where}: the {what} has {num_tokens} tokens; data.max_{what}_tokens = {limit}",
                hint='shorten the row, set data.overlong = "drop", or raise '
                f"data.max_{what}_tokens; "
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
    """Emit what was kept and dropped; raise for a half that must not be empty."""
    reasons = {
        "duplicate": split.num_duplicates,
        "in_held_out": split.num_overlapping,
        "overlong": overlong.num_dropped,
        **dropped,
    }
    source = source_name(config)
    num_split = sum(is_split(p.fields, p.prompt, config) for p in (*split.train, *split.held_out))
    emit(
        "data.loaded",
        source=source,
        train=len(train),
        held_out=len(held_out),
        dropped=reasons,
        split_turns=num_split,
    )
    if count := sum(reasons.values()):
        emit(
            "drop.rows",
            source=source,
            count=count,
            **{reason: n for reason, n in reasons.items() if n},
        )
    wants_held_out = config.held_out_fraction > 0 or config.held_out_path or config.held_out_split
    for half, records in (("train", train), ("held-out", held_out)):
        if not records and (half == "train" or wants_held_out):
            raise InputError(
                f"{source_name(config)}: the {half} half is empty "
                f"({len(train)} to train on, {len(held_out)} held out, {overlong.num_dropped} "
                "overlong)",
                hint="give more rows, or change data.held_out_fraction (0 holds nothing out)",
            )


class ShuffledSource(Generic[Record]):
    """PromptSource over records in memory. The order of an epoch is a pure function of seed, name
    and epoch."""

    def __init__(self, records: Sequence[Record], seed: int, name: str) -> None:
        if not records:
            raise InputError(
                f"source '{name}' holds no records",
                hint="check the data section that it is made from",
            )
        self._records = tuple(records)
        self._seed = seed
        self._name = name
        self._fingerprint = fingerprint(self._records)
        self._position = 0  # records taken since the beginning, over all epochs
        self._epoch = -1
        self._order = np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        """Return the number of records in one epoch."""
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
                    f"the snapshot's data cursor has {key} {state.get(key)!r}, the data given now "
                    f"has {mine[key]!r}",
                    hint="resume with the data, tokenizer and seed that the run began with, or "
                    "start a new run",
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
        # Raw PCG64 output is stable over numpy versions; Generator.permutation is not promised to
        # be.
        bits = np.random.PCG64(derive_seed(self._seed, "order", self._name, epoch))
        return np.argsort(bits.random_raw(len(self._records)), kind="stable")


class PairSource(ShuffledSource[tuple[TrainSequence, TrainSequence]]):
    """Preference pairs: take(n) returns n pairs as 2n sequences, chosen before rejected.

    pair_id numbers the pairs from the start of the run, so it is unique in any batch and across
    epochs.
    """

    def take(self, n: int) -> Sequence[Any]:
        assert n > 0, n
        flat = []
        for _ in range(n):
            pair_id = self._position
            flat += [replace(sequence, pair_id=pair_id) for sequence in self._next()]
        return flat


def fingerprint(records: Sequence[Any]) -> str:
    """Return 16 hex digits over tokens, masks and ids of all records, in order."""
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
