"""The routes of instances, by which the router counts."""

from __future__ import annotations

import re
from typing import Final

from starlette.routing import compile_path

from moesaic.server import openapi
from moesaic.server.app import ROUTES

OTHER: Final = "other"
"""The name of all paths that no route has."""
PATTERNS: Final[tuple[tuple[re.Pattern[str], str], ...]] = tuple(
    (compile_path(path)[0], path)
    for path in dict.fromkeys((openapi.PATH, *(route.path for route in ROUTES)))
)


def route_of(path: str) -> str:
    """The path in the table of routes; OTHER if it is not there."""
    return next((name for pattern, name in PATTERNS if pattern.match(path)), OTHER)
