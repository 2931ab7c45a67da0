"""Answers as lists of blocks: reasoning, texts and calls, in the order of the model.

Other APIs than OpenAI's chat have their answers in this form. Their requests become a ChatBody, and
a BlockWriter of theirs writes what the chat's parser finds in the answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from moesaic.engine.frontend.outputs import RequestUpdate, weight
from moesaic.server.errors import Refusal
from moesaic.server.openai.chat import PreparedChat, count_reasoning
from moesaic.server.openai.choices import ChatAnswer, ParseOptions
from moesaic.server.openai.request_types import CallBody, CallFunction, MessageBody
from moesaic.server.openai.response_types import TokenLogprob
from moesaic.server.openai.scored_parts import NO_SCORES, ScoredParts
from moesaic.server.openai.setup import OpenAISetup
from moesaic.server.openai.streams import UsageCount
from moesaic.server.parsers.parts import Content, Part, Reasoning, ToolArguments, ToolStart
from moesaic.server.responses import LIGHT, ResponseWriter

BlockKind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class AnswerBlock:
    """A part of an answer; the texts of a call are its arguments."""

    index: int
    kind: BlockKind
    call: ToolStart | None = None
    texts: list[str] = field(default_factory=list)
    scores: list[TokenLogprob] = field(default_factory=list)
    """The logprobs of a text, if the client asked for them."""

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(frozen=True, slots=True)
class BlockEvent:
    kind: Literal["start", "delta", "stop"]
    block: AnswerBlock
    text: str = ""
    """What a delta adds."""
    scores: Sequence[TokenLogprob] = ()
    """The logprobs of this text."""


class AnswerBlocks:
    """Groups the parts of an answer to blocks."""

    def __init__(self, options: ParseOptions) -> None:
        self._answer = ChatAnswer(options, 0)
        self._forced = options.forced
        vocabulary = options.vocabulary
        self._scored = None if vocabulary is None else ScoredParts(self._answer, vocabulary)
        self._open: AnswerBlock | None = None
        self.all: list[AnswerBlock] = []
        self.finish_reason = ""
        self.matched_stop: str | None = None

    def read(self, update: RequestUpdate) -> Iterator[BlockEvent]:
        if self._scored is None:
            for part in self._answer.parts(update):
                yield from self._part(part, NO_SCORES)
        else:
            for part, scores in self._scored.read(update):
                yield from self._part(part, scores)
        if update.finish_reason is not None:
            if not (self.all or self._forced):  # clients expect a text
                yield from self._part(Content(""), NO_SCORES)
            self.finish_reason = self._answer.reason(update)
            matched = update.finish_reason.matched
            self.matched_stop = matched if isinstance(matched, str) else None
            yield from self._close()

    @property
    def reasoning(self) -> list[str]:
        return self._answer.reasoning

    def text_of(self, kind: BlockKind) -> str:
        return "".join(block.text for block in self.all if block.kind == kind)

    def message(self) -> MessageBody:
        """The answer as a message of a later chat."""
        calls = [
            CallBody(CallFunction(block.call.name, block.text), block.call.id)
            for block in self.all
            if block.call is not None
        ]
        return MessageBody(
            role="assistant",
            content=self.text_of("text") or (None if calls else ""),
            tool_calls=calls or None,
            reasoning_content=self.text_of("reasoning") or None,
        )

    def _part(self, part: Part, scores: Sequence[TokenLogprob]) -> Iterator[BlockEvent]:
        kind = _kind(part)
        if self._open is None or isinstance(part, ToolStart) or self._open.kind != kind:
            yield from self._close()
            call = part if isinstance(part, ToolStart) else None
            self._open = AnswerBlock(len(self.all), kind, call)
            self.all.append(self._open)
            yield BlockEvent("start", self._open)
        if not isinstance(part, ToolStart):
            self._open.texts.append(part.text)
            self._open.scores += scores
            yield BlockEvent("delta", self._open, part.text, scores)

    def _close(self) -> Iterator[BlockEvent]:
        if self._open is not None:
            yield BlockEvent("stop", self._open)
            self._open = None


class BlockWriter(ABC):
    """Writes one answer as an API has it, for `respond`."""

    end = b""

    def __init__(self, setup: OpenAISetup, prepared: PreparedChat) -> None:
        self.usage = UsageCount(1, setup.cache_report)
        self.blocks = AnswerBlocks(prepared.options)
        self.weight = 0
        """The estimated microseconds that the answer takes to encode."""
        self._held: list[BlockEvent] = []
        self._tokenizer = setup.tokenizer
        self._begun = False

    def chunks(self, update: RequestUpdate, size: int) -> bytes:
        self.usage.record(update)
        self.weight = weight(update.request, 0, update.progress.num_output)
        found = [] if self._begun else [*self.begin()]
        self._begun = True
        for event in self.blocks.read(update):
            # A block's end may repeat all of it, however small the update is.
            if self._held or (event.kind == "stop" and self.weight > LIGHT):
                self._held.append(event)
            else:
                found += self.write(event)
        return b"".join(found)

    @property
    def held(self) -> int:
        return self.weight if self._held else 0

    def held_chunks(self) -> bytes:
        events, self._held = self._held, []
        return b"".join(chunk for event in events for chunk in self.write(event))

    async def last_chunk(self, writer: ResponseWriter) -> bytes:
        await self._complete_usage()
        return await writer.write(self.weight, lambda: b"".join(self.finish()))

    async def response(self, updates: list[RequestUpdate], writer: ResponseWriter) -> Any:
        (update,) = updates
        self.usage.record(update)
        self.weight = weight(update.request, 0, update.progress.num_output)
        await writer.write(self.weight, lambda: [*self.blocks.read(update)])
        await self._complete_usage()
        return await writer.write(self.weight, self.whole)

    @abstractmethod
    def begin(self) -> Iterator[bytes]:
        """The first events of a stream."""

    @abstractmethod
    def write(self, event: BlockEvent) -> Iterator[bytes]:
        """The stream's events for a change of a block."""

    @abstractmethod
    def finish(self) -> Iterator[bytes]:
        """The last events of a stream."""

    @abstractmethod
    def whole(self) -> msgspec.Struct | msgspec.Raw:
        """The body of a response that is not a stream."""

    @abstractmethod
    def error(self, refusal: Refusal) -> bytes:
        """The event for an error in a stream."""

    async def _complete_usage(self) -> None:
        """Counts the reasoning that the client does not see, too."""
        if text := "".join(self.blocks.reasoning):
            await count_reasoning(self._tokenizer, self.usage, {0: text})


@contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Names the fields of another API in errors of the chat. Words such as messages are left in the
    text: they are no names there."""
    try:
        yield
    except Refusal as refusal:
        if (name := names.get(refusal.param or "")) is not None:
            old = refusal.param or ""
            text = refusal.message.replace(f"{old}=", f"{name}=")
            refusal.message = text.replace(old, name) if "_" in old else text
            refusal.param = name
        raise


def renamed_warnings(warnings: Iterable[str], names: Mapping[str, str]) -> list[str]:
    """Warnings of the chat, which begin with a field, with the fields of another API."""
    parts = (warning.partition(":") for warning in warnings)
    return [names.get(field, field) + colon + text for field, colon, text in parts]


def _kind(part: Part) -> BlockKind:
    match part:
        case Reasoning():
            return "reasoning"
        case Content():
            return "text"
        case ToolStart() | ToolArguments():
            return "call"
