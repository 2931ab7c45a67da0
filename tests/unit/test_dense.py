"""Projections that are kept as float8: their choice, memory and results. Only a GPU keeps them;
these tests use the torch twins on CPU."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moesaic.comm.collectives.collective import ShapeOnlyCollective
from moesaic.engine.setup.dense_setup import dense_weights, stored_weights
from moesaic.layers.linear import Linear, LinearConfig, MergedLinear, OutputPart, linears
from moesaic.layers.parallel import Parallel
from moesaic.models.blocks import CausalLM
from moesaic.models.config import BuildContext, RawConfig
from moesaic.models.dense import DenseWeights
from moesaic.models.quantize import QuantizeJob, quantize
from moesaic.models.registry import build_model
from moesaic.models.schemes import detect_scheme
from moesaic.models.tiny import make_tiny_checkpoint
from moesaic.models.weights import fill_randomly, load_weights
from moesaic.moe.context import MoeContext
from moesaic.moe.quant.weights import WEIGHT_FORMATS

BLOCK, CHANNEL = WEIGHT_FORMATS["fp8_block"], WEIGHT_FORMATS["fp8_channel"]
SIZES = {
    "hidden_size": 128,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_experts": 2,
}
# For 128 products: a float8 number has an error up to 1/16, 0.026 on average.
ACTIVATION_ROUNDING = 0.04


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint("qwen2_moe", tmp_path_factory.mktemp("plain"), changes=SIZES)


@pytest.fixture(scope="module")
def stored(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("stored")
    for form in ("fp8", "fp8_channel", "int8_w8a16"):
        quantize(plain, root / form, QuantizeJob(form))
    return {form.name: form for form in root.iterdir()}


def loaded(
    folder: Path, dense: DenseWeights | None = None, parallel: Parallel | None = None
) -> CausalLM:
    context = BuildContext(64, MoeContext.single(torch.float32), parallel or Parallel(), dense)
    model = build_model(RawConfig.read(folder), context)
    load_weights(model, folder)
    return model


def kept(folder: Path) -> DenseWeights:
    found = stored_weights(detect_scheme(RawConfig.read(folder), folder), folder)
    assert found is not None
    return found


def off(out: Tensor, wanted: Tensor) -> float:
    return float((out - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("form", ["fp8", "fp8_channel"])
def test_kept_and_decoded_agree(stored: dict[str, Path], form: str) -> None:
    """Results agree up to the rounding of activations, and exactly if nothing is rounded."""
    dense = kept(stored[form])
    fp8, decoded = loaded(stored[form], dense), loaded(stored[form])
    others = dict(linears(decoded))
    names = []
    for prefix, linear in linears(fp8):
        other = others[prefix]
        if linear.format is None:
            assert torch.equal(linear.weight, other.weight)
            continue
        names.append(prefix.removeprefix("model.layers.0."))
        x = torch.randn(5, other.weight.shape[1])
        assert off(linear(x), other(x)) < ACTIVATION_ROUNDING
        exact = x.to(torch.float8_e4m3fn).float()
        exact[:, ::128] = 448
        assert off(linear(exact), other(exact)) < 1e-6
    mlp = ["mlp.shared_expert.gate_up_proj.", "mlp.shared_expert.down_proj."]
    assert names == ["self_attn.qkv_proj.", "self_attn.o_proj.", *mlp]
    x = torch.randn(3, 128)
    shared, other_shared = (m.model.layers[0].mlp.shared_experts for m in (fp8, decoded))
    assert off(shared(x), other_shared(x)) < 2 * ACTIVATION_ROUNDING


def test_memory_is_counted(stored: dict[str, Path]) -> None:
    folder = stored["fp8"]
    fp8, decoded = loaded(folder, kept(folder)), loaded(folder)
    numbers = sum(lin.values.numel() for _, lin in linears(fp8) if lin.format is not None)
    scales = sum(lin.scales.numel() for _, lin in linears(fp8) if lin.format is not None)
    assert numbers == (256 + 128 + 128) * 128 + 128 * 256 + 3 * 128 * 128
    assert (numbers, scales) == (scales * 128 * 128, 9)
    assert decoded.nbytes - fp8.nbytes == 4 * numbers - numbers - 4 * scales


def test_an_unquantised_checkpoint_is_quantised(plain: Path) -> None:
    """--quantization fp8 on a GPU does so; embedding, head and router stay."""
    fp8, whole = loaded(plain, DenseWeights(BLOCK)), loaded(plain)
    others = dict(linears(whole))
    changed = [prefix for prefix, linear in linears(fp8) if linear.format is not None]
    assert len(changed) == 4
    for prefix, linear in linears(fp8):
        if linear.format is not None:
            x = torch.randn(4, others[prefix].weight.shape[1])
            assert off(linear(x), others[prefix](x)) < 2 * ACTIVATION_ROUNDING
    assert torch.equal(fp8.lm_head.weight, whole.lm_head.weight)
    assert torch.equal(fp8.model.layers[0].mlp.gate.weight, whole.model.layers[0].mlp.gate.weight)


def test_a_rank_reads_its_part(stored: dict[str, Path]) -> None:
    """Two ranks share the heads: each has 128 query channels, and 64 of keys and values, which are
    not whole blocks. The output projection is split by columns of 128."""
    folder = stored["fp8"]
    whole = dict(linears(loaded(folder, kept(folder))))["model.layers.0.self_attn.o_proj."]
    for rank in range(2):
        group = ShapeOnlyCollective(rank, 2)
        parallel = Parallel(attention=group, stage=group, dense_tp=1, vocab_tp=1)
        part = dict(linears(loaded(folder, kept(folder), parallel)))
        assert part["model.layers.0.self_attn.qkv_proj."].format is None
        o_proj = part["model.layers.0.self_attn.o_proj."]
        assert o_proj.values.shape == (128, 128) and o_proj.scales.shape == (1, 1)
        columns = whole.values.view(torch.uint8)[:, 128 * rank : 128 * (rank + 1)]
        assert torch.equal(o_proj.values.view(torch.uint8), columns)
        assert torch.equal(o_proj.scales, whole.scales[:, rank : rank + 1])


def merged(*sizes: int) -> MergedLinear:
    config = LinearConfig(128, sum(sizes), torch.float32)
    parts = {f"part{n}": OutputPart(size, range(size)) for n, size in enumerate(sizes)}
    return MergedLinear(config, parts)


def test_rows_are_normed_as_a_projection_takes_them(stored: dict[str, Path]) -> None:
    """The fused norm gives the same bits as a projection of the normed rows."""
    for dense in (kept(stored["fp8"]), None):
        layer = loaded(stored["fp8"], dense).model.layers[0]
        attention, norm = layer.self_attn, layer.input_layernorm
        for rows in (0, 1, 5):
            x, residual = torch.randn(rows, 128), torch.randn(rows, 128)
            normed, total = norm.add(x, residual)
            mine, mine_total = attention.norm_and_project(norm, x, residual)
            assert torch.equal(mine_total, total)
            assert torch.equal(mine, attention.qkv_proj(normed))
        mine, mine_total = attention.norm_and_project(norm, x, None)
        assert torch.equal(mine, attention.qkv_proj(norm(x))) and mine_total is x


def test_parts_must_be_whole_blocks() -> None:
    assert merged(128, 256, 100).unsupported_reason(BLOCK) == ""
    assert (
        merged(128, 64, 64).unsupported_reason(BLOCK)
        == "rows 0..64 of 64 are not whole blocks of 128"
    )
    assert merged(128, 64, 64).unsupported_reason(CHANNEL) == ""
    cut = Linear(LinearConfig(256, 128, torch.float32), inputs=range(64, 192))
    assert cut.unsupported_reason(BLOCK) == "columns 64..192 of 256 are not whole blocks of 128"
    same = Linear(LinearConfig(128, 128, torch.float32, deterministic=True))
    assert same.unsupported_reason(BLOCK) == "deterministic mode has no float8 product"


def test_what_stays_is_said(plain: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log names projections that split blocks, or that are quantised only in part."""
    raw = RawConfig.read(plain)
    raw.data |= {"head_dim": 32}
    stem = "model.layers.0."
    names = frozenset({f"{stem}self_attn.o_proj.weight", f"{stem}mlp.shared_expert.up_proj.weight"})
    with caplog.at_level(logging.INFO, "moesaic"):
        for dense in (DenseWeights(BLOCK), DenseWeights(BLOCK, names)):
            build_model(raw, BuildContext(64, MoeContext.single(torch.float32), dense=dense))
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("dense")]
    assert lines == [
        "dense: 3 projections are kept as fp8_block",
        "dense: 1 of qkv_proj stay unquantised: rows 0..64 of 64 are not whole blocks of 128",
        "dense: 1 projections are kept as fp8_block",
        "dense: 1 of gate_up_proj stay unquantised: the checkpoint has quantised only some of its "
        "parts",
    ]


def test_when_they_are_kept(plain: Path, stored: dict[str, Path]) -> None:
    """Projections stay in float8 only on a GPU, and only if activations may be float8."""
    single = MoeContext.single(torch.float32, BLOCK)
    cuda = replace(single, resolved=replace(single.resolved, device="cuda"))
    plain_scheme = detect_scheme(RawConfig.read(plain), plain)
    assert dense_weights(plain_scheme, plain, single) is None
    assert dense_weights(plain_scheme, plain, cuda) == DenseWeights(BLOCK)
    assert dense_weights(plain_scheme, plain, replace(cuda, deterministic=True)) is None
    folder = stored["fp8"]
    found = dense_weights(detect_scheme(RawConfig.read(folder), folder), folder, cuda)
    assert found is not None and found.names is not None
    assert "model.layers.0.self_attn.q_proj.weight" in found.names
    assert not any("norm" in name or "lm_head" in name for name in found.names)
    folder = stored["int8_w8a16"]
    assert dense_weights(detect_scheme(RawConfig.read(folder), folder), folder, cuda) is None


def test_dummy_weights(plain: Path) -> None:
    context = BuildContext(64, MoeContext.single(torch.float32), dense=DenseWeights(BLOCK))
    model = build_model(RawConfig.read(plain), context)
    fill_randomly(model, seed=0)
    for _, linear in linears(model):
        if linear.format is not None:
            assert linear(torch.randn(2, linear.values.shape[1])).isfinite().all()
