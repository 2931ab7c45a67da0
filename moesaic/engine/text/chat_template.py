"""Renders chat templates to prompts in a limited child process."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final

from moesaic.engine.errors import EngineShutDown, QueueFull
from moesaic.engine.frontend.fair_queue import FairExecutor
from moesaic.engine.text.chat_roles import (
    ANSWER,
    CALLING,
    RESULT,
    TOOL,
    USER,
    CallArguments,
    Message,
    Probe,
    TemplateSupport,
    adapted,
    find_support,
    is_plain,
)
from moesaic.engine.text.limited_child import (
    ANSWER_SECONDS,
    Allowance,
    ChildUnresponsive,
    Exceeded,
    LimitedChild,
)
from moesaic.engine.text.template_child import INVALID, TEXT
from moesaic.models.tiny_chat import CHAT_TEMPLATES

# The largest request body needs a tenth of it.
ALLOWANCE: Final = Allowance(seconds=2.0, room=512 * 2**20)

_TURNS: Final = (
    USER,
    {**CALLING, "reasoning_content": "Hm."},
    {**RESULT, "content": "A part of a mosaic."},
    ANSWER,
)
_SYSTEM: Final = {"role": "system", "content": "Be brief."}
# Conversations that check a template at start: short and long, with and without tools.
TRIALS: Final[tuple[tuple[tuple[Message, ...], list[Any] | None], ...]] = (
    (_TURNS[:1], None),
    ((_SYSTEM, *_TURNS), [TOOL]),
    ((_SYSTEM, *(_TURNS * 64), {"role": "user", "content": "word " * 20000}), [TOOL] * 32),
)


class ChatTemplateError(ValueError):
    """There is no chat template, or it does not accept the messages."""


class ChatTemplates:
    """The templates of a folder by name. Each gets `variables`. Any thread may render."""

    def __init__(self, texts: Mapping[str, str], variables: Mapping[str, str], folder: str) -> None:
        self.texts, self._variables, self._folder = dict(texts), dict(variables), folder
        self._support: dict[str, TemplateSupport] = {}
        self._turns = FairExecutor("moesaic-templates")
        setup = json.dumps(self.texts).encode()
        self._child = LimitedChild("moesaic.engine.text.template_child", setup, ALLOWANCE)

    def submit(
        self,
        client: Hashable,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any],
    ) -> Future[str]:
        """The prompt as text; fails with ChatTemplateError, or QueueFull on a busy machine."""
        variables: dict[str, Any] = {
            **self._variables,
            "documents": None,
            **kwargs,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        name = self._name(tools)
        return self._turns.submit(
            client,
            lambda: self._render(name, {**variables, "messages": self._adapted(name, messages)}),
        )

    @property
    def renders_tools(self) -> bool:
        """Whether a prompt shows the model its tools."""
        name = "tool_use" if "tool_use" in self.texts else "default"
        return name in self.texts and self._supported(name).tools

    def check(self) -> None:
        """ChatTemplateError if a template is not Jinja or too costly for usual conversations."""
        for name, text in self.texts.items():
            if text in CHAT_TEMPLATES:  # our own: saves the start of a process
                continue
            for messages, tools in TRIALS:
                given = {"messages": messages, "tools": tools, "add_generation_prompt": True}
                try:
                    self._render(name, {**self._variables, **given})
                except BadTemplate as error:
                    raise ChatTemplateError(
                        f"{error}: fix it, or give another with --chat-template"
                    ) from None
                except QueueFull:
                    raise ChatTemplateError(
                        f"chat template {name!r} of {self._folder} could not be checked: its "
                        f"process did not answer within {ANSWER_SECONDS:g} s, or was killed; start "
                        "again when this machine has CPU time and memory to spare"
                    ) from None
                except ChatTemplateError:
                    continue
            self._supported(name)

    def close(self) -> None:
        self._turns.close(EngineShutDown())
        self._child.close()

    def _adapted(self, name: str, messages: Sequence[Message]) -> Sequence[Message]:
        return messages if is_plain(messages) else adapted(messages, self._supported(name))

    def _supported(self, name: str) -> TemplateSupport:
        """What a template renders, found out once."""
        if self.texts[name] in CHAT_TEMPLATES:
            return TemplateSupport()
        if name not in self._support:
            self._support[name] = find_support(lambda probe: self._try(name, probe))
        return self._support[name]

    def _try(self, name: str, probe: Probe) -> str:
        given = {"messages": probe.messages, "tools": probe.tools, "add_generation_prompt": True}
        try:
            return self._render(name, {**self._variables, **given})
        except ChatTemplateError:
            return ""

    def _render(self, name: str, variables: Mapping[str, Any]) -> str:
        try:
            question = json.dumps(
                {
                    "template": name,
                    "variables": variables,
                    "parsed": _text_arguments(variables["messages"]),
                }
            )
        except (TypeError, ValueError, RecursionError) as error:
            raise ChatTemplateError(f"the messages cannot be written as JSON: {error}") from None
        try:
            answer = self._child.ask(question.encode())
        except Exceeded as error:
            raise BadTemplate(
                f"chat template {name!r} of {self._folder} takes {error} to render these messages"
            ) from None
        except ChildUnresponsive:
            raise QueueFull("the messages could not be rendered now: try again later") from None
        kind, text = answer[0], answer[1:].decode("utf-8", "surrogatepass")
        if kind == INVALID:
            raise BadTemplate(
                f"chat template {name!r} of {self._folder} is not valid Jinja: {text}"
            )
        if kind != TEXT:
            raise ChatTemplateError(f"the chat template does not accept these messages: {text}")
        return text

    def _name(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        name = "tool_use" if tools and "tool_use" in self.texts else "default"
        if name in self.texts:
            return name
        if self.texts:
            raise ChatTemplateError(
                f"{self._folder} has chat templates {sorted(self.texts)}, but no default: choose "
                "one by name with chat_template"
            )
        raise ChatTemplateError(
            f"{self._folder} has no chat template: give one with chat_template (a file or the "
            "template itself), or send a prompt instead of messages"
        )


class BadTemplate(ChatTemplateError):
    """The template itself is wrong, not the messages."""


def _text_arguments(messages: Sequence[Message]) -> list[tuple[int, int]]:
    """Positions (message, call) of tool calls whose arguments are CallArguments."""
    return [
        (number, position)
        for number, message in enumerate(messages)
        if isinstance(calls := message.get("tool_calls"), list)
        for position, call in enumerate(calls)
        if isinstance(call, Mapping) and _has_text_arguments(call.get("function"))
    ]


def _has_text_arguments(function: Any) -> bool:
    return isinstance(function, Mapping) and isinstance(function.get("arguments"), CallArguments)
