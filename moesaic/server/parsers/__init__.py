"""Parses reasoning, content and tool calls in a model's text; writes grammars that force them."""

from moesaic.server.parsers.formats import Format, choose_format
from moesaic.server.parsers.parts import (
    ChatParser,
    Content,
    NamedTool,
    Part,
    Reasoning,
    Tool,
    ToolArguments,
    ToolChoice,
    ToolStart,
)

__all__ = [
    "ChatParser",
    "Content",
    "Format",
    "NamedTool",
    "Part",
    "Reasoning",
    "Tool",
    "ToolArguments",
    "ToolChoice",
    "ToolStart",
    "choose_format",
]
