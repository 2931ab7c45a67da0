"""What samples rows of logits without waiting for a device. R rows · V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

import torch
from torch import Tensor

from moesaic.engine.sampling.sampler import NonFiniteLogits, SampleRow, sample

Greedy = Callable[[Tensor], Tensor]
Drawer = Callable[[Tensor, Sequence[SampleRow]], Tensor]


def samplers(kind: str, device: torch.device) -> tuple[Greedy, Drawer]:
    """What samples rows, greedily and as they ask for it, without waiting for a GPU."""
    if kind == "cpu":
        return greedy, draw
    on_device = import_module("moesaic.engine.sampling.gpu_sampler")  # needs Triton
    return on_device.greedy_rows, on_device.DeviceSampler(device).draw


def greedy(logits_RV: Tensor) -> Tensor:
    """[2, R]: the first of the most likely tokens of each row; and 1 where the row has none, since
    its logits are not finite."""
    best_R, token_R = logits_RV.max(-1)
    return torch.stack((token_R, (~best_R.isfinite()).long()))


def draw(logits_RV: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """The same, with a token for each row as it asks for one."""
    try:
        tokens, bad = sample(logits_RV, rows).token_ids, tuple[int, ...]()
    except NonFiniteLogits as error:
        bad = error.rows
        good = [n for n in range(len(rows)) if n not in bad]
        index = torch.tensor(good, device=logits_RV.device)
        kept = sample(logits_RV[index], [rows[n] for n in good]).token_ids if good else []
        known = dict(zip(good, kept, strict=True))
        tokens = [known.get(n, 0) for n in range(len(rows))]
    broken = [int(n in bad) for n in range(len(rows))]
    return torch.tensor([tokens, broken], device=logits_RV.device)
