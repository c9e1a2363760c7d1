"""A warm Python that asks whether the tests notice a mutant: gyre and the tests are imported once,
forked for each one.

In: a socket's path, a module, test files. Each connection is answered with one byte: 0 when the
tests pass, else 1. A client that leaves ends its child. Started by run.py, in the folder of the
copied tree.

The changed functions' code is exchanged in a child, and the tests that call them run, the quickest
first. Where more than functions changed, or an import called them, or no test does, another child
imports everything anew.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import hypothesis.extra.numpy  # noqa: F401
import numpy  # noqa: F401
import pytest
import torch  # noqa: F401
from hypothesis import Phase, settings

LIMIT_S = 60  # of one test; an endless loop is noticed by it
PATCHED_LIMIT_S = 15
WHOLE_LIMIT_S = 200  # of all tests of one mutant
OPTIONS = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow and not variant"]

Place = tuple[str, int]  # a function's qualified name and first line


class Warm:
    """The module as it is, its functions, and the tests that call each. Made once, in the
    parent."""

    def __init__(self, module: Path, tests: list[str]):
        self.module, self.tests = module, tests
        self.source = module.read_text()
        observer = Observer(str(module.resolve()))
        with observer.noting():
            pytest.main([*OPTIONS, "--collect-only", "-qq", *tests])
        self.imported = observer.called  # what an import made of these is not made again
        places = set(functions_of(compile(self.source, str(module), "exec")))
        self.live: dict[Place, list[FunctionType]] = {}
        for one in gc.get_objects():
            if (
                isinstance(one, FunctionType)
                and Path(one.__code__.co_filename).resolve() == module.resolve()
            ):
                place = place_of(one.__code__)
                if place in places:
                    self.live.setdefault(place, []).append(one)
        self.calls = self._observe_calls()

    def _observe_calls(self) -> dict[str, tuple[float, set[str]]]:
        """Run the tests once in a child: for each its seconds and the functions of the module that
        it called."""
        with tempfile.NamedTemporaryFile("r", suffix=".json") as told:
            child = os.fork()
            if child == 0:
                observer = Observer(str(self.module.resolve()))
                passed = run_tests(self.tests, LIMIT_S, observer)
                Path(told.name).write_text(json.dumps(observer.calls))
                end(passed)
            _, status = os.waitpid(child, 0)
            assert status == 0, "the tests fail before anything is changed"
            return {
                test: (seconds, set(names)) for test, (seconds, names) in json.load(told).items()
            }

    def changed(self) -> dict[Place, CodeType] | None:
        """The functions whose code differs on disk; None where exchanging their code would not be
        the same."""
        before = compile(self.source, str(self.module), "exec")
        try:
            after = compile(self.module.read_text(), str(self.module), "exec")
        except SyntaxError:
            return None
        ours, theirs = functions_of(before), functions_of(after)
        if outline(before) != outline(after) or ours.keys() != theirs.keys():
            return None
        changed = {place: theirs[place] for place in ours if ours[place] != theirs[place]}
        known = changed.keys() <= self.live.keys() and not self.imported & {
            name for name, _ in changed
        }
        return changed if changed and known else None

    def tests_of(self, changed: dict[Place, CodeType]) -> list[str]:
        names = {name for name, _ in changed}
        calling = [
            (seconds, test) for test, (seconds, called) in self.calls.items() if called & names
        ]
        return [test for _, test in sorted(calling)]


class Observer:
    """Notes which functions of one file each test calls."""

    def __init__(self, path: str):
        self._path, self.called = path, set[str]()
        self._same: dict[str, bool] = {}
        self.calls: dict[str, tuple[float, list[str]]] = {}

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self.called, began = set(), time.monotonic()
        with self.noting():
            result = yield
        self.calls[item.nodeid] = (time.monotonic() - began, sorted(self.called))
        return result

    def _note(self, frame: Any, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call":
            name = code.co_filename
            if name not in self._same:
                self._same[name] = os.path.realpath(name) == self._path
            if self._same[name]:
                self.called.add(code.co_qualname.split(".<locals>")[0])


class Chosen:
    """Keeps the named tests, in the order of their names in the list."""

    def __init__(self, tests: list[str]):
        self._rank = {test: rank for rank, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (one for one in items if one.nodeid in self._rank),
            key=lambda one: self._rank[one.nodeid],
        )


def place_of(code: CodeType) -> Place:
    return code.co_qualname, code.co_firstlineno


def functions_of(code: CodeType) -> dict[Place, CodeType]:
    """The functions of a module and of its classes; what they hold belongs to them."""
    found: dict[Place, CodeType] = {}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if is_class_body(inner):
                found |= functions_of(inner)
            else:
                found[place_of(inner)] = inner
    return found


def is_class_body(code: CodeType) -> bool:
    return (
        "__module__" in code.co_names and "__qualname__" in code.co_names and not code.co_argcount
    )


def outline(code: CodeType) -> tuple[object, ...]:
    """A module's own code, without its functions."""
    parts = [
        outline(one) if is_class_body(one) else place_of(one)
        for one in code.co_consts
        if isinstance(one, CodeType)
    ]
    constants = [(type(one), one) for one in code.co_consts if not isinstance(one, CodeType)]
    return (code.co_code, code.co_names, tuple(map(repr, constants)), tuple(parts))


def main(path: str, module: str, tests: list[str]) -> None:
    sys.dont_write_bytecode = True  # two mutants of one second and size would look alike
    settings.register_profile(
        "mutants", phases=(Phase.explicit, Phase.generate), database=None, deadline=None
    )
    here, there = socket.socketpair()
    warm = os.fork()
    if warm == 0:
        here.close()
        serve_patched(there, Warm(Path(module), tests))
        end(True)
    there.close()
    if not here.recv(1):
        sys.exit("the warm Python ended")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        while True:
            client, _ = server.accept()
            with client:
                answer = b"\0" if passes(client, here, tests) else b"\1"
                with contextlib.suppress(BrokenPipeError):  # the client left
                    client.sendall(answer)


def passes(client: socket.socket, warm: socket.socket, tests: list[str]) -> bool:
    warm.sendall(b"?")
    answer = warm.recv(1)
    assert answer, "the warm Python ended"
    return run_child(lambda: run_anew(tests), client) if answer == b"?" else answer == b"\0"


def serve_patched(asked: socket.socket, warm: Warm) -> None:
    """Answer 1 where a test fails with the changed functions, 0 where all pass, ? where that is not
    known."""
    settings.load_profile("mutants")  # a failure is enough, a small example of it takes long
    asked.sendall(b"!")
    while asked.recv(1):
        changed = warm.changed()
        calling = warm.tests_of(changed) if changed else []
        if changed is None or not calling:
            asked.sendall(b"?")
        else:
            passed = run_child(lambda: run_patched(warm, changed, calling))  # noqa: B023
            asked.sendall(b"\0" if passed else b"\1")


def run_patched(warm: Warm, changed: dict[Place, CodeType], calling: list[str]) -> bool:
    for place, code in changed.items():
        for function in warm.live[place]:
            function.__code__ = code
    files = sorted({test.split("::")[0] for test in calling})
    return run_tests(files, PATCHED_LIMIT_S, Chosen(calling))


def run_anew(tests: list[str]) -> bool:
    settings.load_profile("mutants")
    return run_tests(tests, LIMIT_S)


def run_tests(files: list[str], limit_s: int, *plugins: object) -> bool:
    return pytest.main([*OPTIONS, f"--timeout={limit_s}", *files], plugins=plugins) == 0


def run_child(work: Callable[[], bool], client: socket.socket | None = None) -> bool:
    """Fork a child that does `work`; end it where it takes too long or where its client leaves."""
    child = os.fork()
    if child == 0:
        os.setsid()
        end(work())
    watch = os.pidfd_open(child)
    ready, _, _ = select.select(
        [watch] if client is None else [watch, client], [], [], WHOLE_LIMIT_S
    )
    if watch not in ready:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(watch)
    return status == 0


def end(passed: bool) -> None:
    sys.stdout.flush()
    os._exit(0 if passed else 1)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
