"""Bodies for the OpenAI API: invalid ones with the field and words of their refusal, and tools."""

from __future__ import annotations

from typing import Any

from tests.server.openai_client import Json

USER = [{"role": "user", "content": "x"}]
MANY = [{"role": "user", "content": "x"}] * 2049
WRONG_CHATS: dict[str, tuple[Json, str | None, str]] = {
    "no messages": ({}, "messages", "missing required field"),
    "empty messages": ({"messages": []}, "messages", "between 1 and 2048"),
    "too many messages": ({"messages": MANY}, "messages", "between 1 and 2048"),
    "a role": (
        {"messages": [{"role": "king", "content": "x"}]},
        "messages",
        "developer, system, tool or user",
    ),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages",
        "parts of type text: a part is of type 'image_url'",
    ),
    "a tool choice": ({"messages": USER, "tool_choice": "any"}, "tool_choice", "none or required"),
    "an effort": (
        {"messages": USER, "reasoning_effort": "banana"},
        "reasoning_effort",
        "give high, low, max, medium, minimal, none or xhigh",
    ),
    "a tool's type": (
        {"messages": USER, "tools": [{"type": "x", "function": {"name": "f"}}]},
        "tools",
        "give function",
    ),
    "unknown field": ({"messages": USER, "temprature": 1}, "temprature", "unknown field"),
    "temperature": ({"messages": USER, "temperature": -1}, "temperature", "greedy"),
    "temperature kind": ({"messages": USER, "temperature": "hot"}, "temperature", "float"),
    "top_p": ({"messages": USER, "top_p": 1.5}, "top_p", "(0, 1]"),
    "n": ({"messages": USER, "n": 129}, "n", "between 1 and 128"),
    "n zero": ({"messages": USER, "n": 0}, "n", "between 1 and 128"),
    "n true": ({"messages": USER, "n": True}, "n", "int"),
    "max_tokens": ({"messages": USER, "max_tokens": -5}, "max_tokens", "0 or more"),
    "two limits": (
        {"messages": USER, "max_tokens": 5, "max_completion_tokens": 6},
        "max_tokens",
        "differ",
    ),
    "stops": ({"messages": USER, "stop": ["x"] * 17}, "stop", "at most 16"),
    "long stop": ({"messages": USER, "stop": "x" * 257}, "stop", "256 characters"),
    "empty stop": ({"messages": USER, "stop": ["x", ""]}, "stop", "at least one character"),
    "top_logprobs": (
        {"messages": USER, "logprobs": True, "top_logprobs": 21},
        "top_logprobs",
        "20",
    ),
    "no logprobs": ({"messages": USER, "top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    "biases": (
        {"messages": USER, "logit_bias": {str(token): 1 for token in range(301)}},
        "logit_bias",
        "at most 300",
    ),
    "bias of nothing": ({"messages": USER, "logit_bias": {"9999": 1}}, "logit_bias", "[0, 258)"),
    "stream options": (
        {"messages": USER, "stream_options": {"include_usage": True}},
        "stream_options",
        "needs stream",
    ),
    "audio": ({"messages": USER, "modalities": ["text", "audio"]}, "modalities", "supported"),
    "functions": ({"messages": USER, "functions": [{"name": "f"}]}, "functions", "tools"),
    "hidden states": (
        {"messages": USER, "return_hidden_states": True},
        "return_hidden_states",
        "supported",
    ),
    "structural_tag": (
        {"messages": USER, "response_format": {"type": "structural_tag"}},
        "response_format",
        "give json_object, json_schema or text",
    ),
    "schema": (
        {"messages": USER, "response_format": {"type": "json_schema"}},
        "response_format",
        "needs json_schema",
    ),
    "two forms": (
        {"messages": USER, "response_format": {"type": "json_object"}, "regex": "a"},
        "response_format",
        "exclude each other",
    ),
    "template override": (
        {"messages": USER, "chat_template_kwargs": {"messages": "x"}},
        "chat_template_kwargs",
        "only",
    ),
    "template list": (
        {"messages": USER, "chat_template_kwargs": {"enable_thinking": [1]}},
        "chat_template_kwargs",
        "got `array`",
    ),
    "template number": (
        {"messages": USER, "chat_template_kwargs": {"thinking_budget": 10**12}},
        "chat_template_kwargs",
        "too large",
    ),
    "tool name": (
        {"messages": USER, "tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools",
        "must match",
    ),
    "tool twice": (
        {"messages": USER, "tools": [{"type": "function", "function": {"name": "a"}}] * 2},
        "tools",
        "same name",
    ),
    "tool missing": ({"messages": USER, "tool_choice": "required"}, "tool_choice", "needs tools"),
    "tool choice": (
        {
            "messages": USER,
            "tools": [{"type": "function", "function": {"name": "a"}}],
            "tool_choice": {"type": "function", "function": {"name": "b"}},
        },
        "tool_choice",
        "not in tools",
    ),
    "no content": ({"messages": [{"role": "user"}]}, "messages", "needs content"),
    "null content": (
        {"messages": [*USER, {"role": "user", "content": None}]},
        "messages",
        "needs content",
    ),
    "rid": ({"messages": USER, "rid": ""}, "rid", "between 1 and 256"),
}
WRONG_COMPLETIONS: dict[str, tuple[Json, str | None]] = {
    "no prompt": ({}, "prompt"),
    "empty list": ({"prompt": []}, "prompt"),
    "empty ids": ({"prompt": [[]]}, "prompt"),
    "mixed": ({"prompt": ["a", 1]}, "prompt"),
    "bad id": ({"prompt": [258]}, "prompt"),
    "negative id": ({"prompt": [[1, -1]], "echo": True}, "prompt"),
    "huge id": ({"prompt": [2**70]}, "prompt"),
    "suffix": ({"prompt": "a", "suffix": "b"}, "suffix"),
    "best_of": ({"prompt": "a", "best_of": 2}, "best_of"),
    "logprobs": ({"prompt": "a", "logprobs": 21}, "logprobs"),
    "too many": ({"prompt": ["a"] * 33, "n": 128}, "prompt"),
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"tile": {"enum": ["red", "blue"]}},
                "required": ["tile"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("lay", "lift")
]
