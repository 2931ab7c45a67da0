"""Layers whose experts move, and which of them are planned together: those of a draft model may
have other experts than the target's.

L layers · E experts · P slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from moesaic.balance.problem import Ints
from moesaic.engine.setup.expert_buffers import ExpertImage
from moesaic.moe.expert_load import tokens_of
from moesaic.moe.layer import FusedMoE
from moesaic.moe.placement import EpLayout


@dataclass(frozen=True)
class LayerGroup:
    """Layers that are alike: one plan is for all of them."""

    layers: Sequence[FusedMoE]
    rows: slice
    """Which of all layers these are."""

    @property
    def layout(self) -> EpLayout:
        return self.layers[0].layout

    @property
    def num_experts(self) -> int:
        return self.layers[0].config.num_experts

    @property
    def num_slots(self) -> int:
        return self.layout.num_slots

    @property
    def expert_bytes(self) -> int:
        return ExpertImage.of(self.layers[0]).nbytes

    @property
    def current(self) -> Ints:
        """[L, P]: the expert in each slot."""
        return np.array([layer.placement.slots for layer in self.layers])


def groups_of(layers: Sequence[FusedMoE]) -> list[LayerGroup]:
    """Layers behind each other with as many experts, slots and bytes of an expert."""

    def kind(number: int) -> tuple[int, int, int]:
        layer = layers[number]
        image = ExpertImage.of(layer).nbytes
        return layer.config.num_experts, layer.layout.num_slots, image

    runs = [list(run) for _, run in groupby(range(len(layers)), kind)]
    return [LayerGroup([layers[n] for n in run], slice(run[0], run[-1] + 1)) for run in runs]


def computed_tokens(layers: Sequence[FusedMoE], experts: int) -> Tensor:
    """[L, E]: tokens of each expert that this rank has computed since its start."""
    total_LE = torch.zeros(len(layers), experts, dtype=torch.int64)
    counting = [(n, layer) for n, layer in enumerate(layers) if layer.load.counts]
    tokens = tokens_of([layer.load for _, layer in counting])
    for (n, layer), found in zip(counting, tokens, strict=True):
        counted = torch.tensor(layer.counted_experts)
        total_LE[n].index_add_(0, counted, torch.tensor(found, dtype=torch.int64))
    return total_LE
