"""Pairs: preference pairs from rows, or from procedural tasks. Rows have a better and a worse
response. Tasks pair a worked trace with one that contains a slip or, for answer_only_share of the
problems, with a wrong answer without reasoning.

In: DataConfig and a tokenizer. Out: `PairSet`; each pair is (chosen, rejected), both with column
loss_mask, a shared pair_id and scalars["chosen"] 1.0 and 0.0. `sources.PairSource` serves them.
"""

from __future__ import annotations

import random
from collections.abc import Hashable
from dataclasses import dataclass, replace

from gyre.core.events import Emit
from gyre.core.records import Prompt, TrainSequence
from gyre.core.seeds import derive_seed
from gyre.data.config import DataConfig
from gyre.data.examples import need_traces, states_answer_only, to_sequence, trace_text
from gyre.data.problems import Problem, by_prompt, prompt_key
from gyre.data.sources import Overlong, encode_prompts, read_split, report_loaded, source_name
from gyre.data.tasks import Check, answer_checker
from gyre.data.traces import corrupt_trace, write_trace
from gyre.data.turns import read_response
from gyre.text.render import r1_response
from gyre.text.tokenizer import Tokenizer

Pair = tuple[TrainSequence, TrainSequence]

# a slip can leave the answer right (0 * 5, a palindrome); then another one is drawn
_SLIP_TRIES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSet:
    """(chosen, rejected) pairs, split as the prompts of the same source are."""

    source: str
    train: tuple[Pair, ...]
    held_out: tuple[Pair, ...]


def load_pairs(config: DataConfig, tokenizer: Tokenizer, *, emit: Emit) -> PairSet:
    """Read or generate, split, encode. A pair without a difference is dropped and counted."""
    writer = PairWriter(config)
    split = read_split(config, emit=emit, identity=writer.identity)
    overlong = Overlong(config)
    halves: list[tuple[Pair, ...]] = []
    for problems in (split.train, split.held_out):
        encoded = encode_prompts(problems, config, tokenizer, overlong)
        built = (
            _build(problem, prompt, tokenizer, writer, overlong) for problem, prompt in encoded
        )
        kept = [pair for pair in built if pair is not None]
        halves.append(tuple(_number(pair, index) for index, pair in enumerate(kept)))
    report_loaded(
        config,
        split,
        overlong,
        train=halves[0],
        held_out=halves[1],
        emit=emit,
        no_difference=writer.num_equal,
    )
    return PairSet(source=source_name(config), train=halves[0], held_out=halves[1])


class PairWriter:
    """Provides a problem's two responses."""

    def __init__(self, config: DataConfig) -> None:
        self._config = config
        self._check: Check | None = None
        self.num_equal = 0
        if config.source == "reasoning_gym":
            need_traces(config)
            self._check = answer_checker(config)

    def identity(self, problem: Problem) -> Hashable:
        if self._check is not None:
            return by_prompt(problem)
        return prompt_key(problem.prompt), *self._responses_of_row(problem)

    def responses(self, problem: Problem) -> tuple[str, str] | None:
        """Return (chosen, rejected), or None where they do not differ relevantly."""
        if self._check is None:
            found = self._responses_of_row(problem)
            pair = found if found[0] != found[1] else None
        else:
            pair = self._traced(problem, self._check)
        self.num_equal += pair is None
        return pair

    def _responses_of_row(self, problem: Problem) -> tuple[str, str]:
        chosen, rejected = self._config.chosen_field, self._config.rejected_field
        return (
            read_response(problem.fields, chosen, problem.where, "chosen_field", problem.prompt),
            read_response(
                problem.fields, rejected, problem.where, "rejected_field", problem.prompt
            ),
        )

    def _traced(self, problem: Problem, check: Check) -> tuple[str, str] | None:
        right = write_trace(problem.task)
        if right is None or check(right.answer, dict(problem.task)) < 1.0:
            return None
        # The seed follows the prompt, not its place: the same problem gets the same wrong answer in
        # any selection.
        rng = random.Random(derive_seed(self._config.seed, "slip", prompt_key(problem.prompt)))
        for _ in range(_SLIP_TRIES):
            wrong = corrupt_trace(problem.task, rng)
            if wrong is not None and check(wrong.answer, dict(problem.task)) < 1.0:
                stated = states_answer_only(self._config, problem)
                return trace_text(right), r1_response("", wrong.answer) if stated else trace_text(
                    wrong
                )
        return None


def _build(
    problem: Problem, prompt: Prompt, tokenizer: Tokenizer, writer: PairWriter, overlong: Overlong
) -> Pair | None:
    responses = writer.responses(problem)
    if responses is None or not all(
        overlong.keeps_response(response, tokenizer, problem) for response in responses
    ):
        return None
    chosen, rejected = (to_sequence(prompt, response, tokenizer) for response in responses)
    longest = max(chosen.tokens.size, rejected.tokens.size)
    return (chosen, rejected) if overlong.keeps_sequence(longest, problem) else None


def _number(pair: Pair, pair_id: int) -> Pair:
    chosen, rejected = pair
    return (
        replace(chosen, pair_id=pair_id, scalars={"chosen": 1.0}),
        replace(rejected, pair_id=pair_id, scalars={"chosen": 0.0}),
    )
