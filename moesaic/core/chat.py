"""SGLang's names for the formats of tool calls and reasoning."""

from typing import Final

TOOL_PARSERS: Final = (
    "qwen25",
    "qwen",
    "hermes",
    "qwen3_coder",
    "mistral",
    "deepseekv3",
    "deepseekv31",
    "kimi_k2",
    "gpt-oss",
)
REASONING_PARSERS: Final = (
    "deepseek-r1",
    "deepseek-v3",
    "qwen3",
    "qwen3-thinking",
    "kimi",
    "kimi_k2",
    "gpt-oss",
)
