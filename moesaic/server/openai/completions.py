"""/v1/completions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from moesaic.engine.frontend.engine_limits import PromptTooLong
from moesaic.engine.frontend.inputs import GenerateInput
from moesaic.engine.frontend.outputs import RequestUpdate
from moesaic.server.bodies import in_thread_if_large, read_sized
from moesaic.server.client_warnings import warn
from moesaic.server.context import Context
from moesaic.server.errors import Refusal
from moesaic.server.generation import client_of, open_call
from moesaic.server.openai.logprobs import CompletionScores, VocabularyTexts
from moesaic.server.openai.request_types import CompletionBody
from moesaic.server.openai.response_types import CompletionChoice, CompletionLogprobs
from moesaic.server.openai.sampling import (
    MAX_TOP_LOGPROBS,
    check_best_of,
    check_limits,
    check_range,
    engine_options,
    sampling_params,
)
from moesaic.server.openai.setup import OpenAISetup
from moesaic.server.openai.streams import (
    AnswerWriter,
    TokenIds,
    around_text,
    finish_reason,
    new_id,
    prompt_field,
    respond,
)
from moesaic.server.openai.structured_output import OutputGrammar, check_grammar, requested_grammar
from moesaic.server.responses import while_connected

# The default of OpenAI and SGLang.
DEFAULT_TOKENS: Final = 16
# Prompts of a request, times the answers to each.
MAX_CHOICES: Final = 4096

_encode = msgspec.json.Encoder().encode


async def completions(context: Context, request: Request) -> Response:
    body, size = await read_sized(request, CompletionBody)
    setup = context.shared(OpenAISetup)
    with open_call(context), prompt_field("prompt"):
        prepared = await in_thread_if_large(size, lambda: _prepare(setup, body))
        if prepared.grammar is not None:
            checked = check_grammar(context, prepared.grammar, client_of(request))
            await while_connected(request, checked)
            warn(request, prepared.grammar.warnings)
        answers = AnswerWriter(setup, body, prepared.id, partial(CompletionAnswer, prepared))
        return await respond(context, request, prepared.call, answers, bool(body.stream))


@dataclass(frozen=True, slots=True)
class PreparedCompletion:
    """A valid request, ready for the engine."""

    id: str
    call: GenerateInput
    samples: int
    echoes: list[str] | None
    """The texts of the prompts, if the client asked for `echo`."""
    vocabulary: VocabularyTexts | None
    grammar: OutputGrammar | None = None
    return_token_ids: bool = False


class CompletionAnswer:
    def __init__(self, prepared: PreparedCompletion, index: int) -> None:
        echoes = prepared.echoes
        self._index = index
        self._echo = "" if echoes is None else echoes[index // prepared.samples]
        self._started = echoes is None
        self._num_read = self._num_scored = 0
        self._ids = TokenIds(prepared.return_token_ids, prepared.return_token_ids)
        self._scores = None
        if prepared.vocabulary is not None:
            self._scores = CompletionScores(prepared.vocabulary)
        self._is_text = self._scores is None and not prepared.return_token_ids
        self._text_choice = around_text(CompletionChoice(index, ""))

    def text_choice(self, update: RequestUpdate) -> bytes | None:
        if not self._is_text or not self._started:
            return None
        text = update.progress.text[self._num_read :]
        self._num_read += len(text)
        return self._text_choice % _encode(text) if text else b""

    def chunks(self, update: RequestUpdate) -> list[CompletionChoice]:
        has_text = len(update.text) > self._num_read
        is_due = has_text or update.progress.finished or not self._started
        return [self.whole(update)] if is_due else []

    def whole(self, update: RequestUpdate) -> CompletionChoice:
        text = update.text[self._num_read :]
        self._num_read += len(text)
        logprobs = self._logprobs(update)
        if not self._started:
            text, self._started = self._echo + text, True
        reason = finish_reason(update) if update.progress.finished else None
        ids = self._ids.of_prompt(update), self._ids.of_output(update)
        return CompletionChoice(self._index, text, logprobs, reason, *ids)

    def _logprobs(self, update: RequestUpdate) -> CompletionLogprobs | None:
        if self._scores is None:
            return None
        start, self._num_scored = self._num_scored, update.progress.num_output
        found = CompletionLogprobs([], [], [], [])
        if not self._started:
            found = self._scores.of_prompt(update.request, self._echo)
        return self._scores.of_answer(found, update, start, self._num_scored)


def _prepare(setup: OpenAISetup, body: CompletionBody) -> PreparedCompletion:
    setup.check_model(body.model)
    samples = body.n or 1
    if body.best_of is not None:
        check_best_of(body.best_of, samples)
    if body.logprobs is not None:
        check_range("logprobs", body.logprobs, 0, MAX_TOP_LOGPROBS)
    check_limits(body)
    limit = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    grammar = requested_grammar(body)
    params = sampling_params(body, setup, limit, {} if grammar is None else dict(grammar.params))
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
        **engine_options(body),
    )
    vocabulary = None if body.logprobs is None else setup.vocabulary
    echoes = texts if body.echo else None
    token_ids = bool(body.return_token_ids)
    return PreparedCompletion(name, call, samples, echoes, vocabulary, grammar, token_ids)


def _prompts(
    setup: OpenAISetup, body: CompletionBody, samples: int
) -> tuple[list[str], list[list[int]] | None]:
    """The prompts as texts (of ids only for `echo`), and as token ids if the client sent those."""
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
        return rows, _plain_ids(setup, rows) if body.add_special_tokens is False else None
    _check_ids(setup, rows)
    texts = [setup.tokenizer.decode(row, skip_special_tokens=False) for row in rows if body.echo]
    return texts, rows


def _plain_ids(setup: OpenAISetup, texts: list[str]) -> list[list[int]]:
    """Without special tokens."""
    for text in texts:
        try:
            setup.limits.check_chars(len(text))
        except PromptTooLong as error:
            raise Refusal(400, str(error), "prompt", "context_length_exceeded") from None
    rows = [setup.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    _check_ids(setup, rows)
    return rows


def _check_ids(setup: OpenAISetup, rows: list[list[int]]) -> None:
    for row in rows:
        if not row:
            raise Refusal(400, "the prompt is empty: give at least one token", "prompt")
        try:
            setup.limits.check_tokens(len(row))
        except PromptTooLong as error:
            raise Refusal(400, str(error), "prompt", "context_length_exceeded") from None
        if not (min(row) >= 0 and max(row) < setup.limits.vocab_size):
            text = f"token ids of this model are in [0, {setup.limits.vocab_size})"
            raise Refusal(400, text, "prompt")
