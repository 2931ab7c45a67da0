"""Writes answers as responses, or as the events of their streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from moesaic.engine.frontend.outputs import RequestUpdate
from moesaic.server.errors import Refusal
from moesaic.server.openai.answer_blocks import AnswerBlock, BlockEvent, BlockWriter
from moesaic.server.openai.chat import PreparedChat
from moesaic.server.openai.request_types import MessageBody
from moesaic.server.openai.setup import OpenAISetup
from moesaic.server.responses import ResponseWriter, named_event, prepared
from moesaic.server.responses_api.conversation import new_item_id
from moesaic.server.responses_api.objects import (
    CallItem,
    ErrorCode,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponseObject,
    ResponsesUsage,
)

# The events with the texts of a block, and the field of its whole text in the last of them.
TEXT_EVENTS: Final = {
    "reasoning": ("response.reasoning_text", "text"),
    "text": ("response.output_text", "text"),
    "call": ("response.function_call_arguments", "arguments"),
}
ITEM_TYPES: Final = {"reasoning": "reasoning", "text": "message", "call": "function_call"}
ERROR_CODES: Final[dict[int, ErrorCode]] = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
Keep = Callable[[bytes, MessageBody], None]


class ResponsesWriter(BlockWriter):
    """`keep`: stores the response and the message of its answer."""

    def __init__(
        self, setup: OpenAISetup, chat: PreparedChat, draft: ResponseObject, keep: Keep
    ) -> None:
        super().__init__(setup, chat)
        self.draft, self._keep = draft, keep
        self._num_events = 0
        self._ids: list[str] = []
        self._parts: dict[int, OutputText | ReasoningText | None] = {}
        self._body = b""

    async def last_chunk(self, writer: ResponseWriter) -> bytes:
        data = await super().last_chunk(writer)
        self._keep(self._body, self.blocks.message())
        return data

    async def response(self, updates: list[RequestUpdate], writer: ResponseWriter) -> Any:
        found = await super().response(updates, writer)
        self._keep(self._body, self.blocks.message())
        return found

    def begin(self) -> Iterator[bytes]:
        yield self._event("response.created", response=self.draft)
        yield self._event("response.in_progress", response=self.draft)

    def write(self, event: BlockEvent) -> Iterator[bytes]:
        match event.kind:
            case "start":
                yield from self._start(event.block)
            case "delta":
                name, _ = TEXT_EVENTS[event.block.kind]
                extra = {"logprobs": event.scores} if event.block.kind == "text" else {}
                place = self._place(event.block)
                yield self._event(f"{name}.delta", **place, delta=event.text, **extra)
            case "stop":
                yield from self._stop(event.block)

    def finish(self) -> Iterator[bytes]:
        ended = self._ended()
        yield self._event(f"response.{ended.status}", response=msgspec.Raw(self._body))

    def whole(self) -> msgspec.Raw:
        self._ended()
        return msgspec.Raw(self._body)

    def error(self, refusal: Refusal) -> bytes:
        return self._event("response.failed", response=failed(self.draft, refusal))

    def _start(self, block: AnswerBlock) -> Iterator[bytes]:
        item = self._item(block, "in_progress")
        yield self._event("response.output_item.added", output_index=block.index, item=item)
        if part := self._part(block, ""):
            yield self._event("response.content_part.added", **self._place(block), part=part)

    def _stop(self, block: AnswerBlock) -> Iterator[bytes]:
        name, field = TEXT_EVENTS[block.kind]
        place, part = self._place(block), self._whole_part(block)
        extra = {"logprobs": part.logprobs} if isinstance(part, OutputText) else {}
        yield self._event(f"{name}.done", **place, **{field: block.text}, **extra)
        if part:
            yield self._event("response.content_part.done", **place, part=part)
        item = self._item(block, self._last_status)
        yield self._event("response.output_item.done", output_index=block.index, item=item)

    @property
    def _last_status(self) -> ItemStatus:
        """The status of a block that ends now."""
        return "incomplete" if self.blocks.finish_reason == "length" else "completed"

    def _ended(self) -> ResponseObject:
        items = [self._item(block, "completed") for block in self.blocks.all]
        status = self._last_status
        if items:  # a forced call that is cut before its name is no item
            items[-1].status = status
        done = status == "completed"
        ended = msgspec.structs.replace(
            self.draft,
            status=status,
            incomplete_details=None if done else {"reason": "max_output_tokens"},
            completed_at=int(time.time()) if done else None,
            output=items,
            usage=ResponsesUsage.of(self.usage.usage()),
        )
        self._body = msgspec.json.encode(ended)
        return ended

    def _item(self, block: AnswerBlock, status: ItemStatus) -> OutputItem:
        id = self._id(block)
        begins = status == "in_progress"
        if block.call is not None:
            text = "" if begins else block.text
            return CallItem(id, status, block.call.id, block.call.name, text)
        parts: Any = () if begins else (self._whole_part(block),)
        kind = ReasoningItem if block.kind == "reasoning" else MessageItem
        return kind(id, status, parts)

    def _whole_part(self, block: AnswerBlock) -> OutputText | ReasoningText | None:
        """Of a block that has ended; its logprobs are encoded once."""
        if block.index not in self._parts:
            self._parts[block.index] = self._part(block, block.text)
        return self._parts[block.index]

    def _part(self, block: AnswerBlock, text: str) -> OutputText | ReasoningText | None:
        match block.kind:
            case "text":
                scores = block.scores if text else []
                return OutputText(text, logprobs=prepared(scores, self.weight))
            case "reasoning":
                return ReasoningText(text)
        return None

    def _id(self, block: AnswerBlock) -> str:
        while len(self._ids) <= block.index:
            self._ids.append(new_item_id(ITEM_TYPES[self.blocks.all[len(self._ids)].kind]))
        return self._ids[block.index]

    def _place(self, block: AnswerBlock) -> dict[str, Any]:
        place = {"item_id": self._id(block), "output_index": block.index}
        return place if block.kind == "call" else {**place, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return named_event(kind, {"type": kind, "sequence_number": number, **fields})


def failed(draft: ResponseObject, refusal: Refusal) -> ResponseObject:
    code = ERROR_CODES.get(refusal.status, "server_error")
    error = ResponseError(code, refusal.message)
    return msgspec.structs.replace(draft, status="failed", error=error)
