"""A request with its text and its listener."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import msgspec

from moesaic.core.messages import RequestDelta
from moesaic.core.request import FinishReason, Request
from moesaic.engine.schedule.plan import ItemResult
from moesaic.engine.text.detokenizer import IncrementalDetokenizer
from moesaic.observe.requests import RequestWatch

logger = logging.getLogger(__name__)


class Progress(msgspec.Struct, frozen=True, gc=False):
    """A snapshot of a request that other threads may read."""

    rid: str
    num_output: int
    text: str
    finished: bool


@dataclass(slots=True, eq=False)
class RequestState:
    """The engine's thread calls `listener` at the end, and each `stream_interval` tokens if set."""

    request: Request
    detokenizer: IncrementalDetokenizer | None
    listener: Callable[[Progress], None]
    stream_interval: int | None = None
    watch: RequestWatch | None = None
    part_of: tuple[str, ...] = ()
    """The ids of its prompt and of its call."""
    client: Hashable = None
    """None if unknown."""
    last_token: float = 0.0
    held: float = 0.0
    """Seconds from its creation until it was sent to a rank."""
    stop_ids: frozenset[int] = field(init=False)
    """Tokens that end it."""
    most_tokens: int = field(init=False)
    """The length of its prompt and its longest answer."""

    def __post_init__(self) -> None:
        request, params = self.request, self.request.params
        eos_ids = frozenset[int]() if params.ignore_eos else request.eos_ids
        self.stop_ids = eos_ids.union(params.stop_token_ids)
        self.most_tokens = request.prompt_len + request.max_new_tokens

    @property
    def ids(self) -> set[str]:
        """An abort of any of these ends it."""
        return {self.request.rid, *self.part_of}

    def accept_all(self, found: ItemResult | RequestDelta) -> FinishReason | None:
        """Appends tokens up to the one that ends the request; returns the reason."""
        now = time.monotonic()
        for number, token_id in enumerate(found.token_ids):
            if found.logprobs:
                self.request.output_logprobs.append(found.logprobs[number])
                self.request.output_top_logprobs.append(found.top_logprobs[number])
            if (reason := self.accept(token_id, now)) is not None:
                return reason
        return None

    def accept_one(self, token_id: int, now: float) -> FinishReason | None:
        """Appends a token that has no logprobs."""
        return self.accept(token_id, now)

    def accept(self, token_id: int, now: float) -> FinishReason | None:
        """Appends a token; returns the reason to stop if it is the last, else notifies if due."""
        request = self.request
        if request.first_token is None:
            request.first_token = now
            if self.watch is not None:
                self.watch.first_token(request, now)
        elif self.watch is not None:
            self.watch.next_token(now - self.last_token)
        self.last_token = now
        request.token_ids.append(token_id)
        ends = token_id in self.stop_ids
        if self.detokenizer is not None and (not ends or request.params.no_stop_trim):
            matched = self.detokenizer.push_one(token_id)
            if matched is not None:
                return FinishReason("stop", matched=matched)
        if ends:
            return FinishReason("stop", matched=token_id)
        if len(request.token_ids) >= self.most_tokens:
            return FinishReason("length", length=request.num_output)
        interval = self.stream_interval
        if interval and (interval == 1 or request.num_output % interval == 1):
            self.notify()
        return None

    def finish(self, reason: FinishReason) -> None:
        self.request.finish_reason = reason
        self.request.finished = time.monotonic()
        try:
            if self.watch is not None:
                self.watch.end(self.request)
            if self.detokenizer is not None:
                self.detokenizer.finish()
        finally:
            self.notify()

    def notify(self) -> None:
        request = self.request
        text = "" if self.detokenizer is None else self.detokenizer.text
        num_output = len(request.token_ids) - len(request.prompt_ids)
        progress = Progress(request.rid, num_output, text, request.finish_reason is not None)
        try:
            self.listener(progress)
        except Exception:
            logger.exception("the listener of request %s failed", request.rid)
