"""Which part of the KV cache goes from which rank to which, between any two layouts: arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from moesaic.core.disagg import KVShare


class SharedPart(NamedTuple):
    """Layers and key/value heads, numbered in the whole model."""

    layers: range
    heads: range


def piece(
    sources: Sequence[KVShare], source: int, targets: Sequence[KVShare], target: int
) -> SharedPart:
    """What a source sends to a target; empty ranges if that is nothing. Of sources that hold the
    same, each serves its share of the targets."""
    ours, theirs = sources[source], targets[target]
    same = [number for number, share in enumerate(sources) if share == ours]
    if same[target % len(same)] != source:
        return SharedPart(range(0), range(0))
    return SharedPart(_common(ours.layers, theirs.layers), _common(ours.heads, theirs.heads))


def _common(one: tuple[int, int], other: tuple[int, int]) -> range:
    return range(max(one[0], other[0]), min(one[1], other[1]))


class CacheShape(NamedTuple):
    """What the caches of both instances must have in common."""

    layers: int
    heads: int
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, shares: Iterable[KVShare]) -> CacheShape:
        """`shares`: those of all ranks of a group."""
        known = list(shares)
        layers, heads = (max(stop for _, stop in column) for column in _ranges(known))
        return cls(layers, heads, known[0].key_dim, known[0].value_dim)

    def __str__(self) -> str:
        dims = f"{self.key_dim} and {self.value_dim} channels"
        return f"{self.layers} layers, {self.heads} key/value heads, {dims} of keys and values"


def shapes_of(shares: Iterable[Sequence[KVShare]]) -> list[CacheShape]:
    """Of each cache. `shares`: those of each rank."""
    return [CacheShape.of(of_cache) for of_cache in zip(*shares, strict=True)]


def _ranges(shares: list[KVShare]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    return [share.layers for share in shares], [share.heads for share in shares]
