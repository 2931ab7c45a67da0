"""Drafts of a draft model that are trees: each pass continues the most likely branches.

Behind the last token of a sequence come its K most likely successors, and behind each of them K
more; of these K * K the K most likely branches go on. Of all that were found the most likely ones
become the draft. Branches are stored in the draft model's cache behind the rows of the step; what a
row sees is in its mask (core/draft_tree.py).

D sequences that get drafts · K branches of each · N nodes that were found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moesaic.core.draft_tree import row_masks
from moesaic.engine.schedule.plan import Ints, StepPlan
from moesaic.layers.paged_cache import Sequences

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Frontier:
    """The rows that the draft model has computed last. `slots`: where in their sequence they are
    stored. `until`: the last position; what is behind it has that one, too, and is never verified.
    """

    slots_DK: Ints
    masks_DK: Ints
    position_D: Ints
    until_D: Ints
    first_D: Ints
    """The first entries of the sequences in the page table."""

    @classmethod
    def of(cls, plan: StepPlan, last_D: Ints, max_pages: int) -> Frontier:
        """The last rows of a step that are accepted."""
        drafting = [n for n, item in enumerate(plan.items) if item.draft_until]
        starts_D = (np.cumsum(plan.lengths) - plan.lengths)[drafting]
        slots_D = plan.first[drafting] + last_D - starts_D
        masks_D = np.full(len(drafting), -1, np.int64)
        for n, number in enumerate(drafting):
            item, row = plan.items[number], int(last_D[n] - starts_D[n])
            window = len(item.token_ids) - item.num_sampled
            if item.parents:
                masks_D[n] = row_masks(item.parents)[row - window]
        until_D = np.array([plan.items[n].draft_until for n in drafting], np.int64)
        position_D, first_D = plan.positions[last_D], plan.rows[drafting] * max_pages
        return cls(slots_D[:, None], masks_D[:, None], position_D, until_D, first_D)

    def behind(self, from_DK: Ints) -> Frontier:
        """A row behind each of these of the last ones."""
        last_DK = np.take_along_axis(self.slots_DK, from_DK, 1)
        slots_DK = self.slots_DK[:, -1:] + 1 + np.arange(from_DK.shape[1])
        masks_DK = np.take_along_axis(self.masks_DK, from_DK, 1) << (slots_DK - last_DK) | 1
        position_D = np.minimum(self.position_D + 1, self.until_D)
        return Frontier(slots_DK, masks_DK, position_D, self.until_D, self.first_D)

    @property
    def positions(self) -> Ints:
        """Of all rows."""
        return np.repeat(self.position_D, self.slots_DK.shape[1])

    @property
    def sequences(self) -> Sequences:
        """Each row is one, up to its own token."""
        count = self.slots_DK.size
        starts, ones = np.arange(count, dtype=np.int32), np.ones(count, np.int32)
        kv_lens = (self.slots_DK.ravel() + 1).astype(np.int32)
        first = np.repeat(self.first_D, self.slots_DK.shape[1]).astype(np.int32)
        return Sequences(starts, ones, kv_lens, first, masks_T=self.masks_DK.ravel())


class Branches:
    """What is known of the trees on the rank that samples. Each node is behind an earlier one, and
    not more likely than that."""

    def __init__(self, count: int, topk: int) -> None:
        """Of `count` sequences."""
        self.topk = topk
        self._tokens_DN = np.zeros((count, 0), np.int64)
        self._parents_DN = np.zeros((count, 0), np.int64)
        self._likely_DN = np.zeros((count, 0))
        self._last_DK = np.full((count, 1), -1)
        """The nodes that are continued; -1: the last token before the tree."""

    def grow(self, ids_RK: Ints, likely_RK: Floats) -> tuple[Ints, Ints]:
        """`ids_RK`: the most likely tokens behind each node that is continued, and the logarithms
        of their probabilities. Returns the tokens of those that go on, and which node each is
        behind."""
        count, before = self._last_DK.shape
        ids_DC, likely_DBK = ids_RK.reshape(count, -1), likely_RK.reshape(count, before, -1)
        if self._tokens_DN.shape[1]:
            known_DB = np.take_along_axis(self._likely_DN, self._last_DK, 1)
            likely_DBK = likely_DBK + known_DB[:, :, None]
        likely_DC = likely_DBK.reshape(count, -1)
        from_C = np.repeat(np.arange(before), likely_DBK.shape[2])
        start = self._tokens_DN.shape[1]
        self._tokens_DN = np.concatenate((self._tokens_DN, ids_DC), 1)
        parents_DC = self._last_DK[:, from_C]
        self._parents_DN = np.concatenate((self._parents_DN, parents_DC), 1)
        self._likely_DN = np.concatenate((self._likely_DN, likely_DC), 1)
        best_DK = np.argsort(-likely_DC, axis=1, kind="stable")[:, : self.topk]
        self._last_DK = start + best_DK
        return np.take_along_axis(ids_DC, best_DK, 1), from_C[best_DK]

    def best(self, most: int) -> list[tuple[list[int], list[int]]]:
        """The tokens and the parents of the most likely nodes of each sequence, likeliest first: of
        equal ones that which was found first, so that none is before its parent."""
        found: list[tuple[list[int], list[int]]] = []
        order_DN = np.argsort(-self._likely_DN, axis=1, kind="stable")[:, :most]
        for order, tokens, parents in zip(
            order_DN.tolist(), self._tokens_DN, self._parents_DN, strict=True
        ):
            rows: dict[int, Any] = {-1: 0} | {node: row for row, node in enumerate(order, 1)}
            found.append((tokens[order].tolist(), [rows[p] for p in parents[order].tolist()]))
        return found
