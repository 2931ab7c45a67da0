"""Fills a model from safetensors: lazily, by slice, and with every mismatch named."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from moesaic.layers.module import TensorSlot
from moesaic.models.blocks import CausalLM

INDEX = "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")


class Checkpoint:
    """The tensors of a folder by name; files are opened when first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self.location = self._locate()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _locate(self) -> dict[str, str]:
        """Which file holds which tensor."""
        index = self.folder / INDEX
        if index.is_file():
            try:
                weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                files = sorted({Path(str(name)).name for name in weight_map.values()})
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{index} is not a valid safetensors index: {error!r}") from error
        else:
            files = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if not files:
            raise ValueError(
                f"{self.folder} holds no *.safetensors file: convert the checkpoint to safetensors"
            )
        return {name: file for file in files for name in self._open(file).keys()}  # noqa: SIM118

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self.folder / file
            try:
                handle = safe_open(path, framework="pt")
                self._files[file] = self._stack.enter_context(handle)
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path} cannot be read: {error}; fetch the file again") from error
        return self._files[file]

    def is_empty(self, name: str) -> bool:
        """A tensor of no elements, as transformers writes for parts of size zero."""
        return 0 in self._open(self.location[name]).get_slice(name).get_shape()

    def check(self, slot: TensorSlot) -> None:
        """Shape and type of a slot's tensor, without reading it."""
        piece = self._open(self.location[slot.name]).get_slice(slot.name)
        shape, dtype = tuple(piece.get_shape()), piece.get_dtype()
        if shape != slot.shape:
            raise ValueError(
                f"tensor {slot.name} in {self.folder} has shape {list(shape)} where config.json "
                f"asks for {list(slot.shape)}"
            )
        if dtype not in FLOATS:
            raise ValueError(
                f"tensor {slot.name} in {self.folder} has type {dtype}; quantised weights are not "
                f"built yet, only {', '.join(FLOATS)}"
            )

    def fill(self, slot: TensorSlot) -> None:
        piece = self._open(self.location[slot.name]).get_slice(slot.name)
        tensor = piece[:] if slot.index is None else piece[slot.index]
        slot.into.copy_(tensor if slot.arrange is None else slot.arrange(tensor))


def load_weights(model: CausalLM, folder: Path) -> None:
    slots = list(model.checkpoint_slots())
    with Checkpoint(folder) as checkpoint:
        _check_names(model, slots, checkpoint)
        for slot in slots:
            checkpoint.check(slot)
        for slot in tqdm(slots, desc="Loading weights", unit="tensor", disable=None, leave=False):
            checkpoint.fill(slot)


def _check_names(model: CausalLM, slots: Iterable[TensorSlot], checkpoint: Checkpoint) -> None:
    wanted = {slot.name for slot in slots}
    missing = sorted(wanted - checkpoint.location.keys())
    extra = sorted(
        name
        for name in checkpoint.location.keys() - wanted
        if not model.is_optional(name) and not checkpoint.is_empty(name)
    )
    if missing or extra:
        problems = [f"missing {_some(missing)}"] * bool(missing)
        problems += [f"not in the model {_some(extra)}"] * bool(extra)
        raise ValueError(
            f"the tensors in {checkpoint.folder} do not fit config.json: {'; '.join(problems)}"
        )


def _some(names: list[str], limit: int = 5) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


def fill_randomly(model: CausalLM, seed: int) -> None:
    """`--load-format dummy`: random weights of a sensible size, to measure without a checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.named_parameters():
        if tensor.dim() == 1:
            tensor.fill_(0.0 if "bias" in name else 1.0)
        else:
            tensor.normal_(0.0, tensor.shape[-1] ** -0.5, generator=generator)
