"""Asserts judged outside the sandbox: which shapes are, that no program can forge them, and that a
wrong value of any kind is one wrong test. Over 500 lines: one table of shapes, and each forged or
broken value is a case of its own."""

from __future__ import annotations

import asyncio
import importlib.resources
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.rewards.code.code import UnreadableTests, read_tests, run_tests
from gyre.rewards.code.values import Set, TooMuch, WorkBudget, decode, order, same, shown, wrap
from gyre.rewards.config import CodePart, RewardsConfig
from gyre.rewards.sandbox.executors import Cell, choose_mode
from gyre.rewards.sandbox.records import Limits
from gyre.rewards.score import RuleScorer
from rewards_cases import Events, rollout

LIMITS = Limits(wall_s=20.0, cpu_s=15.0)


@pytest.fixture(scope="module")
def cell():
    cell = Cell(choose_mode("auto", emit=lambda kind, **fields: None))
    yield cell
    cell.close()


def _judge(cell, source, tests, function=None, **options):
    run = lambda program, limits: cell.run(program, limits=limits)  # noqa: E731
    limits = options.get("limits", LIMITS)
    return run_tests(source, read_tests(tests, function), run, limits=limits, budget_s=90.0)


# assert over f(KEY), a right value and a wrong one, as source
SHAPES = [
    ("abs({}) == 3", "-3", "2"),
    ("abs({} - 7) < 1e-6", "7.0000001", "7.1"),
    ("abs({} - 7) <= 1e-6, 'a message'", "7", "6"),
    ("1e-6 > abs(7 - {})", "7", "8"),
    ("math.isclose({}, 0.3, rel_tol=1e-6)", "0.1 + 0.2", "0.31"),
    ("isclose({}, 0.3)", "0.3", "0.31"),
    ("{} in (4, 5)", "5", "6"),
    ("{} in ['a', 'b']", "'b'", "'ab'"),
    ("{} in 'abc'", "'bc'", "'cb'"),
    ("3 in {}", "{1, 3}", "[1, 2]"),
    ("{} not in [0, 1]", "2", "1"),
    ("round({}, 2) == 3.14", "3.14159", "3.15"),
    ("round({}) == 3", "3.1", "3.6"),
    ("{} == 41", "41", "42"),
    ("[1, (2, 'x')] == {}", "[1, (2, 'x')]", "[1, [2, 'x']]"),
    ("{} == 0.3", "0.1 + 0.2", "0.300002"),
    ("{} == {{'a': [1], 2: None}}", "{2: None, 'a': [1]}", "{2: None, 'a': [2]}"),
    ("{} != 5", "6", "5"),
    ("{} < 5", "4", "5"),
    ("3 < {} <= 5", "5", "3"),
    ("{} is True", "True", "1"),
    ("{} is None", "None", "0"),
    ("{} is not None", "0", "None"),
    ("set({}) == {{1, 2}}", "[2, 1, 1]", "[1, 2, 3]"),
    ("{} == {{1, 2}}", "{2, 1}", "[1, 2]"),
    ("{} == set()", "set()", "{1}"),
    ("{} <= {{1, 2}}", "{1}", "{3}"),
    ("sorted({}) == [1, 2, 3]", "(3, 1, 2)", "(3, 1)"),
    ("sorted({}, reverse=True) == [2, 1]", "[1, 2]", "[1, 3]"),
    ("len({}) == 3", "'abc'", "'ab'"),
    ("{}[0] == 1", "[1, 5]", "[2]"),
    ("{}[-1]['k'] == 'v'", "[{'k': 'v'}]", "[{'k': 'w'}]"),
    ("{}[:2] == 'ab'", "'abc'", "'bac'"),
    ("{}", "[0]", "[]"),
    ("not {}", "''", "'x'"),
    ("{} == 6 and {} > 0 or {} == 2", "2", "3"),
    ("isinstance({}, (int, float)) and {} > 2", "3", "'3'"),
    ("type({}) == list", "[]", "()"),
    ("all(abs(a - b) < 1e-6 for a, b in zip({}, [1.0, 2.0]))", "[1, 2]", "[1, 3]"),
    ("[x * 2 for x in {} if x > 1] == [4]", "[1, 2]", "[2, 2]"),
    ("sum({}) / 2 == 1.5", "[1, 2]", "[1, 3]"),
    ("max({}) - min({}) == 2", "[1, 3]", "[1, 2]"),
    ("tuple({}) == (1, 2)", "[1, 2]", "[1]"),
    ("list(map(int, {})) == [1, 2]", "['1', '2']", "['1', '3']"),
    ("{}.lower().split(',') == ['a', 'b']", "'A,b'", "'A;b'"),
    ("sorted({}.items()) == [('a', 1)]", "{'a': 1}", "{'a': 2}"),
    ("{}.get('a', 0) == 1", "{'a': 1}", "{'b': 1}"),
    ("str({}) == '12'", "12", "21"),
    ("{} == b'ab'", "b'ab'", "'ab'"),
    ("{} == 1 + 2j", "1 + 2j", "1 - 2j"),
    ("f({}) == 9", "9", "10"),
    ("max({}, key=len) == 'ab'", "['ab', 'c']", "['a', 'bc']"),
    ("min({}, default=7) == 7", "[]", "[1]"),
    ("round({}, ndigits=1) == 2.7", "2.675", "2.775"),
    ("sum({}, []) == [1, 2]", "[[1], [2]]", "[[1], [3]]"),
    ("{} == dict(a=1)", "{'a': 1}", "{'a': 2}"),
    ("{} | {{'b': 2}} == {{'a': 1, 'b': 2}}", "{'a': 1}", "{'a': 2}"),
    ("{}.replace('l', 'L', 1) == 'heLlo'", "'hello'", "'heLLo'"),
    ("callable({})", "len", "3"),
]
TESTS = [
    "assert " + shape.replace("{}", f"f({1000 + number})").replace("{{", "{").replace("}}", "}")
    for number, (shape, _, _) in enumerate(SHAPES)
]


def _table(column):
    rows = ", ".join(f"{1000 + number}: lambda: {row[column]}" for number, row in enumerate(SHAPES))
    return f"table = {{{rows}}}\ndef f(key):\n    return table[key]() if key in table else key\n"


def test_usual_shapes_are_judged_outside(cell):
    verdict = _judge(cell, _table(1), TESTS)
    assert verdict.passed == len(SHAPES) and verdict.decided_inside == 0, verdict.faults
    verdict = _judge(cell, _table(2), TESTS)
    assert (
        verdict.passed == 0 and len(verdict.faults) == len(SHAPES) and verdict.decided_inside == 0
    )


# what any value, or another one, passes cannot be forged; the rest takes the right value
TELLING = [
    test
    for test, (shape, _, _) in zip(TESTS, SHAPES, strict=True)
    if not shape.startswith(("{} !", "{} <", "{} is", "not", "{} not", "isinstance", "type"))
    and shape != "{}"
]
_FORGE_ALL = (
    "import json, os, sys, gc\nfound = set()\nframe = sys._getframe()\nwhile frame:\n"
    "    for value in [*frame.f_locals.values(), *(d for f in frame.f_locals.values() for d in "
    "(getattr(f, '__defaults__', 0) or ()))]:\n"
    "        if isinstance(value, str) and len(value) == 16:\n            found.add(value)\n    "
    "frame = frame.f_back\n"
    "for each in gc.get_objects():\n    for part in getattr(each, '__kwdefaults__', None) or {}:\n"
    "        value = each.__kwdefaults__[part]\n        if isinstance(value, str) and len(value) "
    "== 16:\n            found.add(value)\n"
    "assert found\n"
    "for fd in range(20):\n    for token in found:\n        for lines in ([[token, 'loaded']] + "
    "[[token, 'value', i, VALUE] for i in range(99)],):\n"
    "            try:\n                os.write(fd, ''.join(json.dumps(each) + '\\n' for each in "
    "lines).encode())\n"
    "            except OSError:\n                pass\n"
)
TRICKS = {
    "equal to all": "class Yes:\n    def __eq__(s, o): return True\n    __lt__ = __le__ = __gt__ "
    "= __ge__ = __contains__ = __eq__\n"
    "    def __sub__(s, o): return s\n    __rsub__ = __add__ = __getitem__ = __sub__\n    def "
    "__abs__(s): return 0\n    __len__ = __round__ = lambda s, *a: 8\n"
    "    def __iter__(s): return iter([s, s, s])\n    def __hash__(s): return 1\n    def "
    "__repr__(s): return '7'\nf = lambda *a: Yes()",
    "builtins": "import builtins, math\nfor name in ('abs', 'len', 'sum', 'round', 'max', "
    "'min'):\n    setattr(builtins, name, lambda *a, **k: 0)\n"
    "for name in ('all', 'any', 'isinstance', 'bool'):\n    setattr(builtins, name, lambda *a, "
    "**k: True)\nmath.isclose = lambda *a, **k: True\nf = lambda *a: 1e9",
    "globals": "abs = len = sum = round = lambda *a: 0\nisclose = all = isinstance = lambda *a, "
    "**k: True\nsorted = set = lambda *a, **k: []\nf = lambda *a: 1e9",
    "float": "class F(float):\n    def __sub__(s, o): return 0.0\n    __rsub__ = __abs__ = lambda "
    "s, *a: 0.0\n    def __eq__(s, o): return True\n    def __float__(s): return 7.7\nf = lambda "
    "*a: F(1e9)",
    "int": "class I(int):\n    def __eq__(s, o): return True\n    def __index__(s): return 7\n    "
    "__int__ = __abs__ = __index__\n    __hash__ = int.__hash__\nf = lambda *a: I(10**9)",
    "str": "class S(str):\n    def __eq__(s, o): return True\n    def __contains__(s, o): return "
    "True\n    def lower(s): return 'a,b'\n    def __repr__(s): return '7'\n    __hash__ = "
    "str.__hash__\nf = lambda *a: S('zzzz')",
    "list": "class L(list):\n    def __eq__(s, o): return True\n    def __iter__(s): return "
    "iter([1])\n    def __len__(s): return 3\n    def __getitem__(s, i): return 1\n    def "
    "__contains__(s, o): return True\nf = lambda *a: L(['z', 'y', 'x', 'w'])",
    "report true": _FORGE_ALL.replace("VALUE", "8.5") + "f = lambda *a: 1e9",
    "report object": _FORGE_ALL.replace("VALUE", '["object", "Yes", True]') + "f = lambda *a: 1e9",
    "report and leave": _FORGE_ALL.replace("VALUE", '["list", 8.5, 8.5, 8.5, 8.5]') + "os._exit(0)",
    "harness": "import sys\nmain = sys.modules['__main__']\nmain.perform = lambda *a: "
    "8.5\nmain.plain = lambda *a: 8.5\nf = lambda *a: 1e9",
    "json": "import json\njson.dumps = lambda *a, **k: 'true'\nf = lambda *a: 1e9",
    "eval": "import builtins\nbuiltins.eval = lambda *a: 8.5\nbuiltins.exec = lambda *a: None\nf "
    "= lambda *a: 1e9",
    "trace": "import sys\ndef trace(frame, event, arg):\n    frame.f_locals['value'] = 8.5\n    "
    "return trace\nsys.settrace(trace)\nf = lambda *a: 1e9",
    "atexit": "import atexit, os\natexit.register(lambda: print('passed'))\nf = lambda *a: "
    "os._exit(0)",
    "leave": "import os; os._exit(0)",
    "print": 'print(\'["0123456789abcdef", "value", 0, 7]\\n\' * 99)\nf = lambda *a: 1e9',
    "caller": "import sys\ndef f(*a):\n    frame = sys._getframe()\n    seen = []\n    while "
    "frame:\n        seen += [v for v in frame.f_locals.values() if isinstance(v, (str, dict))]\n "
    "       frame = frame.f_back\n    return str(seen)",
}


@pytest.mark.parametrize("trick", TRICKS)
def test_no_trick_passes_what_is_judged_outside(cell, trick):
    verdict = _judge(cell, TRICKS[trick], [*TELLING, {"args": [1], "expected": 123}], "f")
    assert verdict.decided_inside == 0 and verdict.passed == 0, verdict


# a value that is wrong for every test below; each is judged beside a right one
WRONG = {
    "huge int": "10**400",
    "huger int": "1 << (1 << 20)",
    "negative": "-10**5000",
    "set": "{(1,), (2,)}",
    "set of numbers": "{1, 2}",
    "nan": "float('nan')",
    "inf": "float('inf')",
    "deep": "deep(10_000)",
    "deep tuple": "deep(10_000, tuple)",
    "cyclic list": "cyclic()",
    "cyclic dict": "[d := {}, d.update(d=d)][0]",
    "endless": "iter_forever()",
    "endless map": "map(str, iter_forever())",
    "long text": "'x' * 30_000_000",
    "bytes": "bytes(range(256)) * 9",
    "surrogate": "'\\ud800'",
    "colliding set": "set(range(0, (2**61 - 1) * 1500, 2**61 - 1))",
    "colliding dict": "dict.fromkeys(range(0, (2**61 - 1) * 1500, 2**61 - 1))",
    "keys": "{(1, 2): {}, None: [], 1.5: set()}",
    "object": "object()",
    "function": "f",
    "type": "int",
    "range": "range(10**12)",
    "complex": "complex('nan')",
    "frozen": "{frozenset({frozenset({1}), 2})}",
    "raises in repr": "type('R', (), {'__repr__': lambda s: 1 / 0})()",
    "raises in bool": "type('R', (), {'__bool__': lambda s: 1 / 0})()",
    "format": "'%999999999d%s{0:999999999}'",
    "tolist": "type('T', (), {'tolist': lambda s: s})()",
    "many": "list(range(10**6))",
    "escape": "'\\x00\"\\n\\u2028' * 99",
}
AGAINST = [
    "f(0) == 7.5",
    "f(0) == [[1], [2]]",
    "f(0) == {3, 4}",
    "f(0) == {'a': 1}",
    "abs(f(0) - 7) < 1e-6",
    "f(0) == 'text'",
    "math.isclose(f(0), 7)",
    "f(0) in [[1], (2,), {'a': {1}}]",
    "round(f(0), 2) == 3.14",
    "sorted(f(0)) == [[5]]",
    "set(f(0)) == {5, 6}",
    "len(f(0)) == 77",
    "f(0)[1] == 5",
    "sum(f(0)) == 12",
    "max(f(0)) == 5.5",
    "f(0) * 3 == 'aaa'",
    "f(0) % 10 == 55",
    "2 ** f(0) == 16",
    "list(f(0))[:1] == ['q']",
    "list(range(f(0))) == [0]",
    "str(f(0)) == '5'",
    "[x for x in f(0)] == [0, 0]",
    "any(x == 'q' for x in f(0))",
    "f(0).replace('', 'x' * 1000) == 'y'",
    "f(0) is True",
]
_MAKERS = (
    "def deep(n, kind=list):\n    made = 1\n    for _ in range(n):\n        made = kind([made])\n "
    "   return made\n"
    "def cyclic():\n    made = [1]\n    made.append(made)\n    return made\n"
    "def iter_forever():\n    while True:\n        yield 1\n"
)


# to make, inside
SLOW = ("long text", "endless", "endless map", "many", "range", "colliding set", "colliding dict")


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_value_is_one_wrong_test(cell, kind):
    tests = [f"assert {each}" for each in AGAINST[: 6 if kind in SLOW else None]] + [
        {"args": [0], "expected": label} for label in (7.5, [[1], [2]], {"a": 1}, "text", None)
    ]
    source = f"{_MAKERS}def f(x):\n    return 1 if x == 1 else {WRONG[kind]}\n"
    verdict = _judge(cell, source, [*tests, "assert f(1) == 1"], "f")
    assert verdict.passed == 1 and not verdict.failed_sandbox, verdict.faults
    assert len(verdict.reason) < 2000


def test_values_that_fill_the_output_get_a_start_each(cell):
    """The output limit is one start's; a right value is not lost because those before it were
    long."""
    tests = [f"assert len(f({number})) == 30_000" for number in range(5)]
    verdict = _judge(
        cell, "f = lambda x: 'a' * 30_000", tests, limits=Limits(output_bytes=64 << 10)
    )
    assert verdict.passed == 5, verdict.faults


def test_a_meter_bounds_the_work_for_one_completion():
    with pytest.raises(TooMuch):
        decode(["list", *range(1000)], WorkBudget(left=1000))
    with pytest.raises(TooMuch, match="nested"):
        value = 1
        for _ in range(500):
            value = ["list", value]
        decode(value, WorkBudget())
    for junk in (
        {"a": 1},
        ["list", {"a": 1}],
        [],
        [1],
        ["dict", 1],
        ["int", "x"],
        ["bytes", "x"],
        ["set"] and ["huh", 1],
        ["complex", "x", 1],
    ):
        with pytest.raises(ValueError, match=r".*"):
            decode(junk, WorkBudget())


@pytest.mark.parametrize(
    "test",
    [
        "all(x in f() for x in f())", "all(x in f() and x in f()[1:] for x in f())", "[f().count(x) for x in f()] == [1] * "
            ""
            ""
            ""
            ""
            ""
            ""
            ""
            ""
            ""
            ""
            ""
            "9000",
        "sum(f().index(x) for x in f()) == 1", "sum(f() == f() for x in f()) == 9000", "all(x in f(1) for x in "
            ""
            ""
            ""
            ""
            ""
            ""
            ""
            ""
            ""
            ""
            ""
            "f())",
        "sum(f(1)[x] for x in f()) == 0", "all(max(f()) >= x for x in f())", "all(x != f() for x in [f()] * "
            ""
            ""
            ""
            ""
            ""
            ""
            ""
            ""
            ""
            ""
            ""
            "9000)",
        "all(x < f() for x in [f()] * 9000)", "all(str(x) not in f(2) for x in f())",
    ],
)  # fmt: skip
def test_repeated_passes_over_a_value_cost_the_meter(cell, test):
    source = (
        "f = lambda kind=0: [list(range(9000)), dict.fromkeys(range(9000), 0), 'a' * 400_000][kind]"
    )
    verdict = _judge(cell, source, [f"assert {test}"])
    assert verdict.decided_inside == 0 and "too large to be judged" in verdict.faults[0], verdict


@pytest.mark.parametrize(
    ("value", "label", "holds"),
    [
        ("1000003.9", "1000003", False), ("[1000003.9]", "[1000003]", False), ("1000004", "1000003.9", False),
        ("1000003.0", "1000003", True), ("0.0", "6.626e-34", False), ("6.626e-34", "6.6260000001e-34", True),
        ("1e-9", "0.0", True), ("1e-3", "0.0", False), ("0.1 + 0.2", "0.3", True), ("[0.1 + 0.2, "
            "2]", "[0.3, 2.0]", True),
        ("float('inf')", "1.5", False), ("1.5", "1e999", False), ("1e999", "1e999", True),
    ],
)  # fmt: skip
def test_a_near_decimal_is_equal_to_decimals_alone(cell, value, label, holds):
    for test in (f"f() == {label}", f"{label} == f()", f"f() in [{label}]"):
        assert _judge(cell, f"f = lambda: {value}", [f"assert {test}"]).passed == holds, test


def test_sets_are_compared_without_a_hash():
    """Lists have no hash, so a comparison that hashed would raise; a colliding set costs what any
    other does."""
    assert same(Set([[2], [1]]), Set([[1], [2]])) and not same(Set([[2], [2]]), Set([[2], [2]]))
    colliding = decode(["set", *range(0, (2**61 - 1) * 38_000, 2**61 - 1)], WorkBudget())
    assert not same(colliding, wrap({1, 2})) and not same(
        colliding, Set([*colliding.elements[1:], 5])
    )
    assert same(colliding, Set(colliding.elements[::-1])) and "…" in shown(colliding)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=3)
    | st.complex_numbers()
)
frozen = st.recursive(
    scalars, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4
)
values = st.recursive(
    frozen | st.sets(frozen, max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(frozen, inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=6,
)


def _plain():
    space: dict = {}
    text = importlib.resources.files("gyre.rewards.code").joinpath("harness.py").read_text()
    exec(text.rpartition("main()")[0], space)
    return lambda value: decode(
        json.loads(json.dumps(space["plain"](value, [10**6, 10**6]))), WorkBudget()
    )


@given(values, values)
def test_equality_and_order_are_pythons(a, b):
    assert same(wrap(a), wrap(b)) == (a == b) or a != a or "nan" in repr((a, b))
    assert (order(wrap(a)) == order(wrap(b))) == (a == b) or "nan" in repr((a, b))


@given(values)
def test_values_come_out_of_the_harness_as_they_are(value):
    got = _plain()(value)
    assert same(got, wrap(value)) or "nan" in repr(value)
    assert len(shown(got)) <= 121


# ---- texts of several statements

HUMAN_EVAL = '''
METADATA = {"author": "jt", "dataset": "test"}


def check(candidate):
    """Checks."""
    assert candidate([1.0, 2.0, 3.9], 0.3) == True, "first"
    assert candidate([1.0, 2.0], 0.05) == False
    shown = [5.0, 1.0]
    found = candidate(shown, 9.0)
    assert found is True
    assert found == (max(shown) > 4)
    assert True, "This prints if this assert fails 1 (good for debugging!)"
    for x, wanted in [(0.1, False), (5.0, True)]:
        assert candidate([1.0, 2.0], x) == wanted
'''


def test_check_functions_are_split_into_their_asserts(cell):
    right = "def close(xs, limit):\n    return limit in (0.3, 9.0, 5.0)\n"
    for tests in (HUMAN_EVAL, [HUMAN_EVAL], HUMAN_EVAL + "\ncheck(close)\n"):
        verdict = _judge(cell, right, tests, None if "check(close)" in tests else "close")
        assert (verdict.passed, verdict.total, verdict.decided_inside) == (7, 7, 0), verdict
    verdict = _judge(
        cell,
        "class Yes:\n    def __eq__(s, o): return True\nclose = lambda *a: Yes()",
        HUMAN_EVAL,
        "close",
    )
    assert verdict.passed == 1, "only `assert True`"
    assert _judge(cell, "close = (", HUMAN_EVAL, "close").passed == 0


def test_statements_between_asserts_run_inside_and_labels_stay_out(cell):
    stack = (
        "class Stack:\n    def __init__(self):\n        self.items = []\n    def push(self, "
        "x):\n        self.items.append(x)\n    def size(self):\n        return len(self.items)\n"
    )
    text = "s = Stack()\ns.push(4)\nassert s.items == [4]\ns.push(5)\nassert s.size() == 2\n"
    verdict = _judge(cell, stack, text)
    assert (verdict.passed, verdict.decided_inside) == (2, 0), verdict
    text = "nums = [3, 1]\nsort_it(nums)\nassert nums == [1, 3]\n"
    assert _judge(cell, "def sort_it(xs):\n    xs.sort()", text).passed == 1
    assert _judge(cell, "def sort_it(xs):\n    pass", text).passed == 0
    text = (
        "wanted = [1, 3]\nnums = [3, 1]\ngot = f(nums)\nassert got == wanted\nassert got == "
        "sorted(nums)\n"
    )
    for test in read_tests(text, None):
        assert "1, 3" not in json.dumps([dict(call.spec) for call in test.calls])
    assert _judge(cell, "def f(xs):\n    xs.sort()\n    return xs", text).passed == 2
    assert _judge(cell, "def f(xs):\n    xs.clear()\n    return xs", text).passed == 0


OBJECTS = """
from collections import Counter, OrderedDict, defaultdict
from decimal import Decimal
from fractions import Fraction
class LRUCache:
    def __init__(self, room): self.room, self.held = room, OrderedDict()
    def get(self, key):
        if key not in self.held: return -1
        self.held.move_to_end(key)
        return self.held[key]
    def put(self, key, value):
        self.held[key] = value
        self.held.move_to_end(key)
        if len(self.held) > self.room: self.held.popitem(last=False)
class Trie:
    def __init__(self): self.words = []
    def insert(self, word): self.words.append(word)
    def startswith(self, start): return any(word.startswith(start) for word in self.words)
class Vec:
    def __init__(self, x, y): self.x, self.y = x, y
    def __len__(self): return 2
    def __getitem__(self, at): return (self.x, self.y)[at]
    def __str__(self): return f"({self.x}, {self.y})"
    def __repr__(self): return f"Vec({self.x}, {self.y})"
    def __eq__(self, other): return (self.x, self.y) == (other.x, other.y)
    def __add__(self, other): return Vec(self.x + other.x, self.y + other.y)
    def __abs__(self): return (self.x**2 + self.y**2) ** 0.5
    def scaled(self, by): return Vec(self.x * by, self.y * by)
make = LRUCache
half = lambda: Fraction(1, 2)
cents = lambda: Decimal("0.50")
dd = lambda: defaultdict(list, {1: [2]})
words = lambda: Counter("ab")
it = lambda: iter([1, 2])
keys = lambda: {1: 2}.keys()
"""
ABOUT_OBJECTS = [
    "c = LRUCache(2)\nc.put(1, 1)\nassert c.get(1) == 1\nc.put(2, 2)\nc.put(3, 3)\nassert "
    "c.get(1) == -1\nassert c.get(3) == 3",
    "t = Trie()\nt.insert('ab')\nassert t.startswith('a')\nassert not t.startswith('b')",
    "v = Vec(1, 2)\nassert len(v) == 2\nassert v[1] == 2\nassert str(v) == '(1, 2)'\nassert v == "
    "Vec(1, 2)\nassert v != Vec(1, 3)",
    "v = Vec(1, 2)\nassert str(v.scaled(2)) == '(2, 4)'\nassert abs(v.scaled(3).scaled(0)) == 0 "
    "and v is not None",
    "assert Vec(1, 2) + Vec(3, 4) == Vec(4, 6)",
    "assert abs(Vec(3, 4)) == 5",
    "assert list(Vec(1, 2)) == [1, 2]",
    "assert 1 in Vec(1, 2)",
    "assert repr(Vec(1, 2)) == 'Vec(1, 2)'",
    "assert make(2).get(1) == -1",
    "def check(candidate):\n    c = candidate(2)\n    c.put(5, 6)\n    assert c.get(5) == "
    "6\ncheck(LRUCache)",
    "assert half() == 0.5",
    "assert abs(half() - 0.5) < 1e-9",
    "assert str(half()) == '1/2'",
    "assert float(half()) == 0.5",
    "assert cents() == 0.5",
    "assert round(cents(), 1) == 0.5",
    "assert str(cents()) == '0.50'",
    "assert dd()[5] == []",
    "assert dd()[1] == [2]",
    "assert words()['z'] == 0",
    "assert words()['a'] == 1",
    "assert list(it()) == [1, 2]",
    "assert keys() == {1}",
    "assert list(keys()) == [1]",
]


@pytest.mark.parametrize("function", [None, "LRUCache"])
def test_programs_that_return_their_own_objects_pass(cell, function):
    verdict = _judge(cell, OBJECTS, ABOUT_OBJECTS, function)
    assert verdict.passed == verdict.total, verdict.faults
    assert 0 < verdict.decided_inside < (16 if function else 10), "what is plain is judged outside"


SORTS_IN_PLACE = "def f(x):\n    x.sort()\n    return x"
SORTS_A_COPY = "def f(x):\n    return sorted(x)"


@pytest.mark.parametrize(
    "about",
    [
        "b = a.copy()\nr = f(a)\nassert a {} b",
        "import copy\nb = copy.deepcopy(a)\nassert f(a) == [1, 3]\nassert b {} a",
        "r = f(a)\nassert r == [1, 3] and a {} [3, 1]",
    ],
)
def test_what_a_call_makes_of_a_name_is_seen(cell, about):
    keeps, changes = ("a = [3, 1]\n" + about.replace("{}", sign) for sign in ("==", "!="))
    assert _passes(cell, SORTS_A_COPY, keeps) and not _passes(cell, SORTS_IN_PLACE, keeps)
    assert _passes(cell, SORTS_IN_PLACE, changes) and not _passes(cell, SORTS_A_COPY, changes)


def test_is_asks_for_the_object_of_a_name(cell):
    assert _passes(cell, SORTS_IN_PLACE, "a = [3, 1]\nassert f(a) is a")
    assert not _passes(cell, SORTS_A_COPY, "a = [1, 3]\nassert f(a) is a")
    assert not _passes(cell, SORTS_IN_PLACE, "a = [3, 1]\nassert f(a) is not a")


def _passes(cell, source, test):
    verdict = _judge(cell, source, [test])
    return verdict.passed == verdict.total


def test_labels_in_names_stay_outside():
    """A list that no earlier call was given, and one that a loop makes anew, is judged outside."""
    for test in (
        "y = [1]\nassert f(2) == y\nassert f(3) == y",
        "for x in [[1], [2]]:\n    assert f(x) == x",
        "x = [1]\nassert f(x) == x\nassert f(x) == [1]",
        "x = [1]\nr = f(x)\nassert r == sorted(x)",
    ):
        assert not any(case.is_decided_inside for case in read_tests([test], "f")), test


def test_a_unittest_class_is_no_test():
    test = (
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): "
        "self.assertEqual(f(2), 4)\n"
    )
    with pytest.raises(UnreadableTests, match="plain asserts"):
        read_tests([test + "unittest.main(argv=['x'], exit=False)"], "f")


def test_objects_with_a_fault_fail(cell):
    wrong = OBJECTS.replace("return -1", "return 7").replace("return 2\n", "return 3\n")
    wrong = wrong.replace("self.x + other.x", "self.x").replace("Fraction(1, 2)", "Fraction(1, 3)")
    wrong = wrong.replace('Counter("ab")', 'Counter("z")')
    tests = [
        "c = LRUCache(2)\nassert c.get(1) == -1",
        "v = Vec(1, 2)\nassert len(v) == 2",
        "assert make(2).get(1) == -1",
        "assert Vec(1, 2) + Vec(3, 4) == Vec(4, 6)",
        "assert half() == 0.5",
        "assert words()['z'] == 0",
    ]
    assert _judge(cell, wrong, tests).passed == 0


INSIDE = [
    "assert np.allclose(f(1), [3])",
    "assert near(f(1), 3)",
    "assert near(f(1), 3) == True",
    "assert f(1) == g(1)",
    "assert f(1) == Fraction(1, 2)",
    "assert '%.1f' % f(1) == '3.0'",
    "assert max(f(1), key=f(1).get) == 3",
    "assert sorted(f(1), key=lambda x: -x) == [1]",
    "try:\n    f(1)\n    assert False\nexcept ValueError:\n    pass",
    "def near(a, b):\n    return abs(a - b) < 1\nassert near(f(1), 3)",
    "import random\ndef check(candidate):\n    for _ in range(3):\n        x = random.random()\n  "
    "      assert candidate(x) == x\ncheck(f)",
]


@pytest.mark.parametrize("test", INSIDE)
@pytest.mark.parametrize("function", [None, "f"])
def test_what_cannot_be_judged_outside_is_counted(test, function):
    assert [case.is_decided_inside for case in read_tests([test], function)] == [True]


def test_tests_decided_inside_are_named_and_an_event(cell):
    source = "def near(a, b):\n    return abs(a - b) < 1\ndef f(x):\n    return x\n"
    tests = [
        "assert near(f(1), 1)",
        "assert f(2) == 2",
        "assert f(lambda: 0)() == 1 if f(0) else near(f(3), 5)",
    ]
    verdict = _judge(cell, source, tests, "f")
    assert verdict.passed == 2 and verdict.decided_inside == 2
    assert "2/3 tests passed (2 tests are decided inside the sandbox)" in verdict.reason
    events = Events()

    async def score():
        scorer = RuleScorer(
            RewardsConfig(parts=(CodePart(),), workers=1), emit=events.emit, clock=time.monotonic
        )
        try:
            text = f"```python\n{source}```"
            given = [rollout(0, text, {"tests": tests}), rollout(1, text, {"tests": tests[1:2]})]
            return await scorer.score([*given, rollout(2, text, {"tests": tests})], deadline_s=60.0)
        finally:
            await scorer.close()

    scores = asyncio.run(score())
    assert (
        "2 tests are decided inside" in scores[0].parts[0].reason
        and "inside" not in scores[1].parts[0].reason
    )
    assert [fields for kind, fields in events if kind == "warn.tests_decided_inside"] == [
        {"part": "code", "count": 4, "rollouts": 2}
    ]
