"""How a checkpoint stores its matrices, quantised or not. N rows · K columns."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor

from moesaic.models.checkpoint import FLOATS, Checkpoint, TensorSpec
from moesaic.models.schemes.floats import StoredNvfp4Matrix
from moesaic.models.schemes.storage import Matrix, Source, Storage, Unquantised
from moesaic.moe.quant.weights import Planes, WeightFormat

ALL = slice(None)
# Scales of a quantised KV cache; ours has the model's type.
CACHE_SCALES = re.compile(
    r"\.self_attn\.(attn\.)?([qkv]_scale|[kv]_proj\.([kv]_scale|output_scale))$"
)


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

    def read(
        self,
        checkpoint: Checkpoint,
        matrix: Matrix,
        format: WeightFormat,
        rows: slice = ALL,
        cols: slice = ALL,
    ) -> Planes:
        """Planes of a part in `format`: as stored, decoded, or encoded. Encodes the whole matrix,
        so a rank's part does not depend on the sharding."""
        storage, (size_N, size_K) = self.storage_of(checkpoint, matrix), matrix.shape
        if storage.format is not None and storage.format.codec.planes == format.codec.planes:
            source = Source(checkpoint, matrix)
            return storage.planes(source, range(size_N)[rows], range(size_K)[cols])
        if not format.quantised:
            return {"values": self.dense(checkpoint, matrix, rows, cols)}
        planes = format.encode(self.dense(checkpoint, matrix))
        return format.slice(planes, rows, cols)

    def dense(
        self, checkpoint: Checkpoint, matrix: Matrix, rows: slice = ALL, cols: slice = ALL
    ) -> Tensor:
        """The numbers of a part: float32 if decoded, else as stored."""
        source, storage = Source(checkpoint, matrix), self.storage_of(checkpoint, matrix)
        return storage.dense(source, range(matrix.shape[0])[rows], range(matrix.shape[1])[cols])

    def input_scale(self, checkpoint: Checkpoint, matrix: Matrix) -> float | None:
        """The calibrated global scale of an nvfp4 matrix's input; None without calibration."""
        storage = self.storage_of(checkpoint, matrix)
        if not isinstance(storage, StoredNvfp4Matrix):
            return None
        return storage.input_scale(Source(checkpoint, matrix))

    def storage_of(self, checkpoint: Checkpoint, matrix: Matrix) -> Storage:
        if self.storage is not None and self._is_quantised(checkpoint, matrix, self.storage):
            return self.storage
        return Unquantised()

    def tensors(self, checkpoint: Checkpoint, matrix: Matrix) -> dict[str, TensorSpec]:
        """The tensors that a matrix needs."""
        return dict(self.storage_of(checkpoint, matrix).tensors(matrix))

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
