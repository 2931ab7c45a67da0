"""Random prompts of a given length, with or without a tokenizer."""

from __future__ import annotations

import random
from functools import cached_property
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from moesaic.engine.text.tokenizer import Tokenizer

TINY: Final = "tiny:"
# Encoding a decoded text may give another length; attempts to correct it.
ROUNDS: Final = 10
TRIES: Final = 10_000
REPLACEMENT: Final = "\ufffd"
# Usually one token each in any vocabulary of natural language.
WORDS: Final = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work number night "
    "point home water room mother area money story fact month lot right study book eye job word "
    "business issue side kind head house service friend father power hour game line end member law"
).split()


class Texts(Protocol):
    """Makes prompts; `count` gives None if the server's count is not known."""

    def draw(self, rng: random.Random, tokens: int) -> str: ...

    def draw_ids(self, rng: random.Random, tokens: int) -> list[int]: ...

    def count(self, text: str) -> int | None: ...


class WordTexts:
    """One word for each token, without a tokenizer."""

    def draw(self, rng: random.Random, tokens: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(tokens))

    def draw_ids(self, rng: random.Random, tokens: int) -> list[int]:
        raise ValueError("--tokenize-prompt needs a tokenizer: give --tokenizer DIR")

    def count(self, text: str) -> int | None:
        return None


class IdTexts:
    """Draws random token ids, where there is no tokenizer."""

    def __init__(self, vocab_size: int) -> None:
        self._ids = range(vocab_size)

    def draw(self, rng: random.Random, tokens: int) -> str:
        raise ValueError("--skip-tokenizer-init: only --dataset-name random works without one")

    def draw_ids(self, rng: random.Random, tokens: int) -> list[int]:
        return rng.choices(self._ids, k=tokens)

    def count(self, text: str) -> int | None:
        return None


class TokenTexts:
    """Exact lengths by the server's tokenizer, including its chat template."""

    def __init__(self, tokenizer: Tokenizer, chat: bool) -> None:
        self.tokenizer = tokenizer
        self._chat = chat and bool(tokenizer.templates)

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def encode(self, text: str) -> list[int]:
        if not self._chat:
            return self.tokenizer.encode(text)
        chat = self.tokenizer.apply_chat_template([{"role": "user", "content": text}])
        return self.tokenizer.encode(chat, add_special_tokens=False)

    def count_answer(self, text: str) -> int:
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def draw_ids(self, rng: random.Random, tokens: int) -> list[int]:
        return [self._draw_one(rng) for _ in range(tokens)]

    def draw(self, rng: random.Random, tokens: int) -> str:
        """At least one token besides the template and the special tokens."""
        inside = max(tokens - self._around, 1)
        ids, best, distance = self.draw_ids(rng, inside), "", tokens + 1
        for _ in range(ROUNDS):
            text = self.tokenizer.decode(ids, skip_special_tokens=False)
            off = self.count(text) - tokens
            if abs(off) < distance:
                best, distance = text, abs(off)
            if off == 0:
                break
            if off > 0:
                ids = ids[: max(len(ids) - off, 1)]
            else:
                ids = [*ids, *self.draw_ids(rng, -off)]
        return best

    @cached_property
    def _around(self) -> int:
        """Tokens that the template and the tokenizer add to a text."""
        return self.count("a") - len(self.tokenizer.encode("a", add_special_tokens=False))

    def _draw_one(self, rng: random.Random) -> int:
        """A token that survives decoding: not special, and no partial character."""
        size = self.tokenizer.vocab_size
        for _ in range(TRIES):
            token = rng.randrange(size)
            if self._plain(token):
                return token
        raise ValueError(
            f"the tokenizer of {self.tokenizer.folder} has no plain tokens to draw from: "
            "give another with --tokenizer"
        )

    def _plain(self, token: int) -> bool:
        if token not in self._known:
            text = self.tokenizer.decode([token], skip_special_tokens=True)
            self._known[token] = bool(text.strip()) and REPLACEMENT not in text
        return self._known[token]

    @cached_property
    def _known(self) -> dict[int, bool]:
        return {}


def load_tokenizer(name: str) -> Tokenizer:
    """Load from a folder, or from a tiny model, which is created if missing."""
    from moesaic.engine.text.tokenizer import Tokenizer

    if name.startswith(TINY):
        from moesaic.models.tiny import materialise  # only here: it needs torch

        name = materialise(name)
    return Tokenizer.from_folder(name)
