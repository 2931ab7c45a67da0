"""Runs layers as lists of operations: one micro-batch, or two in turn.

The lists of all layers, one behind the other, are cut into stages at each `YieldOperation`. Of two
micro-batches the first is `delta` stages ahead; then both run a stage in turn, so that the
transfers of each travel while the other computes:

    delta 0     A1 B1 A2 B2 A3 B3
    delta 1     A1 A2 B1 A3 B2 B3

All ranks run the same order, which the collectives within stages need.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from moesaic.overlap.operations import MicroBatch, OverlapLayer, YieldOperation


def stages(layers: Iterable[OverlapLayer], batch: MicroBatch) -> Iterator[None]:
    """Each `next` runs a stage. The end of a layer belongs to a stage of the layer behind it."""
    for layer in layers:
        state = layer.begin(batch)
        for operation in layer.ops():
            if isinstance(operation, YieldOperation):
                yield
            else:
                operation(state)
        layer.end(state, batch)


def run_two(
    layers: Iterable[OverlapLayer], first: MicroBatch, second: MicroBatch, delta: int = 0
) -> None:
    """The first one enters each layer before the second, which may attend to its tokens."""
    layers = list(layers)
    ahead, behind = stages(layers, first), stages(layers, second)
    for _ in range(delta):
        next(ahead, None)
    running = [ahead, behind]
    while running:
        running = [batch for batch in running if next(batch, DONE) is not DONE]


DONE = object()
"""What `next` gives at the end, as stages yield None."""
