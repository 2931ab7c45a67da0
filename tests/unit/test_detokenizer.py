"""Streamed text equals text decoded at once, for any tokens and stop strings."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from moesaic.core.sampling import SamplingParams
from moesaic.engine.text.detokenizer import IncrementalDetokenizer
from tests.unit.token_texts import KINDS, random_cases

BYTES, FALLBACK = KINDS["byte_level"].tokenizer, KINDS["byte_fallback"].tokenizer
WORDS = ["Ġthe", "abc", "ĊĊ", "ðŁ", "ĻĤ", "ðŁĻĤ", "ĠÃ", "aâ", "Ĥ¬b", "ï¿½"]
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def ids_of(tokenizer, *tokens):
    return [tokenizer.backend.token_to_id(token) for token in tokens]


def raw(*values):
    """Byte-fallback tokens."""
    return ids_of(FALLBACK, *(f"<0x{value:02X}>" for value in values))


def utf8(text):
    """One byte-level token for each byte."""
    return ids_of(BYTES, *(name for word, _ in BYTE_LEVEL.pre_tokenize_str(text) for name in word))


def stream(tokenizer, ids, prompt=(), **params):
    """Returns the text after each token, the results of `push`, and the end."""
    one = IncrementalDetokenizer(tokenizer, list(prompt), SamplingParams.from_dict(params))
    texts, matches = [], []
    for token_id in ids:
        matches.append(one.push([token_id]))
        texts.append(one.text)
    return texts, matches, one.finish()


FEW, MANY = 150, 5_000
SIZES = [FEW, pytest.param(MANY, marks=pytest.mark.slow)]


def shown(kind, ids, skip):
    """The tokens that the library decodes."""
    backend = kind.tokenizer.backend
    added = backend.get_added_tokens_decoder()
    special = {number for number, token in added.items() if token.special and skip}
    return [i for i in ids if backend.id_to_token(i) is not None and i not in special]


def continuation(kind, prompt, ids, skip):
    """The text that the library decodes after the prompt. A prompt that ends inside a character
    gets a plain token, so the answer's bytes do not join it."""
    decode = kind.tokenizer.backend.decode
    last = shown(kind, prompt, skip)[-1:]
    if last and not kind.is_whole(last[0]):
        prompt = [*prompt, kind.plain]
    before = decode(prompt, skip_special_tokens=skip)
    whole = decode([*prompt, *ids], skip_special_tokens=skip)
    assert whole.startswith(before)
    return whole[len(before) :]


@pytest.mark.parametrize("number", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_streamed_text_is_the_text_decoded_at_once(kind, number):
    """Covers answers after a prompt too. Shown text is never taken back, so no piece ends inside a
    character, and a whole token is shown at once."""
    kind = KINDS[kind]
    for ids, prompt, skip in random_cases(kind, number):
        for before in ([], prompt):
            whole = continuation(kind, before, ids, skip)
            texts, _, end = stream(kind.tokenizer, ids, before, skip_special_tokens=skip)
            case = (
                [*map(kind.tokenizer.id_to_token, before)],
                [*map(kind.tokenizer.id_to_token, ids)],
            )
            assert end == whole, case
            for before_this, after in pairwise(["", *texts, end]):
                assert after.startswith(before_this), case
        for count in range(1, len(ids) + 1):
            if shown(kind, ids[count - 1 : count], skip) and kind.is_whole(ids[count - 1]):
                assert texts[count - 1] == continuation(kind, prompt, ids[:count], skip), case


def first_stop(text, stops):
    """The stop string that ends first, by definition; the longest of those that end together."""
    for end in range(len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return max(ended, key=len), end
    return None, len(text)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from(utf8("ab c€🙂") + ids_of(BYTES, *WORDS)), max_size=40),
    st.lists(st.text("ab c€🙂\ufffd", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
    st.integers(1, 5),
)
def test_stop_strings_are_found_where_they_are(ids, stops, keep, step):
    whole = BYTES.decode(ids)
    matched, end = first_stop(whole, stops)
    one = IncrementalDetokenizer(BYTES, [], SamplingParams(stop=tuple(stops), no_stop_trim=keep))
    for start in range(0, len(ids), step):
        one.push(ids[start : start + step])
        assert whole.startswith(one.text)
    text = one.finish()
    assert one._stops.matched == matched
    assert text == whole[: end if matched is None or keep else end - len(matched)]
    if len(stops) == 1 and matched is not None and not keep:
        assert len(text) == whole.find(stops[0])


@pytest.mark.parametrize("number", SIZES)
@pytest.mark.parametrize("kind", ["byte_fallback", "byte_level"])
def test_stop_strings_are_found_with_their_last_byte(kind, number):
    """The answer ends with the first token whose decoded text has a stop string, also in bytes that
    are held back."""
    kind, rng = KINDS[kind], random.Random(1)
    for ids, _, skip in random_cases(kind, number):
        whole = kind.tokenizer.backend.decode(ids, skip_special_tokens=skip).replace("\ufffd", "")
        cut = rng.randrange(len(whole)) if whole else 0
        stops = [whole[cut : cut + rng.randrange(1, 4)] or "\n", "A", "\n\n"]
        expected = None, len(ids), None
        for count in range(1, len(ids) + 1):
            text = kind.tokenizer.backend.decode(ids[:count], skip_special_tokens=skip)
            stop, end = first_stop(text, stops)
            if stop is not None:
                expected = stop, count, text[: end - len(stop)]
                break
        texts, matches, end = stream(kind.tokenizer, ids, skip_special_tokens=skip, stop=stops)
        found = next((n for n, match in enumerate(matches, 1) if match), len(ids))
        case = stops, [*map(kind.tokenizer.id_to_token, ids)]
        assert (matches[-1] if matches else None, found) == expected[:2], case
        if expected[2] is not None:
            assert end == expected[2], case
        assert all(end.startswith(text) for text in texts), case


@pytest.mark.parametrize(
    ("ids", "texts"),
    [
        (utf8("é!"), ["", "é", "é!"]),
        (utf8("🙂"), ["", "", "", "🙂"]),
        (ids_of(BYTES, "aâ", "Ĥ¬b"), ["a", "a€b"]),
        (ids_of(BYTES, "ðŁ", "a"), ["", "\ufffda"]),
        (ids_of(BYTES, "ðŁĻĤ", "</s>", "abc"), ["🙂", "🙂", "🙂abc"]),
        (ids_of(BYTES, "ï¿½", "abc"), ["\ufffd", "\ufffdabc"]),
    ],
    ids=str,
)
def test_no_unfinished_character_is_shown(ids, texts):
    assert stream(BYTES, ids)[0] == texts


def test_broken_end_is_flushed():
    texts, _, end = stream(BYTES, utf8("a🙂")[:-1])
    assert texts == ["a"] * 4
    assert end == "a\ufffd"


HELLO, WORLD, LO, X = ids_of(FALLBACK, "▁Hello", "▁world", "lo", "x")
EURO = raw(0xE2, 0x82, 0xAC)


@pytest.mark.parametrize(
    ("prompt", "ids", "end"),
    [
        ([], [HELLO, WORLD], "Hello world"),
        ([X], [HELLO, WORLD], " Hello world"),
        ([0], [HELLO, LO], "Hellolo"),  # a text begins after BOS
        ([HELLO, 0, 1], [WORLD], " world"),
        ([HELLO], [1, WORLD, 1, WORLD], " world world"),
        ([HELLO], [*EURO, *EURO, WORLD], "€€ world"),
        ([X, *EURO], [*EURO, X], "€x"),
        (EURO * 6, EURO, "€"),
        ([X], [*raw(0x41, 0x42), *EURO], "AB€"),
        ([X], [*raw(0xE2), X], "\ufffdx"),
        ([X], raw(0xE2, 0x82), "\ufffd\ufffd"),
        ([X], raw(*"\ufffd日".encode()), "\ufffd日"),
        ([X], raw(*" 🙂".encode()), " 🙂"),
        ([], raw(*" 🙂".encode()), "🙂"),  # the first space of a text is left out
        ([X], [*raw(0xE2), 1, *raw(0x82, 0xAC)], "€"),
        (raw(0xFF), [HELLO], " Hello"),
        (raw(0xFF), [*EURO, X], "€x"),
        (raw(0xE2, 0x82), [*raw(0xAC), X], "\ufffdx"),
        (raw(0x0A) * 40, [WORLD], " world"),
    ],
    ids=str,
)
def test_spaces_and_byte_tokens(prompt, ids, end):
    texts, _, last = stream(FALLBACK, ids, prompt)
    assert last == end
    assert all(end.startswith(text) for text in texts)


def test_bytes_are_shown_when_their_run_ends():
    texts, _, _ = stream(FALLBACK, [*EURO, *EURO, WORLD, *EURO], [X])
    assert texts == [""] * 6 + ["€€ world"] * 4


@pytest.mark.parametrize(
    ("stops", "pieces", "matches", "end"),
    [
        (["END"], ["a", "E", "N", "x"], ["a", "a", "a", "aENx"], "aENx"),
        (["END"], ["aE", "ND"], ["a", "a"], "a"),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", "a"], "a"),
        (["abcd", "c"], ["a", "b", "c"], ["", "", "ab"], "ab"),
        (["bc", "c"], ["a", "b", "c"], ["a", "a", "a"], "a"),
        (["zz"], ["a", "z"], ["a", "a"], "az"),
    ],
    ids=str,
)
def test_start_of_a_stop_string_is_held_back(stops, pieces, matches, end):
    one = IncrementalDetokenizer(BYTES, [], SamplingParams(stop=tuple(stops)))
    texts = []
    for piece in pieces:
        one.push(utf8(piece))
        texts.append(one.text)
    assert texts == matches
    assert one.finish() == end


def test_after_a_match_nothing_more_is_taken():
    one = IncrementalDetokenizer(BYTES, [], SamplingParams(stop=("b",), no_stop_trim=True))
    assert one.push(utf8("abcdef")) == "b"
    assert one.push(utf8("xyz")) == "b"
    assert (one.text, one.finish(), one.finish(), one.text) == ("ab", "ab", "ab", "ab")


@pytest.mark.parametrize("piece", ["word ", "\u0301", "🙂"], ids=ascii)
@pytest.mark.parametrize("cut", [None, -1], ids=["whole", "broken"])
@pytest.mark.parametrize("ids", [utf8, lambda text: raw(*text.encode())], ids=["level", "fallback"])
def test_work_for_a_token_does_not_grow(monkeypatch, piece, cut, ids):
    tokenizer = BYTES if ids is utf8 else FALLBACK
    sizes, real = [], type(BYTES).decode.__get__(tokenizer)
    monkeypatch.setattr(
        tokenizer, "decode", lambda ids, **k: sizes.append(len(ids)) or real(ids, **k)
    )
    ids = ids(piece)[:cut] * 200
    text = stream(tokenizer, ids, stop=["never"])[2]
    assert text == real(ids)
    assert sum(sizes) < 4 * len(ids) + 600
