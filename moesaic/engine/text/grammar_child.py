"""The child process that compiles grammars; it answers with the reason of a refusal, or nothing."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from moesaic.core.sampling import Grammar
from moesaic.engine.text.grammar import Compiler, shown
from moesaic.engine.text.limited_child import Answer, serve
from moesaic.engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

TRIED_TOKENS: Final = 16
NO_MATCH: Final = "nothing matches it"


class GrammarSetup(msgspec.Struct):
    folder: str
    vocab_size: int
    eos_ids: list[int]
    open_objects: bool = False


def judge(compiler: Compiler, grammar: Grammar) -> str:
    """Why a grammar is refused. A few random tokens show most that match nothing or cost much."""
    try:
        return _match_some(compiler.matcher(grammar), grammar)
    except ValueError as error:
        return str(error)


def _match_some(matcher: LLMatcher, grammar: Grammar) -> str:
    source = random.Random(0)
    for _ in range(TRIED_TOKENS):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits)
        if matcher.is_error() or not len(allowed):
            break
        matcher.consume_token(int(source.choice(allowed)))
        if matcher.is_stopped():
            break
    else:
        return ""
    if not matcher.is_error():
        return "" if len(allowed) else NO_MATCH
    why = shown(matcher.get_error(), grammar)
    return NO_MATCH if why.startswith("NoExtension") else why


def _begin(data: bytes) -> Answer:
    setup = msgspec.msgpack.decode(data, type=GrammarSetup)
    try:
        tokenizer = Tokenizer.from_folder(setup.folder)
        compiler = Compiler(tokenizer, setup.vocab_size, setup.eos_ids, setup.open_objects)
        compiler.matcher(Grammar("regex", "a"))
    except Exception as error:
        raise ValueError(f"llguidance cannot use this model's tokenizer: {error}") from error

    def answer(question: bytes) -> bytes:
        kind, text = msgspec.msgpack.decode(question, type=tuple[str, str])
        return judge(compiler, Grammar(kind, text)).encode()

    return answer


if __name__ == "__main__":
    serve(_begin)
