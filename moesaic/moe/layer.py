"""The MoE layer. T tokens, H hidden, I expert intermediate, E experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moesaic.layers.module import Module, TensorSlot, parameter, slot
from moesaic.moe.experts import Activation, ExpertWeights, run_experts, silu_and_mul
from moesaic.moe.formats import TopKOutput


@dataclass(frozen=True, slots=True)
class MoeConfig:
    num_experts: int
    hidden_size: int
    intermediate_size: int
    bias: bool = False
    activation: Activation = silu_and_mul
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Checkpoint names of an expert's gate, up and down projections."""


class FusedMoE(Module):
    """All routed experts of one layer."""

    def __init__(self, config: MoeConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        experts, hidden, inner = config.num_experts, config.hidden_size, config.intermediate_size
        self.w13 = parameter(experts, 2 * inner, hidden, dtype=dtype)
        self.w2 = parameter(experts, hidden, inner, dtype=dtype)
        self.b13 = parameter(experts, 2 * inner, dtype=dtype) if config.bias else None
        self.b2 = parameter(experts, hidden, dtype=dtype) if config.bias else None
        self.weights = ExpertWeights(self.w13, self.w2, self.b13, self.b2, config.activation)

    def forward(self, x_TH: Tensor, topk: TopKOutput) -> Tensor:
        return run_experts(x_TH, topk, self.weights)

    def slots(self, prefix: str) -> Iterator[TensorSlot]:
        inner = self.config.intermediate_size
        gate, up, down = self.config.names
        for expert in range(self.config.num_experts):
            stem = f"{prefix}{expert}."
            yield slot(f"{stem}{gate}.weight", self.w13[expert, :inner])
            yield slot(f"{stem}{up}.weight", self.w13[expert, inner:])
            yield slot(f"{stem}{down}.weight", self.w2[expert])


class StackedMoE(FusedMoE):
    """Experts stored as stacked tensors with gate and up interleaved and inputs first (gpt-oss)."""

    def slots(self, prefix: str) -> Iterator[TensorSlot]:
        assert self.b13 is not None and self.b2 is not None
        arranged: list[tuple[str, Tensor, Callable[[Tensor], Tensor]]] = [
            ("gate_up_proj", self.w13, _deinterleave),
            ("gate_up_proj_bias", self.b13, _deinterleave),
            ("down_proj", self.w2, partial(torch.transpose, dim0=0, dim1=1)),
            ("down_proj_bias", self.b2, torch.clone),
        ]
        for name, stacked, arrange in arranged:
            shape = (stacked.shape[0], *reversed(stacked.shape[1:]))
            for expert in range(self.config.num_experts):
                yield TensorSlot(prefix + name, stacked[expert], shape, expert, arrange)


def _deinterleave(gate_up: Tensor) -> Tensor:
    """[H, 2I] or [2I] with gate and up alternating -> [2I, H] or [2I], gate first."""
    halves = (gate_up[..., 0::2], gate_up[..., 1::2])
    return torch.cat([half.t() for half in halves], dim=0)
