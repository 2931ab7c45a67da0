"""How many prompt tokens a step takes beside the requests that decode.

A step costs time for each decoding request and for each prompt token, and every request that
decodes waits for all of it. The cost of a step is fitted to the steps that ran, and prompts fill a
step up to a bound on its time: `--max-step-ms`, or a multiple of what its decodes take alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

# Without --max-step-ms a step may take the largest of three times: AUTO_MS; its decodes alone times
# LONG_TIMES, or SHORT_TIMES for short prompts, which then have their first token; and the step
# without prompt tokens times BASE_TIMES, so that these get a third of it.
LONG_TIMES: Final = 2.0
SHORT_TIMES: Final = 3.0
BASE_TIMES: Final = 1.5
AUTO_MS: Final = 30.0
# Where more prompts wait than requests decode, long steps hold up few: the bound for short prompts
# rises with the prompts for each that decodes, up to this many.
MOST_CROWD: Final = 2.0
# A prompt is short if it takes up to this many steps by the bound for short ones.
SHORT_STEPS: Final = 2
# Tokens of short prompts beside a long one, whatever the bound: else they would wait for its end.
SHORT_ROOM: Final = 256
# The part of a chunk that they have at most where no bound leaves less.
SHORT_SHARE: Final = 0.25
# Chunks that do not end a prompt are multiples of this, so that they end at full pages.
CHUNK_MULTIPLE: Final = 64
# From this many waves of computed tokens on, a chunk that takes more than a wave takes whole ones.
FAR_WAVES: Final = 4

PRIOR_WEIGHT: Final = 0.02
FORGETTING: Final = 0.98
# Samples between two solutions of a fit, so that a step that is larger than usual is tried more
# than once before its time counts; the first samples are solved one by one.
SOLVE_EVERY: Final = 8
# Steps whose products are bound by computing, not by reading weights, on most devices; and how fast
# it is forgotten what their tokens cost.
LARGE_TOKENS: Final = 2048
LARGE_DECAY: Final = 0.002


class StepWork(msgspec.Struct, array_like=True, frozen=True):
    """What a serving group computes in a step."""

    decode_tokens: int = 0
    prompt_tokens: int = 0
    held: int = 0
    """Tokens that the decode tokens attend to."""
    pairs: int = 0
    """Pairs of a prompt token and a token that it attends to."""
    reach: int = 0
    """The most tokens that a prompt token attends to: a short chunk of a long prompt takes as long
    as one program needs for all of them."""

    def with_decode(self, held: int) -> StepWork:
        """Adds a decode token of a request that holds so many tokens."""
        held += self.held
        return msgspec.structs.replace(self, decode_tokens=self.decode_tokens + 1, held=held)

    def with_prompt(self, first: int, length: int) -> StepWork:
        """Adds a chunk of a prompt whose first `first` tokens are computed."""
        return StepWork(
            self.decode_tokens,
            self.prompt_tokens + length,
            self.held,
            self.pairs + length * first + length * (length + 1) // 2,
            max(self.reach, first + length),
        )


def heaviest(works: Iterable[StepWork]) -> StepWork:
    """A step takes as long as the group with the most work."""
    columns = zip(*map(msgspec.structs.astuple, works), strict=True)
    return StepWork(*map(max, columns))


class LinearFit:
    """Least squares over samples, of which newer ones weigh more, with coefficients of at least 0.
    `units`: sizes of the features, so that all weigh alike. `default`: the coefficients of these
    units before there are samples."""

    def __init__(self, units: Sequence[float], default: Sequence[float]) -> None:
        self._units = np.array(units)
        self._prior = PRIOR_WEIGHT * np.eye(len(units))
        self._matrix, self._vector = self._prior, self._prior @ default
        self._prior_vector = self._vector
        self.coefficients: NDArray[np.float64] = np.array(default) / self._units
        self._num_samples, self.is_solved = 0, False

    def observe(self, features: Sequence[float], value: float) -> None:
        x, new = features / self._units, 1 - FORGETTING
        self._matrix = FORGETTING * self._matrix + x[:, None] * x + new * self._prior
        self._vector = FORGETTING * self._vector + value * x + new * self._prior_vector
        self._num_samples += 1
        self.is_solved = self._num_samples < SOLVE_EVERY or self._num_samples % SOLVE_EVERY == 0
        if self.is_solved:
            self.coefficients = _least_squares(self._matrix, self._vector) / self._units

    def predict(self, features: Sequence[float]) -> float:
        return float(self.coefficients @ features)


def _least_squares(matrix: NDArray[np.float64], vector: NDArray[np.float64]) -> NDArray[np.float64]:
    """Leaves out coefficients that would be negative."""
    solution = np.linalg.solve(matrix, vector).astype(np.float64)
    if solution.min() >= 0:
        return solution
    active = np.flatnonzero(solution >= 0)
    solution = np.zeros(len(vector))
    if len(active):
        solution[active] = _least_squares(matrix[np.ix_(active, active)], vector[active])
    return solution


class StepCost:
    """The milliseconds of a step as a linear function of its work: one for steps without prompts,
    and one for those with some, which read all experts however few tokens they have. A step with
    prompts that takes less than its decodes alone should corrects these. Before the first steps,
    prompts are said to cost more than on most devices."""

    def __init__(self) -> None:
        self._decodes = LinearFit((1.0, 64.0, 65536.0), (8.0, 2.0, 3.0))
        self._mixed = LinearFit((1.0, 1024.0, 65536.0, 1e6, 16384.0), (20.0, 50.0, 5.0, 4.0, 5.0))
        self._large_ms = 0.0
        """Milliseconds a token of large steps; 0 before there was one."""
        self._mean_tokens = self._usual_tokens = 0.0
        """Prompt tokens of a step that has some: now, and when the coefficients were solved. With
        newer ones `without_tokens` would make a change of traffic part of every step."""
        self.deviation = 0.0
        """The usual distance between a prediction and a step, in milliseconds."""

    def observe(self, work: StepWork, ms: float) -> None:
        """One step changes little, however long it took: it may have waited for something else. But
        none takes less than it must."""
        expected = self.predict(work)
        limit = max(expected / 2, 4 * self.deviation)
        error = min(ms - expected, limit)
        self.deviation += 0.1 * (abs(error) - self.deviation)
        ms = expected + error
        if work.prompt_tokens:
            self._mixed.observe(_mixed(work), ms)
            self._observe_large(work.decode_tokens + work.prompt_tokens, ms)
            self._mean_tokens += 0.1 * (work.prompt_tokens - self._mean_tokens)
            if self._mixed.is_solved:
                self._usual_tokens = self._mean_tokens
        if not work.prompt_tokens or ms < self.decodes(work):
            self._decodes.observe(_decodes(work), ms)

    def _observe_large(self, tokens: int, ms: float) -> None:
        """Other steps draw the figure to the fit, so that it is tried again whether more fit."""
        if tokens >= LARGE_TOKENS:
            self._large_ms += (0.5 if self._large_ms else 1.0) * (ms / tokens - self._large_ms)
        elif self._large_ms:
            self._large_ms -= LARGE_DECAY * (self._large_ms - self.prompt_ms.token)

    def predict(self, work: StepWork) -> float:
        return self._mixed.predict(_mixed(work)) if work.prompt_tokens else self.decodes(work)

    def decodes(self, work: StepWork) -> float:
        """The milliseconds of the step without its prompts."""
        return self._decodes.predict(_decodes(work))

    def without_tokens(self, decodes: StepWork) -> float:
        """The milliseconds of a step with these decodes and prompts, but for the tokens of the
        prompts."""
        too_much = float(self._mixed.coefficients[1]) - self.prompt_ms.token
        fitted = self._mixed.predict((1, decodes.decode_tokens, decodes.held, 0, 0))
        return fitted + too_much * self._usual_tokens

    @property
    def prompt_ms(self) -> PromptMs:
        """Where all steps have about as many prompt tokens, the fit may give these what others
        cost; but one costs no more than its part of a large step."""
        _, token_ms, _, pair_ms, reach_ms = map(float, self._mixed.coefficients)
        return PromptMs(min(token_ms, self._large_ms or math.inf), pair_ms, reach_ms)

    def most_tokens(self, ms: float) -> float:
        """The most tokens that a step of `ms` milliseconds can have, at the rate of large steps.
        The fit does not tell: reading weights bounds small steps, so that tokens seem free."""
        return ms / self._large_ms if self._large_ms else 2 * LARGE_TOKENS


class PromptMs(NamedTuple):
    """Milliseconds of a prompt token, of a pair, and of a token of `StepWork.reach`."""

    token: float
    pair: float
    reach: float


def _decodes(work: StepWork) -> tuple[float, ...]:
    return 1, work.decode_tokens, work.held


def _mixed(work: StepWork) -> tuple[float, ...]:
    """All tokens take the same products, whatever they belong to."""
    return 1, work.decode_tokens + work.prompt_tokens, work.held, work.pairs, work.reach


@dataclass(slots=True)
class PromptBudget:
    """The prompt tokens of a step: up to `short_tokens` of short prompts, up to `long_tokens` if
    others are among them."""

    long_tokens: int
    short_tokens: int
    multiple: int = 1
    """Chunks that do not end their prompts are multiples of this."""
    most_short: int = 0
    """The most tokens of a short prompt."""
    pair_share: float = 0.0
    """What attending to a token costs, as a share of what a prompt token does."""
    used: float = 0.0

    @property
    def is_spent(self) -> bool:
        return self.used >= max(self.long_tokens, self.short_tokens)

    def length(self, remaining: int, computed: int = 0, *, begun: bool) -> int:
        """How many of the remaining tokens of a prompt fit. `begun`: in an earlier step."""
        is_short = computed + remaining <= self.most_short
        is_short = is_short or (not begun and SHORT_STEPS * remaining <= self.most_short)
        most = self.short_tokens if is_short else self.long_tokens
        fitting = max(0, int((most - self.used) / self._weight(computed, begun=begun)))
        return remaining if remaining <= fitting else fitting - fitting % self.multiple

    def spend(self, length: int, computed: int, *, begun: bool) -> None:
        self.used += length * self._weight(computed, begun=begun)

    def _weight(self, computed: int, *, begun: bool) -> float:
        """The attention of prompts that have begun is known when the budget is made. That of a new
        one to what it finds in the cache is not: looking that up for all that wait would take too
        long."""
        return 1.0 if begun else 1.0 + self.pair_share * computed


@dataclass(slots=True)
class StepBudget:
    """`max_ms`: the bound of a step in which requests decode; None: multiples of what its decodes
    take, 0: none."""

    max_ms: float | None = 0.0
    cost: StepCost = field(default_factory=StepCost)
    wave: int = CHUNK_MULTIPLE
    """Prompt tokens for which the device computes attention at once. One more takes another such
    time."""
    others: StepWork = field(default_factory=StepWork)
    """The work of the other groups in the last step: their requests wait for this group's."""

    def prompt_tokens(
        self, most: int, decodes: StepWork, prompts: Iterable[tuple[int, int]], count: int
    ) -> PromptBudget:
        """The prompt tokens of a step beside `decodes`: up to `most`, and a chunk at least.
        `prompts`: the computed and the remaining tokens of each of `count` prompts, in order."""
        base = heaviest([decodes, self.others])
        if self.max_ms == 0 or not base.decode_tokens:
            return _whole(most, prompts, count)
        base_ms = self.cost.without_tokens(base)
        long_ms = short_ms = self.max_ms
        if long_ms is None or short_ms is None:
            # The fits may have been made with fewer decodes: the lower one is nearer.
            decode_ms = min(base_ms, self.cost.decodes(base))
            long_ms = max(AUTO_MS, LONG_TIMES * decode_ms, BASE_TIMES * base_ms)
            crowd = min(MOST_CROWD, count / base.decode_tokens)
            crowded_ms = (SHORT_TIMES + crowd) * decode_ms, (BASE_TIMES + 2 * crowd) * base_ms
            short_ms = max(AUTO_MS, *crowded_ms)
        most_long, most_short = (
            min(most, _chunks(self.cost.most_tokens(ms) - base.decode_tokens))
            for ms in (long_ms, short_ms)
        )
        rest = iter(prompts)
        first = next(rest, (0, 0))
        long = self._tokens_within(long_ms - base_ms, most_long, chain([first], rest))
        short = long + int((short_ms - long_ms) / max(self.cost.prompt_ms.token, 1e-6))
        multiple = min(CHUNK_MULTIPLE, most)
        short = max(long, min(most_short, short))
        share = self.cost.prompt_ms.pair / max(self.cost.prompt_ms.token, 1e-6)
        found = PromptBudget(long, short, multiple, SHORT_STEPS * short, share)
        if sum(first) <= found.most_short:
            return found
        return self._beside(found, first, most, count)

    def _beside(
        self, found: PromptBudget, first: tuple[int, int], most: int, count: int
    ) -> PromptBudget:
        """The budget of a step that begins with a long prompt, which leaves room for others."""
        computed, length = first[0], sum(first)
        room = 0 if count == 1 else min(SHORT_ROOM, most // 2)
        long = min(most - room, max(found.long_tokens, self._least(computed)))
        if long > self.wave and computed >= FAR_WAVES * self.wave:
            long -= long % self.wave
        long = max(found.multiple, long - long % found.multiple)
        short = min(most, max(found.short_tokens, long + room))
        most_short = min(SHORT_STEPS * short, length - 1)
        return replace(found, long_tokens=long, short_tokens=short, most_short=most_short)

    def _least(self, computed: int) -> int:
        """The tokens of a chunk whose products take as long as it takes to attend to the computed
        ones: fewer would take hardly less time. No more than a wave."""
        cost = self.cost.prompt_ms
        attend_ms = (cost.reach + cost.pair * self.wave) * computed
        return min(self.wave, _chunks(attend_ms / max(cost.token, 1e-6)))

    def _tokens_within(self, left: float, most: int, prompts: Iterable[tuple[int, int]]) -> int:
        """The tokens of prompts that take `left` milliseconds."""
        cost, total, reach = self.cost.prompt_ms, 0, 0
        for first, length in prompts:
            beyond = cost.reach * max(0, first - reach)
            token_ms = cost.token + cost.pair * first + cost.reach
            fitting = _fitting(left - beyond, token_ms, cost.pair)
            if fitting < length:
                total = _chunks(total + fitting)
                break
            left -= beyond + length * token_ms + cost.pair * length * length / 2
            total, reach = total + length, max(reach, first + length)
            if total >= most:
                break
        else:
            return most
        return min(most, total)


def _whole(most: int, prompts: Iterable[tuple[int, int]], count: int) -> PromptBudget:
    """The budget of a step without a bound. If a prompt goes on after it, the short ones that come
    next have a part of it, and do not wait for the end of that prompt."""
    ordered = islice(prompts, count)
    _, remaining = next(ordered, (0, 0))
    limit, room = int(SHORT_SHARE * most), 0
    for length in map(sum, ordered if remaining > most else ()):
        if length > limit or room >= limit:
            break
        room += length
    if room == 0:
        return PromptBudget(most, most)
    multiple, long = min(CHUNK_MULTIPLE, most), most - min(room, limit)
    return PromptBudget(max(multiple, long - long % multiple), most, multiple, limit)


def _chunks(tokens: float) -> int:
    """As many tokens in chunks, and one chunk at least."""
    return max(1, int(tokens) // CHUNK_MULTIPLE) * CHUNK_MULTIPLE


def _fitting(ms: float, token_ms: float, pair_ms: float) -> int:
    """The largest x with x * token_ms + x * x / 2 * pair_ms <= ms."""
    if ms <= 0:
        return 0
    root = math.sqrt(token_ms * token_ms + 2 * pair_ms * ms)
    return int(2 * ms / max(token_ms + root, 1e-9))
