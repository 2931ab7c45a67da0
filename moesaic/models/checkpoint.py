"""The safetensors files of a checkpoint folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from torch import Tensor

from moesaic.models.config import EXPERT_COUNTS, RawConfig
from moesaic.models.folder import TensorIndex, brief, read_as
from moesaic.models.tensor_file import TensorEntry, TensorFile

INDEX = "model.safetensors.index.json"
LAYER = re.compile(r"^model\.layers\.(\d{1,9})\.")
EXPERT = re.compile(r"\.experts\.(\d{1,9})\.")
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The shapes and types that a tensor may have."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...] = FLOATS


@lru_cache(maxsize=256)
def float_spec(shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec((shape,))


class Checkpoint:
    """The tensors of a folder by name. `upload` copies what is read to another device."""

    def __init__(self, folder: Path, upload: Callable[[Tensor], Tensor] | None = None) -> None:
        self.folder, self._upload = folder, upload
        self._files = {name: TensorFile(folder / name) for name in _file_names(folder)}
        self.location: dict[str, str] = {}
        """The file of each tensor, from the files: some producers do not update the index."""
        self._entries: dict[str, TensorEntry] = {}
        for name, file in self._files.items():
            self.location.update(dict.fromkeys(file.entries, name))
            self._entries.update(file.entries)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def dtype(self, name: str) -> str:
        """The name in safetensors: BF16, F8_E4M3, …"""
        return self._entries[name].dtype

    def read(self, name: str, *cut: int | slice | range) -> Tensor:
        """Reads a tensor or a part of it; only the bytes of that part are read."""
        tensor = self._files[self.location[name]].read(name)
        if not _covers(cut, self._entries[name].shape):
            tensor = tensor[tuple(map(_index, cut))]
        return tensor if self._upload is None else self._upload(tensor)

    def is_empty(self, name: str) -> bool:
        """Transformers writes tensors without elements for parts of size zero."""
        return 0 in self.shape(name)

    def check(self, name: str, spec: TensorSpec) -> None:
        """Checks shape and type without reading the tensor."""
        entry = self._entries[name]
        shape, dtype = entry.shape, entry.dtype
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


def _covers(cut: tuple[int | slice | range, ...], shape: tuple[int, ...]) -> bool:
    for at, size in zip(cut, shape, strict=False):  # noqa: SIM110 (this runs for each tensor)
        if at != range(size):
            return False
    return True


def _index(at: int | slice | range) -> int | slice:
    return slice(at.start, at.stop, at.step) if isinstance(at, range) else at


def _file_names(folder: Path) -> list[str]:
    if (folder / INDEX).is_file():
        files = sorted(set(_weight_map(folder).values()))
    else:
        files = sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{folder} holds no *.safetensors file: convert the checkpoint to safetensors"
        )
    return files


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
        ("num_hidden_layers", layers, LAYER),
        (next(filter(raw.has, EXPERT_COUNTS), ""), experts, EXPERT),
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
