"""Error responses: OpenAI's shape on every route."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from starlette.responses import Response

# Messages may quote the request, which may have megabytes.
LONGEST_MESSAGE: Final = 500
# Those of 404s quote names up to a limit of their own, and list what is served.
LONGEST_NOT_FOUND: Final = 4000
INTERNAL: Final = "internal server error: see the server's log"
TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class Refusal(Exception):
    """Ends a request with this status. `param`: the field at fault. `code`: a word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The body of the response, or the last event of a stream."""
        text, longest = self.message, LONGEST_NOT_FOUND if self.status == 404 else LONGEST_MESSAGE
        if len(text) > longest:
            text = f"{text[:longest]} …"
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else TYPES[400])
        error = {"message": text, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self, body: Any = None) -> Response:
        """`body`: of an API with another shape."""
        data = msgspec.json.encode(self.body() if body is None else body)
        return Response(data, self.status, self.headers, "application/json")
