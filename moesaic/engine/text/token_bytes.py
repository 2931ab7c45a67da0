"""The UTF-8 bytes that each token adds to a text: what streamed text and its offsets come from."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from moesaic.engine.text.tokenizer import BROKEN, Tokenizer


class TokenBytes:
    """The bytes of all tokens, joined and decoded with U+FFFD for what is no UTF-8, are the text
    that the tokenizer decodes of all tokens at once.

    Tokenizers that fall back to bytes decode a run of such tokens as a whole: one byte that does
    not fit turns every byte of the run into U+FFFD. So nothing is certain of a run until a token
    that is no byte ends it, and its tokens are held back until then.

    The text goes on after that of the tokens `before`, but its bytes do not join theirs: where a
    prompt ends inside a character, that character stays broken.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int], skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._follow(_last_text(tokenizer, before, skip_special))
        self._run: list[int | None] = []
        self._run_text: str | None = ""
        self._run_decoder = codecs.getincrementaldecoder("utf-8")()

    @property
    def held(self) -> str:
        """The run that is held back, if it is whole characters so far."""
        return "" if self._run_decoder.getstate()[0] else self._run_text or ""

    def push(self, token_id: int) -> list[bytes]:
        """The bytes of each token that are certain now and were not before."""
        form = self._tokenizer.form(token_id)
        if not form.known or (form.special and self._skip_special):
            return self.skip()
        if form.is_byte:
            self._extend_run(token_id, form.raw)
            return []
        found = self.flush()
        found.append(self._added([token_id]).encode() if form.raw is None else form.raw)
        self._follow(token_id)
        return found

    def skip(self) -> list[bytes]:
        """As `push` of a token that has no text, which does not end a run."""
        if not self._run:
            return [b""]
        self._run.append(None)
        return []

    def flush(self) -> list[bytes]:
        """The bytes of each token that was held back."""
        if not self._run:
            return []
        ids = [token_id for token_id in self._run if token_id is not None]
        found = iter(self._split(ids))
        chunks = [b"" if token_id is None else next(found) for token_id in self._run]
        self._follow(ids[-1])
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
        """The text of a run, each of whose bytes is a token."""
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
        """What tokens add to the text of the one before them."""
        if self._context is None:
            return self._decode(ids)
        text = self._decode([self._context, *ids])
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        return self._decode(ids)

    def _follow(self, token_id: int | None) -> None:
        self._context = token_id
        self._context_text = "" if token_id is None else self._tokenizer.form(token_id).text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)


def _last_text(tokenizer: Tokenizer, ids: Sequence[int], skip_special: bool) -> int | None:
    """The last token that has a text and is no byte; for bytes alone some other one."""
    only_bytes = False
    for token_id in reversed(ids):
        form = tokenizer.form(token_id)
        if not form.known or (form.special and skip_special):
            continue
        if not form.is_byte:
            return token_id
        only_bytes = True
    return tokenizer.anchor if only_bytes else None
