"""Experts with biases and a clamped activation, as gpt-oss has them, cut over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic.comm.collectives.group import RankGroup
from moesaic.core.step import DECODE
from moesaic.moe.activations import Swiglu
from moesaic.moe.context import MoeContext
from moesaic.moe.formats import TopKOutput
from moesaic.moe.layer import FusedMoE, MoeConfig
from moesaic.moe.quant.weights import WEIGHT_FORMATS
from moesaic.moe.registry import MoeProblem
from tests.moe_oracle import Experts, random_topk

EXPERTS = Experts.random(4, 64, 64)
ALPHA, LIMIT = 1.702, 1.5
BIASES = torch.randn(4, 192, generator=torch.Generator().manual_seed(5))  # gate, up, down


def expected(x_TH: Tensor, topk: TopKOutput) -> Tensor:
    """In float64, token by token."""
    out = torch.zeros(x_TH.shape, dtype=torch.float64)
    for t, k in torch.cartesian_prod(torch.arange(len(x_TH)), torch.arange(2)).tolist():
        e, x = int(topk.ids_TK[t, k]), x_TH[t].double()
        gate = EXPERTS.gate_EIH[e].double() @ x + BIASES[e, :64].double()
        up = EXPERTS.up_EIH[e].double() @ x + BIASES[e, 64:128].double()
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT) + 1
        inner = gate * torch.sigmoid(ALPHA * gate) * up
        y = EXPERTS.down_EHI[e].double() @ inner + BIASES[e, 128:].double()
        out[t] += float(topk.weights_TK[t, k]) * y
    return out


def work(group: RankGroup, a2a: str, mode: str, ep: int, name: str) -> tuple[float, float]:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[name]
    problem = MoeProblem(
        a2a=a2a,
        mode=mode,
        weights=WEIGHT_FORMATS[name],
        dtype=name,
        ep=ep,
        tp=group.size,
        phases=("decode",),
    )
    context = MoeContext.make(problem, dtype, group, max_tokens=32, max_decode_tokens=32)
    activation = Swiglu(ALPHA, LIMIT)
    layer = FusedMoE(MoeConfig(4, 64, 64, 2, bias=True, activation=activation), context)
    EXPERTS.fill(layer)
    share = layer.share
    for local, expert in enumerate(layer.local_experts):
        assert layer.b13 is not None
        layer.b13[local] = torch.cat((BIASES[expert, :64][share], BIASES[expert, 64:128][share]))
        if layer.b2 is not None:
            layer.b2[local] = BIASES[expert, 128:]
    x = torch.randn(11, 64, generator=torch.Generator().manual_seed(group.rank)).to(dtype)
    topk = random_topk(11, 4, 2, seed=group.rank)
    truth = expected(x, topk)
    error = (layer(x, topk, DECODE).double() - truth).abs().max()
    return float(error), float(truth.abs().max())


@pytest.mark.parametrize("name, bound", [("fp32", 1e-5), ("bf16", 2e-2)])
@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize(
    "a2a, mode",
    [("none", "auto"), ("deepep", "normal"), ("deepep", "low_latency"), ("ascend_fuseep", "auto")],
)
def test_biases_are_added_once(
    pools: Any, a2a: str, mode: str, ep: int, name: str, bound: float
) -> None:
    for error, size in pools(4).run(work, a2a, mode, ep, name):
        assert error < bound * size
