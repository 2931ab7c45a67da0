"""Muon for matrices, AdamW for the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

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
    """Momentum whose every step is made orthogonal, as large as AdamW's would be on average.
    Matrices of one shape go together: a GPU has them done before a loop would have asked."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.95, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            grads = [param.grad for param in params]
            for param in params:
                if "momentum" not in self.state[param]:
                    self.state[param]["momentum"] = torch.zeros_like(param)
            momenta = [self.state[param]["momentum"] for param in params]
            torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
            steps = all_orthogonal(torch._foreach_lerp(grads, momenta, group["momentum"]))
            torch._foreach_mul_(params, 1 - group["lr"] * group["decay"])
            torch._foreach_add_(params, steps, alpha=-group["lr"])


def all_orthogonal(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Orthogonal ones whose numbers have 0.2 as their root mean square."""
    by_shape: dict[torch.Size, list[int]] = defaultdict(list)
    for number, matrix in enumerate(matrices):
        by_shape[matrix.shape[-2:]].append(number)
    found: dict[int, Tensor] = {}
    for shape, numbers in by_shape.items():
        parts = [matrices[number].reshape(-1, *shape) for number in numbers]
        done = orthogonal(torch.cat(parts)) * (0.2 * max(shape) ** 0.5)
        for number, part in zip(numbers, done.split([len(p) for p in parts]), strict=True):
            found[number] = part.reshape(matrices[number].shape)
    return [found[number] for number in range(len(matrices))]


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
