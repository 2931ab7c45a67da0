"""A router in a thread, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from moesaic.router.app import Router
from moesaic.router.args import RouterArgs
from tests.server.serving import listening


@contextmanager
def routed(args: RouterArgs) -> Iterator[tuple[Router, httpx.Client]]:
    """A router in a thread, and a client of it."""
    router = Router(args)
    with listening(router.app()) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield router, client
