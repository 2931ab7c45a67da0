"""The peers of a rank, and the collectives between them."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field, replace

import torch

from moesaic.comm.collectives.collective import Collective, SingleRank
from moesaic.comm.collectives.device_collective import device_collective, rail_collective
from moesaic.comm.collectives.group import Peers, RankGroup
from moesaic.comm.collectives.nccl_collective import set_up_nccl
from moesaic.comm.launch.mps import cramped, crowd
from moesaic.comm.mesh import Mesh, RankPlace, share
from moesaic.comm.supervise.control_page import RankStatus
from moesaic.comm.windows.lasting_memory import LastingMemory
from moesaic.layers.parallel import Parallel

logger = logging.getLogger(__name__)

# The largest part of a rank that GPUs exchange in one piece: most of a prefill step.
DEVICE_BYTES = 32 << 20


def neighbours(mesh: Mesh) -> int:
    """How many ranks may wait on a GPU at once."""
    return max(mesh.ranks_per_node, crowd())


@dataclass(frozen=True)
class RankContext:
    """`replica`: all ranks of this copy of the model. `stage`: the tensor-parallel ranks of this
    stage; `attention`: those that share its requests. The default is a single rank."""

    mesh: Mesh = field(default_factory=Mesh)
    place: RankPlace = field(default_factory=lambda: Mesh().place(0))
    replica: Peers = field(default_factory=RankGroup.alone)
    stage_peers: Peers = field(default_factory=RankGroup.alone)
    stage: Collective = field(default_factory=SingleRank)
    attention: Collective = field(default_factory=SingleRank)
    attention_peers: Peers = field(default_factory=RankGroup.alone)
    status: RankStatus | None = None
    timeout: float = 60.0
    memory: LastingMemory | None = None
    """For weights that outlive the rank; None: they end with it."""
    returns: bool = False
    """Whether the others serve already, and are not there while this rank starts."""
    on_device: Collective | None = None
    """As `attention`, for layers on a GPU; `attention` and `stage` exchange data of the host."""
    stage_on_device: Collective | None = None
    """As `stage`, for layers on a GPU that are split over several attention groups."""

    @property
    def is_first(self) -> bool:
        return self.place.stage == 0

    @property
    def is_last(self) -> bool:
        return self.place.stage == self.mesh.pp - 1

    def computing_on(self, device: torch.device, shares_gpu: bool) -> RankContext:
        """Adds the collectives of layers on a GPU, or where a GPU's code runs."""
        if device.type == "cuda" and self.place.rank == 0:
            facts = torch.cuda.get_device_properties(device)
            if warning := cramped(facts.multi_processor_count):
                logger.warning("%s", warning)
        if device.type == "cuda" and self.mesh.world > 1:  # else the process may be a user's own
            rank, mesh = self.place.rank, self.mesh
            node = mesh.node_of(rank) if mesh.nnodes > 1 else None
            set_up_nccl(rank, node, self.replica.host, shares_gpu)
        group = stage = None
        if self.mesh.attention_tp > 1:
            group = self._device_collective(self.attention_peers, device, shares_gpu)
        if self.mesh.dense_spans_groups:
            stage = self._device_collective(self.stage_peers, device, shares_gpu)
        return replace(self, on_device=group, stage_on_device=stage)

    def _device_collective(
        self, peers: Peers, device: torch.device, shares_gpu: bool
    ) -> Collective:
        if peers.nodes:
            return rail_collective(peers, DEVICE_BYTES, self.timeout, device)
        return device_collective(
            peers,
            DEVICE_BYTES,
            self.timeout,
            device,
            shares_gpu=shares_gpu or device.type == "cpu",
            neighbours=neighbours(self.mesh),
        )

    @property
    def device_collectives(self) -> tuple[Collective, ...]:
        """Those that `computing_on` has added."""
        return tuple(filter(None, (self.on_device, self.stage_on_device)))

    def parallel(self, num_layers: int, deterministic: bool) -> Parallel:
        layers = share(num_layers, self.place.stage, self.mesh.pp)
        if not layers:
            raise ValueError(
                f"--pp-size {self.mesh.pp} is more than the model's {num_layers} layers: give at "
                f"most {num_layers}"
            )
        group = self.on_device or self.attention
        return Parallel(
            attention=group,
            # On a GPU only dense layers are sharded over several attention groups.
            stage=group if self.mesh.dp == 1 else self.stage_on_device or self.stage,
            dp=self.mesh.dp,
            dense_tp=self.mesh.dense_tp,
            vocab_tp=self.mesh.vocab_tp,
            layers=layers,
            is_first=self.is_first,
            is_last=self.is_last,
            deterministic=deterministic,
        )

    def first_value(self, value: int, operation: str) -> int:
        """This value, or that of the first process of this rank, if the rank has returned; waits
        for all ranks of the replica."""
        values = self.replica.all_gather_bytes(json.dumps(value).encode(), operation)
        return int(json.loads(values[self.replica.rank]))

    def least(self, value: int, operation: str) -> int:
        """The smallest value of all ranks of the replica."""
        values = self.replica.all_gather_bytes(json.dumps(value).encode(), operation)
        return min(int(json.loads(text)) for text in values)
