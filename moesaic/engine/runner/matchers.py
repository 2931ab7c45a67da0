"""Which tokens the grammars of a step's requests allow, found while the model computes.

M rows with a grammar · B bytes of a mask.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from moesaic.core.sampling import Grammar
from moesaic.engine.sampling.sampler import SampleRow
from moesaic.engine.schedule.plan import StepPlan
from moesaic.engine.text.grammar import Compiler, shown

if TYPE_CHECKING:
    from llguidance import LLMatcher

logger = logging.getLogger(__name__)

# Compiled grammars that are kept for the next request with the same one.
KEPT: Final = 16


@dataclass(frozen=True, slots=True)
class GrammarMask:
    """Of one item of a plan. `mask`: a bit a token; `broken`: why there is none. `ended`: nothing
    may follow, and the model has no token to say so."""

    bits: Tensor | None = None
    broken: str = ""
    ended: bool = False


@dataclass(slots=True)
class RequestMatcher:
    """A request's matcher, and the tokens that it has seen."""

    matcher: LLMatcher
    grammar: Grammar
    seen: list[int] = field(default_factory=list)


class Matchers:
    """`begin` when a step does, `wait` before its tokens are sampled. All of the work is done by
    one thread, in order, so that a step's masks never meet those of the step before."""

    def __init__(self, make_compiler: Callable[[], Compiler], limit: int) -> None:
        self._make_compiler, self._limit = make_compiler, limit
        self._compiler: Compiler | None = None
        self._masker: Any = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._live: OrderedDict[int, RequestMatcher] = OrderedDict()
        self._thread: ThreadPoolExecutor | None = None
        self._found: Future[dict[int, GrammarMask]] | None = None

    def __len__(self) -> int:
        return len(self._live)

    def begin(self, plan: StepPlan) -> None:
        if self._found is not None:  # of a step that failed or was taken, it may be at work still
            self._found.exception()
            self._found = None
        for key in plan.ended:
            self._live.pop(key, None)
        rows = {
            number: (item.request_no, item.sample)
            for number, item in enumerate(plan.items)
            if item.sample is not None and item.sample.params.grammar is not None
        }
        if rows:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="moesaic-grammar")
            self._found = self._thread.submit(self._find, rows)

    def pending(self) -> Callable[[], dict[int, GrammarMask]]:
        """What `wait` would do, but also once another step has begun."""
        found = self._found
        return dict if found is None else found.result

    def wait(self) -> dict[int, GrammarMask]:
        """By item of the plan; those without a grammar are not there."""
        return {} if self._found is None else self._found.result()

    def _find(self, rows: Mapping[int, tuple[int, SampleRow]]) -> dict[int, GrammarMask]:
        found: dict[int, GrammarMask] = {}
        ready: dict[int, RequestMatcher] = {}
        for number, (key, row) in rows.items():
            try:
                ready[number] = self._follow(key, row)
            except Exception as error:
                self._live.pop(key, None)
                if not isinstance(error, ValueError):
                    logger.exception("the grammar of a request failed")
                found[number] = GrammarMask(broken=f"its grammar failed: {error}")
        masks_MB = self._masks(list(ready.values()))
        for (number, live), mask_B in zip(ready.items(), masks_MB, strict=True):
            found[number] = self._allowed(live, mask_B)
            if found[number].broken:
                self._live.pop(rows[number][0], None)
        while len(self._live) > self._limit:
            self._live.popitem(last=False)
        return found

    def _follow(self, key: int, row: SampleRow) -> RequestMatcher:
        """The request's matcher after its tokens so far, whatever it had seen before."""
        grammar = row.params.grammar
        assert grammar is not None
        live = self._live.get(key)
        if live is None or live.grammar != grammar:
            live = self._live[key] = RequestMatcher(self._fresh(grammar), grammar)
        self._live.move_to_end(key)
        tokens = list(row.output_ids)
        if tokens[: len(live.seen)] != live.seen:
            live.matcher.reset()
            live.seen = []
        if not live.matcher.consume_tokens(tokens[len(live.seen) :]):
            raise ValueError(shown(live.matcher.get_error(), grammar))
        live.seen = tokens
        return live

    def _fresh(self, grammar: Grammar) -> LLMatcher:
        if self._compiler is None:
            self._compiler = self._make_compiler()
        if grammar not in self._compiled:
            self._compiled[grammar] = self._compiler.matcher(grammar)
        self._compiled.move_to_end(grammar)
        while len(self._compiled) > KEPT:
            self._compiled.popitem(last=False)
        return self._compiled[grammar].deep_copy()

    def _masks(self, live: Sequence[RequestMatcher]) -> Tensor:
        if not live:
            return torch.empty(0, 0)
        assert self._compiler is not None
        if self._masker is None:
            from llguidance import LLExecutor

            self._masker = LLExecutor(torch.get_num_threads())
        size = self._compiler.mask_bytes
        masks_MB = torch.zeros(len(live), size, dtype=torch.uint8)
        work = [(one.matcher, number) for number, one in enumerate(live)]
        self._masker.unsafe_compute_mask_ptr(work, masks_MB.data_ptr(), size, len(live))
        return masks_MB

    def _allowed(self, live: RequestMatcher, mask_B: Tensor) -> GrammarMask:
        assert self._compiler is not None
        if live.matcher.is_error():
            why = shown(live.matcher.get_error(), live.grammar)
            return GrammarMask(broken=f"its grammar failed: {why}")
        forbidden = self._forbid_early_end(live.matcher, mask_B)
        if (void := self._compiler.void) is not None:
            mask_B[void // 8] &= ~(1 << void % 8) & 0xFF
            if not mask_B.any():
                return GrammarMask(ended=True)
        if forbidden and not mask_B.any():
            return GrammarMask(broken="its grammar wants a token within it that ends answers")
        return GrammarMask(mask_B)

    def _forbid_early_end(self, matcher: LLMatcher, mask_B: Tensor) -> bool:
        """A grammar may name a token that ends answers; only where that completes it. Whether there
        was one."""
        assert self._compiler is not None
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
