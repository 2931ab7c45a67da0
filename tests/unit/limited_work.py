"""The work of a limited child for test_limited_child: each question names what it does."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Final

from moesaic.engine.text.limited_child import Answer, serve

KEPT: list[bytearray] = []


def _keep() -> None:
    KEPT.append(bytearray(12 << 20))


def _spin() -> None:
    while True:
        pass


WORK: Final[dict[str, Callable[[], object]]] = {
    "nothing": lambda: None,
    "keep": _keep,
    "spin": _spin,
    "take all": lambda: bytearray(1 << 40),
    "abort": os.abort,
    "be killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "fail": lambda: 1 // 0,
}


def _begin(setup: bytes) -> Answer:
    def answer(question: bytes) -> bytes:
        WORK[question.decode().strip()]()
        return str(os.getpid()).encode()

    return answer


if __name__ == "__main__":
    serve(_begin)
