"""The index of n-grams finds what a search through all tokens finds, within its bounds."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from moesaic.core.request import Request, RequestPhase
from moesaic.core.sampling import SamplingParams
from moesaic.engine.speculate.ngram import END_EVERY, INDEXED_A_STEP, NgramDrafter
from moesaic.engine.speculate.ngram_index import CONTEXT, MOST_PLACES, NgramIndex


def longest(tokens: list[int], others: list[list[int]], depth: int) -> int:
    """The length of the longest end of `tokens` that some token follows elsewhere; 0 if it is
    shorter than a context."""
    for length in range(min(depth, len(tokens)), CONTEXT - 1, -1):
        end = tokens[-length:]
        for other in others:
            for at in range(length, len(other)):
                if other[at - length : at] == end:
                    return length
    return 0


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_match_is_found(seed: int) -> None:
    """Of texts with so few repetitions that a search looks at all of them."""
    chance = random.Random(seed)
    index, depth = NgramIndex(10**6, depth=chance.choice((3, 5, 18))), 0
    depth = index.depth
    texts = [[chance.randrange(6) for _ in range(chance.randrange(40))] for _ in range(4)]
    for number, text in enumerate(texts):
        index.begin(number, text)
    for _ in range(30):
        chosen = chance.randrange(4)
        texts[chosen].append(chance.randrange(6))
        for number in range(4):
            index.extend(number, 10**6)
        text = texts[chosen]
        places = sum(t[n - 3 : n] == text[-3:] for t in texts for n in range(3, len(t)))
        found = index.find(text, "", frequent=False)
        expected = longest(text, texts, depth)
        if places > MOST_PLACES:
            continue
        assert (0 if found is None else found.length) == expected
        if found is not None:
            assert (
                list(found.tokens[found.position - expected : found.position]) == text[-expected:]
            )


def test_the_newest_or_the_most_frequent_continuation() -> None:
    index = NgramIndex(100, 8)
    text = [1, 2, 3, 7, 1, 2, 3, 7, 1, 2, 3, 9, 1, 2, 3]
    index.begin(0, text)
    assert index.extend(0, 100) == 12
    newest, frequent = (index.find(text, "", frequent=some) for some in (False, True))
    assert newest is not None and text[newest.position] == 9
    assert frequent is not None and text[frequent.position] == 7 and frequent.length == 3
    assert index.find(text, "other", False) is None and index.find([1, 2], "", False) is None


def test_namespaces_share_nothing() -> None:
    index = NgramIndex(100, 8)
    for number, name in enumerate(("a", "b")):
        index.begin(number, [number, 2, 3, 4, 5, number + 6], name)
        index.extend(number, 100)
    for name, token in (("a", 6), ("b", 7)):
        found = index.find([3, 4, 5], name, False)
        assert found is not None and found.tokens[found.position] == token


def test_ended_sequences_leave_when_others_need_their_room() -> None:
    chance = random.Random(3)
    index = NgramIndex(capacity=300, depth=8)
    texts = []
    for number in range(20):
        texts.append([chance.randrange(1000) for _ in range(50)])
        index.begin(number, texts[-1])
        index.extend(number, 100)
        index.end(number)
        assert index.num_tokens <= 300
    kept = [n for n, text in enumerate(texts) if index.find(text[:-1], "", False) is not None]
    assert kept == list(range(14, 20)) and list(index._sequences) == kept
    chains = sum(map(len, index._chains.values()))
    assert chains <= index.num_tokens == 6 * 47
    index.begin(99, [5] * 400)  # a live one stays, whatever it takes
    index.extend(99, 1000)
    assert index.num_tokens == 397 and list(index._sequences) == [99]


def request(number: int, tokens: list[int], **given: object) -> Request:
    return Request(str(number), tokens, SamplingParams(), number, 99, number, **given)


def test_drafts_repeat_what_they_propose() -> None:
    """A text of period 4, whose last occurrence ends before there are enough drafts."""
    drafter = NgramDrafter(NgramIndex(1000, 18), num_drafts=11)
    one = request(0, [1, 2, 3, 4] * 3 + [1, 2])
    drafter.propose([one])
    assert one.drafts == [3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1]
    one.token_ids.append(7)
    drafter.propose([one])
    assert one.drafts == []


def test_short_matches_propose_little() -> None:
    drafter = NgramDrafter(NgramIndex(1000, 18), num_drafts=11)
    for length, drafts in ((3, 2), (4, 4), (7, 10), (8, 11)):
        stem = list(range(100 * length, 100 * length + length))
        one = request(length, [1000 + length, *stem, *range(50, 70), 2000 + length, *stem])
        drafter.propose([one])
        assert one.drafts == list(range(50, 50 + drafts))


def test_requests_draft_from_others_also_after_their_end() -> None:
    drafter = NgramDrafter(NgramIndex(1000, 18), num_drafts=4)
    text = list(range(20))
    first, other = request(0, text), request(1, text[:8])
    drafter.propose([first])
    first.phase = RequestPhase.FINISHED
    for _ in range(END_EVERY):
        drafter.propose([])
    drafter.propose([other])
    assert other.drafts == [8, 9, 10, 11]
    assert list(drafter._open) == [other]
    apart = request(2, text[:8], cache_namespace="x")
    drafter.propose([apart])
    assert apart.drafts == []


def test_a_request_that_comes_again_is_read_anew() -> None:
    """With the number that it had on the rank that was lost, and with what it has said since."""
    drafter = NgramDrafter(NgramIndex(1000, 18), num_drafts=4)
    before = request(0, [1, 2, 3, 4])
    drafter.propose([before])
    before.phase = RequestPhase.FINISHED
    again = request(0, [1, 2, 3, 4, 5, 6, 7, 1, 2, 3])
    drafter.propose([again])
    assert again.drafts == [4, 5]


def test_long_prompts_take_several_steps() -> None:
    drafter = NgramDrafter(NgramIndex(10**6, 18), num_drafts=4)
    requests = [request(n, list(range(INDEXED_A_STEP))) for n in range(2)]
    counts = Counter[int]()
    for step in range(3):
        drafter.propose(requests)
        counts[step] = drafter.index.num_tokens
    whole = 2 * (INDEXED_A_STEP - CONTEXT)
    assert counts[0] == INDEXED_A_STEP and counts[1] == counts[2] == whole
