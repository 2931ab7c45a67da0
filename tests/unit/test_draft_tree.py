"""Trees of drafts against sets of ancestors, and the trees that NGRAM makes."""

from __future__ import annotations

import random

import pytest

from moesaic.core.draft_tree import (
    MOST_ROWS,
    behind,
    depths,
    is_chain,
    path_of,
    path_to,
    preorder,
    row_masks,
)
from moesaic.core.request import Request
from moesaic.core.sampling import SamplingParams
from moesaic.engine.speculate.ngram import Breadth, NgramDrafter
from moesaic.engine.speculate.ngram_index import NgramIndex


def test_the_example() -> None:
    parents = [0, 0, 2]
    assert depths(parents) == [0, 1, 1, 2] and row_masks(parents) == [-1, -1, -3, -5]
    assert path_to(parents, 3) == [2, 3] and preorder(parents, 3) == [1, 2, 3]
    assert path_of([11, 12, 13], parents, [12, 13, 9]) == [2, 3]
    assert path_of([11, 12, 13], parents, [12, 11]) == [2] and path_of([11], parents, [11]) == []
    assert [behind([11, 12, 13], parents, row) for row in range(4)] == [[11, 12], [], [13], []]
    assert [behind([11, 12], (), row) for row in range(3)] == [[11], [12], []]
    assert is_chain([]) and is_chain([0, 1, 2]) and not is_chain(parents)


@pytest.mark.parametrize("count", [0, 1, 5, MOST_ROWS - 1])
def test_rows_see_their_ancestors_and_all_before_the_tree(count: int) -> None:
    chance = random.Random(count)
    for _ in range(20):
        parents = [chance.randrange(row) for row in range(1, count + 1)]
        above = [{0}]
        for row, parent in enumerate(parents, 1):
            above.append(above[parent] | {row})
        for row, mask in enumerate(row_masks(parents)):
            assert -(1 << 63) <= mask < 1 << 63
            seen = {row - bit for bit in range(64) if mask >> bit & 1}
            assert {n for n in seen if n >= 0} == above[row]
            assert {n for n in seen if n < 0} == {*range(row - 63, 0)}
        assert depths(parents) == [len(some) - 1 for some in above]
        assert [{0, *path_to(parents, row)} for row in range(count + 1)] == above
        order = preorder(parents, count)
        assert sorted(order) == [*range(1, count + 1)]
        done = {0}
        for before, row in zip([0, *order], order, strict=False):
            assert parents[row - 1] in above[before] and parents[row - 1] in done
            done.add(row)
    chain = [*range(count)]
    assert row_masks(chain) == [-1] * (count + 1) and preorder((), count) == preorder(chain, count)
    assert path_to((), count) == path_to(chain, count)


def drafter_of(texts: list[list[int]], num_drafts: int, *given: object) -> NgramDrafter:
    index = NgramIndex(10**6, 18)
    for number, text in enumerate(texts):
        index.begin(1000 + number, text)
        index.extend(1000 + number, 10**6)
        index.end(1000 + number)
    return NgramDrafter(index, num_drafts, *given)


def proposed(drafter: NgramDrafter, tokens: list[int]) -> tuple[list[int], list[int]]:
    request = Request("0", tokens, SamplingParams(), 0, 64, 0)
    drafter.propose([request])
    return request.drafts, request.draft_parents


LONG = [7, 8, 9, 1, 2, 3]
TEXTS = [
    [5, 5, 1, 2, 3, 40, 41, 42, 43],
    [*LONG, 20, 21, 22, 23, 24, 25, 26, 27, 28],
    [6, 9, 1, 2, 3, 30, 31, 32, 33],
]


def test_a_single_match_is_a_chain_as_without_trees() -> None:
    for text in TEXTS:
        drafts, parents = proposed(drafter_of([text], 6, False, Breadth(1, 10)), LONG)
        assert (drafts, []) == proposed(drafter_of([text], 6), LONG) and is_chain(parents)
        assert drafts == text[text.index(3) + 1 :][: len(drafts)]
    assert proposed(drafter_of([[1, 2, 4]], 6, False, Breadth(1, 10)), LONG) == ([], [])


def test_several_matches_are_branches() -> None:
    """The longest match first, as far as it is likely; no token has two branches with the same."""
    drafts, parents = proposed(drafter_of(TEXTS, 8, False, Breadth(1, 10)), LONG)
    roots = [draft for draft, parent in zip(drafts, parents, strict=True) if parent == 0]
    assert roots[0] == drafts[0] == 20 and len(drafts) == 8
    assert set(roots) <= {20, 30, 40} and len(roots) >= 2
    for row, (draft, parent) in enumerate(zip(drafts, parents, strict=True), 1):
        assert parent < row and (parent == 0 or draft == drafts[parent - 1] + 1)
    # Each is a tree also where it is cut.
    for most in range(1, 8):
        fewer = proposed(drafter_of(TEXTS, most, False, Breadth(1, 10)), LONG)
        assert fewer == (drafts[:most], parents[:most])


def test_breadth_is_that_of_the_longest_match() -> None:
    equal = [[1, 2, 3, token, token + 1] for token in (20, 30, 40, 50)]
    for breadth, roots in ((Breadth(1, 10), 4), (Breadth(1, 3), 3), (Breadth(1, 1), 1)):
        drafts, parents = proposed(drafter_of(equal, 8, True, breadth), [1, 2, 3])
        assert sum(parent == 0 for parent in parents) == (roots if parents else 0)
        assert len({*drafts}) == len(drafts)
    deep = [*range(100, 118)]
    texts = [[*deep, token, 9, 9] for token in (20, 30)]
    drafts, parents = proposed(drafter_of(texts, 8, True, Breadth(1, 10)), deep)
    assert drafts == [20, 9, 9] or drafts == [30, 9, 9]
    assert parents == [], "as many tokens are known as are compared"
    drafts, parents = proposed(drafter_of(texts, 8, True, Breadth(2, 10)), deep)
    assert parents.count(0) == 2


def test_frequent_continuations_come_first() -> None:
    texts = [[1, 2, 3, 30, 5]] * 3 + [[1, 2, 3, 20, 6]]
    newest, _ = proposed(drafter_of(texts, 4, False, Breadth(1, 10)), [1, 2, 3])
    frequent, parents = proposed(drafter_of(texts, 4, True, Breadth(1, 10)), [1, 2, 3])
    assert newest[0] in (20, 30) and frequent[0] == 30 and 20 in frequent
    assert parents[frequent.index(20)] == 0


def test_a_match_in_the_request_goes_on_with_its_own_drafts() -> None:
    tokens = [1, 2, 3, 4] * 3
    drafts, parents = proposed(drafter_of([], 8, False, Breadth(1, 10)), tokens)
    assert drafts == [1, 2, 3, 4] * 2 and is_chain(parents)
