"""The tokens that a draft model proposes, which may be fewer than those of the target.

R rows with logits · V tokens that have one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moesaic.layers.embedding import CutHead, LMHead


class DraftHead:
    """Logits of a draft model. `tokens`: the target's tokens that they are of, in order; None: of
    all. `cut`: `head` has rows for all of the target's tokens; else for `tokens` alone."""

    def __init__(
        self, head: LMHead, tokens: Sequence[int] | None = None, cut: bool = False
    ) -> None:
        self._head = CutHead(head, tokens or ()) if cut else head
        self._tokens_V = None if tokens is None else torch.tensor(tokens)

    def copy_rows(self) -> None:
        """Call this once the weights are loaded."""
        if isinstance(self._head, CutHead):
            self._head.copy_rows()

    @property
    def nbytes(self) -> int:
        """Beside the head that it was made of."""
        own: list[Tensor] = [self._head.weight] if isinstance(self._head, CutHead) else []
        own += [] if self._tokens_V is None else [self._tokens_V]
        return sum(tensor.nbytes for tensor in own)

    def __call__(self, hidden_RH: Tensor, counts: Sequence[int]) -> Tensor:
        found_RV: Tensor = self._head(hidden_RH, counts)
        return found_RV

    def to_target(self, ids_R: Tensor) -> Tensor:
        """The target's tokens for those of the logits."""
        return ids_R if self._tokens_V is None else self._tokens_V[ids_R]
