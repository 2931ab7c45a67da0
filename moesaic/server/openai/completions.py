"""/v1/completions."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from moesaic.engine.frontend.inputs import GenerateInput, PromptTooLong
from moesaic.engine.frontend.outputs import RequestUpdate, weight
from moesaic.server.bodies import aside, read_sized
from moesaic.server.context import Context
from moesaic.server.errors import Refusal
from moesaic.server.generation import arrival, client_of
from moesaic.server.openai.logprobs import CompletionScores, VocabularyTexts
from moesaic.server.openai.request_types import CompletionBody
from moesaic.server.openai.response_types import (
    ChunkHeader,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
)
from moesaic.server.openai.sampling import (
    MAX_TOP_LOGPROBS,
    check_best_of,
    check_limits,
    check_range,
    sampling_params,
)
from moesaic.server.openai.setup import OpenAISetup
from moesaic.server.openai.streams import (
    Chunks,
    blaming,
    finish_reason,
    new_id,
    reply,
)
from moesaic.server.openai.structured_output import OutputGrammar, check_form, wanted_form
from moesaic.server.openai.usage import UsageCount
from moesaic.server.responses import Writer, prepared, while_connected

# What OpenAI and SGLang give if nothing is said.
DEFAULT_TOKENS: Final = 16
# Prompts of a request, times the answers to each.
MAX_CHOICES: Final = 4096


async def completions(context: Context, request: Request) -> Response:
    body, size = await read_sized(request, CompletionBody)
    setup = context.part(OpenAISetup)
    with arrival(context), blaming("prompt"):
        order = await aside(size, lambda: _order(setup, body))
        if order.form is not None:
            checked = check_form(context, order.form, client_of(request))
            await while_connected(request, checked)
        answers = CompletionAnswers(setup, body, order)
        return await reply(context, request, order.call, answers, bool(body.stream))


@dataclass(frozen=True, slots=True)
class CompletionOrder:
    """A body that was found good. `echoes`: the texts of the prompts, if they are wanted."""

    id: str
    call: GenerateInput
    samples: int
    echoes: list[str] | None
    vocabulary: VocabularyTexts | None
    form: OutputGrammar | None = None


class CompletionAnswer:
    def __init__(self, index: int, order: CompletionOrder) -> None:
        self._index = index
        self._echo = "" if order.echoes is None else order.echoes[index // order.samples]
        self._begun = order.echoes is None
        self._num_read = self._num_scored = 0
        self._scores = None
        if order.vocabulary is not None:
            self._scores = CompletionScores(order.vocabulary)

    def take(self, piece: RequestUpdate) -> CompletionChoice | None:
        """What is new since the last piece, if anything is."""
        text = piece.text[self._num_read :]
        self._num_read += len(text)
        if not (text or piece.progress.finished or not self._begun):
            return None
        logprobs = self._logprobs(piece)
        if not self._begun:
            text, self._begun = self._echo + text, True
        reason = finish_reason(piece) if piece.progress.finished else None
        return CompletionChoice(self._index, text, logprobs, reason)

    def _logprobs(self, piece: RequestUpdate) -> CompletionLogprobs | None:
        if self._scores is None:
            return None
        start, self._num_scored = self._num_scored, piece.progress.num_output
        found = CompletionLogprobs([], [], [], [])
        if not self._begun:
            found = self._scores.of_prompt(piece.request, self._echo)
        return self._scores.of_answer(found, piece, start, self._num_scored)


class CompletionAnswers:
    """The choices of one request."""

    def __init__(self, setup: OpenAISetup, body: CompletionBody, order: CompletionOrder) -> None:
        self._order = order
        self._head = ChunkHeader(order.id, "text_completion", int(time.time()), setup.model)
        self._tally = UsageCount(order.samples, setup.cache_report)
        self._chunks = Chunks(self._head, body, self._tally)
        self._choices: dict[int, CompletionAnswer] = {}

    def take(self, piece: RequestUpdate, size: int) -> bytes:
        self._tally.note(piece)
        choice = self._choice(piece.index).take(piece)
        return b"" if choice is None else self._chunks.chunk(choice, size)

    async def end(self) -> bytes:
        return self._chunks.last()

    async def whole(self, pieces: list[RequestUpdate], writer: Writer) -> Completion:
        for piece in pieces:
            self._tally.note(piece)
        total = sum(weight(piece.request, 0, piece.progress.num_output) for piece in pieces)

        def build() -> list[Any]:
            found = (self._choice(piece.index).take(piece) for piece in pieces)
            return [prepared(choice, total) for choice in found if choice is not None]

        return Completion(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=await writer.write(total, build),
            usage=self._tally.usage(),
        )

    def _choice(self, index: int) -> CompletionAnswer:
        if index not in self._choices:
            self._choices[index] = CompletionAnswer(index, self._order)
        return self._choices[index]


def _order(setup: OpenAISetup, body: CompletionBody) -> CompletionOrder:
    setup.check_model(body.model)
    body.check_refused()
    samples = body.n or 1
    if body.best_of is not None:
        check_best_of(body.best_of, samples)
    if body.logprobs is not None:
        check_range("logprobs", body.logprobs, 0, MAX_TOP_LOGPROBS)
    check_limits(body)
    limit = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    form = wanted_form(body)
    params = sampling_params(body, setup, limit, {} if form is None else dict(form.params))
    texts, ids = _prompts(setup, body, samples)
    number = len(texts if ids is None else ids)
    name = new_id("cmpl", body)
    call = GenerateInput(
        prompt=None if ids is not None else texts if number > 1 else texts[0],
        input_ids=ids if ids is None or number > 1 else ids[0],
        sampling_params=params,
        return_logprob=body.logprobs is not None,
        logprob_start_len=0 if body.echo else -1,
        top_logprobs_num=body.logprobs or 0,
        rid=name,
    )
    vocabulary = None if body.logprobs is None else setup.vocabulary
    echoes = texts if body.echo else None
    return CompletionOrder(name, call, samples, echoes, vocabulary, form)


def _prompts(
    setup: OpenAISetup, body: CompletionBody, samples: int
) -> tuple[list[str], list[list[int]] | None]:
    """Texts, and token ids if those were sent; then texts are there only if they are wanted."""
    given: list[Any] = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if not given:
        raise Refusal(400, "the prompt is empty: give at least one token", "prompt")
    kinds = {type(entry) for entry in given}
    if len(kinds) > 1:
        text = "prompt mixes kinds: give a text, its token ids, or a list of either"
        raise Refusal(400, text, "prompt")
    rows: list[Any] = [given] if kinds == {int} else given
    if len(rows) * samples > MAX_CHOICES:
        text = f"{len(rows)} prompts with {samples} answers each: ask for at most {MAX_CHOICES}"
        raise Refusal(400, text, "prompt")
    if kinds == {str}:
        return rows, None
    _check_ids(setup, rows)
    texts = [setup.tokenizer.decode(row, skip_special_tokens=False) for row in rows if body.echo]
    return texts, rows


def _check_ids(setup: OpenAISetup, rows: list[list[int]]) -> None:
    for row in rows:
        if not row:
            raise Refusal(400, "the prompt is empty: give at least one token", "prompt")
        try:
            setup.limits.check_tokens(len(row))
        except PromptTooLong as error:
            raise Refusal(400, str(error), "prompt", "context_length_exceeded") from None
        if not (min(row) >= 0 and max(row) < setup.vocab_size):
            text = f"token ids of this model are in [0, {setup.vocab_size})"
            raise Refusal(400, text, "prompt")
