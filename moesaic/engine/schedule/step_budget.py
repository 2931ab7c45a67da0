"""How many prompt tokens a step takes beside the requests that decode.

A step costs time for each decoding request and for each prompt token, and every request that
decodes waits for all of it. The cost of a step is fitted to the steps that ran, and prompts fill a
step up to a bound on its time: `--max-step-ms`, or a multiple of what its decodes take alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

# The bound of a step whose time is not bounded by a flag: this many times what its decodes take, so
# that prompts get half of the time, and no less than these milliseconds.
AUTO_TIMES: Final = 2.0
AUTO_MS: Final = 30.0
# Chunks are multiples of this, so that steps have few different sizes, and end at full pages.
CHUNK_MULTIPLE: Final = 64

PRIOR_WEIGHT: Final = 0.02
FORGETTING: Final = 0.98
# Samples between two solutions of a fit, which cost more than a sample; the first ones are solved
# one by one.
SOLVE_EVERY: Final = 8
# Steps of prompts alone that tell what a prompt token costs without decodes.
ALONE_TOKENS: Final = 512


class StepWork(msgspec.Struct, array_like=True, frozen=True):
    """What a serving group computes in a step."""

    decode_tokens: int = 0
    prompt_tokens: int = 0
    held: int = 0
    """Tokens that the decode tokens attend to."""
    pairs: int = 0
    """Pairs of a prompt token and a token that it attends to."""

    def with_decode(self, held: int) -> StepWork:
        """Adds a decode token of a request that holds so many tokens."""
        return StepWork(self.decode_tokens + 1, self.prompt_tokens, self.held + held, self.pairs)

    def with_prompt(self, first: int, length: int) -> StepWork:
        """Adds a chunk of a prompt whose first `first` tokens are computed."""
        pairs = self.pairs + length * first + length * (length + 1) // 2
        return StepWork(self.decode_tokens, self.prompt_tokens + length, self.held, pairs)


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
        self._num_samples = 0

    def observe(self, features: Sequence[float], value: float) -> None:
        x, new = features / self._units, 1 - FORGETTING
        self._matrix = FORGETTING * self._matrix + x[:, None] * x + new * self._prior
        self._vector = FORGETTING * self._vector + value * x + new * self._prior_vector
        self._num_samples += 1
        if self._num_samples < SOLVE_EVERY or self._num_samples % SOLVE_EVERY == 0:
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
    """The milliseconds of a step as a linear function of its work. Decodes are fitted to steps
    without prompts, and prompts to what other steps take longer: where all steps have both, one fit
    cannot tell them apart. A step that takes less than its decodes should corrects these. The
    defaults are more than most devices take."""

    def __init__(self) -> None:
        self._decodes = LinearFit((1.0, 64.0, 65536.0), (10.0, 10.0, 5.0))
        self._prompts = LinearFit((1024.0, 1e6), (50.0, 4.0))
        self._deviation = 0.0
        """The usual distance between a prediction and a step, in milliseconds."""
        self._alone_ms, self._alone_tokens = 0.0, 0.0

    def observe(self, work: StepWork, ms: float) -> None:
        """One step changes little, however long it took: it may have waited for something else."""
        expected = self.predict(work)
        limit = max(expected, 4 * self._deviation)
        error = min(max(ms - expected, -limit), limit)
        self._deviation += 0.1 * (abs(error) - self._deviation)
        ms = expected + error
        extra = ms - self.decodes(work)
        if not work.prompt_tokens or extra < 0:
            self._decodes.observe((1, work.decode_tokens, work.held), ms)
        if work.prompt_tokens:
            self._prompts.observe((work.prompt_tokens, work.pairs), max(0.0, extra))
        if not work.decode_tokens and work.prompt_tokens >= ALONE_TOKENS:
            self._alone_ms = 0.9 * self._alone_ms + ms
            self._alone_tokens = 0.9 * self._alone_tokens + work.prompt_tokens

    def predict(self, work: StepWork) -> float:
        token_ms, pair_ms = self.prompt_ms
        return self.decodes(work) + token_ms * work.prompt_tokens + pair_ms * work.pairs

    def decodes(self, work: StepWork) -> float:
        """The milliseconds of the step without its prompts."""
        return self._decodes.predict((1, work.decode_tokens, work.held))

    @property
    def prompt_ms(self) -> tuple[float, float]:
        """Milliseconds of a prompt token, and of a pair. Short prompts beside decodes cost little,
        as a step reads the weights for both; long ones, which the fit may not have seen, at best
        half of what they cost alone."""
        token_ms, pair_ms = map(float, self._prompts.coefficients)
        if self._alone_tokens:
            token_ms = max(token_ms, self._alone_ms / self._alone_tokens / 2)
        return token_ms, pair_ms


@dataclass(slots=True)
class StepBudget:
    """`max_ms`: the bound of a step in which requests decode; None: by AUTO_TIMES, 0: none."""

    max_ms: float | None = 0.0
    cost: StepCost = field(default_factory=StepCost)
    others: StepWork = field(default_factory=StepWork)
    """The work of the other groups in the last step: their requests wait for this group's."""

    def observe(self, work: StepWork, ms: float) -> None:
        if self.max_ms != 0:
            self.cost.observe(work, ms)

    def prompt_tokens(
        self, most: int, decodes: StepWork, prompts: Iterable[tuple[int, int]]
    ) -> int:
        """The prompt tokens of a step beside `decodes`: up to `most`, and a chunk at least.
        `prompts`: the computed and the remaining tokens of each prompt, in order."""
        if self.max_ms == 0:
            return most
        base = heaviest([decodes, self.others])
        if not base.decode_tokens:
            return most
        decode_ms, (token_ms, pair_ms) = self.cost.decodes(base), self.cost.prompt_ms
        left, total = self._bound(decode_ms) - decode_ms, 0
        for first, length in prompts:
            fitting = _fitting(left, token_ms + pair_ms * first, pair_ms)
            if fitting < length:
                total = max(1, (total + fitting) // CHUNK_MULTIPLE) * CHUNK_MULTIPLE
                return min(most, total)
            left -= length * (token_ms + pair_ms * first) + pair_ms * length * length / 2
            total += length
            if total >= most:
                break
        return most

    def _bound(self, decode_ms: float) -> float:
        return max(AUTO_MS, AUTO_TIMES * decode_ms) if self.max_ms is None else self.max_ms


def _fitting(ms: float, token_ms: float, pair_ms: float) -> int:
    """The largest x with x * token_ms + x * x / 2 * pair_ms <= ms."""
    if ms <= 0:
        return 0
    root = math.sqrt(token_ms * token_ms + 2 * pair_ms * ms)
    return int(2 * ms / max(token_ms + root, 1e-9))
