"""API keys and access checks. Only digests of keys are kept, and compared in constant time."""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Final

from starlette.requests import Request

from moesaic.config import ServerArgs
from moesaic.core.process import ADMIN_API_KEY, API_KEY
from moesaic.server.errors import Refusal
from moesaic.server.routes import RouteAccess

NAMED_PORT: Final = re.compile(r":\d*$")
CHALLENGE: Final = {"WWW-Authenticate": "Bearer"}
# Headers that browsers send and API clients do not. A page can suppress or set some of them, but
# not all: the language and the name of the browser remain.
BROWSER_HEADERS: Final = frozenset(
    "accept-language cookie origin referer upgrade-insecure-requests".split()
)
BROWSER_PREFIX: Final = "sec-"
BROWSER_KINDS: Final = ("text/html", "image/")
BROWSER_NAME: Final = "mozilla/"
# Host headers whose check is remembered: clients send the same few.
KEPT_NAMES: Final = 64


@dataclass(frozen=True, slots=True, repr=False)
class Keys:
    """Digests of the server's keys; empty without a key."""

    api: bytes = b""
    admin: bytes = b""
    local: bool = False
    """Only this machine can reach the server."""

    @classmethod
    def of(cls, args: ServerArgs, environment: Mapping[str, str] = os.environ) -> Keys:
        """Flags take precedence over the environment, which `ps` does not show."""
        api = args.api_key if args.api_key is not None else environment.get(API_KEY)
        admin = args.admin_api_key
        admin = admin if admin is not None else environment.get(ADMIN_API_KEY)
        digests = _digest_of("--api-key", api), _digest_of("--admin-api-key", admin)
        return cls(*digests, local=is_loopback(args.host))

    def __bool__(self) -> bool:
        return bool(self.api or self.admin)

    def admit(self, access: RouteAccess, request: Request) -> bytes:
        """The digest of the request's key, empty if the route needs none, or a Refusal."""
        accepted = self._accepted(access)
        if not accepted:
            if access is not RouteAccess.OPEN:
                _refuse_foreign_pages(request)
                if self.local:
                    _refuse_foreign_names(request)
            return b""
        given = _given_key(request)
        if any(hmac.compare_digest(given, key) for key in accepted):
            return given
        if given and self.api and hmac.compare_digest(given, self.api):
            raise Refusal(403, "this needs the admin key", code="admin_key_needed")
        raise Refusal(
            401,
            "give the server's key, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
            code="invalid_api_key",
            headers=CHALLENGE,
        )

    def allow(self, access: RouteAccess, request: Request) -> bool:
        try:
            self.admit(access, request)
        except Refusal:
            return False
        return True

    def _accepted(self, access: RouteAccess) -> tuple[bytes, ...]:
        """The keys that open a route; empty if it needs none."""
        match access:
            case RouteAccess.OPEN:
                return ()
            case RouteAccess.USER:
                return tuple(key for key in (self.api, self.admin) if key) if self.api else ()
            case RouteAccess.ADMIN:
                return (self.admin or self.api,) if self else ()


def _digest_of(flag: str, key: str | None) -> bytes:
    if key is None:
        return b""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(
            f"{flag} cannot be sent in a header: give ASCII letters, digits and signs, no spaces"
        )
    return sha256(key.encode()).digest()


def _given_key(request: Request) -> bytes:
    """The digest of the request's key, from OpenAI's header or else from Anthropic's; empty if the
    header is missing, malformed or given twice."""
    found = _header(request, b"authorization")
    if not found:
        found = [b"Bearer " + key for key in _header(request, b"x-api-key")]
    scheme, _, key = found[0].partition(b" ") if len(found) == 1 else (b"", b"", b"")
    return sha256(key.strip()).digest() if scheme.lower() == b"bearer" else b""


def _header(request: Request, wanted: bytes) -> list[bytes]:
    return [value for name, value in request.scope["headers"] if name == wanted]


def _refuse_foreign_pages(request: Request) -> None:
    """Without keys, any page in a browser could send requests to a server on the same machine.
    Browsers name the page's site in the Origin header."""
    if is_foreign_page(request):
        raise Refusal(403, "requests from pages of other sites need a key: start with --api-key")


def is_foreign_page(request: Request) -> bool:
    origin = request.headers.get("origin")
    return origin is not None and origin.partition("://")[2] != request.headers.get("host")


def refuse_browsers(request: Request) -> None:
    """Protects a GET that changes state without keys: any page can make a browser send it."""
    headers = request.headers
    if (
        any(name in BROWSER_HEADERS or name.startswith(BROWSER_PREFIX) for name in headers)
        or any(kind in headers.get("accept", "").lower() for kind in BROWSER_KINDS)
        or headers.get("user-agent", "").lower().startswith(BROWSER_NAME)
    ):
        raise Refusal(
            403,
            "browsers may not do this by GET, since any page could make them: send POST, or start "
            "with --api-key",
        )


def _refuse_foreign_names(request: Request) -> None:
    """Prevents DNS rebinding: a site may point its name at this machine, and the browser then sends
    that name as the host. It cannot do so with an address."""
    host = request.headers.get("host")
    if host is None or is_own_name(host):
        return
    raise Refusal(
        403,
        "the Host header is not this machine's own: use localhost or an IP address, or start with "
        "--api-key",
        code="foreign_host",
    )


@lru_cache(KEPT_NAMES)
def is_own_name(host: str) -> bool:
    """Whether a host is localhost or an address: no site's name."""
    return NAMED_PORT.sub("", host).lower() == "localhost" or _address(host) is not None


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address in a host with or without a port."""
    try:
        return ipaddress.ip_address(NAMED_PORT.sub("", host).removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    address = _address(host if ":" not in host else f"[{host}]")
    return host.lower() == "localhost" or (address is not None and address.is_loopback)
