"""Asserts: splits tests written in Python into what runs in the sandbox and what is judged outside.
Past 500 lines: splitting a text, an expression, and one that met an object share one rewriting of
names. In: source of one test or of a whole `check(candidate)`, the name of the function under test.
Out: one Assertion per assert.

Of `abs(f(3) - 7) < 1e-6` only `f(3)` goes into the sandbox; its value comes out and takes the place
of the call. What goes in is the largest call, or attribute of one, that begins with a name unknown
to rewards.code.judging. Statements between the asserts run inside; names that stand for plain
values are replaced by them. Some asserts leave nothing to judge outside: a helper's own result,
values of two functions compared, a lambda, try. They run whole inside, and the program can forge
them. Pure.
"""

from __future__ import annotations

import ast
import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gyre.rewards.code.judging import (
    BINARY,
    CONSTANTS,
    FAULTS,
    FUNCTIONS,
    METHODS,
    TYPES,
    UNARY,
    NotKnown,
    Scope,
    compares_two,
    evaluate,
    needs_object,
)
from gyre.rewards.code.values import TooMuch, WorkBudget, native

_MOST_CALLS = 1000  # of one text, its loops unrolled
_LIBRARIES = sys.stdlib_module_names | {"numpy", "pytest", "pandas", "torch", "scipy", "sympy"}
# names of ours in the program's space; also placeholders in what is judged outside
_OWN = "_gyre_test_"


class UnreadableTests(ValueError):
    """The task's tests cannot be understood; the label is at fault, not the completion."""


@dataclass(frozen=True, slots=True, eq=False)
class HarnessCall:
    """One thing for the harness to do; see there for what `spec` may hold."""

    spec: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assertion:
    """One assert. Without `tree` it is decided inside the sandbox, by the last of its calls."""

    calls: tuple[HarnessCall, ...]  # in order, with the statements that must run before
    tree: ast.expr | None = None  # over the names of `values`
    values: Mapping[str, HarnessCall]  # placeholder → the call that gives its value
    text: str
    statements: tuple[HarnessCall, ...] = ()  # those of `calls` that give no value
    whole: HarnessCall | None = None  # the assert as it can be decided inside
    # placeholder → the function that gives its value
    callees: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Known:
    """A name of the test's own: plain source for use inside, and the tree that is judged
    outside."""

    source: ast.expr
    tree: ast.expr | None  # None: a name inside the sandbox
    callee: str = ""  # of a name inside: the function that gave its value
    values: Mapping[str, tuple[HarnessCall, str]] = field(
        default_factory=dict
    )  # placeholders of the tree, with their callees


def read_asserts(text: str, function: str | None) -> list[Assertion]:
    """Split a text. UnreadableTests where it is no Python, or a check function has nothing to
    check."""
    try:
        body = ast.parse(text.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnreadableTests(f"a test that is no Python: {text[:80]!r}") from error
    found = [each for part in _parts(text, body) for each in _read_part(*part, function)]
    if not found:
        raise UnreadableTests(f"a test without an assert: {text[:80]!r}")
    return found


def _parts(text: str, body: list[ast.stmt]) -> list[tuple[str, list[ast.stmt]]]:
    """Return the text itself, or one for each function of pytest's kind in it: what stands around
    them, and its body. Asserts around them are one more, so that each counts once."""
    tests = [each for each in body if isinstance(each, ast.FunctionDef) and _is_test(each)]
    names = {each.name for each in tests}
    around = [each for each in body if each not in tests and not _calls_one_of(each, names)]
    checking = [
        each for each in around if isinstance(each, ast.Assert | ast.For) and _tests_within(each)
    ]
    given = [each for each in around if each not in checking]
    parts = [*([around] if checking else []), *([*given, *each.body] for each in tests)]
    return (
        [(ast.unparse(ast.Module(part, [])), part) for part in parts] if tests else [(text, body)]
    )


def _tests_within(statement: ast.stmt) -> bool:
    return any(isinstance(each, ast.Assert) for each in ast.walk(statement))


def _is_test(function: ast.FunctionDef) -> bool:
    """Recognize a test as pytest finds one, if it needs nothing of pytest and its statements can
    stand in a module."""
    leaves = (ast.Return, ast.Yield, ast.YieldFrom, ast.Global, ast.Nonlocal)
    alone = ast.unparse(function.args) == "" and not function.decorator_list
    return (
        function.name.startswith("test")
        and alone
        and not any(isinstance(each, leaves) for each in ast.walk(function))
    )


def _calls_one_of(statement: ast.stmt, names: set[str]) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in names


def _read_part(text: str, body: list[ast.stmt], function: str | None) -> list[Assertion]:
    reader = _Reader(text, body, function)
    try:
        reader.read(body, {})
    except NotKnown:
        reader.decide_inside(reader.whole())
    return reader.found


class _Reader:
    """Reads one text from its first statement to its last."""

    def __init__(self, text: str, body: list[ast.stmt], function: str | None) -> None:
        self.text = text.strip()
        self.found: list[Assertion] = []
        self.statements: list[HarnessCall] = []  # to run inside before what comes next
        self.helpers: set[str] = set()  # functions and modules of the test's own
        # names whose values calls were given, which may have changed them
        self.given: set[str] = set()
        self.count = 0
        defined = {each.name: each for each in body if isinstance(each, ast.FunctionDef)}
        called = [
            each.value
            for each in body
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Call)
        ]
        self.checks = {
            name: each
            for name, each in defined.items()
            if len(each.args.args) == 1
            and (
                name == "check"
                or any(isinstance(call.func, ast.Name) and call.func.id == name for call in called)
            )
        }
        self.uncalled = [
            name
            for name in self.checks
            if not any(isinstance(c.func, ast.Name) and c.func.id == name for c in called)
        ]
        given = [
            ast.unparse(call.args[0])
            for call in called
            if isinstance(call.func, ast.Name)
            and call.func.id in self.checks
            and len(call.args) == 1
        ]
        self.function = function or (given[0] if given else None)
        if self.uncalled and not self.function:
            raise UnreadableTests(
                "a check(candidate) that is not called needs the task's field `function`"
            )

    def whole(self) -> str:
        """Return the text as one test, its check functions called."""
        return "\n".join([self.text, *(f"{name}({self.function})" for name in self.uncalled)])

    def decide_inside(self, source: str) -> None:
        call = HarnessCall({"check": source})
        self.found.append(Assertion(calls=(*self.statements, call), values={}, text=source))

    # ---- statements

    def read(self, body: Sequence[ast.stmt], names: dict[str, _Known]) -> None:
        """Read statements in order. NotKnown where one can only be run with all that follows it."""
        for statement in body:
            if isinstance(statement, ast.Assert):
                self.read_assert(statement, names)
            elif isinstance(statement, ast.FunctionDef) and statement.name in self.checks:
                if statement.name in self.uncalled:
                    self.read_check(statement, ast.Name(str(self.function), ast.Load()), names)
            elif isinstance(statement, ast.FunctionDef | ast.Import | ast.ImportFrom):
                self.helpers |= _defines(statement)
                self.statements.append(HarnessCall({"statement": ast.unparse(statement)}))
            elif isinstance(statement, ast.Assign | ast.AnnAssign):
                self.read_assign(statement, names)
                stored = (each for each in ast.walk(statement) if isinstance(each, ast.Name))
                self.given -= {each.id for each in stored if isinstance(each.ctx, ast.Store)}
            elif isinstance(statement, ast.For):
                self.read_for(statement, names)
            elif isinstance(statement, ast.Expr):
                self.read_expression(statement.value, names)
            elif isinstance(statement, ast.ClassDef) and any(
                "TestCase" in ast.unparse(x) for x in statement.bases
            ):
                raise UnreadableTests(
                    "a class of unittest, whose failures nobody would see: write plain asserts"
                )
            elif not isinstance(statement, ast.Pass):
                raise NotKnown

    def read_check(
        self, check: ast.FunctionDef, candidate: ast.expr, names: Mapping[str, _Known]
    ) -> None:
        self.read(check.body, {**names, check.args.args[0].arg: _Known(candidate, None)})

    def read_assert(self, statement: ast.Assert, names: Mapping[str, _Known]) -> None:
        splitter = _Splitter(self, names)
        try:
            tree = splitter.truth(statement.test)
            plain = not splitter.values
            if plain:
                tree = self.of_known_function(statement, splitter) or tree
        except NotKnown:
            self.given |= _mutable_names(statement.test, names)
            inside = ast.Assert(_replaced(statement.test, names), None)
            self.decide_inside(ast.unparse(ast.fix_missing_locations(inside)))
            return
        if plain and any(
            isinstance(node, ast.Name) and node.id in names for node in ast.walk(statement.test)
        ):
            raise NotKnown  # it is about what a call did to the value of a name
        if splitter.asks_names:
            raise NotKnown
        whole = ast.fix_missing_locations(ast.Assert(_replaced(statement.test, names), None))
        self.found.append(
            Assertion(
                calls=(*self.statements, *splitter.values.values()),
                tree=tree,
                values=splitter.values,
                text=ast.unparse(statement.test),
                statements=tuple(self.statements),
                whole=HarnessCall({"check": ast.unparse(whole)}),
                callees=splitter.callees,
            )
        )

    def of_known_function(self, statement: ast.Assert, splitter: _Splitter) -> ast.expr | None:
        """`assert sum([1, 2]) == 3` can only be about the program's own `sum`."""
        first = statement.test.left if isinstance(statement.test, ast.Compare) else statement.test
        if (
            self.function is None
            and isinstance(first, ast.Call)
            and isinstance(first.func, ast.Name)
        ):
            splitter.function = first.func.id
            return splitter.truth(statement.test)
        splitter.leaf(ast.Constant(None))  # the program must load
        return None

    def read_assign(self, statement: ast.Assign | ast.AnnAssign, names: dict[str, _Known]) -> None:
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        target, value = targets[0], statement.value
        if len(targets) != 1 or value is None:
            raise NotKnown
        splitter = _Splitter(self, names)
        if isinstance(target, ast.Name):
            if _is_name_of_function(value, names):
                names[target.id] = _Known(_replaced(value, names), None)
                return
            tree = splitter.value(value)
            if not (isinstance(tree, ast.Name) and tree.id in splitter.values):
                self.statements += splitter.values.values()
                made_of = {
                    name: (call, splitter.callees[name]) for name, call in splitter.values.items()
                }
                names[target.id] = _Known(_replaced(value, names), tree, values=made_of)
                return
        elif not (
            isinstance(target, ast.Tuple)
            and all(isinstance(each, ast.Name) for each in target.elts)
        ):
            raise NotKnown
        else:
            splitter.value(value)
        self.keep_inside(target, value, names, _callee(_replaced(value, names)))

    def keep_inside(
        self, target: ast.expr, value: ast.expr, names: dict[str, _Known], callee: str
    ) -> None:
        """Give what a call returned a name inside the sandbox."""
        own: dict[str, _Known] = {}
        for each in target.elts if isinstance(target, ast.Tuple) else [target]:
            assert isinstance(each, ast.Name)
            self.count += 1
            own[each.id] = _Known(ast.Name(f"{_OWN}{self.count}", ast.Load()), None, callee)
        source = f"{ast.unparse(_replaced(target, own))} = {ast.unparse(_replaced(value, names))}"
        self.statements.append(HarnessCall({"statement": source}))
        names.update(own)

    def read_for(self, statement: ast.For, names: dict[str, _Known]) -> None:
        """Unroll a loop over plain values."""
        splitter = _Splitter(self, names)
        tree, targets = splitter.value(statement.iter), statement.target
        of_names = targets.elts if isinstance(targets, ast.Tuple) else [targets]
        if (
            splitter.values
            or statement.orelse
            or not all(isinstance(each, ast.Name) for each in of_names)
        ):
            raise NotKnown
        try:
            items = list(evaluate(tree, Scope(values={}, meter=WorkBudget(), tolerance=0.0)))
            rows = [list(item) if isinstance(targets, ast.Tuple) else [item] for item in items]
            literals = [
                [ast.parse(repr(native(each)), mode="eval").body for each in row] for row in rows
            ]
        except (*FAULTS, SyntaxError, TooMuch) as error:
            raise NotKnown from error
        for row in literals:
            if len(row) != len(of_names) or len(self.found) + len(self.statements) > _MOST_CALLS:
                raise NotKnown
            for name, literal in zip(of_names, row, strict=True):
                value = _Splitter(self, {}).value(literal)
                names[name.id] = _Known(literal, value)  # type: ignore[attr-defined]
                self.given.discard(name.id)  # type: ignore[attr-defined]
            self.read(statement.body, names)

    def read_expression(self, value: ast.expr, names: dict[str, _Known]) -> None:
        """Keep a call for what it does: of a check function, or inside."""
        if isinstance(value, ast.Constant):
            return
        if not isinstance(value, ast.Call):
            raise NotKnown
        if (
            isinstance(value.func, ast.Name)
            and value.func.id in self.checks
            and len(value.args) == 1
        ):
            self.read_check(self.checks[value.func.id], value.args[0], names)
            return
        for node in ast.walk(value):  # it may change what these names stand for
            if isinstance(node, ast.Name) and node.id in names and names[node.id].tree is not None:
                self.keep_inside(
                    ast.Name(node.id, ast.Store()), ast.Name(node.id, ast.Load()), names, ""
                )
        self.statements.append(HarnessCall({"statement": ast.unparse(_replaced(value, names))}))


class _Splitter:
    """Turns one expression into a tree that is judged outside, and calls that give its values."""

    def __init__(self, reader: _Reader, names: Mapping[str, _Known]) -> None:
        self.reader = reader
        self.names = names
        self.function = reader.function
        self.bound: set[str] = set()  # by a comprehension
        # whether it is about names themselves, whose values are copied for each use
        self.asks_names = False
        self.values: dict[str, HarnessCall] = {}
        self.callees: dict[str, str] = {}  # placeholder → the function that gives its value

    def truth(self, node: ast.expr) -> ast.expr:
        """Return a condition. One that is nothing but a value must be the tested function's own."""
        if isinstance(node, ast.BoolOp):
            return ast.BoolOp(node.op, [self.truth(each) for each in node.values])
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ast.UnaryOp(node.op, self.truth(node.operand))
        before = set(self.values)
        tree = self.value(node)
        new = [name for name in self.values if name not in before]
        new += [
            each.id for each in ast.walk(tree) if isinstance(each, ast.Name) and each.id in before
        ]
        callees = {self.callees[name] for name in new}
        if len(callees) > 1 or (callees - self.trusted() and not _tells(tree)):
            raise NotKnown
        return tree

    def trusted(self) -> set[str]:
        """Functions whose bare truth is theirs to tell: the one under test, or any that takes no
        other's value."""
        if self.function is not None:
            return {self.function.rsplit(".", 1)[-1], ""}
        return {name for name in self.callees.values() if not name.startswith("?")}

    def leaf(self, node: ast.expr) -> ast.expr:
        """Let this part be evaluated inside; a placeholder stands for its value."""
        for each in ast.walk(node):
            if isinstance(each, ast.Name) and (
                each.id in self.bound or each.id in self.reader.checks
            ):
                raise NotKnown
        if len(self.values) > _MOST_CALLS:
            raise NotKnown
        if isinstance(node, ast.Name) and node.id in self.names:
            callee = self.names[node.id].callee
        else:
            inside = _replaced(node, self.names)
            callee = _callee(inside)
            others = {_callee(each) for each in _calls_within(inside)} - {callee}
            if self.function is None and any(
                not name[:1].isupper() for name in others if name not in TYPES
            ):
                callee = "?" + callee
        self.reader.given |= _mutable_names(node, self.names)
        self.reader.count += 1
        placeholder = f"{_OWN}{self.reader.count}"
        self.values[placeholder] = HarnessCall(
            {"expression": ast.unparse(_replaced(node, self.names))}
        )
        self.callees[placeholder] = callee
        return ast.Name(placeholder, ast.Load())

    def value(self, node: ast.expr) -> ast.expr:
        """Split any expression."""
        if isinstance(node, ast.Constant):
            return node
        if isinstance(node, ast.Name):
            return self.name(node)
        if isinstance(node, ast.Call):
            return self.call(node)
        if isinstance(node, ast.Attribute):
            return node if ast.unparse(node) in CONSTANTS else self.chain(node)
        if isinstance(node, ast.GeneratorExp | ast.ListComp | ast.SetComp):
            return self.comprehension(node)
        if isinstance(node, ast.BinOp | ast.UnaryOp):
            if type(node.op) not in (BINARY if isinstance(node, ast.BinOp) else UNARY) or _formats(
                node
            ):
                raise NotKnown
        elif not isinstance(
            node,
            ast.List
            | ast.Tuple
            | ast.Set
            | ast.Dict
            | ast.BoolOp
            | ast.Compare
            | ast.IfExp
            | ast.Subscript
            | ast.Slice,
        ) or (isinstance(node, ast.Dict) and None in node.keys):
            raise NotKnown
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.value, ast.Name)
            and node.value.id not in self.names
        ):
            return self.leaf(node)
        if isinstance(node, ast.Compare):
            self.look_at_names(node)
        return _rebuilt(node, self.value)

    def look_at_names(self, node: ast.Compare) -> None:
        """Find a name that is compared with what an earlier call may have made of its value, or by
        `is`."""
        sides = [node.left, *node.comparators]
        for sign, *pair in zip(node.ops, sides, sides[1:], strict=False):
            names = {
                each
                for side in pair
                if isinstance(side, ast.Name)
                for each in _mutable_names(side, self.names)
            }
            self.asks_names |= bool(
                names & self.reader.given or (names and isinstance(sign, ast.Is | ast.IsNot))
            )

    def name(self, node: ast.Name) -> ast.expr:
        if node.id in self.bound:
            return node
        if node.id in self.names:
            known = self.names[node.id]
            if known.tree is None:
                return self.leaf(node)
            self.values.update({name: call for name, (call, _) in known.values.items()})
            self.callees.update({name: callee for name, (_, callee) in known.values.items()})
            return known.tree
        if node.id in TYPES or node.id in FUNCTIONS:
            return node
        raise NotKnown

    def chain(self, node: ast.expr) -> ast.expr:
        """Return calls and attributes that begin with a name of the program's."""
        root = node
        while isinstance(root, ast.Call | ast.Attribute | ast.Subscript):
            root = root.func if isinstance(root, ast.Call) else root.value
        if not isinstance(root, ast.Name) or root.id in self.bound:
            raise NotKnown
        if root.id in self.reader.helpers and not _is_standard(node):
            raise NotKnown
        return self.leaf(node)

    def call(self, node: ast.Call) -> ast.expr:
        dotted = ast.unparse(node.func)
        if any(isinstance(arg, ast.Starred) for arg in node.args) or any(
            each.arg is None for each in node.keywords
        ):
            return self.chain(node)
        ours = isinstance(node.func, ast.Name) and (
            node.func.id == self.function or node.func.id in self.names
        )
        if (dotted in FUNCTIONS or dotted in TYPES) and not ours:
            key = next((each.value for each in node.keywords if each.arg == "key"), None)
            if isinstance(key, ast.Attribute):  # d.get: a method of what a call returned
                raise NotKnown
            return _rebuilt(node, self.value, keep=("func",))
        if (
            isinstance(node.func, ast.Attribute)
            and node.func.attr in METHODS
            and node.func.attr != self.function
        ):
            base = node.func.value
            is_object = isinstance(base, ast.Call) and _callee(base)[:1].isupper()
            is_module = (
                isinstance(base, ast.Name)
                and base.id not in self.names
                and base.id not in self.bound
            )
            if not is_object and not is_module:
                rebuilt = _rebuilt(node, self.value, keep=("func",))
                assert isinstance(rebuilt, ast.Call)
                rebuilt.func = ast.Attribute(self.value(base), node.func.attr, ast.Load())
                return rebuilt
        return self.chain(node)

    def comprehension(self, node: ast.GeneratorExp | ast.ListComp | ast.SetComp) -> ast.expr:
        (loop, *more) = node.generators
        names = loop.target.elts if isinstance(loop.target, ast.Tuple) else [loop.target]
        if more or loop.is_async or not all(isinstance(each, ast.Name) for each in names):
            raise NotKnown
        iterated = self.value(loop.iter)
        before = set(self.bound)
        self.bound |= {each.id for each in names}  # type: ignore[attr-defined]
        made = copy.copy(node)
        made.generators = [
            ast.comprehension(loop.target, iterated, [self.value(each) for each in loop.ifs], 0)
        ]
        made.elt = self.value(node.elt)
        self.bound = before
        return made


def _formats(node: ast.expr) -> bool:
    """Judge "%.2f" % f(1) inside, as f-strings are."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)):
        return False
    return isinstance(node.left, ast.Constant) and isinstance(node.left.value, str | bytes)


def _rebuilt(node: ast.AST, change: Any, keep: tuple[str, ...] = ()) -> Any:
    """Return a copy of a node, each expression in it changed."""
    made = copy.copy(node)
    for name, held in ast.iter_fields(node):
        if name in keep:
            continue
        if isinstance(held, ast.expr):
            setattr(made, name, change(held))
        elif isinstance(held, list) and held and isinstance(held[0], ast.expr):
            setattr(made, name, [change(each) for each in held])
        elif isinstance(held, list) and held and isinstance(held[0], ast.keyword):
            setattr(made, name, [ast.keyword(each.arg, change(each.value)) for each in held])
    return made


class _Replace(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, _Known], hidden: set[str]) -> None:
        self.names = names
        self.hidden = hidden

    def visit_Name(self, node: ast.Name) -> ast.expr:
        known = self.names.get(node.id) if node.id not in self.hidden else None
        return copy.deepcopy(known.source) if known is not None else node


def _replaced(node: ast.expr, names: Mapping[str, _Known]) -> ast.expr:
    """Return the expression as it runs inside: the test's own names by what they stand for."""
    hidden = {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
    for loop in (each for each in ast.walk(node) if isinstance(each, ast.comprehension)):
        hidden |= {each.id for each in ast.walk(loop.target) if isinstance(each, ast.Name)}
    return _Replace(names, hidden).visit(copy.deepcopy(node))


def _mutable_names(node: ast.AST, names: Mapping[str, _Known]) -> set[str]:
    """Names in the expression that stand for plain lists, sets or dicts."""
    used = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    kinds = (ast.List, ast.Set, ast.Dict, ast.ListComp, ast.SetComp)
    return {name for name in used & names.keys() if isinstance(names[name].tree, kinds)}


def _callee(node: ast.AST) -> str:
    """Return the function whose value this is: of `Solution().add(1).total` it is add."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _calls_within(node: ast.AST) -> Iterator[ast.Call]:
    """Yield all calls in a chain and in its arguments, except those of judging's own functions and
    of standard modules."""
    for each in ast.walk(node):
        if (
            isinstance(each, ast.Call)
            and not _is_standard(each)
            and ast.unparse(each.func) not in FUNCTIONS
        ):
            yield each


def _is_standard(node: ast.AST) -> bool:
    """copy.deepcopy(…), math.comb(…): they make arguments, they do not judge."""
    func = node.func if isinstance(node, ast.Call) else node
    base = func.value if isinstance(func, ast.Attribute) else None
    return isinstance(base, ast.Name) and base.id in (
        "copy",
        "math",
        "collections",
        "itertools",
        "string",
    )


def _is_name_of_function(node: ast.expr, names: Mapping[str, _Known]) -> bool:
    return (
        isinstance(node, ast.Name)
        and node.id not in names
        and node.id not in FUNCTIONS
        and node.id not in TYPES
    )


def _defines(statement: ast.FunctionDef | ast.Import | ast.ImportFrom) -> set[str]:
    if isinstance(statement, ast.FunctionDef):
        return {statement.name}
    modules = (
        [statement.module or ""]
        if isinstance(statement, ast.ImportFrom)
        else [n.name for n in statement.names]
    )
    if any(name.split(".")[0] not in _LIBRARIES for name in modules):
        return set()  # `from solution import add` names what is under test
    return {each.asname or each.name.split(".")[0] for each in statement.names} - {"math"}


def _tells(tree: ast.expr) -> bool:
    """Check that the label in a tree is more than a truth value, which a patched helper could give
    without the work."""
    constants = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return not isinstance(tree, ast.Name) and any(
        isinstance(value, str | bytes | float | complex)
        or (isinstance(value, int) and abs(value) > 1)
        for value in constants
    )


# ---- objects


def ask_inside(assertion: Assertion, objects: set[str], *, last: bool) -> Assertion:
    """Rewrite the assertion after these of its values turned out to be objects. Returns it as it is
    where nothing changes.

    Functions, methods and subscripts of an object are asked inside, and the answer is judged. An
    instance of a class that the test names has operators of its own. So an assert with those, or in
    the last round, runs whole inside. An object that a function returned equals no label, else a
    program could return one that equals all.
    """
    tree = assertion.tree
    assert tree is not None and assertion.whole is not None
    instances = {name for name in objects if not assertion.callees[name].lstrip("?")[:1].islower()}
    asker = _Asker(assertion, objects)
    asked = asker.visit(copy.deepcopy(tree))
    rests_on_object = needs_object(tree if last else asked, instances) or compares_two(
        tree, objects
    )
    if rests_on_object or (asker.made and not needs_object(asked, set(asker.made))):
        return Assertion(
            calls=(*assertion.statements, assertion.whole), values={}, text=assertion.text
        )
    if not asker.made:
        return assertion
    used = {each.id for each in ast.walk(asked) if isinstance(each, ast.Name)}
    values = {
        name: call for name, call in {**assertion.values, **asker.made}.items() if name in used
    }
    calls = (*assertion.statements, *values.values())
    return replace(
        assertion,
        calls=calls,
        tree=asked,
        values=values,
        callees={**assertion.callees, **asker.callees},
    )


class _Asker(ast.NodeTransformer):
    """Replaces what is asked of an object itself, with literal arguments, by a placeholder for the
    answer."""

    def __init__(self, assertion: Assertion, objects: set[str]) -> None:
        self.assertion = assertion
        self.objects = objects
        self.made: dict[str, HarnessCall] = {}
        self.callees: dict[str, str] = {}

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Attribute) and ast.unparse(node.func) not in FUNCTIONS:
            return self.asked(node, node.func.value)
        # a second argument may be the label: math.isclose(f(1), 3)
        function = ast.unparse(node.func)
        if function in ("isinstance", "type", "callable") or (
            len(node.args) != 1 and function != "round"
        ):
            return self.generic_visit(node)
        if not node.args:
            return node
        return self.asked(node, node.args[0])

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        return self.asked(node, node.value)

    def asked(self, node: ast.Call | ast.Subscript, value: ast.expr) -> ast.AST:
        if not (isinstance(value, ast.Name) and value.id in self.objects):
            return self.generic_visit(node)
        kept = {value.id} | (
            {node.func.id}
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            else set()
        )
        if any(isinstance(each, ast.Name) and each.id not in kept for each in ast.walk(node)):
            return self.generic_visit(node)
        source = ast.parse(
            str(self.assertion.values[value.id].spec["expression"]), mode="eval"
        ).body
        inside = _replaced(node, {value.id: _Known(source, None)})
        name = f"{_OWN}of_{len(self.made)}_{value.id}"
        self.made[name] = HarnessCall({"expression": ast.unparse(inside)})
        self.callees[name] = self.assertion.callees[value.id]
        return ast.Name(name, ast.Load())
