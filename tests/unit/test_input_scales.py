"""Calibrated global scales of nvfp4 activations reach the runner and what travels."""

from __future__ import annotations

import pytest
import torch

from moesaic.layers.module import MatrixSlot
from moesaic.moe.context import MoeContext
from moesaic.moe.layer import FusedMoE
from moesaic.moe.quant.weights import WEIGHT_FORMATS
from moesaic.moe.registry import MoeProblem
from tests.moe_oracle import Experts, config_of, random_topk, reference


@pytest.mark.parametrize("a2a, payload", [("none", "nvfp4"), ("deepep", "nvfp4"), ("none", "fp32")])
def test_tiny_activations_need_their_scale(a2a: str, payload: str) -> None:
    """Activations of 1e-6 are below what a block scale can express on its own."""
    experts = Experts.random(6, 64, 32)
    problem = MoeProblem(a2a=a2a, weights=WEIGHT_FORMATS["nvfp4"], dtype="fp32", payload=payload)
    layer = FusedMoE(config_of(experts, 2), MoeContext.make(problem, torch.float32))
    experts.fill(layer)
    topk = random_topk(20, 6, 2, seed=1)
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(2)) * 1e-6
    truth = reference(experts, x, topk)

    def error() -> float:
        return float((layer(x, topk).double() - truth).norm() / truth.norm())

    assert error() > 0.9
    for slot in layer.slots(""):
        assert isinstance(slot, MatrixSlot) and slot.set_input_scale is not None
        down = "down_proj" in slot.name
        # What calibration gives: the largest value over 6 * 448.
        slot.set_input_scale(1e-11 / 2688 if down else 5e-6 / 2688)
    layer.sync_input_scales()
    assert error() < 0.3
