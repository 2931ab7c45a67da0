"""A client of the OpenAI API that checks every response against OpenAI's own types."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pydantic
from openai import types
from openai.types import chat as chat_types

from bench.http_server import free_port

Json = dict[str, Any]
MODEL = "tiny:mixtral"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Which tiles make a mosaic?"},
]
GREEDY: Any = {"temperature": 0, "max_tokens": 12}
KINDS: dict[str, Any] = {
    "chat.completion": chat_types.ChatCompletion,
    "chat.completion.chunk": chat_types.ChatCompletionChunk,
    "text_completion": types.Completion,
    "model": types.Model,
}
# What we send besides what OpenAI's types have.
BEYOND = {"reasoning_content", "max_model_len", "root", "parent", "sglext"}


@contextmanager
def openai_server() -> Iterator[str]:
    """The address of a server process with two expert-parallel ranks."""
    port = free_port()
    command = f"-m moesaic.launch_server --model-path {MODEL} --tp 2 --ep 2 --port {port}"
    flags = "--num-threads 1 --enable-cache-report --log-level warning"
    server = subprocess.Popen(
        [sys.executable, *command.split(), *flags.split()], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == f"ready: http://127.0.0.1:{port}\n"
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(timeout=60)


def check(raw: str) -> Json:
    """JSON that fits OpenAI's own types strictly and has nothing else in it."""
    value: Json = json.loads(raw)
    lenient = json.loads(raw)
    if value["object"] == "text_completion":
        # What OpenAI sends in chunks and for the first token of a prompt its types do not have.
        for choice in lenient["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
            for entries in (choice["logprobs"] or {}).values():
                entries[:] = entries[1:] if entries[:1] == [None] else entries
    found = KINDS[value["object"]].model_validate_json(json.dumps(lenient), strict=True)
    assert extras(found) <= BEYOND
    return value


def extras(value: Any) -> set[str]:
    if isinstance(value, list):
        return set[str]().union(*map(extras, value))
    if not isinstance(value, pydantic.BaseModel):
        return set()
    inner = [extras(getattr(value, name)) for name in type(value).model_fields]
    return set(value.model_extra or ()).union(*inner)


def post(http: httpx.Client, path: str, **body: Any) -> Json:
    response = http.post(path, json={"model": MODEL, **body})
    assert response.status_code == 200, response.text
    return check(response.text)


def refused(http: httpx.Client, path: str, status: int = 400, **body: Any) -> Json:
    response = http.post(path, json=body)
    assert response.status_code == status, response.text
    error: Json = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and len(error["message"]) < 600
    return error


def stream_chunks(http: httpx.Client, path: str, **body: Any) -> list[Json]:
    """All chunks, each checked, and that they belong together."""
    with http.stream("POST", path, json={"model": MODEL, "stream": True, **body}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line for line in response.iter_lines() if line]
    assert events.pop() == "data: [DONE]"
    chunks = [check(event.removeprefix("data: ")) for event in events]
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    return chunks


def contents(chunks: list[Json]) -> dict[int, str]:
    """Joins the chunks of each choice and checks their contract: role, contents, finish reason."""
    deltas: dict[int, list[Json]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            deltas.setdefault(choice["index"], []).append(choice)
    for choices in deltas.values():
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert all(choice["delta"].keys() == {"content"} for choice in choices[1:-1])
        assert choices[-1]["delta"] == {}
        reasons = [choice["finish_reason"] for choice in choices]
        assert reasons[-1] in ("stop", "length") and set(reasons[:-1]) == {None}
    return {
        index: "".join(choice["delta"].get("content", "") for choice in choices)
        for index, choices in deltas.items()
    }


def generate(http: httpx.Client, tokenizer: Any, messages: Any = MESSAGES, **body: Any) -> Json:
    """What /generate answers to the chat as transformers renders it."""
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    params = {"temperature": 0, "max_new_tokens": 12, **body.pop("sampling_params", {})}
    response = http.post("/generate", json={"input_ids": ids, "sampling_params": params, **body})
    assert response.status_code == 200, response.text
    answer: Json = response.json()
    return answer


def bytes_of(tokenizer: Any, token: int) -> bytes:
    """The tiny tokenizer has a token a byte, in the order of GPT-2's characters for them."""
    name = tokenizer.convert_ids_to_tokens(token)
    if len(name) > 1:
        return name.encode()
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return bytes([ord(name) if ord(name) < 256 else others[ord(name) - 256]])
