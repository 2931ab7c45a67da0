"""Responses of the OpenAI API: chunks of a stream, or one body."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from moesaic.core.request import ABORTED
from moesaic.core.request import Request as EngineRequest
from moesaic.engine.frontend import routed_experts
from moesaic.engine.frontend.inputs import GenerateInput
from moesaic.engine.frontend.outputs import RequestUpdate, is_heavy, weight
from moesaic.engine.schedule.request_state import Progress
from moesaic.server import generation
from moesaic.server.context import Context
from moesaic.server.errors import Refusal
from moesaic.server.openai.request_types import CommonBody
from moesaic.server.openai.response_types import Header, Usage, WholeResponse
from moesaic.server.openai.setup import OpenAISetup
from moesaic.server.responses import (
    DONE,
    LIGHT,
    BodyWriter,
    EventStream,
    ResponseWriter,
    error_event,
    json_event,
    json_response,
    one_line,
    prepared,
)

MAX_RID: Final = 256

_encoder = msgspec.json.Encoder()


class UsageCount:
    """`samples`: answers per prompt, which counts once. `report_cached`: adds cached tokens."""

    def __init__(self, samples: int, report_cached: bool) -> None:
        self._samples, self._report_cached = samples, report_cached
        self._prompts: dict[int, tuple[int, int]] = {}
        self._outputs: dict[int, int] = {}
        self._completion = 0
        self.reasoning: int | None = None
        self.cached_tokens = 0
        """Prompt tokens of the first answer that came from the prefix cache."""

    def record(self, update: RequestUpdate) -> None:
        number, request = update.progress.num_output, update.request
        self._completion += number - self._outputs.get(update.index, 0)
        self._outputs[update.index] = number
        prompt, sample = divmod(update.index, self._samples)
        if sample == 0 or prompt not in self._prompts:
            self._prompts[prompt] = (request.prompt_len, request.cached_tokens)
        if update.index == 0:
            self.cached_tokens = request.cached_tokens

    def num_output(self, index: int) -> int:
        return self._outputs.get(index, 0)

    def usage(self) -> Usage:
        prompt = sum(length for length, _ in self._prompts.values())
        usage = Usage(prompt, self._completion, prompt + self._completion)
        if self._report_cached:
            cached = sum(cached for _, cached in self._prompts.values())
            usage.prompt_tokens_details = {"cached_tokens": cached}
        if self.reasoning is not None:
            usage.completion_tokens_details = {"reasoning_tokens": self.reasoning}
        return usage


class TokenIds:
    """The token ids of one choice that were not sent yet. `prompt`, `output`: which are sent."""

    def __init__(self, prompt: bool, output: bool) -> None:
        self._prompt, self._output = prompt, output
        self._num_taken = 0

    def of_prompt(self, update: RequestUpdate) -> list[int] | UnsetType:
        """Once."""
        taken, self._prompt = self._prompt, False
        return update.request.prompt_ids if taken else UNSET

    def of_output(self, update: RequestUpdate) -> list[int] | UnsetType:
        if not self._output:
            return UNSET
        first = update.request.prompt_len
        start, self._num_taken = self._num_taken, update.progress.num_output
        return update.request.token_ids[first + start : first + self._num_taken]


class Answer(Protocol):
    """One choice of a response."""

    def chunks(self, update: RequestUpdate) -> Sequence[msgspec.Struct]:
        """What is new since the last update."""

    def text_choice(self, update: RequestUpdate) -> bytes | None:
        """What is new, encoded, if that is text alone; empty if there is nothing new. None if only
        `chunks` can tell. The answer has begun and does not end with this update."""

    def whole(self, update: RequestUpdate) -> msgspec.Struct:
        """The choice that ends with this update."""


AnswerT = TypeVar("AnswerT", bound=Answer)


class AnswerWriter(Generic[AnswerT]):
    """Writes the answers to one request; fields that all chunks share are encoded once."""

    kind = "text_completion"
    end = DONE
    held = 0

    def __init__(
        self, setup: OpenAISetup, body: CommonBody, id: str, new_answer: Callable[[int], AnswerT]
    ) -> None:
        options = body.stream_options
        self.usage = UsageCount(body.n or 1, setup.cache_report)
        self.answers: dict[int, AnswerT] = {}
        self._sglext: dict[str, Any] = {}
        self._header = Header(id, self.kind, int(time.time()), setup.model)
        self._new_answer = new_answer
        self._reports_cache = bool(body.return_cached_tokens_details)
        asked = options.include_usage if options else None
        self._ends_with_usage = setup.streams_end_with_usage if asked is None else asked
        self._usage_in_all = bool(options and options.continuous_usage_stats)
        self._start = one_line(_encoder.encode(self._header))[:-1] + b',"choices":['
        self._end = b'],"usage":null}' if self._ends_with_usage else b"]}"
        self._text_event = b"data: %b%%b%b\n\n" % (_escaped(self._start), _escaped(self._end))
        """The event of a choice that is text alone."""

    def chunks(self, update: RequestUpdate, size: int) -> bytes:
        """The chunks for an update of this size."""
        answer = self.answers.get(update.index)
        if answer is not None and not (update.progress.finished or self._usage_in_all):
            choice = answer.text_choice(update)
            if choice is not None:  # the usage is counted with the last update
                choice = choice if choice.isascii() else one_line(choice)
                return self._text_event % choice if choice else b""
        self.usage.record(update)
        if update.progress.finished:
            self._sglext |= sglext(update)
        chunks = self._answer(update).chunks(update)
        return b"".join([self._chunk(chunk, size) for chunk in chunks])

    def held_chunks(self) -> bytes:
        return b""

    async def last_chunk(self, writer: ResponseWriter) -> bytes:
        """The chunks without choices that the client asked for: SGLang's additions, the usage."""
        await self._complete()
        data = b""
        if self._sglext:
            data = json_event(
                self._start + b'],"sglext":' + _encoder.encode(self._sglext) + self._end[1:]
            )
        return data + (
            json_event(self._start + self._usage_end()) if self._ends_with_usage else b""
        )

    async def response(self, updates: list[RequestUpdate], writer: ResponseWriter) -> WholeResponse:
        for update in updates:
            self.usage.record(update)
        total = sum(weight(update.request, 0, update.progress.num_output) for update in updates)

        def build() -> list[Any]:
            self._sglext |= sglext(updates[0])
            return [prepared(self._answer(update).whole(update), total) for update in updates]

        choices = await writer.write(total, build)
        await self._complete()
        id, kind, created, model = msgspec.structs.astuple(self._header)
        kind = kind.removesuffix(".chunk")
        additions = self._sglext or UNSET
        return WholeResponse(id, kind, created, model, choices, self.usage.usage(), additions)

    def error(self, refusal: Refusal) -> bytes:
        return error_event(refusal)

    async def complete_usage(self) -> None:
        """Counts what is known only when all answers have ended."""

    async def _complete(self) -> None:
        await self.complete_usage()
        if self._reports_cache:
            details = {"device": self.usage.cached_tokens, "host": 0}
            self._sglext["cached_tokens_details"] = details

    def _answer(self, update: RequestUpdate) -> AnswerT:
        if update.index not in self.answers:
            self.answers[update.index] = self._new_answer(update.index)
        return self.answers[update.index]

    def _chunk(self, choice: msgspec.Struct, size: int) -> bytes:
        end = self._usage_end() if self._usage_in_all else self._end
        if fields := self.beside(choice):
            end = end[:1] + fields + end[1:]
        return json_event(self._start + _encoder.encode(prepared(choice, size)) + end)

    def beside(self, choice: msgspec.Struct) -> bytes:
        """Further fields of the chunk with this choice."""
        return b""

    def _usage_end(self) -> bytes:
        return b'],"usage":' + _encoder.encode(self.usage.usage()) + b"}"


def around_text(choice: msgspec.Struct) -> bytes:
    """A template of the encoded choice, whose only empty string is its text."""
    before, _, after = _encoder.encode(choice).partition(b'""')
    return _escaped(before) + b"%b" + _escaped(after)


def _escaped(text: bytes) -> bytes:
    """For a template that is filled in by `%`."""
    return text.replace(b"%", b"%%")


class UpdateWriter(Protocol):
    """Writes the updates of a call as an API has them."""

    end: bytes
    """What follows the last event of a stream."""

    def chunks(self, update: RequestUpdate, size: int) -> bytes:
        """The events for an update of this size."""

    @property
    def held(self) -> int:
        """The estimated microseconds that `held_chunks` takes; 0 if it has nothing."""

    def held_chunks(self) -> bytes:
        """Events of the last update that `chunks` held back, because they are large."""

    async def last_chunk(self, writer: ResponseWriter) -> bytes:
        """The events after the last update."""

    async def response(self, updates: list[RequestUpdate], writer: ResponseWriter) -> Any:
        """The body of a response that is not a stream."""

    def error(self, refusal: Refusal) -> bytes:
        """The event for an error in a stream."""


async def respond(
    context: Context,
    request: Request,
    call: GenerateInput,
    answers: UpdateWriter,
    stream: bool,
) -> Response:
    if stream:
        updates = await generation.stream(context, request, call)
        events = AnswerEvents(context, updates, answers)
        return EventStream(
            events.read(), answers.error, answers.end, events.write_to, lambda: events.tail
        )
    found = await generation.collect(context, request, call)
    return json_response(await whole_response(context, found, answers))


async def whole_response(
    context: Context, updates: list[RequestUpdate], answers: UpdateWriter
) -> Any:
    """The body of the response; a failed answer is a Refusal."""
    for update in updates:
        _check_failure(context, update)
    return await answers.response(updates, context.shared(ResponseWriter))


class AnswerEvents:
    """The events of a stream."""

    def __init__(
        self, context: Context, updates: generation.Updates, answers: UpdateWriter
    ) -> None:
        self._context, self._updates, self._answers = context, updates, answers
        self._num_sent: dict[int, int] = {}
        self.tail = b""
        """The last events, which are sent with the end of the stream."""

    async def read(self) -> AsyncGenerator[bytes, None]:
        writer, answers = self._context.shared(ResponseWriter), self._answers
        async with aclosing(self._updates):
            async for update in self._updates:
                _check_failure(self._context, update)
                size = self._size(update)
                if size <= LIGHT:
                    data = answers.chunks(update, size)
                else:
                    data = await writer.write(size, partial(answers.chunks, update, size))
                held = answers.held
                if (
                    update.progress.finished
                    and not held
                    and len(self._updates.direct.requests) == 1
                ):
                    self.tail = data
                elif data:
                    yield data
                if held:
                    yield await writer.write(held, answers.held_chunks)
            self.tail += await answers.last_chunk(writer)

    def write_to(self, body: BodyWriter) -> None:
        """Writes light updates there as they arrive, without waking the task that reads."""
        direct = self._updates.direct
        if not any(map(is_heavy, direct.requests)):
            direct.connect(partial(self._write, body, direct.requests))

    def _write(
        self, body: BodyWriter, requests: Sequence[EngineRequest], number: int, progress: Progress
    ) -> bool:
        if not body.accepts():
            return False
        self._num_sent[number] = progress.num_output
        data = self._answers.chunks(RequestUpdate(number, progress, requests[number]), 0)
        if data:
            body.write(data)
        return not self._answers.held  # what is large is written by the task

    def _size(self, update: RequestUpdate) -> int:
        number = update.progress.num_output
        size = weight(update.request, self._num_sent.get(update.index, 0), number)
        self._num_sent[update.index] = number
        return size


def _check_failure(context: Context, update: RequestUpdate) -> None:
    reason = update.finish_reason
    if reason is None or reason.type != "abort":
        return
    if reason.failed or reason.message != ABORTED:
        raise context.failure_of(update.request)


def sglext(update: RequestUpdate) -> dict[str, Any]:
    """What SGLang adds to a response, encoded, because it may be large; the first choice gives
    it."""
    request, first = update.request, update.index == 0 and update.progress.finished
    if not first or request.routed_start is None:
        return {}
    return {"routed_experts": msgspec.Raw(_encoder.encode(routed_experts.encoded(request)))}


def finish_reason(update: RequestUpdate) -> str:
    """stop or length: OpenAI has no word for an aborted answer, and length means incomplete."""
    assert update.finish_reason is not None
    reason = update.finish_reason.type
    return "length" if reason == "abort" else reason


def new_id(prefix: str, body: CommonBody) -> str:
    """The id of the response and of its requests in the engine."""
    rid = body.request_id if body.rid is None else body.rid
    if body.request_id not in (None, rid):
        raise Refusal(400, "rid and request_id differ: give one of them", "request_id")
    if rid is None:
        return f"{prefix}-{uuid.uuid4().hex}"
    if not 0 < len(rid) <= MAX_RID:
        raise Refusal(400, f"rid must have between 1 and {MAX_RID} characters", "rid")
    return rid


@contextmanager
def prompt_field(name: str) -> Iterator[None]:
    """Names the field of the prompt in the error for one that is too long."""
    try:
        yield
    except Refusal as refusal:
        if refusal.code == "context_length_exceeded":
            refusal.param = name
        raise
