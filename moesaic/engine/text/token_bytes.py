"""The UTF-8 bytes that each token adds to a text: the source of streamed text and its offsets.

tokenizers' DecodeStream (0.23) does not replace it: with byte-fallback tokens that are not UTF-8 it
raises or drops text and takes quadratic time, and it has neither a flush nor bytes per token.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Final

from moesaic.engine.text.tokenizer import BROKEN, Tokenizer

UTF8_DECODER: Final = codecs.getincrementaldecoder("utf-8")


class TokenBytes:
    """All bytes, joined and decoded with U+FFFD for invalid UTF-8, are the text that the tokenizer
    decodes from all tokens at once.

    Tokenizers with byte fallback decode a run of byte tokens as a whole: one invalid byte turns
    every byte of the run into U+FFFD. So a run is held back until another token ends it.

    The text continues that of the tokens `before`, but characters do not span the two: if a prompt
    ends within a character, that character stays broken.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int], skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._context = _last_text(tokenizer, before, skip_special)
        self._run: list[int | None] = []
        self._run_text: str | None = ""
        self._run_decoder = UTF8_DECODER()

    @property
    def has_held(self) -> bool:
        return bool(self._run)

    @property
    def held(self) -> str:
        """The text of the held-back run, if it consists of whole characters so far."""
        return "" if self._run_decoder.getstate()[0] else self._run_text or ""

    def push(self, token_id: int) -> list[bytes]:
        """The bytes of each token that has become certain."""
        form = self._tokenizer.form(token_id)
        if not form.known or (form.special and self._skip_special):
            return self.skip()
        if form.is_byte:
            self._extend_run(token_id, form.raw)
            return []
        found = self.flush()
        found.append(self._added([token_id]).encode() if form.raw is None else form.raw)
        self._context = token_id
        return found

    def skip(self) -> list[bytes]:
        """Pushes a token without text, which does not end a run."""
        if not self._run:
            return [b""]
        self._run.append(None)
        return []

    def flush(self) -> list[bytes]:
        """The bytes of each held-back token."""
        if not self._run:
            return []
        ids = [token_id for token_id in self._run if token_id is not None]
        found = iter(self._split(ids))
        chunks = [b"" if token_id is None else next(found) for token_id in self._run]
        self._context = ids[-1]
        self._run, self._run_text = [], ""
        self._run_decoder.reset()
        return chunks

    def _extend_run(self, token_id: int, raw: bytes | None) -> None:
        assert raw is not None
        begins = self._context is None and not self._run
        self._run.append(token_id)
        if self._run_text is None:
            return
        try:
            char = self._run_decoder.decode(raw)
        except UnicodeDecodeError:
            self._run_text = None
            self._run_decoder.reset()
            return
        # Decoders strip a space at the start of a text.
        self._run_text += self._added([token_id]) if begins and char else char

    def _split(self, ids: list[int]) -> list[bytes]:
        raw = b"".join(self._tokenizer.form(token_id).raw or b"" for token_id in ids)
        text = self._added(ids)
        encoded = text.encode()
        if raw.endswith(encoded):
            stripped = len(raw) - len(encoded)
            return [b""] * stripped + [bytes([byte]) for byte in encoded]
        if text == BROKEN * len(ids):
            return [BROKEN.encode()] * len(ids)
        return [b""] * (len(ids) - 1) + [encoded]

    def _added(self, ids: list[int]) -> str:
        """The text that tokens add after the context token."""
        if self._context is None:
            return self._decode(ids)
        text, context = self._decode([self._context, *ids]), self._tokenizer.form(self._context)
        if text.startswith(context.text):
            return text[len(context.text) :]
        return self._decode(ids)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)


def _last_text(tokenizer: Tokenizer, ids: Sequence[int], skip_special: bool) -> int | None:
    """The last token with text that is not a byte; the anchor if there are only bytes."""
    only_bytes = False
    for token_id in reversed(ids):
        form = tokenizer.form(token_id)
        if not form.known or (form.special and skip_special):
            continue
        if not form.is_byte:
            return token_id
        only_bytes = True
    return tokenizer.anchor if only_bytes else None
