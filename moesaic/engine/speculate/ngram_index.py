"""Finds earlier occurrences of the last tokens of a sequence, in its own and in others' tokens.

Every context of a few tokens has a chain of the places where it occurred, the newest first, through
all sequences of a namespace. A search walks the chain of the last context and compares the tokens
before it, so that the longest match wins: what a suffix automaton would find among the newest
occurrences, in a structure that tokens are added to in constant time and that old sequences leave.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

# Tokens of a context that has a chain: shorter matches propose too much that is wrong.
CONTEXT: Final = 3
# Places of a chain that a search looks at.
MOST_PLACES: Final = 16
# Larger than any token id, so that three of them make one integer without collisions.
BASE: Final = 1 << 20
# A place is a sequence's number, shifted, and the position of the token behind the context.
SHIFT: Final = 32
NOWHERE: Final = -1


class NgramMatch(NamedTuple):
    """`length` tokens equal those before `position` in `tokens`."""

    tokens: Sequence[int]
    position: int
    length: int


@dataclass(slots=True)
class IndexedTokens:
    """A sequence. `before[n]`: the earlier place of the context that ends at position n + CONTEXT;
    the last token has no successor, so that its context is not in a chain yet."""

    tokens: Sequence[int]
    namespace: str
    before: array[int] = field(default_factory=lambda: array("q"))

    @property
    def num_indexed(self) -> int:
        return len(self.before)


class NgramIndex:
    """Not thread-safe. `capacity`: tokens that are kept in chains, beside those of live sequences;
    `depth`: the longest match that is looked for."""

    def __init__(self, capacity: int, depth: int) -> None:
        self._capacity, self.depth = capacity, max(depth, CONTEXT)
        self._chains: dict[str, dict[int, int]] = {}
        """The newest place of each context, by namespace."""
        self._sequences: dict[int, IndexedTokens] = {}
        self._ended: OrderedDict[int, None] = OrderedDict()
        """Oldest first."""
        self.num_tokens = 0

    def __contains__(self, number: int) -> bool:
        return number in self._sequences

    def begin(self, number: int, tokens: Sequence[int], namespace: str = "") -> None:
        """`tokens`: a list that grows; `extend` adds what is new of it."""
        self._sequences[number] = IndexedTokens(tokens, namespace)

    def extend(self, number: int, most: int) -> int:
        """Adds up to `most` contexts whose next token has come; returns how many."""
        sequence = self._sequences[number]
        tokens, before = sequence.tokens, sequence.before
        start = len(before)
        count = min(most, len(tokens) - CONTEXT - start)
        if count <= 0:
            return 0
        chains = self._chains.setdefault(sequence.namespace, {})
        place = (number << SHIFT) + start + CONTEXT
        some = tokens[start : start + CONTEXT + count]
        first, second = some[0], some[1]
        for third in some[2 : 2 + count]:
            key = (first * BASE + second) * BASE + third
            before.append(chains.get(key, NOWHERE))
            chains[key] = place
            place += 1
            first, second = second, third
        self.num_tokens += count
        self._evict()
        return count

    def end(self, number: int) -> None:
        """The sequence gets no more tokens; it stays until others need its room."""
        sequence = self._sequences[number]
        sequence.tokens = array("i", sequence.tokens)
        self._ended[number] = None

    def find(self, tokens: Sequence[int], namespace: str, frequent: bool) -> NgramMatch | None:
        """The longest match of the last tokens, of several the newest one; `frequent`: the newest
        one of those with the most frequent next token."""
        longest = CONTEXT
        found: list[NgramMatch] = []
        for match in self.matches(tokens, namespace):
            if match.length > longest:
                longest, found = match.length, []
            if match.length == longest:
                found.append(match)
                if longest == self.depth and not frequent:
                    break
        if not found:
            return None
        return _most_frequent(found) if frequent else found[0]

    def matches(self, tokens: Sequence[int], namespace: str) -> Iterator[NgramMatch]:
        """Those of the last tokens, the newest first."""
        chains = self._chains.get(namespace)
        if chains is None or len(tokens) < CONTEXT:
            return
        first, second, third = tokens[-CONTEXT:]
        place = chains.get((first * BASE + second) * BASE + third, NOWHERE)
        for _ in range(MOST_PLACES):
            sequence = self._sequences.get(place >> SHIFT) if place >= 0 else None
            if sequence is None:  # what comes before an evicted sequence is old, too
                return
            position = place & (1 << SHIFT) - 1
            yield NgramMatch(
                sequence.tokens, position, self._match(tokens, sequence.tokens, position)
            )
            place = sequence.before[position - CONTEXT]

    def _match(self, tokens: Sequence[int], others: Sequence[int], position: int) -> int:
        """How many tokens before `position` equal the last ones, of which a context is known to."""
        length, most = CONTEXT, min(self.depth, len(tokens), position)
        while length < most and tokens[-length - 1] == others[position - length - 1]:
            length += 1
        return length

    def _evict(self) -> None:
        while self.num_tokens > self._capacity and self._ended:
            number, _ = self._ended.popitem(last=False)
            sequence = self._sequences.pop(number)
            self.num_tokens -= sequence.num_indexed
            self._drop_heads(number, sequence)

    def _drop_heads(self, number: int, sequence: IndexedTokens) -> None:
        """Chains that begin in the sequence are dropped: nothing newer is in them."""
        chains, tokens = self._chains[sequence.namespace], sequence.tokens
        for n in range(sequence.num_indexed):
            key = (tokens[n] * BASE + tokens[n + 1]) * BASE + tokens[n + 2]
            if chains.get(key, NOWHERE) >> SHIFT == number:
                del chains[key]
        if not chains:
            del self._chains[sequence.namespace]


def _most_frequent(found: Sequence[NgramMatch]) -> NgramMatch:
    counts = Counter(match.tokens[match.position] for match in found)
    most = max(counts.values())
    return next(match for match in found if counts[match.tokens[match.position]] == most)
