"""Pairs that the next norm sums, in a whole model on the torch twins of the GPU's kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moesaic.kernels.experts import PairSum
from moesaic.kernels.norm import SumToNorm
from moesaic.layers import linear, norm
from moesaic.layers.paged_cache import PagedCache, SequenceSpan
from moesaic.layers.torch_attention import TorchAttention
from moesaic.models.config import BuildContext, RawConfig
from moesaic.models.registry import build_model
from moesaic.models.tiny import make_tiny_checkpoint
from moesaic.models.weights import fill_randomly
from moesaic.moe import layer
from moesaic.moe.backends import load_backends
from moesaic.moe.context import DTYPE_NAMES, MoeContext
from moesaic.moe.quant.weights import WEIGHT_FORMATS
from moesaic.moe.registry import MoeProblem
from moesaic.moe.runner.base import Workspace

load_backends()
FLOAT = DTYPE_NAMES[torch.float32]


@pytest.mark.parametrize(("family", "pairs"), [("qwen3_moe", 2), ("qwen2_moe", 0)])
def test_a_model_gives_the_same_bits(
    family: str, pairs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second layer's norm and the last one get pairs; shared experts need finished sums."""
    problem = MoeProblem(
        runner="auto", payload="auto", weights=WEIGHT_FORMATS[FLOAT], dtype=FLOAT, device="cuda"
    )
    context = replace(MoeContext.make(problem, torch.float32), workspace=Workspace("cpu"))
    folder = make_tiny_checkpoint(family, tmp_path)
    model = build_model(RawConfig.read(folder), BuildContext(64, context))
    fill_randomly(model, seed=0)
    taken: list[bool] = []
    add, add_and_multiply = norm.add_rms_norm, linear.norm_linear

    def watched(x: Tensor | PairSum, *rest: object) -> tuple[Tensor, Tensor]:
        taken.append(isinstance(x, PairSum))
        return add(x, *rest)

    def watched_too(rows: SumToNorm, *rest: object) -> tuple[Tensor, Tensor]:
        taken.append(isinstance(rows.values, PairSum))
        return add_and_multiply(rows, *rest)

    def run() -> Tensor:
        step = TorchAttention(
            PagedCache(model.cache, 1, 16, torch.float32), [SequenceSpan(0, 7, 7, [0])]
        )
        return model(torch.arange(7), torch.arange(7), step)

    monkeypatch.setattr(norm, "add_rms_norm", watched)
    monkeypatch.setattr(linear, "norm_linear", watched_too)
    with torch.inference_mode():
        out = run()
        assert sum(taken) == pairs and out.isfinite().all()
        monkeypatch.setattr(layer, "MAX_DEFERRED_ROWS", -1)
        assert torch.equal(run(), out) and sum(taken) == pairs
