"""The format of a served model, chosen once; it creates parsers and grammars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moesaic.core.chat import REASONING_PARSERS, TOOL_PARSERS
from moesaic.server.parsers.grammar import GrammarWriter
from moesaic.server.parsers.harmony import HarmonyParser
from moesaic.server.parsers.parts import Calls, Tool, ToolChoice
from moesaic.server.parsers.syntax import (
    CALLS,
    FAMILIES,
    HARMONY,
    HARMONY_MARKERS,
    PUBLISHED_SPECIALS,
    THINKING,
    ThinkSyntax,
    all_markers,
)
from moesaic.server.parsers.tagged import ParserSetup, TaggedParser

if TYPE_CHECKING:
    from tokenizers import AddedToken

ChatParser = HarmonyParser | TaggedParser


@dataclass(frozen=True)
class Format:
    tools: str | None
    reasoning: str | None
    skip_special_tokens: bool
    """A sampling parameter; False keeps markers that are special tokens in the text."""
    special: frozenset[str] = field(default=frozenset(), repr=False)
    """The texts of the special tokens."""
    token_ids: Mapping[str, int] = field(default_factory=dict, repr=False)
    """The ids of all tokens added to the vocabulary, by text."""
    open_objects: bool = field(default=False, repr=False)
    """See `json_schema.prepare`."""

    @property
    def think(self) -> ThinkSyntax | None:
        return THINKING.get(self.reasoning or "")

    def thinking(self, template_arguments: Mapping[str, Any]) -> bool:
        """Whether the model may open its reasoning itself, with these chat template arguments."""
        think = self.think
        if think is None:
            return self.reasoning == HARMONY
        if think.always or not think.switch:
            return think.default
        # A template knows one of these names; clients of several models send either.
        names = (think.switch, "enable_thinking", "thinking")
        given = (template_arguments[name] for name in names if name in template_arguments)
        return bool(next(given, think.default))

    def parser(
        self, tools: Sequence[Tool], inside: bool, split_reasoning: bool = True
    ) -> ChatParser:
        """`inside`: see `begins_inside`."""
        if self.tools == HARMONY:
            return HarmonyParser(Calls(tools), split_reasoning, self.special - HARMONY_MARKERS)
        syntax = CALLS.get(self.tools or "") if tools else None
        ignored = frozenset[str]()
        if not self.skip_special_tokens:
            ignored = self.special - all_markers(self.tools if tools else None, self.reasoning)
        setup = ParserSetup(
            calls=syntax,
            think=self.think,
            inside=inside,
            split=split_reasoning,
            ignored=ignored,
        )
        return TaggedParser(setup, Calls(tools, syntax is not None and syntax.short_ids))

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        response: dict[str, str] | None,
        thinking: bool,
        inside: bool = False,
        parallel: bool = True,
    ) -> dict[str, str]:
        """Sampling parameters that enforce the request; empty if it constrains nothing."""
        writer = GrammarWriter(
            tools=self.tools,
            reasoning=self.reasoning,
            inside=inside,
            thinking=thinking,
            ids=self.token_ids,
            open_objects=self.open_objects,
            parallel=parallel,
        )
        return writer.parameters(tools, choice, response)

    def begins_inside(self, prompt: str = "", opening: str = "") -> bool:
        """Whether the answer begins inside the reasoning. A switch counts only if the template
        renders it, which the end of `prompt` shows: other models do not think. The client's
        `opening` of the answer follows the prompt."""
        think = self.think
        if think is None or think.close in opening:
            return False
        if opening.lstrip().startswith(think.open):
            return True
        end = prompt.rstrip()
        return end.endswith(think.open) or (think.inside and not end.endswith(think.close))


def choose_format(
    tool_call_parser: str | None,
    reasoning_parser: str | None,
    model_type: str,
    *,
    chat_template: str = "",
    added_tokens: Mapping[int, AddedToken] | None = None,
) -> Format:
    """The formats that the flags name; defaults come from the model's family and chat template.
    `added_tokens`: the tokenizer's, because grammars name markers by token id."""
    _check("--tool-call-parser", tool_call_parser, TOOL_PARSERS)
    _check("--reasoning-parser", reasoning_parser, REASONING_PARSERS)
    fits = (f for f in FAMILIES if f.model_type == model_type and f.hint in chat_template)
    family = next(fits, None)
    tools, reasoning = tool_call_parser, reasoning_parser
    if HARMONY in (tools, reasoning):
        tools, reasoning = tools or HARMONY, reasoning or HARMONY
    elif family is not None and (family.tools != HARMONY or not (tools or reasoning)):
        # Harmony as a default does not combine with another format.
        tools, reasoning = tools or family.tools, reasoning or family.reasoning
    if (tools == HARMONY) != (reasoning == HARMONY):
        raise ValueError(
            f"--tool-call-parser {tools} and --reasoning-parser {reasoning} do not combine: "
            f"{HARMONY} marks calls and reasoning in one way, so name it for both or leave one out"
        )
    return _format(tools, reasoning, added_tokens)


def _format(
    tools: str | None, reasoning: str | None, added_tokens: Mapping[int, AddedToken] | None
) -> Format:
    if added_tokens is None:
        special, ids = PUBLISHED_SPECIALS.get(tools or "", frozenset()), dict[str, int]()
    else:
        special = frozenset(token.content for token in added_tokens.values() if token.special)
        ids = {token.content: number for number, token in added_tokens.items()}
    hidden = all_markers(tools, reasoning) & special
    return Format(tools, reasoning, not hidden, special, ids)


def _check(flag: str, name: str | None, known: Iterable[str]) -> None:
    if name is not None and name not in known:
        raise ValueError(f"{flag} is {name!r}: choose one of {', '.join(known)}")
