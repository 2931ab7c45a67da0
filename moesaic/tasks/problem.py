"""A problem, and how a reply to it is graded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

MARK: Final = "####"
TEST_SHARE: Final = 16  # one problem in so many is kept for testing


@dataclass(frozen=True, slots=True)
class Problem:
    """`prompt`: what the user says; `answer`: what is graded; `solution`: a whole good reply;
    `match`: the name of the rule in MATCHES by which a reply is graded."""

    task: str
    prompt: str
    answer: str
    solution: str = ""
    match: str = "final"

    @property
    def is_test(self) -> bool:
        return is_test(self.prompt)


@dataclass(frozen=True, slots=True)
class Grade:
    """`found`: the answer read from the reply, None where there is none to read (invalid)."""

    right: bool
    found: str | None


def is_test(prompt: str) -> bool:
    """Whether a problem is kept from training; spacing and case do not make it another one."""
    plain = " ".join(prompt.lower().split())
    digest = hashlib.blake2b(plain.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % TEST_SHARE == 0


def plain(text: str) -> str:
    return " ".join(text.split())


def _final(reply: str) -> str | None:
    """What follows the last mark, to the end of its line."""
    _, mark, rest = reply.rpartition(MARK)
    found = plain(rest.strip().split("\n")[0]) if mark else ""
    return found or None


def _exact(reply: str) -> str | None:
    return plain(reply) or None


MATCHES: Final[dict[str, Callable[[str], str | None]]] = {"final": _final, "exact": _exact}


def grade(problem: Problem, reply: str) -> Grade:
    found = MATCHES[problem.match](reply)
    return Grade(found == plain(problem.answer), found)
