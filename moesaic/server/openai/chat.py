"""/v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from moesaic.core.sampling import Grammar
from moesaic.engine.engine import LONG_PROMPT
from moesaic.engine.frontend.inputs import GenerateInput
from moesaic.server.bodies import in_thread_if_large, read_sized
from moesaic.server.context import Context
from moesaic.server.errors import Refusal
from moesaic.server.generation import client_of, open_call
from moesaic.server.openai.choices import ChatAnswer, ParseOptions
from moesaic.server.openai.prompts import (
    ChatPrompt,
    TemplateInput,
    check_size,
    render,
    template_input,
    tools_of,
)
from moesaic.server.openai.request_types import ChatBody
from moesaic.server.openai.sampling import (
    MAX_TOP_LOGPROBS,
    check_limits,
    check_range,
    sampling_params,
)
from moesaic.server.openai.setup import OpenAISetup
from moesaic.server.openai.streams import AnswerWriter, new_id, prompt_field, respond
from moesaic.server.openai.structured_output import OutputGrammar, check_grammar, requested_grammar
from moesaic.server.parsers.parts import Tool, ToolChoice
from moesaic.server.responses import while_connected


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A valid request, ready for the engine."""

    id: str
    call: GenerateInput
    options: ParseOptions


async def chat_completions(context: Context, request: Request) -> Response:
    body, size = await read_sized(request, ChatBody)
    setup = context.shared(OpenAISetup)
    with open_call(context), prompt_field("messages"):
        preparing = _prepare(context, body, size, client_of(request))
        prepared = await while_connected(request, preparing)
        answers = ChatAnswerWriter(setup, body, prepared)
        return await respond(context, request, prepared.call, answers, bool(body.stream))


class ChatAnswerWriter(AnswerWriter[ChatAnswer]):
    """Counts the tokens of the reasoning, too."""

    kind = "chat.completion.chunk"

    def __init__(self, setup: OpenAISetup, body: ChatBody, prepared: PreparedChat) -> None:
        super().__init__(setup, body, prepared.id, partial(ChatAnswer, prepared.options))
        self._tokenizer = setup.tokenizer

    async def complete_usage(self) -> None:
        texts = {i: "".join(one.reasoning) for i, one in self.answers.items() if one.reasoning}
        if not texts:
            return

        def count() -> int:
            """The tokenizer may cut a text into more tokens than the model generated."""
            return sum(
                min(len(self._tokenizer.encode(text, False)), self.usage.num_output(index))
                for index, text in texts.items()
            )

        is_long = sum(map(len, texts.values())) > LONG_PROMPT
        self.usage.reasoning = await asyncio.to_thread(count) if is_long else count()


@dataclass(frozen=True, slots=True)
class _CheckedChat:
    """The contents of a body, checked but not rendered."""

    template_input: TemplateInput
    thinking: bool
    tools: list[Tool]
    choice: ToolChoice
    grammar: OutputGrammar | None
    top_logprobs: int


async def _prepare(context: Context, body: ChatBody, size: int, client: Hashable) -> PreparedChat:
    setup = context.shared(OpenAISetup)
    checked = await in_thread_if_large(size, lambda: _check(setup, body))
    if checked.grammar is not None:
        await check_grammar(context, checked.grammar, client)
    try:
        prompt = await render(checked.template_input, setup.tokenizer, setup.limits, client)
    except RuntimeError as error:
        raise context.refusal(error) from error
    grammar = await in_thread_if_large(size, lambda: _grammar(setup, checked, prompt.end))
    if grammar and (checked.grammar is None or grammar != checked.grammar.params):
        ((kind, text),) = grammar.items()
        combined = OutputGrammar(_grammar_field(checked), Grammar(kind, text))
        await check_grammar(context, combined, client)
    return _prepared(setup, body, checked, prompt, grammar)


def _check(setup: OpenAISetup, body: ChatBody) -> _CheckedChat:
    setup.check_model(body.model)
    body.check_refused()
    top = _check_logprobs(body)
    tools, choice = tools_of(body)
    if tools and setup.format.tools is None:
        text = "this model's format of tool calls is unknown: set --tool-call-parser"
        raise Refusal(400, text, "tools")
    check_limits(body)
    grammar = requested_grammar(body)
    check_size(body, choice, grammar is not None)
    chat = template_input(body, with_tools=bool(tools))
    thinking = setup.format.thinking(chat.kwargs)
    return _CheckedChat(chat, thinking, tools, choice, grammar, top)


def _grammar(setup: OpenAISetup, checked: _CheckedChat, prompt_end: str) -> dict[str, str]:
    response = None if checked.grammar is None else checked.grammar.params
    tools, choice = checked.tools, checked.choice
    try:
        return setup.format.grammar(tools, choice, response, checked.thinking, prompt_end)
    except ValueError as error:
        raise Refusal(400, str(error), _grammar_field(checked)) from None


def _prepared(
    setup: OpenAISetup,
    body: ChatBody,
    checked: _CheckedChat,
    prompt: ChatPrompt,
    grammar: dict[str, str],
) -> PreparedChat:
    extra = dict[str, object](grammar)
    if checked.tools or setup.format.reasoning is not None:
        skips = body.skip_special_tokens is not False
        extra["skip_special_tokens"] = skips and setup.format.skip_special_tokens
    params = sampling_params(body, setup, _max_tokens(body), extra)
    thinking, split = checked.thinking, body.separate_reasoning is not False
    options = ParseOptions(
        partial(setup.format.parser, checked.tools, thinking, split, prompt.end),
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
        top_logprobs_num=checked.top_logprobs,
        rid=name,
    )
    return PreparedChat(name, call, options)


def _grammar_field(checked: _CheckedChat) -> str:
    """The field to name in an error of the combined grammar; the requested one alone is valid."""
    return "tools" if checked.tools or checked.grammar is None else checked.grammar.field


def _check_logprobs(body: ChatBody) -> int:
    top = body.top_logprobs or 0
    check_range("top_logprobs", top, 0, MAX_TOP_LOGPROBS)
    if body.top_logprobs is not None and not body.logprobs:
        raise Refusal(400, "top_logprobs needs logprobs: set it", "top_logprobs")
    return top


def _max_tokens(body: ChatBody) -> int | None:
    """None for the rest of the context."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        text = "max_tokens and max_completion_tokens differ: give one of them"
        raise Refusal(400, text, "max_tokens")
    return old if new is None else new
