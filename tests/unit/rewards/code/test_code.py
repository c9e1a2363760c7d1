"""Code checker: finding the program, reading tests, judging results, and what a program cannot get
away with."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.rewards.code.code import (
    UnreadableTests,
    extract_program,
    read_tests,
    run_tests,
    same_output,
    with_setup,
)
from gyre.rewards.code.values import same, wrap
from gyre.rewards.sandbox.executors import Cell, choose_mode
from gyre.rewards.sandbox.records import Limits, Program, ProgramResult

LIMITS = Limits(wall_s=10.0, cpu_s=5.0)


@pytest.fixture(scope="module")
def cell():
    cell = Cell(choose_mode("auto", emit=lambda kind, **fields: None))
    yield cell
    cell.close()


def _judge(cell, source, tests, function=None, *, limits=LIMITS, budget_s=60.0):
    run = lambda program, limits: cell.run(program, limits=limits)  # noqa: E731
    return run_tests(source, read_tests(tests, function), run, limits=limits, budget_s=budget_s)


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("a\n```python\nx = 1\n```\nb\n```\ny = 2\n```", "y = 2\n"),
        ("<think>```python\nbad\n```</think><answer>```py\nx = 1\n```</answer>", "x = 1\n"),
        ("<answer>\nx = 1\n</answer>", "x = 1"),
        ("<answer>x = 1", None),
        ("```python\nx = 1\n```\nand ```python\ny = ", "x = 1\n"),
        ("```python\nx = 1", None),
        ("```\nprint\n```", "print\n"),
        ("no code", None),
        ("``````", None),
        ("<think>a ``` opens it</think>\n```python\nx = 1\n```", "x = 1\n"),
        ("<think>```python\nx = 1\n```</think> as above", "x = 1\n"),
    ],
)
def test_finds_the_program(text, program):
    assert extract_program(text) == program


@given(st.text("`\nxpython<answer>/", max_size=60))
def test_finding_never_raises(text):
    extract_program(text)


def test_reads_every_shape_of_tests():
    (case,) = read_tests([{"stdin": "1", "stdout": "2"}], None)
    assert (case.stdin, case.stdout, case.calls) == ("1", "2", ())
    (case,) = read_tests([{"args": [1], "expected": 2}], "f")
    assert case.calls[0].spec == {"call": "f", "args": [1], "kwargs": {}} and case.expected == 2
    for text in (
        "assert f(1) == (2, 3)",
        "assert 'a' == f(1)",
        "assert f(1) > 2",
        "assert abs(f(1) - 2) < 1e-6",
    ):
        (case,) = read_tests([text], None)
        assert [call.spec for call in case.calls] == [{"expression": "f(1)"}], (
            "labels stay out of the sandbox"
        )
        assert not case.is_decided_inside
    assert len(read_tests({"inputs": ["1", ["2", "3"]], "outputs": ["1", "x"]}, None)) == 2
    (case,) = read_tests({"inputs": [[1]], "outputs": [2], "fn_name": "g"}, None)
    assert case.calls[0].spec == {"call": "g", "args": [1], "kwargs": {}}
    assert len(read_tests('[{"stdin": "", "stdout": ""}]', None)) == 1
    assert len(read_tests("assert f(1) == 1\nassert f(2) == 2\n", None)) == 2


@pytest.mark.parametrize(
    "tests",
    [
        None, [], "", {}, [5], [{"args": [1], "expected": 2}], ["assert ("], [{"in": 1}], {"inputs": [], "outputs": []},
        {"inputs": ["1", "2"], "outputs": ["1"]}, {"inputs": ["1"]}, {"inputs": "1", "outputs": "2"},
    ],
)  # fmt: skip
def test_unreadable_tests_are_the_label_s_fault(tests):
    with pytest.raises(UnreadableTests):
        read_tests(tests, None)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


def same_value(got: Any, wanted: Any, tolerance: float, *, loose: bool) -> bool:
    """Compare two plain values as the judge compares what comes out of the sandbox."""
    return same(wrap(got), wrap(wanted), tolerance, loose=loose)


@given(values)
def test_a_value_equals_itself(value):
    assert same_value(value, value, 0.0, loose=False) and same_value(value, value, 1e-6, loose=True)


def test_comparison_of_values():
    assert same_value((1, 2), [1, 2], 0.0, loose=True) and not same_value(
        (1, 2), [1, 2], 0.0, loose=False
    )
    assert same_value({1: [0.1 + 0.2]}, {"1": [0.3]}, 1e-6, loose=True)
    assert not same_value([1, 2], [1], 0.0, loose=True) and not same_value("1", 1, 0.0, loose=True)
    assert same_value(2, 2.0000000001, 1e-6, loose=True) and not same_value(3, 2, 1.0, loose=True)


@pytest.mark.parametrize(
    ("got", "wanted", "same"),
    [
        ("1 2 \n3\n\n", "1 2\n3", True),
        ("1 2 3", "1 2\n3", False),
        ("0.30000000004", "0.3", True),
        ("1  2.0", "1 2.0", True),
        ("12", "13", False),
        ("1000000", "1000001", False),
        ("", "1", False),
        ("0.0", "6.626e-34", False),
        ("0.0000001", "0.0", True),
    ],
)
def test_comparison_of_output(got, wanted, same):
    assert same_output(got, wanted, 1e-6) is same


ADD = "def add(a, b=1):\n    print('noise')\n    return a + b\n"
TESTS = [
    {"args": [1, 2], "expected": 3},
    {"args": [5], "kwargs": {"b": 5}, "expected": 10},
    "assert add(2, 2) == 4",
]


def test_right_and_wrong_functions(cell):
    assert _judge(cell, ADD, TESTS, "add").fraction == 1.0
    verdict = _judge(cell, "def add(a, b):\n    return a - b", TESTS, "add")
    assert verdict.passed == 0 and "test 1: returned -1, expected 3" in verdict.reason
    assert "test 3: returned 0, expected 4" in verdict.reason
    verdict = _judge(cell, "def add(a, b):\n    return [][a]", TESTS, "add")
    assert "IndexError" in verdict.reason
    assert "no function named" in _judge(cell, "x = 1", TESTS, "add").reason
    in_class = "class Solution:\n    def add(self, a, b=1):\n        return a + b"
    assert _judge(cell, in_class, TESTS[:2], "add").fraction == 1.0
    assert "does not load: SyntaxError" in _judge(cell, "def (", TESTS, "add").reason


def test_programs_with_input_and_output(cell):
    tests = {"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]}
    assert _judge(cell, "print(sum(map(int, input().split())))", tests).fraction == 1.0
    verdict = _judge(cell, "print(3)", tests)
    assert verdict.fraction == 0.5 and "test 2: printed 3, expected 7" in verdict.reason
    verdict = _judge(cell, "import sys; print(3 if '1' in input() else sys.exit(4))", tests)
    assert verdict.fraction == 0.5 and "exit code 4" in verdict.reason


@pytest.mark.parametrize(
    "body",
    [
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass "
        "P:\n    x: int\n"
        "def f(a): return P(a).x",
        "import pickle\nclass A:\n    def __init__(self, x): self.x = x\n"
        "def f(a): return pickle.loads(pickle.dumps(A(a))).x",
        "import sys\ndef f(a): return vars(sys.modules[__name__]) is globals() and a",
    ],
    ids=["dataclass", "pickle", "sys.modules"],
)
def test_a_program_with_functions_is_a_module(cell, body):
    assert _judge(cell, body, ["assert f(3) == 3"]).passed == 1


@pytest.mark.parametrize("end", ["exit()", "quit()", "exit(0)"])
def test_a_program_may_end_as_at_the_prompt(cell, end):
    assert _judge(cell, f"print(1)\n{end}\nprint(2)", [{"stdin": "", "stdout": "1"}]).passed == 1


def test_a_program_may_open_its_streams_by_name(cell):
    source = "print(open('/dev/stdin').read().strip(), open('/dev/fd/0').read() == '5\\n')"
    assert _judge(cell, source, [{"stdin": "5\n", "stdout": "5 True"}]).faults == ()


@pytest.mark.parametrize(
    "source",
    [
        "from __future__ import annotations\ndef f(a: List[int]): return a",
        '"""What it does."""\nfrom __future__ import (annotations,\n    division)\ndef f(a: '
        "List[int]): return a",
        "from __future__ import annotations; import re\ndef f(a: List[int]): return re and a",
        "def f(a: List[int]): return a",
    ],
)
def test_setup_goes_before_a_program_but_not_before_its_future_imports(cell, source):
    whole = with_setup("from typing import List", source)
    assert _judge(cell, whole, ["assert f(3) == 3"]).faults == ()


def test_a_call_that_ends_its_process_fails_alone(cell):
    source = "import os\ndef add(a, b=1):\n    if a == 5:\n        os._exit(0)\n    return a + b"
    verdict = _judge(cell, source, TESTS, "add")
    assert verdict.passed == 2 and verdict.faults == ("test 2: no result: it ended the process",)


def test_a_call_that_hangs_fails_alone(cell):
    source = "def add(a, b=1):\n    while a == 5:\n        pass\n    return a + b"
    verdict = _judge(cell, source, TESTS, "add", limits=Limits(wall_s=0.4))
    assert verdict.passed == 2 and "0.4 s of wall time" in verdict.reason


def test_the_time_for_all_tests_is_bounded(cell):
    tests = {"inputs": ["1"] * 50, "outputs": ["1"] * 50}
    verdict = _judge(cell, "import time; time.sleep(0.2); print(1)", tests, budget_s=0.7)
    assert 0 < verdict.passed < 50 and "not run" in verdict.reason


@pytest.mark.parametrize(
    "trick",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "raise SystemExit",
        "class Yes:\n    __eq__ = lambda self, other: True\n    __repr__ = lambda self: "
        "'Yes'\nadd = lambda *a: Yes()",
        'import os\nfor fd in range(20):\n    try:\n        os.write(fd, b\'{"ended": 0, "value": '
        '"3"}\\n\' * 3)\n'
        "    except OSError:\n        pass\nadd = lambda *a, **k: 0",
        "import builtins, json\nbuiltins.repr = lambda value: '3'\nadd = lambda *a, **k: 0",
        "print('3\\n10\\n4')\nadd = lambda *a, **k: None",
        "import sys\nsys.stdin.close()\ndef add(*a, **k):\n    return sys.stdin.read()",
    ],
)
def test_tricks_do_not_pass(cell, trick):
    tests = [*TESTS[1:], "assert add(40, 1) == 41", "assert add(1, 1) > 1"]
    verdict = _judge(cell, trick, tests, "add")
    assert verdict.passed == 0, verdict


def test_a_sandbox_that_cannot_start_is_no_verdict():
    def broken(program: Program, limits: Limits) -> ProgramResult:
        return ProgramResult(
            outcome="failed",
            stdout="",
            stderr="",
            exit_code=None,
            wall_s=0.0,
            cpu_s=0.0,
            detail="no fork server",
        )

    verdict = run_tests(ADD, read_tests(TESTS, "add"), broken, limits=LIMITS, budget_s=9.0)
    assert verdict.failed_sandbox and "no fork server" in verdict.reason
