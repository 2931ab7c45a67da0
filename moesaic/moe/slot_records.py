"""What the slots of a layer hold, noted beside weights in memory that outlives their rank.

A process may end in the middle of a write. So a slot is forgotten before it is written, and noted
afterwards: its expert, and a checksum of its bytes.

C slots of a rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.moe.placement import EMPTY

Words = NDArray[np.uint64]

# Columns of the tables whose sums make a checksum, and the bytes of a table: as fast as memory is
# read, about 4 GiB in a second.
COLUMNS: Final = 4096
TABLE_BYTES: Final = 4 << 20
WORD: Final = 8
MODULUS: Final = 1 << 64
ODD: Final = 2 * np.arange(COLUMNS, dtype=np.uint64) + np.uint64(1)


def checksum(parts: Iterable[Tensor]) -> int:
    """A sum over the words of tensors on the host, at any number of bytes: it changes with every
    single word. The word in column c counts 2c + 1 times, and the table with number t 2t + 1 times.

    The 8-byte words 5, 6, 7 have the sum 1 * 5 + 3 * 6 + 5 * 7 = 58."""
    total = table = 0
    for part in parts:
        data = part.detach().reshape(-1).view(torch.uint8).numpy()
        for start in range(0, len(data), TABLE_BYTES):
            total += (2 * table + 1) * _table_sum(data[start : start + TABLE_BYTES])
            table += 1
    return total % MODULUS


def _table_sum(data: NDArray[np.uint8]) -> int:
    whole = len(data) // WORD * WORD
    words = data[:whole].view(np.uint64)
    rows = len(words) // COLUMNS * COLUMNS
    column_C = words[:rows].reshape(-1, COLUMNS).sum(0)
    column_C[: len(words) - rows] += words[rows:]
    if whole < len(data):
        column_C[-1] += int.from_bytes(data[whole:].tobytes(), "little")
    return int((column_C * ODD).sum())


class SlotRecords:
    """Of one layer: a row per slot, of its expert's number plus one and its checksum. Zeros are an
    unknown expert."""

    def __init__(self, table_C2: Words) -> None:
        self._table_C2 = table_C2

    def expert(self, slot: int) -> int:
        """EMPTY if that is unknown."""
        return int(self._table_C2[slot, 0]) - 1

    def checksum(self, slot: int) -> int:
        return int(self._table_C2[slot, 1])

    def forget(self, slot: int) -> None:
        self._table_C2[slot, 0] = 0

    def note(self, slot: int, expert: int, checksum: int) -> None:
        self._table_C2[slot, 1] = checksum
        self._table_C2[slot, 0] = expert + 1

    def find(self, expert: int) -> int | None:
        """A slot that holds the expert."""
        found = np.flatnonzero(self._table_C2[:, 0] == expert + 1)
        return int(found[0]) if expert != EMPTY and len(found) else None
