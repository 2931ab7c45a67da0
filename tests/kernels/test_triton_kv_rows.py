"""Copies of KV caches: what the kernel writes is what its twin does, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moesaic.kernels.kv_rows import KVRows, copy_rows
from moesaic.kernels.triton import kv_rows as kernels
from tests.kernels.triton_cases import DEVICE


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, device=DEVICE)


@pytest.mark.parametrize("copy", [copy_rows.twin, kernels.copy_rows])
def test_the_example(copy) -> None:
    source, target = numbers(1, 2, 3).view(1, 3, 1), numbers(8, 8, 8).view(1, 3, 1)
    empty = target[..., :0]
    rows = KVRows(target, empty), KVRows(source, source[..., :0], numbers(2, 0))
    copy(target, *rows, 2)
    assert target.flatten().tolist() == [3, 1, 8]


@pytest.mark.parametrize("to_slots", [False, True])
@pytest.mark.parametrize("from_slots", [False, True])
@pytest.mark.parametrize(
    ("tokens", "keys", "values", "kind"),
    [
        (0, 4, 4, torch.int64),
        (1, 128, 128, torch.int64),
        (9, 144, 0, torch.int64),
        (17, 300, 64, torch.int64),
        (8, 3, 5, torch.int32),
        (31, 5, 1, torch.int16),
        (33, 7, 2, torch.uint8),
    ],
)
def test_the_kernel_does_what_its_twin_does(
    tokens: int, keys: int, values: int, kind: torch.dtype, to_slots: bool, from_slots: bool
) -> None:
    """Of a part of the heads, whose rows are further apart than they are wide."""
    torch.manual_seed(tokens)
    slots = [torch.randperm(40, device=DEVICE)[:tokens] for _ in "ab"]
    wide = [torch.randint(0, 100, (3, 40, keys + values + 9), device=DEVICE) for _ in "ab"]
    found = []
    for copy in (copy_rows.twin, kernels.copy_rows):
        source, target = (one.to(kind).clone() for one in wide)
        rows = [
            KVRows(one[..., 2 : 2 + keys], one[..., 5 + keys : 5 + keys + values], chosen)
            for one, chosen in (
                (target, slots[0] if to_slots else None),
                (source, slots[1] if from_slots else None),
            )
        ]
        copy(target, *rows, tokens)
        found.append(target)
    assert torch.equal(*found)
    changed = (found[0] != wide[1].to(kind)).sum()
    assert bool(changed) == bool(tokens)
