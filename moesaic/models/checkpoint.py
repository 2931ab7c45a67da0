"""The safetensors files of a checkpoint folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moesaic.models.config import EXPERT_COUNTS, RawConfig
from moesaic.models.folder import TensorIndex, brief, read_as

INDEX = "model.safetensors.index.json"
_LAYER = re.compile(r"^model\.layers\.(\d{1,9})\.")
_EXPERT = re.compile(r"\.experts\.(\d{1,9})\.")
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The shapes and types that a tensor may have."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...] = FLOATS


class Checkpoint:
    """The tensors of a folder by name. `upload` copies what is read to another device."""

    def __init__(self, folder: Path, upload: Callable[[Tensor], Tensor] | None = None) -> None:
        self.folder, self._upload = folder, upload
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self.location = self._locate()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __contains__(self, name: object) -> bool:
        return name in self.location

    def _locate(self) -> dict[str, str]:
        """The file of each tensor, from the files: some producers do not update the index."""
        if (self.folder / INDEX).is_file():
            files = sorted(set(_weight_map(self.folder).values()))
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

    def _piece(self, name: str) -> Any:
        return self._open(self.location[name]).get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._piece(name).get_shape())

    def dtype(self, name: str) -> str:
        """The name in safetensors: BF16, F8_E4M3, …"""
        return str(self._piece(name).get_dtype())

    def read(self, name: str, *cut: int | slice | range) -> Tensor:
        """Reads a tensor or a part of it; only the bytes of that part are read."""
        where = tuple(
            slice(at.start, at.stop, at.step) if isinstance(at, range) else at for at in cut
        )
        if self._upload is None:
            tensor: Tensor = self._piece(name)[where or ...]
            return tensor
        with torch.device("cpu"):  # else safetensors uses the default device
            return self._upload(self._piece(name)[where or ...])

    def is_empty(self, name: str) -> bool:
        """Transformers writes tensors without elements for parts of size zero."""
        return 0 in self.shape(name)

    def check(self, name: str, spec: TensorSpec) -> None:
        """Checks shape and type without reading the tensor."""
        shape, dtype = self.shape(name), self.dtype(name)
        if shape not in spec.shapes:
            asked = " or ".join(str(list(known)) for known in spec.shapes)
            raise ValueError(
                f"tensor {name} in {self.folder} has shape {list(shape)} where config.json "
                f"asks for {asked}"
            )
        if dtype not in spec.dtypes:
            raise ValueError(
                f"tensor {name} in {self.folder} has type {dtype} where config.json asks for "
                f"{' or '.join(spec.dtypes)}"
            )


def check_folder(path: str, has_tensors: bool) -> None:
    """Raises ValueError if the folder is no checkpoint, or if config.json has more layers or
    experts than the tensors: before anything that large is allocated."""
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(
            f"--model-path {path} is not a folder: give a Hugging Face folder with config.json, "
            "safetensors and tokenizer.json; nothing is downloaded"
        )
    raw = RawConfig.read(folder)
    layers, experts = raw.integer("num_hidden_layers"), raw.num_experts()
    if not has_tensors:
        return
    names = _tensor_names(folder)
    for field, asked, numbered in (
        ("num_hidden_layers", layers, _LAYER),
        (next(filter(raw.has, EXPERT_COUNTS), ""), experts, _EXPERT),
    ):
        numbers = [int(found[1]) for name in names if (found := numbered.search(name))]
        if numbers and asked > max(numbers) + 1:
            raise ValueError(
                f"{raw.source}: {field} is {asked}, but the tensors in {folder} have "
                f"{max(numbers) + 1}: fix it, or fetch the missing files"
            )


def _tensor_names(folder: Path) -> Iterable[str]:
    """From the index if there is one: its layers and experts are right even for renamed tensors."""
    if (folder / INDEX).is_file():
        return _weight_map(folder)
    with Checkpoint(folder) as checkpoint:
        return checkpoint.location


def _weight_map(folder: Path) -> dict[str, str]:
    """The file of each tensor, from the index; only file names in the folder are allowed."""
    index = folder / INDEX
    found = read_as(index, TensorIndex).weight_map
    if not found:
        raise ValueError(f"{index}: weight_map is empty: fetch the file again")
    for tensor, file in found.items():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ValueError(
                f"{index}: weight_map has {tensor} in {brief(file)}, which is not a safetensors "
                "file of the folder: fix the file"
            )
    return found
