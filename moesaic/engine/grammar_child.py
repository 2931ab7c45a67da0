"""The process in which grammars are tried: one that takes too long or too much memory dies in it.

On its standard input: how to make a compiler, then grammars. On its standard output: for each of
them why it is refused, or nothing. It ends with its input.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from moesaic.core.sampling import Grammar
from moesaic.engine.grammar import Compiler, shown
from moesaic.engine.tokenizer import Tokenizer

SECONDS: Final = 1.0
ROOM: Final = 128 * 2**20
LENGTH_BYTES: Final = 4


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
    """Why a grammar is refused; it is not only compiled but asked for its first tokens, which
    finds those that nothing matches."""
    try:
        matcher = compiler.matcher(grammar)
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            why = shown(matcher.get_error(), grammar)
            return "nothing matches it" if why.startswith("NoExtension") else why
        return "" if any(mask) else "nothing matches it"
    except MemoryError:
        return f"it takes more than {ROOM // 2**20} MB of memory to compile: simplify it"
    except ValueError as error:
        return str(error)


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
