"""Checks grammars before their requests are submitted.

llguidance's own limits do not bound its work: {"multipleOf": 99999989} compiles for two minutes and
takes 7 GB. So a limited child process compiles every new grammar; verdicts are cached.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Hashable
from concurrent.futures import Future
from contextlib import suppress
from typing import Final

import msgspec

from moesaic.core.sampling import BadParameter, Grammar
from moesaic.engine.errors import EngineShutDown, QueueFull
from moesaic.engine.frontend.fair_queue import FairExecutor
from moesaic.engine.text.grammar import check_depth, is_installed
from moesaic.engine.text.grammar_child import GrammarSetup
from moesaic.engine.text.json_schema import prepare
from moesaic.engine.text.limited_child import Allowance, ChildUnresponsive, Exceeded, LimitedChild

logger = logging.getLogger(__name__)

ALLOWANCE: Final = Allowance(seconds=1.0, room=128 * 2**20)
REMEMBERED: Final = 4096
# Grammars are checked one by one, each for a second at worst.
MAX_OPEN: Final = 32


class GrammarChecker:
    """May be called from any thread. `setup` is None without a tokenizer."""

    def __init__(self, setup: GrammarSetup | None, backend: str | None) -> None:
        self._setup, self._backend = setup, backend
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()
        self.turns = FairExecutor("moesaic-grammars", MAX_OPEN, _full)
        module = "moesaic.engine.text.grammar_child"
        self._child = LimitedChild(module, msgspec.msgpack.encode(setup), ALLOWANCE)

    def check(self, grammar: Grammar, client: Hashable = None) -> None:
        """ValueError if the engine cannot serve it, QueueFull if it cannot be checked now."""
        verdict = self._known(grammar)
        _raise_if_refused(
            grammar, self._submit(grammar, client).result() if verdict is None else verdict
        )

    async def check_in_turn(self, grammar: Grammar, client: Hashable = None) -> None:
        """`check` without blocking the event loop."""
        verdict = self._known(grammar)
        if verdict is None:
            verdict = await asyncio.wrap_future(self._submit(grammar, client))
        _raise_if_refused(grammar, verdict)

    def close(self) -> None:
        self.turns.close(EngineShutDown())
        self._child.close()

    def _known(self, grammar: Grammar) -> str | None:
        """Why it is refused, empty if it is accepted, None if that is unknown."""
        if self._backend == "none":
            return "this server runs with --grammar-backend none"
        if not is_installed():
            return "llguidance is not installed: pip install 'moesaic[structured]'"
        if self._setup is None:
            return "grammars need a tokenizer, but skip_tokenizer_init is set"
        return self._cached(_key(grammar))

    def _submit(self, grammar: Grammar, client: Hashable) -> Future[str]:
        return self.turns.submit(client, lambda: self._verdict(grammar))

    def _verdict(self, grammar: Grammar) -> str:
        key = _key(grammar)
        if (known := self._cached(key)) is not None:  # another client sent the same
            return known
        verdict = self._compile(grammar)
        with self._lock:
            self._verdicts[key] = verdict
            while len(self._verdicts) > REMEMBERED:
                self._verdicts.popitem(last=False)
        return verdict

    def _cached(self, key: bytes) -> str | None:
        with self._lock:
            if key in self._verdicts:
                self._verdicts.move_to_end(key)
            return self._verdicts.get(key)

    def _compile(self, grammar: Grammar) -> str:
        """Why it is refused; QueueFull if that could not be found out."""
        try:
            check_depth(grammar)
        except ValueError as error:
            return str(error)
        if grammar.kind == "json_schema":
            _log_ignored(grammar.text)
        try:
            return self._child.ask(msgspec.msgpack.encode(tuple(grammar))).decode()
        except Exceeded as error:
            return f"it takes {error} to compile: simplify it"
        except ChildUnresponsive:
            raise QueueFull("a grammar could not be checked now: try again later") from None


def _key(grammar: Grammar) -> bytes:
    return hashlib.sha256("\0".join(grammar).encode()).digest()


def _raise_if_refused(grammar: Grammar, why: str) -> None:
    if why:
        raise BadParameter(grammar.kind, f"{grammar.kind} is not possible: {why}")


def _log_ignored(text: str) -> None:
    with suppress(ValueError):  # a schema that cannot be prepared is refused
        if ignored := prepare(json.loads(text)).ignored:
            keywords = sorted({what.partition(" ")[0] for what in ignored})
            logger.warning("a json_schema has %s, not enforced", ", ".join(keywords))


def _full() -> QueueFull:
    return QueueFull(
        f"{MAX_OPEN} new grammars already wait to be checked, which is the limit, and this one is "
        "new, too: try again later"
    )
