"""The distribution of each MoE layer's tokens over experts and ranks."""

from __future__ import annotations

import msgspec

from moesaic.core.stats import EngineStats


class LayerLoad(msgspec.Struct, frozen=True):
    layer: int
    experts: list[int]
    """Tokens of each logical expert, summed over its replicas."""
    ranks: dict[int, int]
    """Tokens of each rank that has the layer."""
    balancedness: float | None
    """Mean over ranks / maximum over ranks: 1 is perfect balance. None before any token."""


class PassBalance(msgspec.Struct, frozen=True):
    """How evenly the ranks shared the rows of some forward passes: by layer, the mean over the
    passes of mean/max of the ranks."""

    passes: int
    layers: dict[int, float]

    @property
    def mean(self) -> float:
        return sum(self.layers.values()) / len(self.layers)

    def __str__(self) -> str:
        """The line of the log."""
        lowest = min(self.layers, key=lambda layer: self.layers[layer])
        return (
            f"Expert balancedness, #pass: {self.passes}, mean/max of ranks: {self.mean:.2f}, "
            f"lowest: {self.layers[lowest]:.2f} (layer {lowest})"
        )


def expert_loads(stats: EngineStats, ranks_per_expert: int = 1) -> list[LayerLoad]:
    """`ranks_per_expert`: ranks that compute parts of one expert and all count its tokens."""
    experts: dict[int, list[int]] = {}
    ranks: dict[int, dict[int, int]] = {}
    for rank in stats.ranks:
        for layer, slots, tokens in zip(rank.layers, rank.experts, rank.expert_tokens, strict=True):
            if (totals := experts.get(layer)) is None:  # once a layer: it is as long as all ranks
                totals = experts[layer] = [0] * stats.num_experts
            # A draft model may have more experts than the target.
            totals += [0] * (1 + max(slots, default=-1) - len(totals))
            for expert, number in zip(slots, tokens, strict=True):
                totals[expert] += number
            ranks.setdefault(layer, {})[rank.rank] = sum(tokens)
    return [
        LayerLoad(
            layer, [n // ranks_per_expert for n in experts[layer]], loads, balancedness(loads)
        )
        for layer, loads in sorted(ranks.items())
    ]


def balancedness(loads: dict[int, int]) -> float | None:
    most = max(loads.values(), default=0)
    return sum(loads.values()) / len(loads) / most if most else None
