"""Reads the quantization_config of compressed-tensors."""

from __future__ import annotations

from typing import Any

from moesaic.models.config import RawConfig
from moesaic.models.folder import brief
from moesaic.models.schemes.floats import (
    BLOCK,
    StoredFp8Matrix,
    StoredMxfp4Matrix,
    StoredNvfp4Matrix,
)
from moesaic.models.schemes.integers import CompressedInts
from moesaic.models.schemes.storage import Storage

FORMATS = (
    "float-quantized",
    "int-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "naive-quantized",
    None,
)
# By type, bits and, for four bits, columns per scale.
ACTIVATIONS: dict[tuple[Any, Any, Any], str] = {
    ("float", 8, None): "fp8",
    ("int", 8, None): "int8",
    ("float", 4, 16): "nvfp4",
    ("float", 4, 32): "mxfp4",
}
HANDLED = (
    "float 8 bit (tensor, channel, block), int 8 bit (tensor, channel, group), int 4 bit (channel, "
    "group), float 4 bit (tensor_group of 16, group of 32)"
)


def compressed_tensors(config: RawConfig, row_group: int) -> Storage:
    """`row_group`: the group size in which whole-row scales of four bits are kept."""
    for key, why in (
        ("sparsity_config", "sparse weights are not supported"),
        ("transform_config", "rotated weights are not supported"),
    ):
        given = config.data.get(key)
        if given and given != {"format": "dense"}:
            raise ValueError(f"{config.source}: {key} {brief(given)}: {why}")
    groups = RawConfig(config.mapping("config_groups"), f"{config.source}: config_groups")
    if not groups.data:
        raise ValueError(f"{config.source}: config_groups is missing")
    format = config.data.get("format")
    found = [
        _group(RawConfig(groups.mapping(name), f"{groups.source}: {name}"), format, row_group)
        for name in groups.data
    ]
    if any(storage != found[0] for storage in found):
        raise ValueError(
            f"{config.source}: config_groups {list(groups.data)} store matrices in different ways, "
            "which is not supported: give all modules one scheme"
        )
    return found[0]


def unmet_activation(config: RawConfig, storage: Storage) -> str:
    """A note if the config asks for quantised activations that we do not use."""
    groups = config.mapping("config_groups")
    asked = {
        _activation(RawConfig(group, f"{config.source}: {name}")) for name, group in groups.items()
    }
    asked -= {None if storage.format is None else storage.format.activation, None}
    if not asked:
        return ""
    names = " and ".join(sorted(map(str, asked)))
    return f"activations are not rounded to {names}, as the checkpoint asks, but kept as they are"


def _activation(group: RawConfig) -> str | None:
    """The payload format that a group asks for, or a description of an unknown one."""
    if not group.has("input_activations"):
        return None
    given = group.mapping("input_activations")
    kind, bits = given.get("type"), given.get("num_bits")
    name = ACTIVATIONS.get((kind, bits, given.get("group_size") if bits == 4 else None))
    return name or f"{kind} of {bits} bit"


def _group(group: RawConfig, format: Any, row_group: int) -> Storage:
    weights = RawConfig(group.mapping("weights"), f"{group.source}: weights")
    form = group.data.get("format") or format
    if form not in FORMATS:
        raise ValueError(
            f"{group.source}: format {brief(form)} is not supported, only "
            f"{', '.join(repr(known) for known in FORMATS if known)}"
        )
    if weights.data.get("actorder") == "group":
        raise ValueError(
            f"{weights.source}: actorder 'group' reorders columns (weight_g_idx), which is not "
            "supported; only 'weight', 'static' and none"
        )
    kind = (weights.data.get("type"), weights.data.get("num_bits"))
    strategy = weights.data.get("strategy")
    asked = _activation(group)
    if kind == ("float", 8) and strategy in ("tensor", "channel", "block"):
        if strategy == "block":
            weights.one_of("block_structure", [[BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"])
        return StoredFp8Matrix(strategy, weight_only=asked != "fp8")
    if kind == ("float", 4) and strategy == "tensor_group" and weights.integer("group_size") == 16:
        return StoredNvfp4Matrix(compressed=True, weight_only=asked != "nvfp4")
    if kind == ("float", 4) and strategy == "group" and weights.integer("group_size") == 32:
        return StoredMxfp4Matrix()
    if kind == ("int", 4) and strategy in ("channel", "group"):
        return _ints(weights, 4, row_group, packed=form in ("pack-quantized", None))
    if kind == ("int", 8) and strategy in ("tensor", "channel", "group"):
        packed = form == "pack-quantized" or (form is None and asked is None)
        return _ints(weights, 8, row_group, packed, activation=asked == "int8")
    raise ValueError(
        f"{weights.source}: type {brief(kind[0])} of {brief(kind[1])} bits with strategy "
        f"{brief(strategy)} is not supported, only {HANDLED}"
    )


def _ints(
    weights: RawConfig, bits: int, row_group: int, packed: bool, activation: bool = False
) -> CompressedInts:
    strategy = weights.data["strategy"]
    group = weights.integer("group_size") if strategy == "group" else None
    return CompressedInts(
        bits,
        group,
        symmetric=weights.flag("symmetric", True),
        kept_group=group or row_group,
        activation=activation,
        packed=packed,
        per_tensor=strategy == "tensor",
    )
