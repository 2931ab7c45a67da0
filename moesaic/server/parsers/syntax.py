"""The formats as data: the markers and shapes of the checkpoints' own chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final


class CallShape(Enum):
    """The form of a call after its opening marker."""

    OBJECT = "object"  # {"name": …, "arguments": {…}}, or a list of such objects
    HEADER = "header"  # name, separator, {…}
    XML = "xml"  # name><parameter=key>value</parameter>…</function>


@dataclass(frozen=True)
class ForcedSyntax:
    call: str
    """Contains {name} or {json_name}, {arguments}, and {index} if the model counts its calls."""
    open: str = ""
    between: str = ""
    close: str = ""
    several: bool = True
    xml: bool = False
    """Arguments are XML, not JSON."""


@dataclass(frozen=True)
class CallSyntax:
    begin: str
    forced: ForcedSyntax
    shapes: Mapping[str, CallShape]  # by the first character after `begin`; "": any other
    ends: tuple[str, ...] = ()
    section: tuple[str, str] | None = None  # around all calls
    separator: str = ""
    header: str = ""  # regular expression for the text before the separator
    inner: tuple[str, ...] = ()  # other markers inside a call
    short_ids: bool = False  # the template requires ids of nine letters and digits

    @property
    def markers(self) -> frozenset[str]:
        """All texts that may be single tokens."""
        found = {self.begin, self.separator, *self.ends, *self.inner, *(self.section or ())}
        return frozenset(found - {""})


@dataclass(frozen=True)
class ThinkSyntax:
    open: str
    close: str
    inside: bool = False  # the answer begins inside it, also if the prompt does not open it
    always: bool = False  # cannot be switched off
    switch: str = ""  # the template's variable for models that open it themselves
    default: bool = True  # they do so without the variable; False: only the prompt opens it
    ends_at_call: bool = False  # a tool call ends the reasoning, with or without a marker


HERMES: Final = CallSyntax(
    begin="<tool_call>",
    ends=("</tool_call>",),
    shapes={"{": CallShape.OBJECT},
    forced=ForcedSyntax(
        '<tool_call>\n{"name": {json_name}, "arguments": {arguments}}\n</tool_call>', between="\n"
    ),
)
QWEN3_CODER: Final = CallSyntax(
    section=("<tool_call>", "</tool_call>"),
    begin="<function=",
    shapes={"": CallShape.XML},
    forced=ForcedSyntax(
        "<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>",
        between="\n",
        xml=True,
    ),
)
MISTRAL: Final = CallSyntax(
    begin="[TOOL_CALLS]",
    shapes={"[": CallShape.OBJECT, "{": CallShape.OBJECT, "": CallShape.HEADER},
    separator="[ARGS]",
    header=r"(?P<name>[^\s\[\]{}]+?)\s*(?:\[CALL_ID\]\s*(?P<id>\w+))?",
    inner=("[CALL_ID]",),
    short_ids=True,
    forced=ForcedSyntax(
        '{"name": {json_name}, "arguments": {arguments}}',
        open="[TOOL_CALLS] [",
        between=", ",
        close="]",
    ),
)
_DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK_V3: Final = CallSyntax(
    section=_DEEPSEEK_SECTION,
    begin="<｜tool▁call▁begin｜>",
    ends=("```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>"),
    shapes={"": CallShape.HEADER},
    separator="```json",
    header=r"\w+\s*<｜tool▁sep｜>\s*(?P<name>\S+)",
    inner=("<｜tool▁sep｜>",),
    forced=ForcedSyntax(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
        "<｜tool▁call▁end｜>",
        open=_DEEPSEEK_SECTION[0],
        between="\n",
        close=_DEEPSEEK_SECTION[1],
    ),
)
DEEPSEEK_V31: Final = CallSyntax(
    section=_DEEPSEEK_SECTION,
    begin="<｜tool▁call▁begin｜>",
    ends=("<｜tool▁call▁end｜>",),
    shapes={"": CallShape.HEADER},
    separator="<｜tool▁sep｜>",
    header=r"(?P<name>\S+)",
    forced=ForcedSyntax(
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
        open=_DEEPSEEK_SECTION[0],
        close=_DEEPSEEK_SECTION[1],
    ),
)
KIMI_K2: Final = CallSyntax(
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    begin="<|tool_call_begin|>",
    ends=("<|tool_call_end|>",),
    shapes={"": CallShape.HEADER},
    separator="<|tool_call_argument_begin|>",
    header=r"(?P<id>(?:functions\.)?(?P<name>\S+):\d+)",
    forced=ForcedSyntax(
        "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|>",
        open="<|tool_calls_section_begin|>",
        close="<|tool_calls_section_end|>",
    ),
)
CALLS: Final[Mapping[str, CallSyntax]] = {
    "qwen25": HERMES,
    "qwen": HERMES,
    "hermes": HERMES,
    "qwen3_coder": QWEN3_CODER,
    "mistral": MISTRAL,
    "deepseekv3": DEEPSEEK_V3,
    "deepseekv31": DEEPSEEK_V31,
    "kimi_k2": KIMI_K2,
}
THINKING: Final[Mapping[str, ThinkSyntax]] = {
    "deepseek-r1": ThinkSyntax("<think>", "</think>", inside=True, always=True),
    "deepseek-v3": ThinkSyntax("<think>", "</think>", default=False),
    "qwen3": ThinkSyntax("<think>", "</think>", switch="enable_thinking", ends_at_call=True),
    "qwen3-thinking": ThinkSyntax(
        "<think>", "</think>", inside=True, always=True, ends_at_call=True
    ),
    "kimi": ThinkSyntax("◁think▷", "◁/think▷"),
    "kimi_k2": ThinkSyntax("<think>", "</think>", ends_at_call=True),
}
# Tool calls and reasoning are channels of one format here.
HARMONY: Final = "gpt-oss"
HARMONY_MARKERS: Final = frozenset(
    "<|start|> <|channel|> <|constrain|> <|message|> <|end|> <|return|> <|call|>".split()
)
HARMONY_FORCED: Final = ForcedSyntax(
    "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}",
    several=False,  # the first <|call|> ends the turn
)


@dataclass(frozen=True)
class Family:
    """The formats of models of this type."""

    model_type: str
    tools: str | None
    reasoning: str | None
    hint: str = ""
    """A text that the chat template must contain."""


# The first match applies: checkpoints of one architecture may differ in format.
FAMILIES: Final = (
    Family("qwen3_moe", "qwen3_coder", None, hint="<parameter="),
    Family("qwen3_moe", "qwen25", "qwen3"),
    Family("qwen2_moe", "qwen25", None),
    Family("mixtral", "mistral", None),
    Family("kimi_k2", "kimi_k2", "kimi_k2"),
    Family("deepseek_v3", "kimi_k2", "kimi_k2", hint="<|im_middle|>"),
    Family("deepseek_v3", "deepseekv3", "deepseek-v3", hint="```json"),
    Family("deepseek_v3", "deepseekv31", "deepseek-v3", hint="<｜tool▁sep｜>"),
    Family("deepseek_v3", "deepseekv3", "deepseek-v3"),
    Family("deepseek_v2", "deepseekv3", None),
    Family("gpt_oss", HARMONY, HARMONY),
)
# Used without the tokenizer's own list.
PUBLISHED_SPECIALS: Final[Mapping[str, frozenset[str]]] = {
    "mistral": frozenset(("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<s>", "</s>")),
    HARMONY: HARMONY_MARKERS | {"<|endoftext|>", "<|startoftext|>"},
}


def all_markers(tools: str | None, reasoning: str | None) -> frozenset[str]:
    if tools == HARMONY:
        return HARMONY_MARKERS
    found = CALLS[tools].markers if tools is not None else frozenset[str]()
    if reasoning is not None:
        found |= {THINKING[reasoning].open, THINKING[reasoning].close}
    return found
