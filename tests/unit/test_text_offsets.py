"""`text_offset` of completions: a token's place in the returned text. The oracle is the
`tokenizers` library, which decodes the tokens before it."""

import random

import pytest
import tokenizers
from tokenizers import normalizers, processors

from moesaic.core.messages import RequestDelta
from moesaic.core.request import FinishReason, Request
from moesaic.core.sampling import SamplingParams
from moesaic.engine.frontend.inputs import GenerateInput
from moesaic.engine.frontend.outputs import RequestUpdate
from moesaic.engine.schedule.request_state import RequestState
from moesaic.engine.text.detokenizer import IncrementalDetokenizer
from moesaic.engine.text.tokenizer import Tokenizer
from moesaic.server.openai.completions import CompletionAnswer, PreparedCompletion
from moesaic.server.openai.logprobs import VocabularyTexts
from tests.unit.test_detokenizer import SIZES, continuation, ids_of, raw, shown
from tests.unit.token_texts import KINDS, random_cases

FALLBACK = KINDS["byte_fallback"].tokenizer


def answer(tokenizer, prompt, ids, echo=None, interval=1, **params):
    """The text and the offsets of a completion, from all chunks of its stream."""
    request = Request("r", list(prompt), SamplingParams.from_dict(params), 0, 9999, 0)
    request.token_ids = [*prompt]
    request.input_logprobs = [-1.0] * (len(prompt) - 1)
    pieces = []
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, request.params)
    listener = lambda progress: pieces.append(RequestUpdate(0, progress, request))  # noqa: E731
    job = RequestState(request, detokenizer, listener, interval)
    for number, token in enumerate(ids):
        if job.accept_all(RequestDelta(0, [token], [-float(number)], [[]])):
            break
    job.finish(FinishReason("length"))
    prepared = PreparedCompletion(
        "r", GenerateInput(), 1, None if echo is None else [echo], VocabularyTexts(tokenizer)
    )
    choice = CompletionAnswer(prepared, 0)
    chunks = [chunk for piece in pieces for chunk in choice.chunks(piece)]
    offsets = [offset for chunk in chunks for offset in chunk.logprobs.text_offset]
    scores = [score for chunk in chunks for score in chunk.logprobs.token_logprobs]
    number = request.num_output
    assert scores[len(scores) - number :] == [-float(n) for n in range(number)]
    return "".join(chunk.text for chunk in chunks), offsets


def expected_offsets(kind, prompt, ids, skip):
    """The offsets of an answer's tokens; None for a piece of a character."""
    found = []
    for number, token in enumerate(ids):
        plain = shown(kind, [token], skip) and kind.is_whole(token)
        before = continuation(kind, prompt, ids[:number], skip) if plain else None
        found.append(None if before is None else len(before))
    return found


@pytest.mark.parametrize("number", SIZES)
@pytest.mark.parametrize(
    "kind", ["byte_level", "byte_fallback", "metaspace", "word_piece", "no_decoder"]
)
def test_a_token_is_where_the_text_before_it_ends(kind, number):
    kind, rng = KINDS[kind], random.Random(2)
    decode = kind.tokenizer.backend.decode
    for ids, prompt, skip in random_cases(kind, number):
        prompt, params = [*prompt, kind.plain], {"skip_special_tokens": skip}
        text, offsets = answer(kind.tokenizer, prompt, ids, **params)
        case = [*map(kind.tokenizer.id_to_token, prompt)], [*map(kind.tokenizer.id_to_token, ids)]
        assert text == continuation(kind, prompt, ids, skip), case
        for offset, right in zip(offsets, expected_offsets(kind, prompt, ids, skip), strict=True):
            assert offset == right or right is None, case
        assert offsets == sorted(offsets) and max(offsets, default=0) <= len(text), case

        echo = decode(prompt, skip_special_tokens=False)
        interval = rng.choice([1, 3, None])
        whole, echoed = answer(kind.tokenizer, prompt, ids, echo, interval, **params)
        assert whole == echo + text, case
        assert echoed[len(prompt) :] == [len(echo) + offset for offset in offsets], case
        in_prompt = expected_offsets(kind, [], prompt, False)
        for offset, right in zip(echoed, in_prompt, strict=False):
            assert offset == right or right is None, case


E = raw(0xE2, 0x82, 0xAC)
LEVEL = KINDS["byte_level"].tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "ids", "text", "offsets"),
    [
        (FALLBACK, [*E, *ids_of(FALLBACK, "x")], "€x", [0, 0, 0, 1]),
        (FALLBACK, [*raw(0x41), *E], "A€", [0, 1, 1, 1]),
        (FALLBACK, [*raw(0xFF), *E, *ids_of(FALLBACK, "x")], "\ufffd" * 4 + "x", [0, 1, 2, 3, 4]),
        (FALLBACK, ids_of(FALLBACK, "▁", "▁Hello"), "  Hello", [0, 1]),
        (FALLBACK, [*E[:1], 1, *E[1:], 1], "€", [0, 0, 0, 0, 1]),
        (LEVEL, ids_of(LEVEL, "ðŁ", "abc", "x"), "\ufffdabcx", [0, 1, 4]),
        (LEVEL, ids_of(LEVEL, "ðŁ", "ĻĤ", "x"), "🙂x", [0, 0, 1]),
        (LEVEL, ids_of(LEVEL, "aâ", "Ĥ¬â", "Ĥ¬b", "x"), "a€€bx", [0, 1, 2, 4]),
        (LEVEL, ids_of(LEVEL, "ðŁ", "ðŁ", "x"), "\ufffd\ufffdx", [0, 1, 2]),
        (LEVEL, ids_of(LEVEL, "í", "ł", "x"), "\ufffd\ufffdx", [0, 1, 2]),  # half a surrogate
    ],
)
def test_pieces_of_characters(tokenizer, ids, text, offsets):
    prompt = ids_of(tokenizer, "x")
    assert answer(tokenizer, prompt, ids) == (text, offsets)
    assert answer(tokenizer, prompt, ids, "x", None) == ("x" + text, [0, *(o + 1 for o in offsets)])


@pytest.fixture(scope="module")
def sentencepiece():
    """Like Mixtral's tokenizer: adds a space before every text, also after a special token."""
    backend = tokenizers.Tokenizer.from_str(FALLBACK.backend.to_str())
    parts = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(parts)
    frame = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.post_processor = frame
    return Tokenizer(backend, {}, frozenset(), {})


@pytest.mark.parametrize(
    ("text", "offsets"),
    [
        ("x", None),
        ("x b", None),
        ("  x", None),
        ("xyz a", None),
        ("🙂 x", [0, 0, 0, 0, 0, 0, 1]),
        ("x\u0301日", [0, 0, 1, 1, 2]),
        ("a</s>b</s>xy", [0, 0, 0, 1, 5, 5, 6, 10, 11]),
    ],
)
def test_prompts_of_sentencepiece(sentencepiece, text, offsets):
    prompt = sentencepiece.encode(text)
    if offsets is None:
        offsets = [len(sentencepiece.decode(prompt[:n])) for n in range(len(prompt))]
    whole, found = answer(sentencepiece, prompt, ids_of(sentencepiece, "▁world"), text)
    assert (whole, found) == (text + " world", [*offsets, len(text)])


def test_the_chosen_token_has_its_own_logprob():
    """The chosen token's logprob is right even if a more likely token has the same text."""
    request = Request("r", ids_of(FALLBACK, "x"), SamplingParams(), 0, 9, 0)
    request.token_ids = [*request.prompt_ids, E[0]]
    request.output_logprobs, request.output_top_logprobs = [-3.0], [[(-0.1, E[1])]]
    pieces = []
    job = RequestState(
        request, None, lambda progress: pieces.append(RequestUpdate(0, progress, request))
    )
    job.finish(FinishReason("length"))
    prepared = PreparedCompletion("r", GenerateInput(), 1, None, VocabularyTexts(FALLBACK))
    (logprobs,) = (CompletionAnswer(prepared, 0).whole(piece).logprobs for piece in pieces)
    assert (logprobs.token_logprobs, logprobs.top_logprobs) == ([-3.0], [{"\ufffd": -3.0}])
