"""Tokens that are counted as they come give what counting all of them gives."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch

from moesaic.core.sampling import SamplingParams
from moesaic.engine.sampling.adjust import adjust
from moesaic.engine.sampling.sampler import SampleRow
from moesaic.engine.sampling.token_history import OutputTokens, TokenHistory

PARAMS = SamplingParams(
    repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.1, min_new_tokens=9
)


def check(tokens: OutputTokens, prompt: list[int], answer: list[int]) -> None:
    ids, amounts = tokens.penalties()
    count = Counter(answer)
    assert sorted(ids.tolist()) == sorted({*prompt, *answer})
    right = [0.3 * count[token] + 0.1 if count[token] else 0.0 for token in ids.tolist()]
    assert amounts.tolist() == np.array(right, np.float32).tolist()
    assert [*tokens] == answer and len(tokens) == len(answer)
    assert tokens.too_short == (len(answer) < 9)


@pytest.mark.parametrize("seed", range(5))
def test_counts_grow_with_the_answer(seed: int) -> None:
    chance = random.Random(seed)
    prompt = [chance.randrange(50) for _ in range(chance.randrange(30))]
    ids = [*prompt]
    history = TokenHistory(PARAMS, frozenset(), ids, len(prompt))
    before = history.outputs()
    for _ in range(40):
        ids += [chance.randrange(200) for _ in range(chance.choice([0, 1, 1, 1, 4]))]
        answer = ids[len(prompt) :]
        check(history.outputs(), prompt, answer)
        drafts = [chance.randrange(200) for _ in range(chance.randrange(4))]
        drafts += [chance.choice([*answer, *prompt, 7])]
        check(history.outputs().then(drafts[:1]).then(drafts[1:]), prompt, [*answer, *drafts])
        check(history.outputs(), prompt, answer)
    check(before, prompt, [])  # an earlier point, after later ones were counted
    check(history.outputs(), prompt, answer)


def test_a_part_of_the_answer() -> None:
    history = TokenHistory(PARAMS, frozenset(), [1, 2, 3, 4, 5], 2)
    tokens = history.outputs()
    history.ids.append(6)
    assert tokens[1:] == [4, 5] and tokens[5:] == [] and tokens[:2] == [3, 4]
    assert tokens[-1] == 5 and tokens[::2] == [3, 5] and tokens.then([9])[1:] == [4, 5, 9]
    assert history.outputs()[3:] == [6]


def test_the_prompt_counts_for_the_repetition_penalty_alone() -> None:
    params = SamplingParams(frequency_penalty=0.5)
    history = TokenHistory(params, frozenset(), [1, 1, 2, 3], 3)
    ids, amounts = history.outputs().penalties()
    assert (ids.tolist(), amounts.tolist()) == ([3], [0.5])


def test_a_history_adjusts_as_its_tokens_do() -> None:
    """Beside rows without parameters, and with tokens that the vocabulary lacks."""
    prompt, answer, eos = [5, 6, 900], [5, 7, 7], frozenset([3, 901])
    history = TokenHistory(PARAMS, eos, [*prompt, *answer], 3)
    plain = SampleRow(SamplingParams(), 0, 0)
    rows = [
        plain,
        SampleRow(PARAMS, 0, 0, prompt, history.outputs(), eos),
        SampleRow(PARAMS, 0, 0, prompt, answer, eos),
    ]
    logits = torch.randn(1, 40).expand(3, -1)
    found = adjust(logits, rows)
    assert torch.equal(found[1], found[2]) and torch.equal(found[0], logits[0])
    assert (found[1] != logits[0]).nonzero()[:, 0].tolist() == [3, 5, 6, 7]
    assert torch.equal(adjust(logits[:0], []), logits[:0]) and adjust(logits, [plain] * 3) is logits
