"""Checks: from a part's kind to the function that judges one completion. In: options, an Item. Out:
a result.

Runs in worker processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gyre.core.errors import InputError
from gyre.rewards import format, function
from gyre.rewards.answers import answer
from gyre.rewards.code import code
from gyre.rewards.messages import Item
from gyre.rewards.sandbox.records import Limits

Check = Callable[[Item], function.PartResult]
# Kinds whose checks cannot hang: linear in the text. Their results go out together. The kind
# "answer" announces by `Tools.before_slow` that math-verify, which may hang, begins.
QUICK = ("format", "length", "answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What a worker lends its checks."""

    run: code.RunProgram | None = None  # the sandbox, when a part runs code
    before_slow: Callable[[], None] | None = None  # to be called before work that may never end
    # called with the number of tests that the program could forge
    decided_inside: Callable[[int], None] = lambda count: None


def build_check(options: Mapping[str, Any], tools: Tools) -> Check:
    """Make the check of one part."""
    return _BUILDERS[options["kind"]](options, tools)


def _build_answer(options: Mapping[str, Any], tools: Tools) -> Check:
    values = {
        "right": options["right"],
        "wrong": options["wrong"],
        "unreadable answer": options["unreadable"],
    }

    def check(item: Item) -> function.PartResult:
        found = answer.match_answer(
            item.text,
            _field(item.task, options["label_field"]),
            forms=options["forms"],
            how=options["compare"],
            tolerance=options["tolerance"],
            tail_chars=options["tail_chars"],
            question=item.prompt,
            before_latex=tools.before_slow,
        )
        if found.outcome == "unreadable label":
            return 0.0, f"unreadable label: {found.reason}", "invalid"
        return values[found.outcome], f"{found.outcome}: {found.reason}", "ok"

    return check


def _build_format(options: Mapping[str, Any], tools: Tools) -> Check:
    opened, partial = options["opened_by_prompt"], options["partial"]
    return lambda item: (
        *format.check_format(item.text, opened_by_prompt=opened, partial=partial),
        "ok",
    )


def _build_length(options: Mapping[str, Any], tools: Tools) -> Check:
    soft, most = options["soft_tokens"], options["max_tokens"]
    return lambda item: (
        *format.length_value(item.num_tokens, soft_tokens=soft, max_tokens=most),
        "ok",
    )


def _build_code(options: Mapping[str, Any], tools: Tools) -> Check:
    run = tools.run
    assert run is not None, "code parts come with a sandbox"
    limits = Limits(**options["limits"])

    def check(item: Item) -> function.PartResult:
        source = code.extract_program(item.text)
        if source is None:
            return 0.0, "no program: neither an <answer> nor a fenced block", "ok"
        function_name = _field(item.task, options["function_field"])
        try:
            cases = code.read_tests(_field(item.task, options["tests_field"]), function_name)
        except code.UnreadableTests as error:
            return 0.0, f"unreadable tests: {error}", "invalid"
        setup = _field(item.task, options["setup_field"])
        source = code.with_setup(str(setup), source) if setup else source
        result = code.run_tests(
            source, cases[: options["max_tests"] or None], run,
            limits=limits, budget_s=options["limit_s"], tolerance=options["tolerance"],
        )  # fmt: skip
        tools.decided_inside(result.decided_inside)
        if result.failed_sandbox:
            return 0.0, result.reason, "error"
        value = (
            result.fraction
            if options["score"] == "fraction"
            else float(result.passed == result.total)
        )
        return value, result.reason, "ok"

    return check


def _build_function(options: Mapping[str, Any], tools: Tools) -> Check:
    """Import the user's module now, so that its import does not count as the first completion's
    time."""
    try:
        target = function.load_function(options["path"])
    except InputError as error:
        fault = error.message
        return lambda item: (0.0, fault, "error")
    extras = function.wanted_extras(target)

    def check(item: Item) -> function.PartResult:
        given = {name: getattr(item, name) for name in extras}
        return function.call_function(
            target, item.task, item.text, given, options["options"], name=options["path"]
        )

    return check


def _build_reasoning_gym(options: Mapping[str, Any], tools: Tools) -> Check:
    scorers: dict[str, Callable[[str | None, Any], float]] = {}

    def check(item: Item) -> function.PartResult:
        from reasoning_gym import get_score_answer_fn

        metadata = _field(item.task, "metadata")
        name = options["task"] or _field(item.task, "task") or _field(metadata, "source_dataset")
        if not name or not isinstance(item.task, Mapping) or "answer" not in item.task:
            return (
                0.0,
                "the task lacks what reasoning_gym needs: task (its name), answer, metadata",
                "invalid",
            )
        if name not in scorers:
            try:
                scorers[name] = get_score_answer_fn(name)  # type: ignore[assignment]
            except ValueError as error:
                return 0.0, str(error), "invalid"
        found = answer.extract(item.text, options["forms"])
        if found is None:
            return 0.0, f"no answer found as {' or '.join(options['forms'])}", "ok"
        value = float(scorers[name](found, item.task))
        return value, f"{name} gives {found[:80]!r} {value:g}", "ok"

    return check


def _field(mapping: Any, name: str) -> Any:
    return mapping.get(name) if isinstance(mapping, Mapping) else None


_BUILDERS: dict[str, Callable[[Mapping[str, Any], Tools], Check]] = {
    "answer": _build_answer,
    "format": _build_format,
    "length": _build_length,
    "code": _build_code,
    "function": _build_function,
    "reasoning_gym": _build_reasoning_gym,
}
