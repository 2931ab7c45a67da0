"""Copies tensors from files to a device through pinned memory, while the next ones are read."""

from __future__ import annotations

import torch
from torch import Tensor

PIECE_BYTES = 64 << 20
PIECES = 2
ALIGNMENT = 16


class PinnedCopy:
    """Copies through a ring of pinned buffers: a copy from pageable memory is slower and blocks.
    Host memory never holds more of a model than the ring. Small tensors share a buffer, which is
    waited for only when it is full."""

    def __init__(self, device: torch.device, piece_bytes: int = PIECE_BYTES) -> None:
        self.device, pinned = device, device.type == "cuda"
        self._ring = [
            torch.empty(piece_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(PIECES)
        ]
        self._copied = [torch.cuda.Event() if pinned else None for _ in range(PIECES)]
        self._place = self._used = 0

    def __call__(self, tensor: Tensor) -> Tensor:
        if not tensor.numel() or tensor.nbytes > len(self._ring[0]):
            return self._in_pieces(tensor)
        staged = self._room(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        staged.copy_(tensor)
        return staged.to(self.device, non_blocking=True, copy=True)

    def _in_pieces(self, tensor: Tensor) -> Tensor:
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        from_bytes, to_bytes = (x.reshape(-1).view(torch.uint8) for x in (tensor, out))
        size = len(self._ring[0])
        for start in range(0, len(from_bytes), size):
            piece = from_bytes[start : start + size]
            staged = self._room(len(piece)).copy_(piece)
            to_bytes[start : start + size].copy_(staged, non_blocking=True)
        return out

    def _room(self, nbytes: int) -> Tensor:
        """A part of a buffer that no copy reads."""
        if self._used + nbytes > len(self._ring[0]):
            self._turn()
        first, self._used = self._used, -(-(self._used + nbytes) // ALIGNMENT) * ALIGNMENT
        return self._ring[self._place][first : first + nbytes]

    def _turn(self) -> None:
        """Takes the next buffer once its copies are done."""
        if (filled := self._copied[self._place]) is not None:
            filled.record()
        self._place, self._used = (self._place + 1) % PIECES, 0
        if (event := self._copied[self._place]) is not None:
            event.synchronize()
