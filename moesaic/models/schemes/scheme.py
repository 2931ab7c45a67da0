"""How a checkpoint stores its matrices, quantised or not. N rows · K columns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from moesaic.models.checkpoint import FLOATS, Checkpoint, TensorSpec
from moesaic.models.schemes.floats import StoredNvfp4Matrix
from moesaic.models.schemes.storage import Matrix, Source, Storage, Unquantised
from moesaic.moe.quant.weights import Planes, WeightFormat

ALL = slice(None)
UNQUANTISED = Unquantised()
# Scales of a quantised KV cache; ours has the model's type.
CACHE_SCALES = re.compile(
    r"\.self_attn\.(attn\.)?([qkv]_scale|[kv]_proj\.([kv]_scale|output_scale))$"
)


@dataclass(frozen=True, slots=True)
class MatrixReader:
    """Reads a matrix of an open checkpoint, which has it in `storage`."""

    source: Source
    storage: Storage

    def tensors(self) -> Mapping[str, TensorSpec]:
        """The tensors that the matrix needs."""
        return self.storage.tensors(self.source.matrix)

    def read(self, format: WeightFormat, rows: slice = ALL, cols: slice = ALL) -> Planes:
        """Planes of a part in `format`: as stored, decoded, or encoded. Encodes the whole matrix,
        so a rank's part does not depend on the sharding."""
        if not format.quantised:
            return {"values": self.dense(rows, cols)}
        storage, (size_N, size_K) = self.storage, self.source.matrix.shape
        if storage.format is not None and storage.format.codec.planes == format.codec.planes:
            return storage.planes(self.source, range(size_N)[rows], range(size_K)[cols])
        return format.slice(format.encode(self.dense()), rows, cols)

    def dense(self, rows: slice = ALL, cols: slice = ALL) -> Tensor:
        """The numbers of a part: float32 if decoded, else as stored."""
        size_N, size_K = self.source.matrix.shape
        return self.storage.dense(self.source, range(size_N)[rows], range(size_K)[cols])

    def input_scale(self) -> float | None:
        """The calibrated global scale of an nvfp4 matrix's input; None without calibration."""
        if not isinstance(self.storage, StoredNvfp4Matrix):
            return None
        return self.storage.input_scale(self.source)


@dataclass(frozen=True)
class Scheme:
    """`storage` is that of the quantised matrices, None without any. The tensors decide which
    matrices are quantised: producers interpret skip lists differently.

    `expert_format` keeps the routed experts' numbers unchanged; None: the model's type. `note` is
    for the user.
    """

    method: str = "none"
    storage: Storage | None = None
    expert_format: WeightFormat | None = None
    num_experts: int = 0
    note: str = ""

    def find(self, checkpoint: Checkpoint, matrix: Matrix) -> MatrixReader:
        """Finds out how the checkpoint stores the matrix."""
        storage = self.storage
        if storage is None or not self._is_quantised(checkpoint, matrix, storage):
            storage = UNQUANTISED
        return MatrixReader(Source(checkpoint, matrix), storage)

    def optional_tensors(self, matrix: Matrix) -> set[str]:
        """Names of tensors that the checkpoint may hold beside a matrix."""
        if matrix.index is not None:
            return {matrix.tensor("bias")}
        sides = self.storage.optional_suffixes if self.storage is not None else ()
        return {matrix.tensor(suffix) for suffix in sides}

    def is_optional(self, name: str) -> bool:
        return self.storage is not None and CACHE_SCALES.search(name) is not None

    def _is_quantised(self, checkpoint: Checkpoint, matrix: Matrix, storage: Storage) -> bool:
        """One tensor that only quantised matrices have is enough: others are reported missing."""
        for name, spec in storage.tensors(matrix).items():
            if name != matrix.name and name in checkpoint:
                return True
            if name == matrix.name and name in checkpoint:
                dtype = checkpoint.dtype(name)
                if dtype in spec.dtypes and dtype not in FLOATS:
                    return True
        return False
