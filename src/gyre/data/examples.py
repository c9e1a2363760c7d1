"""Examples: supervised sequences from rows with a response, or from the worked traces of a
procedural task.

In: DataConfig and a tokenizer. Out: `ExampleSet` of TrainSequences with column loss_mask (True on
the response and its end token).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from gyre.core.errors import InputError
from gyre.core.events import Emit
from gyre.core.records import Prompt, TrainSequence
from gyre.core.seeds import derive_seed
from gyre.data.config import DataConfig
from gyre.data.problems import Problem, by_prompt, prompt_key
from gyre.data.sources import Overlong, encode_prompts, read_split, report_loaded, source_name
from gyre.data.tasks import Check, answer_checker
from gyre.data.traces import Trace, traced_tasks, write_trace
from gyre.data.turns import read_response
from gyre.text.messages import Message, as_turns
from gyre.text.render import r1_response, render_example
from gyre.text.tokenizer import Tokenizer, plain_chat


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleSet:
    """Supervised sequences, split as the prompts of the same source are."""

    source: str
    train: tuple[TrainSequence, ...]
    held_out: tuple[TrainSequence, ...]


def load_examples(config: DataConfig, tokenizer: Tokenizer, *, emit: Emit) -> ExampleSet:
    """Read or generate, split, write responses, encode. A trace that its task's scorer rejects is
    dropped and counted."""
    responder = Responder(config)
    split = read_split(config, emit=emit, identity=responder.identity)
    overlong = Overlong(config)
    halves = []
    for problems in (split.train, split.held_out):
        encoded = encode_prompts(problems, config, tokenizer, overlong)
        built = (
            _build(problem, prompt, tokenizer, responder, overlong) for problem, prompt in encoded
        )
        halves.append(tuple(sequence for sequence in built if sequence is not None))
    report_loaded(
        config,
        split,
        overlong,
        train=halves[0],
        held_out=halves[1],
        emit=emit,
        untraced=responder.num_untraced,
    )
    return ExampleSet(source=source_name(config), train=halves[0], held_out=halves[1])


def tokenizer_texts(config: DataConfig, *, num_texts: int, emit: Emit) -> list[str]:
    """Return training prompts with their responses, if any, as text for training our own
    tokenizer."""
    procedural = config.source == "reasoning_gym"
    split = read_split(config, emit=emit)
    texts = []
    for problem in split.train[:num_texts]:
        messages = (
            (Message(role="user", content=problem.prompt),)
            if isinstance(problem.prompt, str)
            else problem.prompt
        )
        system = (Message(role="system", content=config.system),) if config.system else ()
        response = problem.fields.get(config.response_field, "")
        if procedural:
            trace = write_trace(problem.task)
            response = r1_response(trace.think, trace.answer) if trace else ""
        elif isinstance(response, list):
            response = read_response(
                problem.fields,
                config.response_field,
                problem.where,
                "response_field",
                problem.prompt,
            )
        texts.append(
            plain_chat(as_turns([*system, *messages]))
            + (response if isinstance(response, str) else "")
        )
    return texts


class Responder:
    """Provides a problem's response: the row's field, or a trace that the task's scorer accepts."""

    def __init__(self, config: DataConfig) -> None:
        self._config = config
        self._check: Check | None = None
        self.num_untraced = 0
        if config.source == "reasoning_gym":
            need_traces(config)
            self._check = answer_checker(config)

    def identity(self, problem: Problem) -> Hashable:
        """Return the key of duplicates. Rows may give one prompt several responses; problems of a
        task have one."""
        if self._check is not None:
            return by_prompt(problem)
        return prompt_key(problem.prompt), self._response_of_row(problem)

    def response(self, problem: Problem) -> str | None:
        if self._check is None:
            return self._response_of_row(problem)
        trace = write_trace(problem.task)
        if trace is None or self._check(trace.answer, dict(problem.task)) < 1.0:
            self.num_untraced += 1
            return None
        if states_answer_only(self._config, problem):
            return r1_response("", trace.answer)
        return trace_text(trace)

    def _response_of_row(self, problem: Problem) -> str:
        return read_response(
            problem.fields,
            self._config.response_field,
            problem.where,
            "response_field",
            problem.prompt,
        )


def need_traces(config: DataConfig) -> None:
    if config.task not in traced_tasks():
        raise InputError(
            f"data.task = {config.task!r} has no worked traces to learn from; these have: "
            f"{', '.join(traced_tasks())}",
            hint='use one of them, or data.source = "jsonl" with a response a row',
        )


def states_answer_only(config: DataConfig, problem: Problem) -> bool:
    """Return whether this problem's response (of a pair: the worse one) is an answer without
    reasoning."""
    drawn = derive_seed(config.seed, "answer only", prompt_key(problem.prompt))
    return drawn < config.answer_only_share * 2**63


def trace_text(trace: Trace) -> str:
    return r1_response(trace.think, trace.answer)


def to_sequence(prompt: Prompt, response: str, tokenizer: Tokenizer) -> TrainSequence:
    tokens, loss_mask = render_example(tokenizer, prompt.tokens, response)
    return TrainSequence(tokens=tokens, columns={"loss_mask": loss_mask}, group_id=prompt.prompt_id)


def _build(
    problem: Problem, prompt: Prompt, tokenizer: Tokenizer, responder: Responder, overlong: Overlong
) -> TrainSequence | None:
    response = responder.response(problem)
    if response is None or not overlong.keeps_response(response, tokenizer, problem):
        return None
    sequence = to_sequence(prompt, response, tokenizer)
    return sequence if overlong.keeps_sequence(sequence.tokens.size, problem) else None
