"""What is open: each request, who serves it, what it has got so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from moesaic.core.messages import Finish, NewRequest, RequestDelta, StepOutput

# Requests of a fault are answered in messages of this many.
ANSWERS: Final = 256


@dataclass(slots=True)
class Entry:
    group: int
    prompt_len: int
    emitted: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return self.prompt_len + len(self.emitted)


class Journal:
    """Also spreads new requests over the serving groups. A finished request is forgotten."""

    def __init__(self, num_groups: int, method: str) -> None:
        self.entries: dict[str, Entry] = {}
        self.requests = [0] * num_groups
        """Open ones, of each group."""
        self.tokens = [0] * num_groups
        """Of the open requests of each group, prompts included."""
        self._method = method
        self._turn = 0

    def add(self, request: NewRequest) -> int:
        """The group that is to serve it."""
        assert request.rid not in self.entries, request.rid
        group = self._choose() if request.group is None else request.group
        entry = Entry(group, len(request.prompt_ids), list(request.emitted))
        self.entries[request.rid] = entry
        self.requests[group] += 1
        self.tokens[group] += entry.tokens
        return group

    def take(self, output: StepOutput) -> None:
        """What a leader gave out."""
        for delta in output.deltas:
            entry = self.entries.get(delta.rid)
            if entry is None:
                continue
            entry.emitted += delta.token_ids
            self.tokens[entry.group] += len(delta.token_ids)
            if delta.finish is not None:
                self._drop(delta.rid)

    def end_all(self, message: str) -> list[StepOutput]:
        """The last answers to all open requests, which are forgotten."""
        finish = Finish("abort", message=message)
        deltas = [RequestDelta(rid, [], finish=finish) for rid in self.entries]
        for rid in list(self.entries):
            self._drop(rid)
        return [StepOutput(deltas[i : i + ANSWERS]) for i in range(0, len(deltas), ANSWERS)]

    def _drop(self, rid: str) -> None:
        entry = self.entries.pop(rid)
        self.requests[entry.group] -= 1
        self.tokens[entry.group] -= entry.tokens

    def _choose(self) -> int:
        """Of equals, the next in turn: else the first group would get all single requests."""
        size = len(self.requests)
        order = [(self._turn + offset) % size for offset in range(size)]
        load = {"total_requests": self.requests, "total_tokens": self.tokens}.get(self._method)
        group = order[0] if load is None else min(order, key=load.__getitem__)
        self._turn = (group + 1) % size
        return group
