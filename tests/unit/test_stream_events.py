"""What streams write for a token without building its chunk is what the chunk would be."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from moesaic.core.request import FinishReason, Request
from moesaic.core.sampling import SamplingParams
from moesaic.engine.frontend.inputs import GenerateInput
from moesaic.engine.frontend.outputs import OutputFormat, RequestUpdate
from moesaic.engine.schedule.request_state import Progress
from moesaic.server.context import Context
from moesaic.server.generation import Updates
from moesaic.server.openai.choices import ChatAnswer, ParseOptions
from moesaic.server.openai.completions import CompletionAnswer, PreparedCompletion
from moesaic.server.openai.streams import Answer, AnswerEvents, UpdateWriter
from moesaic.server.output_event import GrowingOutput
from moesaic.server.parsers.formats import choose_format
from moesaic.server.parsers.parts import Calls, Tool
from moesaic.server.responses import BodyWriter, event

CALL = '<tool_call>\n{"name": "lay", "arguments": {"to": "é"}}\n</tool_call>'
TEXT = f'<think>\nTiles, 貝 "50%d"\u2028 more.\n</think>\n\nI lay  them\\ \x07 <b> {CALL}'


@pytest.fixture(autouse=True)
def same_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids of calls are random."""
    monkeypatch.setattr(Calls, "_new_id", lambda self: "call_1")


def updates(text: str, step: int) -> Iterator[RequestUpdate]:
    """The last one ends the answer."""
    request = Request("r", [1], SamplingParams(), 0, 9999, 0)
    request.finish_reason = FinishReason("stop")
    for end in range(step, len(text), step):
        yield RequestUpdate(0, Progress("r", end, text[:end], False), request)
    yield RequestUpdate(0, Progress("r", len(text), text, True), request)


def chat_answer(**changes: bool) -> ChatAnswer:
    form = choose_format(None, None, "qwen3_moe")
    parser = partial(form.parser, [Tool("lay", "", {"type": "object"})], False)
    fields = {"stream_reasoning": True, "parallel_calls": True, "shows_reasoning": True} | changes
    return ChatAnswer(ParseOptions(new_parser=parser, vocabulary=None, **fields), 0)


def completion_answer() -> CompletionAnswer:
    return CompletionAnswer(PreparedCompletion("r", GenerateInput(), 1, None, None), 0)


def both_ways(answer: Answer, other: Answer, step: int) -> int:
    """Compares them for each update; returns how many were text alone."""
    num_texts = 0
    for update in updates(TEXT, step):
        expected = [msgspec.json.encode(chunk) for chunk in other.chunks(update)]
        found = None if update.progress.finished else answer.text_choice(update)
        if found is None:
            assert [msgspec.json.encode(chunk) for chunk in answer.chunks(update)] == expected
        else:
            assert expected == ([found] if found else [])
            num_texts += 1
    return num_texts


@pytest.mark.parametrize("step", [1, 2, 7])
def test_choices_of_text(step: int) -> None:
    assert both_ways(completion_answer(), completion_answer(), step) == (len(TEXT) - 1) // step
    # Markers, what may begin one, and spaces go through the parser.
    assert both_ways(chat_answer(), chat_answer(), step) > (20 if step == 1 else 0)


@pytest.mark.parametrize("field", ["stream_reasoning", "shows_reasoning"])
def test_reasoning_that_is_held_back_or_hidden(field: str) -> None:
    assert both_ways(chat_answer(**{field: False}), chat_answer(**{field: False}), 1) == 0


def test_choices_with_token_ids_are_not_text_alone() -> None:
    prepared = PreparedCompletion("r", GenerateInput(), 1, None, None, return_token_ids=True)
    update = next(updates(TEXT, 1))
    assert CompletionAnswer(prepared, 0).text_choice(update) is None


def test_an_echo_begins_the_answer() -> None:
    prepared = PreparedCompletion("r", GenerateInput(), 1, ["Lay"], None)
    assert CompletionAnswer(prepared, 0).text_choice(next(updates(TEXT, 1))) is None


@pytest.mark.parametrize("index", [None, 3])
def test_growing_outputs_are_those_of_the_format(index: int | None) -> None:
    request = Request('a"%d\u2028', [7, 8], SamplingParams(), 0, 9999, 0)
    growing, format = GrowingOutput(request, index), OutputFormat()
    for step, (end, tokens) in enumerate([(0, 1), (3, 2), (3, 4), (40, 9), (len(TEXT), 10)]):
        request.token_ids = [7, 8, *range(1000, 1000 + tokens)]
        request.cached_tokens, request.retractions = 2 * (step > 1), step // 3
        progress = Progress(request.rid, tokens, TEXT[:end], False)
        # A token that came since does not belong to the event.
        request.token_ids.append(5)
        output = format.answer(request, progress)
        expected = event(output if index is None else {**output, "index": index})
        assert growing.event(progress) == expected


def test_what_an_answer_holds_back_is_left_to_the_task() -> None:
    """The ends of large blocks take long to encode, and nothing may be written before them."""
    written, held = list[bytes](), [0, 5]
    answers = SimpleNamespace(chunks=lambda update, size: b"token, ", held=0)
    body = SimpleNamespace(accepts=lambda: True, write=written.append)
    events = AnswerEvents(cast(Context, None), cast(Updates, None), cast(UpdateWriter, answers))
    request = Request("r", [1], SamplingParams(), 0, 9999, 0)
    taken = []
    for answers.held in held:
        found = events._write(cast(BodyWriter, body), [request], 0, Progress("r", 3, "a", False))
        taken.append(found)
    assert taken == [True, False] and written == [b"token, ", b"token, "]
