"""Errors: refusals in the shape of OpenAI's API. In: a status, a message. Out: a response.

400 invalid_value, context_length_exceeded   the body, or a value that the engine refuses
404 model_not_found, route_not_found          another model than the one that is served
405 method_not_allowed
413 body_too_large
429 queue_full                                with Retry-After
500 server_fault                              a fault of ours; the log has its traceback
503 engine_unavailable                        every engine is lost, or the server is ending
504 deadline_exceeded                         the deadline that the request set has passed
"""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

RETRY_S = 1  # what Retry-After says

_CODES = {
    400: "invalid_value",
    404: "model_not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    429: "queue_full",
    500: "server_fault",
    503: "engine_unavailable",
    504: "deadline_exceeded",
}


class ApiError(Exception):
    """A refusal on its way to the client."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str = ""
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.code = code or _CODES[status]

    def as_dict(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        headers = {"retry-after": str(RETRY_S)} if self.status in (429, 503) else None
        return JSONResponse(self.as_dict(), status_code=self.status, headers=headers)
