"""Logprobs in the two shapes that OpenAI has for them."""

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

# Of a token that is impossible; JSON has no infinity.
FLOOR: Final = -9999.0

Top = list[tuple[float, int]]
Scored = tuple[float | None, int, Top]


@dataclass(frozen=True, slots=True)
class TokenPiece:
    text: str
    bytes: list[int]
    special: bool


class VocabularyTexts:
    """Texts and bytes of tokens, found when first asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._known: dict[int, TokenPiece] = {}

    def __getitem__(self, token: int) -> TokenPiece:
        if (piece := self._known.get(token)) is None:
            text, raw = self.tokenizer.token_text(token), self.tokenizer.token_bytes(token)
            piece = TokenPiece(text, [*raw], self.tokenizer.form(token).special)
            self._known[token] = piece
        return piece


def output_scores(request: Request, start: int, stop: int) -> Iterator[Scored]:
    """Of the tokens of the answer from `start` on."""
    first = request.prompt_len
    for number in range(start, stop):
        logprob = request.output_logprobs[number]
        yield logprob, request.token_ids[first + number], request.output_top_logprobs[number]


def input_scores(request: Request) -> Iterator[Scored]:
    """Of the prompt; the first token follows nothing."""
    logprobs: Sequence[float | None] = [None, *request.input_logprobs]
    tops: Sequence[Top] = [[], *request.input_top_logprobs]
    if not request.top_logprobs_num:
        tops = [[]] * len(logprobs)
    return zip(logprobs, request.prompt_ids, tops, strict=False)


def chat_logprobs(vocabulary: VocabularyTexts, scores: Iterator[Scored]) -> ChatLogprobs:
    return ChatLogprobs([_token(vocabulary, *score) for score in scores])


def _token(
    vocabulary: VocabularyTexts, logprob: float | None, token: int, top: Top
) -> TokenLogprob:
    piece = vocabulary[token]
    others = [_top(vocabulary, *entry) for entry in top]
    return TokenLogprob(piece.text, _floored(logprob or 0.0), piece.bytes, others)


def _top(vocabulary: VocabularyTexts, logprob: float, token: int) -> TopLogprob:
    piece = vocabulary[token]
    return TopLogprob(piece.text, _floored(logprob), piece.bytes)


def _floored(logprob: float) -> float:
    return max(logprob, FLOOR)


class CompletionScores:
    """The logprobs of one choice, whose offsets go on from one chunk to the next. Tokens whose
    place in the text is not certain yet wait until it is."""

    def __init__(self, vocabulary: VocabularyTexts) -> None:
        self._vocabulary = vocabulary
        self._places = _Places()
        self._answer: TokenBytes | None = None
        self._waiting: deque[Scored] = deque()

    def of_prompt(self, request: Request, text: str) -> CompletionLogprobs:
        """`text`: the prompt as it was given, which has not all of its special tokens."""
        found = CompletionLogprobs([], [], [], [])
        tokens = TokenBytes(self._vocabulary.tokenizer, (), skip_special=False)
        self._places = _Places(given=text)
        for score in input_scores(request):
            token, shown = score[1], True
            if (piece := self._vocabulary[token]).special:
                self._add(found, tokens.flush())
                shown = text.startswith((piece.text, piece.text.lstrip()), self._places.next)
            self._waiting.append(score)
            self._add(found, tokens.push(token) if shown else tokens.skip())
        self._add(found, tokens.flush())
        self._places = _Places(len(text))
        return found

    def of_answer(
        self, found: CompletionLogprobs, piece: RequestUpdate, start: int, stop: int
    ) -> CompletionLogprobs:
        """Adds to `found`."""
        if self._answer is None:
            before, params = piece.request.prompt_ids, piece.request.params
            tokenizer = self._vocabulary.tokenizer
            self._answer = TokenBytes(tokenizer, before, params.skip_special_tokens)
        for score in output_scores(piece.request, start, stop):
            self._waiting.append(score)
            self._add(found, self._answer.push(score[1]))
        if piece.progress.finished:
            self._add(found, self._answer.flush())
        return found

    def _add(self, found: CompletionLogprobs, chunks: list[bytes]) -> None:
        for chunk in chunks:
            logprob, token, top = self._waiting.popleft()
            text = self._vocabulary[token].text
            found.tokens.append(text)
            found.text_offset.append(self._places.place(chunk))
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


class _Places:
    """Where in a text the bytes of its tokens are. Offsets count characters, and tokens may be
    pieces of them: one that goes on with a character is where that character is.

    `given`: the text, where tokens may have a space in front that it has not (sentencepiece begins
    a text so, also after a special token)."""

    def __init__(self, start: int = 0, given: str | None = None) -> None:
        self._end, self._given = start, given
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def next(self) -> int:
        """Where a token is that does not go on with an unfinished character."""
        unfinished: bytes = self._decoder.getstate()[0]
        return self._end + len(unfinished.decode(errors="replace"))

    def place(self, chunk: bytes) -> int:
        if not (chunk := self._as_given(chunk)):
            return max(self._end, self.next - 1)
        self._end += len(self._decoder.decode(chunk[:1]))
        place = self.next - 1
        self._end += len(self._decoder.decode(chunk[1:]))
        return place

    def _as_given(self, chunk: bytes) -> bytes:
        if self._given is None or not chunk.startswith(b" "):
            return chunk
        text, at = chunk.decode(errors="ignore"), self.next
        added = not self._given.startswith(text, at) and self._given.startswith(text[1:], at)
        return chunk[1:] if added else chunk
