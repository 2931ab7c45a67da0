"""How a rank adopts another set of live ranks, after all of them have abandoned their step.

The ranks of a stage tell each other which experts they hold, one small all-gather. From the same
table each of them computes the same placement: slots of lost ranks are empty, and an expert that
nobody holds takes the place of a replica, whose rank reads it from the checkpoint. A rank that
joins holds what it has loaded, and gets to know the others' experts in the same exchange.

L layers · P slots · C slots of a rank · E experts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from moesaic.balance.survivors import adoptions
from moesaic.comm.supervise.control_page import RankStatus
from moesaic.config import ServerArgs
from moesaic.core.messages import MembersAdopted
from moesaic.core.rank_state import RankState
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.models.weights import fill_some_randomly, load_some_weights
from moesaic.moe.layer import FusedMoE
from moesaic.moe.placement import EMPTY, Placement


class RankMembers:
    """The live ranks of this rank's replica, as it knows them. `epoch`: which set of them."""

    def __init__(self, args: ServerArgs, runner: ModelRunner, status: RankStatus) -> None:
        self._args, self._runner, self._status = args, runner, status
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
        layout, tensors = layers[0].layout, list[Tensor]()
        for layer, held_P in zip(layers, held_LP, strict=True):
            layer.load.placement_version = max(versions)
            found = adoptions(held_P, layer.config.num_experts, layout.slots_per_rank)
            slots = list(held_P)
            for one in found:
                slots[one.slot] = one.expert
            if tuple(slots) != layer.placement.slots:
                layer.update_placement(Placement(layer.config.num_experts, tuple(slots)))
            own = [one.slot - layout.first_slot for one in found if layout.holds(one.slot)]
            done.experts += len(own)
            tensors += [tensor for slot in own for tensor in layer.store.tensors(slot)]
        done.nbytes = sum(tensor.nbytes for tensor in tensors)
        self._read(tensors)

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
                *(expert for layer in layers for expert in layer.local_experts),
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

    def _read(self, tensors: Sequence[Tensor]) -> None:
        """Fills parts of the model, whose placements name their experts already. Each is progress:
        the others wait for this rank, which would be taken for one that hangs."""
        model, args = self._runner.model, self._args
        if not tensors:
            return
        if args.load_format == "dummy":
            filled = fill_some_randomly(model, args.random_seed or 0, tensors)
        else:
            filled = load_some_weights(model, Path(args.model_path), self._runner.scheme, tensors)
        for _ in filled:
            self._status.enter(RankState.COMPUTING, "read experts")
