"""Quantised checkpoints, ours and others', against transformers with the weights that they mean."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from moesaic import Engine
from moesaic.models.quantize import QuantizeJob, quantize
from moesaic.models.schemes.quantize_formats import QUANTIZE_FORMATS
from moesaic.moe.quant.payload import PAYLOAD_FORMATS
from tests.oracle import Case, Oracle, build, load
from tests.unit.disk_formats import (
    FORMATS,
    DiskFormat,
    Made,
    awq,
    compressed,
    fp8_block,
    fp8_scaled,
    gptq,
    nvfp4,
    packed,
)
from tests.unit.test_quantize import reference

PROMPT = list(range(3, 40))
TOLERANCE = 1e-4


def make_source(folder: Path, hidden: int, inner: int) -> Path:
    sizes = {"hidden_size": hidden, "moe_intermediate_size": inner, "num_hidden_layers": 2}
    return build(Case("odd", "qwen3_moe", sizes | {"num_experts": 4}), folder)


def served(folder: Path, **flags: object) -> Tensor:
    """Logprobs of the prompt."""
    options = {"dtype": "float32", "device": "cpu", "max_total_tokens": 256, "page_size": 16}
    options |= {"skip_tokenizer_init": True, "skip_server_warmup": True}
    with Engine(model_path=str(folder), **options | flags) as engine:
        answer = engine.generate(
            input_ids=PROMPT,
            sampling_params={"max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=0,
        )
    assert isinstance(answer, dict)
    return torch.tensor([entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]])


def rounding(model: PreTrainedModel, activation: str | None) -> PreTrainedModel:
    """Its experts multiply activations of that payload format."""
    if activation is None:
        return model
    payload = PAYLOAD_FORMATS[activation]

    def experts_forward(experts: Any, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        y_TH = torch.zeros_like(x_TH)
        x_TH = payload.encode(x_TH).dense(torch.float32)
        for token, chosen in enumerate(ids_TK.tolist()):
            for place, expert in enumerate(chosen):
                gate, up = (experts.gate_up_proj[expert] @ x_TH[token]).chunk(2)
                inner = payload.encode((experts.act_fn(gate) * up)[None]).dense(torch.float32)
                y_TH[token] += experts.down_proj[expert] @ inner[0] * weights_TK[token, place]
        return y_TH

    for layer in model.model.layers:
        layer.mlp.experts.forward = partial(experts_forward, layer.mlp.experts)
    return model


@dataclass(frozen=True)
class Written:
    """What `moesaic quantize` writes of a model with these sizes."""

    form: str
    hidden: int
    inner: int
    group: int | None = None
    experts_only: bool = False

    def __str__(self) -> str:
        return f"{self.form}-{self.hidden}-{self.inner}-{self.group}"


WRITTEN = (
    Written("fp8", 140, 36),
    Written("fp8_channel", 100, 36),
    Written("fp8_tensor", 100, 36),
    Written("int8_w8a8", 100, 36),
    Written("int8_w8a16", 100, 36),
    Written("int4_w4a16", 72, 40, 8),
    Written("int4_w4a16", 96, 48, 24),
    Written("awq", 96, 32, 32, experts_only=True),
    Written("awq", 72, 40, 8),
    Written("gptq", 120, 40, 40, experts_only=True),
    Written("gptq_int8", 100, 36),
    Written("nvfp4", 80, 48),
    Written("mxfp4", 96, 32),
)


def test_all_forms_are_served() -> None:
    assert {case.form for case in WRITTEN} == set(QUANTIZE_FORMATS)


@pytest.mark.parametrize("case", WRITTEN, ids=str)
def test_what_quantize_writes_is_served(case: Written, tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", case.hidden, case.inner)
    quantize(source, tmp_path / "out", QuantizeJob(case.form, case.group, case.experts_only))
    plain = reference(source, tmp_path / "out", tmp_path / "plain")
    format = QUANTIZE_FORMATS[case.form].storage(case.group or 128).format
    assert format is not None
    oracle = Oracle(rounding(load(plain), format.activation))
    error = (served(tmp_path / "out") - oracle.logprobs(PROMPT)).abs()
    if format.activation is None:
        assert error.max() < TOLERANCE
    else:
        # Where programs sum in another order some numbers are rounded to their other neighbour.
        effect = (Oracle(load(plain)).logprobs(PROMPT) - oracle.logprobs(PROMPT)).abs()
        assert error.mean() < 0.1 * effect.mean()


def ct_block(rng: np.random.Generator, rows: int, columns: int) -> Made:
    tensors, values = fp8_block(rng, rows, columns)
    return {"weight": tensors["weight"], "weight_scale": tensors["weight_scale_inv"]}, values


WEIGHT_ONLY = {
    "ct fp8 block, weights alone": DiskFormat(
        compressed("float-quantized", "float", 8, "block", block_structure=[128, 128]),
        ct_block,
        "fp8_block",
    ),
    "ct fp8 channel, weights alone": DiskFormat(
        compressed("float-quantized", "float", 8, "channel"),
        fp8_scaled("weight_scale", True, lambda scale: scale),
        "fp8_channel",
    ),
    "ct nvfp4, weights alone": DiskFormat(
        compressed("nvfp4-pack-quantized", "float", 4, "tensor_group", group_size=16),
        nvfp4(True),
        "nvfp4",
    ),
    "ct int4 by 48": DiskFormat(
        compressed("pack-quantized", "int", 4, "group", group_size=48),
        packed(4, 48, True),
        "int4_w4a16",
    ),
    "awq by 16": DiskFormat(FORMATS["awq"].config | {"group_size": 16}, awq(16), "int4_w4a16"),
    "gptq by 48": DiskFormat(
        FORMATS["gptq"].config | {"group_size": 48}, gptq(4, 48, 1, True), "int4_w4a16"
    ),
}
OUTSIDE = WEIGHT_ONLY | {
    name: FORMATS[name]
    for name in (
        "ct fp8 weight only",
        "ct int8 groups",
        "ct int4 zeros",
        "ct int4 channel",
        "awq whole rows",
        "gptq v2 zeros",
        "gptq order",
        "ct mxfp4",
    )
}


def sane(tensors: dict[str, Tensor], values: np.ndarray) -> tuple[dict[str, Tensor], np.ndarray]:
    """The same matrix with numbers as models have them: its scales by another power of two."""
    power = round(float(np.log2(values.std() * values.shape[1] ** 0.5)))
    changed = dict(tensors)
    for suffix in ("weight_global_scale", "weight_scale_2", "weight_scale", "scales"):
        if suffix in tensors:
            scale, up = tensors[suffix], power if "global" in suffix else -power
            whole = scale.dtype == torch.uint8  # exponents of two
            changed[suffix] = scale - power if whole else scale.float() * 2.0**up
            break
    return changed, values * 2.0**-power


def write_outside(disk: DiskFormat, source: Path, folder: Path) -> tuple[Path, Path]:
    """Experts and one projection of attention in layer 0 as another program packs them; and the
    checkpoint of the numbers that they mean."""
    rng = np.random.default_rng(11)
    plain = load_file(source / "model.safetensors")
    stored = dict(plain)
    names = [n for n in plain if ".experts." in n or n.endswith("layers.0.self_attn.o_proj.weight")]
    for name in names:
        tensors, values = sane(*disk.make(rng, *plain[name].shape))
        del stored[name]
        stem = name.removesuffix(".weight")
        stored |= {f"{stem}.{suffix}": tensor for suffix, tensor in tensors.items()}
        plain[name] = torch.from_numpy(values).float().contiguous()
    config = json.loads((source / "config.json").read_text())
    for kind, content, more in (
        ("plain", plain, {}),
        ("stored", stored, {"quantization_config": disk.config}),
    ):
        (folder / kind).mkdir()
        save_file(content, folder / kind / "model.safetensors", metadata={"format": "pt"})
        (folder / kind / "config.json").write_text(json.dumps(config | more))
    return folder / "plain", folder / "stored"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("source"), 96, 48)


@pytest.fixture(scope="module")
def wide_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For groups of 32 columns."""
    return make_source(tmp_path_factory.mktemp("source"), 96, 32)


@pytest.mark.parametrize("name", OUTSIDE)
def test_weight_only_checkpoints_of_others(
    name: str, source: Path, wide_source: Path, tmp_path: Path
) -> None:
    """Activations stay as they are: nothing but float32 rounding is between us and transformers."""
    disk = OUTSIDE[name]
    plain, stored = write_outside(disk, source if name in WEIGHT_ONLY else wide_source, tmp_path)
    expected = Oracle(load(plain)).logprobs(PROMPT)
    torch.testing.assert_close(served(stored), expected, atol=TOLERANCE, rtol=0)


FP8, NVFP4 = "ct fp8 channel, weights alone", "ct nvfp4, weights alone"


@pytest.mark.parametrize("name", [pytest.param(FP8, marks=pytest.mark.slow), NVFP4])
def test_weight_only_on_ranks(name: str, source: Path, tmp_path: Path) -> None:
    """Rows travel as they are, too."""
    disk = OUTSIDE[name]
    plain, stored = write_outside(disk, source, tmp_path)
    found = served(stored, tp_size=2, ep_size=2, moe_a2a_backend="deepep")
    expected = Oracle(load(plain)).logprobs(PROMPT)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


PRESETS = {  # with their columns per scale, where these can be chosen
    "FP8_DYNAMIC": None,
    "FP8_BLOCK": None,
    "NVFP4A16": None,
    "MXFP4A16": None,
    "W4A16": 32,
    "W4A16_ASYM": 16,
    "W4AFP8": 32,
    "W8A16": 32,
}


def by_library(preset: str) -> DiskFormat:
    """What compressed-tensors itself writes, less the rounding of activations."""
    from compressed_tensors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import preset_name_to_scheme

    scheme = preset_name_to_scheme(preset, ["Linear"])
    if PRESETS[preset]:
        scheme.weights.group_size = PRESETS[preset]
    if not preset.startswith("W"):  # four bits are not multiplied with rounded activations anyway
        scheme.input_activations = None
    format = infer_module_format(torch.nn.Linear, scheme)
    compressor = BaseCompressor.get_value_from_registry(format.value)

    def make(rng: np.random.Generator, rows: int, columns: int) -> Made:
        w_NK = torch.from_numpy(rng.standard_normal((rows, columns))).float()
        stored = compressor.compress({"weight": w_NK} | _qparams(w_NK, scheme.weights), scheme)
        values = compressor.decompress(dict(stored), scheme)["weight"].double().numpy()
        return {name: tensor.contiguous() for name, tensor in stored.items()}, values

    group = json.loads(scheme.model_dump_json())
    config = {"quant_method": "compressed-tensors", "format": format.value}
    return DiskFormat(config | {"config_groups": {"group_0": group}}, make, None)


def _qparams(w_NK: Tensor, args: Any) -> dict[str, Tensor]:
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    rows, columns = w_NK.shape
    width = args.group_size or (128 if args.strategy == "block" else columns)
    height = 128 if args.strategy == "block" else 1
    ends = ((0, rows, height), (0, columns, width))
    blocks = [
        [w_NK[n : n + height, k : k + width] for k in range(*ends[1])] for n in range(*ends[0])
    ]
    least, most = (
        torch.tensor([[float(pick(block)) for block in line] for line in blocks])
        for pick in (torch.min, torch.max)
    )
    found = {}
    if args.strategy == "tensor_group":
        # A power of two: the library decodes in bfloat16, which is exact then.
        found["weight_global_scale"] = (
            generate_gparam(least.min(), most.max()).log2().floor().exp2()
        )
    scale, zeros = calculate_qparams(least, most, args, found.get("weight_global_scale"))
    found["weight_scale"] = scale
    if not args.symmetric:
        found["weight_zero_point"] = zeros
    return found


@pytest.mark.parametrize("preset", PRESETS)
def test_checkpoints_of_compressed_tensors(preset: str, wide_source: Path, tmp_path: Path) -> None:
    plain, stored = write_outside(by_library(preset), wide_source, tmp_path)
    expected = Oracle(load(plain)).logprobs(PROMPT)
    torch.testing.assert_close(served(stored), expected, atol=TOLERANCE, rtol=0)
