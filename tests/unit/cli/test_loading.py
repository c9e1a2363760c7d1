"""Ctrl-C while modules load is raised afterwards, even where an import would have swallowed it."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress

import pytest

from gyre.cli.answer import loading


def test_an_interrupt_that_an_import_swallows_is_raised_at_the_end() -> None:
    before = signal.getsignal(signal.SIGINT)
    done = []
    with pytest.raises(KeyboardInterrupt), loading():
        with suppress(BaseException):  # as some extension modules do
            os.kill(os.getpid(), signal.SIGINT)
        done.append(True)
    assert done and signal.getsignal(signal.SIGINT) is before


def test_without_one_nothing_changes_and_errors_pass() -> None:
    before = signal.getsignal(signal.SIGINT)
    with loading():
        pass
    with pytest.raises(ImportError), loading():
        raise ImportError("no such module")
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_may_load_too() -> None:
    seen: list[bool] = []

    def load() -> None:
        with loading():
            seen.append(True)

    thread = threading.Thread(target=load)
    thread.start()
    thread.join(10)
    assert seen == [True]
