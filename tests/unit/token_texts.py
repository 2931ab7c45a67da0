"""Tokenizers with every kind of decoder that checkpoints have, and random tokens for them."""

import random
from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from moesaic.engine.text.tokenizer import Tokenizer

BYTE_NAMES = [f"<0x{byte:02X}>" for byte in range(256)]
CHARS = "\ufffd日🙂é€ \n.aA\u2028\u0301\U0010ffff"
# Invalid UTF-8: cut off, overlong, a surrogate, beyond the last character, only continuation bytes.
BROKEN_BYTES = [
    b"\xe6\x97",
    b"\xf0\x9f\x99",
    b"\xc0\x80",
    b"\xed\xa0\x80",
    b"\xf5\x80",
    b"\xbf\xff",
]


@dataclass(frozen=True)
class Kind:
    """`pieces`: ids of whole and broken characters; `plain`: a token with the same text
    everywhere."""

    tokenizer: Tokenizer
    pieces: list[list[int]]
    plain: int

    def is_whole(self, token_id):
        """Whether a token is a text by itself, and not a byte or a piece of a character."""
        text = self.tokenizer.backend.decode([token_id], skip_special_tokens=False)
        name = self.tokenizer.backend.id_to_token(token_id)
        return (
            name is not None and name not in BYTE_NAMES and (name == text or "\ufffd" not in text)
        )

    def random_ids(self, rng, most=24):
        """Draws words, whole and broken characters in bytes, special tokens and unknown ids."""
        size = self.tokenizer.vocab_size
        ids = []
        while len(ids) < most:
            choice = rng.random()
            if choice < 0.5 and self.pieces:
                piece = rng.choice(self.pieces)
                at = rng.randrange(len(piece)) if rng.random() < 0.2 else len(piece)
                ids += piece[:at] if rng.random() < 0.5 else piece[len(piece) - at :]
            elif choice < 0.6:
                ids.append(rng.choice([size, size + 7, 0, 1, self.plain]))
            elif choice < 0.9:
                # Words and added tokens have the highest ids.
                ids.append(rng.randrange(max(0, size - 24), size))
            else:
                ids.append(rng.randrange(size))
        return ids[: rng.randrange(most + 1)]


def _kind(model, decoder, by_byte=None):
    backend = tokenizers.Tokenizer(model)
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(["<tool>", AddedToken("日本", special=False), " two words", "é", "\ufffd"])
    backend.add_special_tokens(["<|späť|>"])
    ids = backend.get_vocab(with_added_tokens=True)
    runs = [] if by_byte is None else [*map(str.encode, CHARS), *BROKEN_BYTES]
    pieces = [[ids[by_byte(byte)] for byte in run] for run in runs]
    return Kind(Tokenizer(backend, {}, frozenset(), {}), pieces, ids["x"])


def _vocab(*names):
    return {name: number for number, name in enumerate(["<s>", "</s>", *names])}


def byte_level():
    """The kind of Qwen, DeepSeek, gpt-oss, Llama 3 and converted tiktoken vocabularies."""
    words = ["Ġthe", "abc", "ĊĊ", "ðŁ", "ĻĤ", "ðŁĻĤ", "ĠÃ", "aâ", "Ĥ¬b", "Ĥ¬â", "ï¿½"]
    alphabet = _byte_chars()
    vocab = _vocab(*alphabet, *words)
    model = models.BPE(vocab, [])
    return _kind(model, decoders.ByteLevel(), alphabet.__getitem__)


def _byte_chars():
    """The character for each byte, as the library itself writes it."""
    encode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found = {}
    for point in (*range(0x80), *range(0x80, 0x800, 0x40), *range(0x80, 0xC0)):
        text = chr(point)
        found |= dict(zip(text.encode(), encode.pre_tokenize_str(text)[0][0], strict=True))
    # The alphabet also has the bytes that never occur in UTF-8.
    for byte in range(256):
        if byte not in found:
            found[byte] = chr(byte)
    assert set(found.values()) == set(pre_tokenizers.ByteLevel.alphabet())
    return [found[byte] for byte in range(256)]


WORDS = ["▁", "▁▁", "▁Hello", "▁world", "▁x", "lo", "日", "▁日", "\ufffd", "\n", *"abcxyz"]


def _fallback(*more):
    """Byte fallback as in Llama and Mixtral (with Strip) and Gemma (without)."""
    model = models.BPE(_vocab(*BYTE_NAMES, *WORDS), [("▁", "x")], byte_fallback=True)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *more]
    return _kind(model, decoders.Sequence(parts), BYTE_NAMES.__getitem__)


def metaspace(scheme="always"):
    decoder = decoders.Metaspace(prepend_scheme=scheme)
    return _kind(models.BPE(_vocab(*WORDS), []), decoder)


def word_piece():
    words = ["hello", "##lo", "##x", ".", "n't", "'s", "##日", "x", "日"]
    model = models.WordPiece(_vocab(*words, "[UNK]"), unk_token="[UNK]")
    return _kind(model, decoders.WordPiece(prefix="##", cleanup=True))


def word_ends():
    model = models.BPE(_vocab("he", "llo</w>", "x</w>", "x", "日</w>", "日"), [])
    return _kind(model, decoders.BPEDecoder(suffix="</w>"))


def no_decoder():
    return _kind(models.BPE(_vocab("he", "llo", "x", "日"), []), None)


KINDS = {
    "byte_level": byte_level(),
    "byte_fallback": _fallback(decoders.Strip(" ", 1, 0)),
    "byte_fallback_unstripped": _fallback(),
    "metaspace": metaspace(),
    "metaspace_never": metaspace("never"),
    "word_piece": word_piece(),
    "word_ends": word_ends(),
    "no_decoder": no_decoder(),
}


def random_cases(kind, number):
    """Yields `number` cases: tokens, a prompt before them, whether special tokens are skipped."""
    rng = random.Random(0)
    for _ in range(number):
        yield kind.random_ids(rng), kind.random_ids(rng, 8), rng.random() < 0.5
