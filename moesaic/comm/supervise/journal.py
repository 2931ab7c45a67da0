"""The open requests: which group serves each, and the tokens it has emitted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from moesaic.core.messages import RequestDelta, StepOutput
from moesaic.core.request import FinishReason, NewRequest

# Requests that one message ends.
ENDED_AT_ONCE: Final = 256


@dataclass(slots=True)
class OpenRequest:
    request: NewRequest
    """As it was submitted."""
    group: int
    emitted: list[int]

    @property
    def tokens(self) -> int:
        return len(self.request.prompt_ids) + len(self.emitted)


class Journal:
    """Also spreads new requests over the serving groups. Finished requests are dropped."""

    def __init__(self, num_groups: int, method: str) -> None:
        self.open: dict[int, OpenRequest] = {}
        self.requests = [0] * num_groups
        """The open requests of each group."""
        self.tokens = [0] * num_groups
        """The tokens of each group's open requests, prompts included."""
        self._method = method
        self._next_group = 0

    def assign(self, request: NewRequest) -> int:
        """Returns the group that serves the request."""
        assert request.request_no not in self.open, request.request_no
        group = self._choose() if request.group is None else request.group
        entry = OpenRequest(request, group, list(request.emitted))
        self.open[request.request_no] = entry
        self.requests[group] += 1
        self.tokens[group] += entry.tokens
        return group

    def record(self, output: StepOutput) -> None:
        for number, token in zip(output.numbers, output.tokens, strict=True):
            entry = self.open.get(number)
            if entry is not None:
                entry.emitted.append(token)
                self.tokens[entry.group] += 1
        for delta in output.deltas:
            entry = self.open.get(delta.request_no)
            if entry is None:
                continue
            entry.emitted += delta.token_ids
            self.tokens[entry.group] += len(delta.token_ids)
            if delta.finish is not None:
                self._drop(delta.request_no)

    def replay(self, request_no: int) -> NewRequest:
        """The request that, submitted to any group, continues an open one."""
        entry = self.open[request_no]
        return msgspec.structs.replace(entry.request, emitted=list(entry.emitted))

    def end_all(self, message: str) -> list[StepOutput]:
        """Drops all open requests and returns their last outputs."""
        finish = FinishReason("abort", message=message)
        deltas = [RequestDelta(number, [], finish=finish) for number in self.open]
        for number in list(self.open):
            self._drop(number)
        starts = range(0, len(deltas), ENDED_AT_ONCE)
        return [StepOutput(deltas[start : start + ENDED_AT_ONCE]) for start in starts]

    def _drop(self, request_no: int) -> None:
        entry = self.open.pop(request_no)
        self.requests[entry.group] -= 1
        self.tokens[entry.group] -= entry.tokens

    def _choose(self) -> int:
        """The least loaded group; equals take turns, or group 0 would get all single requests."""
        size = len(self.requests)
        order = [(self._next_group + offset) % size for offset in range(size)]
        load = {"total_requests": self.requests, "total_tokens": self.tokens}.get(self._method)
        group = order[0] if load is None else min(order, key=load.__getitem__)
        self._next_group = (group + 1) % size
        return group
