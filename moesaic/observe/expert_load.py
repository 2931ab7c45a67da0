"""How the tokens of each MoE layer fell on experts and ranks."""

from __future__ import annotations

import msgspec

from moesaic.core.stats import EngineStats


class LayerLoad(msgspec.Struct, frozen=True):
    """Of one layer. `experts`: tokens of each logical expert, all its copies together. `ranks`:
    tokens of each rank that has the layer. `balancedness`: their mean over their greatest, which is
    1 where all have the same; None before any token."""

    layer: int
    experts: list[int]
    ranks: dict[int, int]
    balancedness: float | None


def expert_loads(stats: EngineStats, shares: int = 1) -> list[LayerLoad]:
    """`shares`: how many ranks compute a part of the same expert, so that all count its tokens."""
    experts: dict[int, list[int]] = {}
    ranks: dict[int, dict[int, int]] = {}
    for rank in stats.ranks:
        for layer, slots, tokens in zip(rank.layers, rank.experts, rank.expert_tokens, strict=True):
            totals = experts.setdefault(layer, [0] * stats.num_experts)
            for expert, number in zip(slots, tokens, strict=True):
                totals[expert] += number
            ranks.setdefault(layer, {})[rank.rank] = sum(tokens)
    return [
        LayerLoad(layer, [n // shares for n in experts[layer]], loads, balancedness(loads))
        for layer, loads in sorted(ranks.items())
    ]


def balancedness(loads: dict[int, int]) -> float | None:
    most = max(loads.values(), default=0)
    return sum(loads.values()) / len(loads) / most if most else None
