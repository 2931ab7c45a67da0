"""An answer with reasoning, a text and two calls, as the engine's updates: a random model does not
write one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from moesaic.core.request import FinishReason, Request
from moesaic.core.sampling import SamplingParams
from moesaic.engine.frontend.inputs import GenerateInput
from moesaic.engine.frontend.outputs import RequestUpdate
from moesaic.engine.schedule.request_state import Progress
from moesaic.engine.text.tokenizer import Tokenizer
from moesaic.server.openai.chat import PreparedChat
from moesaic.server.openai.choices import ParseOptions
from moesaic.server.openai.logprobs import VocabularyTexts
from moesaic.server.parsers.formats import choose_format
from moesaic.server.parsers.parts import Tool

THOUGHT = "Tiles, 貝 and more."
CONTENT = "I lay them."
ARGUMENTS = '{"tiles": [1, 2], "to": "é"}'
CALL = f'<tool_call>\n{{"name": "lay", "arguments": {ARGUMENTS}}}\n</tool_call>'
TEXT = f"<think>\n{THOUGHT}\n</think>\n\n{CONTENT}{CALL}{CALL}"


def prepared_chat(vocabulary: VocabularyTexts | None = None) -> PreparedChat:
    form = choose_format(None, None, "qwen3_moe")
    parser = partial(form.parser, [Tool("lay", "", {"type": "object"})], False)
    options = ParseOptions(parser, True, True, True, vocabulary)
    return PreparedChat(
        "id_1", GenerateInput(input_ids=[1], sampling_params=SamplingParams()), options, []
    )


def updates_of(text: str, step: int, reason: str = "stop") -> Iterator[RequestUpdate]:
    request = Request("r", [1], SamplingParams(), 0, 9999, 0)
    request.finish_reason = FinishReason(reason)
    for end in range(step, len(text), step):
        yield RequestUpdate(0, Progress("r", end, text[:end], False), request)
    yield RequestUpdate(0, Progress("r", len(text), text, True), request)


def scored_updates(
    tokenizer: Tokenizer, text: str, step: int, top: int = 0
) -> Iterator[RequestUpdate]:
    """An update for every `step` tokens; the logprob of a token is its number, negated. `top`: its
    alternatives."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    request = Request("r", [1], SamplingParams(), 0, 9999, 0, return_logprob=True)
    request.top_logprobs_num, request.logprob_start = top, request.prompt_len
    request.token_ids += ids
    request.output_logprobs += [-float(number) for number in range(len(ids))]
    request.output_top_logprobs += [[(-9.0, other) for other in range(top)] for _ in ids]
    request.finish_reason = FinishReason("stop")
    for number in range(step, len(ids), step):
        known = tokenizer.decode(ids[:number]).rstrip("\ufffd")  # half a character
        assert text.startswith(known)
        yield RequestUpdate(0, Progress("r", number, known, False), request)
    yield RequestUpdate(0, Progress("r", len(ids), text, True), request)


def token_numbers(tokenizer: Tokenizer, text: str, part: str) -> list[int]:
    """The tokens with bytes of `part`, which is once in the text."""
    start = len(text[: text.index(part)].encode())
    end, at, found = start + len(part.encode()), 0, []
    for number, token in enumerate(tokenizer.encode(text, add_special_tokens=False)):
        size = len(tokenizer.token_bytes(token))
        if at < end and at + size > start:
            found.append(number)
        at += size
    return found
