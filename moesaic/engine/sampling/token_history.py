"""The tokens of a request as far as sampling depends on them, counted as they come.

Tokens are only ever added, so that counts stay valid: a step counts what is new since the last one.
N distinct tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar, overload

import numpy as np
import numpy.typing as npt

from moesaic.core.sampling import SamplingParams

if TYPE_CHECKING:
    from moesaic.engine.sampling.sampler import SampleRow

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Array = TypeVar("Array", Ints, Floats)

# Room for new distinct tokens, when arrays grow.
SPARE: Final = 64


class Edits(NamedTuple):
    """By how much the logits of single tokens change."""

    ids: Ints
    amounts: Floats


class TokenHistory:
    """`ids`: the prompt and then the answer, a list that others append to."""

    def __init__(
        self, params: SamplingParams, eos_ids: frozenset[int], ids: list[int], prompt_len: int
    ) -> None:
        self.params, self.ids, self.prompt_len = params, ids, prompt_len
        self._eos_ids = eos_ids
        self._frequency, self._presence = params.frequency_penalty, params.presence_penalty
        self._places: dict[int, int] = {}
        self._counts: list[int] = []
        self._ids_N, self._amounts_N = np.empty(0, np.int64), np.empty(0, np.float32)
        self._counted: int | None = None

    @classmethod
    def of(cls, row: SampleRow) -> TokenHistory:
        ids = [*row.prompt_ids, *row.output_ids]
        return cls(row.params, row.eos_ids, ids, len(row.prompt_ids))

    def outputs(self) -> OutputTokens:
        """The tokens of the answer so far."""
        return OutputTokens(self, len(self.ids))

    def prompt_tokens(self) -> dict[int, None]:
        """The distinct tokens of the prompt that count as repeated."""
        repeats = self.params.repetition_penalty != 1.0
        return dict.fromkeys(self.ids[: self.prompt_len]) if repeats else {}

    def penalties(self, stop: int) -> Edits:
        """The distinct tokens before `stop`, and by how much frequency and presence lower each: 0
        for those of the prompt alone, which are included if they count as repeated."""
        if self._counted != stop:
            if self._counted is None or self._counted > stop:
                self._begin()
            for token in self.ids[self._counted : stop]:
                self._add(token)
            self._counted = stop
        return self._edits

    def _begin(self) -> None:
        self._places = {token: n for n, token in enumerate(self.prompt_tokens())}
        self._counts = [0] * len(self._places)
        self._ids_N = np.fromiter(self._places, np.int64, len(self._places))
        self._amounts_N = np.zeros(len(self._places), np.float32)
        self._edits, self._counted = Edits(self._ids_N, self._amounts_N), self.prompt_len

    def _add(self, token: int) -> None:
        place = self._places.get(token)
        if place is None:
            place = self._append(token)
        count = self._counts[place] = self._counts[place] + 1
        self._amounts_N[place] = self._frequency * count + self._presence

    def _append(self, token: int) -> int:
        place = self._places[token] = len(self._counts)
        self._counts.append(0)
        if place == len(self._ids_N):
            size = 2 * place + SPARE
            self._ids_N, self._amounts_N = _grown(self._ids_N, size), _grown(self._amounts_N, size)
        self._ids_N[place] = token
        self._edits = Edits(self._ids_N[: place + 1], self._amounts_N[: place + 1])
        return place

    def penalties_with(self, stop: int, drafts: Sequence[int]) -> Edits:
        """The same with drafts behind `stop`, which are not kept."""
        ids_N, amounts_N = self.penalties(stop)
        counts = Counter(drafts)
        new = [token for token in counts if token not in self._places]
        places = {token: len(ids_N) + n for n, token in enumerate(new)}
        ids_N = np.append(ids_N, np.array(new, np.int64))
        amounts_N = np.append(amounts_N, np.zeros(len(new), np.float32))
        for token, count in counts.items():
            if (place := self._places.get(token)) is None:
                place = places[token]
            else:
                count += self._counts[place]
            amounts_N[place] = self._frequency * count + self._presence
        return Edits(ids_N, amounts_N)

    @cached_property
    def biases(self) -> Edits:
        biases = self.params.logit_bias
        return Edits(np.array([*biases], np.int64), np.array([*biases.values()], np.float32))

    @cached_property
    def ends(self) -> Edits:
        """Forbids the tokens that end the answer, for as long as it is too short."""
        ids = [*{*self._eos_ids, *self.params.stop_token_ids}]
        return Edits(np.array(ids, np.int64), np.full(len(ids), -math.inf, np.float32))


class OutputTokens(Sequence[int]):
    """The answer up to the position `stop`, and drafts behind it."""

    __slots__ = ("drafts", "history", "stop")

    def __init__(self, history: TokenHistory, stop: int, drafts: Sequence[int] = ()) -> None:
        self.history, self.stop, self.drafts = history, stop, drafts

    def then(self, drafts: Sequence[int]) -> OutputTokens:
        return OutputTokens(self.history, self.stop, [*self.drafts, *drafts])

    def __len__(self) -> int:
        return self.stop - self.history.prompt_len + len(self.drafts)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice) and index.step is None and not self.drafts:
            start, stop, _ = index.indices(len(self))
            first = self.history.prompt_len
            return self.history.ids[first + start : first + stop]
        return [*self][index]

    def __iter__(self) -> Iterator[int]:
        history = self.history
        return iter([*history.ids[history.prompt_len : self.stop], *self.drafts])

    @property
    def too_short(self) -> bool:
        return len(self) < self.history.params.min_new_tokens

    def penalties(self) -> Edits:
        if self.drafts:
            return self.history.penalties_with(self.stop, self.drafts)
        return self.history.penalties(self.stop)


def _grown(array_N: Array, size: int) -> Array:
    grown = np.zeros(size, array_N.dtype)
    grown[: len(array_N)] = array_N
    return grown
