r"""Code checker: runs a completion's program against the task's tests. In: text, tests, a way to
run programs. Out: fraction of tests passed, with a reason for each that failed.

Tests, in the task's field `tests` (a list, or the mapping {"inputs", "outputs", "fn_name"?} of the
known data sets):

    {"stdin": "3 4\n", "stdout": "7\n"}                    a whole program; each test is a start
                                                             of its own
    {"input": …, "output": …, "testtype": …}                the same, or a function, as
                                                            LiveCodeBench writes them
    {"args": [3, 4], "kwargs": {}, "expected": 7}           a function, named by the task's field
                                                            `function`
    "assert abs(add(3, 4) - 7) < 1e-6"                      an assert; also a text of several, or a
                                                            check(candidate)

Functions are called by rewards.code.harness inside the sandbox, and what they return is judged
here, outside it. Asserts are split by rewards.code.asserts; one that cannot be split is decided
inside, where a program can forge it, and is counted. One start serves all calls; a call that ends
its process fails, and the calls after it get a fresh start. What a value costs here is bounded per
completion, in nodes (rewards.code.values.Meter) and bytes; a value past that is a wrong one.
"""

from __future__ import annotations

import ast
import importlib.resources
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gyre.rewards.code.asserts import (
    Assertion,
    HarnessCall,
    UnreadableTests,
    ask_inside,
    read_asserts,
)
from gyre.rewards.code.judging import FAULTS, CallFailed, Failed, Scope, evaluate
from gyre.rewards.code.values import (
    TooMuch,
    WorkBudget,
    decode,
    holds_object,
    is_close,
    same,
    shown,
    wrap,
)
from gyre.rewards.sandbox.records import Limits, Program, ProgramResult

__all__ = [
    "Case",
    "CodeResult",
    "RunProgram",
    "UnreadableTests",
    "extract_program",
    "read_tests",
    "run_tests",
    "with_setup",
]

RunProgram = Callable[[Program, Limits], ProgramResult]
_NOT_RUN = "not run: the time for all tests was used up"
_FUTURE = re.compile(r"^from __future__ import +(?:\([^()]*\)|[^\n;#(]*)", re.MULTILINE)
_MOST_ROUNDS = 3  # of calls: an answer about an object may be an object
_MOST_REPORT_BYTES = 8 << 20  # of values of one completion that are parsed


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One test: stdin and stdout; or one call with the value that it must return; or an assert with
    its calls."""

    stdin: str | None = None
    stdout: str = ""
    calls: tuple[HarnessCall, ...] = ()
    expected: Any = None  # of the one call, from JSON: it has no tuples, and keys are text
    assertion: Assertion | None = None

    @property
    def is_decided_inside(self) -> bool:
        """True when the sandbox decides it, so that the program could forge it."""
        return self.assertion is not None and self.assertion.tree is None


@dataclass(slots=True)
class _Returned:
    """What the calls of one completion returned."""

    values: dict[HarnessCall, Any]  # Failed where there is none
    meter: WorkBudget
    bytes_left: int = _MOST_REPORT_BYTES
    failed_sandbox: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeResult:
    """How many of the tests passed, and what became of the others."""

    passed: int
    total: int
    faults: tuple[str, ...]  # "test 2: …" or "tests 2, 3: …"; every failed test is named in one
    failed_sandbox: bool = False  # the sandbox could not run anything: no fault of the completion
    decided_inside: int = 0  # tests that the program could forge

    @property
    def fraction(self) -> float:
        return self.passed / self.total

    @property
    def reason(self) -> str:
        faults = "; ".join(self.faults[:5])
        more = f"; and {len(self.faults) - 5} more" if len(self.faults) > 5 else ""
        count = self.decided_inside
        inside = (
            f" ({count} test{'s are' if count > 1 else ' is'} decided inside the sandbox)"
            if count
            else ""
        )
        return f"{self.passed}/{self.total} tests passed{inside}" + (
            f": {faults}{more}" if faults else ""
        )


def extract_program(text: str) -> str | None:
    """Take the last fenced block of the last <answer>, or of what follows the thinking, or of the
    text. An answer without a fence is taken as it is."""
    start = text.rfind("<answer>")
    if start >= 0:
        end = text.find("</answer>", start)
        if end < 0:
            return None
        inside = text[start + len("<answer>") : end]
        return _last_fence(inside) if "```" in inside else inside.strip("\n") or None
    return _last_fence(text.rpartition("</think>")[2]) or _last_fence(text)


def with_setup(setup: str, source: str) -> str:
    """Return the program after the task's setup; what it takes from __future__ must stand before
    both."""
    futures = "".join(f"{found[0]}\n" for found in _FUTURE.finditer(source))
    return f"{futures}{setup}\n{_FUTURE.sub('pass', source)}"


def _last_fence(text: str) -> str | None:
    """Fences pair up from the front; one without its end counts as no block."""
    parts = text.split("```")
    blocks = parts[1::2] if len(parts) % 2 else parts[1:-1:2]
    if not blocks:
        return None
    first, newline, rest = blocks[-1].partition("\n")
    return (rest if newline and first.strip().isalnum() else blocks[-1].lstrip("\n")) or None


def read_tests(tests: Any, function: str | None) -> list[Case]:
    """Understand the task's tests. UnreadableTests when there are none or one is of no known
    shape."""
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError:
            tests = [tests]
    if isinstance(tests, Mapping) and "inputs" in tests:
        tests, function = _from_columns(tests), tests.get("fn_name") or function
    if not isinstance(tests, Sequence) or not tests:
        raise UnreadableTests(f"no tests: {str(tests)[:80]!r}")
    cases = [case for test in tests for case in _read_test(test, function)]
    if not cases:
        raise UnreadableTests(f"no tests: {str(tests)[:80]!r}")
    return cases


def _from_columns(tests: Mapping[str, Any]) -> list[dict[str, Any]]:
    inputs, outputs = tests["inputs"], tests.get("outputs")
    if not (
        isinstance(inputs, list | tuple)
        and isinstance(outputs, list | tuple)
        and len(inputs) == len(outputs)
    ):
        raise UnreadableTests(
            f"inputs and outputs are no two lists of the same length: {str(tests)[:80]!r}"
        )
    pairs = zip(inputs, outputs, strict=True)
    if tests.get("fn_name"):
        return [{"args": given, "expected": wanted} for given, wanted in pairs]
    return [{"stdin": _lines(given), "stdout": _lines(wanted)} for given, wanted in pairs]


def _from_livecodebench(test: Mapping[str, Any]) -> dict[str, Any]:
    """LiveCodeBench's rows: of a function, each line of the input is an argument as JSON, and the
    output is JSON."""
    if test.get("testtype") != "functional":
        return {"stdin": _lines(test["input"]), "stdout": _lines(test["output"])}
    try:
        args = [json.loads(line) for line in str(test["input"]).splitlines()]
        return {"args": args, "expected": json.loads(str(test["output"]))}
    except ValueError as error:
        raise UnreadableTests(
            f"a functional test whose lines are no JSON: {str(test)[:80]!r}"
        ) from error


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _read_test(test: Any, function: str | None) -> list[Case]:
    if isinstance(test, str):
        return [Case(calls=each.calls, assertion=each) for each in read_asserts(test, function)]
    if isinstance(test, Mapping) and "input" in test and "output" in test:
        test = _from_livecodebench(test)
    if isinstance(test, Mapping) and "stdin" in test and "stdout" in test:
        return [Case(stdin=str(test["stdin"]), stdout=str(test["stdout"]))]
    if (
        isinstance(test, Mapping)
        and "expected" in test
        and isinstance(test.get("args"), list | tuple)
    ):
        name = test.get("function", function)
        if not name:
            raise UnreadableTests("tests with args need the task's field `function`")
        call = HarnessCall(
            {"call": name, "args": list(test["args"]), "kwargs": dict(test.get("kwargs", {}))}
        )
        return [Case(calls=(call,), expected=wrap(test["expected"]))]
    raise UnreadableTests(f"a test of no known shape: {str(test)[:80]!r}")


def run_tests(
    source: str,
    cases: Sequence[Case],
    run: RunProgram,
    *,
    limits: Limits,
    budget_s: float,
    tolerance: float = 1e-6,
) -> CodeResult:
    """Run a program against its tests, within `budget_s` seconds for all of them together."""
    end_s = time.monotonic() + budget_s
    faults: dict[int, str | None] = {}
    broken = False
    for index, case in enumerate(cases):
        if case.calls:
            continue
        if time.monotonic() > end_s:
            faults[index] = _NOT_RUN
            continue
        result = run(Program(source=source, stdin=case.stdin or ""), _within(limits, end_s))
        broken |= result.outcome == "failed"
        faults[index] = _output_fault(result, case.stdout, tolerance)
    returned = _make_calls(source, cases, run, limits, end_s)
    for rounds_left in reversed(range(_MOST_ROUNDS)):
        further = [_ask_inside(case, returned, last=rounds_left == 0) for case in cases]
        if all(new is old for new, old in zip(further, cases, strict=True)):
            break
        cases, returned = further, _make_calls(source, further, run, limits, end_s)
    scope = Scope(values={}, meter=returned.meter, tolerance=tolerance)
    faults.update(
        {
            index: _call_fault(case, returned, scope)
            for index, case in enumerate(cases)
            if case.calls
        }
    )
    failed = {index: fault for index, fault in sorted(faults.items()) if fault is not None}
    return CodeResult(
        passed=len(cases) - len(failed),
        total=len(cases),
        faults=_describe(failed),
        failed_sandbox=broken or returned.failed_sandbox,
        decided_inside=sum(case.is_decided_inside for case in cases),
    )


def _ask_inside(case: Case, returned: _Returned, *, last: bool) -> Case:
    """Return the case, with what only the sandbox can tell of the objects that its calls
    returned."""
    if case.assertion is None or case.is_decided_inside:
        return case
    objects = {
        name for name, call in case.assertion.values.items() if holds_object(returned.values[call])
    }
    asked = ask_inside(case.assertion, objects, last=last) if objects else case.assertion
    return case if asked is case.assertion else replace(case, calls=asked.calls, assertion=asked)


def _describe(failed: Mapping[int, str]) -> tuple[str, ...]:
    """Write one sentence per kind of fault, naming its tests."""
    tests: dict[str, list[str]] = {}
    for index, fault in failed.items():
        tests.setdefault(fault, []).append(str(index + 1))
    return tuple(
        f"test{'s' * (len(which) > 1)} {', '.join(which)}: {fault}"
        for fault, which in tests.items()
    )


def _within(limits: Limits, end_s: float) -> Limits:
    return replace(limits, wall_s=min(limits.wall_s, max(end_s - time.monotonic(), 0.01)))


def _output_fault(result: ProgramResult, wanted: str, tolerance: float) -> str | None:
    if result.outcome != "ok":
        return result.detail or result.outcome
    if same_output(result.stdout, wanted, tolerance):
        return None
    return f"printed {_short(result.stdout.strip())}, expected {_short(wanted.strip())}"


def same_output(got: str, wanted: str, tolerance: float) -> bool:
    """Equal line by line but for spaces at line ends, or else word by word with numbers within the
    tolerance."""
    ours = [line.rstrip() for line in got.rstrip().splitlines()]
    theirs = [line.rstrip() for line in wanted.rstrip().splitlines()]
    if ours == theirs:
        return True
    if len(ours) != len(theirs):
        return False
    pairs = [(line.split(), other.split()) for line, other in zip(ours, theirs, strict=True)]
    return all(
        len(words) == len(others)
        and all(map(lambda a, b: a == b or _close_words(a, b, tolerance), words, others))
        for words, others in pairs
    )


def _close_words(ours: str, theirs: str, tolerance: float) -> bool:
    """Compare two words as decimals within the tolerance. Whole numbers must be the same word."""
    if not ("." in theirs or "e" in theirs.lower()):
        return False
    try:
        return float(ours) == float(theirs) or is_close(float(ours), float(theirs), tolerance)
    except ValueError:
        return False


def _make_calls(
    source: str, cases: Sequence[Case], run: RunProgram, limits: Limits, end_s: float
) -> _Returned:
    """Make every call of every test once, in order, with a fresh start after one that ended its
    process."""
    left = list(dict.fromkeys(call for case in cases for call in case.calls))
    returned = _Returned(values={}, meter=WorkBudget())
    while left:
        if time.monotonic() > end_s:
            returned.values.update(dict.fromkeys(left, Failed(_NOT_RUN)))
            break
        left = left[_start(source, left, run, _within(limits, end_s), returned) :]
    return returned


def _start(
    source: str, calls: Sequence[HarnessCall], run: RunProgram, limits: Limits, returned: _Returned
) -> int:
    """Start the harness once. Returns how many of the calls have their value, or none to come."""
    harness = (
        importlib.resources.files("gyre.rewards.code")
        .joinpath("harness.py")
        .read_text(encoding="utf-8")
    )
    token = os.urandom(8).hex()
    spec = json.dumps(
        {"source": source, "calls": [dict(call.spec) for call in calls], "token": token}
    )
    result = run(Program(source=harness, stdin=spec), limits)
    returned.failed_sandbox |= result.outcome == "failed"
    done, loaded = 0, False
    for line in result.stdout.splitlines():
        kind, *fields = _read_report(line, token, returned)
        if kind == "broken" and len(fields) == 1:
            fault = Failed(f"the program does not load: {_short(str(fields[0]))}")
            returned.values.update(dict.fromkeys(calls, fault))
            return len(calls)
        loaded |= kind == "loaded"
        if len(fields) == 2 and fields[0] == done and done < len(calls):
            returned.values[calls[done]] = _read_value(kind, fields[1], returned)
            done += 1
    # else the values before filled the output
    if done < len(calls) and not (done and result.outcome == "output"):
        why = result.detail or (
            "it ended the process" if result.outcome == "ok" else result.outcome
        )
        lost = calls[done : done + 1] if loaded else calls[done:]
        returned.values.update(dict.fromkeys(lost, Failed(f"no result: {why}")))
        done += len(lost)
    return done


def _read_report(line: str, token: str, returned: _Returned) -> list[Any]:
    """Return a line of the harness without its token; [""] for any other."""
    if not line.startswith(f'["{token}", "'):
        return [""]
    returned.bytes_left -= len(line)
    if returned.bytes_left < 0:
        named = re.match(r'\["\w+", "(value|error)", (\d+), ', line[:100])
        return (
            [named[1], int(named[2]), ["large", "its values are too large in sum"]]
            if named
            else [""]
        )
    try:
        report = json.loads(line)
    except (ValueError, RecursionError):
        return [""]
    return report[1:]


def _read_value(kind: str, wire: Any, returned: _Returned) -> Any:
    if kind == "error":
        return Failed(_short(wire) if isinstance(wire, str) else "no result")
    try:
        return decode(wire, returned.meter)
    except TooMuch as fault:
        return Failed(f"no value to judge: {fault}")
    except (ValueError, RecursionError):
        return Failed("returned what is no plain value")


def _call_fault(case: Case, returned: _Returned, scope: Scope) -> str | None:
    """None where the test holds on what its calls returned."""
    if case.assertion is None or case.is_decided_inside:
        value = returned.values[case.calls[-1]]
        if isinstance(value, Failed):
            return value.why
        if case.is_decided_inside:
            return None if value is True else "returned no verdict"
        try:
            holds = same(value, case.expected, scope.tolerance, loose=True)
        except FAULTS:
            holds = False
        return None if holds else f"returned {shown(value)}, expected {shown(case.expected)}"
    assertion = case.assertion
    assert assertion.tree is not None
    values = {name: returned.values[call] for name, call in assertion.values.items()}
    if not any(
        isinstance(node, ast.Name) and node.id in values for node in ast.walk(assertion.tree)
    ):
        failed = [value.why for value in values.values() if isinstance(value, Failed)]
        if failed:  # a plain fact holds only where the program loads
            return failed[0]
    try:
        holds = bool(evaluate(assertion.tree, replace(scope, values=values)))
    except CallFailed as fault:
        return str(fault)
    except TooMuch as fault:
        return f"no value to judge: {fault}"
    except FAULTS as error:
        return f"{_returned(values)}, and {_short(assertion.text)} raises {type(error).__name__}"
    return None if holds else f"{_returned(values)}, {_wanted(assertion)}"


def _returned(values: Mapping[str, Any]) -> str:
    return "returned " + " and ".join(
        shown(value) for value in values.values() if not isinstance(value, Failed)
    )


def _wanted(assertion: Assertion) -> str:
    """Return the label, where the assert is a call == the label; else the assert."""
    tree = assertion.tree
    if (
        isinstance(tree, ast.Compare)
        and len(tree.ops) == 1
        and isinstance(tree.ops[0], ast.Eq | ast.Is)
    ):
        for call, label in ((tree.left, tree.comparators[0]), (tree.comparators[0], tree.left)):
            if (
                isinstance(call, ast.Name)
                and call.id in assertion.values
                and not isinstance(label, ast.Name)
            ):
                return f"expected {_short(ast.unparse(label))}"
    return f"which fails {_short(assertion.text)}"


def _short(text: str) -> str:
    return text if len(text) <= 120 else text[:90] + "…" + text[-25:]
