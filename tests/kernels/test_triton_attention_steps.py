"""Steps of attention on a GPU against the CPU's own on the same cache."""

from __future__ import annotations

import math
from dataclasses import replace
from operator import attrgetter

import pytest
import torch
from torch import Tensor

from moesaic.kernels.attention import FP8, FP8_HEADS, HEADS, LATENTS, SplitPolicy, choose_splits
from moesaic.kernels.triton import attention_decode, attention_prefill, rotary
from moesaic.layers import extra_splits, gpu_attention
from moesaic.layers.context import AttentionStep, CacheSpec, HeadSpec, LatentSpec
from moesaic.layers.gpu_attention import DecodeBuffers, GpuAttention, processors
from moesaic.layers.norm import RMSNorm
from moesaic.layers.padded_attention import PaddedAttention
from moesaic.layers.paged_cache import PagedCache, PageTable, SequenceSpan
from moesaic.layers.rotary import RopeConfig, RotaryTable
from moesaic.layers.torch_attention import TorchAttention
from tests.kernels.triton_cases import DEVICE, GPU, relative_error

needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")

N, M, D = 4, 2, 16
PAGE, LAYER = 4, 1
RANK, ROPE, PLAIN, VALUE = 32, 16, 16, 24
MIXED = [(1, 1), (5, 5), (1, 37), (9, 20), (1, 8)]
DECODING = [(1, 1), (1, 37), (1, 8)]
BOUND = 1e-5


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: Triton's, in its interpreter, in place of their twins."""
    if GPU:
        return
    for module in (attention_decode, attention_prefill):
        config = module.AttentionTile(16, 16, 4, 2)
        monkeypatch.setattr(module, "CONFIGS", ((1 << 30, config),))
    monkeypatch.setattr(attention_prefill, "INVARIANT", attention_prefill.CONFIGS)
    for name, module in (
        ("decode_attention", attention_decode),
        ("enter_and_decode", attention_decode),
        ("prefill_attention", attention_prefill),
        ("invariant_attention", attention_prefill),
        ("enter_heads", rotary),
        ("enter_latent", rotary),
    ):
        monkeypatch.setattr(gpu_attention, name, getattr(module, name))


def make_spans(lengths: list[tuple[int, int]]) -> list[SequenceSpan]:
    """Pages in any order, some spans with more than they need."""
    counts = [-(-kv // PAGE) + (kv % 2) for _, kv in lengths]
    free = (torch.randperm(sum(counts)) + 1).tolist()
    spans, start = [], 0
    for (new, kv), count in zip(lengths, counts, strict=True):
        spans.append(SequenceSpan(start, new, kv, [free.pop() for _ in range(count)]))
        start += new
    return spans


def make_caches(spec: CacheSpec, spans: list[SequenceSpan]) -> tuple[PagedCache, PagedCache]:
    """Two with the same history; what is of nobody is NaN in the second."""
    pages = 1 + max(page for span in spans for page in span.pages)
    cpu, gpu = (PagedCache(spec, pages, PAGE, torch.float32, where) for where in ("cpu", DEVICE))
    gpu.keys.fill_(math.nan)
    gpu.values.fill_(math.nan)
    cpu.keys.zero_()
    cpu.values.zero_()
    for span in spans:
        for position in range(span.kv_len - span.length):
            place = LAYER, span.pages[position // PAGE], position % PAGE
            for mine, theirs in ((cpu.keys, gpu.keys), (cpu.values, gpu.values)):
                mine[place] = torch.randn(mine.shape[-2:])
                theirs[place] = mine[place].to(DEVICE)
    return cpu, gpu


def rows_of(spans: list[SequenceSpan]) -> int:
    return sum(span.length for span in spans)


def positions_of(spans: list[SequenceSpan]) -> Tensor:
    return torch.tensor([n for s in spans for n in range(s.kv_len - s.length, s.kv_len)])


def norm(size: int, device: str) -> RMSNorm:
    made = RMSNorm(size, 1e-6, torch.float32)
    torch.nn.init.normal_(made.weight, generator=torch.Generator().manual_seed(size))
    return made.to(device)


def head_spec(rope: RotaryTable, where: torch.device | str) -> HeadSpec:
    sinks = torch.linspace(-1, 1, N, device=where)
    norms = {"q_norm": norm(D, where), "k_norm": norm(D, where)}
    sizes = {"num_heads": N, "num_kv_heads": M, "head_dim": D}
    return HeadSpec(LAYER, 0.3, 30, sinks, rope=rope, **sizes, **norms)


def heads_of(step: AttentionStep, qkv: Tensor, rope: RotaryTable, positions: Tensor) -> Tensor:
    angles = tuple(x.to(qkv.device) for x in rope.at(positions))
    return step.attend_heads(head_spec(rope, qkv.device), qkv, angles)


class Maps:
    """Of random up-projections."""

    def __init__(self, absorbed: bool) -> None:
        self.absorbed = absorbed
        generator = torch.Generator().manual_seed(1)
        self.keys = torch.randn(N, PLAIN, RANK, generator=generator) * 0.2
        self.values = torch.randn(N, VALUE, RANK, generator=generator) * 0.2

    def prefers_absorbed(self, queries: int, kv_len: int) -> bool:
        return self.absorbed

    def absorb(self, q: Tensor) -> Tensor:
        return torch.cat((self.absorb_nope(q[..., :PLAIN]), q[..., PLAIN:]), dim=-1)

    def absorb_nope(self, q: Tensor) -> Tensor:
        return torch.einsum("tnd,ndr->tnr", q, self.keys.to(q.device))

    def up_project(self, mixed: Tensor) -> Tensor:
        return torch.einsum("tnr,nvr->tnv", mixed[..., :RANK], self.values.to(mixed.device))

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        plain, rope = latents.split([RANK, ROPE], dim=-1)
        keys = torch.einsum("lr,ndr->lnd", plain, self.keys.to(plain.device))
        values = torch.einsum("lr,nvr->lnv", plain, self.values.to(plain.device))
        return torch.cat((keys, rope.unsqueeze(1).expand(-1, N, -1)), dim=-1), values


def latents_of(
    step: AttentionStep, q: Tensor, latents: Tensor, positions: Tensor, maps: Maps
) -> Tensor:
    spec = latent_spec(q.device, maps)
    angles = tuple(x.to(q.device) for x in spec.rope.at(positions))
    return step.attend_latents(spec, q, latents, angles)


def latent_spec(where: torch.device, maps: Maps) -> LatentSpec:
    rope, own = RotaryTable(RopeConfig(ROPE, interleaved=True), 64), norm(RANK, where)
    return LatentSpec(LAYER, 0.3, rope_dim=ROPE, rope=rope, norm=own, projections=maps)


def written(cache: PagedCache, spans: list[SequenceSpan]) -> Tensor:
    places = [(span.pages[n // PAGE], n % PAGE) for span in spans for n in range(span.kv_len)]
    both = torch.cat((cache.keys[LAYER], cache.values[LAYER]), dim=-1).cpu()
    return torch.stack([both[place] for place in places])


@pytest.mark.parametrize("lengths", [MIXED, DECODING])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_step_equals_the_cpus(
    kernels: None, lengths: list[tuple[int, int]], deterministic: bool
) -> None:
    spans = make_spans(lengths)
    cpu, gpu = make_caches(CacheSpec(2, M, D, D), spans)
    qkv = torch.randn(rows_of(spans), (N + 2 * M) * D)
    rope, positions = RotaryTable(RopeConfig(D), 64), positions_of(spans)
    step = GpuAttention.from_spans(gpu, spans, deterministic)
    assert step.positions_T.tolist() == positions.tolist()
    out = heads_of(step, qkv.to(DEVICE), rope, positions)
    want = heads_of(TorchAttention(cpu, spans), qkv, rope, positions)
    assert relative_error(out.cpu(), want) < BOUND
    assert relative_error(written(gpu, spans), written(cpu, spans)) < BOUND
    assert gpu.keys[0].isnan().all(), "the other layer's pages were touched"


@pytest.mark.parametrize("absorbed", [False, True])
def test_a_step_with_latents_equals_the_cpus(
    kernels: None, absorbed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_attention, "MAX_EXPANDED", 22)
    spans = make_spans(MIXED)
    cpu, gpu = make_caches(CacheSpec(2, 1, RANK + ROPE, 0), spans)
    q = torch.randn(rows_of(spans), N, PLAIN + ROPE)
    latents = torch.randn(rows_of(spans), RANK + ROPE)
    positions, maps = positions_of(spans), Maps(absorbed)
    step = GpuAttention.from_spans(gpu, spans)
    out = latents_of(step, q.to(DEVICE), latents.to(DEVICE), positions, maps)
    want = latents_of(TorchAttention(cpu, spans), q, latents, positions, maps)
    assert relative_error(out.cpu(), want) < BOUND
    assert relative_error(written(gpu, spans), written(cpu, spans)) < BOUND
    absorbing, expansions = step._latent_batches(maps)
    assert (absorbing is None) is not absorbed
    assert len(expansions) == (0 if absorbed else 2), "5 and 20 tokens do not fit into 22"


@pytest.mark.parametrize("latent", [False, True], ids=["heads", "latents"])
def test_stored_rows_are_those_of_a_step_that_attends(kernels: None, latent: bool) -> None:
    """Of a step from its spans, and of the buffers of a graph with rows of padding."""
    spans = make_spans(MIXED)
    spec = CacheSpec(2, 1, RANK + ROPE, 0) if latent else CacheSpec(2, M, D, D)
    cpu, gpu = make_caches(spec, spans)
    count, width = rows_of(spans), RANK + ROPE if latent else (N + 2 * M) * D
    x_TX, positions = torch.randn(count + 3, width), positions_of(spans)
    table = PageTable(len(spans), 40, DEVICE)
    buffers = DecodeBuffers(gpu, count + 3, table, shares=True)
    buffers.fill(table.put(spans))
    steps = (
        (TorchAttention(cpu, spans), x_TX[:count], positions),
        (GpuAttention.from_spans(gpu, spans), x_TX[:count].to(DEVICE), positions),
        (buffers.attention, x_TX.to(DEVICE), torch.cat((positions, torch.zeros(3).long()))),
    )
    found = []
    for step, x, at in steps:
        if latent:
            latents = latent_spec(x.device, Maps(True))
            step.store_latents(latents, x, tuple(a.to(x.device) for a in latents.rope.at(at)))
        else:
            rope = RotaryTable(RopeConfig(D), 64)
            angles = tuple(a.to(x.device) for a in rope.at(at))
            step.store_heads(head_spec(rope, x.device), x, angles)
        found.append(written(cpu if step is steps[0][0] else gpu, spans))
        for span in spans:  # what was stored is stored again
            for n in span.positions:
                gpu.keys[LAYER, span.pages[n // PAGE], n % PAGE] = math.nan
    assert relative_error(found[1], found[0]) < BOUND
    assert relative_error(found[2], found[0]) < BOUND
    assert gpu.keys[0].isnan().all(), "the other layer's pages were touched"


def test_buffers_of_a_graph_equal_a_step_of_their_own(kernels: None) -> None:
    """Filled twice, the second time with fewer sequences than before."""
    cache = PagedCache(CacheSpec(2, M, D, D), 40, PAGE, torch.float32, DEVICE)
    table = PageTable(4, 12, DEVICE)
    buffers = DecodeBuffers(cache, 4, table)
    for lengths in (DECODING, DECODING[1:]):
        spans = make_spans(lengths)
        cpu, gpu = make_caches(CacheSpec(2, M, D, D), spans)
        cache.keys.fill_(math.nan)
        cache.values.fill_(math.nan)
        pages = gpu.keys.shape[1]
        cache.keys[:, :pages] = gpu.keys
        cache.values[:, :pages] = gpu.values
        buffers.fill(table.put(spans))
        qkv = torch.randn(4, (N + 2 * M) * D)
        rope, positions = RotaryTable(RopeConfig(D), 64), positions_of(spans)
        padded = torch.zeros(4, dtype=torch.int64)
        padded[: len(spans)] = positions
        assert buffers.positions_T.tolist() == padded.tolist()
        out = heads_of(buffers.attention, qkv.to(DEVICE), rope, padded)
        step = TorchAttention(cpu, spans)
        want = heads_of(step, qkv[: len(spans)], rope, positions)
        assert relative_error(out[: len(spans)].cpu(), want) < BOUND
        assert not out[len(spans) :].any(), "padding rows are zero"
        assert relative_error(written(cache, spans), written(cpu, spans)) < BOUND


def verifying(queries: int) -> list[SequenceSpan]:
    """Sequences of different lengths with up to `queries` new tokens each."""
    return make_spans([(queries, queries), (queries, 37), (max(1, queries - 1), 20), (1, 8)])


def padded_to(x: Tensor, rows: int) -> Tensor:
    return torch.cat((x, x.new_zeros(rows - len(x), *x.shape[1:])))


def poison_unused(cache: PagedCache, spans: list[SequenceSpan]) -> None:
    """NaN in the pages of no sequence and in those behind a sequence's last token."""
    used = {0} | {page for span in spans for page in span.pages[: -(-span.kv_len // PAGE)]}
    unused = [page for page in range(cache.keys.shape[1]) if page not in used]
    assert unused
    cache.keys[:, unused] = math.nan
    cache.values[:, unused] = math.nan


Buffers = DecodeBuffers | PaddedAttention


def make_buffers(cache: PagedCache, kind: str, queries: int) -> Buffers:
    if kind == "padded":
        return PaddedAttention(cache, PageTable(5, 11))
    table, deterministic = PageTable(5, 11, DEVICE), kind == "deterministic"
    return DecodeBuffers(cache, 5 * queries, table, deterministic, shares=queries > 1)


@pytest.mark.parametrize("queries", [1, pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("kind", ["decode", "deterministic", "padded"])
def test_buffers_take_several_queries_of_a_sequence(kernels: None, kind: str, queries: int) -> None:
    """As one step from its spans; the fifth sequence is padding."""
    spans = verifying(queries)
    cpu, gpu = make_caches(CacheSpec(2, M, D, D), spans)
    cache, rows, device = gpu, 5 * queries, DEVICE
    if kind == "padded":
        cache, device = make_caches(CacheSpec(2, M, D, D), spans)[0], "cpu"
        cache.keys.copy_(cpu.keys)
        cache.values.copy_(cpu.values)
        poison_unused(cache, spans)
    buffers = make_buffers(cache, kind, queries)
    buffers.fill(buffers.table.put(spans))
    qkv, count = torch.randn(rows, (N + 2 * M) * D), rows_of(spans)
    rope, positions = RotaryTable(RopeConfig(D), 64), positions_of(spans)
    out = heads_of(buffers.attention, qkv.to(device), rope, padded_to(positions, rows)).cpu()
    want = heads_of(TorchAttention(cpu, spans), qkv[:count], rope, positions)
    assert relative_error(out[:count], want) < BOUND
    assert not out[count:].any(), "padding rows are zero"
    assert relative_error(written(cache, spans), written(cpu, spans)) < BOUND
    buffers.fill(buffers.table.put([]))
    assert not heads_of(
        buffers.attention, qkv.to(device), rope, padded_to(positions, rows)
    ).any(), "all rows are padding"


@pytest.mark.parametrize("queries", [1, pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("kind", ["decode", "deterministic", "padded"])
def test_buffers_take_several_queries_over_latents(kernels: None, kind: str, queries: int) -> None:
    spans = verifying(queries)
    cpu, gpu = make_caches(CacheSpec(2, 1, RANK + ROPE, 0), spans)
    cache, rows, device = gpu, 5 * queries, DEVICE
    if kind == "padded":
        cache, device = make_caches(CacheSpec(2, 1, RANK + ROPE, 0), spans)[0], "cpu"
        cache.keys.copy_(cpu.keys)
        poison_unused(cache, spans)
    buffers = make_buffers(cache, kind, queries)
    buffers.fill(buffers.table.put(spans))
    q, latents = torch.randn(rows, N, PLAIN + ROPE), torch.randn(rows, RANK + ROPE)
    count, positions, maps = rows_of(spans), positions_of(spans), Maps(absorbed=True)
    rows_in = (q.to(device), latents.to(device), padded_to(positions, rows), maps)
    out = latents_of(buffers.attention, *rows_in).cpu()
    step = TorchAttention(cpu, spans)
    want = latents_of(step, q[:count], latents[:count], positions, maps)
    assert relative_error(out[:count], want) < BOUND
    assert not out[count:].any(), "padding rows are zero"
    assert relative_error(written(cache, spans), written(cpu, spans)) < BOUND


@pytest.mark.parametrize("static", [False, True])
def test_a_long_sequence_has_extra_splits(
    static: bool, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extra_splits, "LEAST_TOKENS", 16)
    spans = make_spans([(1, 2), (1, 97), (1, 8)])
    cpu, cache = make_caches(CacheSpec(2, M, D, D), spans)
    qkv, rope = torch.randn(3, (N + 2 * M) * D), RotaryTable(RopeConfig(D), 128)
    positions = positions_of(spans)
    if static:
        buffers = DecodeBuffers(cache, 5, PageTable(3, 30, DEVICE))
        buffers.fill(buffers.table.put(spans))
        step, padded = buffers.attention, torch.cat((qkv, torch.zeros(2, qkv.shape[1])))
    else:
        step, padded = GpuAttention.from_spans(cache, spans), qkv
    assert step.decode is not None and step.decode.extra is not None
    if not GPU:  # more programs there
        assert step.decode.extra.counts_B[:3].tolist() == [0, 1, 0]

    def attend(step: AttentionStep, rows: Tensor) -> Tensor:
        spec = replace(head_spec(rope, rows.device), window=None)
        places = torch.zeros(len(rows), dtype=torch.long)
        places[:3] = positions
        angles = tuple(x.to(rows.device) for x in rope.at(places))
        return step.attend_heads(spec, rows, angles).cpu()[:3]

    want = attend(TorchAttention(cpu, spans), qkv)
    assert relative_error(attend(step, padded.to(DEVICE)), want) < BOUND


def test_positions_of_the_device_fill_buffers_like_those_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(extra_splits, "LEAST_TOKENS", 16)
    cache = PagedCache(CacheSpec(1, M, D, D), 20, PAGE, torch.float32, DEVICE)
    table = PageTable(3, 2000, DEVICE)
    sequences = table.put(make_spans([(1, 10), (1, 1), (1, 6)]))
    host, device = (DecodeBuffers(cache, 5, table) for _ in range(2))
    host.fill(sequences)
    for positions in ([3, 2, 1], [9, 0, 5]):  # what was filled in before is gone
        columns = torch.tensor(positions), torch.from_numpy(sequences.first_B)
        device.fill_singles(*(column.to(DEVICE) for column in columns))
    for name in ("rows_B", "kv_lens_B", "first_B", "extra.sequences_X", "extra.counts_B"):
        found = attrgetter(name)
        assert torch.equal(found(device.attention.decode), found(host.attention.decode)), name
    assert torch.equal(device.attention.slots_T, host.attention.slots_T)
    assert torch.equal(device.positions_T, host.positions_T)


def test_buffers_refuse_what_does_not_fit() -> None:
    cache = PagedCache(CacheSpec(1, M, D, D), 10, PAGE, torch.float32, DEVICE)
    table = PageTable(2, 5, DEVICE)
    sequences = table.put([SequenceSpan(0, 1, 1, [1]), SequenceSpan(1, 1, 1, [2])])
    with pytest.raises(ValueError, match="2 tokens do not fit into buffers for 1"):
        DecodeBuffers(cache, 1, table).fill(sequences)
    with pytest.raises(ValueError, match="a sequence of 6 pages does not fit into a table for 5"):
        table.put([SequenceSpan(0, 1, 1, [1] * 6)])


@pytest.mark.parametrize(
    ("value_dim", "dtype", "cut"),
    [
        (D, torch.float32, HEADS),
        (0, torch.float32, LATENTS),
        pytest.param(D, FP8, FP8_HEADS, marks=(pytest.mark.gpu, needs_gpu)),
    ],
)
def test_how_caches_are_cut(value_dim: int, dtype: torch.dtype, cut: SplitPolicy) -> None:
    cache = PagedCache(CacheSpec(1, 1, D, value_dim), 4, PAGE, dtype, DEVICE)
    decode = DecodeBuffers(cache, 9, PageTable(9, 1000, DEVICE)).attention.decode
    expected = choose_splits(9, 1, 1000 * PAGE, processors(torch.device(DEVICE)), cut)
    assert decode is not None and decode.splits == expected


def test_tiles_are_listed_with_the_longest_work_first() -> None:
    """Of 5 tokens after 8 others and 3 at the beginning, in pieces of 2."""
    spans = [SequenceSpan(0, 5, 13, [1]), SequenceSpan(5, 3, 3, [2])]
    sequences = PageTable(2, 1).put(spans)
    assert sequences.tiles(2).tolist() == [[5, 0], [0, 4], [0, 2], [0, 0], [1, 2], [1, 0]]


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("queries", [1, 3])
def test_a_captured_step_follows_its_buffers(queries: int) -> None:
    spans = verifying(queries)
    count = rows_of(spans)
    cpu, gpu = make_caches(CacheSpec(2, M, D, D), spans)
    buffers = DecodeBuffers(gpu, 5 * queries, PageTable(5, 12, DEVICE), shares=queries > 1)
    rope = RotaryTable(RopeConfig(D), 64)
    rope.cos, rope.sin = rope.cos.cuda(), rope.sin.cuda()
    qkv = torch.zeros(buffers.rows, (N + 2 * M) * D, device="cuda")
    for _ in range(2):
        heads_of(buffers.attention, qkv, rope, buffers.positions_T)
    spec = head_spec(rope, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = buffers.attention.attend_heads(spec, qkv, rope.at(buffers.positions_T))
    for _ in range(3):
        fresh = torch.randn(count, (N + 2 * M) * D)
        qkv[:count] = fresh.cuda()
        buffers.fill(buffers.table.put(spans))
        graph.replay()
        cpu_rope = RotaryTable(RopeConfig(D), 64)
        step = TorchAttention(cpu, spans)
        want = heads_of(step, fresh, cpu_rope, positions_of(spans))
        assert relative_error(out[:count].cpu(), want) < BOUND
        assert not out[count:].any()
