"""Library logs: what uvicorn, asyncio and others log, as events. In: records of Python's logging.
Out: an event for each warning or error, so that a server's log is one JSON object a line.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from gyre.core.events import Emit

MOST_CHARS = 500
# said for each write to a client that is gone, or each request that is no HTTP: both are counted in
# the metrics, and a client could fill the log
COUNTED_ELSEWHERE = ("socket.send() raised exception.", "Invalid HTTP request received.")


class EventHandler(logging.Handler):
    """Emit `serve.library_warning` for each record. Of an exception it has the type alone:
    its traceback is in the event of the request that it broke."""

    def __init__(self, emit: Emit) -> None:
        super().__init__(level=logging.WARNING)
        self._emit = emit

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage().strip()
        if message in COUNTED_ELSEWHERE:
            return
        error = record.exc_info[0] if record.exc_info else None
        self._emit(
            "serve.library_warning",
            logger=record.name,
            level=record.levelname,
            message=message[:MOST_CHARS],
            error="" if error is None else error.__name__,
        )


@contextmanager
def libraries_logged(emit: Emit) -> Iterator[None]:
    """Take the place of Python's handler of last resort meanwhile."""
    handler, root = EventHandler(emit), logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
