"""A checkpoint's way to store its matrices, whichever of them are quantised.

N rows · K columns.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor

from moesaic.models.checkpoint import FLOATS, Checkpoint, TensorSpec
from moesaic.models.schemes.floats import StoredNvfp4Matrix
from moesaic.models.schemes.storage import Matrix, Source, Storage, Unquantised
from moesaic.moe.quant.weights import Planes, WeightFormat

ALL = slice(None)
# Scales of a quantised KV cache, which is kept in the model's type here.
CACHE_SCALES = re.compile(
    r"\.self_attn\.(attn\.)?([qkv]_scale|[kv]_proj\.([kv]_scale|output_scale))$"
)


@dataclass(frozen=True)
class Scheme:
    """`storage`: of the quantised matrices; None: there are none. Which matrices are quantised is
    seen from the tensors, since skip lists are matched differently by every producer.

    `expert_format`: in which the routed experts are kept without a change of their numbers; None:
    in the model's own type. `note`: what a user should know about that.
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
        """Planes of a part, in the wanted format: as stored, decoded, or encoded anew.

        Encoding looks at the whole matrix, so that a rank's part does not depend on the cut.
        """
        source, storage = Source(checkpoint, matrix), self.storage_of(checkpoint, matrix)
        cut_N, cut_K = (
            range(size)[cut] for size, cut in zip(matrix.shape, (rows, cols), strict=True)
        )
        if storage.format is not None and storage.format.codec.planes == format.codec.planes:
            return storage.planes(source, cut_N, cut_K)
        if not format.quantised:
            return {"values": storage.dense(source, cut_N, cut_K)}
        planes = format.encode(self.dense(checkpoint, matrix))
        return format.slice(planes, rows, cols)

    def dense(
        self, checkpoint: Checkpoint, matrix: Matrix, rows: slice = ALL, cols: slice = ALL
    ) -> Tensor:
        """The numbers of a part: float32 where they were decoded, else as they are stored."""
        source, storage = Source(checkpoint, matrix), self.storage_of(checkpoint, matrix)
        return storage.dense(source, range(matrix.shape[0])[rows], range(matrix.shape[1])[cols])

    def input_scale(self, checkpoint: Checkpoint, matrix: Matrix) -> float | None:
        """The calibrated global scale of the activations that a matrix of nvfp4 is multiplied
        with; None: not given."""
        storage = self.storage_of(checkpoint, matrix)
        if not isinstance(storage, StoredNvfp4Matrix):
            return None
        return storage.input_scale(Source(checkpoint, matrix))

    def storage_of(self, checkpoint: Checkpoint, matrix: Matrix) -> Storage:
        if self.storage is not None and self._is_quantised(checkpoint, matrix, self.storage):
            return self.storage
        return Unquantised()

    def tensors(self, checkpoint: Checkpoint, matrix: Matrix) -> dict[str, TensorSpec]:
        """What must be there for a matrix."""
        return dict(self.storage_of(checkpoint, matrix).tensors(matrix))

    def optional_tensors(self, matrix: Matrix) -> set[str]:
        """Names that may lie beside a matrix."""
        if matrix.index is not None:
            return {matrix.tensor("bias")}
        sides = self.storage.optional_suffixes if self.storage is not None else ()
        return {matrix.tensor(suffix) for suffix in sides}

    def is_optional(self, name: str) -> bool:
        return self.storage is not None and CACHE_SCALES.search(name) is not None

    def _is_quantised(self, checkpoint: Checkpoint, matrix: Matrix, storage: Storage) -> bool:
        """One tensor that only quantised matrices have is enough: others are missing then."""
        for name, spec in storage.tensors(matrix).items():
            if name != matrix.name and name in checkpoint:
                return True
            if name == matrix.name and name in checkpoint:
                dtype = checkpoint.dtype(name)
                if dtype in spec.dtypes and dtype not in FLOATS:
                    return True
        return False
