"""A forward pass whose layers run two micro-batches in turn.

T rows of the step · P rows of both halves, with padding · H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.core.step import Step
from moesaic.layers.context import AttentionStep, ForwardContext
from moesaic.models.blocks import CausalLM
from moesaic.overlap.executor import run_two
from moesaic.overlap.operations import MicroBatch


@dataclass(frozen=True, slots=True)
class Half:
    """A micro-batch. `rows`: those of the step that it has, padded with any others; the step names
    its lane."""

    rows: slice | Tensor
    attention: AttentionStep
    step: Step


@dataclass(frozen=True, slots=True)
class Halves:
    """`order_T`: where the step's rows are among those of both halves, the second behind the first;
    None if they are all rows, in order."""

    first: Half
    second: Half
    order_T: Tensor | None = None


def forward_halves(
    model: CausalLM,
    ids_T: Tensor,
    positions_T: Tensor,
    halves: Halves,
    x_TH: Tensor | None = None,
) -> Tensor:
    """As `model(…)`: the same rows, in the same order."""
    backbone = model.model
    embedded_TH = backbone.embed(ids_T, x_TH)
    first, second = (
        MicroBatch(
            ForwardContext(model.rope.at(positions_T[half.rows]), half.attention, half.step),
            embedded_TH[half.rows],
        )
        for half in (halves.first, halves.second)
    )
    del embedded_TH
    run_two(backbone.decoder_layers, first, second)
    hidden_PH = torch.cat([backbone.normed(batch) for batch in (first, second)])
    return hidden_PH if halves.order_T is None else hidden_PH[halves.order_T]
