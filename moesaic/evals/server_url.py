"""The URL of a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote

ROUTES: Final = ("/chat/completions", "/completions", "/models", "/v1")


@dataclass(frozen=True, slots=True)
class ServerUrl:
    url: str  # without an API route and without a login
    login: str = field(default="", repr=False)  # NAME:PASSWORD

    @classmethod
    def of(cls, text: str) -> ServerUrl:
        """Parse a URL; the ValueError for an invalid one shows no password."""
        scheme, _, rest = text.partition("://")
        host, slash, path = rest.partition("/")
        login, _, host = host.rpartition("@")
        if "@" in path:
            raise ValueError("--base-url has an @ after its first /: write %2F for a / in a name")
        if scheme not in ("http", "https") or not host:
            shown = text.rpartition("@")[2]
            raise ValueError(f"--base-url is {shown!r}: give http://HOST:PORT")
        url = f"{scheme}://{host}{slash}{path}".rstrip("/")
        for route in ROUTES:
            url = url.removesuffix(route).rstrip("/")
        return cls(url, unquote(login))
