"""A request with its text and its listener."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import msgspec

from moesaic.core.messages import RequestDelta
from moesaic.core.request import FinishReason, Request, TopLogprobs
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

    @property
    def ids(self) -> set[str]:
        """An abort of any of these ends it."""
        return {self.request.rid, *self.part_of}

    def accept_all(self, found: ItemResult | RequestDelta) -> FinishReason | None:
        """Appends tokens up to the one that ends the request; returns the reason."""
        for number, token_id in enumerate(found.token_ids):
            logprob = found.logprobs[number] if found.logprobs else None
            top = found.top_logprobs[number] if found.logprobs else None
            if (reason := self.accept(token_id, logprob, top)) is not None:
                return reason
            self.notify_if_due()
        return None

    def accept(
        self, token_id: int, logprob: float | None, top_logprobs: TopLogprobs | None
    ) -> FinishReason | None:
        """Appends a token; returns the reason to stop if it is the last."""
        request, params = self.request, self.request.params
        now = time.monotonic()
        if request.first_token is None:
            request.first_token = now
            if self.watch is not None:
                self.watch.first_token(request, now)
        elif self.watch is not None:
            self.watch.next_token(now - self.last_token)
        self.last_token = now
        request.token_ids.append(token_id)
        if logprob is not None:
            request.output_logprobs.append(logprob)
            request.output_top_logprobs.append(top_logprobs or [])
        ends = token_id in params.stop_token_ids
        ends = ends or (token_id in request.eos_ids and not params.ignore_eos)
        if self.detokenizer is not None and (not ends or params.no_stop_trim):
            matched = self.detokenizer.push([token_id])
            if matched is not None:
                return FinishReason("stop", matched=matched)
        if ends:
            return FinishReason("stop", matched=token_id)
        if request.remaining_tokens <= 0:
            return FinishReason("length", length=request.num_output)
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

    def notify_if_due(self) -> None:
        if self.stream_interval and (self.request.num_output - 1) % self.stream_interval == 0:
            self.notify()

    def notify(self) -> None:
        text = "" if self.detokenizer is None else self.detokenizer.text
        finished = self.request.finish_reason is not None
        try:
            request = self.request
            self.listener(Progress(request.rid, request.num_output, text, finished))
        except Exception:
            logger.exception("the listener of request %s failed", self.request.rid)
