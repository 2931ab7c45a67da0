"""The tensors of one safetensors file, as views of the file in memory."""

from __future__ import annotations

from functools import cached_property, lru_cache
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Final

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
LENGTH_BYTES: Final = 8


class TensorEntry(msgspec.Struct, frozen=True, gc=False):
    """What the header says of a tensor; offsets are those in the data behind the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class TensorFile:
    """Maps a file on first use. Its header is read once, so that a tensor costs no more than a
    view: a large model has a hundred thousand of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._views: dict[str, Tensor] = {}
        try:
            with safe_open(path, framework="np"):  # refuses a damaged header
                pass
            self.entries, self._start = _read_header(path)
        except (SafetensorError, OSError, msgspec.MsgspecError) as error:
            raise ValueError(f"{path} cannot be read: {error}; fetch the file again") from error

    @cached_property
    def _bytes(self) -> Tensor:
        size = self.path.stat().st_size
        return torch.from_file(str(self.path), size=size, dtype=torch.uint8, device="cpu")

    def _numbers(self, dtype: str) -> Tensor:
        """The whole file as numbers of a type."""
        if (found := self._views.get(dtype)) is None:
            size = DTYPES[dtype].itemsize
            whole = self._bytes[: len(self._bytes) // size * size]
            found = self._views[dtype] = whole.view(DTYPES[dtype])
        return found

    def read(self, name: str) -> Tensor:
        """A view of the whole tensor in host memory, whatever the default device is."""
        entry = self.entries[name]
        if entry.dtype not in DTYPES:
            raise ValueError(f"tensor {name} in {self.path} has unknown type {entry.dtype}")
        numbers = self._numbers(entry.dtype)
        place, rest = divmod(self._start + entry.data_offsets[0], numbers.itemsize)
        if rest:
            return self._copied(entry)
        return numbers.as_strided(entry.shape, _strides(entry.shape), place)

    def _copied(self, entry: TensorEntry) -> Tensor:
        """The format does not demand that numbers begin at multiples of their size."""
        first, stop = (self._start + offset for offset in entry.data_offsets)
        return self._bytes[first:stop].clone().view(DTYPES[entry.dtype]).view(entry.shape)


@lru_cache(maxsize=256)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1] if shape else ()


def _read_header(path: Path) -> tuple[dict[str, TensorEntry], int]:
    """The entries by name, and where the data begins."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header = msgspec.json.decode(file.read(length))
    header.pop("__metadata__", None)
    return msgspec.convert(header, dict[str, TensorEntry]), LENGTH_BYTES + length
