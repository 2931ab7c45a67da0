"""Which experts the routers chose for the tokens of a step.

Every MoE layer leaves the slots of its rows in `Step.routed`; nothing is copied unless a request
asks for them. A captured graph holds those tensors: after a replay they have the step's slots.

R rows that a request asks for · T rows of the step · M MoE layers of this stage · N layers of this
stage · K chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moesaic.engine.runner.pinned import PinnedRing
from moesaic.engine.schedule.plan import StepPlan
from moesaic.models.blocks import takes_all_rows
from moesaic.moe.placement import Placement

if TYPE_CHECKING:
    from moesaic.engine.runner.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class RoutedSlots:
    """The slots of a step's rows, in flight to the host, and the placements that they follow."""

    reader: RoutedExperts
    slots_RMK: Tensor
    placements: list[Placement]

    def experts(self) -> bytes:
        """Logical experts [R, N, K] of uint16, zeros in layers without any. Call it once the copy
        to the host has ended."""
        reader, slots_RMK = self.reader, self.slots_RMK.numpy()
        experts_RNK = np.zeros((len(slots_RMK), reader.num_layers, reader.top_k), np.uint16)
        for number, (layer, placement) in enumerate(
            zip(reader.moe_layers, self.placements, strict=True)
        ):
            slots_RK = slots_RMK[:, number]
            experts_RNK[:, layer] = _experts(slots_RK, placement)
        return experts_RNK.tobytes()


class RoutedExperts:
    """Reads the slots that the routers of this stage have left."""

    def __init__(self, runner: ModelRunner, uploads: PinnedRing) -> None:
        self._layers, self._uploads = runner.moe_layers, uploads
        self._parallel, self._device = runner.parallel, runner.device
        self._gathers = not takes_all_rows(runner.parallel, runner.moe)
        stage = runner.parallel.layers
        assert stage is not None
        self.num_layers, self.top_k = len(stage), runner.top_k
        self.moe_layers = [layer.dispatcher.config.layer - stage.start for layer in self._layers]
        """Within the stage."""

    def read(self, plan: StepPlan, slots: Sequence[Tensor], rows: int) -> RoutedSlots:
        """Starts the copy of a step's slots to the host. `slots`: those of each MoE layer; `rows`:
        those of the step, padding included. All ranks of the attention group call it together."""
        chosen = plan.routed_rows()
        if not self._layers:
            return RoutedSlots(self, torch.zeros(len(chosen), 0, self.top_k), [])
        slots_TMK = torch.stack([ids_TK.int() for ids_TK in slots], 1)
        if self._gathers:
            group = self._parallel.attention
            counts = self._parallel.row_counts([rows])
            own_TMK = slots_TMK[: counts[group.rank]]
            slots_TMK = group.gather_rows(own_TMK, counts, "routed experts")
        if len(chosen) < len(slots_TMK):
            (rows_R,) = self._uploads.upload(chosen)
            slots_TMK = slots_TMK[rows_R]
        host = torch.empty(slots_TMK.shape, dtype=torch.int32, pin_memory=slots_TMK.is_cuda)
        host.copy_(slots_TMK, non_blocking=True)
        return RoutedSlots(self, host, [layer.placement for layer in self._layers])


def join_layers(stages: Sequence[bytes], rows: int) -> bytes:
    """The experts of all stages' layers, each given as [rows, layers, top-k] of uint16."""
    parts = [np.frombuffer(data, np.uint16).reshape(rows, -1) for data in stages]
    return np.concatenate(parts, axis=1).tobytes()


def _experts(slots_RK: npt.NDArray[np.int32], placement: Placement) -> npt.NDArray[np.integer]:
    return slots_RK if placement.is_identity else np.array(placement.slots)[slots_RK]
