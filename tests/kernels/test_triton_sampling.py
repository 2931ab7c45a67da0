"""Sampling on the device: the same tokens as engine/sampling/sampler.py draws, without a wait."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from moesaic.core.sampling import SamplingParams
from moesaic.core.speculation import AcceptThresholds
from moesaic.engine.sampling.gpu_sampler import draw_rows
from moesaic.engine.sampling.sampler import NonFiniteLogits, SampleRow, sample
from moesaic.kernels import sampling as twins
from moesaic.kernels.sampling import OfferedDrafts, RowSampling, SampleParams
from moesaic.kernels.triton import sampling as kernels
from moesaic.kernels.triton.sampling_narrow import HELD
from tests.kernels.triton_cases import DEVICE, GPU

ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"top_k": 1},
    {},
    {"temperature": 1.7, "min_p": 0.1},
    {"temperature": 1e-5},
    {"temperature": 1e38},
    {"top_k": 5},
    {"top_k": 10**6, "temperature": 0.9},
    {"top_p": 0.9},
    {"top_p": 0.3, "temperature": 2.0, "min_p": 0.3},
    {"top_p": 0.999, "temperature": 5.0},
    {"top_p": 1e-9},
    {"top_k": 20, "top_p": 0.8, "temperature": 0.7},
    {"top_k": 200, "top_p": 0.95, "min_p": 0.02, "temperature": 1.3},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.5, "temperature": 1e30},
]


def rows_of(asked: list[dict[str, Any]], seed: int) -> list[SampleRow]:
    return [
        SampleRow(SamplingParams.from_dict(params), seed * 2**40 + n, 7 * n)
        for n, params in enumerate(asked)
    ]


def packed(rows: list[SampleRow]) -> SampleParams:
    draws = [
        RowSampling(
            min(row.params.temperature, twins.MAX_TEMPERATURE),
            row.params.top_k,
            row.params.top_p,
            row.params.min_p,
            row.seed,
            row.position,
        )
        for row in rows
    ]
    return SampleParams(SampleParams.pack(draws).values.to(DEVICE))


def scores(rows: int, vocab: int, kind: str) -> torch.Tensor:
    """`kind`: of a model sure of itself, of one that is not, or of few distinct numbers."""
    x = torch.randn(rows, vocab + 5, device=DEVICE)
    x = {"sharp": x * 6, "flat": x * 0.3, "tied": (x * 2).round() / 2}[kind]
    x[:, 3] = -torch.inf
    return x[:, :vocab]


def check(asked: list[dict[str, Any]], vocab: int, kind: str, seed: int) -> None:
    logits, rows = scores(len(asked), vocab, kind), rows_of(asked, seed)
    drawn = kernels.sample_rows(logits, packed(rows))
    assert drawn.dtype == torch.int64 and drawn[1].tolist() == [0] * len(rows)
    assert drawn[0].tolist() == sample(logits, rows).token_ids


def test_the_examples() -> None:
    logits = torch.tensor([[1.0, 3, 3], [0, math.nan, 0]])
    assert twins.greedy_rows(logits).tolist() == [[1, 1], [0, 1]]
    logits = torch.tensor([[0.0, math.log(3), 0.0]] * 3)
    draws = [
        RowSampling(1.0, seed=4),
        RowSampling(1.0, top_k=1, seed=4),
        RowSampling(1.0, top_p=0.5, seed=4),
    ]
    assert twins.uniform(4, 0) == pytest.approx(0.0686, abs=1e-4)
    params = SampleParams.pack(draws)
    assert params.any_top_p and not SampleParams.pack(draws[:2]).any_top_p
    assert twins.sample_rows(logits, params).tolist()[0] == [0, 1, 1]
    params = SampleParams.pack([RowSampling(1.0, seed=seed) for seed in (4, 0, 0)])
    for acc, wanted in ((1.0, [2, 1, 2]), (0.2, [2, 2, 2])):
        offered = OfferedDrafts.of([[2], [2], []], AcceptThresholds(1.0, acc), logits.device)
        assert twins.sample_rows(logits, params, offered).tolist()[0] == wanted


def offered_to(logits: torch.Tensor, width: int, thresholds: AcceptThresholds) -> OfferedDrafts:
    """Up to `width` drafts of each row among its likeliest tokens, and one that is forbidden."""
    best = logits.topk(min(8, logits.shape[1])).indices.tolist()
    drafts = [some[n % 3 :][: n % (width + 1)] for n, some in enumerate(best)]
    drafts = [[*some, 3] if n % 4 == 3 and 3 not in some else some for n, some in enumerate(drafts)]
    return OfferedDrafts.of(drafts, thresholds, logits.device)


THRESHOLDS = [AcceptThresholds(0.3, 1.0), AcceptThresholds(1.0, 0.4), AcceptThresholds(0.8, 0.9)]


@pytest.mark.parametrize("kind", ["sharp", "flat", "tied"])
def test_the_twin_takes_the_drafts_that_the_sampler_takes(kind: str) -> None:
    taken = 0
    for seed, thresholds in enumerate(THRESHOLDS):
        rows = rows_of(ASKED, seed)
        for vocab, width in ((50, 1), (700, 3)):
            logits = scores(len(ASKED), vocab, kind).cpu()
            offered = offered_to(logits, width, thresholds)
            params = SampleParams(packed(rows).values.cpu())
            found = twins.sample_rows(logits, params, offered)[0].tolist()
            assert found == sample(logits, rows, offered=offered).token_ids
            pairs = [*zip(found, offered.tokens_RD.tolist(), strict=True)]
            assert all(token != 3 for token, _ in pairs)
            taken += sum(token in drafts for token, drafts in pairs[2:])
    assert taken


@pytest.mark.parametrize(
    ("asked", "vocab", "kind", "width"),
    [
        ((2, 12), 300, "sharp", 2),
        pytest.param(range(16), 50, "sharp", 1, marks=pytest.mark.slow),
        pytest.param(range(16), 700, "flat", 3, marks=pytest.mark.slow),
        pytest.param((2, 6, 8, 12), 4500, "tied", 3, marks=pytest.mark.slow),
    ],
)
def test_the_kernel_takes_the_same_drafts(
    asked: range | tuple[int, ...], vocab: int, kind: str, width: int
) -> None:
    for seed, thresholds in enumerate(THRESHOLDS[:2]):
        rows = rows_of([ASKED[n] for n in asked], seed + 20)
        logits = scores(len(rows), vocab, kind)
        offered = offered_to(logits, width, thresholds)
        drawn = kernels.sample_rows(logits, packed(rows), offered)
        assert drawn[0].tolist() == sample(logits, rows, offered=offered).token_ids


@pytest.mark.parametrize("kind", ["sharp", "flat", "tied"])
def test_the_twin_draws_what_the_sampler_draws(kind: str) -> None:
    for seed in range(2):
        rows = rows_of(ASKED, seed)
        for vocab in (50, 700):
            logits = scores(len(ASKED), vocab, kind).cpu()
            drawn = twins.sample_rows(logits, SampleParams(packed(rows).values.cpu()))
            assert drawn[0].tolist() == sample(logits, rows).token_ids


def test_the_same_tokens_of_a_small_vocabulary() -> None:
    check([ASKED[n] for n in (2, 3, 9, 12)], 300, "sharp", 1)


def test_top_p_that_was_not_announced() -> None:
    logits, rows = scores(1, 300, "flat"), rows_of([{"top_p": 0.7}], 4)
    params = SampleParams(packed(rows).values, any_top_p=False)
    assert kernels.sample_rows(logits, params)[0].tolist() == sample(logits, rows).token_ids


def test_the_same_tokens_of_several_chunks() -> None:
    check([{"top_k": 30, "top_p": 0.9}], 4500, "sharp", 2)
    check([{"top_p": 0.9, "min_p": 0.2}], 4500, "flat", 3)


def narrowed_share(vocab: int, kind: str, top_ps: list[float]) -> float:
    """The share of rows whose lowest score kept is in a list; all their tokens must be right."""
    rows = rows_of([{"top_p": top_p} for top_p in top_ps], 8)
    logits, found = scores(len(rows), vocab, kind), []

    def narrow(*inputs: Any) -> Any:
        found.append((inputs[3].sum(1), real(*inputs)))
        return found[-1][1]

    real = kernels.narrow
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "narrow", narrow)
        assert (
            kernels.sample_rows(logits, packed(rows))[0].tolist() == sample(logits, rows).token_ids
        )
    total_R, out = found[0]
    above_R, within_R = out.above_R2C.sum(2).unbind(1)
    target_R = total_R * torch.tensor(top_ps, dtype=torch.float64, device=DEVICE)
    right_R = (above_R < target_R) & (within_R >= target_R)
    return (right_R & (out.count_R <= HELD.value)).float().mean().item()


def test_a_sample_tells_where_the_lowest_score_is() -> None:
    assert narrowed_share(20_000, "flat", [0.9]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sharp", "flat"])
def test_samples_of_a_real_vocabulary(kind: str) -> None:
    assert narrowed_share(151_936, kind, [0.1, 0.5, 0.8, 0.9, 0.95, 0.99]) == 1


@pytest.mark.slow
def test_more_equals_than_can_be_held() -> None:
    """More listed tokens than are held, and more blocks."""
    logits = torch.full((2, HELD.value + 300), 0.25, device=DEVICE)
    rows = rows_of([{"top_p": 0.4}, {"top_k": 3, "top_p": 0.9}], 6)
    drawn = kernels.sample_rows(logits, packed(rows))
    assert drawn[0].tolist() == sample(logits, rows).token_ids


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sharp", "flat", "tied"])
@pytest.mark.parametrize("vocab", [1, 129, 700, 9000])
def test_the_same_tokens(kind: str, vocab: int) -> None:
    for seed in range(3):
        check(ASKED, vocab, kind, seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_greedy_takes_the_first_of_equals(dtype: torch.dtype) -> None:
    logits = scores(4, 4300, "tied").to(dtype)
    best = logits.float().amax(1, keepdim=True)
    wanted = [row.nonzero()[0].item() for row in logits.float() == best]
    assert kernels.greedy_rows(logits).tolist() == [wanted, [0] * 4]
    assert kernels.greedy_rows(logits[:0]).shape == (2, 0)


def test_rows_without_a_token_are_marked() -> None:
    logits = scores(6, 200, "sharp")
    logits[0, 9], logits[1, 150], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, 1:] = -torch.inf
    logits[4, 77] = torch.nan
    rows = rows_of([{}, {"top_p": 0.5}, {"top_k": 3}, {"top_p": 0.5}, {"top_k": 1}, {}], 3)
    drawn = kernels.sample_rows(logits, packed(rows))
    assert drawn[1].tolist() == [1, 1, 1, 0, 1, 0]
    with pytest.raises(NonFiniteLogits) as error:
        sample(logits, rows)
    assert error.value.rows == (0, 1, 2, 4)
    assert int(drawn[0].min()) >= 0 and int(drawn[0].max()) < 200
    good = [3, 5]
    assert drawn[0, good].tolist() == sample(logits[good], [rows[n] for n in good]).token_ids
    assert kernels.greedy_rows(logits)[1].tolist() == [1, 1, 1, 0, 1, 0]


def test_the_engine_s_joint() -> None:
    """Through the sampler of the engine, on whatever device there is."""
    logits, rows = scores(len(ASKED), 300, "sharp"), rows_of(ASKED, 5)
    wanted = sample(logits, rows).token_ids
    drawn = draw_rows(logits, rows)
    assert drawn.device.type == DEVICE and drawn.tolist() == [wanted, [0] * len(rows)]
    logits[2, 5] = torch.nan
    broken = draw_rows(logits, rows)[1].tolist()
    assert [row for row, flag in enumerate(broken) if flag] == [2]
    greedy = [replace(row, params=SamplingParams(temperature=0.0)) for row in rows]
    assert int(draw_rows(logits, greedy)[0, 0]) == wanted[0]


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("kind", ["sharp", "flat", "tied"])
@pytest.mark.parametrize("vocab", [32_000, 151_936, 201_088])
def test_real_sizes(kind: str, vocab: int) -> None:
    for seed in range(4):
        check(ASKED * 4, vocab, kind, seed)
    logits = scores(256, vocab, kind).bfloat16()
    wanted = sample(logits, rows_of([{"temperature": 0.0}] * 256, 0)).token_ids
    assert kernels.greedy_rows(logits)[0].tolist() == wanted


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("kind", ["sharp", "flat"])
def test_samples_of_many_rows(kind: str) -> None:
    """A guess may fail, but by chance alone."""
    assert narrowed_share(151_936, kind, [0.5, 0.8, 0.9, 0.95] * 64) > 0.99


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_a_graph_draws_anew_each_time() -> None:
    vocab = 151_936
    logits, params = scores(len(ASKED), vocab, "flat"), packed(rows_of(ASKED, 0))
    kernels.sample_rows(logits, params)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn_2R = kernels.sample_rows(logits, params)
    for seed in range(5):
        rows = rows_of(ASKED, seed)
        logits.copy_(scores(len(ASKED), vocab, "flat"))
        params.values.copy_(packed(rows).values)
        graph.replay()
        assert drawn_2R[0].tolist() == sample(logits, rows).token_ids
