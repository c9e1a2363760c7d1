"""Code checker: runs a completion's program against the task's tests. In: text, tests, a way to run programs.
Out: fraction of tests passed, with a reason for each that failed.

Tests, in the task's field `tests` (a list, or the mapping {"inputs", "outputs", "fn_name"?} of the known data sets):

    {"stdin": "3 4\\n", "stdout": "7\\n"}                    a whole program; each test is a start of its own
    {"args": [3, 4], "kwargs": {}, "expected": 7}           a function, named by the task's field `function`
    "assert add(3, 4) == 7"                                 a statement

Functions are called by rewards.harness inside the sandbox, and what they return is compared here, outside it. One start
serves all calls; a call that ends its process fails, and the calls after it get a fresh start.
Callers: rewards.checks, in a worker process.
"""

from __future__ import annotations

import ast
import importlib.resources
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gyre.rewards.sandbox import Limits, Program, ProgramResult

RunProgram = Callable[[Program, Limits], ProgramResult]
_NOT_RUN = "not run: the time for all tests was used up"


class UnreadableTests(ValueError):
    """The task's tests cannot be understood; the label is at fault, not the completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One test: either stdin and stdout, or a call for the harness with the value that it must return."""

    stdin: str | None = None
    stdout: str = ""
    call: Mapping[str, Any] | None = None
    expected: Any = None
    loose: bool = False  # expected came from JSON, which has no tuples


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeVerdict:
    """How many of the tests passed, and what became of the others."""

    passed: int
    total: int
    faults: tuple[str, ...]  # "test 2: …" or "tests 2, 3: …"; every failed test is named in one
    failed_sandbox: bool = False  # the sandbox could not run anything: no fault of the completion

    @property
    def fraction(self) -> float:
        return self.passed / self.total

    @property
    def reason(self) -> str:
        shown = "; ".join(self.faults[:5])
        more = f"; and {len(self.faults) - 5} more" if len(self.faults) > 5 else ""
        return f"{self.passed}/{self.total} tests passed" + (f": {shown}{more}" if shown else "")


def extract_program(text: str) -> str | None:
    """The last fenced block of the last <answer>, or of the text; an answer without a fence is taken as it is."""
    start = text.rfind("<answer>")
    if start >= 0:
        end = text.find("</answer>", start)
        if end < 0:
            return None
        inside = text[start + len("<answer>") : end]
        return _last_fence(inside) if "```" in inside else inside.strip("\n") or None
    return _last_fence(text)


def _last_fence(text: str) -> str | None:
    """Fences pair up from the front; one without its end counts as no block."""
    parts = text.split("```")
    blocks = parts[1::2] if len(parts) % 2 else parts[1:-1:2]
    if not blocks:
        return None
    first, newline, rest = blocks[-1].partition("\n")
    return (rest if newline and first.strip().isalnum() else blocks[-1].lstrip("\n")) or None


def read_tests(tests: Any, function: str | None) -> list[Case]:
    """Understand the task's tests. UnreadableTests when there are none or one is of no known shape."""
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError:
            tests = [line for line in tests.splitlines() if line.strip()]
    if isinstance(tests, Mapping) and "inputs" in tests:
        tests, function = _from_columns(tests), tests.get("fn_name") or function
    if not isinstance(tests, Sequence) or not tests:
        raise UnreadableTests(f"no tests: {str(tests)[:80]!r}")
    return [_read_test(test, function) for test in tests]


def _from_columns(tests: Mapping[str, Any]) -> list[dict[str, Any]]:
    pairs = zip(tests["inputs"], tests["outputs"], strict=False)
    if tests.get("fn_name"):
        return [{"args": given, "expected": wanted} for given, wanted in pairs]
    return [{"stdin": _lines(given), "stdout": _lines(wanted)} for given, wanted in pairs]


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _read_test(test: Any, function: str | None) -> Case:
    if isinstance(test, str):
        return _read_assert(test)
    if isinstance(test, Mapping) and "stdin" in test and "stdout" in test:
        return Case(stdin=str(test["stdin"]), stdout=str(test["stdout"]))
    if isinstance(test, Mapping) and "expected" in test and isinstance(test.get("args"), list | tuple):
        name = test.get("function", function)
        if not name:
            raise UnreadableTests("tests with args need the task's field `function`")
        call = {"call": name, "args": list(test["args"]), "kwargs": dict(test.get("kwargs", {}))}
        return Case(call=call, expected=test["expected"], loose=True)
    raise UnreadableTests(f"a test of no known shape: {str(test)[:80]!r}")


def _read_assert(statement: str) -> Case:
    """`assert f(x) == literal` is split, so that the literal stays out of the sandbox; other statements run whole."""
    try:
        body = ast.parse(statement.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnreadableTests(f"a test that is no Python: {statement[:80]!r}") from error
    test = body[0].test if len(body) == 1 and isinstance(body[0], ast.Assert) else None
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq | ast.Is):
        for value, literal in ((test.left, test.comparators[0]), (test.comparators[0], test.left)):
            try:
                return Case(call={"expression": ast.unparse(value)}, expected=ast.literal_eval(literal))
            except ValueError:
                continue
    return Case(call={"check": statement}, expected=True)


def run_tests(
    source: str, cases: Sequence[Case], run: RunProgram, *, limits: Limits, budget_s: float, tolerance: float = 1e-6
) -> CodeVerdict:
    """Run a program against its tests, within `budget_s` seconds for all of them together."""
    end_s = time.monotonic() + budget_s
    whole = [index for index, case in enumerate(cases) if case.call is None]
    called = [index for index, case in enumerate(cases) if case.call is not None]
    faults: dict[int, str | None] = {}
    broken = False
    for index in whole:
        if time.monotonic() > end_s:
            faults[index] = _NOT_RUN
            continue
        result = run(Program(source=source, stdin=cases[index].stdin or ""), _within(limits, end_s))
        broken |= result.outcome == "failed"
        faults[index] = _output_fault(result, cases[index].stdout, tolerance)
    while called:
        if time.monotonic() > end_s:
            faults.update(dict.fromkeys(called, _NOT_RUN))
            break
        result, told = _call(source, [cases[index] for index in called], run, _within(limits, end_s), tolerance)
        broken |= result.outcome == "failed"
        faults.update(zip(called, told, strict=False))
        called = called[len(told) :]
    failed = {index: fault for index, fault in sorted(faults.items()) if fault is not None}
    passed = len(cases) - len(failed)
    return CodeVerdict(passed=passed, total=len(cases), faults=_describe(failed), failed_sandbox=broken)


def _describe(failed: Mapping[int, str]) -> tuple[str, ...]:
    """One sentence per kind of fault, naming its tests."""
    tests: dict[str, list[str]] = {}
    for index, fault in failed.items():
        tests.setdefault(fault, []).append(str(index + 1))
    return tuple(f"test{'s' * (len(which) > 1)} {', '.join(which)}: {fault}" for fault, which in tests.items())


def _within(limits: Limits, end_s: float) -> Limits:
    return replace(limits, wall_s=min(limits.wall_s, max(end_s - time.monotonic(), 0.01)))


def _output_fault(result: ProgramResult, wanted: str, tolerance: float) -> str | None:
    if result.outcome != "ok":
        return result.detail or result.outcome
    if same_output(result.stdout, wanted, tolerance):
        return None
    return f"printed {_short(result.stdout.strip())}, expected {_short(wanted.strip())}"


def same_output(got: str, wanted: str, tolerance: float) -> bool:
    """Equal line by line but for spaces at line ends, or else word by word with numbers within the tolerance."""
    ours = [line.rstrip() for line in got.rstrip().splitlines()]
    theirs = [line.rstrip() for line in wanted.rstrip().splitlines()]
    if ours == theirs:
        return True
    if len(ours) != len(theirs):
        return False
    pairs = [(line.split(), other.split()) for line, other in zip(ours, theirs, strict=True)]
    return all(
        len(words) == len(others) and all(map(lambda a, b: a == b or _close_words(a, b, tolerance), words, others))
        for words, others in pairs
    )


def _close_words(ours: str, theirs: str, tolerance: float) -> bool:
    """Both are decimals and nearly the same; whole numbers must be the same word."""
    if not ("." in theirs or "e" in theirs.lower()):
        return False
    try:
        return math.isclose(float(ours), float(theirs), rel_tol=tolerance, abs_tol=tolerance)
    except ValueError:
        return False


def _call(
    source: str, cases: Sequence[Case], run: RunProgram, limits: Limits, tolerance: float
) -> tuple[ProgramResult, list[str | None]]:
    """One start of the harness. Returns a fault or None per test, as far as the process lived."""
    harness = importlib.resources.files("gyre.rewards").joinpath("harness.py").read_text(encoding="utf-8")
    token = os.urandom(8).hex()
    spec = json.dumps({"source": source, "calls": [case.call for case in cases], "token": token})
    result = run(Program(source=harness, stdin=spec), limits)
    told: list[str | None] = []
    loaded = False
    for line in result.stdout.splitlines():
        report = _read_report(line, token)
        if "broken" in report:
            return result, [f"the program does not load: {_short(str(report['broken']))}"] * len(cases)
        loaded |= "loaded" in report
        if report.get("ended") == len(told) and len(told) < len(cases):
            told.append(_call_fault(report, cases[len(told)], tolerance))
    if len(told) < len(cases):  # the process ended inside this test
        why = result.detail or ("it ended the process" if result.outcome == "ok" else result.outcome)
        told += [f"no result: {why}"] * (1 if loaded else len(cases))
    return result, told


def _read_report(line: str, token: str) -> Mapping[str, Any]:
    try:
        report = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return report if isinstance(report, dict) and report.get("token") == token else {}


def _call_fault(report: Mapping[str, Any], case: Case, tolerance: float) -> str | None:
    if "error" in report:
        return _short(str(report["error"]))
    text = str(report.get("value"))
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return f"returned {_short(text)}, which is no plain value"
    if same_value(value, case.expected, tolerance, loose=case.loose):
        return None
    return f"returned {_short(text)}, expected {_short(repr(case.expected))}"


def same_value(got: Any, wanted: Any, tolerance: float, *, loose: bool) -> bool:
    """Python's ==, with floats within the tolerance; `loose` takes a tuple for a list and a key for its text."""
    if isinstance(wanted, float) and isinstance(got, int | float):
        return math.isclose(got, wanted, rel_tol=tolerance, abs_tol=tolerance)
    if isinstance(wanted, list | tuple) and isinstance(got, list | tuple):
        if not loose and type(got) is not type(wanted):
            return False
        same_length = len(got) == len(wanted)
        return same_length and all(same_value(a, b, tolerance, loose=loose) for a, b in zip(got, wanted, strict=True))
    if isinstance(wanted, dict) and isinstance(got, dict):
        if loose:
            got, wanted = ({str(key): item for key, item in each.items()} for each in (got, wanted))
        return got.keys() == wanted.keys() and all(
            same_value(got[key], wanted[key], tolerance, loose=loose) for key in wanted
        )
    if loose and isinstance(got, set) and isinstance(wanted, list):
        return len(got) == len(wanted) and got == set(wanted)
    return bool(got == wanted)


def _short(text: str) -> str:
    return text if len(text) <= 120 else text[:90] + "…" + text[-25:]
