"""Token masks of the requests with a grammar, computed while the model runs.

M rows with a grammar · B bytes of a mask.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from moesaic.core.draft_tree import Parents, depths, preorder
from moesaic.core.sampling import Grammar
from moesaic.engine.sampling.sampler import SampleRow
from moesaic.engine.schedule.plan import StepPlan
from moesaic.engine.text.grammar import Compiler, shown

if TYPE_CHECKING:
    from llguidance import LLMatcher

logger = logging.getLogger(__name__)

# Compiled grammars that are cached.
MAX_COMPILED: Final = 16
# Seconds that steps may wait for a new grammar: most take less, and all tokens of a step come late.
PATIENCE: Final = 0.02


MaskKey = tuple[int, int]
"""The number of a plan's item, and of one of its sampled rows: 0, or that of the draft before."""


@dataclass(frozen=True, slots=True)
class GrammarMask:
    """The tokens that a row of a plan's item may sample."""

    bits: Tensor | None = None
    """One per token."""
    broken: str = ""
    """Why there are none."""
    ended: bool = False
    """The grammar is complete, and the model has no token to end the text with."""
    unready: bool = False
    """The grammar is still being compiled."""


@dataclass(frozen=True, slots=True)
class Compilation:
    """Steps wait for the matcher until `deadline`, and then go on without it."""

    matcher: Future[LLMatcher]
    deadline: float


class MaskedItem(NamedTuple):
    request_no: int
    row: SampleRow
    """How its first token is sampled."""
    drafts: Sequence[int]
    parents: Parents = ()


@dataclass(slots=True)
class RequestMatcher:
    matcher: LLMatcher
    grammar: Grammar
    consumed: list[int] = field(default_factory=list)
    num_drafts: int = 0
    """Drafts that the matcher has consumed beyond that."""

    def forget_drafts(self, kept: int = 0) -> bool:
        """Whether the matcher is as it was behind the first `kept` of them."""
        count, self.num_drafts = self.num_drafts - kept, kept
        return count == 0 or bool(self.matcher.rollback(count))

    def consume(self, draft: int) -> bool:
        self.num_drafts += 1
        return bool(self.matcher.consume_token(draft))


class DraftWalk:
    """Takes a matcher along the drafts of an item, branch by branch."""

    def __init__(self, item: MaskedItem, state: RequestMatcher, ends: Collection[int]) -> None:
        self.item, self.state, self._ends = item, state, ends
        self.number = 0
        """The row whose mask is next; 0: that before all drafts."""
        self.masks: dict[int, GrammarMask] = {}
        """Of the rows so far."""
        self._parents = item.parents or range(len(item.drafts))
        self._depths = depths(self._parents)
        self._rows = iter(preorder(self._parents, len(item.drafts)))

    def advance(self, mask: GrammarMask) -> bool:
        """Takes the mask of this row, and goes to the next one that the grammar allows, if any."""
        self.masks[self.number] = mask
        for row in self._rows:
            draft, parent = self.item.drafts[row - 1], self._parents[row - 1]
            before = self.masks.get(parent)
            if before is None or before.bits is None:
                continue
            if not int(before.bits[draft // 8]) >> draft % 8 & 1:
                continue
            if draft in self._ends:  # a matcher cannot go back behind its end
                self.masks[row] = GrammarMask(unready=True)
                continue
            if not self.state.forget_drafts(self._depths[parent]) or not self.state.consume(draft):
                # Nothing may be sampled behind this draft and the others: masks are missing.
                self.masks |= {other: GrammarMask(unready=True) for other in (row, *self._rows)}
                return False
            self.number = row
            return True
        return False


class Matchers:
    """Computes a step's masks from `begin` to `wait`, in one thread: matchers are not shared.

    Another thread compiles grammars. A request whose grammar takes longer than `patience` seconds
    gets no token, and asks for a mask again in its next step."""

    def __init__(
        self, make_compiler: Callable[[], Compiler], limit: int, patience: float = PATIENCE
    ) -> None:
        self._make_compiler, self._limit, self._patience = make_compiler, limit, patience
        self._compiled: OrderedDict[Grammar, Compilation] = OrderedDict()
        self._matchers: OrderedDict[int, RequestMatcher] = OrderedDict()
        self._unready: dict[int, Compilation] = {}
        """By request: others may displace its grammar from the cache before its next step."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="moesaic-grammar")
        self._compile_thread = ThreadPoolExecutor(1, thread_name_prefix="moesaic-compile")
        self._begun: Future[Compiler] | None = None
        self._masks: Future[dict[MaskKey, GrammarMask]] | None = None

    def begin_compiler(self) -> None:
        """Makes the compiler before the first request needs it."""
        self._begun = self._compile_thread.submit(lambda: self._compiler)

    def wait_for_compiler(self) -> None:
        """Waits for the one that was begun. If that fails, requests with a grammar try again."""
        if self._begun is not None and (error := self._begun.exception()) is not None:
            logger.error("grammars cannot be compiled: %s", error)

    @cached_property
    def _compiler(self) -> Compiler:
        return self._make_compiler()

    @cached_property
    def _masker(self) -> Any:
        from llguidance import LLExecutor

        return LLExecutor(torch.get_num_threads())

    def begin(self, plan: StepPlan) -> None:
        if self._masks is not None:  # a dropped step's may still be computed
            self._masks.exception()
            self._masks = None
        for key in plan.ended:
            self._forget(key)
        rows = {
            number: MaskedItem(item.request_no, item.sample, item.drafts, item.parents)
            for number, item in enumerate(plan.items)
            if item.sample is not None and item.sample.params.grammar is not None
        }
        if rows:
            self._masks = self._thread.submit(self._compute, rows)

    def pending(self) -> Callable[[], dict[MaskKey, GrammarMask]]:
        """A `wait` for the masks of this step, also after another one begins."""
        masks = self._masks
        return dict if masks is None else masks.result

    def wait(self) -> dict[MaskKey, GrammarMask]:
        """Of the items with a grammar: behind a draft that it forbids nothing is sampled, and there
        are no masks."""
        return {} if self._masks is None else self._masks.result()

    def _compute(self, rows: Mapping[int, MaskedItem]) -> dict[MaskKey, GrammarMask]:
        found: dict[MaskKey, GrammarMask] = {}
        ready: dict[int, RequestMatcher] = {}
        self._begin_compilations(rows)
        for number, (key, row, *_) in rows.items():
            try:
                state = self._advance(key, row)
                if state is None:
                    found[number, 0] = GrammarMask(unready=True)
                else:
                    ready[number] = state
            except Exception as error:
                self._forget(key)
                if not isinstance(error, ValueError):
                    logger.exception("the grammar of a request failed")
                found[number, 0] = GrammarMask(broken=f"its grammar failed: {error}")
        ends = self._compiler.eos_ids if ready else ()
        walks = {number: DraftWalk(rows[number], state, ends) for number, state in ready.items()}
        walking = [*walks.values()]
        while walking:
            masks_MB = self._fill_masks([walk.state for walk in walking])
            masked = zip(walking, masks_MB, strict=True)
            walking = [walk for walk, bits in masked if walk.advance(self._checked(walk, bits))]
        for number, walk in walks.items():
            found |= {(number, row): mask for row, mask in walk.masks.items()}
            if walk.masks[0].broken or not walk.state.forget_drafts():
                self._forget(walk.item.request_no)
        while len(self._matchers) > self._limit:
            self._matchers.popitem(last=False)
        return found

    def _begin_compilations(self, rows: Mapping[int, MaskedItem]) -> None:
        """Begins all new grammars of a step before it waits for one, so that it waits for all of
        them together no longer than for one."""
        for key, row, *_ in rows.values():
            grammar = row.params.grammar
            if key not in self._matchers and key not in self._unready and grammar is not None:
                self._unready[key] = self._compilation(grammar)

    def _forget(self, key: int) -> None:
        self._matchers.pop(key, None)
        self._unready.pop(key, None)

    def _advance(self, key: int, row: SampleRow) -> RequestMatcher | None:
        """The request's matcher after its output, whatever it has consumed before; None while its
        grammar is being compiled."""
        grammar = row.params.grammar
        assert grammar is not None
        state = self._matchers.get(key)
        if state is None:
            matcher = self._new_matcher(key, grammar)
            if matcher is None:
                return None
            state = self._matchers[key] = RequestMatcher(matcher, grammar)
        self._matchers.move_to_end(key)
        tokens = list(row.output_ids)
        if tokens[: len(state.consumed)] != state.consumed:
            state.matcher.reset()
            state.consumed = []
        if not state.matcher.consume_tokens(tokens[len(state.consumed) :]):
            raise ValueError(shown(state.matcher.get_error(), grammar))
        state.consumed = tokens
        return state

    def _new_matcher(self, key: int, grammar: Grammar) -> LLMatcher | None:
        compilation = self._unready[key]
        seconds = max(0.0, compilation.deadline - time.monotonic())
        if wait([compilation.matcher], seconds).not_done:
            return None
        self._unready.pop(key, None)
        try:
            return compilation.matcher.result().deep_copy()
        except Exception:
            self._compiled.pop(grammar, None)  # the next request tries again
            raise

    def _compilation(self, grammar: Grammar) -> Compilation:
        if grammar not in self._compiled:
            matcher = self._compile_thread.submit(lambda: self._compiler.matcher(grammar))
            deadline = time.monotonic() + self._patience
            self._compiled[grammar] = Compilation(matcher, deadline)
        self._compiled.move_to_end(grammar)
        while len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        return self._compiled[grammar]

    def _fill_masks(self, states: Sequence[RequestMatcher]) -> Tensor:
        if not states:
            return torch.empty(0, 0)
        size = self._compiler.mask_bytes
        masks_MB = torch.zeros(len(states), size, dtype=torch.uint8)
        work = [(one.matcher, number) for number, one in enumerate(states)]
        self._masker.unsafe_compute_mask_ptr(work, masks_MB.data_ptr(), size, len(states))
        return masks_MB

    def _checked(self, walk: DraftWalk, mask_B: Tensor) -> GrammarMask:
        state = walk.state
        if state.matcher.is_error():
            why = shown(state.matcher.get_error(), state.grammar)
            return GrammarMask(broken=f"its grammar failed: {why}")
        forbidden = self._forbid_early_end(state.matcher, mask_B)
        if (void := self._compiler.void) is not None:
            mask_B[void // 8] &= ~(1 << void % 8) & 0xFF
            if not mask_B.any():
                return GrammarMask(ended=True)
        if forbidden and not mask_B.any():
            return GrammarMask(broken="its grammar requires an end token before its end")
        return GrammarMask(mask_B)

    def _forbid_early_end(self, matcher: LLMatcher, mask_B: Tensor) -> bool:
        """Masks end tokens that do not complete the grammar; returns whether there were any."""
        found = False
        for token in self._compiler.eos_ids:
            bit = 1 << token % 8
            if not int(mask_B[token // 8]) & bit or matcher.is_accepting():
                continue
            then = matcher.deep_copy()
            if not (then.consume_token(token) and then.is_accepting()):
                mask_B[token // 8] &= ~bit & 0xFF
                found = True
        return found
