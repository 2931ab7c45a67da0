"""Routes as data, from which the app, the access checks and the OpenAPI document are made."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request
from starlette.responses import Response

if TYPE_CHECKING:
    from moesaic.server.context import Context

# The key of a request's scope that holds the digest of its API key.
CLIENT: Final = "moesaic.client"

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
    changes: bool = False
    """A GET that changes state; browsers send it for any page that names its address."""
