"""A problem, and how a reply to it is graded."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Final

MARK: Final = "####"
TEST_SHARE: Final = 16  # one problem in so many is kept for testing


@dataclass(frozen=True, slots=True)
class Message:
    """A turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Problem:
    """`prompt`: what the user says; `answer`: what is graded; `solution`: a whole good reply;
    `match`: the name of the rule in MATCHES by which a reply is graded. Of a longer conversation
    `messages` are the turns, and the prompt is empty. `id` names it within its task."""

    task: str
    prompt: str
    answer: str
    solution: str = ""
    match: str = "final"
    messages: tuple[Message, ...] = ()
    id: str = ""

    @property
    def conversation(self) -> tuple[Message, ...]:
        return self.messages or (Message("user", self.prompt),)


@dataclass(frozen=True, slots=True)
class Grade:
    """`found`: the answer read from the reply, None where there is none to read (invalid)."""

    right: bool
    found: str | None


def is_kept(prompt: str) -> bool:
    """Whether a prompt is kept from training; spacing and case do not make it another one."""
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


def _auto(reply: str) -> str | None:
    """Of replies that may or may not mark their answer."""
    return _final(reply) if MARK in reply else _exact(reply)


# A minus after a letter or digit is a dash: 7-3 has no negative number.
_NUMBER: Final = re.compile(r"(?:(?<!\w)[-−])?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")


def _number(reply: str) -> str | None:
    """The first number after the last mark, else the last one: as GSM8K is graded."""
    marked = _NUMBER.findall(reply.rpartition(MARK)[2]) if MARK in reply else []
    found = marked[:1] or _NUMBER.findall(reply)[-1:]
    return found[0].replace(",", "").replace("$", "").replace("−", "-") if found else None


def _same_number(found: str, answer: str) -> bool:
    """18, 18.0 and $18 are one."""
    try:
        return Decimal(found) == Decimal(_number(answer) or "")
    except InvalidOperation:
        return False


# From the surest sign of a choice to the least; the last of each kind counts. A lone A before a
# small letter is an article.
_CHOICES: Final = (
    re.compile(r"\b(?:[Aa]nswer|[Oo]ption|[Cc]hoice)(?:\s+is)?\s*:?[\s*]*\(?([A-E])\b"),
    re.compile(r"\(([A-Ea-e])\)"),
    re.compile(r"^\W*([A-Ea-e])(?:[).:,]|\W*$)", re.MULTILINE),
    re.compile(r"\b(A(?!\s+[a-z])|[B-E])\b(?!['’])"),
)


def _choice(reply: str) -> str | None:
    kinds = (pattern.findall(reply) for pattern in _CHOICES)
    return next((found[-1].upper() for found in kinds if found), None)


def _has(found: str, answer: str) -> bool:
    """As whole words, in any case."""
    wanted = re.escape(plain(answer).casefold())
    return re.search(rf"(?<!\w){wanted}(?!\w)", found.casefold()) is not None


@dataclass(frozen=True, slots=True)
class Match:
    """`read`: the answer in a reply, None if there is none; `same`: whether what was read is the
    answer that was wanted."""

    read: Callable[[str], str | None]
    same: Callable[[str, str], bool] = lambda found, answer: found == plain(answer)


MATCHES: Final[dict[str, Match]] = {
    "final": Match(_final),
    "exact": Match(_exact),
    "auto": Match(_auto),
    "contains": Match(_exact, _has),
    "number": Match(_number, _same_number),
    "choice": Match(_choice, lambda found, answer: found == _choice(answer)),
}


def grade(problem: Problem, reply: str) -> Grade:
    match = MATCHES[problem.match]
    found = match.read(reply)
    return Grade(found is not None and match.same(found, problem.answer), found)
