"""Attention's kernels against their torch twins and a float64 softmax, with everything that is not
of a sequence poisoned."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from moesaic.kernels import attention
from moesaic.kernels.attention import (
    FP8_HEADS,
    LATENTS,
    DecodeRows,
    ExtraSplits,
    LayerPages,
    PrefillRows,
    Queries,
    Softmax,
    SplitPolicy,
    Splits,
    choose_splits,
)
from moesaic.kernels.triton import attention_decode, attention_hopper, attention_prefill
from moesaic.kernels.triton.attention_blocks import AttentionTile, two_parts
from tests.kernels.triton_cases import DEVICE, FLOATS, GPU, relative_error
from tests.pairs import every_second

BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA device")
on_gpu = (pytest.mark.gpu, needs_gpu)
needs_hopper = pytest.mark.skipif(
    not GPU or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    value_dim: int = 0
    """0: as the keys. With one latent for keys and values, `rest` of its channels are no values."""
    rest: int = 0
    page: int = 4

    @property
    def values(self) -> int:
        return self.value_dim or self.dim


@dataclass(frozen=True)
class Case:
    """Sequences of (new tokens, tokens of all) in a cache whose other places are NaN."""

    shape: Shape
    lengths: Sequence[tuple[int, int]]
    dtype: torch.dtype
    cache_dtype: torch.dtype
    q: Queries
    cache: LayerPages
    starts: list[int]
    first: list[int]
    pages: Tensor

    @property
    def rows(self) -> int:
        return sum(new for new, _ in self.lengths)

    def poisoned(self) -> Tensor:
        size = (self.rows + 2, self.shape.heads, self.shape.values)
        return torch.full(size, math.nan, dtype=self.dtype, device=DEVICE)

    def ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    def decode(self, splits: Splits, extra: ExtraSplits | None = None) -> DecodeRows:
        assert all(new == 1 for new, _ in self.lengths)
        counters = torch.zeros(len(self.lengths) * self.shape.heads, dtype=torch.int32)
        return DecodeRows(
            self.ints(self.starts),
            self.ints([kv for _, kv in self.lengths]),
            self.ints(self.first),
            self.pages,
            splits,
            counters.to(DEVICE),
            extra,
        )

    def extra(self, counts: Sequence[int], room: int) -> ExtraSplits:
        listed = [number for number, count in enumerate(counts) for _ in range(count)]
        first = [sum(counts[:number]) for number in range(len(counts))]
        listed += [-1] * (room - len(listed))
        return ExtraSplits(self.ints(listed), self.ints(counts), self.ints(first))

    def prefill(self) -> PrefillRows:
        def tiles(size: int) -> Tensor:
            pairs = [
                (number, offset)
                for number, (new, _) in enumerate(self.lengths)
                for offset in range(0, new, size)
            ]
            random.shuffle(pairs)
            # Rows behind the last tile would be a sequence far outside.
            rows = [(len(pairs), 0), *pairs, *[(1 << 20, 1 << 20)] * 3]
            return torch.tensor(rows, dtype=torch.int32, device=DEVICE)

        return PrefillRows(
            self.ints(self.starts),
            self.ints([new for new, _ in self.lengths]),
            self.ints([kv for _, kv in self.lengths]),
            self.ints(self.first),
            self.pages,
            tiles,
        )


def make_case(
    shape: Shape,
    lengths: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
) -> Case:
    """Rows of the step are left free before the first sequence and after the last one."""
    cache_dtype = cache_dtype or dtype
    needed = [-(-kv // shape.page) for _, kv in lengths]
    total = sum(needed)
    order = (torch.randperm(total + 2) + 1).int()
    first = [sum(needed[:i]) for i in range(len(needed))]
    sizes = (total + 3, shape.page, shape.kv_heads)
    keys = torch.full((*sizes, shape.dim), math.nan).to(cache_dtype)
    values = torch.full((*sizes, shape.values), math.nan).to(cache_dtype)
    for (_, kv), begin in zip(lengths, first, strict=True):
        where = torch.arange(kv)
        slots = order[begin + where // shape.page].long() * shape.page + where % shape.page
        for plane, dim in ((keys, shape.dim), (values, shape.values)):
            plane.flatten(0, 1)[slots] = torch.randn(kv, shape.kv_heads, dim).to(cache_dtype)
    scales = (0.5, 2.0) if cache_dtype != dtype else (1.0, 1.0)
    cache = LayerPages(
        keys.to(DEVICE), None if shape.rest else values.to(DEVICE), shape.values, *scales
    )
    rows = sum(new for new, _ in lengths)
    q = torch.randn(rows + 2, shape.heads, shape.dim).to(dtype).to(DEVICE)
    main = shape.dim - shape.rest
    queries = Queries(q[..., :main], q[..., main:].contiguous()) if shape.rest else Queries(q)
    starts = [1 + sum(new for new, _ in lengths[:i]) for i in range(len(lengths))]
    return Case(shape, lengths, dtype, cache_dtype, queries, cache, starts, first, order.to(DEVICE))


def expected(case: Case, softmax: Softmax) -> Tensor:
    """In float64; rows of nobody stay NaN."""
    out = torch.full((case.rows + 2, case.shape.heads, case.shape.values), math.nan).double()
    q, pages = case.q.whole().cpu().double() * softmax.scale, case.pages.tolist()
    group = case.shape.heads // case.shape.kv_heads
    keys = case.cache.keys.cpu().double() * case.cache.k_scale
    values = keys[..., : case.shape.values]
    if case.cache.values is not None:
        values = case.cache.values.cpu().double() * case.cache.v_scale
    for (new, kv), start, first in zip(case.lengths, case.starts, case.first, strict=True):
        where = [(pages[first + n // case.shape.page], n % case.shape.page) for n in range(kv)]
        k = torch.stack([keys[place] for place in where]) if kv else keys[0, :0]
        v = torch.stack([values[place] for place in where]) if kv else values[0, :0]
        for row in range(start, start + new):
            last = kv - new + row - start
            begin = 0 if softmax.window is None else max(0, last - softmax.window + 1)
            for head in range(case.shape.heads):
                logits = k[begin : last + 1, head // group] @ q[row, head]
                if softmax.sinks_N is not None:
                    logits = torch.cat((logits, softmax.sinks_N[head : head + 1].cpu().double()))
                weights = logits.softmax(0)[: last + 1 - begin]
                out[row, head] = weights @ v[begin : last + 1, head // group]
    return out


def check(out: Tensor, want: Tensor, bound: float) -> None:
    real = ~want.isnan().any(-1).any(-1)
    assert relative_error(out.cpu()[real], want[real]) < bound
    assert out.cpu()[~real].isnan().all(), "rows of nobody were written"


def softmax_of(case: Case, window: int | None = None, sinks: bool = False) -> Softmax:
    drawn = torch.randn(case.shape.heads).to(case.dtype).to(DEVICE) if sinks else None
    return Softmax(0.4, window, drawn)


DECODING = [(1, 1), (1, 0), (1, 37), (1, 70)]
GQA = Shape(8, 2, 16)
LATENT = Shape(5, 1, 48, 32, rest=16)


@pytest.mark.parametrize(
    ("shape", "window", "sinks", "splits"),
    [
        (GQA, None, True, Splits(3, 16)),
        (GQA, 3, True, Splits(3, 16)),
        (Shape(3, 3, 24, page=1), 40, False, Splits(1, 64)),
        (Shape(8, 1, 16, page=256), None, False, Splits(5, 32)),
        (LATENT, None, False, Splits(3, 32)),
    ],
)
def test_decoding_equals_the_oracle(
    shape: Shape, window: int | None, sinks: bool, splits: Splits, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(shape.dim)
    small_blocks(monkeypatch)
    case = make_case(shape, DECODING, torch.float32)
    softmax = softmax_of(case, window, sinks)
    batch = case.decode(splits)
    out = attention_decode.decode_attention(case.q, case.cache, batch, softmax, case.poisoned())
    check(out, expected(case, softmax), BOUNDS[torch.float32])
    assert not batch.counters.any(), "counters must be zeros again"
    twin = attention.decode_attention.twin(case.q, case.cache, batch, softmax, case.poisoned())
    check(twin, expected(case, softmax), BOUNDS[torch.float32])


# A GPU's blocks are larger.
SCALE = 16 if GPU else 1
LONGER = [(1, 1), (1, 0), (1, 37 * SCALE), (1, 70 * SCALE)]
# Extra splits of these; more than there are blocks, too.
EXTRA = [((0, 0, 0, 3), 5), ((0, 0, 2, 3), 5), ((1, 2, 1, 9), 16), ((0, 0, 0, 0), 3)]


@pytest.mark.parametrize(
    ("shape", "window", "splits", "counts", "room"),
    every_second(
        [(GQA, None, Splits(1, 16)), (GQA, 20, Splits(2, 16)), (LATENT, None, Splits(3, 16))],
        EXTRA,
    ),
)
def test_extra_splits_change_nothing(
    shape: Shape,
    window: int | None,
    splits: Splits,
    counts: Sequence[int],
    room: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(shape.dim)
    small_blocks(monkeypatch)
    case = make_case(shape, LONGER, torch.float32)
    softmax = softmax_of(case, window, sinks=True)
    batch = case.decode(splits, case.extra(counts, room))
    out = attention_decode.decode_attention(case.q, case.cache, batch, softmax, case.poisoned())
    check(out, expected(case, softmax), BOUNDS[torch.float32])
    assert not batch.counters.any(), "counters must be zeros again"


def test_a_split_that_is_not_listed_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs take the splits of the list: without them a result stays unmerged."""
    torch.manual_seed(0)
    small_blocks(monkeypatch)
    case = make_case(GQA, LONGER[2:], torch.float32)
    softmax, extra = softmax_of(case), case.extra((0, 3), 4)
    extra.sequences_X[1:] = -1
    batch = case.decode(Splits(1, 16), extra)
    out = attention_decode.decode_attention(case.q, case.cache, batch, softmax, case.poisoned())
    want = expected(case, softmax)
    want[case.starts[1]] = math.nan
    check(out, want, BOUNDS[torch.float32])


def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short sequences have several; a GPU is tested with what it will run."""
    if not GPU:
        tiny = attention_decode.AttentionTile(16, 16, 4, 2)
        monkeypatch.setattr(attention_decode, "CONFIGS", ((1 << 30, tiny),))
        monkeypatch.setattr(attention_decode, "SHORT_CONFIGS", ())
        monkeypatch.setattr(attention_decode, "LONE_CONFIGS", ())
        tile = attention_prefill.AttentionTile(16, 16, 4, 2)
        monkeypatch.setattr(attention_prefill, "CONFIGS", ((1 << 30, tile),))


CHUNKS = [(1, 1), (5, 5), (9, 40), (1, 37), (18, 18)]


@pytest.mark.parametrize(
    ("shape", "window", "sinks"),
    [
        (GQA, None, False),
        (Shape(8, 1, 16, page=64), 3, True),
        (Shape(6, 2, 24, page=1), 20, False),
        (Shape(2, 2, 24, 16), None, True),
        (LATENT, None, False),
        pytest.param(Shape(19, 1, 16), None, False, marks=pytest.mark.slow),
    ],
)
def test_prefill_equals_the_oracle(
    shape: Shape, window: int | None, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(shape.dim)
    small_blocks(monkeypatch)
    case = make_case(shape, CHUNKS, torch.float32)
    softmax, batch = softmax_of(case, window, sinks), case.prefill()
    out = attention_prefill.prefill_attention(case.q, case.cache, batch, softmax, case.poisoned())
    check(out, expected(case, softmax), BOUNDS[torch.float32])
    twin = attention.prefill_attention.twin(case.q, case.cache, batch, softmax, case.poisoned())
    check(twin, expected(case, softmax), BOUNDS[torch.float32])


@pytest.mark.parametrize("dtype", FLOATS[1:])
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn])
def test_other_types(
    dtype: torch.dtype, cache_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch)
    case = make_case(GQA, [(1, 21), (1, 5)], dtype, cache_dtype)
    softmax = softmax_of(case)
    want, bound = expected(case, softmax), BOUNDS[dtype]
    batch = case.decode(Splits(2, 16))
    out = attention_decode.decode_attention(case.q, case.cache, batch, softmax, case.poisoned())
    check(out, want, bound)
    rows = case.prefill()
    out = attention_prefill.prefill_attention(case.q, case.cache, rows, softmax, case.poisoned())
    check(out, want, bound)


@pytest.mark.parametrize("splits", [Splits(1, 64), Splits(3, 16)])
@pytest.mark.parametrize(
    "decode", [attention.decode_attention.twin, attention_decode.decode_attention]
)
def test_rows_of_no_sequence_stay_as_they_are(decode, splits) -> None:
    """A sequence of -1 tokens fills a list of fixed length: its row is another kernel's."""
    torch.manual_seed(0)
    case = make_case(GQA, [(1, 37), (1, 5), (1, 20)], torch.float32)
    softmax, batch = softmax_of(case), case.decode(splits)
    want = expected(case, softmax)
    want[case.starts[1]] = math.nan
    batch.kv_lens_B[1] = -1
    check(decode(case.q, case.cache, batch, softmax, case.poisoned()), want, BOUNDS[torch.float32])


def test_no_sequences() -> None:
    case = make_case(GQA, [], torch.float32)
    softmax, out = softmax_of(case), case.poisoned()
    attention_decode.decode_attention(case.q, case.cache, case.decode(Splits(1, 64)), softmax, out)
    attention_prefill.prefill_attention(case.q, case.cache, case.prefill(), softmax, out)
    assert out.isnan().all()


@pytest.mark.parametrize(
    ("shape", "dtype", "pieces"),
    [
        (Shape(4, 1, 16), torch.float32, [17, 18, 1, 1]),
        pytest.param(Shape(8, 1, 128), torch.bfloat16, [170, 129, 1, 100, 65], marks=on_gpu),
        pytest.param(Shape(2, 2, 192, 128), torch.bfloat16, [170, 129, 1, 100, 65], marks=on_gpu),
    ],
)
def test_bits_of_a_row_depend_on_its_sequence_alone(
    shape: Shape, dtype: torch.dtype, pieces: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill in one piece, in chunks and token by token."""
    small_blocks(monkeypatch)
    length = sum(pieces)
    case = make_case(shape, [(length, length)], dtype)
    softmax = softmax_of(case, None, True)

    def rows(pieces: Sequence[int]) -> Tensor:
        ends = [sum(pieces[: i + 1]) for i in range(len(pieces))]
        lengths = list(zip(pieces, ends, strict=True))
        starts = [1 + end - new for new, end in lengths]
        part = Case(
            case.shape, lengths, case.dtype, case.dtype, case.q, case.cache, starts,
            [0] * len(pieces), case.pages,
        )  # fmt: skip
        return attention_prefill.prefill_attention(
            case.q, case.cache, part.prefill(), softmax, case.poisoned()
        )[1:-1]

    whole = rows([length])
    assert not whole.isnan().any()
    assert torch.equal(rows(pieces), whole)


def worked_example() -> tuple[Queries, LayerPages, Tensor, Tensor]:
    """Keys [ln 3, 0] and [0, 0] with values [4, 0] and [0, 8]."""
    keys = torch.tensor([[math.log(3.0), 0.0], [0.0, 0.0]], device=DEVICE)
    values = torch.tensor([[4.0, 0.0], [0.0, 8.0]], device=DEVICE)
    q = torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]], device=DEVICE)
    cache = LayerPages(keys.view(1, 2, 1, 2), values.view(1, 2, 1, 2), 2)
    ints = torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
    return Queries(q), cache, ints, torch.full((2, 1, 2), math.nan, device=DEVICE)


@pytest.mark.parametrize(
    "decode", [attention.decode_attention.twin, attention_decode.decode_attention]
)
def test_example_of_decode_attention(decode) -> None:
    q, cache, ints, out = worked_example()
    zero, one, two = (ints[i : i + 1] for i in range(3))
    batch = DecodeRows(one, two, zero, zero, Splits(1, 64), torch.zeros_like(ints))
    decode(q, cache, batch, Softmax(1.0), out)
    torch.testing.assert_close(out[1].cpu(), torch.tensor([[3.0, 2.0]]))
    assert out[0].isnan().all()


@pytest.mark.parametrize(
    "prefill", [attention.prefill_attention.twin, attention_prefill.prefill_attention]
)
def test_example_of_prefill_attention(prefill) -> None:
    q, cache, ints, out = worked_example()
    zero, two = ints[:1], ints[2:]
    tiles = torch.stack((ints[1:2], zero), dim=1)
    batch = PrefillRows(zero, two, two, zero, zero, lambda size: torch.cat((tiles, 0 * tiles)))
    prefill(q, cache, batch, Softmax(1.0), out)
    torch.testing.assert_close(out.cpu(), torch.tensor([[[4.0, 0.0]], [[3.0, 2.0]]]))


def test_splits_fill_the_gpu_but_not_with_crumbs() -> None:
    assert choose_splits(1, 4, 1088, 132) == Splits(9, 128)
    assert choose_splits(1, 4, 40960, 132) == Splits(66, 128)
    assert choose_splits(8, 4, 40960, 132) == Splits(8, 128)
    assert choose_splits(16, 4, 1088, 132) == Splits(4, 128)
    assert choose_splits(256, 4, 40960, 132) == Splits(1, 128)
    assert [choose_splits(n, 4, 1088, 132).count for n in (99, 100, 132, 133)] == [1, 2, 2, 1]
    assert choose_splits(128, 4, 1088, 132, FP8_HEADS) == Splits(1, 64)
    assert choose_splits(1, 1, 0, 132) == Splits(1, 128)
    assert choose_splits(4, 1, 4096, 132, LATENTS) == Splits(32, 128)


def test_one_program_for_each_processor_is_enough_if_few_are_idle() -> None:
    assert choose_splits(32, 4, 1088, 132) == Splits(1, 128, lone=True)
    assert choose_splits(29, 4, 1088, 132) == Splits(2, 128)
    assert choose_splits(34, 4, 1088, 132) == Splits(1, 128)
    assert choose_splits(16, 4, 1088, 132, SplitPolicy(3, 64, lone=2)) == Splits(2, 64, lone=True)
    assert choose_splits(132, 1, 1088, 132, LATENTS) == Splits(2, 128)


def test_many_splits_are_merged_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 5 parts of 16 tokens two at a time, in a tile of 5 heads and channels in two pieces."""
    monkeypatch.setattr(
        attention_decode, "SHORT_CONFIGS", ((1 << 30, AttentionTile(16, 16, 4, 2)),)
    )
    monkeypatch.setattr(attention_decode, "MAX_MERGED", 2)
    monkeypatch.setattr(attention_decode, "MERGED_WIDTH", 16)
    case = make_case(Shape(5, 1, 32, 24), [(1, 71), (1, 0), (1, 40), (1, 16)], torch.float32)
    softmax, batch = softmax_of(case, None, True), case.decode(Splits(20, 16))
    for _ in range(2):
        out = attention_decode.decode_attention(case.q, case.cache, batch, softmax, case.poisoned())
        check(out, expected(case, softmax), BOUNDS[torch.float32])
    assert not batch.counters.any()


def test_tiles_of_few_programs_are_others() -> None:
    config = attention_decode.choose_config(8, 256, Splits(66, 64))
    assert (config.block, config.warps) == (128, 8)
    assert attention_decode.merging(8, 128, config) == {"HEADS": 8, "WIDTH": 128, "MERGED": 16}
    some = attention_decode.choose_config(8, 256, Splits(8, 64))
    assert attention_decode.merging(8, 128, some)["MERGED"] == 8
    assert (some.block, some.stages) == (64, 3)
    assert attention_decode.choose_config(8, 256, Splits(1, 64, lone=True)).warps == 8
    latents = attention_decode.choose_config(16, 1152, Splits(66, 128))
    assert latents == attention_decode.choose_config(16, 1152, Splits(1, 128))
    assert attention_decode.merging(16, 512, latents) == {"HEADS": 16, "WIDTH": 128, "MERGED": 8}


# As models have them, with what the GPU will run.
REAL = {
    "qwen3_30b": (Shape(32, 4, 128, page=16), None, False),
    "qwen3_30b, pages of 64": (Shape(32, 4, 128, page=64), None, False),
    "gpt_oss_20b": (Shape(64, 8, 64, page=16), 128, True),
    "mixtral": (Shape(32, 8, 128, page=1), None, False),
    "deepseek_v2_lite": (Shape(16, 1, 576, 512, rest=64, page=16), None, False),
    "deepseek_v3": (Shape(128, 1, 576, 512, rest=64, page=64), None, False),
    "expanded latents": (Shape(16, 16, 192, 128, page=64), None, False),
}
LONG = [(1, 1088), (1, 1), (1, 0), (1, 4097), (1, 777), (1, 64), (1, 2048)]
LONG_CHUNKS = [(1024, 1024), (300, 1500), (1, 900), (17, 17), (129, 2048)]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("splits", [*(Splits(n, 64) for n in (1, 7, 66)), Splits(1, 64, lone=True)])
def test_real_sizes_decode(name: str, fp8: bool, splits: Splits) -> None:
    shape, window, sinks = REAL[name]
    case = make_case(shape, LONG, torch.bfloat16, attention.FP8 if fp8 else None)
    softmax, batch = softmax_of(case, window, sinks), case.decode(splits)
    softmax = replace(softmax, scale=shape.dim**-0.5)
    out = case.poisoned()
    want = attention.decode_attention.twin(case.q, case.cache, batch, softmax, case.poisoned())
    for _ in range(3):
        out.fill_(math.nan)
        attention_decode.decode_attention(case.q, case.cache, batch, softmax, out)
        check(out, want.cpu(), BOUNDS[torch.bfloat16])
    assert not batch.counters.any()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("fp8", [False, True])
def test_real_sizes_prefill(name: str, fp8: bool) -> None:
    shape, window, sinks = REAL[name]
    case = make_case(shape, LONG_CHUNKS, torch.bfloat16, attention.FP8 if fp8 else None)
    softmax = replace(softmax_of(case, window, sinks), scale=shape.dim**-0.5)
    batch, out = case.prefill(), case.poisoned()
    want = attention.prefill_attention.twin(case.q, case.cache, batch, softmax, case.poisoned())
    attention_prefill.prefill_attention(case.q, case.cache, batch, softmax, out)
    check(out, want.cpu(), BOUNDS[torch.bfloat16])


# Heads that do not fill a tile, or more than one; keys in two parts; all that a row can see.
SPECIALISED = {
    "6 of a head": (Shape(12, 2, 128, page=1), None, True),
    "160 of a head": (Shape(160, 1, 64, page=16), None, False),
    "sinks": (Shape(64, 8, 64, page=1), None, True),
    "wide window": (Shape(32, 4, 128, page=1), 300, False),
    "one token": (Shape(8, 8, 64, page=64), 1, False),
    "narrow values": (Shape(4, 4, 128, 64, page=3), None, False),
    "two parts": (Shape(16, 16, 192, 128, page=1), None, True),
    "two parts, window": (Shape(4, 4, 192, 128, page=1), 100, False),
}


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("name", SPECIALISED)
@pytest.mark.parametrize("turns", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_specialised_warps(
    name: str, turns: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, window, sinks = SPECIALISED[name]
    rows = attention_hopper.CONFIGS
    changed = tuple((size, replace(config, turns=turns)) for size, config in rows)
    monkeypatch.setattr(attention_hopper, "CONFIGS", changed)
    monkeypatch.setattr(attention_prefill, "NARROW", 0)  # narrow windows, too
    case = make_case(shape, LONG_CHUNKS, dtype)
    softmax = replace(softmax_of(case, window, sinks), scale=shape.dim**-0.5)
    batch, out = case.prefill(), case.poisoned()
    assert attention_hopper.can_run(two_parts(case.q), case.cache, out)
    want = attention.prefill_attention.twin(case.q, case.cache, batch, softmax, case.poisoned())
    for _ in range(3):
        out.fill_(math.nan)
        attention_prefill.prefill_attention(case.q, case.cache, batch, softmax, out)
        check(out, want.cpu(), BOUNDS[dtype])
