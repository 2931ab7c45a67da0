"""Streaming text equals text decoded at once, whatever the tokens and the stop strings."""

from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from moesaic.core.sampling import SamplingParams
from moesaic.engine import detokenizer as module
from moesaic.engine.detokenizer import IncrementalDetokenizer
from moesaic.engine.tokenizer import Tokenizer

WORDS = ["Ġthe", "Ġstop", "ab", "abc", "ĊĊ", "ðŁ", "ĻĤ", "ðŁĻĤ", "ĠÃ", "aâ", "Ĥ¬b", "ï¿½"]


def wrap(backend):
    return Tokenizer(backend, {}, frozenset(), {})


def byte_level():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {name: number for number, name in enumerate([*alphabet, *WORDS])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return wrap(backend)


def byte_fallback():
    words = ["▁", "▁Hello", "▁world", "lo", *"abcdxyz"]
    names = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {name: number for number, name in enumerate(names)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["<s>", "</s>"])
    return wrap(backend)


BYTES, FALLBACK = byte_level(), byte_fallback()


def ids_of(tokenizer, *tokens):
    return [tokenizer.backend.token_to_id(token) for token in tokens]


def raw(*values):
    """Byte-fallback tokens."""
    return ids_of(FALLBACK, *(f"<0x{value:02X}>" for value in values))


def utf8(text):
    """One byte-level token for each byte."""
    return [i for char in text for i in BYTES.encode(char, add_special_tokens=False)]


def stream(tokenizer, ids, prompt=(), **params):
    """Texts after each token, what each push returned, and the end."""
    one = IncrementalDetokenizer(tokenizer, list(prompt), SamplingParams.from_dict(params))
    texts, matches = [], []
    for token_id in ids:
        matches.append(one.push([token_id]))
        texts.append(one.text)
    return texts, matches, one.finish()


token_lists = st.lists(st.integers(0, BYTES.vocab_size - 1), max_size=60)
garbage = st.lists(st.sampled_from(utf8("🙂€é") + ids_of(BYTES, *WORDS)), max_size=60)


@settings(max_examples=300, deadline=None)
@given(st.one_of(token_lists, garbage), st.booleans())
def test_streamed_text_is_the_text_decoded_at_once(ids, skip):
    whole = BYTES.decode(ids, skip_special_tokens=skip)
    texts, _, end = stream(BYTES, ids, skip_special_tokens=skip)
    assert end == whole
    for before, after in pairwise([*texts, end]):
        assert after.startswith(before)


def first_stop(text, stops):
    """By definition: the stop that ends first, the longest of those that end together."""
    for end in range(len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return max(ended, key=len), end
    return None, len(text)


@settings(max_examples=300, deadline=None)
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
    assert one.matched == matched
    assert text == whole[: end if matched is None or keep else end - len(matched)]
    if len(stops) == 1 and matched is not None and not keep:
        assert len(text) == whole.find(stops[0])


@pytest.mark.parametrize(
    ("ids", "texts"),
    [
        (utf8("é!"), ["", "é", "é!"]),
        (utf8("🙂"), ["", "", "", "🙂"]),
        (ids_of(BYTES, "aâ", "Ĥ¬b"), ["a", "a€b"]),
        (ids_of(BYTES, "ðŁ", "a"), ["", "\ufffda"]),
        (ids_of(BYTES, "ðŁĻĤ", "<eos>", "ab"), ["🙂", "🙂", "🙂ab"]),
        (ids_of(BYTES, "ï¿½", "ab"), ["", "\ufffdab"]),
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
        ([0], [HELLO, LO], "Hellolo"),  # after BOS alone a text begins
        ([HELLO, 0, 1], [WORLD], " world"),
        ([HELLO], [1, WORLD, 1, WORLD], " world world"),
        ([HELLO], [*EURO, *EURO, WORLD], "€€ world"),
        ([X, *EURO], [*EURO, X], "€x"),
        (EURO * 6, EURO, "€"),
        ([X], [*raw(0x41, 0x42), *EURO], "AB€"),
        ([X], [*raw(0xE2), X], "\ufffdx"),
        ([X], raw(0xE2, 0x82), "\ufffd\ufffd"),
    ],
    ids=str,
)
def test_spaces_and_byte_tokens(prompt, ids, end):
    texts, _, last = stream(FALLBACK, ids, prompt)
    assert last == end
    assert all(end.startswith(text) for text in texts)


def test_byte_tokens_are_shown_as_soon_as_they_make_a_character():
    texts, _, _ = stream(FALLBACK, EURO * 2, [X])
    assert texts == ["", "", "€", "€", "€", "€€"]


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
def test_work_for_a_token_does_not_grow(monkeypatch, piece, cut):
    sizes = []
    monkeypatch.setattr(BYTES, "decode", lambda ids, **k: sizes.append(len(ids)) or real(ids, **k))
    real = type(BYTES).decode.__get__(BYTES)
    ids = utf8(piece)[:cut] * 200
    text = stream(BYTES, ids)[2]
    assert text == real(ids)
    assert max(sizes) <= 2 * module.MAX_PENDING + 2
    assert sum(sizes) < 40 * len(ids)
