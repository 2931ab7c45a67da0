"""The sampler against Hugging Face's processors, statistics, and itself in other batches."""

import math

import pytest
import torch
from msgspec import structs
from transformers.generation import logits_process as hf

from moesaic.core.sampling import SamplingParams
from moesaic.engine.sampling import sampler
from moesaic.engine.sampling.adjust import adjust
from moesaic.engine.sampling.sampler import (
    NonFiniteLogits,
    SampleRow,
    sample,
    token_logprobs,
    uniform,
)

FILTERS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7, "min_p": 0.1},
    {"top_k": 5},
    {"top_k": 40, "temperature": 0.8},
    {"top_p": 0.9},
    {"top_p": 0.3, "temperature": 2.0},
    {"top_p": 0.999, "temperature": 5.0},
    {"top_k": 20, "top_p": 0.8, "temperature": 0.7},
    {"top_k": 200, "top_p": 0.95, "min_p": 0.02, "temperature": 1.3},
    {"top_k": 700, "top_p": 0.5, "temperature": 3.0},
    {"top_p": 0.01},
    {"min_p": 1.0},
]


pytestmark = pytest.mark.usefixtures("one_thread")


def row(seed=0, position=0, prompt=(), output=(), eos=(), logprob=False, top=0, **params):
    return SampleRow(
        SamplingParams.from_dict(params),
        seed,
        position,
        prompt,
        output,
        frozenset(eos),
        logprob,
        top,
    )


def hf_probabilities(logits_V, params):
    """Hugging Face's warpers in the order of `generate`, on float64 scores."""
    warpers = [hf.TemperatureLogitsWarper(params.get("temperature", 1.0))]
    if "top_k" in params:
        warpers.append(hf.TopKLogitsWarper(params["top_k"]))
    if "top_p" in params:
        warpers.append(hf.TopPLogitsWarper(params["top_p"]))
    if "min_p" in params:
        warpers.append(hf.MinPLogitsWarper(params["min_p"]))
    scores = logits_V[None].double()
    for warper in warpers:
        scores = warper(torch.zeros(1, 1, dtype=torch.long), scores)
    return scores.softmax(-1)[0]


@pytest.mark.parametrize("params", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", [300, 1024, 5000])
def test_draw_follows_the_distribution_of_hugging_face(vocab, params):
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    ends = hf_probabilities(logits, params).cumsum(-1)
    seeds = range(300)
    marks = torch.tensor([uniform(seed, 5) for seed in seeds], dtype=torch.float64)
    expected = torch.searchsorted(ends, marks, right=True)
    # float32 scores: a mark within rounding of a border may fall on either side
    clear = (ends[None] - marks[:, None]).abs().amin(-1) > 1e-6
    assert clear.float().mean() > 0.95
    got = sample(logits.expand(len(seeds), -1), [row(s, 5, **params) for s in seeds]).token_ids
    assert torch.tensor(got)[clear].tolist() == expected[clear].tolist()


def test_uniform_is_uniform_along_seeds_and_positions():
    for numbers in (
        [uniform(seed, 3) for seed in range(10_000)],
        [uniform(3, position) for position in range(10_000)],
        [uniform(2**62 + seed * 2**32, seed) for seed in range(10_000)],
    ):
        u = torch.tensor(numbers, dtype=torch.float64)
        assert u.min() >= 0 and u.max() < 1
        steps = torch.arange(1, 10_001) / 10_000
        assert (u.sort().values - steps).abs().max() < 0.0195  # Kolmogorov-Smirnov, p = 0.001
        pairs = torch.stack([u[:-1], u[1:]])
        assert abs(torch.corrcoef(pairs)[0, 1]) < 0.033
    assert len({uniform(s, p) for s in range(100) for p in range(100)}) == 10_000
    assert uniform(0, 0) == 0.8833108082136426
    assert uniform(2**63 - 1, 2**20) == uniform(2**63 - 1, 2**20)


def mixed_rows(vocab):
    extra = [
        {"temperature": 0},
        {"temperature": 0, "repetition_penalty": 1.3},
        {"frequency_penalty": 0.5, "presence_penalty": 0.3, "top_p": 0.9},
        {"logit_bias": {1: 3.0, vocab - 1: 5.0}},
        {"min_new_tokens": 9, "stop_token_ids": [0, 1, 2]},
        {"top_k": 1},
        {"temperature": 1e25},
    ]
    return [
        row(i * 77, i, [1, 2, 3, i], [5, 5, i], [4], i % 2 == 0, i % 4, **params)
        for i, params in enumerate(FILTERS + extra)
    ]


@pytest.mark.parametrize("rounding", [None, 0.125, 2.0], ids=["fine", "ties", "many ties"])
@pytest.mark.parametrize("vocab", [50, 1000, 4096])
def test_row_is_the_same_alone_and_in_any_batch(vocab, rounding):
    rows = mixed_rows(vocab)
    logits = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(1)) * 4
    if rounding:
        logits = (logits / rounding).round() * rounding
    together = sample(logits, rows)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(2)).tolist()
    shuffled = sample(logits[order], [rows[i] for i in order])
    for place, i in enumerate(order):
        alone = sample(logits[i : i + 1], [rows[i]])
        for found, at in ((together, i), (shuffled, place)):
            assert found.token_ids[at] == alone.token_ids[0]
            assert found.logprobs[at] == alone.logprobs[0]
            assert found.top_logprobs[at] == alone.top_logprobs[0]


@pytest.mark.parametrize("rounding", [0.001, 0.25, 3.0])
def test_shortcut_and_long_way_give_the_same_token(monkeypatch, rounding):
    params = [p for p in FILTERS if "top_k" in p or "top_p" in p] * 12
    rows = [row(seed, 3, **p) for seed, p in enumerate(params)]
    logits = torch.randn(len(rows), 2000, generator=torch.Generator().manual_seed(3)) * 4
    logits = (logits / rounding).round() * rounding
    short = sample(logits, rows).token_ids
    monkeypatch.setattr(sampler, "NARROW_TOP_K", 0)
    monkeypatch.setattr(sampler, "NARROW_TOP_P", 0)
    assert sample(logits, rows).token_ids == short


def test_threads_do_not_change_anything():
    rows = mixed_rows(70_001)
    logits = torch.randn(len(rows), 70_001) * 3
    one = sample(logits, rows)
    torch.set_num_threads(2)
    assert sample(logits, rows) == one


def test_pieces_do_not_change_anything(monkeypatch):
    rows = mixed_rows(500) * 3
    logits = torch.randn(len(rows), 500)
    whole = sample(logits, rows)
    monkeypatch.setattr(sampler, "CPU_PIECE", 1500)
    assert sample(logits, rows) == whole


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 3}, {0, 1, 2, 3}),  # 2 and 3 tie for the third place: both stay
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": 0.4}, {0}),
        ({"top_p": 0.75}, {0, 1, 2, 3}),
        ({"top_k": 2, "top_p": 0.55}, {0}),  # 0.4 of 0.7 is 0.571
        ({"min_p": 0.3}, {0, 1}),
        ({"top_k": 100}, {0, 1, 2, 3, 4}),
    ],
    ids=str,
)
def test_tokens_kept(params, kept):
    logits = torch.tensor([0.4, 0.3, 0.11, 0.11, 0.08, 0.0]).log()
    got = sample(logits.expand(400, -1), [row(s, **params) for s in range(400)]).token_ids
    assert set(got) == kept


def test_repetition_penalty_is_that_of_hugging_face():
    logits = torch.randn(3, 50)
    prompts, outputs = [[1, 2, 2], [7], []], [[3], [7, 8], []]
    rows = [
        row(prompt=p, output=o, temperature=0, repetition_penalty=1.4)
        for p, o in zip(prompts, outputs, strict=True)
    ]
    got = adjust(logits, rows)
    processor = hf.RepetitionPenaltyLogitsProcessor(1.4)
    for i in range(2):
        ids = torch.tensor([prompts[i] + outputs[i]])
        assert torch.equal(got[i], processor(ids, logits[i : i + 1].clone())[0])
    assert torch.equal(got[2], logits[2])


def test_frequency_presence_bias_and_minimum_length():
    logits = torch.zeros(1, 8)
    params = {"frequency_penalty": 0.5, "presence_penalty": 0.25, "logit_bias": {6: 2.0, 1: 1.0}}
    some = row(prompt=[4, 4], output=[1, 1, 2], eos=[7], min_new_tokens=4, **params)
    stop = row(output=[1] * 4, eos=[7], min_new_tokens=4, stop_token_ids=[5])
    early = row(output=[1] * 3, eos=[7, 900], min_new_tokens=4, stop_token_ids=[5])
    assert adjust(logits, [some])[0].tolist() == [0, -0.25, -0.75, 0, 0, 0, 2, -math.inf]
    assert adjust(logits, [stop])[0].tolist() == [0] * 8
    assert adjust(logits, [early])[0].tolist() == [0, 0, 0, 0, 0, -math.inf, 0, -math.inf]
    assert logits.tolist() == [[0] * 8]
    assert adjust(logits, [row()]) is logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_first_of_the_highest(dtype):
    logits = torch.zeros(3, 1000, dtype=dtype)
    logits[0, [700, 300]] = 5
    logits[1, 999] = 1
    got = sample(logits, [row(temperature=0)] * 3).token_ids
    assert got == [300, 999, 0]
    assert got == logits.argmax(-1).tolist()


def test_replay_continues_the_same():
    table = torch.randn(64, 64) * 2

    def run(output, steps):
        output = list(output)
        for _ in range(steps):
            last = output[-1] if output else 0
            one = row(11, 4 + len(output), output=output, top_p=0.9, frequency_penalty=0.2)
            output += sample(table[last : last + 1], [one]).token_ids
        return output

    whole = run([], 30)
    assert len(set(whole)) > 5
    assert all(run(whole[:cut], 30 - cut) == whole for cut in (1, 7, 29))


def test_never_a_token_that_is_impossible():
    logits = torch.full((200, 400), -math.inf)
    logits[:, [3, 200, 399]] = torch.tensor([0.0, -1.0, 1.0])
    for params in FILTERS + [{"temperature": 1e30}, {"top_k": 399, "temperature": 1e300}]:
        got = sample(logits, [row(s, **params) for s in range(200)]).token_ids
        assert set(got) <= {3, 200, 399}


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {}, {"top_p": 0.9}, {"top_k": 600}], ids=str
)
def test_bad_rows_are_named(params, monkeypatch):
    monkeypatch.setattr(sampler, "CPU_PIECE", 2000)
    logits = torch.randn(7, 700)
    logits[1, 5] = math.nan
    logits[3] = -math.inf
    logits[6, 9] = math.inf
    rows = [row(s, logprob=True, **params) for s in range(7)]
    with pytest.raises(NonFiniteLogits, match=r"\[1, 3, 6\]") as caught:
        sample(logits, rows)
    assert caught.value.rows == (1, 3, 6)
    good = [0, 2, 4, 5]
    assert len(sample(logits[good], [rows[i] for i in good]).token_ids) == 4
    bad = [math.isnan(logprob) for logprob in token_logprobs(logits, [0] * 7, 2)[0]]
    assert bad == [i not in good for i in range(7)]


def test_row_without_any_permitted_token_is_bad():
    with pytest.raises(NonFiniteLogits):
        sample(torch.zeros(1, 2), [row(eos=[0, 1], min_new_tokens=1)])


def test_logprobs_are_of_the_unmodified_distribution():
    logits = torch.randn(6, 1500) * 5
    want = logits.double().log_softmax(-1)
    params = {"temperature": 0.3, "top_k": 3, "logit_bias": {7: 50.0}, "repetition_penalty": 1.5}
    rows = [row(i, 2, [1], [7], logprob=i != 2, top=i, **params) for i in range(6)]
    got = sample(logits, rows)
    assert got.token_ids == [7] * 6
    assert got.logprobs[2] is None and got.top_logprobs[2] is None
    for i in (0, 1, 3, 4, 5):
        assert got.logprobs[i] == pytest.approx(want[i, 7].item(), abs=2e-6)
        best = want[i].topk(max(i, 1))
        assert [token for _, token in got.top_logprobs[i]] == best.indices[:i].tolist()
        values = [value for value, _ in got.top_logprobs[i]]
        assert values == pytest.approx(best.values[:i].tolist(), abs=2e-6)


def test_top_logprobs_break_ties_by_token_id():
    logits = torch.zeros(2, 300)
    logits[0, 250] = 1.0
    logits[1] = -math.inf
    logits[1, [9, 4]] = 0.0
    _, top = token_logprobs(logits, [0, 9], top_n=4)
    assert [token for _, token in top[0]] == [250, 0, 1, 2]
    assert top[1] == [(-math.log(2), 4), (-math.log(2), 9)]


def test_logprobs_of_chosen_tokens_follow_the_likely_ones():
    logits = torch.randn(5, 300)
    rows = [
        SampleRow(SamplingParams(), 1, i, return_logprob=i != 2, top_logprobs_num=i)
        for i in range(5)
    ]
    chosen = [(), (7,), (1,), (299, 0, 299), tuple(range(300))]
    asked = [structs.replace(row, token_ids_logprob=c) for row, c in zip(rows, chosen, strict=True)]
    plain, found = sample(logits, rows), sample(logits, asked)
    assert found.token_ids == plain.token_ids and found.logprobs == plain.logprobs
    want = logits.double().log_softmax(-1)
    for i in (0, 1, 3, 4):
        assert found.top_logprobs[i][:i] == plain.top_logprobs[i]
        further = found.top_logprobs[i][i:]
        assert tuple(token for _, token in further) == chosen[i]
        expected = [want[i, token].item() for token in chosen[i]]
        assert [value for value, _ in further] == pytest.approx(expected, abs=1e-6)
    assert found.top_logprobs[2] is None
    _, top = token_logprobs(logits, [0] * 5, 1, (7, 9))
    assert [[token for _, token in row[1:]] for row in top] == [[7, 9]] * 5
    values = [value for row in top for value, _ in row[1:]]
    assert values == pytest.approx(want[:, [7, 9]].flatten().tolist(), abs=1e-6)


def test_token_logprobs_in_pieces(monkeypatch):
    logits = torch.randn(23, 333, dtype=torch.float32).bfloat16()
    targets = [(7 * i) % 333 for i in range(23)]
    whole = token_logprobs(logits, targets, 3)
    want = logits.double().log_softmax(-1)
    expected = [want[i, target].item() for i, target in enumerate(targets)]
    assert whole[0] == pytest.approx(expected, abs=1e-6)
    monkeypatch.setattr(sampler, "CPU_PIECE", 1000)
    assert token_logprobs(logits, targets, 3) == whole
    assert token_logprobs(logits[:0], [], 3) == ([], [])


def test_no_rows():
    assert sample(torch.zeros(0, 10), []).token_ids == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_row_is_the_same_alone_and_in_any_batch_on_a_gpu():
    rows = mixed_rows(5001)
    logits = torch.randn(len(rows), 5001, device="cuda") * 4
    together = sample(logits, rows)
    for i, one in enumerate(rows):
        alone = sample(logits[i : i + 1], [one])
        assert alone.token_ids[0] == together.token_ids[i]
        assert alone.logprobs[0] == together.logprobs[i]
