"""Deterministic mode around the MoE layer: a token's bits do not depend on its neighbours."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moesaic.kernels.cpu import linear as kernel
from moesaic.layers import invariant
from moesaic.layers.attention import LatentAttention, LatentAttentionConfig
from moesaic.layers.context import AttentionSpec, AttentionStep, CacheSpec, LatentSpec
from moesaic.layers.deterministic_attention import DeterministicAttention
from moesaic.layers.paged_cache import PagedCache, SequenceSpan
from moesaic.layers.parallel import Parallel
from moesaic.layers.rotary import RopeConfig, RotaryTable
from moesaic.layers.torch_attention import TorchAttention
from moesaic.moe.topk import TopK, TopKConfig
from tests.pairs import every_pair, every_second

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(64, 32), (48, 96), (2048, 128), (16, 7), (5, 64), (160, 1), (33, 672)]
EPS = {torch.float32: 2**-23, torch.bfloat16: 2**-8, torch.float16: 2**-11}
Rows = Callable[[Tensor], Tensor]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(params=["kernel", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs with and without the compiled kernel, which some machines do not support."""
    if request.param == "torch":
        monkeypatch.setattr(kernel, "library", dict)
    return str(request.param)


def matrix(inputs: int, outputs: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)


def differing(function: Rows, x_T: Tensor, batches: int) -> int:
    """The number of random batches in which a row differs from the same row among all rows."""
    whole = function(x_T)
    chosen = random.Random(len(x_T))
    found = 0
    for _ in range(batches):
        size = chosen.choice([1, 2, 3, 7, 16, 31, 32, 33, 64, chosen.randint(1, len(x_T))])
        rows = torch.tensor(chosen.choices(range(len(x_T)), k=size))
        found += not torch.equal(function(x_T[rows]), whole[rows])
    return found


@pytest.mark.parametrize(
    ("inputs", "outputs", "dtype", "bias"), every_second(SHAPES, DTYPES, [False, True])
)
def test_rows_of_a_product_do_not_know_each_other(
    inputs: int, outputs: int, dtype: torch.dtype, bias: bool, path: str, threads: int
) -> None:
    torch.manual_seed(inputs)
    weight, bias_O = matrix(inputs, outputs, dtype), torch.randn(outputs).to(dtype)
    x_TI = torch.randn(150, inputs).to(dtype)

    def product(x: Tensor) -> Tensor:
        return invariant.linear(x, weight, bias_O if bias else None)

    assert differing(product, x_TI, 20) == 0
    exact = F.linear(x_TI.double(), weight.double(), bias_O.double() if bias else None)
    # Rounding the result, and what a float32 sum may be off: how torch adds differs between CPUs.
    bound = 4 * EPS[dtype] * (1 + exact.abs().max().item()) + inputs**0.5 * 2**-23
    torch.testing.assert_close(product(x_TI).double(), exact, atol=bound, rtol=0)
    assert product(x_TI[:0]).shape == (0, outputs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_check_fails_for_sums_whose_order_depends_on_the_batch(dtype: torch.dtype) -> None:
    """This product imitates on every CPU what torch does on many."""
    torch.manual_seed(0)
    weight = matrix(512, 32, dtype)
    x_TI = torch.randn(150, 512).to(dtype)

    def product(x: Tensor) -> Tensor:
        cut = 256 if len(x) > 32 else 128
        return F.linear(x[:, :cut], weight[:, :cut]) + F.linear(x[:, cut:], weight[:, cut:])

    assert differing(product, x_TI, 20) > 0


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_shape_and_batch(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    inputs, outputs = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 100))
    tokens = data.draw(st.integers(1, 300))
    torch.manual_seed(tokens)
    weight, x_TI = matrix(inputs, outputs, dtype), torch.randn(tokens, inputs).to(dtype)
    whole = invariant.linear(x_TI, weight)
    start = data.draw(st.integers(0, tokens - 1))
    stop = data.draw(st.integers(start + 1, tokens))
    assert torch.equal(invariant.linear(x_TI[start:stop], weight), whole[start:stop])


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_not_finite_stay_in_their_rows(dtype: torch.dtype, path: str) -> None:
    weight, x_TI = matrix(64, 48, dtype), torch.randn(70, 64).to(dtype)
    clean = invariant.linear(x_TI, weight)
    poisoned = x_TI.clone()
    poisoned[::3, 5] = torch.nan
    poisoned[1::3, 7] = torch.inf
    result = invariant.linear(poisoned, weight)
    assert torch.equal(result[2::3], clean[2::3])
    assert not result[::3].isfinite().any() and not result[1::3].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_does_not_know_threads_nor_other_outputs(dtype: torch.dtype) -> None:
    """A vocabulary that is split over ranks gives the same logits."""
    weight, bias_O = matrix(2048, 1000, dtype), torch.randn(1000).to(dtype)
    if not kernel.fits(weight):
        pytest.skip(f"no kernel for {dtype} on this machine")
    x_TI = torch.randn(40, 2048).to(dtype)
    before, results = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(kernel.run(x_TI, weight, bias_O))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    for start, stop in [(0, 250), (250, 267), (267, 1000)]:
        part = kernel.run(x_TI, weight[start:stop], bias_O[start:stop])
        assert torch.equal(part, results[0][:, start:stop])
    expected = kernel.reference(x_TI, weight, bias_O)
    bound = {torch.float32: 1e-5, torch.bfloat16: 2**-6}[dtype]
    torch.testing.assert_close(results[0], expected, atol=bound, rtol=EPS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [50, 64, 2048])
def test_a_cut_of_the_outputs_changes_no_bit(
    inputs: int, dtype: torch.dtype, path: str, threads: int
) -> None:
    """Parts are wide, narrow or empty, and end at the edges of computed pieces."""
    torch.manual_seed(inputs)
    weight, bias_O = matrix(inputs, 300, dtype), torch.randn(300).to(dtype)
    x_TI = torch.randn(40, inputs).to(dtype)
    whole = invariant.linear(x_TI, weight, bias_O)
    for start, stop in itertools.pairwise((0, 1, 5, 20, 20, 36, 99, 163, 164, 300)):
        part = invariant.linear(x_TI, weight[start:stop].clone(), bias_O[start:stop])
        assert torch.equal(part, whole[:, start:stop]), (start, stop)


def test_a_product_of_pieces_has_one_shape() -> None:
    seen: list[torch.Size] = []

    def spy(x: Tensor) -> Tensor:
        seen.append(x.shape)
        return x * 2

    for rows in (0, 1, 32, 33, 100):
        x_TI = torch.randn(rows, 3, 4)
        assert torch.equal(invariant.in_pieces(spy, x_TI), x_TI * 2)
    assert set(seen) == {torch.Size((32, 3, 4))} and len(seen) == 1 + 1 + 1 + 2 + 4


def rotated(x_TI: Tensor) -> Tensor:
    """The first channel of a row gives its position, so it does not depend on the batch."""
    positions_T = (x_TI[:, 0].float().abs() * 100).long().clamp(max=299)
    table = RotaryTable(RopeConfig(48), 300)
    cos, sin = table.at(positions_T)
    return table.rotate(x_TI.unflatten(1, (-1, 48)), cos, sin).flatten(1)


def routed(x_TI: Tensor) -> Tensor:
    """Routes with several K, since the sum over K is part of routing."""
    configs = [TopKConfig(k, renormalize=True) for k in (1, 2, 3, 4, 6, 8, 10)]
    configs += [TopKConfig(6, num_groups=8, topk_groups=4, group_score="top2")]
    chosen = [TopK(config)(x_TI) for config in configs]
    return torch.cat([y.double() for c in chosen for y in (c.ids_TK, c.weights_TK)], dim=1)


OTHERS: dict[str, Rows] = {
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:], torch.ones_like(x[0]) * 1.1, 1e-6),
    "head norm": lambda x: F.rms_norm(x.unflatten(1, (-1, 48)), (48,), None, 1e-6),
    "silu": invariant.silu,
    "silu and mul of halves": lambda x: invariant.silu(x.chunk(2, 1)[0]) * x.chunk(2, 1)[1],
    "silu of every other": lambda x: invariant.silu(x[:, ::2]),
    "sigmoid": invariant.sigmoid,
    "sigmoid of one": lambda x: invariant.sigmoid(x[:, :1]),
    "few experts": lambda x: x[:, :5].float().softmax(-1),
    "rotary": rotated,
    "routing": routed,
    "log_softmax": lambda x: x.float().log_softmax(-1),
    "logsumexp": lambda x: x.float().logsumexp(-1),
    "log_softmax in float64": lambda x: x.double().log_softmax(-1),
}


@pytest.mark.parametrize(
    ("name", "dtype", "width"), every_pair([*OTHERS], DTYPES, [96, 1008, 4128])
)
def test_the_other_operations_are_by_row(
    name: str, dtype: torch.dtype, width: int, threads: int
) -> None:
    torch.manual_seed(width)
    assert differing(OTHERS[name], torch.randn(150, width).to(dtype), 15) == 0


def every_value(dtype: torch.dtype) -> Tensor:
    """All values of a 16-bit type, or many of float32."""
    if dtype == torch.float32:
        return torch.cat([torch.randn(50_000) * 5, torch.linspace(-110, 110, 20_001)])
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(dtype)
    return values[values.isfinite()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("ours", "usual"), [(invariant.silu, F.silu), (invariant.sigmoid, torch.sigmoid)]
)
def test_values_in_vectors_and_alone(ours: Rows, usual: Rows, dtype: torch.dtype) -> None:
    """Torch computes 64 equal neighbours as vectors, and strided elements one by one."""
    x = every_value(dtype)

    def differ(function: Rows) -> int:
        vectors = function(x.repeat_interleave(64)).view(-1, 64)[:, 0]
        return int((vectors != function(torch.stack((x, x), dim=1)[:, 0])).sum())

    assert differ(ours) == 0
    assert (differ(usual) > 0) == (dtype == torch.float32)
    torch.testing.assert_close(ours(x), usual(x), atol=1e-6, rtol=1e-6)


LENGTH, LAYERS = 150, 2


@dataclass(frozen=True)
class Case:
    """Attention of one sequence: the layer's spec, and the tokens' queries, keys and values."""

    spec: AttentionSpec
    q: Tensor
    k: Tensor
    v: Tensor

    def attend(self, step: AttentionStep, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if isinstance(self.spec, LatentSpec):
            return step.attend_latent(self.spec, q, k.squeeze(1))
        return step.attend(self.spec, q, k, v)


def grouped(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, window: int | None, sinks: bool
) -> Case:
    q, k, v = (torch.randn(LENGTH, n, dim).to(dtype) for n in (heads, kv_heads, kv_heads))
    sinks_N = torch.randn(heads).to(dtype) if sinks else None
    return Case(AttentionSpec(1, dim**-0.5, window, sinks_N), q, k, v)


def latent(heads: int, dtype: torch.dtype, deterministic: bool) -> Case:
    config = LatentAttentionConfig(64, heads, None, 32, 24, 8, 24, 32**-0.5)
    parallel = Parallel(deterministic=deterministic)
    maps = LatentAttention(config, 1, RotaryTable(RopeConfig(8), 1), dtype, parallel)
    maps.kv_b_proj.weight.normal_(std=32**-0.5)
    q, k = torch.randn(LENGTH, heads, 32).to(dtype), torch.randn(LENGTH, 1, 40).to(dtype)
    return Case(maps.spec, q, k, k[..., :0])


def cases(dtype: torch.dtype) -> dict[str, Case]:
    torch.manual_seed(7)
    return {
        "heads that share keys": grouped(8, 2, 16, dtype, None, False),
        "as many heads as keys": grouped(2, 2, 32, dtype, None, False),
        "many heads": grouped(72, 1, 16, dtype, None, True),
        "window": grouped(8, 2, 16, dtype, 19, False),
        "window and sinks": grouped(6, 2, 64, dtype, 130, True),
        "latent": latent(4, dtype, True),
        "latent with products of torch": latent(5, dtype, False),
    }


class Play:
    """Computes a case chunk by chunk, among random other sequences and on random pages."""

    def __init__(self, case: Case, kind: type[AttentionStep], seed: int) -> None:
        self.case, self.kind, self.chosen = case, kind, random.Random(seed)
        self.page_size = self.chosen.choice([1, 16, 48, 64])
        dims = CacheSpec(LAYERS, case.k.shape[1], case.k.shape[2], case.v.shape[2])
        self.cache = PagedCache(dims, 1000 // self.page_size + 20, self.page_size, case.q.dtype)
        self.free = list(range(1, self.cache.keys.shape[1]))
        self.chosen.shuffle(self.free)
        self.pages = self.take(LENGTH)

    def take(self, tokens: int) -> list[int]:
        pages = [self.free.pop() for _ in range(math.ceil(tokens / self.page_size))]
        self.cache.clear(pages)
        return pages

    def run(self, chunks: Sequence[int]) -> Tensor:
        outputs, done = [], 0
        for length in chunks:
            outputs.append(self.step(done, length))
            done += length
        assert done == LENGTH
        return torch.cat(outputs)

    def step(self, done: int, length: int) -> Tensor:
        wanted = [(self.chosen.choice([1, 1, 5, 40]), self.chosen.randint(40, 200))]
        others = wanted * self.chosen.randint(0, 3)
        place, start, spans = self.chosen.randint(0, len(others)), 0, []
        for number in range(len(others) + 1):
            if number == place:
                mine = slice(start, start + length)
                spans.append(SequenceSpan(start, length, done + length, self.pages))
            else:
                new, kv_len = others.pop()
                spans.append(SequenceSpan(start, new, kv_len, self.take(kv_len)))
                self.cache.keys[1, spans[-1].pages] = torch.rand(1).to(self.cache.keys.dtype)
            start += spans[-1].length
        case = self.case
        rows = [torch.randn(start, *x.shape[1:]).to(x.dtype) for x in (case.q, case.k, case.v)]
        for row, x in zip(rows, (case.q, case.k, case.v), strict=True):
            row[mine] = x[done : done + length]
        output = case.attend(self.kind(self.cache, spans), *rows)  # type: ignore[call-arg]
        for span in spans:
            self.free += span.pages if span.pages is not self.pages else []
        self.chosen.shuffle(self.free)
        return output[mine]

    def cached(self) -> list[Tensor]:
        """Keys and values of the case, in the order of its positions."""
        return [
            x[1, self.pages].flatten(0, 1)[:LENGTH] for x in (self.cache.keys, self.cache.values)
        ]


def random_chunks(chosen: random.Random) -> list[int]:
    chunks: list[int] = []
    while (left := LENGTH - sum(chunks)) > 0:
        chunks.append(min(left, chosen.choice([1, 2, 17, 32, 64, chosen.randint(1, LENGTH)])))
    return chunks


@pytest.mark.parametrize(("name", "dtype"), every_second([*cases(torch.float32)], DTYPES))
def test_attention_depends_on_the_sequence_alone(
    name: str, dtype: torch.dtype, one_thread: None
) -> None:
    """Nor does it depend on the number of threads."""
    case = cases(dtype)[name]
    whole = Play(case, DeterministicAttention, 0)
    expected = whole.run([LENGTH])
    chosen = random.Random(1)
    ways = [[1] * LENGTH, *(random_chunks(chosen) for _ in range(4))]
    for seed, chunks in enumerate(ways, start=1):
        torch.set_num_threads(1 + seed % 2)
        play = Play(case, DeterministicAttention, seed)
        assert torch.equal(play.run(chunks), expected), (seed, chunks)
        assert all(map(torch.equal, play.cached(), whole.cached()))
    usual = Play(case, TorchAttention, 0).run([LENGTH])
    scale = usual.abs().max().item()
    torch.testing.assert_close(expected, usual, atol=16 * EPS[dtype] * (1 + scale), rtol=0)


def test_the_check_fails_for_the_usual_attention() -> None:
    """Uses float32: CPUs that round to 16 bits once, at the end, hide the difference."""
    case = cases(torch.float32)["heads that share keys"]
    whole = Play(case, TorchAttention, 0).run([LENGTH])
    assert not torch.equal(Play(case, TorchAttention, 1).run([1] * LENGTH), whole)


def some_heads(case: Case, queries: slice, kv: slice) -> Case:
    """The case of a rank with these heads."""
    sinks_N = case.spec.sinks_N
    spec = replace(case.spec, sinks_N=None if sinks_N is None else sinks_N[queries])
    return Case(spec, case.q[:, queries], case.k[:, kv], case.v[:, kv])


HEADS = [
    (8, 2, 16, [1, 2, 4, 8]),
    (12, 3, 24, [3, 6, 12]),
    (6, 6, 64, [2, 3]),
    (40, 1, 16, [2, 5, 8, 40]),
    (128, 1, 40, [2, 4, 8, 16, 128]),
    (16, 1, 576, [2, 8]),
]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "parts", "dtype", "window"),
    every_pair(HEADS, DTYPES, [None, 19, 100]),
)
def test_attention_does_not_know_other_heads(
    heads: int, kv_heads: int, dim: int, parts: list[int], dtype: torch.dtype, window: int | None
) -> None:
    """The first and the last rank of a split give the same bits, also if ranks share a key/value
    head."""
    torch.manual_seed(heads)
    case = grouped(heads, kv_heads, dim, dtype, window, sinks=True)
    whole = Play(case, DeterministicAttention, 0).run([LENGTH])
    for count in parts:
        for rank in (0, count - 1):
            queries = slice(heads * rank // count, heads * (rank + 1) // count)
            first = kv_heads * rank // count
            kv = slice(first, max(first + 1, kv_heads * (rank + 1) // count))
            found = Play(some_heads(case, queries, kv), DeterministicAttention, 1).run([100, 50])
            assert torch.equal(found, whole[:, queries]), (count, rank)


def test_long_sequences_share_calls_without_changing() -> None:
    """Sequences are longer than the kernel's pieces (512 keys), in groups of blocks and alone."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(1300, n, 8) for n in (4, 1, 1))
    spec = AttentionSpec(0, 8**-0.5)
    outputs = []
    for pieces in ([1300], [600, 1, 1, 698], [1299, 1]):
        cache, done, parts = PagedCache(CacheSpec(1, 1, 8, 8), 90, 16, torch.float32), 0, []
        cache.clear(range(91))
        for length in pieces:
            step = DeterministicAttention(
                cache, [SequenceSpan(0, length, done + length, range(1, 83))]
            )
            rows = slice(done, done + length)
            parts.append(step.attend(spec, q[rows], k[rows], v[rows]))
            done += length
        outputs.append(torch.cat(parts))
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    scores = torch.einsum("qnd,lmd->nql", q.double(), k.double()) * spec.scale
    scores += torch.full((1300, 1300), -math.inf).triu(1)
    exact = torch.einsum("nql,lmd->qnd", scores.softmax(-1), v.double())
    torch.testing.assert_close(outputs[0].double(), exact, atol=1e-5, rtol=0)


def test_a_step_without_tokens() -> None:
    cache = PagedCache(CacheSpec(1, 1, 8, 8), 4, 16, torch.float32)
    empty = torch.empty(0, 2, 8)
    step = DeterministicAttention(cache, [])
    assert step.attend(AttentionSpec(0, 1.0), empty, empty[:, :1], empty[:, :1]).shape == (0, 2, 8)
    assert not cache.keys[0, 0].any()
