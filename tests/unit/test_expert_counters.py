"""The counters of many layers that one copy reads."""

from __future__ import annotations

import torch

from moesaic.moe.expert_load import TABLE_LAYERS, DeviceCounters, SlotLoad, tokens_of
from moesaic.moe.placement import EpLayout
from moesaic.observe.spans import Spans


def make_loads(number: int, counters: DeviceCounters | None, slots: int = 3) -> list[SlotLoad]:
    return [SlotLoad(layer, EpLayout(slots), Spans(), counters) for layer in range(number)]


def count(load: SlotLoad, *tokens: int) -> None:
    assert load.on_device is not None
    load.on_device.add_(torch.tensor(tokens))


def test_layers_share_a_table() -> None:
    loads = make_loads(TABLE_LAYERS + 2, DeviceCounters())
    for load in loads:
        count(load, load.layer, 0, 2)
    tables = {id(load.row[0]) for load in loads if load.row is not None}
    assert len(tables) == 2
    assert tokens_of(loads) == [[load.layer, 0, 2] for load in loads]
    assert tokens_of(loads[-1:] + loads[:1]) == [[TABLE_LAYERS + 1, 0, 2], [0, 0, 2]]
    loads[5].clear()
    count(loads[5], 0, 1, 0)
    expected = [[0, 1, 0] if load.layer == 5 else [load.layer, 0, 2] for load in loads]
    assert tokens_of(loads) == expected == [load.tokens for load in loads]


def test_experts_keep_their_counts_when_they_move() -> None:
    """Slots of experts 0, 1, 0 come first, then the four experts with all earlier slots."""
    layout, counters = EpLayout(3), DeviceCounters()
    for place in (counters, None):
        load = SlotLoad(0, layout, Spans(), place, movable=4)
        for experts in ((0, 1, 0), (3, 1, 0)):
            if place is None:
                load._tokens[:3] = [5, 6, 7]
            else:
                count(load, 5, 6, 7)
            load.start_window(experts)
        assert load.tokens == [0, 0, 0, 5 + 7 + 7, 6 + 6, 0, 5] == tokens_of([load])[0]
        assert load.placement_version == 2
        load.clear()
        assert load.tokens == [0] * 7


def test_layers_of_other_sizes_and_devices() -> None:
    counters = DeviceCounters()
    with torch.device("meta"):  # a model that is built to know its sizes
        (shapes,) = make_loads(1, counters)
    (small,), (large,) = make_loads(1, counters), make_loads(1, counters, slots=4)
    assert shapes.on_device is not None and shapes.on_device.is_meta
    count(small, 1, 2, 3)
    count(large, 4, 5, 6, 7)
    (host,) = make_loads(1, None)
    assert tokens_of([large, host, small]) == [[4, 5, 6, 7], [0, 0, 0], [1, 2, 3]]
    assert tokens_of([]) == []
