"""The body of a request, as each instance gets it."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from moesaic.core.request_id import SEED_BITS, seed_of
from moesaic.router.workers import Worker

ROOM_BITS: Final = 63
# Characters of an answer whose length is not limited.
UNKNOWN_LENGTH: Final = 1024
# Characters of a prompt by which an instance is chosen: more would take the time of the event loop,
# and the place of other prompts in the index.
MOST_TEXT: Final = 1 << 16
# Fields that say where a prompt is computed, which the router decides: an instance connects there.
WHERE: Final = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
# Fields of the answer, and its id: without, an instance that still has that takes the prompt again.
ANSWER: Final = ("stream_options", "rid", "request_id")
LENGTHS: Final = ("max_tokens", "max_completion_tokens", "max_new_tokens", "max_output_tokens")


@dataclass(frozen=True)
class Call:
    """A request that generates."""

    path: str
    body: dict[str, Any]

    @classmethod
    def of(cls, path: str, body: dict[str, Any], request_id: str = "") -> Call:
        """With a seed, if it has none: an instance that takes over samples the same tokens. The
        seed follows from the id, so that another router chooses the same."""
        body = {name: value for name, value in body.items() if name not in WHERE}
        if _prompts(body) is not None:
            return cls(path, body)  # one seed for all would make equal prompts' answers equal
        seed = seed_of(request_id) if request_id else secrets.randbits(SEED_BITS)
        if path == "/generate":
            given = body.get("sampling_params")
            params = {} if given is None else given  # an instance refuses what is no object
            if isinstance(params, dict) and params.get("sampling_seed") is None:
                body["sampling_params"] = params | {"sampling_seed": seed}
        elif body.get("seed") is None:
            body["seed"] = seed
        return cls(path, body)

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def text(self) -> str:
        """What the prefix cache of an instance may know, in the order in which it is computed: the
        beginning of the prompt."""
        return self._text[0]

    @property
    def length(self) -> int:
        """Characters of the prompt."""
        return self._text[1]

    @cached_property
    def _text(self) -> tuple[str, int]:
        for name in ("messages", "text", "input_ids", "prompt"):
            if (found := self.body.get(name)) is not None:
                text = found if isinstance(found, str) else json.dumps(found)
                return text[:MOST_TEXT], len(text)
        return "", 0

    @property
    def size(self) -> int:
        """Characters to read and to write, roughly."""
        params = self.body.get("sampling_params")
        given = {**self.body, **(params if isinstance(params, dict) else {})}
        lengths = (given.get(name) for name in LENGTHS)
        length = next((one for one in lengths if isinstance(one, int)), UNKNOWN_LENGTH)
        return self.length + 4 * length

    def halves(self, prefill: Worker) -> tuple[dict[str, Any], dict[str, Any]]:
        """For a prefill instance and for the one that continues."""
        number = _prompts(self.body)
        room: Any = secrets.randbits(ROOM_BITS)
        if number is not None:
            room = [secrets.randbits(ROOM_BITS) for _ in range(number)]
        where = dict(zip(WHERE, (prefill.host, prefill.bootstrap_port, room), strict=True))
        second = {**self.body, **where}
        first = {name: value for name, value in second.items() if name not in ANSWER}
        return {**first, "stream": False}, second


def _prompts(body: dict[str, Any]) -> int | None:
    """How many prompts a list of them has; None for one prompt."""
    for name in ("text", "input_ids", "prompt"):
        found = body.get(name)
        if isinstance(found, list) and found and not isinstance(found[0], int):
            return len(found)
    return None
