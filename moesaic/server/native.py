"""/generate, with SGLang's names and shapes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from moesaic.engine.frontend.outputs import OutputFormat, RequestUpdate, is_heavy, weight
from moesaic.engine.schedule.request_state import Progress
from moesaic.server import generation
from moesaic.server.bodies import GenerateBody, read_body
from moesaic.server.context import CLOSE_AND_RETRY, Context
from moesaic.server.errors import Refusal
from moesaic.server.openai.setup import OpenAISetup
from moesaic.server.output_event import GrowingOutput
from moesaic.server.responses import (
    LIGHT,
    BodyWriter,
    EventStream,
    ResponseWriter,
    event,
    json_response,
    prepared,
)
from moesaic.server.routes import USER, Route

# Tokens of an answer that are written at once, all of them in each event.
MAX_GROWING: Final = 8 * LIGHT


async def generate(context: Context, request: Request) -> Response:
    body = await read_body(request, GenerateBody)
    if body.model is not None:
        context.shared(OpenAISetup).check_model(body.model)
    with generation.open_call(context):
        outputs = _Outputs(context, body)
        if not body.stream:
            updates = await generation.collect(context, request, outputs.call)
            return json_response(await outputs.response(updates))
        stream = await generation.stream(
            context, request, outputs.call, keep_failures=not outputs.single
        )
        events = GenerateEvents(stream, outputs)
        return EventStream(events.read(), on_start=events.write_to, tail=lambda: events.tail)


class _Outputs:
    """Converts the updates of a call to what is sent."""

    def __init__(self, context: Context, body: GenerateBody) -> None:
        self.call = body.to_input()
        self._context, self._writer = context, context.shared(ResponseWriter)
        texts = context.engine.tokenizer if body.return_text_in_logprobs else None
        self._format = OutputFormat(texts, body.return_prompt_token_ids)
        self.single = self.call.is_single and body.samples == 1

    async def response(self, updates: list[RequestUpdate]) -> Any:
        reason = self._context.unavailable_reason
        if reason and any(update.request.failed for update in updates):
            raise Refusal(503, reason, headers=CLOSE_AND_RETRY)
        total = sum(weight(update.request, 0, update.progress.num_output) for update in updates)

        def build() -> list[Any]:
            return [prepared(self._output(update), total) for update in updates]

        outputs = await self._writer.write(total, build)
        return outputs[0] if self.single else outputs

    async def event(self, update: RequestUpdate) -> bytes:
        """An event of a stream; with several answers it carries the index of its own."""
        total = self._format.weight(update.request, update.progress)

        if total <= LIGHT:
            return self.light_event(update)
        return await self._writer.write(total, partial(self.light_event, update, total))

    def light_event(self, update: RequestUpdate, size: int = 0) -> bytes:
        output = self._output(update)
        value = output if self.single else {**output, "index": update.index}
        return event(prepared(value, size))

    def _output(self, update: RequestUpdate) -> dict[str, Any]:
        """A single answer raises its failure; in a list it is an entry, so that none is lost."""
        if self.single and update.progress.finished and update.request.failed:
            raise self._context.failure_of(update.request)
        return self._format.answer(update.request, update.progress)


class GenerateEvents:
    """The events of a stream."""

    def __init__(self, updates: generation.Updates, outputs: _Outputs) -> None:
        self._updates, self._outputs = updates, outputs
        self.tail = b""
        """The last event of a single answer, which is sent with the end of the stream."""

    async def read(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._updates):
            async for update in self._updates:
                data = await self._outputs.event(update)
                if self._outputs.single and update.progress.finished:
                    self.tail = data
                else:
                    yield data

    def write_to(self, body: BodyWriter) -> None:
        """Writes light updates there as they arrive, without waking the task that reads."""
        direct = self._updates.direct
        if not any(map(is_heavy, direct.requests)):
            single = self._outputs.single
            growing = [
                GrowingOutput(one, None if single else index)
                for index, one in enumerate(direct.requests)
            ]
            direct.connect(partial(_write, body, growing))


def _write(
    body: BodyWriter, outputs: Sequence[GrowingOutput], number: int, progress: Progress
) -> bool:
    if progress.num_output > MAX_GROWING or not body.accepts():
        return False
    body.write(outputs[number].event(progress))
    return True


ROUTES = (
    Route(
        "POST",
        "/generate",
        generate,
        USER,
        "Continues texts or token ids",
        GenerateBody,
        generates=True,
        example={"text": "Once upon a time", "sampling_params": {"max_new_tokens": 16}},
        one_of=("text", "input_ids"),
    ),
)
