"""Plans and sums of rows in C against their torch twins."""

from __future__ import annotations

import pytest
import torch

from moesaic.kernels.cpu import rows
from moesaic.kernels.cpu.rows import GatheredTokens, Terms

pytestmark = pytest.mark.skipif(rows.library() is None, reason="there is no C compiler")
LANES, CAP = 2, 70


def make_tokens(
    counts: list[int], rank: int, groups: int, slots: int, top_k: int
) -> GatheredTokens:
    """Tokens of one lane of two, behind which lies garbage."""
    generator = torch.Generator().manual_seed(sum(counts) + rank)
    ids = torch.full((len(counts), LANES, CAP, top_k), 10**6, dtype=torch.int32)
    weights = torch.full(ids.shape, torch.nan)
    for p, count in enumerate(counts):
        chosen = torch.rand(count, groups * slots, generator=generator).topk(top_k, dim=1).indices
        masked = torch.rand(count, top_k, generator=generator) < 0.2
        ids[p, 1, :count] = chosen.masked_fill(masked, -1).int()
        weights[p, 1, :count] = torch.rand(count, top_k, generator=generator)
    ranks_a_group = len(counts) // groups
    return GatheredTokens(
        ids[:, 1], weights[:, 1], counts, rank, slots, groups, rank // ranks_a_group
    )


CASES = [
    ([5, 0, 70, 1], 2, 4, 3, 4),
    ([0, 0, 0], 1, 3, 2, 2),
    ([63, 7, 9, 1], 1, 2, 5, 3),
    ([12], 0, 1, 6, 6),
]


@pytest.mark.parametrize("counts, rank, groups, slots, top_k", CASES)
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("everywhere", [False, True])
def test_plan_of_rows(
    counts: list[int],
    rank: int,
    groups: int,
    slots: int,
    top_k: int,
    pairs: bool,
    everywhere: bool,
) -> None:
    tokens = make_tokens(counts, rank, groups, slots, top_k)
    starts = list(range(3, 3 + groups))
    plan = rows.plan_rows(tokens, starts, pairs, everywhere)
    twin = rows.reference_plan_rows(tokens, starts, pairs, everywhere)
    for name in ("rows_R", "ids_RK", "weights_RK", "places_TS"):
        assert torch.equal(getattr(plan, name), getattr(twin, name)), name
    assert (plan.ends, plan.own) == (twin.ends, twin.own)


@pytest.mark.parametrize("counts, rank, groups, slots, top_k", CASES)
def test_plan_of_pairs(counts: list[int], rank: int, groups: int, slots: int, top_k: int) -> None:
    tokens = make_tokens(counts, rank, groups, slots, top_k)
    plan, twin = rows.plan_pairs(tokens), rows.reference_plan_pairs(tokens)
    assert torch.equal(plan.rows_R, twin.rows_R)
    assert torch.equal(plan.places_TK, twin.places_TK)
    assert (plan.filled, plan.own) == (twin.filled, twin.own)


def test_examples_of_the_docstrings() -> None:
    ids = torch.tensor([[[0], [1]], [[0], [1]]], dtype=torch.int32)
    plan = rows.plan_rows(
        GatheredTokens(ids, ids.float(), [2, 2], 0, 1, 2, 0), [0, 0], False, False
    )
    assert plan.rows_R.tolist() == [0, 2]
    assert plan.places_TS.tolist() == [[0, -1], [-1, 0]]
    assert plan.ends == [2, 2]
    ids = torch.tensor([[[0, 2]], [[0, 1]]], dtype=torch.int32)
    pairs = rows.plan_pairs(GatheredTokens(ids, ids.float(), [1, 1], 0, 2, 2, 0))
    assert pairs.rows_R.tolist() == [0, 1, 1]
    assert pairs.filled == [2, 1]
    assert pairs.places_TK.tolist() == [[0, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens, terms, hidden", [(0, 3, 8), (1, 1, 2049), (37, 4, 100)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("width", [1, 2])
def test_sum_of_rows(
    dtype: torch.dtype, tokens: int, terms: int, hidden: int, weighted: bool, width: int
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    owners, stride = 3, 11
    y = torch.randn(owners * width * stride, hidden, generator=generator).to(dtype)
    y[10] = torch.nan  # a row that no place names
    places = torch.randint(-1, 10, (tokens, terms), generator=generator)
    owner = torch.randint(0, owners, (tokens, terms), generator=generator)
    weights = torch.rand(tokens, terms, generator=generator) if weighted else None
    wanted = Terms(owner, places, weights)
    out, foreign = rows.sum_rows(y, wanted, stride, width, rank=1)
    expected = torch.zeros(tokens, hidden, dtype=torch.float64)
    others = 0
    for t in range(tokens):
        for s in range(terms):
            for w in range(width):
                rank = int(owner[t, s]) * width + w
                if places[t, s] >= 0:
                    scale = 1.0 if weights is None else float(weights[t, s])
                    expected[t] += scale * y[rank * stride + int(places[t, s])].double()
                    others += rank != 1
    assert foreign == others
    assert torch.allclose(out.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)
    twin, same = rows.reference_sum_rows(y, wanted, stride, width, rank=1)
    assert same == foreign
    assert torch.allclose(out.double(), twin.double(), rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_large_sums_are_split_over_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    y = torch.randn(50, 64)
    terms = Terms(None, torch.randint(-1, 50, (33, 5)), torch.rand(33, 5))
    alone = rows.sum_rows(y, terms)[0]
    monkeypatch.setattr(rows, "THREAD_ELEMENTS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert torch.equal(rows.sum_rows(y, terms)[0], alone)


def test_rounding_to_bfloat16_and_nan() -> None:
    y = torch.tensor([[1.0, 1.0, torch.nan], [2.0**-8, 2.0**-8 + 2.0**-9, 1.0]]).bfloat16()
    out, _ = rows.sum_rows(y, Terms(None, torch.tensor([[0, 1]]), None))
    assert out[0, :2].tolist() == [1.0, 1.0 + 2.0**-7]  # half a step goes to even, more goes up
    assert bool(out[0, 2].isnan())
