"""/v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import partial

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from moesaic.core.sampling import Grammar
from moesaic.engine.engine import LONG_PROMPT
from moesaic.engine.frontend.inputs import GenerateInput
from moesaic.engine.frontend.outputs import RequestUpdate
from moesaic.engine.text.json_schema import strict
from moesaic.engine.text.tokenizer import Tokenizer
from moesaic.server.bodies import in_thread_if_large, read_sized
from moesaic.server.client_warnings import warn
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
    with_allowed_tools,
)
from moesaic.server.openai.request_types import ChatBody
from moesaic.server.openai.response_types import ChatChunkChoice, WholeResponse
from moesaic.server.openai.sampling import (
    MAX_TOP_LOGPROBS,
    check_limits,
    check_range,
    engine_options,
    sampling_params,
)
from moesaic.server.openai.setup import OpenAISetup
from moesaic.server.openai.streams import (
    AnswerWriter,
    UsageCount,
    new_id,
    prompt_field,
    respond,
)
from moesaic.server.openai.structured_output import (
    OutputGrammar,
    check_grammar,
    ignored,
    requested_grammar,
)
from moesaic.server.parsers.parts import Tool, ToolChoice
from moesaic.server.parsers.tool_schema import object_form
from moesaic.server.responses import ResponseWriter, while_connected

# What llguidance says about a schema within a grammar, without its place or reason.
BAD_SCHEMA = "failed to compile JSON schema"


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A valid request, ready for the engine."""

    id: str
    call: GenerateInput
    options: ParseOptions
    warnings: list[str]
    """What the client asked for and does not get."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.call.input_ids or ())


async def chat_completions(context: Context, request: Request) -> Response:
    body, size = await read_sized(request, ChatBody)
    setup = context.shared(OpenAISetup)
    with open_call(context), prompt_field("messages"):
        preparing = prepare_chat(context, body, size, client_of(request))
        prepared = await while_connected(request, preparing)
        warn(request, prepared.warnings)
        answers = ChatAnswerWriter(setup, body, prepared)
        return await respond(context, request, prepared.call, answers, bool(body.stream))


class ChatAnswerWriter(AnswerWriter[ChatAnswer]):
    """Counts the tokens of the reasoning, too."""

    kind = "chat.completion.chunk"

    def __init__(self, setup: OpenAISetup, body: ChatBody, prepared: PreparedChat) -> None:
        super().__init__(setup, body, prepared.id, partial(ChatAnswer, prepared.options))
        self._prompt_ids = prepared.options.prompt_token_ids
        self._tokenizer = setup.tokenizer

    async def response(self, updates: list[RequestUpdate], writer: ResponseWriter) -> WholeResponse:
        whole = await super().response(updates, writer)
        if self._prompt_ids:
            whole.prompt_token_ids = updates[0].request.prompt_ids
        return whole

    def beside(self, choice: msgspec.Struct) -> bytes:
        """vLLM has a prompt's ids here, SGLang in the choice."""
        if not isinstance(choice, ChatChunkChoice) or choice.prompt_token_ids is UNSET:
            return b""
        return b',"prompt_token_ids":' + msgspec.json.encode(choice.prompt_token_ids)

    async def complete_usage(self) -> None:
        texts = {i: "".join(one.reasoning) for i, one in self.answers.items() if one.reasoning}
        if texts:
            await count_reasoning(self._tokenizer, self.usage, texts)


async def count_reasoning(tokenizer: Tokenizer, usage: UsageCount, texts: dict[int, str]) -> None:
    """Adds the tokens of the answers' reasoning to the usage."""

    def count() -> int:
        """The tokenizer may cut a text into more tokens than the model generated."""
        return sum(
            min(len(tokenizer.encode(text, False)), usage.num_output(index))
            for index, text in texts.items()
        )

    is_long = sum(map(len, texts.values())) > LONG_PROMPT
    usage.reasoning = await asyncio.to_thread(count) if is_long else count()


@dataclass(frozen=True, slots=True)
class _CheckedChat:
    """The contents of a body, checked but not rendered."""

    template_input: TemplateInput
    thinking: bool
    tools: list[Tool]
    choice: ToolChoice
    parallel: bool
    grammar: OutputGrammar | None
    top_logprobs: int
    warnings: list[str]


async def prepare_chat(
    context: Context, body: ChatBody, size: int, client: Hashable
) -> PreparedChat:
    """Checks and renders a request. Every API whose requests become chats uses it."""
    setup = context.shared(OpenAISetup)
    checked = await in_thread_if_large(size, lambda: _check(setup, body))
    if checked.grammar is not None:
        await check_grammar(context, checked.grammar, client)
    try:
        prompt = await render(checked.template_input, setup.tokenizer, setup.limits, client)
    except RuntimeError as error:
        raise context.refusal(error) from error
    inside = setup.format.begins_inside(prompt.end, checked.template_input.opening)
    grammar = await in_thread_if_large(size, lambda: _grammar(setup, checked, inside))
    if grammar and (checked.grammar is None or grammar != checked.grammar.params):
        ((kind, text),) = grammar.items()
        combined = OutputGrammar(_grammar_field(checked), Grammar(kind, text))
        try:
            await check_grammar(context, combined, client)
        except Refusal as refusal:
            if BAD_SCHEMA in refusal.message:
                await _check_tools(context, checked.tools, client)
            raise
    return _prepared(setup, body, checked, prompt, inside, grammar)


async def _check_tools(context: Context, tools: list[Tool], client: Hashable) -> None:
    """Refusal that names the tool whose schema by itself is at fault."""
    for tool in tools:
        schema = object_form(tool.parameters)
        text = msgspec.json.encode(strict(schema) if tool.strict else schema).decode()
        grammar = OutputGrammar(f"tool {tool.name!r}", Grammar("json_schema", text))
        try:
            await check_grammar(context, grammar, client)
        except Refusal as refusal:
            refusal.param = None if refusal.param is None else "tools"
            raise


def _check(setup: OpenAISetup, body: ChatBody) -> _CheckedChat:
    setup.check_model(body.model)
    top, body = _check_logprobs(body), with_allowed_tools(body)
    tools, choice = tools_of(body)
    if tools and setup.format.tools is None:
        text = "this model's format of tool calls is unknown: set --tool-call-parser"
        raise Refusal(400, text, "tools")
    check_limits(body)
    grammar = requested_grammar(body)
    check_size(body, choice, grammar is not None)
    chat = template_input(body, with_tools=bool(tools))
    if setup.template_kwargs:
        chat = replace(chat, kwargs={**setup.template_kwargs, **chat.kwargs})
    thinking = setup.format.thinking(chat.kwargs)
    warnings = _warnings(setup, tools, choice, grammar)
    parallel = body.parallel_tool_calls is not False
    return _CheckedChat(chat, thinking, tools, choice, parallel, grammar, top, warnings)


def _warnings(
    setup: OpenAISetup, tools: list[Tool], choice: ToolChoice, grammar: OutputGrammar | None
) -> list[str]:
    found = [] if grammar is None else grammar.warnings
    if tools and setup.hides_tools:
        found.append(
            "tools: the chat template does not render them, so the model does not see them"
        )
    if grammar is not None or choice not in ("none", "auto"):
        for tool in tools:
            if not tool.strict:
                found += ignored(f"tools: {tool.name}", tool.parameters)
    return found


def _grammar(setup: OpenAISetup, checked: _CheckedChat, inside: bool) -> dict[str, str]:
    response = None if checked.grammar is None else checked.grammar.params
    tools, choice, thinking = checked.tools, checked.choice, checked.thinking
    try:
        return setup.format.grammar(tools, choice, response, thinking, inside, checked.parallel)
    except ValueError as error:
        raise Refusal(400, str(error), _grammar_field(checked)) from None


def _prepared(
    setup: OpenAISetup,
    body: ChatBody,
    checked: _CheckedChat,
    prompt: ChatPrompt,
    inside: bool,
    grammar: dict[str, str],
) -> PreparedChat:
    extra = dict[str, object](grammar)
    if checked.tools or setup.format.reasoning is not None:
        skips = body.skip_special_tokens is not False
        extra["skip_special_tokens"] = skips and setup.format.skip_special_tokens
    params = sampling_params(body, setup, _max_tokens(body), extra)
    split = body.separate_reasoning is not False
    options = ParseOptions(
        partial(setup.format.parser, checked.tools, inside, split),
        body.stream_reasoning is not False,
        checked.parallel,
        body.include_reasoning is not False,
        setup.vocabulary if body.logprobs else None,
        bool(body.return_token_ids),
        bool(body.return_token_ids or body.return_prompt_token_ids),
        forced=checked.choice not in ("none", "auto"),
    )
    name = new_id("chatcmpl", body)
    call = GenerateInput(
        input_ids=prompt.tokens,
        sampling_params=params,
        return_logprob=bool(body.logprobs),
        top_logprobs_num=checked.top_logprobs,
        rid=name,
        **engine_options(body),
    )
    return PreparedChat(name, call, options, checked.warnings)


def _grammar_field(checked: _CheckedChat) -> str:
    """The field to name in an error of the combined grammar; the requested one alone is valid."""
    return "tools" if checked.tools or checked.grammar is None else checked.grammar.field


def _check_logprobs(body: ChatBody) -> int:
    top = body.top_logprobs or 0
    check_range("top_logprobs", top, 0, MAX_TOP_LOGPROBS)
    if top and not body.logprobs:
        raise Refusal(400, "top_logprobs needs logprobs: set it", "top_logprobs")
    return top


def _max_tokens(body: ChatBody) -> int | None:
    """None for the rest of the context."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        text = "max_tokens and max_completion_tokens differ: give one of them"
        raise Refusal(400, text, "max_tokens")
    return old if new is None else new
