"""What a route is: data, from which the app, the access check and the OpenAPI document are made."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request
from starlette.responses import Response

if TYPE_CHECKING:
    from moesaic.server.context import Context

# Where a request's scope has the digest of the key that it came with.
CLIENT: Final = "moesaic.client"

Handler = Callable[["Context", Request], Awaitable[Response]]


class RouteAccess(Enum):
    """Which clients may call a route. OPEN: all (probes, metrics, what is the same for every
    server). USER: those with a key, if the server has keys. ADMIN: those with the admin key, or
    with the only key of the server."""

    OPEN = "open"
    USER = "user"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Route:
    """`body`: the msgspec type of what is sent, if anything is. `probe`: it is answered when there
    are no connections left for others. `changes`: a GET that changes something, which browsers send
    for any page that names its address."""

    method: str
    path: str
    handler: Handler
    access: RouteAccess
    summary: str
    body: Any = None
    probe: bool = False
    changes: bool = False
