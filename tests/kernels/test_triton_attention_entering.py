"""Entering and decoding in one kernel, against its torch twin and the two kernels it stands for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from moesaic.kernels import attention
from moesaic.kernels.attention import (
    DecodeRows,
    ExtraSplits,
    HeadEntry,
    LayerPages,
    Queries,
    Softmax,
    Splits,
    choose_splits,
)
from moesaic.kernels.experts import Rows
from moesaic.kernels.linear import quantise_groups
from moesaic.kernels.triton import attention_decode, rotary
from tests.kernels.test_triton_attention import (
    BOUNDS,
    Shape,
    make_case,
    on_gpu,
    small_blocks,
    softmax_of,
)
from tests.kernels.triton_cases import DEVICE, GPU, relative_error

# The interpreter loses the carry of a number that is rounded up to a power of two.
FP8_BOUND = 5e-2 if GPU else 0.15


@dataclass(frozen=True)
class Step:
    """What goes in. Newest tokens are not in the cache yet; first and last row are of nobody."""

    qkv: Tensor
    entry: HeadEntry
    cache: LayerPages
    slots: Tensor
    batch: DecodeRows
    softmax: Softmax

    def run(self, how) -> tuple[Tensor, LayerPages]:
        planes = [self.cache.keys.clone(), self.cache.values.clone()]
        cache = replace(self.cache, keys=planes[0], values=planes[1])
        size = (len(self.qkv), self.entry.num_heads, cache.value_dim)
        out = torch.full(size, math.nan, dtype=self.qkv.dtype, device=DEVICE)
        how(self.qkv, self.entry, cache, self.slots, self.batch, self.softmax, out)
        assert not self.batch.counters.any(), "counters must be zeros again"
        return out, cache


def make_step(
    shape: Shape, lengths: Sequence[int], splits: Splits, dtype: torch.dtype, fp8: bool = False,
    norm: bool = True, window: int | None = None, sinks: bool = False,
) -> Step:  # fmt: skip
    pairs = [(1, n) for n in lengths]
    case = make_case(shape, pairs, dtype, attention.FP8 if fp8 else None)
    pages, slots = case.pages.tolist(), [-1] * (len(lengths) + 2)
    for start, first, n in zip(case.starts, case.first, lengths, strict=True):
        if n:
            slots[start] = pages[first + (n - 1) // shape.page] * shape.page + (n - 1) % shape.page
    new = [slot for slot in slots if slot >= 0]
    for plane in (case.cache.keys, case.cache.values):
        blank = torch.full((len(new), *plane.shape[2:]), math.nan, device=DEVICE)
        plane.flatten(0, 1)[new] = blank.to(plane.dtype)
    make = lambda *size: torch.randn(*size).to(dtype).to(DEVICE)  # noqa: E731
    weights = [make(shape.dim) if norm else None for _ in "qk"]
    turns = [torch.randn(len(slots), shape.dim // 2).to(DEVICE) for _ in "cs"]
    return Step(
        make(len(slots), (shape.heads + 2 * shape.kv_heads) * shape.dim),
        HeadEntry(shape.heads, *turns, False, *weights, eps=1e-6),
        case.cache,
        case.ints(slots),
        case.decode(splits),
        softmax_of(case, window, sinks),
    )


def two_kernels(qkv, entry, cache, slots, batch, softmax, out) -> Tensor:
    q = Queries(rotary.enter_heads(qkv, entry, cache, slots))
    return attention_decode.decode_attention(q, cache, batch, softmax, out)


def only_enter(qkv, entry, cache, slots, *_) -> None:
    rotary.enter_heads(qkv, entry, cache, slots)


def unequal(a: Tensor, b: Tensor) -> int:
    """Bytes, so that NaN equals itself."""
    return int((a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).sum())


def compare(step: Step, bound: float) -> None:
    """With the bits of the two kernels, and near the twin; rows of nobody are not written, and no
    slot but those of the newest tokens. Sums of products have the same bits on tensor cores; on a
    GPU, heads smaller than any model's are summed by other threads, which float32 shows."""
    out, cache = step.run(attention_decode.enter_and_decode)
    exact = GPU and step.qkv.element_size() == 2
    also, other = step.run(two_kernels if exact else only_enter)
    want, twin = step.run(attention.enter_and_decode.twin)
    if exact:
        assert unequal(out, also) == 0
    rows = step.batch.rows_B.long()
    assert relative_error(out[rows], want[rows]) < bound
    assert out[[0, -1]].isnan().all(), "rows of nobody were written"
    new = step.slots[step.slots >= 0].long()
    for name in ("keys", "values"):
        mine, theirs, before, near = (
            getattr(x, name).flatten(0, 1) for x in (cache, other, step.cache, twin)
        )
        if exact or not GPU:
            assert unequal(mine, theirs) == 0
        assert relative_error(mine[new].float(), near[new].float()) < bound
        mine, before = (x.float().index_fill(0, new, 0.0) for x in (mine, before))
        assert torch.equal(mine.nan_to_num(7.0), before.nan_to_num(7.0)), "a token of nobody"


# None, one, the first of a page and of a part, the last of both, any.
LENGTHS = [1, 0, 17, 39, 32]


@pytest.mark.parametrize(
    ("shape", "norm", "window", "sinks", "splits"),
    [
        (Shape(4, 2, 32), True, None, False, Splits(2, 16)),
        (Shape(3, 1, 32, page=16), False, 18, True, Splits(3, 16)),
        (Shape(2, 1, 32), True, None, False, Splits(16, 32)),
        pytest.param(Shape(3, 1, 32), False, 18, True, Splits(16, 16), marks=pytest.mark.slow),
        pytest.param(Shape(16, 1, 128), True, None, False, Splits(1, 64), marks=pytest.mark.slow),
        (Shape(5, 1, 128, page=1), True, 3, True, Splits(2, 16)),
    ],
)
def test_one_kernel_does_what_two_do(
    shape: Shape, norm: bool, window: int | None, sinks: bool, splits: Splits,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    torch.manual_seed(shape.heads)
    small_blocks(monkeypatch)
    monkeypatch.setattr(attention_decode, "enter_heads", None)  # not the two after all
    dtype = torch.float32
    step = make_step(shape, LENGTHS, splits, dtype, norm=norm, window=window, sinks=sinks)
    compare(step, BOUNDS[dtype])


def test_an_extra_split_holds_the_new_token(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    step = make_step(Shape(4, 2, 32), [1, 39, 65], Splits(1, 16), torch.float32)
    columns = ([1, 2, 2, 2, -1], [0, 1, 3], [0, 0, 1])
    extra = ExtraSplits(*(step.batch.rows_B.new_tensor(column) for column in columns))
    compare(replace(step, batch=replace(step.batch, extra=extra)), BOUNDS[torch.float32])


def test_float8_holds_the_new_token(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    step = make_step(Shape(4, 2, 32), [21, 0], Splits(2, 16), torch.float16, fp8=True)
    step.qkv[:, -1] = 2000.0
    compare(step, FP8_BOUND)
    _, cache = step.run(attention_decode.enter_and_decode)
    assert (cache.values.flatten(0, 1)[step.slots[1].item(), -1, -1]) == 448, "clamped"
    if GPU:  # the interpreter makes a number of it
        step.qkv[:, -1] = torch.nan
        _, cache = step.run(attention_decode.enter_and_decode)
        assert cache.values.flatten(0, 1)[step.slots[1].item(), -1, -1].isnan(), "no number"


@pytest.mark.parametrize(
    "change",
    ["interleaved", "small heads"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("many rows", "many heads")],
)
def test_other_heads_enter_in_a_kernel_of_their_own(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch)
    shapes = {"small heads": Shape(2, 1, 16), "many heads": Shape(17, 1, 32)}
    step = make_step(shapes.get(change, Shape(2, 1, 32)), [3, 9], Splits(1, 64), torch.float32)
    if change == "interleaved":
        step = replace(step, entry=replace(step.entry, interleaved=True))
    if change == "many rows":
        monkeypatch.setattr(attention_decode, "MAX_FUSED_ENTRIES", 1)
    called = []
    enter = rotary.enter_heads
    monkeypatch.setattr(
        attention_decode, "enter_heads", lambda *args: called.append(1) or enter(*args)
    )
    compare(step, BOUNDS[torch.float32])
    assert called


@pytest.mark.parametrize(
    "how", [attention.enter_and_decode.twin, attention_decode.enter_and_decode]
)
def test_example_of_enter_and_decode(how) -> None:
    qkv = torch.tensor([[0.0, -1, 0, math.log(3.0), 4, 0]], device=DEVICE)
    keys, values = (torch.full((1, 2, 1, 2), math.nan, device=DEVICE) for _ in "kv")
    keys[0, 0, 0] = 0.0
    values[0, 0, 0] = torch.tensor([0.0, 8.0])
    cos, sin = torch.zeros(1, 1, device=DEVICE), torch.ones(1, 1, device=DEVICE)
    zero, one, two = torch.arange(3, dtype=torch.int32, device=DEVICE).split(1)
    batch = DecodeRows(zero, two, zero, zero, Splits(1, 64), torch.zeros_like(zero))
    out = torch.full((1, 1, 2), math.nan, device=DEVICE)
    how(qkv, HeadEntry(1, cos, sin), LayerPages(keys, values, 2), one, batch, Softmax(1.0), out)
    torch.testing.assert_close(out.cpu(), torch.tensor([[[1.0, 6.0]]]))
    torch.testing.assert_close(keys[0, 1, 0].cpu(), torch.tensor([-math.log(3.0), 0.0]))
    assert values[0, 1, 0].tolist() == [4, 0]


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("batch", [pytest.param(n, marks=on_gpu) for n in (1, 8, 32, 64)])
def test_bits_at_real_sizes(batch: int, fp8: bool) -> None:
    """Heads of Qwen3, as the cut of a graph has them."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    lengths = [1088, 1, 0, 64, 65, 777, 1089, 2048][:batch] + [1000 + n for n in range(batch - 8)]
    shape, splits = Shape(32, 4, 128, page=16), choose_splits(batch, 4, 40960, processors)
    step = make_step(shape, lengths, splits, torch.bfloat16, fp8)
    compare(step, FP8_BOUND if fp8 else BOUNDS[torch.bfloat16])


def test_quantised_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a float8 output projection takes, from the tokens as they enter."""
    small_blocks(monkeypatch)
    step = make_step(Shape(2, 1, 128), [21, 0, 5], Splits(2, 16), torch.float32)
    values = torch.full((len(step.qkv), 256), math.nan).to(attention.FP8).to(DEVICE)
    rows = Rows(values, torch.full((len(step.qkv), 2), math.nan, device=DEVICE))
    want = quantise_groups(step.run(attention_decode.enter_and_decode)[0][1:-1].flatten(1))
    out = attention_decode.enter_and_decode(
        step.qkv, step.entry, step.cache, step.slots, step.batch, step.softmax, rows
    )
    assert unequal(out.values[1:-1], want.values) == 0
    assert torch.equal(out.scales[1:-1], want.scales)
    assert out.values[[0, -1]].float().isnan().all() and out.scales[[0, -1]].isnan().all()
