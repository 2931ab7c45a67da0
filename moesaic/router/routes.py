"""Which routes of an instance clients may call through the router: those that are not for
administrators, whom the instances know by a key that the router does not have."""

from __future__ import annotations

import re
from typing import Final

from starlette.routing import compile_path

from moesaic.server import openapi
from moesaic.server.app import ROUTES
from moesaic.server.errors import Refusal
from moesaic.server.paths import unknown_path, wrong_method
from moesaic.server.routes import ADMIN, OPEN, RouteAccess, plain_path

OTHER: Final = "other"
"""The name of all paths that no route has."""
DOTS: Final = frozenset((".", ".."))


def _access_by_path() -> dict[str, dict[str, RouteAccess]]:
    found: dict[str, dict[str, RouteAccess]] = {openapi.PATH: {"GET": OPEN}}
    for route in ROUTES:
        found.setdefault(route.path, {})[route.method] = route.access
    return found


ACCESS: Final = _access_by_path()
PATTERNS: Final[tuple[tuple[re.Pattern[str], str], ...]] = tuple(
    (compile_path(path)[0], path) for path in ACCESS
)
SERVED: Final = tuple(
    plain_path(path) for path, methods in ACCESS.items() if ADMIN not in methods.values()
)


def route_of(path: str) -> str:
    """The path in the table of routes; OTHER if it is not there. What stands between an instance
    and the router could take dots for another path than was checked here."""
    if DOTS.intersection(path.split("/")):
        return OTHER
    return next((name for pattern, name in PATTERNS if pattern.match(path)), OTHER)


def check_access(method: str, path: str) -> None:
    """Refusal if the request is not passed on."""
    if (name := route_of(path)) == OTHER:
        raise unknown_path(path, SERVED)
    methods = ACCESS[name]
    access = methods.get("GET" if method == "HEAD" else method)
    if access is None:
        raise wrong_method(methods)
    if access is ADMIN:
        raise not_passed_on(name)


def not_passed_on(what: str) -> Refusal:
    text = f"{what} is for administrators: the router does not pass it on, ask the instance itself"
    return Refusal(403, text)
