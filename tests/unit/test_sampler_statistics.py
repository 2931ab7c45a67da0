"""What is drawn, over random settings, against the distribution that transformers' own processors
give in the order that the docs promise: a chi-square test.

Everything is seeded, so a run says the same each time. All settings of a test together fail by
chance with a probability of at most SIGNIFICANCE, shared between them (Bonferroni)."""

import random
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from msgspec import structs
from transformers.generation import logits_process as hf

from moesaic.core.sampling import SamplingParams
from moesaic.engine.sampling import adjust, sampler
from moesaic.engine.sampling.sampler import SampleRow, sample

SIGNIFICANCE = 1e-3
DRAWS = 2000
SETTINGS = 20
EOS = 3


pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Setting:
    params: dict
    logits_V: torch.Tensor
    prompt: list[int]
    output: list[int]
    number: int

    def rows(self):
        """Rows with distinct (seed, position) in all settings: half vary the seed, half the
        position."""
        params = SamplingParams.from_dict(self.params)
        first = self.number * DRAWS
        keys = [(first + n, 17) if n % 2 else (2**40 + self.number, n) for n in range(DRAWS)]
        eos = frozenset([EOS])
        return [SampleRow(params, *key, self.prompt, self.output, eos) for key in keys]


def random_setting(rng, number):
    vocab = rng.choice([12, 64, 200])
    choices = {
        "temperature": rng.uniform(0.4, 2.5),
        "top_k": rng.randrange(2, vocab),
        "top_p": rng.uniform(0.3, 0.98),
        "min_p": rng.uniform(0.01, 0.2),
        "repetition_penalty": rng.choice([0.6, 1.3, 1.9]),
        "frequency_penalty": rng.uniform(-1, 1.5),
        "presence_penalty": rng.uniform(-1.5, 1.5),
        "logit_bias": {rng.randrange(vocab): rng.uniform(-3, 3) for _ in range(4)},
        "min_new_tokens": rng.choice([4, 20]),
    }
    params = {name: value for name, value in choices.items() if rng.random() < 0.55}
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    logits_V = torch.randn(vocab, generator=generator) * 1.5
    prompt, output = ([rng.randrange(vocab) for _ in range(4)] for _ in range(2))
    return Setting(params, logits_V, prompt, output + output[:2], number)


def settings(number):
    rng = random.Random(5)
    return [random_setting(rng, n) for n in range(number)]


def counted(setting, scores):
    """Applies the formula of OpenAI's API reference, for which transformers has no processor."""
    frequency, presence = (
        setting.params.get(f"{name}_penalty", 0.0) for name in ("frequency", "presence")
    )
    scores = scores.clone()
    for token, count in Counter(setting.output).items():
        scores[0, token] -= count * frequency + presence
    return scores


def processors(setting):
    """The processors in the order of docs/engine.md."""
    given = setting.params.get
    penalty, bias, least = (
        given(n) for n in ("repetition_penalty", "logit_bias", "min_new_tokens")
    )
    single = {(token,): by for token, by in (bias or {}).items()}
    start, device = len(setting.prompt), "cpu"
    wanted = [
        (penalty, lambda: hf.RepetitionPenaltyLogitsProcessor(penalty)),
        (True, lambda: lambda _, scores: counted(setting, scores)),
        (bias, lambda: hf.SequenceBiasLogitsProcessor(single)),
        (least, lambda: hf.MinNewTokensLengthLogitsProcessor(start, least, EOS, device)),
        (given("temperature"), lambda: hf.TemperatureLogitsWarper(given("temperature"))),
        (given("top_k"), lambda: hf.TopKLogitsWarper(given("top_k"))),
        (given("top_p"), lambda: hf.TopPLogitsWarper(given("top_p"))),
        (given("min_p"), lambda: hf.MinPLogitsWarper(given("min_p"))),
    ]
    return hf.LogitsProcessorList([make() for needed, make in wanted if needed])


def chance(setting):
    """The probability that right draws differ from the distribution at least as much as ours."""
    ids = torch.tensor([setting.prompt + setting.output])
    right_V = processors(setting)(ids, setting.logits_V[None].double()).softmax(-1)[0] * DRAWS
    tokens = sample(setting.logits_V.expand(DRAWS, -1), setting.rows()).token_ids
    seen_V = torch.bincount(torch.tensor(tokens), minlength=len(right_V)).double()
    if seen_V[right_V == 0].sum() > 0:
        return 0.0
    # Merges the cells that are too small for the approximation, and the next larger one.
    order = right_V.argsort()
    small = right_V[order].cumsum(0) < 10
    cut = int(small.sum()) + 1
    right, seen = (
        torch.cat([x[order[:cut]].sum()[None], x[order[cut:]]]) for x in (right_V, seen_V)
    )
    if len(right) == 1:
        return 1.0
    statistic = ((seen - right) ** 2 / right).sum()
    freedom = torch.tensor((len(right) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, statistic / 2).item()


@pytest.mark.parametrize("number", [SETTINGS, pytest.param(300, marks=pytest.mark.slow)])
def test_draws_have_the_distribution_of_transformers(number):
    found = [(chance(setting), setting.params) for setting in settings(number)]
    unlikely = [entry for entry in found if entry[0] < SIGNIFICANCE / number]
    assert not unlikely
    # A right sampler gives uniform chances (Kolmogorov-Smirnov, p = 0.001); 1: a single token.
    chances = torch.tensor(sorted(value for value, _ in found if value < 1))
    steps = torch.arange(1, len(chances) + 1) / len(chances)
    assert (chances - steps).abs().max() < 1.95 / len(chances) ** 0.5 + 1 / len(chances)


def one_token_less(real):
    """A defect: top-p (or top-k) drops the last token that it should keep."""

    def near(scores, *rest):
        blocks, floor, exact = real(scores, *rest)
        flat = blocks.blocks_RNW.flatten(1)
        above = flat.masked_fill(flat <= floor, float("inf")).amin(-1, keepdim=True)
        return blocks, torch.where(above < float("inf"), above, floor), exact

    return near


def temperature_last(real):
    """A defect: top-p counts probabilities before temperature."""

    def weights(scores, params, floor_R1=None, min_p=False):
        if not min_p:
            params = params._replace(temperature=torch.ones_like(params.temperature))
        return real(scores, params, floor_R1, min_p)

    return weights


def with_row(change):
    """A defect: rows are adjusted with other tokens or parameters."""
    return lambda real: lambda row: real(structs.replace(row, **change(row)))


def doubled_bias(row):
    biases = {token: 2 * by for token, by in row.params.logit_bias.items()}
    return {"params": replace(row.params, logit_bias=biases)}


DEFECTS = {
    "top_p drops one token more": (sampler, "_nearest_blocks", one_token_less),
    "top_p before temperature": (sampler, "_weights", temperature_last),
    "repetition_penalty forgets the prompt": (
        adjust,
        "tokens_of",
        with_row(lambda row: {"prompt_ids": ()}),
    ),
    "frequency_penalty counts the prompt": (
        adjust,
        "tokens_of",
        with_row(lambda row: {"output_ids": [*row.prompt_ids, *row.output_ids]}),
    ),
    "a token counts once": (
        adjust,
        "tokens_of",
        with_row(lambda row: {"output_ids": sorted({*row.output_ids})}),
    ),
    "the bias is doubled": (adjust, "tokens_of", with_row(doubled_bias)),
    "min_p is a half of what was asked for": (
        sampler,
        "_draw_params",
        lambda real: lambda *a: (params := real(*a))._replace(min_p=params.min_p / 2),
    ),
    "temperature is 5 % too high": (
        sampler,
        "_draw_params",
        lambda real: (
            lambda *a: (params := real(*a))._replace(temperature=params.temperature * 1.05)
        ),
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_would_be_found(monkeypatch, defect):
    module, name, plant = DEFECTS[defect]
    monkeypatch.setattr(module, name, plant(getattr(module, name)))
    assert any(chance(setting) < SIGNIFICANCE / SETTINGS for setting in settings(SETTINGS))
