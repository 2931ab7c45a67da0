"""How a rank adopts another set of live ranks, after all of them have abandoned their step.

The ranks of a stage tell each other which experts they hold, one small all-gather. From the same
table each of them computes the same placement: slots of lost ranks are empty, and an expert that
nobody holds takes the place of a replica, whose rank copies it from memory that outlived a lost
rank, or reads it from the checkpoint. A rank that joins holds what it has loaded or found, and gets
to know the others' experts in the same exchange.

L layers · P slots · C slots of a rank · E experts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from moesaic.balance.survivors import adoptions
from moesaic.comm.supervise.control_page import RankStatus
from moesaic.core.messages import MembersAdopted
from moesaic.core.rank_state import RankState
from moesaic.engine.elastic.rank_weights import SlotOf
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.moe.layer import FusedMoE
from moesaic.moe.placement import EMPTY, Placement


class RankMembers:
    """The live ranks of this rank's replica, as it knows them. `epoch`: which set of them."""

    def __init__(self, runner: ModelRunner, status: RankStatus) -> None:
        self._runner, self._status = runner, status
        self.epoch = 1

    def adopt(self, epoch: int, active: Sequence[int]) -> MembersAdopted:
        """Returns what this rank did. The collectives have been restarted with these ranks."""
        began, rank = time.monotonic(), self._runner.ranks.place.rank
        self.epoch = epoch
        done = MembersAdopted(rank, epoch)
        if self._runner.moe_layers and self._runner.ranks.mesh.tp > 1:
            self._adopt_experts(active, done)
        done.seconds = time.monotonic() - began
        return done

    def _adopt_experts(self, active: Sequence[int], done: MembersAdopted) -> None:
        layers = self._runner.moe_layers
        held_LP, versions = self._exchange(layers, active)
        layout, wanted = layers[0].layout, list[SlotOf]()
        for number, (layer, held_P) in enumerate(zip(layers, held_LP, strict=True)):
            layer.load.placement_version = max(versions)
            found = adoptions(held_P, layer.config.num_experts, layout.slots_per_rank)
            slots = list(held_P)
            for one in found:
                slots[one.slot] = one.expert
            own = [
                SlotOf(number, one.slot - layout.first_slot, one.expert)
                for one in found
                if layout.holds(one.slot)
            ]
            for slot in own:
                layer.store.forget(slot.slot)
            if tuple(slots) != layer.placement.slots:
                layer.update_placement(Placement(layer.config.num_experts, tuple(slots)))
            wanted += own
            done.experts += len(own)
            parts = (part for one in own for part in layer.store.tensors(one.slot))
            done.nbytes += sum(part.nbytes for part in parts)
        self._runner.weights.held = None  # the placements name them now
        done.from_memory = self._fill(wanted, active)

    def _exchange(
        self, layers: Sequence[FusedMoE], active: Sequence[int]
    ) -> tuple[list[list[int]], list[int]]:
        """The expert in each slot of each layer, and the versions of all ranks' placements."""
        ranks, rebalancer = self._runner.ranks, self._runner.rebalancer
        counters = (0, 0, 0) if rebalancer is None else rebalancer.counters
        own_N = torch.tensor(
            [
                *counters,
                max(layer.load.placement_version for layer in layers),
                *(expert for held in self._held(layers) for expert in held),
            ]
        )
        rows = ranks.stage.gather_rows(own_N[None], [1] * ranks.mesh.tp, "tell experts")
        live = set(active)
        lost = [n for n, rank in enumerate(ranks.mesh.stage_ranks(ranks.place)) if rank not in live]
        if rebalancer is not None:
            known = [row for n, row in enumerate(rows[:, :3].tolist()) if n not in lost]
            rebalancer.follow(known, bool(lost))
        return self._table(rows[:, 4:], lost, len(layers)), rows[:, 3].tolist()

    def _table(self, told_DN: Tensor, lost: Sequence[int], layers: int) -> list[list[int]]:
        told_DLC = told_DN.unflatten(1, (layers, -1)).clone()
        told_DLC[list(lost)] = EMPTY
        # With several ranks for an expert each loss waits for the rank to return.
        width = self._runner.moe_layers[0].layout.moe_tp_size
        held: list[list[int]] = told_DLC[::width].transpose(0, 1).flatten(1).tolist()
        return held

    def _held(self, layers: Sequence[FusedMoE]) -> list[tuple[int, ...]]:
        """The experts in this rank's slots: a rank that joins may have found others in memory than
        its first placement has."""
        return self._runner.weights.held or [layer.local_experts for layer in layers]

    def _fill(self, wanted: Sequence[SlotOf], active: Sequence[int]) -> int:
        """Fills slots, whose experts the placements name already; returns how many experts were in
        the memory of lost ranks. Each is progress: the others wait for this rank, which would be
        taken for one that hangs."""
        ranks, in_memory = self._runner.ranks, 0
        lost = [rank for rank in ranks.mesh.stage_ranks(ranks.place) if rank not in active]
        for was_there in self._runner.weights.adopt(wanted, lost):
            in_memory += was_there
            self._status.enter(RankState.COMPUTING, "read experts")
        return in_memory
