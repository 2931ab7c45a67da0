"""The memory that a rank needs to move experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from moesaic.comm.collectives.group import Peers
from moesaic.comm.windows.factory import device_window_bytes
from moesaic.comm.windows.window import PlaneSpec
from moesaic.config import ServerArgs
from moesaic.moe.layer import FusedMoE

# Tensors begin at multiples of this in an image, so that sums can take whole words.
ALIGN: Final = 16
OUTBOX, SUMS = "outbox", "sums"
# Bytes that a rank copies in one step, unless --eplb-max-bytes-per-step says otherwise: about a
# millisecond of a CPU core, and 30 microseconds of a GPU's memory. Between nodes they share
# connections with the exchange that begins every step: 1.3 ms at 25 Gbit/s.
STEP_BYTES: Final = {"cpu": 4 << 20, "cuda": 64 << 20}
NODE_STEP_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class ExpertImage:
    """The bytes of one expert of a layer: where each of its tensors begins, and how many there
    are."""

    sizes: tuple[int, ...]

    @classmethod
    def of(cls, layer: FusedMoE) -> ExpertImage:
        return cls(tuple(part.nbytes for part in layer.store.tensors(0)))

    @property
    def starts(self) -> list[int]:
        """The first byte of each tensor, and the end of the last."""
        starts = [0]
        for size in self.sizes:
            starts.append(starts[-1] + -(-size // ALIGN) * ALIGN)
        return starts

    @property
    def nbytes(self) -> int:
        return self.starts[-1]

    def cut(self, row: Tensor) -> list[Tensor]:
        """The tensors of an expert as byte views of its image."""
        return [
            row[start : start + size] for start, size in zip(self.starts, self.sizes, strict=False)
        ]


@dataclass(frozen=True, slots=True)
class BufferSizes:
    """What one rank allocates to move experts, in bytes and in experts.

    Outboxes of one node are on its ranks' devices. Those of several are in host memory, of which
    every node has a copy; a GPU writes to an outbox of its own first."""

    outbox: int
    image: int
    staged: int
    """Experts that are staged at once: all slots of the layers of a chunk."""
    nodes: int = 1
    on_gpu: bool = False
    """Whether ranks compute as on a GPU."""

    @classmethod
    def of(
        cls,
        layers: Sequence[FusedMoE],
        outbox: int,
        per_chunk: int,
        nodes: int = 1,
        on_gpu: bool = False,
    ) -> BufferSizes:
        """Large enough for each of the layers, which may have unlike experts."""
        image = max(ExpertImage.of(layer).nbytes for layer in layers)
        slots = max(layer.layout.slots_per_rank for layer in layers)
        staged = slots * min(per_chunk, len(layers))
        # A multiple of words, as sums of pieces need it.
        return cls(min(outbox // ALIGN * ALIGN, image * staged), image, staged, nodes, on_gpu)

    @property
    def through_host(self) -> bool:
        """Whether experts go from GPU to GPU through host memory."""
        return self.on_gpu and self.nodes > 1

    @property
    def experts_per_step(self) -> int:
        """Slots of a rank that flip in one step."""
        return max(1, self.outbox // self.image)

    @property
    def planes(self) -> list[PlaneSpec]:
        return [
            PlaneSpec(OUTBOX, (self.outbox,), torch.uint8),
            PlaneSpec(SUMS, (self.staged,), torch.int64),
        ]

    @property
    def _plane_bytes(self) -> int:
        return sum(spec.nbytes for spec in self.planes)

    def window_bytes(self, size: int, device: torch.device) -> int:
        """Bytes on its device of a rank's window in a group of `size` ranks."""
        if self.through_host:
            return 0
        if device.type == "cuda":
            return device_window_bytes(self.planes, size, 1, device)
        return self.nodes * self._plane_bytes

    @property
    def host_bytes(self) -> int:
        """A rank's part of the memory of its node, if it computes on a GPU."""
        return self.nodes * self._plane_bytes if self.through_host else 0

    def nbytes(self, size: int, device: torch.device) -> int:
        """All of a rank's bytes on its device."""
        outbox = self._plane_bytes if self.through_host else 0
        return self.window_bytes(size, device) + outbox + self.staged * self.image


def buffer_sizes(args: ServerArgs, layers: Sequence[FusedMoE], stage: Peers) -> BufferSizes:
    """`stage`: the ranks between which experts move."""
    kind, nodes = layers[0].context.resolved.device, max(1, len(set(stage.nodes)))
    default = STEP_BYTES[kind] if nodes == 1 else NODE_STEP_BYTES
    return BufferSizes.of(
        layers,
        args.eplb_max_bytes_per_step or default,
        args.eplb_rebalance_layers_per_chunk or 1,
        nodes,
        on_gpu=kind == "cuda",
    )
