"""Dense collectives of ranks in one process, by Triton and by torch.

N elements of a part · M of a result · R rows · V columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic.comm.collectives.device_collective import DeviceCollective
from moesaic.comm.lifecycle import Membership
from moesaic.comm.windows.device_window import CpuDeviceWindow
from moesaic.kernels import collectives as reference
from moesaic.kernels.a2a import ChannelCall, DeviceStateWord, Failure, FailureWords
from moesaic.kernels.collectives import Columns, ElementRange, Sum, Target
from moesaic.kernels.triton import collectives as triton_kernels
from tests.kernels.triton_cases import DEVICE, FLOATS, GPU, compile_apart

LANES, LANE_BYTES, POST_BYTES = 3, 2048, 1024
TAG = 77
NAMES = ("push", "publish", "publish_sums", "pull")
# Without their decorator, so that tensors on a GPU come to them as well; they compute on CPU only.
TWINS: Any = SimpleNamespace(**{name: getattr(reference, name).twin for name in NAMES})
KERNELS: Any = triton_kernels
EITHER = [KERNELS] if GPU else [TWINS, KERNELS]
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA device")


def make_ranks(
    size: int, lanes: int = LANES, lane_bytes: int = LANE_BYTES, nbytes: int = POST_BYTES
) -> list[DeviceCollective]:
    """Whose regions hold NaN wherever nobody has written."""
    specs = DeviceCollective.planes(size, nbytes, lanes, lane_bytes)
    windows = CpuDeviceWindow.between(size, specs, 20.0, DeviceCollective.channels(lanes))
    regions = torch.stack(windows[0].signals.regions).to(DEVICE)
    regions[:, windows[0].offset("pushed") :] = 255
    bases = torch.tensor([region.data_ptr() for region in regions], device=DEVICE)
    for window in windows:
        failure = torch.zeros(8, dtype=torch.int64, pin_memory=GPU)
        state = window.signals.state.to(DEVICE)
        window.signals = replace(
            window.signals,
            regions=regions.unbind(0),
            bases_P=bases,
            state=state,
            failure=failure,
        )
    return [DeviceCollective(window, nbytes, lanes, lane_bytes) for window in windows]


def on(comm: DeviceCollective, posts: bool) -> tuple[ChannelCall, reference.Board]:
    channel = comm._planes.publish_channel if posts else 0
    return ChannelCall(comm.window.signals, channel, TAG), comm._planes


def push_all(
    kernels: Sequence[Any],
    ranks: Sequence[DeviceCollective],
    parts: Sequence[Tensor],
    outs: Sequence[Tensor],
    cut: ElementRange,
    targets: Sequence[Target],
) -> None:
    """All but the last give; the last gives and takes at once, which it need not wait for; then the
    others take."""
    for kernel, comm, part, target in list(zip(kernels, ranks, parts, targets, strict=True))[:-1]:
        kernel.push(*on(comm, False), part, None, cut, target)
    kernels[-1].push(*on(ranks[-1], False), parts[-1], outs[-1], cut, targets[-1])
    for kernel, comm, out, target in list(zip(kernels, ranks, outs, targets, strict=True))[:-1]:
        kernel.push(*on(comm, False), None, out, cut, target)


def draw(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator).to(dtype).to(DEVICE)
    return torch.randint(0, 200, (count,), generator=generator, dtype=dtype).to(DEVICE)


def add(parts: Sequence[Tensor]) -> Tensor:
    """The definition: in rank order, floats in float32, rounded once."""
    wide = torch.float32 if parts[0].dtype.is_floating_point else parts[0].dtype
    result = parts[0].to(wide)
    for other in parts[1:]:
        result = result + other.to(wide)
    exact = sum(part.double() for part in parts)
    assert not parts[0].is_floating_point() or torch.allclose(result.double(), exact, atol=1e-5)
    return result.to(parts[0].dtype)


def garbage(count: int, dtype: torch.dtype) -> Tensor:
    return torch.full((count * dtype.itemsize,), 255, dtype=torch.uint8, device=DEVICE).view(dtype)


def check_fine(ranks: Sequence[DeviceCollective]) -> None:
    for comm in ranks:
        assert comm.window.signals.failure.tolist() == [0] * 8
        assert comm.window.signals.state[DeviceStateWord.BROKEN] == 0


@pytest.mark.parametrize("kernels", EITHER)
def test_the_example_of_the_docstring(kernels: Any) -> None:
    ranks = make_ranks(2)
    parts = [torch.tensor([1.0, 2, 3], device=DEVICE), torch.tensor([10.0, 20, 30], device=DEVICE)]
    for target, expected in (
        (Sum(1), [22, 33]),
        (Columns(3, 1, True, 2), [1, 10, 2, 20, 3, 30]),
    ):
        outs = [garbage(len(expected), torch.float32) for _ in parts]
        push_all([kernels] * 2, ranks, parts, outs, ElementRange(0, 3), [target] * 2)
        assert [out.tolist() for out in outs] == [expected] * 2
    check_fine(ranks)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.uint8])
def test_small_sums(dtype: torch.dtype) -> None:
    """Rounds of other sizes in a row, so that lanes are not in step, of ranks that want different
    elements, by kernels and twins together."""
    most = LANES * LANE_BYTES // dtype.itemsize
    ranks = make_ranks(3)
    kernels = [KERNELS, KERNELS if GPU else TWINS, KERNELS]
    counts = (1, most, 0, 259, 2 * most // 3 + 1, most - 5)
    for seed, count in enumerate(counts):
        parts = [draw(count, dtype, 10 * seed + rank) for rank in range(3)]
        wanted = [range(count), range(count // 3, count // 2), range(count, count)]
        outs = [garbage(len(span) + 1, dtype) for span in wanted]
        edges = [out[-1:].clone() for out in outs]
        views = [out[:-1] for out in outs]
        push_all(
            kernels, ranks, parts, views, ElementRange(0, count), [Sum(s.start) for s in wanted]
        )
        expected = add(parts)
        for view, span in zip(views, wanted, strict=True):
            assert torch.equal(view, expected[span.start : span.stop]), (count, span)
        for out, edge in zip(outs, edges, strict=True):
            assert out[-1:].view(torch.uint8).tolist() == edge.view(torch.uint8).tolist()
    check_fine(ranks)
    used = [max(1, -(-count * dtype.itemsize // LANE_BYTES)) for count in counts]
    raised = ranks[0].window.signals.state[DeviceStateWord.CHANNELS :: 2].view(-1, 2).tolist()
    rounds = [sum(lanes > lane for lanes in used) for lane in range(LANES)]
    assert raised == [[(count + 1) // 2, count // 2] for count in (*rounds, 0)]


def test_a_negative_zero_stays() -> None:
    ranks = make_ranks(2)
    parts = [torch.tensor([-0.0], device=DEVICE)] * 2
    outs = [garbage(1, torch.float32) for _ in parts]
    push_all([KERNELS] * 2, ranks, parts, outs, ElementRange(0, 1), [Sum()] * 2)
    assert [torch.signbit(out).item() for out in outs] == [True, True]


def side_by_side(parts: Sequence[Tensor], rows: int, first: int) -> Tensor:
    return torch.cat([part.view(rows, part.numel() // rows) for part in parts], 1)[first:]


@pytest.mark.parametrize("pushed", [True, False], ids=["pushed", "posted"])
@pytest.mark.parametrize("rows, widths", [
    (1, (5, 5, 5)), (1, (300, 0, 17)), (7, (16, 16, 16)), (6, (1, 9, 0)), (3, (33, 33, 33)),
])  # fmt: skip
def test_columns(rows: int, widths: tuple[int, ...], pushed: bool) -> None:
    """Ranks want different rows; posted ones go in pieces."""
    ranks, total = make_ranks(3, nbytes=512), sum(widths)
    parts = [draw(rows * width, torch.int64, width + rank) for rank, width in enumerate(widths)]
    even = len(set(widths)) == 1
    firsts = [0, rows // 2, min(1, rows - 1)]
    lasts = [rows, rows, min(rows, 3)]
    outs = [
        garbage((last - first) * total, torch.int64)
        for first, last in zip(firsts, lasts, strict=True)
    ]
    targets = [Columns(rows, widths[rank], even, total, firsts[rank]) for rank in range(3)]
    kernels = [KERNELS, KERNELS if GPU else TWINS, KERNELS]
    count = rows * max(widths)
    if pushed:
        push_all(kernels, ranks, parts, outs, ElementRange(0, count), targets)
    for begin in () if pushed else range(0, count, 64):
        cut = ElementRange(begin, min(count, begin + 64))
        for kernel, comm, part, target in zip(kernels, ranks, parts, targets, strict=True):
            kernel.publish(*on(comm, True), part, cut, target)
        for kernel, comm, out, target in zip(kernels, ranks, outs, targets, strict=True):
            kernel.pull(*on(comm, True), out, cut, target)
    for out, first, last in zip(outs, firsts, lasts, strict=True):
        expected = side_by_side(parts, rows, first)[: last - first]
        assert torch.equal(out, expected.reshape(-1)), (first, last)
    check_fine(ranks)


@pytest.mark.parametrize("size, dtype", [(2, torch.float32), (3, torch.float16), (4, torch.int64)])
def test_large_sums(size: int, dtype: torch.dtype) -> None:
    """In pieces, of one round each between two ranks, else of two: as the collective has them."""
    ranks = make_ranks(size)
    count = 3 * POST_BYTES // dtype.itemsize - 11
    parts = [draw(count, dtype, rank) for rank in range(size)]
    wanted = [range(rank * 37, count - 50 * rank) for rank in range(size)]
    outs = [garbage(len(span), dtype) for span in wanted]
    kernels = [KERNELS if GPU or rank != 1 else TWINS for rank in range(size)]
    steps = [
        large_sum(kernel, comm, part, out, span.start)
        for kernel, comm, part, out, span in zip(kernels, ranks, parts, outs, wanted, strict=True)
    ]
    for together in zip(*steps, strict=True):
        for step in together:
            step()
    expected = add(parts)
    for out, span in zip(outs, wanted, strict=True):
        assert torch.equal(out, expected[span.start : span.stop])
    check_fine(ranks)


def large_sum(
    kernels: Any, comm: DeviceCollective, part: Tensor, out: Tensor, first: int
) -> list[Callable[[], None]]:
    """What DeviceCollective._sum_large calls, one after the other."""
    steps: list[Callable[[], None]] = []
    recorded = {
        name: lambda *args, name=name: steps.append(lambda: getattr(kernels, name)(*args))
        for name in ("publish", "publish_sums", "pull")
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, record in recorded.items():
            patch.setattr(f"moesaic.comm.collectives.device_collective.{name}", record)
        comm._sum_large(part, out, first, TAG)
    return steps


@pytest.mark.parametrize("kernels", EITHER)
@pytest.mark.parametrize("count", [2**16 - 2, 2**32 - 2])
def test_rounds_past_a_count_that_begins_anew(count: int, kernels: Any) -> None:
    """And after a restart, in which a rank that is late is only that."""
    ranks = make_ranks(2)
    parts = [draw(5, torch.float32, rank) for rank in range(2)]
    for comm in ranks:
        comm.window.timeout = 0.001
        comm.restart(Membership(1, tuple(range(comm.size))))
        comm.window.signals.state[DeviceStateWord.CHANNELS :: 2] = count

    def rounds() -> None:
        for _ in range(6):
            outs = [garbage(5, torch.float32) for _ in ranks]
            push_all([kernels] * 2, ranks, parts, outs, ElementRange(0, 5), [Sum()] * 2)
            assert all(torch.equal(one, add(parts)) for one in outs)
        check_fine(ranks)

    rounds()
    for comm in ranks:
        comm.restart(Membership(2, tuple(range(comm.size))))
    out = garbage(5, torch.float32)
    kernels.push(*on(ranks[0], False), parts[0], out, ElementRange(0, 5), Sum())
    assert out.tolist() == [0.0] * 5
    assert ranks[0].window.signals.failure[FailureWords.FAILURE] == Failure.TIMEOUT
    for comm in ranks:
        comm.restart(Membership(3, tuple(range(comm.size))))
    rounds()


@pytest.mark.parametrize("kernels", EITHER)
def test_who_is_missing(kernels: Any) -> None:
    """Rank 2 is missing: zeros, failure words, and no more writes to peers until a restart."""
    ranks = make_ranks(3)
    for comm in ranks:
        comm.window.signals.state[DeviceStateWord.TIMEOUT_NS] = 1_000_000
    parts = [draw(5, torch.float32, rank) for rank in range(3)]
    for comm, part in zip(ranks[:2], parts, strict=False):
        kernels.push(*on(comm, False), part, None, ElementRange(0, 5), Sum())
    out = garbage(5, torch.float32)
    kernels.push(*on(ranks[0], False), None, out, ElementRange(0, 5), Sum())
    assert out.tolist() == [0.0] * 5
    word = 1 << 16 | TAG
    expected = [0, Failure.TIMEOUT, 0, 0b100, 0, word, 0, 0]
    assert ranks[0].window.signals.failure.tolist() == expected
    before = [region.clone() for region in ranks[0].window.signals.regions]
    state = ranks[0].window.signals.state.clone()
    out.fill_(torch.nan)
    kernels.push(*on(ranks[0], False), parts[0], out, ElementRange(0, 5), Sum())
    assert out.tolist() == [0.0] * 5
    kernels.publish(*on(ranks[0], True), parts[0], ElementRange(0, 5), Sum())
    kernels.publish_sums(*on(ranks[0], True), torch.float32, ElementRange(0, 5), 4)
    out.fill_(torch.nan)
    kernels.pull(*on(ranks[0], True), out, ElementRange(0, 5), Sum())
    assert out.tolist() == [0.0] * 5
    assert torch.equal(ranks[0].window.signals.state, state)
    assert all(map(torch.equal, before, ranks[0].window.signals.regions))
    for comm in ranks:
        comm.restart(Membership(1, tuple(range(comm.size))))
    outs = [garbage(5, torch.float32) for _ in ranks]
    push_all([kernels] * 3, ranks, parts, outs, ElementRange(0, 5), [Sum()] * 3)
    assert all(torch.equal(one, add(parts)) for one in outs)
    check_fine(ranks)


def test_who_is_elsewhere() -> None:
    ranks = make_ranks(2)
    part = draw(5, torch.float32, 0)
    call, planes = on(ranks[1], False)
    KERNELS.push(replace(call, tag=TAG + 1), planes, part, None, ElementRange(0, 5), Sum())
    out = garbage(5, torch.float32)
    KERNELS.push(*on(ranks[0], False), part, out, ElementRange(0, 5), Sum())
    assert out.tolist() == [0.0] * 5
    words = ranks[0].window.signals.failure
    assert words[FailureWords.FAILURE] == Failure.OUT_OF_STEP and words[FailureWords.PEERS] == 0b10
    assert words[FailureWords.SEEN] == words[FailureWords.WANTED] + 1


def test_compiled_for_a_gpu() -> None:
    compile_apart("aot_collectives")


@pytest.mark.slow
def test_all_compiled_for_a_gpu() -> None:
    compile_apart("aot_collectives", "all")
