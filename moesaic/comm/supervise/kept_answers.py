"""Answers that clients may ask for again, after the process that had their connections was lost."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from moesaic.core.messages import RequestDelta, StepOutput, encode
from moesaic.core.request import NewRequest

# How long an answer that has ended is kept, and how many bytes such answers have at most.
KEPT_SECONDS: Final = 60.0
KEPT_BYTES: Final = 64 << 20


def may_be_kept(request: NewRequest) -> bool:
    """Whether all that its client gets goes through this process: not what an earlier supervisor
    knew, nor large arrays."""
    is_whole = not (request.emitted and request.return_logprob)
    return bool(request.key) and is_whole and request.routed_start is None and request.room is None


def merged(former: RequestDelta | None, delta: RequestDelta) -> RequestDelta:
    """What two deltas of a request tell together, but for its tokens."""
    if former is None:
        return msgspec.structs.replace(
            delta,
            token_ids=[],
            logprobs=list(delta.logprobs),
            top_logprobs=list(delta.top_logprobs),
            input_logprobs=list(delta.input_logprobs),
            input_top_logprobs=list(delta.input_top_logprobs),
        )
    for name in ("logprobs", "top_logprobs", "input_logprobs", "input_top_logprobs"):
        getattr(former, name).extend(getattr(delta, name))
    former.cached_tokens, former.retractions = delta.cached_tokens, delta.retractions
    former.finish, former.drafts = delta.finish, delta.drafts
    if former.queue_seconds is None:
        former.queue_seconds = delta.queue_seconds
    return former


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    number: int
    data: bytes
    """A StepOutput with the whole answer."""
    until: float


class KeptAnswers:
    def __init__(self, seconds: float = KEPT_SECONDS, nbytes: int = KEPT_BYTES) -> None:
        self._seconds, self._most = seconds, nbytes
        self._answers: OrderedDict[str, KeptAnswer] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, key: str, answer: RequestDelta, now: float) -> None:
        """The oldest ones make room for it."""
        data = encode(StepOutput([answer]))
        self.put(key, KeptAnswer(answer.request_no, data, now + self._seconds))

    def put(self, key: str, answer: KeptAnswer) -> None:
        self._drop(key)
        self._answers[key] = answer
        self.nbytes += len(answer.data)
        while self.nbytes > self._most:
            self._drop(next(iter(self._answers)))

    def items(self) -> Iterable[tuple[str, KeptAnswer]]:
        return self._answers.items()

    def find(self, key: str) -> KeptAnswer | None:
        return self._answers.get(key)

    def expire(self, now: float) -> None:
        while self._answers and next(iter(self._answers.values())).until <= now:
            self._drop(next(iter(self._answers)))

    def _drop(self, key: str) -> None:
        if (answer := self._answers.pop(key, None)) is not None:
            self.nbytes -= len(answer.data)
