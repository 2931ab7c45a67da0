"""Reports how evenly the ranks share the rows of recent forward passes.

n passes · L MoE layers of a rank · D ranks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from moesaic.balance.recording import balancedness, common_passes
from moesaic.comm.mesh import Mesh
from moesaic.engine.runner.expert_recorder import PassSums
from moesaic.observe.expert_load import PassBalance

logger = logging.getLogger(__name__)

# The time between two reports; passes in it that ranks had no room for are left out.
REPORT_SECONDS: Final = 5.0
LOGGED: Final = ("server_log", "both")
EXPORTED: Final = ("prometheus", "both")


class BalancednessReport:
    """Queries the ranks from a thread of its own. `mode`: --expert-balancedness-report-mode."""

    def __init__(self, ask: Callable[..., Any], mesh: Mesh, mode: str) -> None:
        self._ask, self._mesh, self._mode = ask, mesh, mode
        self._firsts = dict.fromkeys(range(mesh.world), 0)
        self._closed = threading.Event()
        self._latest: PassBalance | None = None
        if mode != "off":
            name = "moesaic-balancedness"
            threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def exported(self) -> PassBalance | None:
        """The last report for /metrics; None without the mode, or before any pass."""
        return self._latest if self._mode in EXPORTED else None

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(REPORT_SECONDS):
            try:
                self.report()
            except Exception as error:  # a rank is late, or the engine stops, which others tell
                logger.debug("no report of balancedness: %s", error)

    def report(self) -> None:
        """Reads the passes since the last report."""
        replies = self._ask("balancedness", {"firsts": self._firsts}).replies
        found = {
            rank: msgspec.convert(msgspec.to_builtins(reply.value), PassSums)
            for rank, reply in replies.items()
        }
        if len(found) < self._mesh.world:  # the late ranks have their passes the next time
            return
        self._firsts = {rank: sums.next for rank, sums in found.items()}
        balance = pass_balance(self._by_replica(found))
        if balance is None:
            return
        self._latest = balance
        if self._mode in LOGGED:
            logger.info("%s", balance)

    def _by_replica(self, found: Mapping[int, PassSums]) -> dict[int, list[PassSums]]:
        replicas: dict[int, list[PassSums]] = {}
        for rank, sums in sorted(found.items()):
            replicas.setdefault(self._mesh.place(rank).replica, []).append(sums)
        return replicas


def pass_balance(replicas: Mapping[int, Sequence[PassSums]]) -> PassBalance | None:
    """The balance of passes that all ranks of their replica have; None without any tokens."""
    layers: dict[int, list[npt.NDArray[np.floating]]] = {}
    num_passes = 0
    for replica, ranks in replicas.items():
        common = sorted(common_passes([(replica, sums.numbers) for sums in ranks]).numbers[replica])
        num_passes += len(common)
        for layer, loads_nD in _loads_of(ranks, common).items():
            layers.setdefault(layer, []).append(balancedness(loads_nD))
    joined = {layer: np.concatenate(found) for layer, found in sorted(layers.items())}
    means = {layer: float(found.mean()) for layer, found in joined.items() if len(found)}
    return PassBalance(num_passes, means) if means else None


def _loads_of(
    ranks: Sequence[PassSums], passes: Sequence[int]
) -> dict[int, npt.NDArray[np.integer]]:
    """By layer: the rows of each rank in each of the passes."""
    columns: dict[int, list[npt.NDArray[np.integer]]] = {}
    for sums in ranks:
        sums_nL = np.frombuffer(sums.sums, np.int64).reshape(len(sums.numbers), len(sums.layers))
        places = {number: place for place, number in enumerate(sums.numbers)}
        rows = [places[number] for number in passes]
        for index, layer in enumerate(sums.layers):
            columns.setdefault(layer, []).append(sums_nL[rows, index])
    return {layer: np.stack(found, 1) for layer, found in columns.items()}
