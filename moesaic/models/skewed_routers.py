"""Routers of dummy weights that prefer some experts, for benchmarks of balancing.

With random weights all experts are about equally popular. A row of the router that is larger than
the others is among the largest logits, and among the smallest, more often. So the sizes of rows set
the popularity of experts, up to half of the tokens.

S samples · E experts · K chosen.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from moesaic.models.blocks import CausalLM, Router, SparseBlock

SAMPLES: Final = 4096
PASSES: Final = 60
MOST: Final = 0.45
"""The largest share of tokens that a row's size can reach, and be told from others."""


def popularity(experts: int, top_k: int, exponent: float) -> NDArray[np.float64]:
    """The share of tokens of each expert by Zipf's law, the most popular first. What the first ones
    cannot have, the others share."""
    shares = np.arange(1, experts + 1) ** -exponent
    first, most = 0, max(MOST, top_k / experts)
    while True:  # the experts before `first` have as much as they can
        found = (top_k - most * first) * shares / shares[first:].sum()
        found[:first] = most
        if found[first] <= most + 1e-9:
            return found
        first += 1


@lru_cache(maxsize=8)
def row_sizes(experts: int, top_k: int, exponent: float) -> tuple[float, ...]:
    """Factors of the router's rows that give this popularity to rows of normal numbers."""
    target_E = popularity(experts, top_k, exponent)
    logits_SE = np.random.default_rng(0).standard_normal((SAMPLES, experts))
    size_E = np.ones(experts)
    for turn in range(PASSES):
        chosen = np.argpartition(-logits_SE * size_E, top_k, axis=1)[:, :top_k]
        share_E = np.bincount(chosen.ravel(), minlength=experts) / SAMPLES
        step = 0.5 / (1 + turn / 10)
        size_E *= (target_E / np.maximum(share_E, 0.5 / SAMPLES)) ** step
        size_E /= np.exp(np.log(size_E).mean())
    return tuple(size_E.tolist())


def skew_routers(model: CausalLM, exponent: float, seed: int) -> None:
    """Scales the routers' rows, in another order of experts in each layer."""
    blocks = [module for module in model.modules() if isinstance(module, SparseBlock)]
    for number, block in enumerate(blocks):
        router, top_k = block.gate, block.experts.config.top_k
        assert isinstance(router, Router)
        experts = len(router.weight)
        order = torch.randperm(experts, generator=torch.Generator().manual_seed(seed + number))
        sizes_E = torch.tensor(row_sizes(experts, top_k, exponent))[order]
        weight = router.weight.detach()
        weight.mul_(sizes_E.to(weight.device, weight.dtype)[:, None])
