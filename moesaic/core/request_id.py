"""The id that a client gives a request, to ask for its answer again."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

REQUEST_ID: Final = "x-request-id"
LAST_EVENT_ID: Final = "last-event-id"
SEED_BITS: Final = 62


def seed_of(request_id: str) -> int:
    """The seed of a request that has none: whoever serves it samples the same tokens."""
    found = blake2b(request_id.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(found) >> (64 - SEED_BITS)
