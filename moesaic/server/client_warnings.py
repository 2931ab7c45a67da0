"""Warnings to a client: a header of the response says what the server has ignored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

HEADER: Final = "x-moesaic-warning"
# Clients and proxies limit the size of headers.
MAX_CHARS: Final = 1000
WARNINGS: Final = "moesaic.warnings"


def warn(request: Request, warnings: Iterable[str]) -> None:
    """The response to this request has these warnings in its header."""
    request.scope.setdefault(WARNINGS, []).extend(warnings)


def add_warning_header(request: Request, response: Response) -> None:
    if warnings := request.scope.get(WARNINGS):
        response.headers[HEADER] = header_value(warnings)


def header_value(warnings: Iterable[str]) -> str:
    """The warnings in printable ASCII, shortened."""
    text = "; ".join(dict.fromkeys(warnings)).encode("ascii", "backslashreplace").decode()
    text = "".join(char if char.isprintable() else "?" for char in text)
    return text if len(text) <= MAX_CHARS else text[: MAX_CHARS - 3] + "..."
