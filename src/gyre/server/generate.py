"""Generate: POST /generate, a prompt to its tokens without OpenAI's forms. In: the body. Out: a
request in the engine, and what forms its answer. An event of a stream has the fields of a whole
answer, with what is new; the usage counts what has come so far.
"""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np

from gyre.server.bodies.schema import GenerateBody
from gyre.server.generation import TextDelta, TokenUsage, make_request
from gyre.server.respond import ActiveRequest, Service


def open_generation(
    body: GenerateBody, tokens: np.ndarray, service: Service, *, session_id: str = ""
) -> tuple[ActiveRequest, GenerateAnswer]:
    """Return the request for int32 ids and its answer. ApiError where the engine refuses it."""
    request = make_request(
        body.params,
        tokens,
        service.model,
        request_id=f"gen-{uuid.uuid4().hex}",
        stream=body.stream,
        most_tokens=body.params.max_tokens,
        limit_field="params.max_tokens",
        session_id=session_id,
    )
    usage = TokenUsage(prompt_tokens=len(tokens))
    return ActiveRequest(service, request, usage), GenerateAnswer(request.request_id)


class GenerateAnswer:
    """One completion: its text, tokens and log-probs, and the weights that chose them."""

    def __init__(self, request_id: str) -> None:
        self._id = request_id

    def first(self, n: int) -> list[dict[str, Any]]:
        """Return the events before any token: none."""
        return []

    def event(self, piece: TextDelta, usage: TokenUsage) -> dict[str, Any]:
        """Return the event of a piece."""
        return self.whole([piece], usage)

    def last(self, usage: TokenUsage) -> dict[str, Any]:
        """Return the event with the usage, after all pieces."""
        return self.whole([], usage)

    def whole(self, pieces: list[TextDelta], usage: TokenUsage) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        return {
            "id": self._id,
            "text": "".join(piece.text for piece in pieces),
            "tokens": [token for piece in pieces for token in piece.tokens.tolist()],
            "logprobs": [value for piece in pieces for value in piece.logprobs.tolist()],
            "versions": [number for piece in pieces for number in piece.versions.tolist()],
            "finish_reason": pieces[-1].finish if pieces else None,
            "usage": usage.as_dict(),
            "weights_version": max(usage.versions, default=None),
        }
