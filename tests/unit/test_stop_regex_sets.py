"""Sets of characters in patterns that end an answer, against Python's own `re`."""

import random
import re
import re._parser
import sys

import pytest

from moesaic.engine.text.stop_regex import StopPatterns
from moesaic.engine.text.stop_regex_sets import case_variants, one_character

CHARACTERS = [*map(chr, range(sys.maxunicode + 1))]
CATEGORIES = (r"\d", r"\D", r"\s", r"\S", r"\w", r"\W")
LETTERS = CHARACTERS[:0x20000]  # all that have case, and more
CASED = [char for char in LETTERS if len({char, char.lower(), char.upper()}) > 1]
FLAGS = (0, re.ASCII, re.IGNORECASE, re.IGNORECASE, re.IGNORECASE | re.ASCII)


def escaped(char):
    return f"\\U{ord(char):08x}"


def random_character(source):
    kind = source.choice((CHARACTERS[32:127], CASED, CHARACTERS[:0x3000], CHARACTERS))
    return source.choice(kind)


def random_item(source):
    first = random_character(source)
    match source.randrange(6):
        case 0 | 1:
            return escaped(first)
        case 2:
            return source.choice(CATEGORIES)
        case 3:
            last = random_character(source)
        case 4:
            last = CHARACTERS[min(ord(first) + source.randrange(40), sys.maxunicode)]
        case _:
            last = first
    return "-".join(map(escaped, sorted((first, last))))


def ours(pattern, flags):
    ((operation, value),) = re._parser.parse(pattern, flags)
    return one_character(operation, value, flags)


def differences(pattern, flags, text):
    found = {match.start() for match in re.compile(pattern, flags).finditer(text)}
    fits = ours(pattern, flags)
    return [ascii(char) for at, char in enumerate(text) if bool(fits(char)) != (at in found)]


@pytest.mark.parametrize("seed", range(4))
def test_random_sets_fit_as_re_has_them(seed):
    source = random.Random(seed)
    for _ in range(60):
        items = "".join(random_item(source) for _ in range(source.randint(1, 6)))
        pattern = f"[{source.choice(('', '^'))}{items}]"
        text = "".join(
            CHARACTERS[:400] + source.sample(CASED, 400) + source.sample(CHARACTERS, 200)
        )
        text += "".join(chr(int(code, 16)) for code in re.findall(r"U([0-9a-f]{8})", items))
        text += text.swapcase()
        flags = source.choice(FLAGS)
        assert differences(pattern, flags, text) == [], (pattern, flags)


@pytest.mark.parametrize(
    ("pattern", "flags"),
    [
        ("[k-s\u00df]", re.IGNORECASE),
        ("[^i]", re.IGNORECASE),
        ("[\u0200-\U00010410]", re.IGNORECASE),
        ("[x\U00010400]", re.IGNORECASE),
        ("[\U00010400-\U00010400]", re.IGNORECASE),
        ("[\U00010400-\U00010401\\w]", re.IGNORECASE | re.ASCII),
        ("\u212a", re.IGNORECASE),
        ("K", re.IGNORECASE | re.ASCII),
        ("[^\u03a3]", re.IGNORECASE),
        (".", 0),
        (".", re.DOTALL),
        ("[^\\W\\d_]", 0),
        ("\\s", re.ASCII),
    ],
)
def test_all_letters(pattern, flags):
    assert differences(pattern, flags, "".join(LETTERS)) == []


@pytest.mark.parametrize("is_ascii", [False, True])
def test_case_variants_of_all_letters(is_ascii):
    flags = re.IGNORECASE | (re.ASCII if is_ascii else 0)
    cased = "".join(CASED)
    for char in CASED:
        found = frozenset(re.findall(re.escape(char), cased, flags)) | {char}
        assert found == case_variants(char, is_ascii), ascii(char)
    others = set(LETTERS) - set(CASED)
    assert all(case_variants(char, is_ascii) == {char} for char in others)


def test_type_flags_of_groups():
    for pattern, text in (("(?a)(?u:\\w)x", "\u00e9x"), ("(?a:\\w)x", "\u00e9x ax")):
        match = StopPatterns([pattern]).feed(text)
        assert re.fullmatch(pattern, text[match.start : match.end])
        assert not re.match(pattern, text[: match.start])
