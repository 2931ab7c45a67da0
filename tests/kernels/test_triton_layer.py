"""A whole MoE layer by the Triton kernels, also where there is no GPU."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from moesaic.moe.quant.weights import WEIGHT_FORMATS
from moesaic.moe.runner.device import sorted_pairs as gpu
from tests.unit.test_gpu_runner import agrees, forward, make_layer, numerics_of, routed, tokens

KERNELS = {
    "sort": ("sort_pairs", "blocks", "sum_pairs"),
    "experts": ("gate_up", "down", "gate_up_down"),
    "grid": ("nvfp4_grid",),
    "quantise": ("quantise_rows",),
}


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of the functions that would choose twins for tensors on CPU."""
    for module, names in KERNELS.items():
        found = import_module(f"moesaic.kernels.triton.{module}")
        for name in names:
            monkeypatch.setattr(gpu, name, getattr(found, name))


@pytest.mark.parametrize(
    ("weights", "runner"),
    [
        ("int4_w4a16", "triton"),
        *(
            pytest.param(weights, runner, marks=pytest.mark.slow)
            for weights, runner in (
                ("fp8_block", "deep_gemm"),
                ("fp8_channel", "triton"),
                ("fp8_tensor", "triton"),
                ("int8_w8a8", "triton"),
                ("int8_w8a16", "triton"),
                ("mxfp4", "triton_kernel"),
                ("nvfp4", "flashinfer_cutedsl"),
            )
        ),
    ],
)
def test_layer(weights: str, runner: str) -> None:
    format = WEIGHT_FORMATS[weights]
    x_TH, topk = tokens(9), routed(9, "some are nobody's")
    for deterministic in (False, True):
        layer = make_layer(format, runner, deterministic=deterministic)
        y_TH = forward(layer, x_TH, topk, torch.int32)
        agrees(y_TH, x_TH, topk, numerics_of(format, topk.ids_TK.numel()))
