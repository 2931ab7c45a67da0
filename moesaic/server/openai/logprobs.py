"""Logprobs in the two shapes that OpenAI has for them."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from moesaic.core.request import Request
from moesaic.engine.tokenizer import Tokenizer
from moesaic.server.openai.shapes import (
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


class Vocabulary:
    """Texts and bytes of tokens, found when first asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, TokenPiece] = {}

    def __getitem__(self, token: int) -> TokenPiece:
        if (piece := self._known.get(token)) is None:
            text = self._tokenizer.token_text(token)
            special = bool(text) and not self._tokenizer.decode([token])
            piece = TokenPiece(text, [*self._tokenizer.token_bytes(token)], special)
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


def chat_logprobs(vocabulary: Vocabulary, scores: Iterator[Scored]) -> ChatLogprobs:
    return ChatLogprobs([_token(vocabulary, *score) for score in scores])


def _token(vocabulary: Vocabulary, logprob: float | None, token: int, top: Top) -> TokenLogprob:
    piece = vocabulary[token]
    others = [_top(vocabulary, *entry) for entry in top]
    return TokenLogprob(piece.text, _floored(logprob or 0.0), piece.bytes, others)


def _top(vocabulary: Vocabulary, logprob: float, token: int) -> TopLogprob:
    piece = vocabulary[token]
    return TopLogprob(piece.text, _floored(logprob), piece.bytes)


def _floored(logprob: float) -> float:
    return max(logprob, FLOOR)


class CompletionScores:
    """The logprobs of one choice, whose offsets go on from one chunk to the next."""

    def __init__(self, vocabulary: Vocabulary, shows_special: bool) -> None:
        self._vocabulary, self._shows_special = vocabulary, shows_special
        self._offset = 0
        # Offsets count characters, and tokens may be pieces of them.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of_prompt(self, request: Request, text: str) -> CompletionLogprobs:
        """`text`: the prompt as it was given, which has not all of its special tokens."""
        found = CompletionLogprobs([], [], [], [])
        for score in input_scores(request):
            piece = self._vocabulary[score[1]]
            shown = not piece.special or text.startswith(piece.text, self._offset)
            self._add(found, piece, score, shown)
        self._decoder.reset()
        self._offset = len(text)
        return found

    def of_answer(
        self, found: CompletionLogprobs, request: Request, start: int, stop: int
    ) -> CompletionLogprobs:
        """Adds to `found`."""
        for score in output_scores(request, start, stop):
            piece = self._vocabulary[score[1]]
            self._add(found, piece, score, self._shows_special or not piece.special)
        return found

    def _add(
        self, found: CompletionLogprobs, piece: TokenPiece, score: Scored, shown: bool
    ) -> None:
        logprob, _, top = score
        found.tokens.append(piece.text)
        found.text_offset.append(self._offset)
        if shown:
            self._offset += len(self._decoder.decode(bytes(piece.bytes)))
        if logprob is None:
            found.token_logprobs.append(None)
            found.top_logprobs.append(None)
            return
        found.token_logprobs.append(_floored(logprob))
        names: dict[str, float] = {}
        for value, token in top:
            names.setdefault(self._vocabulary[token].text, _floored(value))
        names.setdefault(piece.text, _floored(logprob))
        found.top_logprobs.append(names)
