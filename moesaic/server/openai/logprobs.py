"""Logprobs in OpenAI's two shapes."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from moesaic.core.request import Request
from moesaic.engine.frontend.outputs import RequestUpdate
from moesaic.engine.text.token_bytes import TokenBytes
from moesaic.engine.text.tokenizer import Tokenizer
from moesaic.server.openai.response_types import (
    ChatLogprobs,
    CompletionLogprobs,
    TokenLogprob,
    TopLogprob,
)

# The logprob of an impossible token; JSON has no infinity.
FLOOR: Final = -9999.0

Top = list[tuple[float, int]]
Scored = tuple[float | None, int, Top]


@dataclass(frozen=True, slots=True)
class TokenText:
    text: str
    bytes: list[int]
    special: bool


class VocabularyTexts(dict[int, TokenText]):
    """A cache of the texts and bytes of tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer

    def __missing__(self, token: int) -> TokenText:
        text, raw = self.tokenizer.token_text(token), self.tokenizer.token_bytes(token)
        known = self[token] = TokenText(text, [*raw], self.tokenizer.form(token).special)
        return known


def output_scores(request: Request, start: int, stop: int) -> Iterator[Scored]:
    """The scores of the answer's tokens from `start` to `stop`."""
    first = request.prompt_len
    for number in range(start, stop):
        logprob = request.output_logprobs[number]
        yield logprob, request.token_ids[first + number], request.output_top_logprobs[number]


def input_scores(request: Request) -> Iterator[Scored]:
    """The scores of the prompt's tokens; the first token has none."""
    logprobs: Sequence[float | None] = [None, *request.input_logprobs]
    tops: Sequence[Top] = [[], *request.input_top_logprobs]
    if not request.top_logprobs_num:
        tops = [[]] * len(logprobs)
    return zip(logprobs, request.prompt_ids, tops, strict=False)


def chat_logprobs(vocabulary: VocabularyTexts, scores: Iterator[Scored]) -> ChatLogprobs:
    return ChatLogprobs([token_logprob(vocabulary, *score) for score in scores])


def token_logprob(
    vocabulary: VocabularyTexts, logprob: float | None, token: int, top: Top
) -> TokenLogprob:
    known = vocabulary[token]
    others = [TopLogprob(vocabulary[t].text, _floored(p), vocabulary[t].bytes) for p, t in top]
    return TokenLogprob(known.text, _floored(logprob or 0.0), known.bytes, others)


def _floored(logprob: float) -> float:
    return max(logprob, FLOOR)


class CompletionScores:
    """The logprobs of one choice; tokens are held back until their text offset is known."""

    def __init__(self, vocabulary: VocabularyTexts) -> None:
        self._vocabulary = vocabulary
        self._offsets = _TextOffsets()
        self._answer: TokenBytes | None = None
        self._waiting: deque[Scored] = deque()

    def of_prompt(self, request: Request, text: str) -> CompletionLogprobs:
        """`text`: the prompt as the client sent it, without some special tokens."""
        found = CompletionLogprobs([], [], [], [])
        tokens = TokenBytes(self._vocabulary.tokenizer, (), skip_special=False)
        self._offsets = _TextOffsets(given=text)
        for score in input_scores(request):
            token, shown = score[1], True
            if (known := self._vocabulary[token]).special:
                self._add(found, tokens.flush())
                shown = text.startswith((known.text, known.text.lstrip()), self._offsets.next)
            self._waiting.append(score)
            self._add(found, tokens.push(token) if shown else tokens.skip())
        self._add(found, tokens.flush())
        self._offsets = _TextOffsets(len(text))
        return found

    def of_answer(
        self, found: CompletionLogprobs, update: RequestUpdate, start: int, stop: int
    ) -> CompletionLogprobs:
        """Appends to `found`."""
        if self._answer is None:
            before, params = update.request.prompt_ids, update.request.params
            tokenizer = self._vocabulary.tokenizer
            self._answer = TokenBytes(tokenizer, before, params.skip_special_tokens)
        for score in output_scores(update.request, start, stop):
            self._waiting.append(score)
            self._add(found, self._answer.push(score[1]))
        if update.progress.finished:
            self._add(found, self._answer.flush())
        return found

    def _add(self, found: CompletionLogprobs, chunks: list[bytes]) -> None:
        for chunk in chunks:
            logprob, token, top = self._waiting.popleft()
            text = self._vocabulary[token].text
            found.tokens.append(text)
            found.text_offset.append(self._offsets.advance(chunk))
            if logprob is None:
                found.token_logprobs.append(None)
                found.top_logprobs.append(None)
                continue
            found.token_logprobs.append(_floored(logprob))
            # Several tokens may have one text, such as pieces of characters.
            names = {text: _floored(logprob)}
            for value, other in top:
                names.setdefault(self._vocabulary[other].text, _floored(value))
            found.top_logprobs.append(names)


class _TextOffsets:
    """Maps the bytes of tokens to offsets in characters. A token that continues a character has the
    offset of that character.

    `given`: the client's text, which may lack a leading space of its tokens (sentencepiece adds one
    at the start and after special tokens)."""

    def __init__(self, start: int = 0, given: str | None = None) -> None:
        self._end, self._given = start, given
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def next(self) -> int:
        """The offset of a token that does not continue an unfinished character."""
        unfinished: bytes = self._decoder.getstate()[0]
        return self._end + len(unfinished.decode(errors="replace"))

    def advance(self, chunk: bytes) -> int:
        if not (chunk := self._as_given(chunk)):
            return max(self._end, self.next - 1)
        self._end += len(self._decoder.decode(chunk[:1]))
        offset = self.next - 1
        self._end += len(self._decoder.decode(chunk[1:]))
        return offset

    def _as_given(self, chunk: bytes) -> bytes:
        if self._given is None or not chunk.startswith(b" "):
            return chunk
        text, at = chunk.decode(errors="ignore"), self.next
        added = not self._given.startswith(text, at) and self._given.startswith(text[1:], at)
        return chunk[1:] if added else chunk
