"""The drafters by algorithm. A module that core/speculation.py names registers one of two kinds:

- a `Drafter`, which the host of a serving group's planner asks after each step;
- a `DraftSource`, from which each rank builds its part of a model that makes drafts at the end of
  each step (draft_phase.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from moesaic.config import ServerArgs
from moesaic.config.speculation import speculation_of
from moesaic.core.draft_shape import DraftShape
from moesaic.core.request import Request
from moesaic.core.speculation import Speculation

if TYPE_CHECKING:
    from torch import Tensor

    from moesaic.comm.mesh import Mesh
    from moesaic.core.step import Step
    from moesaic.engine.runner.model_runner import ModelRunner
    from moesaic.engine.setup.memory_plan import ResolvedModel
    from moesaic.layers.context import AttentionStep, CacheSpec
    from moesaic.layers.rotary import RotaryTable
    from moesaic.models.blocks import CausalLM
    from moesaic.moe.layer import FusedMoE


class Drafter(Protocol):
    """Proposes tokens. Steps verify the proposals, so that they change no answer."""

    def propose(self, requests: Sequence[Request], shape: DraftShape) -> None:
        """Sets `drafts` of requests that decode, and `draft_parents` of those that are trees, to
        follow the tokens that the host knows; what is more than the shape has is cut. Of requests
        with tokens in flight it only counts whether there are any: then the next step waits."""


MakeDrafter = Callable[[ServerArgs, Speculation, "ModelRunner"], Drafter]
DRAFTERS: dict[str, MakeDrafter] = {}
Made = TypeVar("Made")


def register_drafter(algorithm: str, make: MakeDrafter) -> None:
    """`make` gets the flags and the runner of the rank that plans."""
    _register(DRAFTERS, algorithm, make)


def make_drafter(args: ServerArgs, runner: ModelRunner) -> Drafter | None:
    """The drafter of a planner; None if there are no drafts, or the ranks make them."""
    speculation = speculation_of(args)
    if speculation is None or speculation.makes.on_ranks:
        return None
    return _registered(DRAFTERS, speculation)(args, speculation, runner)


class DraftRows(NamedTuple):
    """The token behind each row, and the position of the row."""

    next_ids_T: Tensor
    positions_T: Tensor


class DraftModel(Protocol):
    """A model's part on this rank, built and loaded beside the target's."""

    @property
    def cache(self) -> CacheSpec: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def experts(self) -> Sequence[FusedMoE]: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def own_rope(self) -> RotaryTable | None:
        """None if it has the target's."""

    @property
    def reads_target(self) -> bool:
        """Whether a row takes the target's hidden state and the token behind it; if not, its own
        token alone, and a chain begins with the token that the target has sampled."""

    def of_target(self, rows_TW: Tensor) -> Tensor:
        """What `forward` takes, of the target's output."""

    def forward(
        self, rows: DraftRows, hidden_TH: Tensor, attention: AttentionStep, step: Step
    ) -> Tensor:
        """The hidden states behind the rows. `hidden_TH`: of `of_target`, or those that the last
        forward pass of the chain gave."""

    def logits(self, hidden_RH: Tensor, counts: Sequence[int]) -> Tensor:
        """As CausalLM.logits, of the tokens that the model may propose."""

    def to_target(self, ids_R: Tensor) -> Tensor:
        """The target's tokens for those of the logits."""


@runtime_checkable
class TargetReader(Protocol):
    """A draft model with `reads_target`: steps without drafts put their rows into its cache, as the
    target's hidden states are gone later. What a model of tokens lacks it computes later."""

    def store(self, rows: DraftRows, hidden_TH: Tensor, attention: AttentionStep) -> None:
        """What `forward` puts into the cache, without its output: ranks of an attention group call
        this together, others need not."""


class DraftSource(Protocol):
    """A draft model of which nothing is built yet."""

    def build(self, main: CausalLM) -> DraftModel:
        """This rank's part without weights, beside its part of the target; only a
        shape if `main` is one."""

    def load(self, draft: Any, args: ServerArgs) -> None:
        """Fills its weights."""

    def with_redundant(self, number: int) -> DraftSource:
        """The same with at most as many redundant experts in a layer."""


MakeSource = Callable[[ServerArgs, "ResolvedModel", "Mesh"], DraftSource]
SOURCES: dict[str, MakeSource] = {}


def register_draft_model(algorithm: str, make: MakeSource) -> None:
    _register(SOURCES, algorithm, make)


def draft_source(args: ServerArgs, resolved: ResolvedModel, mesh: Mesh) -> DraftSource | None:
    """None unless the ranks make drafts."""
    speculation = speculation_of(args)
    if speculation is None or not speculation.makes.on_ranks:
        return None
    return _registered(SOURCES, speculation)(args, resolved, mesh)


def _register(known: dict[str, Made], algorithm: str, make: Made) -> None:
    if algorithm in known:
        raise ValueError(f"a drafter for {algorithm} is registered already")
    known[algorithm] = make


def _registered(known: dict[str, Made], speculation: Speculation) -> Made:
    import_module(speculation.makes.module)
    return known[speculation.algorithm]
