"""One choice of a chat: parses its text, update by update or as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from moesaic.engine.frontend.outputs import RequestUpdate
from moesaic.server.openai.logprobs import VocabularyTexts, chat_logprobs, output_scores
from moesaic.server.openai.response_types import (
    AssistantMessage,
    CallDelta,
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    Function,
    FunctionDelta,
    MessageDelta,
    ToolCall,
)
from moesaic.server.openai.streams import TokenIds, around_text, finish_reason
from moesaic.server.parsers.formats import ChatParser
from moesaic.server.parsers.parts import Content, Part, Reasoning, ToolArguments, ToolStart

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class ParseOptions:
    """How the answers to a request are parsed."""

    new_parser: Callable[[], ChatParser]
    stream_reasoning: bool
    parallel_calls: bool
    shows_reasoning: bool
    vocabulary: VocabularyTexts | None
    """Set if the client asked for logprobs."""
    token_ids: bool = False
    prompt_token_ids: bool = False
    forced: bool = False
    """The answer must be a call, so it has no text of its own."""

    @property
    def is_text(self) -> bool:
        """Whether most chunks are text alone."""
        has_ids = self.token_ids or self.vocabulary is not None
        return self.shows_reasoning and self.stream_reasoning and not has_ids


class ChatAnswer:
    def __init__(self, options: ParseOptions, index: int) -> None:
        self._index, self._options = index, options
        self._parser = options.new_parser()
        self._started = self._called = False
        self._num_read = self._num_scored = 0
        self._ids = TokenIds(options.prompt_token_ids, options.token_ids)
        self._held_reasoning: list[str] = []
        self.reasoning: list[str] = []
        self._is_text = options.is_text
        self._content_choice = around_text(self._chunk(MessageDelta(content="")))
        self._reasoning_choice = around_text(self._chunk(MessageDelta(reasoning_content="")))

    def text_choice(self, update: RequestUpdate) -> bytes | None:
        if not self._is_text or not self._started:
            return None
        text = update.progress.text[self._num_read :]
        if not text:
            return b""
        kind = self._parser.kind_within(text)
        if kind is None:
            return None
        self._num_read += len(text)
        if kind is Content:
            return self._content_choice % _encode(text)
        self.reasoning.append(text)
        return self._reasoning_choice % _encode(text)

    def chunks(self, update: RequestUpdate) -> list[ChatChunkChoice]:
        found = [self._chunk(_delta(part)) for part in self.parts(update)]
        if self._options.vocabulary is not None and (found or update.progress.finished):
            scores = self.logprobs(update, self._options.vocabulary)
            if scores.content:
                found = found or [self._chunk(MessageDelta(content=""))]
                found[0].logprobs = scores
        if self._options.token_ids and (ids := self._ids.of_output(update)):
            found = found or [self._chunk(MessageDelta(content=""))]
            found[0].token_ids = ids
        if not self._started:
            self._started = True
            found.insert(0, self._chunk(MessageDelta(role="assistant", content="")))
            found[0].prompt_token_ids = self._ids.of_prompt(update)
        if update.progress.finished:
            found.append(
                ChatChunkChoice(self._index, MessageDelta(), finish_reason=self.reason(update))
            )
        return found

    def whole(self, update: RequestUpdate) -> ChatChoice:
        contents: list[str] = []
        calls: dict[int, ToolCall] = {}
        for part in self.parts(update):
            match part:
                case Content(text):
                    contents.append(text)
                case ToolStart(index, id, name):
                    calls[index] = ToolCall(id, Function(name, ""))
                case ToolArguments(index, text):
                    calls[index].function.arguments += text
        content = "".join(contents)
        has_call = calls or self._options.forced or self._parser.cut_call
        message = AssistantMessage(content=None if has_call and not content else content)
        if self.reasoning and self._options.shows_reasoning:
            message.reasoning_content = "".join(self.reasoning)
        if calls:
            message.tool_calls = [*calls.values()]
        vocabulary = self._options.vocabulary
        scores = None if vocabulary is None else self.logprobs(update, vocabulary)
        prompt_ids, ids = self._ids.of_prompt(update), self._ids.of_output(update)
        reason = self.reason(update)
        return ChatChoice(self._index, message, scores, reason, prompt_ids, ids, ids)

    def _chunk(self, delta: MessageDelta) -> ChatChunkChoice:
        return ChatChunkChoice(self._index, delta)

    def parts(self, update: RequestUpdate) -> list[Part]:
        """What is new since the last update, of all that the client may see."""
        return self.parts_until(update, len(update.text), update.progress.finished)

    def parts_until(self, update: RequestUpdate, end: int, finished: bool) -> list[Part]:
        """What is new in the text up to `end`; `finished`: nothing follows."""
        found = self._parser.feed(update.text[self._num_read : end])
        self._num_read = end
        if finished:
            forced = self._options.forced
            cut = forced or finish_reason(update) == "length"
            found = [*found, *self._parser.finish(cut, forced)]
        kept = [part for part in found if self._keeps(part)]
        for part in kept:
            if isinstance(part, Reasoning):
                self.reasoning.append(part.text)
        if not self._options.shows_reasoning:
            return [part for part in kept if not isinstance(part, Reasoning)]
        if self._options.stream_reasoning:
            return kept
        return self._with_whole_reasoning(kept, finished)

    def _keeps(self, part: Part) -> bool:
        """Drops all calls but the first if the client does not allow parallel calls."""
        if isinstance(part, Reasoning | Content):
            return True
        self._called = True
        return self._options.parallel_calls or part.index == 0

    def _with_whole_reasoning(self, parts: list[Part], finished: bool) -> list[Part]:
        """Holds reasoning back until it is complete."""
        self._held_reasoning += [part.text for part in parts if isinstance(part, Reasoning)]
        rest: list[Part] = [part for part in parts if not isinstance(part, Reasoning)]
        if not self._held_reasoning or not (rest or finished):
            return rest
        whole = Reasoning("".join(self._held_reasoning))
        self._held_reasoning.clear()
        return [whole, *rest]

    def logprobs(self, update: RequestUpdate, vocabulary: VocabularyTexts) -> ChatLogprobs:
        start, self._num_scored = self._num_scored, update.progress.num_output
        return chat_logprobs(vocabulary, output_scores(update.request, start, self._num_scored))

    def reason(self, update: RequestUpdate) -> str:
        """The finish reason: stop, length or tool_calls."""
        reason = finish_reason(update)
        return "tool_calls" if self._called and reason == "stop" else reason


def _delta(part: Part) -> MessageDelta:
    match part:
        case Content(text):
            return MessageDelta(content=text)
        case Reasoning(text):
            return MessageDelta(reasoning_content=text)
        case ToolStart(index, id, name):
            function = FunctionDelta("", name)
            return MessageDelta(tool_calls=[CallDelta(index, function, id, "function")])
        case ToolArguments(index, text):
            return MessageDelta(tool_calls=[CallDelta(index, FunctionDelta(text))])
