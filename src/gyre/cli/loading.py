"""Loading: protects slow imports from Ctrl-C. In: nothing. Out: a context.

Code that initializes a C extension may swallow a KeyboardInterrupt. Within this context Ctrl-C is
only recorded, and raised when the imports are done.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def loading() -> Iterator[None]:
    """Record Ctrl-C, and raise it at the end. Signals belong to the main thread; elsewhere this
    does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    noted: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        noted.append(signum)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if noted:
        raise KeyboardInterrupt
