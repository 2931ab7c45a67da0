"""The open requests: which group serves each, and the tokens it has emitted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from moesaic.comm.supervise.kept_answers import KeptAnswers, may_be_kept, merged
from moesaic.comm.supervise.load_balance import LoadBalancer
from moesaic.core.messages import RequestDelta, StepOutput, encode
from moesaic.core.request import ABORTED, FinishReason, NewRequest

# Requests that one message ends.
ENDED_AT_ONCE: Final = 256
# The group of a request that waits until there is one.
HELD: Final = -1


@dataclass(slots=True)
class OpenRequest:
    request: NewRequest
    """As it was submitted."""
    group: int
    emitted: list[int]
    is_aborted: bool = False
    """Its group was told to end it."""
    key: str = ""
    """What its client asks for it by, if it may."""
    is_orphan: bool = False
    """Its client's process was lost."""
    told: RequestDelta | None = None
    """What its client got, if it has a key."""

    def answer(self, request_no: int) -> RequestDelta:
        told = self.told or RequestDelta(request_no, [])
        return msgspec.structs.replace(told, token_ids=list(self.emitted))


class Journal:
    """Also tells the balancer what requests do. Finished requests are dropped, but for the answers
    that clients may ask for again."""

    def __init__(self, balancer: LoadBalancer) -> None:
        self.open: dict[int, OpenRequest] = {}
        self.balancer = balancer
        self._arriving: dict[int, int] = {}
        """The group of each request that waits for another instance."""
        self.kept = KeptAnswers()

    def assign(self, requests: Sequence[NewRequest]) -> list[int]:
        """Returns the group that serves each request, HELD if there is none now."""
        if self.balancer.has_groups:
            groups = self.balancer.assign(requests)
        else:
            groups = [HELD] * len(requests)
        for request, group in zip(requests, groups, strict=True):
            entry = OpenRequest(request, group, list(request.emitted))
            entry.key = request.key if may_be_kept(request) else ""
            self.open[request.request_no] = entry
            if request.room is not None and request.kv_target is None:
                self._arriving[request.request_no] = group
        return groups

    def note_runnable(self, request_no: int) -> None:
        self._arriving.pop(request_no, None)

    def has_work(self, groups: Iterable[int]) -> bool:
        """Whether one of the groups has a request that waits for no other instance."""
        waiting = Counter(self._arriving.values())
        return any(self.balancer.requests[group] > waiting[group] for group in groups)

    def record(self, output: StepOutput) -> None:
        for number, token in zip(output.numbers, output.tokens, strict=True):
            entry = self.open.get(number)
            if entry is not None:
                entry.emitted.append(token)
                self._note_tokens(entry, number, 1)
        for delta in output.deltas:
            entry = self.open.get(delta.request_no)
            if entry is None:
                continue
            entry.emitted += delta.token_ids
            self._note_tokens(entry, delta.request_no, len(delta.token_ids))
            if entry.key:
                entry.told = merged(entry.told, delta)
            if delta.finish is not None:
                if delta.finish.type != "abort":
                    self.keep(delta.request_no)
                self._drop(delta.request_no)

    def _note_tokens(self, entry: OpenRequest, request_no: int, number: int) -> None:
        if entry.group != HELD:  # else this is a mirror, or what a lost group had sent
            self.balancer.note_tokens(request_no, number)

    def keep(self, request_no: int) -> None:
        """Keeps the answer of a request that ends."""
        entry = self.open[request_no]
        if entry.key:
            self.kept.add(entry.key, entry.answer(request_no), time.monotonic())
            entry.key = ""

    def lose_client(self) -> list[int]:
        """Returns the requests that nobody will ask for, and ought to be ended."""
        for entry in self.open.values():
            entry.is_orphan = bool(entry.key)
        return [n for n, one in self.open.items() if not (one.is_orphan or one.is_aborted)]

    def inherit(self) -> None:
        """Another node had the clients: keeps the requests that they may ask for."""
        for number, entry in list(self.open.items()):
            entry.is_orphan = bool(entry.key)
            if entry.is_aborted or not entry.key:
                self._drop(number)

    @property
    def next_number(self) -> int:
        """Above those of all requests that are open, and of answers that a client may be given: it
        would take such an answer for that of another request."""
        kept = (one.number for _, one in self.kept.items())
        return 1 + max([*self.open, *kept], default=-1)

    def attach(self, request: NewRequest) -> tuple[int, bytes] | None:
        """The number of the request that this one asks for again, and all of its answer so far, as
        an encoded StepOutput. None for a new one."""
        if not request.key:
            return None
        for number, entry in self.open.items():
            if entry.key == request.key:
                if not entry.is_orphan:  # somebody has it: the same answer is computed twice
                    return None
                entry.is_orphan = False
                return number, encode(StepOutput([entry.answer(number)]))
        kept = self.kept.find(request.key)
        return None if kept is None else (kept.number, kept.data)

    def move(self, groups: Collection[int]) -> dict[int, list[NewRequest]]:
        """Assigns the requests of these groups anew, and those that are held. Returns what to
        submit to each group."""
        moved = [n for n, one in self.open.items() if one.group in groups or one.group == HELD]
        for number in moved:
            if self.open[number].group != HELD:
                self.balancer.withdraw(number)
                self.open[number].group = HELD
            self._arriving.pop(number, None)
        if not self.balancer.has_groups:
            return {}
        replays, found = [self.replay(number) for number in moved], dict[int, list[NewRequest]]()
        for replay, group in zip(replays, self.balancer.assign(replays), strict=True):
            self.open[replay.request_no].group = group
            found.setdefault(group, []).append(replay)
        return found

    def replay(self, request_no: int) -> NewRequest:
        """The request that, submitted to any group, continues an open one. What another instance
        was to send is computed here: that one has given it up with the lost group."""
        entry = self.open[request_no]
        return msgspec.structs.replace(entry.request, emitted=list(entry.emitted), room=None)

    def end_all(self, message: str) -> list[StepOutput]:
        """Drops all open requests and returns their last outputs."""
        finish = FinishReason("abort", message=message)
        deltas = [RequestDelta(number, [], finish=finish) for number in self.open]
        for number in list(self.open):
            self._drop(number)
        starts = range(0, len(deltas), ENDED_AT_ONCE)
        return [StepOutput(deltas[start : start + ENDED_AT_ONCE]) for start in starts]

    def suspect(self, request_no: int) -> None:
        """Its group failed while it did something for this request alone."""
        if (entry := self.open.get(request_no)) is not None:
            entry.request.is_suspect = True

    def is_served(self, request_no: int) -> bool:
        """Whether a group has the request, and does not lose it at this moment."""
        group = self.open[request_no].group
        return group != HELD and not self.balancer.is_away(group)

    def aborted_in(self, groups: Collection[int]) -> list[int]:
        """The requests that these groups were told to end, and have not."""
        return [n for n, one in self.open.items() if one.is_aborted and one.group in groups]

    def abort(self, request_no: int) -> StepOutput:
        """Drops a request that no group serves, and returns its last output."""
        self._drop(request_no)
        finish = FinishReason("abort", message=ABORTED)
        return StepOutput([RequestDelta(request_no, [], finish=finish)])

    def _drop(self, request_no: int) -> None:
        self._arriving.pop(request_no, None)
        entry = self.open.pop(request_no)
        if entry.group != HELD:
            self.balancer.finish(request_no, entry.emitted)


def refusal(request_no: int) -> StepOutput:
    """The answer to a request with the number of another one."""
    why = f"request {request_no} was submitted twice"
    finish = FinishReason("abort", message=why, failed=True)
    return StepOutput([RequestDelta(request_no, [], finish=finish)])
