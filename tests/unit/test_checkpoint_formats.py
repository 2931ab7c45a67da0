"""Matrices in every disk format are read exactly, and in parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moesaic.models.checkpoint import Checkpoint
from moesaic.models.config import RawConfig
from moesaic.models.schemes import Matrix, Scheme, detect_scheme
from moesaic.moe.quant.weights import WEIGHT_FORMATS
from tests.unit.disk_formats import (
    FORMATS,
    STACK,
    STEM,
    CountingCheckpoint,
    DiskFormat,
    mxfp4_stack,
    nvfp4,
)

ALL = slice(None)
MODEL = {"num_hidden_layers": 1, "hidden_size": 96, "moe_intermediate_size": 48, "num_experts": 1}


def config_of(quantisation: dict[str, Any] | None) -> RawConfig:
    return RawConfig(MODEL | {"quantization_config": quantisation}, "config.json")


def save(folder: Path, tensors: dict[str, Tensor]) -> None:
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(copies, folder / "model.safetensors")


def named(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{STEM}.{suffix}": tensor for suffix, tensor in tensors.items()}


def made(disk: DiskFormat, folder: Path) -> tuple[Scheme, Matrix, Tensor]:
    tensors, values = disk.make(np.random.default_rng(7), *disk.shape)
    save(folder, named(tensors))
    scheme = detect_scheme(config_of(disk.config), folder)
    # Scales and numbers are short, so their products are exact in float64.
    return scheme, Matrix(f"{STEM}.weight", disk.shape), torch.from_numpy(values).float()


@pytest.mark.parametrize("disk", FORMATS.values(), ids=list(FORMATS))
def test_numbers_are_read_exactly(disk: DiskFormat, tmp_path: Path) -> None:
    scheme, matrix, expected = made(disk, tmp_path)
    assert (scheme.expert_format and scheme.expert_format.name) == disk.kept
    with Checkpoint(tmp_path) as checkpoint:
        for name, spec in scheme.find(checkpoint, matrix).tensors().items():
            checkpoint.check(name, spec)
        assert torch.equal(scheme.find(checkpoint, matrix).dense(), expected)
        # Odd cuts split blocks.
        part = scheme.find(checkpoint, matrix).dense(slice(3, 21), slice(7, 50))
        assert torch.equal(part, expected[3:21, 7:50])
        format = scheme.expert_format or WEIGHT_FORMATS["fp32"]
        for rows, cols in ((ALL, ALL), disk.cut):
            planes = scheme.find(checkpoint, matrix).read(format, rows, cols)
            wanted = expected[rows, cols]
            shapes = {name: shape for name, (shape, _) in format.planes(*wanted.shape).items()}
            assert {name: tuple(plane.shape) for name, plane in planes.items()} == shapes
            assert torch.equal(format.decode(planes, torch.empty(wanted.shape)), wanted)


def same_bits(one: Tensor, other: Tensor) -> bool:
    raw, raw_other = (x.contiguous().view(-1).view(torch.uint8) for x in (one, other))
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(raw, raw_other)


@pytest.mark.parametrize("disk", FORMATS.values(), ids=list(FORMATS))
def test_nothing_depends_on_the_default_device(disk: DiskFormat, tmp_path: Path) -> None:
    """All is made where the tensors are, as a mode that says where costs more than it makes."""
    scheme, matrix, _ = made(disk, tmp_path)
    format = scheme.expert_format or WEIGHT_FORMATS["fp32"]
    with Checkpoint(tmp_path) as checkpoint:
        reader = scheme.find(checkpoint, matrix)
        expected = reader.read(format), reader.dense()
        with torch.device("meta"):
            planes, dense = reader.read(format), reader.dense()
            encoded = format.encode(dense)
    assert all(same_bits(planes[name], plane) for name, plane in expected[0].items())
    assert same_bits(dense, expected[1])
    assert all(same_bits(encoded[name], x) for name, x in format.encode(dense).items())


@pytest.mark.parametrize("disk", FORMATS.values(), ids=list(FORMATS))
def test_only_the_bytes_of_a_part_are_read(disk: DiskFormat, tmp_path: Path) -> None:
    scheme, matrix, _ = made(disk, tmp_path)
    format = scheme.expert_format or WEIGHT_FORMATS["fp32"]
    rows, cols = slice(0, 128 if matrix.shape[0] > 128 else 16), ALL
    with CountingCheckpoint(tmp_path) as checkpoint:
        scheme.find(checkpoint, matrix).read(format)
        whole, checkpoint.bytes_read = checkpoint.bytes_read, 0
        scheme.find(checkpoint, matrix).read(format, rows, cols)
        part = checkpoint.bytes_read
    share = rows.stop / matrix.shape[0]
    # g_idx, scalars and the scales of a ragged block belong to every part.
    assert part <= whole * share + 4 * matrix.shape[1] + 64


@pytest.mark.parametrize("interleaved", [0, 1, None])
def test_stacks(interleaved: int | None, tmp_path: Path) -> None:
    tensors, values = mxfp4_stack(np.random.default_rng(0), 3, 48, 96)
    save(tmp_path, {f"{STACK}_{suffix}": tensor for suffix, tensor in tensors.items()})
    scheme = detect_scheme(config_of({"quant_method": "mxfp4"}), tmp_path)
    assert scheme.expert_format is WEIGHT_FORMATS["mxfp4"]
    rows = 48 if interleaved is None else 24
    matrix = Matrix(STACK, (rows, 96), index=2, interleaved=interleaved, experts=3)
    stacked = torch.from_numpy(values).float()[2]
    expected = stacked if interleaved is None else stacked[interleaved::2]
    with CountingCheckpoint(tmp_path) as checkpoint:
        for name, spec in scheme.find(checkpoint, matrix).tensors().items():
            checkpoint.check(name, spec)
        for cut_N, cut_K in ((ALL, ALL), (slice(6, 18), slice(32, 96))):
            checkpoint.bytes_read = 0
            planes = scheme.find(checkpoint, matrix).read(WEIGHT_FORMATS["mxfp4"], cut_N, cut_K)
            wanted = expected[cut_N, cut_K]
            decoded = WEIGHT_FORMATS["mxfp4"].decode(planes, torch.empty(wanted.shape))
            assert torch.equal(decoded, wanted)
            assert checkpoint.bytes_read == wanted.numel() * 17 // 32
        assert torch.equal(scheme.find(checkpoint, matrix).dense(), expected)


@pytest.mark.parametrize("interleaved", [0, 1, None])
def test_unquantised_stacks_have_inputs_first(interleaved: int | None, tmp_path: Path) -> None:
    stack = torch.randn(2, 10, 12)
    save(tmp_path, {STACK: stack})
    rows = 12 if interleaved is None else 6
    matrix = Matrix(STACK, (rows, 10), index=1, interleaved=interleaved, experts=2)
    expected = stack[1].t() if interleaved is None else stack[1].t()[interleaved::2]
    with Checkpoint(tmp_path) as checkpoint:
        scheme = detect_scheme(config_of(None), tmp_path)
        part = scheme.find(checkpoint, matrix).dense(slice(1, 5), slice(2, 9))
    assert torch.equal(part, expected[1:5, 2:9])


@pytest.mark.parametrize("name", ["fp8_block", "int4_w4a16", "nvfp4"])
def test_other_formats_than_the_stored_one(name: str, tmp_path: Path) -> None:
    """A part is cut from the whole encoded matrix, so all ranks agree."""
    format, w_NK = WEIGHT_FORMATS[name], torch.randn(256, 256)
    matrix = Matrix(f"{STEM}.weight", (256, 256))
    save(tmp_path, {matrix.name: w_NK})
    scheme = detect_scheme(config_of(None), tmp_path)
    assert scheme.expert_format is None
    rows, cols = slice(128, 256), slice(0, 128)
    with Checkpoint(tmp_path) as checkpoint:
        planes = scheme.find(checkpoint, matrix).read(format, rows, cols)
    expected = format.slice(format.encode(w_NK), rows, cols)
    for plane, tensor in expected.items():
        assert torch.equal(planes[plane].view(torch.uint8), tensor.view(torch.uint8))


def test_experts_that_are_not_quantised(tmp_path: Path) -> None:
    disk = FORMATS["ct int4"]
    tensors, _ = disk.make(np.random.default_rng(0), *disk.shape)
    attention = {f"model.layers.0.self_attn.q_proj.{key}": x for key, x in tensors.items()}
    plain = {f"{STEM}.weight": torch.zeros(48, 96)}
    save(tmp_path, plain | attention)
    assert detect_scheme(config_of(disk.config), tmp_path).expert_format is None
    save(
        tmp_path,
        plain | attention | {name.replace("gate", "up"): x for name, x in named(tensors).items()},
    )
    scheme = detect_scheme(config_of(disk.config), tmp_path)
    assert scheme.expert_format is not None
    assert "1 of 2 expert matrices are unquantised in the checkpoint" in scheme.note
    with Checkpoint(tmp_path) as checkpoint:
        planes = scheme.find(checkpoint, Matrix(f"{STEM}.weight", (48, 96))).read(
            scheme.expert_format
        )
    assert not scheme.expert_format.decode(planes, torch.empty(48, 96)).any()


@pytest.mark.parametrize(("compressed", "expected"), [(False, 0.125), (True, 0.125)])
def test_input_scale(compressed: bool, expected: float, tmp_path: Path) -> None:
    disk = FORMATS["ct nvfp4" if compressed else "modelopt nvfp4"]
    scheme, matrix, _ = made(disk, tmp_path)
    with Checkpoint(tmp_path) as checkpoint:
        assert scheme.find(checkpoint, matrix).input_scale() == expected


def test_modelopt_file_beside_the_config(tmp_path: Path) -> None:
    tensors, _ = nvfp4(False)(np.random.default_rng(0), 16, 32)
    save(tmp_path, named(tensors))
    content = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))
    scheme = detect_scheme(config_of(None), tmp_path)
    assert (scheme.method, scheme.expert_format) == ("modelopt", WEIGHT_FORMATS["nvfp4"])


def test_gptq_file_beside_the_config(tmp_path: Path) -> None:
    disk = FORMATS["gptq"]
    tensors, _ = disk.make(np.random.default_rng(0), *disk.shape)
    save(tmp_path, named(tensors))
    content = {key: value for key, value in disk.config.items() if key != "quant_method"}
    (tmp_path / "quantize_config.json").write_text(json.dumps(content))
    assert detect_scheme(config_of(None), tmp_path).method == "gptq"
    (tmp_path / "quantize_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"quantize_config.json is not valid JSON"):
        detect_scheme(config_of(None), tmp_path)


def _activations(base: str, **numbers: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(json.dumps(FORMATS[base].config))
    config["config_groups"]["group_0"]["input_activations"] = numbers or None
    return config


@pytest.mark.parametrize(
    ("base", "numbers", "activation", "unmet"),
    [
        ("ct fp8 weight only", {}, None, ""),
        ("ct fp8 channel", {"type": "float", "num_bits": 8, "group_size": 128}, "fp8", ""),
        ("ct fp8 channel", {"type": "int", "num_bits": 8}, None, "int8"),
        ("ct nvfp4", {}, None, ""),
        ("ct nvfp4", {"type": "float", "num_bits": 4, "group_size": 16}, "nvfp4", ""),
        ("ct nvfp4", {"type": "float", "num_bits": 8}, None, "fp8"),
        ("ct int8 w8a8", {"type": "int", "num_bits": 8}, "int8", ""),
        ("ct int8 w8a8", {"type": "float", "num_bits": 8}, None, "fp8"),
        ("ct int4", {"type": "float", "num_bits": 8}, None, "fp8"),
        ("ct int4", {"type": "int", "num_bits": 4}, None, "int of 4 bit"),
        ("ct mxfp4", {}, None, ""),
        ("ct mxfp4", {"type": "float", "num_bits": 4, "group_size": 32}, None, "mxfp4"),
        ("ct mxfp4", {"type": "float", "num_bits": 8, "group_size": 128}, None, "fp8"),
    ],
)
def test_activations(
    base: str, numbers: dict[str, Any], activation: str | None, unmet: str, tmp_path: Path
) -> None:
    """Activations are rounded as the checkpoint asks, or a note says that they are not."""
    made(FORMATS[base], tmp_path)
    scheme = detect_scheme(config_of(_activations(base, **numbers)), tmp_path)
    assert scheme.expert_format is not None and scheme.expert_format.activation == activation
    note = f"activations are not rounded to {unmet}, as the checkpoint asks, but kept as they are"
    assert scheme.note == (note if unmet else "")


def test_without_weights_the_config_decides(tmp_path: Path) -> None:
    scheme = detect_scheme(config_of(FORMATS["fp8 block"].config), tmp_path)
    assert scheme.expert_format is WEIGHT_FORMATS["fp8_block"]


def _change(base: str, **more: Any) -> dict[str, Any]:
    return FORMATS[base].config | more


def _weights(base: str, **more: Any) -> dict[str, Any]:
    config = json.loads(json.dumps(FORMATS[base].config))
    config["config_groups"]["group_0"]["weights"].update(more)
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "'bitsandbytes' is not supported, only fp8, compressed-",
        ),
        (_change("fp8 block", weight_block_size=[64, 64]), r"weight_block_size \[64, 64\] is not"),
        (_change("fp8 block", fmt="e5m2"), "fmt 'e5m2' is not supported"),
        (_change("awq", version="gemv"), "version 'gemv' is not supported, only 'gemm'"),
        (_change("awq", bits=3), "bits 3 is not supported, only 4"),
        (_change("awq", zero_point=False), "zero_point False is not supported"),
        (_change("gptq", bits=3), "bits 3 is not supported, only 4, 8"),
        (
            _change("gptq", checkpoint_format="marlin"),
            "checkpoint_format 'marlin' is not supported",
        ),
        (_change("gptq", dynamic={"+:.*q_proj": {"bits": 8}}), "gives some modules other param"),
        (
            _change("modelopt nvfp4", quant_algo="W4A8_AWQ"),
            "quant_algo 'W4A8_AWQ' is not supported",
        ),
        (_change("ct int4", format="marlin-24"), "format 'marlin-24' is not supported"),
        (_change("ct int4", sparsity_config={"format": "x"}), "sparse weights are not supported"),
        (_change("ct int4", config_groups={}), "config_groups is missing"),
        (
            _weights("ct int4", num_bits=3),
            "type 'int' of 3 bits with strategy 'group' is not supported",
        ),
        (
            _weights("ct mxfp4", group_size=16),
            "type 'float' of 4 bits with strategy 'group' is not supported",
        ),
        (
            _change("ct mxfp4", format="mxfp8-quantized"),
            "format 'mxfp8-quantized' is not supported",
        ),
        (_weights("ct int4", actorder="group"), "actorder 'group' reorders columns"),
        (_weights("ct int4", group_size="x"), "group_size must be an integer"),
        (
            _weights("ct fp8 channel", strategy="block", block_structure=[64, 64]),
            r"block_structure \[64, 64\] is not supported",
        ),
    ],
)
def test_what_is_not_handled_is_refused(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        detect_scheme(config_of(config), tmp_path)


def test_cuts_inside_blocks(tmp_path: Path) -> None:
    scheme, matrix, _ = made(FORMATS["fp8 block"], tmp_path)
    with (
        Checkpoint(tmp_path) as checkpoint,
        pytest.raises(ValueError, match=r"rows 0..64 of .* \[200, 300\] cut blocks of weight"),
    ):
        scheme.find(checkpoint, matrix).read(WEIGHT_FORMATS["fp8_block"], slice(0, 64))


@pytest.mark.parametrize(
    ("case", "tensor", "message"),
    [
        ("gptq", torch.zeros(96, dtype=torch.int32), "g_idx is not in order of columns"),
        ("gptq order", torch.full((96,), 3, dtype=torch.int32), r"entries outside of 0\.\.2"),
    ],
)
def test_wrong_group_indices(case: str, tensor: Tensor, message: str, tmp_path: Path) -> None:
    disk = FORMATS[case]
    tensors, _ = disk.make(np.random.default_rng(0), *disk.shape)
    save(tmp_path, named(tensors | {"g_idx": tensor}))
    scheme = detect_scheme(config_of(disk.config), tmp_path)
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(ValueError, match=message):
        scheme.find(checkpoint, Matrix(f"{STEM}.weight", disk.shape)).dense()


def test_a_zero_point_that_readers_take_differently(tmp_path: Path) -> None:
    disk = FORMATS["gptq v1 zeros"]
    tensors, _ = disk.make(np.random.default_rng(0), *disk.shape)
    save(tmp_path, named(tensors | {"qzeros": torch.full_like(tensors["qzeros"], -1)}))
    scheme = detect_scheme(config_of(disk.config), tmp_path)
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(ValueError, match='"gptq_v2"'):
        scheme.find(checkpoint, Matrix(f"{STEM}.weight", disk.shape)).dense()
