"""The process in which grammars are tried: one that takes too long or too much memory dies in it.

On its standard input: how to make a compiler, then grammars. On its standard output: for each of
them why it is refused, or nothing. It ends with its input.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

import msgspec
import numpy as np

from moesaic.core.sampling import Grammar
from moesaic.engine.grammar import Compiler, shown
from moesaic.engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

SECONDS: Final = 1.0
ROOM: Final = 128 * 2**20
LENGTH_BYTES: Final = 4
FOLLOWED: Final = 16
NO_MATCH: Final = "nothing matches it"


class Setup(msgspec.Struct):
    folder: str
    vocab_size: int
    eos_ids: list[int]


def write(stream: BinaryIO, value: Setup | Grammar | str) -> None:
    data = msgspec.msgpack.encode(value)
    stream.write(len(data).to_bytes(LENGTH_BYTES, "little") + data)
    stream.flush()


def _read(stream: BinaryIO) -> bytes:
    """Nothing at the end."""
    head = stream.read(LENGTH_BYTES)
    return stream.read(int.from_bytes(head, "little")) if head else b""


def _memory() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


def judge(compiler: Compiler, grammar: Grammar) -> str:
    """Why a grammar is refused. It is not only compiled but followed for a few tokens, which finds
    most of those that nothing matches or that are too wide to follow."""
    try:
        return _follow(compiler.matcher(grammar), grammar)
    except MemoryError:
        return f"it takes more than {ROOM // 2**20} MB of memory to compile: simplify it"
    except ValueError as error:
        return str(error)


def _follow(matcher: LLMatcher, grammar: Grammar) -> str:
    source = random.Random(0)
    for _ in range(FOLLOWED):
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


def _limited(compiler: Compiler, grammar: Grammar) -> str:
    """The signal of the timer ends the process, whatever it is in."""
    resource.setrlimit(resource.RLIMIT_AS, (_memory() + ROOM, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        return judge(compiler, grammar)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    setup = msgspec.msgpack.decode(_read(source), type=Setup)
    try:
        tokenizer = Tokenizer.from_folder(setup.folder)
        compiler = Compiler(tokenizer, setup.vocab_size, setup.eos_ids)
        compiler.matcher(Grammar("regex", "a"))
    except Exception as error:
        write(sink, f"llguidance cannot use this model's tokenizer: {error}")
        return
    write(sink, "")
    least = _memory()
    while data := _read(source):
        write(sink, _limited(compiler, Grammar(*msgspec.msgpack.decode(data, type=list[str]))))
        if _memory() > least + 2 * ROOM:  # what was freed is not given back: begin anew
            return


if __name__ == "__main__":
    main()
