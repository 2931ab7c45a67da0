"""One choice of a chat: what its text means, as it grows and as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
from moesaic.server.openai.streams import finish_reason
from moesaic.server.parsers import (
    ChatParser,
    Content,
    Format,
    Part,
    Reasoning,
    Tool,
    ToolArguments,
    ToolStart,
)


@dataclass(frozen=True, slots=True)
class Reading:
    """How the texts of a request are read. `vocabulary`: of logprobs, if they are wanted."""

    format: Format
    tools: Sequence[Tool]
    thinking: bool
    prompt_end: str
    split_reasoning: bool
    stream_reasoning: bool
    parallel_calls: bool
    shows_reasoning: bool
    vocabulary: VocabularyTexts | None

    def parser(self) -> ChatParser:
        return self.format.parser(self.tools, self.thinking, self.split_reasoning, self.prompt_end)


class ChatAnswer:
    def __init__(self, index: int, reading: Reading) -> None:
        self._index, self._reading = index, reading
        self._parser = reading.parser()
        self._begun = self._called = False
        self._num_read = self._num_scored = 0
        self._held: list[str] = []
        self.reasoning: list[str] = []

    def chunks(self, piece: RequestUpdate) -> list[ChatChunkChoice]:
        """What is new since the last piece."""
        found = [self._chunk(_delta(part)) for part in self._parts(piece)]
        if self._reading.vocabulary is not None and (found or piece.progress.finished):
            scores = self._logprobs(piece, self._reading.vocabulary)
            if scores.content:
                found = found or [self._chunk(MessageDelta(content=""))]
                found[0].logprobs = scores
        if not self._begun:
            self._begun = True
            found.insert(0, self._chunk(MessageDelta(role="assistant", content="")))
        if piece.progress.finished:
            found.append(
                ChatChunkChoice(self._index, MessageDelta(), finish_reason=self._reason(piece))
            )
        return found

    def whole(self, piece: RequestUpdate) -> ChatChoice:
        contents: list[str] = []
        calls: dict[int, ToolCall] = {}
        for part in self._parts(piece):
            match part:
                case Content(text):
                    contents.append(text)
                case ToolStart(index, id, name):
                    calls[index] = ToolCall(id, Function(name, ""))
                case ToolArguments(index, text):
                    calls[index].function.arguments += text
        content = "".join(contents)
        message = AssistantMessage(content=None if calls and not content else content)
        if self.reasoning and self._reading.shows_reasoning:
            message.reasoning_content = "".join(self.reasoning)
        if calls:
            message.tool_calls = [*calls.values()]
        vocabulary = self._reading.vocabulary
        scores = None if vocabulary is None else self._logprobs(piece, vocabulary)
        return ChatChoice(self._index, message, scores, self._reason(piece))

    def _chunk(self, delta: MessageDelta) -> ChatChunkChoice:
        return ChatChunkChoice(self._index, delta)

    def _parts(self, piece: RequestUpdate) -> list[Part]:
        text = piece.text
        found = self._parser.feed(text[self._num_read :])
        self._num_read = len(text)
        if piece.progress.finished:
            found = [*found, *self._parser.finish()]
        kept = [part for part in found if self._keeps(part)]
        for part in kept:
            if isinstance(part, Reasoning):
                self.reasoning.append(part.text)
        if not self._reading.shows_reasoning:
            return [part for part in kept if not isinstance(part, Reasoning)]
        if self._reading.stream_reasoning:
            return kept
        return self._in_one(kept, piece.progress.finished)

    def _keeps(self, part: Part) -> bool:
        """Of several calls only the first, if the others are not wanted."""
        if isinstance(part, Reasoning | Content):
            return True
        self._called = True
        return self._reading.parallel_calls or part.index == 0

    def _in_one(self, parts: list[Part], finished: bool) -> list[Part]:
        """Holds reasoning back until it is complete."""
        self._held += [part.text for part in parts if isinstance(part, Reasoning)]
        rest: list[Part] = [part for part in parts if not isinstance(part, Reasoning)]
        if not self._held or not (rest or finished):
            return rest
        whole = Reasoning("".join(self._held))
        self._held.clear()
        return [whole, *rest]

    def _logprobs(self, piece: RequestUpdate, vocabulary: VocabularyTexts) -> ChatLogprobs:
        start, self._num_scored = self._num_scored, piece.progress.num_output
        return chat_logprobs(vocabulary, output_scores(piece.request, start, self._num_scored))

    def _reason(self, piece: RequestUpdate) -> str:
        reason = finish_reason(piece)
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
