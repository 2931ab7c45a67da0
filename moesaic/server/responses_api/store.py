"""Responses that clients may read, continue or cancel later, in memory and bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Final

from moesaic.core.redact import shown
from moesaic.server.errors import Refusal

MAX_RESPONSES: Final = 1024
MAX_BYTES: Final = 64 << 20
# The part of the store that background responses may fill while they run: they are not removed.
RUNNING_SHARE: Final = 2


@dataclass(slots=True, eq=False)
class StoredResponse:
    """JSON, so that its size is known."""

    id: str
    owner: bytes
    """The digest of the client's key; empty without keys."""
    body: bytes
    items: bytes
    """The input items of the request."""
    conversation: bytes = b""
    """The messages before, of this input and of the answer; empty if the answer failed."""
    client: Hashable = None
    """The client that the response counts for when the store is full."""
    background: bool = False
    task: asyncio.Task[Any] | None = None
    """What makes the answer in the background, until it has ended."""

    @property
    def size(self) -> int:
        return len(self.body) + len(self.items) + len(self.conversation)

    @property
    def running(self) -> bool:
        return self.task is not None and not self.task.done()


@dataclass(slots=True)
class _ClientResponses:
    """A client's responses, the oldest first."""

    by_id: dict[str, StoredResponse] = field(default_factory=dict)
    size: int = 0


class ResponseStore:
    """For a new response, the oldest of the client that has the most are removed. Background
    responses that run are not removed, so they have a limit of their own."""

    def __init__(
        self, _: object = None, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES
    ) -> None:
        self.max_responses, self.max_bytes = max_responses, max_bytes
        self._responses: dict[str, StoredResponse] = {}
        self._clients: dict[Hashable, _ClientResponses] = {}
        self.size = 0

    def __len__(self) -> int:
        return len(self._responses)

    def put(self, response: StoredResponse) -> None:
        """Adds a response, or replaces the one with its id, which keeps its age."""
        before = self._responses.get(response.id)
        added = response.size - (before.size if before else 0)
        client = self._clients.setdefault(response.client, _ClientResponses())
        self._responses[response.id] = client.by_id[response.id] = response
        client.size += added
        self.size += added
        while self._is_full and (removable := self._removable()) is not None:
            self.remove(removable)

    def check_running(self, response: StoredResponse) -> None:
        """Refuses a background response if those that run leave no room for it."""
        sizes = [one.size for one in self._responses.values() if one.running]
        most, most_bytes = self.max_responses // RUNNING_SHARE, self.max_bytes // RUNNING_SHARE
        if len(sizes) >= most or sum(sizes) + response.size > most_bytes:
            text = (
                f"{len(sizes)} background responses with {sum(sizes)} bytes run, and this one has "
                f"{response.size}: at most {most} with {most_bytes} bytes run at once; try again "
                "when some have ended, or leave background out"
            )
            raise Refusal(429, text, "background", "queue_full", {"Retry-After": "1"})

    def get(self, id: str, owner: bytes) -> StoredResponse:
        found = self._responses.get(id)
        if found is None or found.owner != owner:
            raise Refusal(404, f"no response {shown(id)} is stored, or no longer", "response_id")
        return found

    @property
    def _is_full(self) -> bool:
        return len(self) > self.max_responses or self.size > self.max_bytes

    def _removable(self) -> str | None:
        """The oldest response that does not run, of the client that has the most."""
        by_bytes = self.size > self.max_bytes
        clients = sorted(
            self._clients.values(),
            key=lambda client: client.size if by_bytes else len(client.by_id),
            reverse=True,
        )
        ids = (id for client in clients for id, one in client.by_id.items() if not one.running)
        return next(ids, None)

    def remove(self, id: str) -> None:
        if (found := self._responses.pop(id, None)) is None:
            return
        client = self._clients[found.client]
        del client.by_id[id]
        client.size -= found.size
        self.size -= found.size
        if not client.by_id:
            del self._clients[found.client]

    def conversation(self, id: str | None, owner: bytes) -> bytes:
        """The messages that a request with this previous_response_id continues."""
        field = "previous_response_id"
        if not id:
            return b"[]"
        try:
            found = self.get(id, owner)
        except Refusal as error:
            raise Refusal(400, error.message, field, "previous_response_not_found") from None
        if found.running or not found.conversation:
            raise Refusal(400, f"the response {shown(id)} has no answer to continue", field)
        return found.conversation
