"""Writes answers as messages, or as the events of their streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import msgspec

from moesaic.server.anthropic.objects import (
    ContentBlock,
    MessageObject,
    MessagesUsage,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    error_body,
)
from moesaic.server.bodies import MAX_DEPTH, json_extent
from moesaic.server.errors import Refusal
from moesaic.server.openai.answer_blocks import AnswerBlock, BlockEvent, BlockWriter
from moesaic.server.openai.chat import PreparedChat
from moesaic.server.openai.setup import OpenAISetup
from moesaic.server.responses import named_event

# The type of a delta and the field of its text.
DELTAS: Final = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
STOP_REASONS: Final[dict[str, StopReason]] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}


class MessagesWriter(BlockWriter):
    def __init__(self, setup: OpenAISetup, chat: PreparedChat) -> None:
        super().__init__(setup, chat)
        self._id, self._model = chat.id, setup.model

    def begin(self) -> Iterator[bytes]:
        yield _event("message_start", message=self._message())
        yield _event("ping")

    def write(self, event: BlockEvent) -> Iterator[bytes]:
        block = event.block
        match event.kind:
            case "start":
                empty = _content(block, "")
                yield _event("content_block_start", index=block.index, content_block=empty)
            case "delta":
                kind, field = DELTAS[block.kind]
                delta = {"type": kind, field: event.text}
                yield _event("content_block_delta", index=block.index, delta=delta)
            case "stop":
                yield _event("content_block_stop", index=block.index)

    def finish(self) -> Iterator[bytes]:
        ended = self._message()
        delta = {"stop_reason": ended.stop_reason, "stop_sequence": ended.stop_sequence}
        yield _event("message_delta", delta=delta, usage=ended.usage)
        yield _event("message_stop")

    def whole(self) -> MessageObject:
        content = [_content(block, block.text) for block in self.blocks.all]
        return msgspec.structs.replace(self._message(), content=content)

    def error(self, refusal: Refusal) -> bytes:
        return named_event("error", error_body(refusal))

    def _message(self) -> MessageObject:
        """Without its content."""
        reason = STOP_REASONS.get(self.blocks.finish_reason)
        matched = self.blocks.matched_stop if reason == "end_turn" else None
        return MessageObject(
            id=self._id,
            model=self._model,
            stop_reason=reason if matched is None else "stop_sequence",
            stop_sequence=matched,
            usage=MessagesUsage.of(self.usage.usage()),
        )


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, {"type": kind, **fields})


def _content(block: AnswerBlock, text: str) -> ContentBlock:
    if block.call is not None:
        return ToolUseBlock(block.call.id, block.call.name, _input(text))
    return ThinkingBlock(text) if block.kind == "reasoning" else TextBlock(text)


def _input(arguments: str) -> msgspec.Raw:
    """A call's arguments; empty if the answer ends within them."""
    data = arguments.encode()
    with suppress(msgspec.DecodeError, RecursionError):
        if json_extent(data).depth <= MAX_DEPTH and isinstance(msgspec.json.decode(data), dict):
            return msgspec.Raw(data)
    return msgspec.Raw(b"{}")
