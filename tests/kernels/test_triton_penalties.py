"""Penalties on the device: the same bits as engine/sampling/adjust.py gives, and OpenAI's and
Hugging Face's numbers."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from moesaic.core.sampling import SamplingParams
from moesaic.engine.sampling.adjust import adjust
from moesaic.engine.sampling.sampler import SampleRow
from moesaic.engine.sampling.token_history import TokenHistory
from moesaic.kernels import penalties as twins
from moesaic.kernels.penalties import IN_PROMPT, PenaltyTables, RowPenalty
from moesaic.kernels.triton import penalties as kernels
from tests.kernels.triton_cases import DEVICE

EOS = frozenset([3, 9])
ASKED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.37, "presence_penalty": -0.9},
    {"repetition_penalty": 0.7, "frequency_penalty": -1.1, "presence_penalty": 0.3},
    {"logit_bias": {n: 0.1 * n for n in range(300)}},
    {"min_new_tokens": 50, "stop_token_ids": list(range(20, 420))},
    {"min_new_tokens": 50, "logit_bias": {3: 7.0, 8: -4.0}, "repetition_penalty": 1.1},
    {"min_new_tokens": 2, "presence_penalty": 0.5},
]


@dataclass(frozen=True)
class Case:
    """A row of logits; `request`: its row of the tables."""

    params: SamplingParams
    prompt: list[int]
    output: list[int]
    drafts: list[int]
    request: int

    @property
    def sample(self) -> SampleRow:
        tokens = [*self.output, *self.drafts]
        return SampleRow(self.params, 0, 0, self.prompt, tokens, EOS)


def draw_cases(count: int, vocab: int, seed: int) -> list[Case]:
    chance = random.Random(seed)
    places = chance.sample(range(count + 2), count)

    def tokens(most: int) -> list[int]:
        some = [chance.randrange(vocab) for _ in range(1 + most // 3)]
        return [chance.choice(some) for _ in range(chance.randrange(most))]

    return [
        Case(
            SamplingParams(**ASKED[(seed + n) % len(ASKED)]),
            tokens(60),
            tokens(40),
            tokens(5),
            places[n],
        )
        for n in range(count)
    ]


def tables_of(cases: list[Case], vocab: int) -> PenaltyTables:
    """Rows that no case uses are poisoned."""
    counts = torch.full((len(cases) + 2, vocab), 77, dtype=torch.int32)
    ids = torch.full((len(cases) + 2, 500), vocab + 1, dtype=torch.int32)
    amounts = torch.full((len(cases) + 2, 500), math.nan)
    for case in cases:
        counts[case.request] = torch.bincount(torch.tensor(case.output).long(), minlength=vocab)
        counts[case.request, [*set(case.prompt)]] += IN_PROMPT
        history = TokenHistory.of(case.sample)
        for column, row in ((0, ids), (1, amounts)):
            edits = [*history.biases[column], *history.ends[column]]
            row[case.request, : len(edits)] = torch.tensor(edits)
    return PenaltyTables(counts.to(DEVICE), ids.to(DEVICE), amounts.to(DEVICE))


def packed_rows(cases: list[Case], rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """`rows`: of the logits, for each case."""
    drafts, packed = [5, 6], []
    for case, row in zip(cases, rows, strict=True):
        params, history = case.params, TokenHistory.of(case.sample)
        ends = (
            len(history.ends.ids)
            if len(case.output) + len(case.drafts) < params.min_new_tokens
            else 0
        )
        packed.append(
            RowPenalty(
                row,
                case.request,
                params.repetition_penalty,
                params.frequency_penalty,
                params.presence_penalty,
                len(history.biases.ids),
                ends,
                len(drafts),
                len(case.drafts),
            )
        )
        drafts += case.drafts
    numbers = torch.from_numpy(RowPenalty.pack(packed).copy())
    return numbers.to(DEVICE), torch.tensor(drafts, device=DEVICE)


def spoil(logits: torch.Tensor) -> None:
    """Zeros, and numbers that are not finite."""
    logits[:, ::7] = 0.0
    for place, value in enumerate((math.nan, -math.inf, math.inf)):
        logits[place::4, place::11] = value


@pytest.mark.parametrize("implementation", [twins.penalise_rows.twin, kernels.penalise_rows])
def test_the_example(implementation: Any) -> None:
    logits = torch.tensor([[9.0, 9, 9, 9], [2, -2, 1, 1]], device=DEVICE)
    tables = PenaltyTables(
        torch.tensor([[IN_PROMPT, 2, 0, 0]], dtype=torch.int32, device=DEVICE),
        torch.tensor([[2, 3]], dtype=torch.int32, device=DEVICE),
        torch.tensor([[1.0, math.nan]], device=DEVICE),
    )
    packed = RowPenalty.pack([RowPenalty(1, 0, 2.0, 0.5, 0.25, 1, 1, 0, 1)])
    rows = torch.from_numpy(packed.copy()).to(DEVICE)
    implementation(logits, tables, rows, torch.tensor([1], device=DEVICE))
    assert logits.tolist() == [[9, 9, 9, 9], [1, -5.75, 2, -math.inf]]


@pytest.mark.parametrize(
    ("count", "vocab", "spoiled"),
    [(0, 500, False), (1, 503, False), (7, 2048, True), (5, 4999, False), (3, 2049, True)],
)
def test_bits_are_those_of_the_host(count: int, vocab: int, spoiled: bool) -> None:
    for seed in range(3):
        cases = draw_cases(count, vocab, seed)
        logits = torch.randn(2 * count + 1, vocab + 3, device=DEVICE)[:, :vocab] * 8
        if spoiled:
            spoil(logits)
        rows = random.Random(seed).sample(range(len(logits)), count)
        expected = logits.clone()
        if count:
            expected[rows] = adjust(logits[rows], [case.sample for case in cases])
        tables, (packed, drafts) = tables_of(cases, vocab), packed_rows(cases, rows)
        kernel = logits.clone()
        kernels.penalise_rows(kernel, tables, packed, drafts)
        twins.penalise_rows.twin(logits, tables, packed, drafts)
        for found in (kernel, logits):
            assert torch.equal(found.isnan(), expected.isnan())
            assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_numbers_are_those_of_the_definition() -> None:
    """In float64, token by token: what OpenAI's reference and the paper of the repetition penalty
    say, then biases."""
    vocab, cases = 701, draw_cases(len(ASKED), 701, 5)
    logits = torch.randn(len(cases), vocab, device=DEVICE) * 5
    before = logits.double().tolist()
    kernels.penalise_rows(
        logits, tables_of(cases, vocab), *packed_rows(cases, [*range(len(cases))])
    )
    for case, row, found in zip(cases, before, logits.tolist(), strict=True):
        params, answer = case.params, [*case.output, *case.drafts]
        for token, x in enumerate(row):
            if token in case.prompt or token in answer:
                by = params.repetition_penalty
                x = x / by if x > 0 else x * by
            count = answer.count(token)
            x -= count * params.frequency_penalty + (count > 0) * params.presence_penalty
            x += params.logit_bias.get(token, 0.0)
            if len(answer) < params.min_new_tokens and token in {*EOS, *params.stop_token_ids}:
                x = -math.inf
            assert found[token] == pytest.approx(x, rel=1e-5, abs=1e-5)
