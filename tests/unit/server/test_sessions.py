"""Sessions: which field or header names one, and what of it goes on to the engines."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from api_cases import api
from gyre.server.bodies.schema import ApiError
from gyre.server.generation import find_session

NAME, LONG = "m", "k" * 256


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/generate", {"prompt": "a"}),
    ],
)
def test_a_session_reaches_the_engine_as_a_hash(path: str, body: dict[str, Any]) -> None:
    async def go() -> list[str]:
        async with api() as on:
            if path.startswith("/v1"):
                body["model"] = NAME
            for headers in ({}, {"x-session-id": LONG}, {"X-Session-Id": "other"}):
                answer = await on.client.post(path, json=body, headers=headers)
                assert answer.status_code == 200, answer.text
            if path.startswith("/v1"):
                both = body | {"prompt_cache_key": LONG}
                await on.client.post(path, json=both, headers={"x-session-id": "other"})
            long = await on.client.post(path, json=body, headers={"x-session-id": LONG + "k"})
            assert long.status_code == 400 and "257 characters" in long.text
            return list(dict.fromkeys(request.session_id for request in on.engine.asked))

    none, first, other = asyncio.run(go())
    assert none == "" and len(first) == len(other) == 32 and LONG not in first


def test_a_session_key_is_bounded_and_may_be_any_text() -> None:
    found = {find_session({}, key) for key in ("a", "b", "\ud800", None, "")}
    assert len(found) == 4 and "" in found
    with pytest.raises(ApiError):
        find_session({"x-session-id": LONG + "k"})
