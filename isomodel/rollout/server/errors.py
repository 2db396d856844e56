"""Disconnected, and ApiError: what a client did wrong, or what went wrong here, in the shape that OpenAI's clients read."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse


class Disconnected(Exception):
    """The client has gone: nobody is left to answer."""


KINDS = {
    400: "invalid_request_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
LONGEST = 2000
"""Characters of a message: one that quotes a client's values is cut."""


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
      status: of HTTP, one of KINDS. message: what is wrong and what to do.
      param: the field at fault. code: a short name that programs compare.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        self.status, self.param, self.code = status, param, code
        self.message = message if len(message) <= LONGEST else message[:LONGEST] + " ..."
        super().__init__(self.message)

    def body(self) -> dict[str, Any]:
        """JSON values of the answer, or of the last event of a stream."""
        error = {"message": self.message, "type": KINDS[self.status], "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        """The answer; 429 and 503 say when to come back."""
        headers = {"Retry-After": "1"} if self.status in (429, 503) else None
        return JSONResponse(self.body(), self.status, headers)
