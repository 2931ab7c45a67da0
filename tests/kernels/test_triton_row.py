"""The last product of one row's experts with their sum, by Triton: against torch and the truth."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import Tensor

from moesaic.kernels import experts as contract
from moesaic.kernels.experts import Matrices, Rows
from moesaic.kernels.triton import experts_row
from moesaic.kernels.triton.experts_row import RowTile
from moesaic.moe.context import DTYPE_NAMES
from moesaic.moe.quant.weights import WEIGHT_FORMATS
from moesaic.moe.runner.device import sorted_pairs as gpu
from tests.kernels.test_triton_experts import BOUNDS, Layer, draw_ids, gpu_layer, needs_gpu
from tests.kernels.triton_cases import DEVICE, GPU, compile_apart, relative_error
from tests.unit.test_gpu_runner import (
    DTYPE,
    distance,
    forward,
    make_layer,
    numerics_of,
    routed,
    tokens,
)


def one_row(layer: Layer, ids_K: Tensor) -> tuple[Rows, Matrices, Tensor, Tensor, Tensor]:
    """Arguments of `down_row`; what is nobody's is poisoned, and so is the output."""
    _, hidden, inner = layer.shape
    nobody = ids_K < 0
    h_KI = torch.randn(len(ids_K), inner, device=DEVICE).masked_fill(nobody[:, None], torch.nan)
    weights = torch.rand(1, len(ids_K), device=DEVICE).masked_fill(nobody, torch.nan)
    y_1H = torch.full((1, hidden), torch.nan, device=DEVICE, dtype=layer.dtype)
    return Rows(h_KI.to(layer.dtype)), layer.w2, ids_K, weights, y_1H


def truth_of(h: Rows, w2: Matrices, ids_K: Tensor, weights: Tensor) -> Tensor:
    total = torch.zeros(w2.shape[1], dtype=torch.float64, device=DEVICE)
    for k, expert in enumerate(ids_K.tolist()):
        if expert >= 0:
            y_H = contract.dense_matrix(w2, expert).double() @ h.values[k].double()
            y_H += 0 if w2.bias_EN is None else w2.bias_EN[expert].double()
            total += y_H * weights[0, k].double()
    return total[None]


def check(layer: Layer, ids_K: Tensor) -> None:
    *args, y_1H = one_row(layer, ids_K)
    truth = truth_of(*args)
    twin = contract.down_row.twin(*args, torch.full_like(y_1H, torch.nan))  # type: ignore[attr-defined]
    assert experts_row.down_row(*args, y_1H) is y_1H
    for out in (y_1H, twin):
        assert relative_error(out, truth) < BOUNDS[layer.dtype]


def test_example() -> None:
    w2 = Matrices("fp32", {"values": torch.tensor([[[[3.0]]], [[[5.0]]]])}, (2, 1, 1), 1)
    h = Rows(torch.tensor([[1.0], [2.0], [torch.nan]]))
    ids, weights = torch.tensor([1, 0, -1]), torch.tensor([[1.0, 10.0, 1.0]])
    assert contract.down_row(h, w2, ids, weights, torch.empty(1, 1)).tolist() == [[65.0]]


@pytest.mark.parametrize("ids", [[2, -1, 0, 2], [-1, -1, -1], [1]])
@pytest.mark.parametrize("bias", [False, True])
def test_odd_sizes(ids: list[int], bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs that fill no program, channels that fill no step."""
    monkeypatch.setattr(experts_row, "row_tile", lambda *_: RowTile(4, 128, 1, 3))
    layer = Layer.random(3, 7, 200, "fp32", torch.float32, bias)
    check(layer, torch.tensor(ids, device=DEVICE))


def test_layer_of_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sum behind the products."""
    kernels = {
        "sort": ("group_pairs", "sum_pairs"),
        "experts": ("gate_up", "down", "gate_up_down"),
        "experts_row": ("down_row",),
    }
    called = []
    for module, names in kernels.items():
        found = import_module(f"moesaic.kernels.triton.{module}")
        for name in names:
            kernel = getattr(found, name)

            def call(*args, kernel=kernel, name=name):  # type: ignore[no-untyped-def]
                called.append(name)
                return kernel(*args)

            monkeypatch.setattr(gpu, name, call)
    monkeypatch.setattr(experts_row, "row_tile", lambda *_: RowTile(32, 128, 1, 2))
    weights = WEIGHT_FORMATS[DTYPE_NAMES[DTYPE]]
    layer = make_layer(weights, "triton")
    for how in ("each to two", "one takes all"):
        x_TH, topk = tokens(1), routed(1, how)
        y_TH = forward(layer, x_TH, topk, torch.int32)
        off = distance(y_TH, x_TH, topk, numerics_of(weights, topk.ids_TK.numel()))
        assert off < (1e-2 if GPU else 1e-6)
    assert called == ["group_pairs", "gate_up", "down_row"] * 2


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("experts", "top_k", "hidden", "inner"),
                         [(128, 8, 2048, 768), (8, 2, 4096, 14336)])  # fmt: skip
def test_real_sizes(experts: int, top_k: int, hidden: int, inner: int) -> None:
    layer = gpu_layer(experts, hidden, inner, "bf16")
    for missing in (0.0, 0.3):
        check(layer, draw_ids(1, experts, top_k, missing)[0])


@pytest.mark.slow
def test_compiled_for_hopper() -> None:
    compile_apart("aot_experts_row", "--all")
