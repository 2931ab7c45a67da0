"""A problem, and how a reply to it is graded."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

MARK: Final = "####"
TEST_SHARE: Final = 16  # one problem in 16 is kept for testing


@dataclass(frozen=True, slots=True)
class ChatTurn:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Problem:
    task: str
    prompt: str  # empty if there are messages
    answer: str
    solution: str = ""  # a full reply that is right
    match: str = "final"  # the rule in MATCHES that grades a reply
    messages: tuple[ChatTurn, ...] = ()  # of a longer conversation
    id: str = ""  # within its task

    @property
    def conversation(self) -> tuple[ChatTurn, ...]:
        return self.messages or (ChatTurn("user", self.prompt),)


@dataclass(frozen=True, slots=True)
class Grade:
    right: bool
    found: str | None  # the answer in the reply; None: there is none (invalid)


def is_kept(prompt: str) -> bool:
    """Whether a prompt is kept for testing, regardless of spacing and case."""
    plain = " ".join(prompt.lower().split())
    digest = hashlib.blake2b(plain.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % TEST_SHARE == 0


def plain(text: str) -> str:
    return " ".join(text.split())


def _tidy(text: str) -> str:
    """Remove one full stop, bold or code marks, and a dollar sign around an answer."""
    bare = text.removesuffix(".")
    for mark in ("**", "`"):
        if len(bare) > 2 * len(mark) and bare.startswith(mark) and bare.endswith(mark):
            bare = bare[len(mark) : -len(mark)].strip()
            bare = bare if text.endswith(".") else bare.removesuffix(".")
    return re.sub(r"^\$(?=\d)", "", bare)


def _final(reply: str) -> str | None:
    """The text after the last mark, to the end of its line."""
    _, mark, rest = reply.rpartition(MARK)
    found = _tidy(plain(rest.strip().split("\n")[0])) if mark else ""
    return found or None


def _same_final(found: str, answer: str) -> bool:
    """Compare; the answer itself may end with a full stop."""
    return found in (plain(answer), _tidy(plain(answer)))


def _exact(reply: str) -> str | None:
    return plain(reply) or None


def _auto(reply: str) -> str | None:
    """The answer of a reply that may or may not mark it."""
    return _final(reply) if MARK in reply else _exact(reply)


# A sign after a letter or digit is an operator: 7-3 has no negative number.
_SIGN: Final = r"(?:(?<!\w)[-+−])?"
_UNSIGNED: Final = (
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)(?:[eE][-+]?\d+(?!\w))?"
)
_WHOLE_NUMBER: Final = re.compile(rf"[-+−]?\$?{_UNSIGNED}")
_NUMBER: Final = re.compile(rf"{_SIGN}\$?{_UNSIGNED}(?:/\d+(?:\.\d+)?)*")
_BARE_NUMBER: Final = re.compile(_SIGN + _UNSIGNED)


def is_number(text: str) -> bool:
    """Whether a text is exactly one number."""
    return _WHOLE_NUMBER.fullmatch(text.strip()) is not None


def _number(reply: str) -> str | None:
    """The first number after the last mark, else the last number, as for GSM8K."""
    marked = _NUMBER.findall(reply.rpartition(MARK)[2]) if MARK in reply else []
    found = marked[:1] or _NUMBER.findall(reply)[-1:]
    if not found:
        return None
    parts = found[0].replace(",", "").replace("$", "").replace("−", "-").split("/")
    return "/".join(parts) if len(parts) == 2 else parts[-1]  # the year of a date


def _same_number(found: str, answer: str) -> bool:
    """18, 18.0 and $18 are equal, and so are 1/2 and .5."""
    try:
        above, _, below = found.partition("/")
        return Decimal(above) / Decimal(below or 1) == Decimal(_number(answer) or "")
    except ArithmeticError:
        return False


_IS_NOT: Final = r"(?!\)?\**\s+(?:is|are|was)(?:n['’]t|\s+(?:not|wrong|incorrect|false)\b))"
_ENDED: Final = r"(?=[).,;:!*\]]|\s*$|\s+(?:because|since|as)\b)"
# From the surest sign of a choice to the least; the last match of a pattern counts. A lone A before
# a lower-case letter is an article.
_CHOICES: Final = (
    re.compile(
        r"\b(?:(?:[Aa]nswer|ANSWER|[Oo]ption|[Cc]hoice)(?:\s+is)?\s*:?[\s*]*\(?"
        rf"(?:([A-E])\b{_IS_NOT}|([a-e]){_ENDED})"
        r"|(?:[Ss]o|[Tt]hus|[Hh]ence|[Tt]herefore|[Ii]t(?:\s+is|['’]s|\s+must\s+be)),?[\s*]*\(?"
        rf"([A-E]){_ENDED})",
        re.MULTILINE,
    ),
    re.compile(rf"\(([A-Ea-e])\){_IS_NOT}"),
    re.compile(r"^\W*([A-Ea-e])(?:[).:,]|\W*$)", re.MULTILINE),
    re.compile(r"\b(A(?!\s+[a-z])|[B-E])\b(?!['’])"),
)


def _choice(reply: str) -> str | None:
    for pattern in _CHOICES:
        if found := list(pattern.finditer(reply)):
            return next(letter for letter in found[-1].groups() if letter).upper()
    return None


# Scripts that put no space between words, by the names of their characters.
_UNSPACED: Final = (
    *("CJK", "HIRAGANA", "KATAKANA", "HANGUL", "BOPOMOFO"),
    *("THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN"),
)


def _in_word(char: str) -> bool:
    """Whether it is part of a word in a script with spaces."""
    known = char.isalnum() or char == "_"
    return known and not unicodedata.name(char, "").startswith(_UNSPACED)


def _has(found: str, answer: str) -> bool:
    """Whether the answer occurs as whole words and numbers, in any case."""
    text, wanted = (unicodedata.normalize("NFC", t).casefold() for t in (found, plain(answer)))
    numbers = [match.span() for match in _BARE_NUMBER.finditer(text)]
    for match in re.finditer(f"(?={re.escape(wanted)})", text):
        begin, end = match.start(), match.start() + len(wanted)
        cut_word = any(
            0 < place < len(text) and _in_word(text[place - 1]) and _in_word(text[place])
            for place in (begin, end)
        )
        cut_number = any(low < place < high for low, high in numbers for place in (begin, end))
        if not cut_word and not cut_number:
            return True
    return False


@dataclass(frozen=True, slots=True)
class AnswerMatch:
    """Reads the answer from a reply, or None, and compares it with the right one."""

    read: Callable[[str], str | None]
    same: Callable[[str, str], bool] = lambda found, answer: found == plain(answer)


MATCHES: Final[dict[str, AnswerMatch]] = {
    "final": AnswerMatch(_final, _same_final),
    "exact": AnswerMatch(_exact),
    "auto": AnswerMatch(_auto, _same_final),
    "contains": AnswerMatch(_exact, _has),
    "number": AnswerMatch(_number, _same_number),
    "choice": AnswerMatch(_choice, lambda found, answer: found == _choice(answer)),
}


def grade(problem: Problem, reply: str) -> Grade:
    match = MATCHES[problem.match]
    found = match.read(reply)
    return Grade(found is not None and match.same(found, problem.answer), found)
