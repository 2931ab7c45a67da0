"""Sorting pairs by expert and summing them, by Triton and by torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moesaic.kernels import experts
from moesaic.kernels.experts import Groups, max_tiles
from moesaic.kernels.triton import sort
from tests.kernels.triton_cases import DEVICE, FLOATS, GPU

needs_gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA device")


def draw_ids(rows: int, num_experts: int, top_k: int, missing: float = 0.2) -> Tensor:
    ids = torch.rand(rows, num_experts).argsort(1)[:, :top_k]
    return ids.masked_fill(torch.rand(rows, top_k) < missing, -1).to(DEVICE)


def check(groups: Groups, ids_RK: Tensor, num_experts: int, block: int) -> None:
    """By what the words say, not by what another sort gives."""
    flat = ids_RK.flatten().cpu()
    counts = torch.bincount(flat[flat >= 0].long(), minlength=num_experts)
    assert groups.count_E.tolist() == counts.tolist()
    assert groups.first_E.tolist() == (counts.cumsum(0) - counts).tolist()
    assert groups.order_P is not None and groups.order_P.numel() == flat.numel()
    order = groups.order_P.long().cpu()
    for expert, count in enumerate(counts.tolist()):
        first = int(groups.first_E[expert])
        mine = order[first : first + count]
        assert mine.tolist() == (flat == expert).nonzero().flatten().tolist()
    check_tiles(groups, num_experts, block)
    assert (groups.top_k, groups.num_places) == (ids_RK.shape[1], flat.numel())


def check_tiles(groups: Groups, num_experts: int, block: int) -> None:
    expected = [
        (expert, first + offset)
        for expert, (first, count) in enumerate(
            zip(groups.first_E.tolist(), groups.count_E.tolist(), strict=True)
        )
        for offset in range(0, count, block)
    ]
    used = int(groups.num_tiles_1)
    tiles = zip(groups.tile_expert_X.tolist(), groups.tile_place_X.tolist(), strict=True)
    assert list(tiles)[:used] == expected
    assert groups.tile_expert_X.numel() == max(1, max_tiles(groups.num_places, num_experts, block))
    assert groups.block == block
    assert groups.counters is not None
    assert groups.counters.tolist() == [0] * (groups.tile_expert_X.numel() + 2)


def test_the_example_of_the_docstring() -> None:
    ids = torch.tensor([[1, 0], [1, -1]], dtype=torch.int32, device=DEVICE)
    for function in (experts.sort_pairs.twin, sort.sort_pairs):  # type: ignore[attr-defined]
        groups = function(ids, 2, 2)
        assert groups.count_E.tolist() == [1, 2]
        assert groups.first_E.tolist() == [0, 1]
        assert groups.order_P.tolist()[:3] == [1, 0, 2]
        assert int(groups.num_tiles_1) == 2
        assert groups.tile_expert_X.tolist()[:2] == [0, 1]
        assert groups.tile_place_X.tolist()[:2] == [0, 1]


@pytest.mark.parametrize(
    "rows, num_experts, top_k, block, dtype",
    [
        (1, 128, 8, 16, torch.int32),
        (0, 5, 2, 16, torch.int32),
        (3, 5, 3, 1, torch.int64),
        (67, 9, 4, 16, torch.int32),
        (33, 300, 8, 32, torch.int64),
    ],
)
def test_few_pairs(rows: int, num_experts: int, top_k: int, block: int, dtype: torch.dtype) -> None:
    ids = draw_ids(rows, num_experts, top_k).to(dtype)
    load = torch.ones(num_experts, dtype=torch.int64, device=DEVICE)
    groups = sort.sort_pairs(ids, num_experts, block, load)
    check(groups, ids, num_experts, block)
    assert load.tolist() == (groups.count_E + 1).tolist()


def test_one_expert_takes_all_and_nobody_any() -> None:
    ids = torch.full((40, 1), 3, dtype=torch.int32, device=DEVICE)
    check(sort.sort_pairs(ids, 4, 16), ids, 4, 16)
    ids.fill_(-1)
    groups = sort.sort_pairs(ids, 4, 16)
    check(groups, ids, 4, 16)
    assert int(groups.num_tiles_1) == 0


@pytest.mark.parametrize("limit", [0, 20])
def test_many_pairs(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of many pairs with few of them, so that chunks are small; 0: none at all."""
    monkeypatch.setattr(sort, "FEW_PAIRS", -1)
    monkeypatch.setattr(sort, "CHUNK", 64)
    monkeypatch.setattr(sort, "PART", 16)
    monkeypatch.setattr(sort, "COUNTS", 256)
    ids = draw_ids(limit and 47, 37, 5)
    if not limit:
        ids = torch.full((70, 2), 36, dtype=torch.int32, device=DEVICE)
    load = torch.ones(37, dtype=torch.int64, device=DEVICE)
    groups = sort.sort_pairs(ids, 37, 16, load)
    check(groups, ids, 37, 16)
    assert load.tolist() == (groups.count_E + 1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows, num_experts, top_k, block",
    [(4096, 128, 8, 64), (577, 1024, 8, 16), (3000, 3, 2, 128), (5000, 1, 1, 64)],
)
def test_many_pairs_in_whole_chunks(rows: int, num_experts: int, top_k: int, block: int) -> None:
    ids = draw_ids(rows, num_experts, top_k)
    check(sort.sort_pairs(ids, num_experts, block), ids, num_experts, block)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("rows", [1, 8, 32, 63, 128, 512, 513, 2048, 8192, 16384])
@pytest.mark.parametrize("num_experts, top_k", [(128, 8), (8, 2), (256, 8), (32, 1)])
def test_realistic_sizes(rows: int, num_experts: int, top_k: int) -> None:
    ids = draw_ids(rows, num_experts, top_k)
    check(sort.sort_pairs(ids, num_experts, 64), ids, num_experts, 64)
    ids.fill_(num_experts - 1)
    check(sort.sort_pairs(ids[:, :1].contiguous(), num_experts, 64), ids[:, :1], num_experts, 64)


def test_blocks_of_rows() -> None:
    counts = torch.tensor([0, 17, 1, 40], dtype=torch.int64, device=DEVICE)
    load = torch.ones(4, dtype=torch.int64, device=DEVICE)
    groups = sort.blocks(counts, 40, 16, load)
    twin = experts.blocks.twin(counts, 40, 16, load)  # type: ignore[attr-defined]
    assert load.tolist() == (1 + 2 * counts).tolist()
    assert groups.order_P is None
    assert groups.first_E.tolist() == twin.first_E.tolist() == [0, 40, 80, 120]
    assert groups.count_E.tolist() == counts.tolist()
    check_tiles(groups, 4, 16)
    assert (groups.num_places, groups.top_k) == (160, 1)


def test_too_many_experts() -> None:
    ids = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=r"cannot sort 1025 experts: use 1\.\.1024"):
        sort.sort_pairs(ids, 1025, 16)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows, hidden, top_k", [(3, 40, 3), (1, 1100, 8), (2, 7, 1)])
def test_sum_equals_its_twin(dtype: torch.dtype, rows: int, hidden: int, top_k: int) -> None:
    ids = draw_ids(rows, 9, top_k, missing=0.3)
    y = torch.randn(rows * top_k, hidden, device=DEVICE).to(dtype)
    y[ids.flatten() < 0] = torch.nan
    add = torch.randn(rows, hidden, device=DEVICE).to(dtype)
    for extra in (None, add):
        out = torch.full((rows, hidden), torch.nan, dtype=dtype, device=DEVICE)
        expected = experts.sum_pairs.twin(y, ids, out.clone(), extra)  # type: ignore[attr-defined]
        assert sort.sum_pairs(y, ids, out, extra) is out
        assert torch.equal(out, expected)
    assert torch.equal(sort.sum_pairs(y, ids, add, add), expected)


def test_the_example_of_a_sum() -> None:
    y = torch.tensor([[1.0], [2.0], [4.0], [torch.nan]], device=DEVICE)
    ids = torch.tensor([[3, 0], [5, -1]], device=DEVICE)
    add = torch.tensor([[10.0], [20.0]], device=DEVICE)
    for function in (experts.sum_pairs.twin, sort.sum_pairs):  # type: ignore[attr-defined]
        assert function(y, ids, torch.empty(2, 1, device=DEVICE), add).tolist() == [[13.0], [24.0]]


def test_a_sum_of_no_rows() -> None:
    ids = torch.zeros(0, 2, dtype=torch.int32, device=DEVICE)
    y, out = torch.empty(0, 8, device=DEVICE), torch.empty(0, 8, device=DEVICE)
    assert sort.sum_pairs(y, ids, out).shape == (0, 8)


@pytest.mark.parametrize("missing", [0.0, 0.4, 1.0])
def test_one_pair_a_row_is_its_sum(missing: float) -> None:
    """In place: what is somebody's stays to the bit, a NaN of nobody's becomes zero."""
    ids = draw_ids(19, 3, 1, missing)
    y = torch.randn(19, 2100, device=DEVICE).half()
    y[ids.flatten() < 0] = torch.nan
    expected = torch.where(ids < 0, 0.0, y)
    twin = experts.sum_pairs.twin  # type: ignore[attr-defined]
    assert torch.equal(twin(y.clone(), ids, out := y.clone()), expected) and out is not y
    same = y.clone()
    assert torch.equal(twin(same, ids, same), expected)
    assert sort.sum_pairs(y, ids, y) is y
    assert torch.equal(y, expected)
