"""Patterns that end an answer, against Python's own `re`."""

import random
import re
import re._parser
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.core.foreign_fields import BadParameter
from moesaic.core.sampling import SamplingParams
from moesaic.engine.text import stop_regex
from moesaic.engine.text.detokenizer import MAX_HELD, IncrementalDetokenizer
from moesaic.engine.text.stop_regex import MAX_REMEMBERED, StopPatterns, check_stop_patterns
from moesaic.engine.text.stop_regex_nodes import MAX_LENGTH, MAX_SIZE, WEIGHT
from tests.unit.test_detokenizer import BYTES, FALLBACK, raw, utf8

PATTERNS = [
    *("a", "ab+a", "a.c", "(?s)a.c", "[^a]b", r"\d", r"\d{2,3}b", "a{3}", "(ab|ba)c"),
    *("(a|ab)(c|bc)", "(a+)+b", "(a*)*b", "a*?b", "(?i)AB", "(?i:A)b", "(?i)[A-B]c", "x|y|ab"),
    *("(a|b){2}c", "a?b?c", "^ab", r"\Aab", "ab$", r"b\Z", r"\bab", r"ab\b", r"a\Bb", "(?m)^b"),
    *("(?m)a$\n", "b(?:)c", "(?P<name>a)b", "[ab]{0,2}c", "a(b(c|a)*)+c", r"\s\w", r"[\d\s]a"),
    *("(?-i:a)b", ".*c", "a{2,}", "\u20ac|\\W\\W", "(?x) a b # c", "a(b|)c"),
    *("b$\\n", "(a|$)\\nb?", "b$\\s", "b$\\n?c|1", "b\\Z\\n|c"),
]


def expected(patterns, text):
    """The match that ends first, by definition, and of those the longest."""
    for end in range(len(text) + 1):
        ended = [
            (start, pattern)
            for pattern in patterns
            for start in range(end + 1)
            if re.compile(pattern).fullmatch(text[:end], start)
        ]
        if ended:
            start, pattern = min(ended)
            return start, end, pattern
    return None


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=2),
    st.text("abcAB1 \n€", max_size=24),
    st.integers(1, 4),
    st.booleans(),
)
def test_patterns_match_as_re_does(patterns, text, step, keep):
    params = SamplingParams(stop_regex=tuple(patterns), no_stop_trim=keep)
    one, found = IncrementalDetokenizer(BYTES, [], params), expected(patterns, text)
    start, end, matched = found or (len(text), len(text), None)
    ids = utf8(text)
    for first in range(0, len(ids), step):
        one.push(ids[first : first + step])
        assert text[: end if keep else start].startswith(one.text)
    assert one.finish() == text[: end if keep else start]
    assert one._stops.matched == matched


@pytest.mark.parametrize("pattern", PATTERNS)
def test_each_pattern_alone(pattern):
    texts = ["xabc", "aab c", "ba\nbab", "aaaab1", "ab 12ab", "a\nc", "Ab", "bAbc", "12b", "cab\n"]
    texts += ["aba", " €"]
    ends = [found and found[:2] for found in (expected([pattern], text) for text in texts)]
    ours = [StopPatterns([pattern]).feed(text) for text in texts]
    assert [found and (found.start, found.end) for found in ours] == ends
    assert any(ends)


def test_text_is_held_back_while_it_may_match():
    params = SamplingParams(stop=("zz",), stop_regex=(r"\nQ\d+:",))
    one, shown = IncrementalDetokenizer(BYTES, [], params), []
    for piece in ("answer", "\n", "Q", "x", "\nQ1", "2", ": more"):
        matched = one.push(utf8(piece))
        shown.append(one.text)
    held = "answer\nQx"
    assert shown == ["answer", "answer", "answer", held, held, held, held]
    assert (matched, one.finish()) == (r"\nQ\d+:", held)
    one = IncrementalDetokenizer(BYTES, [], SamplingParams(stop=("b",), stop_regex=("a[bc]", "ab")))
    assert (one.push(utf8("xaby")), one.finish()) == ("a[bc]", "x")


def test_patterns_in_bytes_that_are_held_back():
    """Byte-fallback tokens show with the token that ends their run, but a match ends the answer."""
    one = IncrementalDetokenizer(FALLBACK, [], SamplingParams(stop_regex=("€{2}",)))
    found = [one.push(raw(byte)) for byte in "x€€".encode()]
    assert found == [None] * 6 + ["€{2}"] and one.finish() == "x"


@pytest.mark.parametrize("pattern", ["(a+)+$b", "(a|a)*c", "(a|aa)+c", "(.*a){20}b", "(a*)*c"])
def test_time_is_linear(pattern):
    """These take `re` exponential time, or a high power."""
    patterns = StopPatterns([pattern])
    assert patterns.feed("a" * 5000) is None
    assert patterns.earliest == 0 and len(patterns._state.threads) <= MAX_SIZE


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [
        ("[" + "X-\uffff" * 330 + "]", "[" + "X-YX" * 330 + "]"),
        ("(?i)" + "[x-\U0010ffff]" * 60, "(?i)" + "[x-y]" * 60),
        (
            "[^\\d" + "".join(f"{chr(n)}-\uffff" for n in range(100, 300)) + "]",
            "[^\\d" + "a-z" * 200,
        ),
    ],
)
def test_wide_ranges_take_no_longer_to_compile(wide, narrow):
    """`re` visits each character of a range."""
    assert lines_to_compile(wide) <= 2 * lines_to_compile(narrow + "]" * (narrow[-1] != "]"))


def lines_to_compile(pattern, most=100_000):
    """The lines of Python that run meanwhile; a time would depend on what else runs."""
    count = 0

    def trace(_frame, event, _value):
        nonlocal count
        count += event == "line"
        if count > most:
            sys.settrace(None)
            pytest.fail(f"more than {most} lines")
        return trace

    stop_regex._compiled.cache_clear()
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        check_stop_patterns([pattern])
    finally:
        sys.settrace(before)
    return count


def test_patterns_print_no_warnings():
    """`re` warns of sets that may get another meaning; the operator cannot change them."""
    code = "from moesaic.engine.text.stop_regex import check_stop_patterns as check\n"
    code += "for pattern in ('[[a]', '[!--]', '[a&&b]', '[a||b]', '[a~~b]'): check([pattern])"
    ended = subprocess.run([sys.executable, "-Walways", "-c", code], capture_output=True)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.fixture
def visits(monkeypatch):
    """The nodes that each search for reached nodes visits."""
    counts, real = [], stop_regex._reached

    def counted(*given_):
        found = real(*given_)
        counts.append(len(found))
        return found

    monkeypatch.setattr(stop_regex, "_reached", counted)
    return counts


def test_steps_are_remembered(visits):
    """Only the first characters visit nodes, and another text with the same pattern none."""
    pattern, text = "[^q]{0,34}Z7", "some words, 123. \u20ac\n" * 500
    assert StopPatterns([pattern]).feed(text) is None
    assert 34 < len(visits) < 400
    visits.clear()
    assert StopPatterns([pattern]).feed(text[::-1]) is None
    assert len(visits) < 200
    visits.clear()
    assert StopPatterns([pattern]).feed(text) is None
    assert visits == []


def test_work_and_memory_are_bounded_if_no_step_comes_twice(visits):
    """The state of this automaton is the last 34 characters."""
    source, patterns = random.Random(1), StopPatterns(["a[ab]{0,34}Z8"])
    text = "".join(source.choice("ab") for _ in range(1500))
    for char in text:
        assert patterns.feed(char) is None
        steps = stop_regex._steps(patterns._automaton)
        kept = sum(
            len(s.threads) + len(step.state.threads) for (s, *_), step in steps._steps.items()
        )
        assert kept <= MAX_REMEMBERED
    assert len(text) * 0.9 < len(visits) <= len(text) + 1
    assert max(visits) <= MAX_SIZE // WEIGHT
    assert patterns.feed("Z8") is not None


def test_many_characters_are_forgotten():
    patterns = StopPatterns(["[^q]{3}Z"])
    assert patterns.feed("".join(map(chr, range(0x4E00, 0x4E00 + 10_000)))) is None
    assert len(stop_regex._steps(patterns._automaton)._classes) <= stop_regex.MAX_CHARACTERS
    assert patterns.feed("Z") is not None


class Counted(str):
    """A text that counts the characters in which others are searched."""

    searched = 0

    def __add__(self, other):
        return Counted(str(self) + other)

    def __getitem__(self, place):
        return Counted(str(self)[place])

    def __contains__(self, other):
        Counted.searched += len(self)
        return other in str(self)

    def find(self, other, first=0):
        Counted.searched += len(self) - first
        return str(self).find(other, first)


@pytest.mark.parametrize("patterns", [(), ("(?s).*Q",)])
def test_stop_strings_are_searched_in_new_text_only(patterns):
    stops = tuple(f"stop{n}" for n in range(8))
    one = IncrementalDetokenizer(BYTES, [], SamplingParams(stop=stops, stop_regex=patterns))
    one._stops._held, Counted.searched = Counted(""), 0
    for _ in range(300):
        one.push(utf8("word "))
    assert Counted.searched <= 300 * 5 * len(stops) * len("stop0")
    assert one.push(utf8("an")) is None and one.push(utf8(" stop7 more")) == "stop7"
    assert one.finish() == "word " * 300 + "an "


@pytest.mark.parametrize("step", [1, 7, 100_000])
def test_what_is_held_back_is_bounded(step):
    """A longer match ends the answer, and its last characters are left out."""
    for extra in (-1, 0, 1, 500):
        text = "a" * (MAX_HELD + extra - 1)
        one = IncrementalDetokenizer(BYTES, [], SamplingParams(stop_regex=("(?s).*Q",)))
        ids = utf8(text + "Qb")
        for first in range(0, len(ids), step):
            one.push(ids[first : first + step])
            assert len(one._stops._held) <= MAX_HELD
        assert (one._stops.matched, one.finish()) == ("(?s).*Q", "a" * max(0, extra))


NODES = "moesaic.engine.text.stop_regex_nodes"


@pytest.mark.parametrize("what", ["absent", "renamed", "other operations"])
def test_another_parser_refuses_patterns_only(monkeypatch, what):
    stop_regex._compiled.cache_clear()
    monkeypatch.delitem(sys.modules, NODES)
    if what == "absent":
        monkeypatch.setitem(sys.modules, "re._parser", None)
    elif what == "renamed":
        monkeypatch.delattr("re._constants.ATOMIC_GROUP")
    else:
        monkeypatch.setattr("re._parser.parse", lambda _: [("literal",)])
    check_stop_patterns([])
    with pytest.raises(BadParameter, match="parser of this Python's re is unknown here: use stop"):
        check_stop_patterns(["ab"])


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(", "not a regular expression: missing \\)"),
        ("a**", "not a regular expression"),
        ("(?L)a", "not a regular expression"),
        ("a{2,1}", "not a regular expression"),
        ("(" * 600 + ")" * 600, "not a regular expression|nested more than"),
        ("(" * 40 + "a" + ")" * 40, "nested more than 32"),
        (r"(a)\1", "a reference to a group"),
        ("(?P<x>a)(?P=x)", "a reference to a group"),
        ("(a)?(?(1)b|c)", "a reference to a group"),
        ("a(?=b)", "look-around"),
        ("(?<!a)b", "look-around"),
        ("(?>a)b", "an atomic group"),
        ("a++b", "a possessive repetition"),
        ("a*", "matches an empty text"),
        ("a|^$", "matches an empty text"),
        ("a{2000}", "too many"),
        ("(){4000000000}b", "too many"),
        ("((((){500}){500}){500}){500}b", "too many"),
        ("((a{30}){30}){30}", "too many"),
        ("a[ab]{0,80}Z", "too many"),
        ("[ab]" * 100, "too many"),
        ("[" + "".join(map(chr, range(0x4E00, 0x4E00 + MAX_SIZE))) + "]", "too many"),
    ],
)
def test_refused_patterns(pattern, words):
    words = f"stop_regex is not possible: .*({words})"
    with pytest.raises(BadParameter, match=words) as error:
        check_stop_patterns([pattern])
    assert error.value.name == "stop_regex"


def test_limits():
    assert SamplingParams.from_dict({"stop_regex": "a"}).stop_regex == ("a",)
    assert SamplingParams.from_dict({"stop_regex": []}).stop_regex == ()
    check_stop_patterns(["a" * 100, "b{70}"])
    check_stop_patterns(["[" + "a" * 1000 + "]"] * 4)
    with pytest.raises(BadParameter, match=f"more than {MAX_LENGTH} characters in all"):
        check_stop_patterns(["[" + "a" * 1000 + "]"] * 5)
    for given_, words in (
        (["a"] * 65, "at most 64"),
        ("a" * 1025, "at most 1024"),
        ([1], "string"),
    ):
        with pytest.raises(BadParameter, match=words) as error:
            SamplingParams.from_dict({"stop_regex": given_})
        assert error.value.name == "stop_regex"
