"""Routes as data, from which the app, the access checks and the OpenAPI document are made."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request
from starlette.responses import Response

from moesaic.server.errors import Refusal

if TYPE_CHECKING:
    from moesaic.server.context import Context

# The key of a request's scope that holds the digest of its API key.
CLIENT: Final = "moesaic.client"

# A parameter of a path: {name} or {name:convertor}.
PARAMETER: Final = re.compile(r"\{(\w+)(?::\w+)?\}")

Handler = Callable[["Context", Request], Awaitable[Response]]


class RouteAccess(Enum):
    """Which clients may call a route."""

    OPEN = "open"
    """All: probes, metrics, and whatever is the same on every server."""
    USER = "user"
    """Clients with a key, if the server has keys."""
    ADMIN = "admin"
    """Clients with the admin key, or with the server's only key."""


OPEN, USER, ADMIN = RouteAccess


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    path: str
    handler: Handler
    access: RouteAccess
    summary: str
    body: Any = None
    """The msgspec type of the request body."""
    probe: bool = False
    """The route is served when no connections are left for others."""
    error_body: Callable[[Refusal], Any] = Refusal.body
    """The body of an error response."""
    changes: bool = False
    """A GET that changes state; browsers send it for any page that names its address."""
    generates: bool = False
    """The route is refused while the server stops."""
    example: Mapping[str, Any] | None = None
    """A body that works, for the OpenAPI document; `one_of` are fields of which it has exactly
    one."""
    one_of: tuple[str, ...] = ()
    body_optional: bool = False
    errors: Mapping[int, str] = field(default_factory=dict)
    """Statuses that only this route answers with, and when."""
    query: Mapping[str, str] = field(default_factory=dict)
    """What each parameter of the query means."""


def plain_path(path: str) -> str:
    """A path with {name} for each parameter."""
    return PARAMETER.sub(r"{\1}", path)
