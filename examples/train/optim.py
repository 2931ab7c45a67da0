"""Muon for matrices, AdamW for the rest."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

STEPS = ((3.4445, -4.7750, 2.0315),) * 5  # a quintic that drives singular values towards 1


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest matrix whose singular values are all about 1, for each matrix of a batch; by
    products alone (Newton-Schulz)."""
    x = matrix.bfloat16() if matrix.is_cuda else matrix.float()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in STEPS:
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).to(matrix.dtype)


class Muon(Optimizer):
    """Momentum whose every step is made orthogonal, as large as AdamW's would be on average."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.95, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                momentum.lerp_(param.grad, 1 - group["momentum"])
                step = orthogonal(param.grad.lerp(momentum, group["momentum"]))
                size = 0.2 * max(param.shape[-2:]) ** 0.5
                param.mul_(1 - group["lr"] * group["decay"])
                param.add_(step, alpha=-group["lr"] * size)


def optimizers(model: nn.Module, lr: float, decay: float) -> list[Optimizer]:
    """Embedding, head and routers are tables of rows, not maps of a space onto itself: AdamW."""
    rows = ("embed_tokens.weight", "lm_head.weight", "gate.weight")
    tables, matrices, vectors = [], [], []
    for name, param in model.named_parameters():
        kind = vectors if param.ndim < 2 else tables if name.endswith(rows) else matrices
        kind.append(param)
    adam = [{"params": tables, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    return [
        Muon(matrices, lr, decay),
        AdamW(adam, lr=lr, betas=(0.9, 0.95), fused=tables[0].is_cuda),
    ]
