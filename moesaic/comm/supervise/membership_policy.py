"""Decides what the loss of ranks means for the service."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol


class EndableService(Protocol):
    def fail(self, message: str, ranks: Sequence[int]) -> None:
        """Ends the service on all nodes; `message` names the ranks at fault."""


class MembershipPolicy(ABC):
    @abstractmethod
    def on_ranks_lost(self, service: EndableService, ranks: Sequence[int], cause: str) -> None:
        """These ranks have died, hang or cannot be reached; `cause` names them and says how."""


class EndService(MembershipPolicy):
    """Any loss ends the service and every open request."""

    def on_ranks_lost(self, service: EndableService, ranks: Sequence[int], cause: str) -> None:
        service.fail(cause, ranks)
