"""The truth about a MoE layer: a float64 einsum, and layers filled with the weights it knows.

E experts · H hidden · I intermediate · T tokens · K chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.layers.module import MatrixSlot
from moesaic.moe.formats import TopKOutput
from moesaic.moe.layer import FusedMoE, MoeConfig


@dataclass(frozen=True)
class Experts:
    """Weights of all experts in float32."""

    gate_EIH: Tensor
    up_EIH: Tensor
    down_EHI: Tensor

    @classmethod
    def random(cls, num_experts: int, hidden: int, inner: int, seed: int = 0) -> Experts:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

        return cls(
            draw(num_experts, inner, hidden),
            draw(num_experts, inner, hidden),
            draw(num_experts, hidden, inner),
        )

    def matrix(self, name: str) -> Tensor:
        """Of a slot's name: `3.gate_proj.weight`."""
        expert, projection, _ = name.split(".")
        stacks = {"gate_proj": self.gate_EIH, "up_proj": self.up_EIH, "down_proj": self.down_EHI}
        return stacks[projection][int(expert)]

    def fill(self, layer: FusedMoE) -> None:
        """Every slot of a layer, quantised by its own format."""
        for slot in layer.slots(""):
            assert isinstance(slot, MatrixSlot)
            part = self.matrix(slot.name)[slot.rows, slot.cols]
            for name, plane in slot.format.encode(part).items():
                slot.into[name].copy_(plane)


def reference(experts: Experts, x_TH: Tensor, topk: TopKOutput) -> Tensor:
    """sum over k of weight * down(silu(gate x) * up x), in float64; ids of -1 add nothing."""
    gate, up, down = (w.double() for w in (experts.gate_EIH, experts.up_EIH, experts.down_EHI))
    x = x_TH.double()
    inner_TEI = torch.nn.functional.silu(torch.einsum("th,eih->tei", x, gate))
    inner_TEI = inner_TEI * torch.einsum("th,eih->tei", x, up)
    y_TEH = torch.einsum("tei,ehi->teh", inner_TEI, down)
    weights_TE = torch.zeros(len(x), len(gate), dtype=torch.float64)
    known = topk.ids_TK >= 0
    rows = torch.arange(len(x)).unsqueeze(1).expand_as(topk.ids_TK)[known]
    weights_TE.index_put_(
        (rows, topk.ids_TK[known]), topk.weights_TK.double()[known], accumulate=True
    )
    return torch.einsum("te,teh->th", weights_TE, y_TEH)


def random_topk(num_tokens: int, num_experts: int, top_k: int, seed: int) -> TopKOutput:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    ids = scores.topk(top_k, dim=1).indices
    weights = torch.rand(num_tokens, top_k, generator=generator) + 0.1
    return TopKOutput(ids, weights / weights.sum(1, keepdim=True))


def config_of(experts: Experts, top_k: int) -> MoeConfig:
    num_experts, inner, hidden = experts.gate_EIH.shape
    return MoeConfig(num_experts, hidden, inner, top_k)
