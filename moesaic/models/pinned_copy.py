"""Copies tensors from files to a device through pinned memory, while the next ones are read."""

from __future__ import annotations

import torch
from torch import Tensor

PIECE_BYTES = 64 << 20
PIECES = 2


class PinnedCopy:
    """Copies through a ring of pinned buffers: a copy from pageable memory is slower and blocks.
    Host memory never holds more of a model than the ring."""

    def __init__(self, device: torch.device, piece_bytes: int = PIECE_BYTES) -> None:
        self.device, pinned = device, device.type == "cuda"
        self._ring = [
            torch.empty(piece_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(PIECES)
        ]
        self._read = [torch.cuda.Event() if pinned else None for _ in range(PIECES)]
        self._next = 0

    def __call__(self, tensor: Tensor) -> Tensor:
        source = tensor.contiguous()
        out = torch.empty(source.shape, dtype=source.dtype, device=self.device)
        if not source.numel():
            return out
        from_bytes, to_bytes = (x.reshape(-1).view(torch.uint8) for x in (source, out))
        size = self._ring[0].numel()
        for start in range(0, len(from_bytes), size):
            piece = from_bytes[start : start + size]
            self._send(piece, to_bytes[start : start + len(piece)])
        return out

    def _send(self, piece: Tensor, to: Tensor) -> None:
        place = self._next = (self._next + 1) % PIECES
        event, buffer = self._read[place], self._ring[place][: len(piece)]
        if event is not None:
            event.synchronize()  # the buffer's previous copy is done
        buffer.copy_(piece)
        to.copy_(buffer, non_blocking=True)
        if event is not None:
            event.record()
