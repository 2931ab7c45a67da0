"""Lark grammars for llguidance that make a model answer in its own format.

    start: (thought SPACE)? calls
    calls: call ("\\n" call)*
    call: "<tool_call>\\n{\\"name\\": \\"add\\", \\"arguments\\": " args_0 "}\\n</tool_call>"

Literals are those of the chat templates, which the model has learned. A marker that is one token is
named by its id, because llguidance does not spell such tokens out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moesaic.core.redact import shown
from moesaic.engine.text.json_schema import OPTIONS, prepare, strict
from moesaic.server.parsers.parts import NamedTool, Tool, ToolChoice
from moesaic.server.parsers.syntax import (
    CALLS,
    HARMONY,
    HARMONY_FORCED,
    THINKING,
    ForcedSyntax,
    ThinkSyntax,
    all_markers,
)
from moesaic.server.parsers.tool_schema import object_form
from moesaic.server.parsers.values import fixed_values, is_text

# The templates' JSON; with free whitespace a model might never end.
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
TERMINALS = "TEXT: /(.|\\n)*/\nSPACE: /[ \\n]{0,3}/\nNUMBER: /[0-9]{1,3}/"
CLOSE_PARAMETER = "\n</parameter>\n"
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT_MESSAGE = "<|end|><|start|>assistant"


@dataclass(frozen=True)
class GrammarWriter:
    tools: str | None  # name of the tool parser
    reasoning: str | None  # name of the reasoning parser
    inside: bool
    thinking: bool
    ids: Mapping[str, int]
    open_objects: bool = False
    parallel: bool = True
    """Several calls in one answer."""
    lines: list[str] = field(default_factory=list)

    def parameters(
        self, tools: Sequence[Tool], choice: ToolChoice, response: Mapping[str, str] | None
    ) -> dict[str, str]:
        if isinstance(choice, NamedTool) or choice == "required":
            return self._lark(self._forced(tools, choice))
        may_call = choice == "auto" and bool(tools) and self.tools is not None
        if response:
            plain = not (self.harmony or self.think or may_call)
            return dict(response) if plain else self._lark(self._answer(tools, may_call, response))
        if may_call and any(tool.strict for tool in tools):
            return self._lark(self._free(tools))
        return {}

    def _lark(self, start: str) -> dict[str, str]:
        return {"lark": "\n".join([f"start: {start}", *self.lines, TERMINALS, ""])}

    def _forced(self, tools: Sequence[Tool], choice: ToolChoice) -> str:
        several = self.parallel and not isinstance(choice, NamedTool)
        chosen = [t for t in tools if not isinstance(choice, NamedTool) or t.name == choice.name]
        if not chosen:
            what = shown(choice.name) if isinstance(choice, NamedTool) else "a function"
            raise ValueError(f"tool_choice asks for {what}, which is not in tools")
        if self.tools is None:
            raise ValueError(
                "tool_choice forces a call, and this model's format of calls is unknown: start the "
                "server with --tool-call-parser"
            )
        return f"{self._thought()} {self._calls(chosen, several)}"

    def _answer(self, tools: Sequence[Tool], may_call: bool, response: Mapping[str, str]) -> str:
        """The requested form, or calls."""
        self.lines.append(f"answer: {self._answer_rule(response)}")
        final = f"{self._literal(FINAL)} answer" if self.harmony else "answer"
        body = f"({final} | {self._calls(tools, self.parallel)})" if may_call else final
        return f"{self._thought()} {body}"

    def _free(self, tools: Sequence[Tool]) -> str:
        """Any text; a call that begins follows its grammar. The only call ends the answer."""
        if self.harmony:
            calls = self._calls(tools, several=False)
            return f"{self._thought()} ({self._literal(FINAL)} TEXT | {calls})"
        syntax = self._syntax()
        trigger = _leading(syntax.open or syntax.call, self._markers())
        several = self.parallel and bool(syntax.open)
        text = f"{self._until(trigger)} {self._calls(tools, several, without=trigger)}"
        return f"{self._thought()} " + (f"({text})* TEXT" if self.parallel else f"({text} | TEXT)")

    def _thought(self) -> str:
        """The rule for the reasoning before the answer; empty without reasoning."""
        if self.harmony:
            analysis = f"({self._literal(ANALYSIS)} {self._until(NEXT_MESSAGE)})*"
            return analysis if self.thinking else ""
        if self.think is None:
            return ""
        rest = f"{self._until(self.think.close)} SPACE"
        return rest if self.inside else f"({self._literal(self.think.open)} {rest})?"

    def _calls(self, tools: Sequence[Tool], several: bool, without: str = "") -> str:
        syntax = self._syntax()
        opening = syntax.open.removeprefix(without)
        skipped = "" if syntax.open else without
        names = [self._call(n, tool, syntax, skipped) for n, tool in enumerate(tools)]
        self.lines.append(f"call: {' | '.join(names)}")
        more = f"({self._literal(syntax.between)} call)*" if several and syntax.several else ""
        return f"{self._literal(opening)} call {more} {self._literal(syntax.close)}"

    def _call(self, number: int, tool: Tool, syntax: ForcedSyntax, without: str) -> str:
        before, after = syntax.call.removeprefix(without).split("{arguments}")
        parts = [self._literal(_named(piece, tool.name)) for piece in before.split("{index}")]
        if syntax.xml:
            arguments = self._xml(tool, number)
        else:
            arguments = self._json(object_form(tool.parameters), tool.strict)
        self.lines.append(f"args_{number}: {arguments}")
        self.lines.append(
            f"call_{number}: {' NUMBER '.join(parts)} args_{number} {self._literal(after)}"
        )
        return f"call_{number}"

    def _xml(self, tool: Tool, number: int) -> str:
        properties = tool.parameters.get("properties")
        required = tool.parameters.get("required")
        required = required if isinstance(required, list) else []
        parts: list[str] = []
        for key, schema in (properties if isinstance(properties, dict) else {}).items():
            rule = f"value_{number}_{len(parts)}"
            self.lines.append(f"{rule}: {self._xml_value(tool, key, schema)}")
            piece = f"({self._literal(f'<parameter={key}>{chr(10)}')} {rule})"
            parts.append(piece if key in required else piece + "?")
        return " ".join(parts) or '""'

    def _xml_value(self, tool: Tool, key: str, schema: Any) -> str:
        parameters = tool.parameters
        if not is_text(parameters, key):
            whole = schema if isinstance(schema, dict) else {}
            value = self._json(whole, tool.strict, parameters)
            return f"{value} {self._literal(CLOSE_PARAMETER)}"
        if words := fixed_values(schema):
            either = " | ".join(self._literal(str(word)) for word in words)
            return f"({either}) {self._literal(CLOSE_PARAMETER)}"
        return self._until(CLOSE_PARAMETER)

    def _json(
        self,
        schema: Mapping[str, Any],
        is_strict: bool = False,
        document: Mapping[str, Any] | None = None,
    ) -> str:
        """`document`: what references of the schema lead into, if that is not the schema."""
        given = strict(schema) if is_strict else schema
        found = prepare(given, self.open_objects, document).schema
        found[OPTIONS] |= SPACING
        try:
            return f"%json {json.dumps(found)}"
        except RecursionError:
            raise ValueError("a JSON schema is nested too deeply: give fewer levels") from None

    def _answer_rule(self, response: Mapping[str, str]) -> str:
        ((kind, text),) = response.items()
        if kind == "json_schema":
            try:
                schema = json.loads(text)
            except (ValueError, RecursionError):
                raise ValueError("json_schema is not the text of a JSON schema") from None
            schema = {} if schema is True else schema
            return self._json(schema) if isinstance(schema, dict) else f"%json {text}"
        if kind == "regex":
            return f"/{_escaped_pattern(text)}/"
        if kind == "ebnf":
            text = _from_gbnf(text)
        return "%lark {\n" + text.replace("%llguidance {}", "") + "\n}"

    @property
    def harmony(self) -> bool:
        return self.tools == HARMONY

    @property
    def think(self) -> ThinkSyntax | None:
        """The syntax of the reasoning that may come before the answer."""
        think = THINKING.get(self.reasoning or "")
        return think if think and (self.thinking or self.inside or think.always) else None

    def _syntax(self) -> ForcedSyntax:
        assert self.tools is not None
        return HARMONY_FORCED if self.harmony else CALLS[self.tools].forced

    def _markers(self) -> frozenset[str]:
        return all_markers(self.tools, self.reasoning)

    def _literal(self, text: str) -> str:
        """A fixed text, with markers that are tokens as ids."""
        tokens = sorted(self._markers() & self.ids.keys(), key=len, reverse=True)
        pattern = "|".join(map(re.escape, tokens))
        parts = re.split(f"({pattern})", text) if tokens else [text]
        shown = (
            f"<[{self.ids[piece]}]>" if piece in tokens else json.dumps(piece, ensure_ascii=False)
            for piece in parts
            if piece
        )
        return " ".join(shown)

    def _until(self, text: str) -> str:
        """Any text up to and including a fixed text that begins with a marker."""
        marker = _leading(text, self._markers()) or text
        if marker in self.ids:
            return f"TEXT {self._literal(text)}"
        rule = f"until_{len(self.lines)}"
        self.lines.append(f"{rule}[lazy]: TEXT {json.dumps(marker, ensure_ascii=False)}")
        return f"{rule} {self._literal(text.removeprefix(marker))}".rstrip()


def _leading(text: str, markers: frozenset[str]) -> str:
    """The longest marker that the text begins with."""
    return max((marker for marker in markers if text.startswith(marker)), key=len, default="")


def _named(text: str, name: str) -> str:
    return text.replace("{json_name}", json.dumps(name, ensure_ascii=False)).replace("{name}", name)


def _escaped_pattern(pattern: str) -> str:
    """A regular expression escaped for use between slashes."""
    parts = re.findall(r"\\.|.", pattern, flags=re.DOTALL)
    return "".join({"/": "\\/", "\n": "\\n", "\\\n": "\\n"}.get(piece, piece) for piece in parts)


def _from_gbnf(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(text))
    except Exception as error:
        raise ValueError(f"ebnf is not a grammar: {error}") from None
