"""Known shapes without weights, and the random weights that fill them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from moesaic import Engine
from moesaic.core.step import PREFILL
from moesaic.engine.setup.moe_setup import ONLINE
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.config import BuildContext, RawConfig
from moesaic.models.pinned_copy import PinnedCopy
from moesaic.models.registry import build_model
from moesaic.models.shapes import known, shape_config
from moesaic.models.tiny import materialise
from moesaic.models.weights import fill_randomly
from moesaic.moe.context import MoeContext
from moesaic.moe.layer import FusedMoE
from moesaic.moe.quant.dummy import fill_planes
from moesaic.moe.quant.weights import WEIGHT_FORMATS

# The numbers of the model cards.
PARAMETERS = {
    "deepseek-v2-lite": 15.706e9,
    "gpt-oss-20b": 20.915e9,
    "mixtral-8x7b": 46.703e9,
    "qwen3-30b-a3b": 30.532e9,
}
SMALL = "shape:qwen3-30b-a3b,num_hidden_layers=2,num_experts=8,hidden_size=128,vocab_size=320"
SMALL += ",moe_intermediate_size=64,num_attention_heads=4,max_position_embeddings=64"


def test_every_shape_is_there():
    assert known() == sorted(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_shape_has_the_parameters_of_its_model(name: str):
    with torch.device("meta"):
        model = build_model(
            RawConfig(shape_config(name), name), BuildContext.single(torch.bfloat16, 1)
        )
    assert model.nbytes / 2 == pytest.approx(PARAMETERS[name], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMETERS)
def test_transformers_makes_the_same_of_a_shape(name: str):
    config = shape_config(name)
    config.pop("quantization_config", None)
    family = AutoConfig.for_model(**config)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(family)
        ours = build_model(RawConfig(config, name), BuildContext.single(torch.bfloat16, 1))
    assert sum(p.numel() for p in theirs.parameters()) == ours.nbytes / 2


def test_sizes_of_a_shape_can_be_changed():
    folder = Path(materialise(SMALL))
    config = json.loads((folder / "config.json").read_text())
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert (config["num_hidden_layers"], config["num_experts"], config["head_dim"]) == (2, 8, 128)
    assert materialise(SMALL) == str(folder)
    with pytest.raises(ValueError, match="unknown shape 'qwen'; known are deepseek-v2-lite, gpt"):
        materialise("shape:qwen")
    with pytest.raises(ValueError, match="shape mixtral-8x7b has no 'num_experts' to change"):
        materialise("shape:mixtral-8x7b,num_experts=2")
    with pytest.raises(ValueError, match=r"'layers' in .* is not KEY=INTEGER"):
        materialise("shape:mixtral-8x7b,layers")


def test_a_shape_answers_token_ids():
    with Engine(model_path=SMALL, load_format="dummy", max_total_tokens=256) as engine:
        params = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
        answer = engine.generate(input_ids=[1, 2, 3], sampling_params=params)
    assert isinstance(answer, dict) and len(answer["output_ids"]) == 4


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_random_planes_spread_as_told(name: str):
    format, rows, cols = WEIGHT_FORMATS[name], 128, 512
    planes = {
        key: torch.zeros(shape, dtype=torch.uint8).view(dtype)
        if dtype.itemsize == 1
        else torch.full(shape, torch.nan, dtype=dtype)
        for key, (shape, dtype) in format.planes(rows, cols).items()
    }
    fill_planes(format, planes, 0.03, torch.Generator().manual_seed(1))
    numbers = format.decode(planes, torch.empty(rows, cols))
    assert numbers.isfinite().all()
    # Powers of two are the only scales of mxfp4.
    assert 0.03 / 1.5 < float(numbers.std()) < 0.03 * 1.5
    assert abs(float(numbers.mean())) < 0.005
    again = {key: torch.empty_like(plane) for key, plane in planes.items()}
    fill_planes(format, again, 0.03, torch.Generator().manual_seed(1))
    assert all(torch.equal(again[k].view(torch.uint8), planes[k].view(torch.uint8)) for k in planes)


def test_direct_weights_spread_tokens_over_experts():
    changes = {"num_hidden_layers": 2, "num_experts": 16, "vocab_size": 512, "hidden_size": 256}
    changes |= {"moe_intermediate_size": 128, "num_attention_heads": 4}
    raw = RawConfig(shape_config("qwen3-30b-a3b", changes), "small")
    format = WEIGHT_FORMATS[ONLINE["fp8"]]
    moe = MoeContext.single(torch.float32, format)
    model = build_model(raw, BuildContext(32, moe))
    for parameter in model.parameters():
        parameter.fill_(torch.nan)
    fill_randomly(model, seed=3, direct=True)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    ids = torch.randint(512, (256,), generator=torch.Generator().manual_seed(0))
    layers = [module for module in model.modules() if isinstance(module, FusedMoE)]
    x = torch.nn.functional.rms_norm(model.model.embed_tokens(ids), (256,))
    for layer in model.model.layers:
        chosen = layer.mlp.route(x).ids_TK.flatten().bincount(minlength=16)
        assert int(chosen.min()) > 0.3 * float(chosen.float().mean())
        x = layer.mlp(x, PREFILL)
        assert 0.01 < float(x.std()) < 10
    before = layers[0].weights.w13_eJH.planes["values"].clone()
    fill_randomly(model, seed=3, direct=True)
    after = layers[0].weights.w13_eJH.planes["values"]
    assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))
    assert not torch.equal(after[0].view(torch.uint8), after[1].view(torch.uint8))


@pytest.mark.parametrize("piece", [1, 7, 64, 1000])
def test_uploads_keep_every_byte(piece: int):
    upload = PinnedCopy(torch.device("cpu"), piece_bytes=piece * 8)
    for tensor in (
        torch.randn(13, 7),
        torch.randn(5, 9).t(),
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.randint(256, (33,), dtype=torch.uint8).view(torch.float8_e4m3fn),
        torch.randn(64, dtype=torch.bfloat16),
    ):
        out = upload(tensor)
        assert out.shape == tensor.shape and out.dtype == tensor.dtype
        same = tensor.contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(out.reshape(-1).view(torch.uint8), same)


def test_what_is_uploaded_was_read_on_the_host():
    """Reads on the host even if safetensors would use another default device."""
    seen: list[Tensor] = []

    def upload(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    with Checkpoint(Path(materialise("tiny:qwen3_moe")), upload) as checkpoint:
        name = "model.embed_tokens.weight"
        with torch.device("meta"):
            checkpoint.read(name)
            checkpoint.read(name, slice(0, 2))
    assert [tensor.device.type for tensor in seen] == ["cpu", "cpu"]
    assert torch.equal(seen[0][:2], seen[1])
