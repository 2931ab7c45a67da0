"""/v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from moesaic.core.sampling import Grammar
from moesaic.engine.engine import LONG_PROMPT
from moesaic.engine.frontend.inputs import GenerateInput
from moesaic.engine.frontend.outputs import RequestUpdate, weight
from moesaic.server.bodies import aside, read_sized
from moesaic.server.context import Context
from moesaic.server.errors import Refusal
from moesaic.server.generation import arrival, client_of
from moesaic.server.openai.choices import ChatAnswer, Reading
from moesaic.server.openai.prompts import (
    Chat,
    ChatPrompt,
    check_size,
    make_chat,
    render,
    tools_of,
)
from moesaic.server.openai.request_types import ChatBody
from moesaic.server.openai.response_types import ChatCompletion, ChunkHeader
from moesaic.server.openai.sampling import (
    MAX_TOP_LOGPROBS,
    check_limits,
    check_range,
    sampling_params,
)
from moesaic.server.openai.setup import OpenAISetup
from moesaic.server.openai.streams import Chunks, blaming, new_id, reply
from moesaic.server.openai.structured_output import OutputGrammar, check_form, wanted_form
from moesaic.server.openai.usage import UsageCount
from moesaic.server.parsers import Tool, ToolChoice
from moesaic.server.responses import Writer, prepared, while_connected


@dataclass(frozen=True, slots=True)
class ChatOrder:
    """A body that was found good."""

    id: str
    call: GenerateInput
    reading: Reading


async def chat_completions(context: Context, request: Request) -> Response:
    body, size = await read_sized(request, ChatBody)
    setup = context.part(OpenAISetup)
    with arrival(context), blaming("messages"):
        order = await while_connected(request, _order(context, body, size, client_of(request)))
        answers = ChatAnswers(setup, body, order)
        return await reply(context, request, order.call, answers, bool(body.stream))


class ChatAnswers:
    """The choices of one request."""

    def __init__(self, setup: OpenAISetup, body: ChatBody, order: ChatOrder) -> None:
        self._tokenizer, self._reading = setup.tokenizer, order.reading
        self._head = ChunkHeader(order.id, "chat.completion.chunk", int(time.time()), setup.model)
        self._tally = UsageCount(body.n or 1, setup.cache_report)
        self._chunks = Chunks(self._head, body, self._tally)
        self._choices: dict[int, ChatAnswer] = {}

    def take(self, piece: RequestUpdate, size: int) -> bytes:
        self._tally.note(piece)
        chunks = self._choice(piece.index).chunks(piece)
        return b"".join([self._chunks.chunk(chunk, size) for chunk in chunks])

    async def end(self) -> bytes:
        await self._count_reasoning()
        return self._chunks.last()

    async def whole(self, pieces: list[RequestUpdate], writer: Writer) -> ChatCompletion:
        for piece in pieces:
            self._tally.note(piece)
        total = sum(weight(piece.request, 0, piece.progress.num_output) for piece in pieces)

        def build() -> list[Any]:
            choices = (self._choice(piece.index).whole(piece) for piece in pieces)
            return [prepared(choice, total) for choice in choices]

        choices = await writer.write(total, build)
        await self._count_reasoning()
        return ChatCompletion(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=choices,
            usage=self._tally.usage(),
        )

    def _choice(self, index: int) -> ChatAnswer:
        if index not in self._choices:
            self._choices[index] = ChatAnswer(index, self._reading)
        return self._choices[index]

    async def _count_reasoning(self) -> None:
        texts = {i: "".join(one.reasoning) for i, one in self._choices.items() if one.reasoning}
        if not texts:
            return

        def count() -> int:
            """A text may be cut into more tokens than the model has made it of."""
            return sum(
                min(len(self._tokenizer.encode(text, False)), self._tally.made(index))
                for index, text in texts.items()
            )

        is_long = sum(map(len, texts.values())) > LONG_PROMPT
        self._tally.reasoning = await asyncio.to_thread(count) if is_long else count()


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a body asks for, before anything is computed for it."""

    chat: Chat
    tools: list[Tool]
    choice: ToolChoice
    form: OutputGrammar | None
    top_logprobs: int


async def _order(context: Context, body: ChatBody, size: int, client: Hashable) -> ChatOrder:
    setup = context.part(OpenAISetup)
    asked = await aside(size, lambda: _asked(setup, body))
    if asked.form is not None:
        await check_form(context, asked.form, client)
    try:
        prompt = await render(asked.chat, setup.tokenizer, setup.limits, client)
    except RuntimeError as error:
        raise context.refusal(error) from error
    grammar = await aside(size, lambda: _grammar(setup, asked, prompt.end))
    if grammar and (asked.form is None or grammar != asked.form.params):
        ((kind, text),) = grammar.items()
        blamed = _at_fault(asked.form, asked.tools)
        await check_form(context, OutputGrammar(blamed, Grammar(kind, text)), client)
    return _found_good(setup, body, asked, prompt, grammar)


def _asked(setup: OpenAISetup, body: ChatBody) -> _Asked:
    setup.check_model(body.model)
    body.check_refused()
    top = _check_logprobs(body)
    tools, choice = tools_of(body)
    if tools and setup.format.tools is None:
        text = "no format of tool calls is known for this model: set --tool-call-parser"
        raise Refusal(400, text, "tools")
    check_limits(body)
    form = wanted_form(body)
    check_size(body, choice, form is not None)
    return _Asked(make_chat(body, with_tools=bool(tools)), tools, choice, form, top)


def _grammar(setup: OpenAISetup, asked: _Asked, prompt_end: str) -> dict[str, str]:
    response = None if asked.form is None else asked.form.params
    thinking = setup.format.thinking(asked.chat.kwargs)
    try:
        return setup.format.grammar(asked.tools, asked.choice, response, thinking, prompt_end)
    except ValueError as error:
        raise Refusal(400, str(error), _at_fault(asked.form, asked.tools)) from None


def _found_good(
    setup: OpenAISetup, body: ChatBody, asked: _Asked, prompt: ChatPrompt, grammar: dict[str, str]
) -> ChatOrder:
    extra = dict[str, object](grammar)
    if asked.tools or setup.format.reasoning is not None:
        skips = body.skip_special_tokens is not False
        extra["skip_special_tokens"] = skips and setup.format.skip_special_tokens
    params = sampling_params(body, setup, _max_tokens(body), extra)
    reading = Reading(
        setup.format,
        asked.tools,
        setup.format.thinking(asked.chat.kwargs),
        prompt.end,
        body.separate_reasoning is not False,
        body.stream_reasoning is not False,
        body.parallel_tool_calls is not False,
        body.include_reasoning is not False,
        setup.vocabulary if body.logprobs else None,
    )
    name = new_id("chatcmpl", body)
    call = GenerateInput(
        input_ids=prompt.tokens,
        sampling_params=params,
        return_logprob=bool(body.logprobs),
        top_logprobs_num=asked.top_logprobs,
        rid=name,
    )
    return ChatOrder(name, call, reading)


def _at_fault(form: OutputGrammar | None, tools: Sequence[Tool]) -> str:
    """The field that spoils a grammar: the form was good by itself."""
    return "tools" if tools or form is None else form.field


def _check_logprobs(body: ChatBody) -> int:
    top = body.top_logprobs or 0
    check_range("top_logprobs", top, 0, MAX_TOP_LOGPROBS)
    if body.top_logprobs is not None and not body.logprobs:
        raise Refusal(400, "top_logprobs needs logprobs: set it", "top_logprobs")
    return top


def _max_tokens(body: ChatBody) -> int | None:
    """None: the rest of the context."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        text = "max_tokens and max_completion_tokens differ: give one of them"
        raise Refusal(400, text, "max_tokens")
    return old if new is None else new
