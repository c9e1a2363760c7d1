"""Tests of code as known data sets write them: functions as pytest finds them (KodCode), and
LiveCodeBench's rows."""

from __future__ import annotations

import json

import pytest

from gyre.rewards.code.code import UnreadableTests, read_tests, run_tests
from gyre.rewards.sandbox.executors import Cell, choose_mode
from gyre.rewards.sandbox.records import Limits

KODCODE = """
from solution import add
import math

LIMIT = 10

def test_small():
    assert add(1, 2) == 3
    assert add(-1, 1) == 0

def test_limit():
    total = add(4, 6)
    assert total == LIMIT

def test_close():
    assert math.isclose(add(0.1, 0.2), 0.3)
"""
ADD = "def add(a, b):\n    return a + b\n"
LIVE = [
    {"input": "[1, 2]\n3", "output": "[1, 2, 3]", "testtype": "functional"},
    {"input": '[]\n"x"', "output": '["x"]', "testtype": "functional"},
]


@pytest.fixture(scope="module")
def cell():
    cell = Cell(choose_mode("auto", emit=lambda kind, **fields: None))
    yield cell
    cell.close()


def judge(cell, source: str, tests, function: str | None = None):
    limits = Limits(wall_s=20.0, cpu_s=15.0)
    run = lambda program, limits: cell.run(program, limits=limits)  # noqa: E731
    return run_tests(source, read_tests(tests, function), run, limits=limits, budget_s=90.0)


def test_each_assert_of_a_test_function_is_judged_outside(cell):
    verdict = judge(cell, ADD, KODCODE)
    assert (verdict.passed, verdict.total, verdict.decided_inside) == (4, 4, 0), verdict.faults
    wrong = judge(cell, ADD.replace("a + b", "3"), KODCODE)
    assert (wrong.passed, wrong.total) == (1, 4)


@pytest.mark.parametrize("tail", ["", "\ntest_small()\ntest_limit()\ntest_close()\n"])
def test_calls_of_the_functions_change_nothing(tail):
    assert [case.assertion.text for case in read_tests(KODCODE + tail, None)] == [
        "add(1, 2) == 3", "add(-1, 1) == 0", "total == LIMIT", "math.isclose(add(0.1, 0.2), 0.3)",
    ]  # fmt: skip


def test_an_assert_beside_the_functions_counts_once():
    texts = [case.assertion.text for case in read_tests(f"assert add(0, 0) == 0\n{KODCODE}", None)]
    assert len(texts) == 5 and texts[0] == "add(0, 0) == 0"


def test_what_cannot_be_split_still_runs_its_statements(cell):
    """Decided inside, and never taken for passed because nobody calls the function."""
    text = (
        "def test_it():\n    try:\n        assert add(1, 2) == 3\n    except ValueError:\n    "
        "    raise\n"
    )
    right, wrong = judge(cell, ADD, text), judge(cell, ADD.replace("+", "-"), text)
    assert (right.passed, right.total, right.decided_inside) == (1, 1, 1)
    assert (wrong.passed, wrong.total) == (0, 1)


@pytest.mark.parametrize(
    "text",
    [
        "def test_it(tmp_path):\n    assert add(1, 2) == 3",
        "@pytest.mark.slow\ndef test_it():\n    assert add(1, 2) == 3",
        "def test_it():\n    return add(1, 2) == 3",
        "def test_it():\n    pass",
    ],
)
def test_functions_that_need_pytest_or_check_nothing_are_refused(text):
    with pytest.raises(UnreadableTests):
        read_tests(text, None)


def test_rows_of_livecodebench(cell):
    source = "class Solution:\n    def put(self, items, item):\n        return [*items, item]\n"
    verdict = judge(cell, source, json.dumps(LIVE), "put")
    assert (verdict.passed, verdict.total) == (2, 2), verdict.faults
    assert judge(cell, source.replace("[*items, item]", "[item]"), LIVE, "put").passed == 1
    (case,) = read_tests([{"input": "3 4\n", "output": "7\n", "testtype": "stdin"}], None)
    assert (case.stdin, case.stdout) == ("3 4\n", "7\n")
    with pytest.raises(UnreadableTests, match="no JSON"):
        read_tests([{"input": "x y", "output": "7", "testtype": "functional"}], "put")
    with pytest.raises(UnreadableTests, match="field `function`"):
        read_tests(LIVE, None)
