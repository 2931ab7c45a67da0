"""Four- and eight-bit integer matrices in checkpoints, packed into 32-bit words.

N rows · K columns · G groups of columns. Words are little-endian, as in the planes: pairs of
four-bit numbers have the even column in the low nibble.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, lcm
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.models.checkpoint import FLOATS, TensorSpec
from moesaic.models.schemes.storage import Matrix, Source, Storage, blocks
from moesaic.moe.quant import numerics
from moesaic.moe.quant.weights import WEIGHT_FORMATS, Planes, WeightFormat, int4_format

WORDS = ("I32",)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column in nibble 0, 1, … of a word."""
AWQ_PLACE = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of column 0, 1, …"""
HALF = torch.finfo(torch.float16)


class IntegerPlanes(NamedTuple):
    """Unsigned numbers [N, K] (four bits: pairs [N, K / 2]), scales and zeros [N, G] in uint8."""

    values: Tensor
    scales: Tensor
    zeros: Tensor


@dataclass(frozen=True)
class IntegerMatrix(Storage):
    """w = (q - zero) * scale, with a scale per `group` columns, or (None) per row. Four bits are
    kept in groups of `kept_group` columns. Eight bits with several groups or with zero points have
    no format and are decoded."""

    bits: int
    group: int | None
    symmetric: bool = True
    kept_group: int = 0
    activation: bool = False

    @property
    def format(self) -> WeightFormat | None:
        if self.bits == 4:
            return int4_format(self.kept_group, self.symmetric)
        if self.group is not None or not self.symmetric:
            return None
        return WEIGHT_FORMATS["int8_w8a8" if self.activation else "int8_w8a16"]

    @property
    def per_word(self) -> int:
        return 32 // self.bits

    @property
    def zero(self) -> int:
        return 1 << self.bits - 1

    def groups(self, cols: range) -> range:
        return range(1) if self.group is None else blocks(cols, self.group)

    def num_groups(self, size_K: int) -> int:
        return 1 if self.group is None else ceil(size_K / self.group)

    @abstractmethod
    def parts(self, source: Source, rows: range, cols: range) -> IntegerPlanes: ...

    def read(self, source: Source, rows: range, cols: range) -> Planes:
        values, scales, zeros = self.parts(source, rows, cols)
        if self.bits == 8:
            return {"values": (values ^ 0x80).view(torch.int8), "scales": scales}
        repeats = (len(cols) if self.group is None else self.group) // self.kept_group
        return {
            "values": values,
            "scales": scales.repeat_interleave(repeats, 1),
            "zeros": zeros.repeat_interleave(repeats, 1),
        }

    def decode(self, source: Source, rows: range, cols: range) -> Tensor:
        values, scales, zeros = self.parts(source, rows, cols)
        numbers = numerics.unpack(values) if self.bits == 4 else values
        group = self.group_of(source, cols, values.device)
        return (numbers.float() - zeros[:, group]) * scales[:, group]

    def group_of(self, source: Source, cols: range, device: torch.device) -> Tensor:
        """Each column's group among those of `parts`."""
        return torch.arange(len(cols), device=device) // (self.group or len(cols))

    def write(self, w_NK: Tensor, amax: Tensor) -> dict[str, Tensor]:
        return self.store(self.encode(w_NK))

    def encode(self, w_NK: Tensor) -> Planes:
        assert self.format is not None
        return self.format.encode(w_NK)

    @abstractmethod
    def store(self, planes: Planes) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class CompressedInts(IntegerMatrix):
    """compressed-tensors: X.weight in int8, or X.weight_packed along K with X.weight_shape."""

    packed: bool = True
    per_tensor: bool = False
    optional_suffixes: ClassVar[frozenset[str]] = frozenset({"input_scale", "input_zero_point"})

    @property
    def unit(self) -> tuple[int, int]:
        along_N = self.per_word if self.packed and not self.symmetric else 1
        return along_N, lcm(self.per_word if self.packed else 1, self.group or 1)

    def tensors(self, matrix: Matrix) -> Mapping[str, TensorSpec]:
        size_N, size_K = matrix.shape
        groups = self.num_groups(size_K)
        scales = ((1,), ()) if self.per_tensor else ((size_N, groups),)
        tensors = {matrix.tensor("weight_scale"): TensorSpec(scales, FLOATS)}
        if self.packed:
            words = ceil(size_K / self.per_word)
            tensors[matrix.tensor("weight_packed")] = TensorSpec(((size_N, words),), WORDS)
            tensors[matrix.tensor("weight_shape")] = TensorSpec(((2,),), ("I64", "I32"))
        else:
            tensors[matrix.tensor("weight")] = TensorSpec((matrix.shape,), ("I8",))
        if not self.symmetric:
            shape = (ceil(size_N / self.per_word), groups) if self.packed else (size_N, groups)
            zeros = TensorSpec((shape,), WORDS if self.packed else ("I8",))
            tensors[matrix.tensor("weight_zero_point")] = zeros
        return tensors

    def parts(self, source: Source, rows: range, cols: range) -> IntegerPlanes:
        if self.packed:
            words = source.read("weight_packed", rows, blocks(cols, self.per_word))
            values = _bytes(words)[:, : len(cols) * self.bits // 8]
        else:
            values = self._shifted(source.read("weight", rows, cols))
            values = _pairs(values) if self.bits == 4 else values
        if self.per_tensor:
            scales = source.read("weight_scale").float().view(1, 1).expand(len(rows), 1)
        else:
            scales = source.read("weight_scale", rows, self.groups(cols)).float()
        groups = self.groups(cols)
        if self.symmetric:
            zeros = values.new_full((len(rows), len(groups)), self.zero)
        else:
            zeros = self._zeros(source, rows, groups)
        return IntegerPlanes(values, scales, zeros)

    def _zeros(self, source: Source, rows: range, groups: range) -> Tensor:
        if not self.packed:
            return self._shifted(source.read("weight_zero_point", rows, groups))
        words = source.read("weight_zero_point", blocks(rows, self.per_word), groups)
        return _numbers(words.t(), self.bits).t()[: len(rows)]

    def _shifted(self, numbers: Tensor) -> Tensor:
        """Signed numbers plus half the range, in uint8."""
        return _unsigned(numbers) if self.bits == 8 else (numbers + self.zero).view(torch.uint8)

    def store(self, planes: Planes) -> dict[str, Tensor]:
        values, scales = planes["values"], planes["scales"]
        if not self.packed:
            return {"weight": values, "weight_scale": scales}
        shape = [len(values), values.shape[1] * 8 // self.bits]
        return {
            "weight_packed": _words(values if self.bits == 4 else _unsigned(values)),
            "weight_scale": scales,
            "weight_shape": torch.tensor(shape),
        }


@dataclass(frozen=True)
class Float16Scaled(IntegerMatrix):
    """AutoAWQ and GPTQ: tensors have inputs first, scales are float16."""

    def encode(self, w_NK: Tensor) -> Planes:
        """Rounds the numbers with the rounded scale, which readers will use."""
        planes = super().encode(w_NK)
        scales = _rounded_up(planes["scales"].clamp(HALF.tiny, HALF.max)).float()
        if self.bits == 8:
            q = (w_NK / scales).round_().clamp_(-numerics.INT8_MAX, numerics.INT8_MAX)
            return {"values": q.to(torch.int8), "scales": scales}
        zeros = planes["zeros"]
        groups = w_NK.float().unflatten(1, (scales.shape[1], -1))
        q = (groups / scales.unsqueeze(2)).round_().add_(zeros.unsqueeze(2)).flatten(1)
        values = _pairs(q.clamp_(0, numerics.INT4_MAX).to(torch.uint8))
        return {"values": values, "scales": scales, "zeros": zeros}


@dataclass(frozen=True)
class AwqMatrix(Float16Scaled):
    """qweight [K, N / 8], qzeros [G, N / 8], scales [G, N]: packed along N, columns shuffled."""

    @property
    def unit(self) -> tuple[int, int]:
        return self.per_word, self.group or 1

    def tensors(self, matrix: Matrix) -> Mapping[str, TensorSpec]:
        size_N, size_K = matrix.shape
        groups, words = self.num_groups(size_K), ceil(size_N / self.per_word)
        return {
            matrix.tensor("qweight"): TensorSpec(((size_K, words),), WORDS),
            matrix.tensor("qzeros"): TensorSpec(((groups, words),), WORDS),
            matrix.tensor("scales"): TensorSpec(((groups, size_N),), FLOATS),
        }

    def parts(self, source: Source, rows: range, cols: range) -> IntegerPlanes:
        groups, words = self.groups(cols), blocks(rows, self.per_word)
        numbers = _unshuffled(source.read("qweight", cols, words))
        zeros = _unshuffled(source.read("qzeros", groups, words))
        scales = source.read("scales", groups, rows).float()
        return IntegerPlanes(_pairs(numbers.t()), scales.t(), zeros.t())

    def store(self, planes: Planes) -> dict[str, Tensor]:
        return {
            "qweight": _shuffled(numerics.unpack(planes["values"]).t()),
            "qzeros": _shuffled(planes["zeros"].t()),
            "scales": planes["scales"].t().half().contiguous(),
        }


@dataclass(frozen=True)
class GptqMatrix(Float16Scaled):
    """qweight [K / P, N] packed along K, qzeros [G, N / P] along N, scales [G, N], g_idx [K].
    `plus_one`: version 1 of the format stores zeros minus one. `act_order`: g_idx maps columns to
    groups in any order, for which there is no format."""

    plus_one: bool = True
    act_order: bool = False
    optional_suffixes: ClassVar[frozenset[str]] = frozenset({"g_idx"})

    @property
    def format(self) -> WeightFormat | None:
        return None if self.act_order else super().format

    @property
    def unit(self) -> tuple[int, int]:
        return self.per_word, lcm(self.per_word, self.group or 1)

    def tensors(self, matrix: Matrix) -> Mapping[str, TensorSpec]:
        size_N, size_K = matrix.shape
        groups = self.num_groups(size_K)
        tensors = {
            matrix.tensor("qweight"): TensorSpec(((ceil(size_K / self.per_word), size_N),), WORDS),
            matrix.tensor("qzeros"): TensorSpec(((groups, ceil(size_N / self.per_word)),), WORDS),
            matrix.tensor("scales"): TensorSpec(((groups, size_N),), FLOATS),
        }
        if self.act_order:
            tensors[matrix.tensor("g_idx")] = TensorSpec(((size_K,),), WORDS)
        return tensors

    def parts(self, source: Source, rows: range, cols: range) -> IntegerPlanes:
        if self.act_order:
            groups = range(self.num_groups(source.matrix.shape[1]))
        else:
            self._check_order(source, cols)
            groups = self.groups(cols)
        words = source.read("qweight", blocks(cols, self.per_word), rows)
        values = _bytes(words.t())[:, : len(cols) * self.bits // 8]
        scales = source.read("scales", groups, rows).float().t()
        return IntegerPlanes(values, scales, self._zeros(source, rows, groups))

    def group_of(self, source: Source, cols: range, device: torch.device) -> Tensor:
        if not self.act_order:
            return super().group_of(source, cols, device)
        index, groups = source.read("g_idx", cols).long(), self.num_groups(source.matrix.shape[1])
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < groups:
            raise ValueError(
                f"{source.matrix.tensor('g_idx')} has entries outside of 0..{groups - 1}"
            )
        return index

    def _zeros(self, source: Source, rows: range, groups: range) -> Tensor:
        words = source.read("qzeros", groups, blocks(rows, self.per_word))
        stored = _numbers(words, self.bits)[:, : len(rows)].t()
        if not self.plus_one:
            return stored
        if bool((stored == 2 * self.zero - 1).any()):
            raise ValueError(
                f"{source.matrix.tensor('qzeros')} holds a zero point of 0, which version 1 of the "
                "GPTQ format cannot express and readers take differently: convert the checkpoint "
                'to checkpoint_format "gptq_v2"'
            )
        return stored + 1

    def _check_order(self, source: Source, cols: range) -> None:
        if self.group is None or not source.has("g_idx"):
            return
        index = source.read("g_idx", cols)
        expected = torch.arange(cols.start, cols.stop, device=index.device) // self.group
        if not torch.equal(index.long(), expected):
            raise ValueError(
                f"{source.matrix.tensor('g_idx')} is not in order of columns, but "
                "quantization_config says desc_act false: set it to true"
            )

    def store(self, planes: Planes) -> dict[str, Tensor]:
        values, scales = planes["values"], planes["scales"]
        columns = values.shape[1] * 8 // self.bits
        zeros = torch.full_like(scales, self.zero - self.plus_one, dtype=torch.uint8).t()
        group = self.group or columns
        return {
            "qweight": _words(values if self.bits == 4 else _unsigned(values)).t().contiguous(),
            "qzeros": _words(_pairs(zeros) if self.bits == 4 else zeros),
            "scales": scales.t().half().contiguous(),
            "g_idx": torch.arange(columns, dtype=torch.int32) // group,
        }


def _rounded_up(scales: Tensor) -> Tensor:
    """Rounds up to float16, so the largest numbers of a group are not clipped."""
    halves = scales.half()
    return (
        (halves.view(torch.int16) + (halves.float() < scales)).to(torch.int16).view(torch.float16)
    )


def _bytes(words: Tensor) -> Tensor:
    return words.contiguous().view(torch.uint8)


def _numbers(words: Tensor, bits: int) -> Tensor:
    return numerics.unpack(_bytes(words)) if bits == 4 else _bytes(words)


def _pairs(numbers: Tensor) -> Tensor:
    return numbers[:, 0::2] | numbers[:, 1::2] << 4


def _words(values: Tensor) -> Tensor:
    """Bytes to 32-bit words; pads rows with zeros."""
    padded = F.pad(values, (0, -values.shape[1] % 4))
    return padded.clone(memory_format=torch.contiguous_format).view(torch.int32)


def _unsigned(values: Tensor) -> Tensor:
    return values.view(torch.uint8) ^ 0x80


def _unshuffled(words: Tensor) -> Tensor:
    return _numbers(words, 4).unflatten(1, (-1, 8))[..., list(AWQ_PLACE)].flatten(1)


def _shuffled(numbers: Tensor) -> Tensor:
    return _words(_pairs(numbers.unflatten(1, (-1, 8))[..., list(AWQ_ORDER)].flatten(1)))
