"""Libraries' warnings become events, and what is counted elsewhere is left out."""

from __future__ import annotations

import logging
from typing import Any

from gyre.core.events import check_event
from gyre.launch.serving.library_logs import COUNTED_ELSEWHERE, MOST_CHARS, libraries_logged


def test_warnings_are_events_while_the_server_runs() -> None:
    told: list[dict[str, Any]] = []

    def emit(kind: str, /, **fields: Any) -> None:
        check_event(kind, list(fields))
        told.append(fields)

    logger = logging.getLogger("a.library")
    with libraries_logged(emit):
        logger.info("nothing to say")
        logger.warning("%s of %s", "two", "three" * 200)
        for text in COUNTED_ELSEWHERE:
            logger.warning(text)
        try:
            raise ValueError("what a client sent")
        except ValueError:
            logger.exception("it broke\n")
    logger.warning("too late")
    first, second = told
    assert first["message"] == ("two of " + "three" * 200)[:MOST_CHARS] and first["error"] == ""
    assert second == {
        "logger": "a.library",
        "level": "ERROR",
        "message": "it broke",
        "error": "ValueError",
    }
