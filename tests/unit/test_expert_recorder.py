"""The recorder of a rank and the sums over ranks, on counters that the tests set."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moesaic.balance.recording import RankPasses, common_passes, merged_counts, utilization
from moesaic.comm.mesh import Mesh
from moesaic.engine.frontend.balancedness import pass_balance
from moesaic.engine.runner import expert_recorder
from moesaic.engine.runner.expert_recorder import ExpertRecorder, PassSums
from moesaic.engine.schedule.plan import StepAgreement, StepPlan
from moesaic.moe.expert_load import TABLE_LAYERS, DeviceCounters, SlotLoad
from moesaic.moe.layer import MoeConfig
from moesaic.moe.pass_totals import EVENTS
from moesaic.moe.placement import EpLayout, Placement
from moesaic.observe.spans import Spans

EXPERTS = 6


class Layers:
    """MoE layers of a rank that holds three of six slots, the last ones unless told otherwise."""

    def __init__(self, number: int, on_device: bool, movable: int = 0, rank: int = 1) -> None:
        self.device = torch.device("cpu")
        self.ranks = SimpleNamespace(mesh=Mesh(tp=2, ep=2))
        self.layout = EpLayout(EXPERTS, ep_size=2, rank=rank)
        counters = DeviceCounters() if on_device else None
        self.moe_layers = [
            SimpleNamespace(
                load=SlotLoad(3 + n, self.layout, Spans(), counters, movable),
                layout=self.layout,
                placement=Placement.trivial(EXPERTS),
                config=MoeConfig(EXPERTS, hidden_size=64, intermediate_size=32, top_k=2),
            )
            for n in range(number)
        ]

    def count(self, added: list[int]) -> None:
        """As a pass does: layer n gets n more of each."""
        for n, layer in enumerate(self.moe_layers):
            load = layer.load
            if load.on_device is not None:
                load.on_device.add_(load.on_device.new_tensor(added) + n)
            else:
                load._tokens[:3] = [
                    old + new + n for old, new in zip(load.tokens, added, strict=False)
                ]

    def move(self, index: int, slots: tuple[int, ...]) -> None:
        layer = self.moe_layers[index]
        layer.load.start_window(layer.placement.slots[3:])
        layer.placement = Placement(EXPERTS, slots)


def passes_of(recorder: ExpertRecorder, rank: int = 0, replica: int = 0) -> RankPasses:
    """All that can be read, in pieces."""
    state, pieces = recorder.state(), []
    first = state.first
    while first < state.end:
        pieces.append(recorder.read(first, state.end))
        first = pieces[-1].next
    numbers = [one.number for rows in pieces for one in rows.passes]
    versions, counts = (
        np.frombuffer(b"".join(getattr(rows, name) for rows in pieces), np.int32)
        for name in ("versions", "counts")
    )
    shape = (len(numbers), len(state.layers))
    return RankPasses(
        rank,
        replica,
        state.layers,
        state.counts,
        state.first_slot,
        {(found.layer, found.version): found.slots for found in state.placements},
        numbers,
        versions.reshape(shape),
        counts.reshape(*shape, state.num_local),
    )


def indices(recorder: ExpertRecorder) -> list[int]:
    state, found = recorder.state(), []
    first = state.first
    while first < state.end:
        rows = recorder.read(first, state.end)
        found += [one.index for one in rows.passes]
        first = rows.next
    return found


def run(layers: Layers, recorder: ExpertRecorder, first: int, end: int) -> None:
    for number in range(first, end):
        layers.count([number, 0, 2 * number])
        recorder.record(StepPlan(), StepAgreement(number, (1,)))


@pytest.mark.parametrize("on_device", [False, True])
def test_a_full_ring_keeps_the_last_passes(
    on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_recorder, "CHUNK_BYTES", 100)  # several pieces
    layers: Any = Layers(TABLE_LAYERS + 2 if on_device else 3, on_device)
    recorder = ExpertRecorder(layers, passes=5)
    run(layers, recorder, 1, 4)
    assert recorder.state().end == 0, "nothing is recorded before the start"
    recorder.start()
    run(layers, recorder, 4, 7)
    assert passes_of(recorder).numbers == [4, 5, 6] and indices(recorder) == [0, 1, 2]
    run(layers, recorder, 7, 21)
    found = passes_of(recorder)
    assert found.numbers == [16, 17, 18, 19, 20] and indices(recorder) == [12, 13, 14, 15, 16]
    for row, number in zip(found.counts_nMe, found.numbers, strict=True):
        for n in range(len(layers.moe_layers)):
            assert row[n].tolist() == [number + n, n, 2 * number + n]
    recorder.answer("expert_record_stop", {}, 0)
    run(layers, recorder, 21, 23)
    assert passes_of(recorder).numbers == found.numbers, "it has stopped"
    recorder.start()
    run(layers, recorder, 23, 24)
    assert passes_of(recorder).counts_nMe[0, 0].tolist() == [23, 0, 46]


def test_a_dump_frees_what_it_has_read_and_no_more() -> None:
    layers: Any = Layers(2, False)
    recorder = ExpertRecorder(layers, passes=4)
    recorder.start()
    run(layers, recorder, 1, 4)
    run(layers, recorder, 4, 6)  # while files are written
    recorder.answer("expert_record_discard", {"ends": {0: 3}}, 0)
    found = passes_of(recorder)
    assert found.numbers == [4, 5] and found.counts_nMe[0, 0].tolist() == [4, 0, 8]
    assert recorder.state().told == 3 and indices(recorder) == [3, 4]
    recorder.answer("expert_record_discard", {"ends": {0: 10**6}}, 0)
    assert passes_of(recorder).numbers == []


def test_a_failed_pass_is_left_out() -> None:
    layers: Any = Layers(1, True)
    recorder = ExpertRecorder(layers, passes=3)
    recorder.start()
    run(layers, recorder, 1, 2)
    layers.count([100, 100, 100])
    recorder.restart()
    run(layers, recorder, 2, 3)
    found = passes_of(recorder)
    assert found.numbers == [1, 2] and found.counts_nMe[1, 0].tolist() == [2, 0, 4]


@pytest.mark.parametrize("on_device", [False, True])
def test_counters_may_wrap(on_device: bool) -> None:
    layers: Any = Layers(1, on_device)
    layers.count([2**32 - 1, 2**31 - 1, 0])
    recorder = ExpertRecorder(layers, passes=3)
    recorder.start()
    layers.count([3, 4, 5])
    recorder.record(StepPlan(), StepAgreement(1, (1,)))
    assert passes_of(recorder).counts_nMe.tolist() == [[[3, 4, 5]]]


@pytest.mark.parametrize("on_device", [False, True])
def test_experts_that_move_between_passes(on_device: bool) -> None:
    """Each pass is counted by the placement that it followed."""
    layers: Any = Layers(2, on_device, movable=EXPERTS)
    recorder = ExpertRecorder(layers, passes=8)
    recorder.start()
    run(layers, recorder, 1, 3)
    layers.move(1, (5, 4, 3, 2, 1, 0))
    run(layers, recorder, 3, 5)
    found = passes_of(recorder)
    assert found.versions_nM.tolist() == [[0, 0], [0, 0], [0, 1], [0, 1]]
    logical = merged_counts([found], 6, EXPERTS)
    assert logical[:, 3, 3:].tolist() == [[n, 0, 2 * n] for n in range(1, 5)]
    assert logical[:2, 4].tolist() == [[0, 0, 0, n + 1, 1, 2 * n + 1] for n in (1, 2)]
    assert logical[2:, 4].tolist() == [[2 * n + 1, 1, n + 1, 0, 0, 0] for n in (3, 4)]
    recorder.answer("expert_record_discard", {"ends": {0: 4}}, 0)
    assert {(s.layer, s.version) for s in recorder.state().placements} == {(0, 0), (1, 1)}
    run(layers, recorder, 5, 6)
    assert merged_counts([passes_of(recorder)], 6, EXPERTS)[0, 4, 0] == 11


def test_no_limit_means_what_a_rank_may_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_recorder, "MOST_BYTES", 4 * 3 * 2 * 7)
    layers: Any = Layers(2, False)
    assert ExpertRecorder(layers, passes=-1).passes == 7
    wanted = r"buffer-size 300000000 .* 13\.4 GiB on 2 ranks, .* give at most 89478485"
    with pytest.raises(ValueError, match=wanted):
        ExpertRecorder(layers, passes=3 * 10**8)
    monkeypatch.setattr(expert_recorder, "LARGEST_BYTES", 2 * 4 * 3 * 2 * 5)
    assert ExpertRecorder(layers, passes=-1).passes == 5, "a dump gathers the counts of both ranks"


def rank_passes(rank: int, numbers: list[int], counts: list[int], replica: int = 0) -> RankPasses:
    """Of one layer with four experts on two ranks, the same counts in each pass."""
    shape = (len(numbers), 1, 2)
    return RankPasses(
        rank,
        replica,
        [1],
        True,
        2 * (rank % 2),
        {(0, 0): [0, 1, 2, 3]},
        numbers,
        np.zeros(shape[:2], np.int32),
        np.full(shape, counts, np.int32),
    )


def test_only_passes_of_all_ranks_are_kept() -> None:
    """One that a rank has still to record waits for the next dump."""
    found = common_passes([(0, [7, 8, 9]), (0, [8, 9, 10, 12]), (1, [3]), (1, [3, 4]), (2, [])])
    assert found.numbers == {0: {8, 9}, 1: {3}, 2: set()} and found.last == {0: 9, 1: 3, 2: -1}
    assert found.incomplete == 1
    assert common_passes([(0, [5]), (0, [])]).last == {0: -1}


def test_ranks_and_replicas_are_summed_by_pass() -> None:
    """A rank that holds slices of experts leaves counting to another."""
    slices = replace(rank_passes(1, [8, 9], [5, 5]), counts=False)
    ranks = [
        rank_passes(0, [8, 9], [3, 1]),
        rank_passes(1, [9, 8], [0, 2]),
        slices,
        rank_passes(2, [8], [0, 0], replica=1),
        rank_passes(3, [8], [0, 0], replica=1),
    ]
    logical = merged_counts(ranks, 3, 4)
    assert logical[:, 1].tolist() == [[3, 1, 0, 2], [3, 1, 0, 2], [0, 0, 0, 0]]
    assert not logical[:, [0, 2]].any()
    assert utilization(ranks) == pytest.approx(3 / 4), "a pass without tokens has no balance"
    assert utilization([slices]) is None and utilization(ranks[3:]) is None
    assert merged_counts([slices], 3, 4).shape == (0, 3, 4)


def pass_sums(numbers: list[int], layers: list[int], *sums: list[int]) -> PassSums:
    return PassSums(0, numbers, layers, np.array(sums, np.int64).tobytes())


def test_the_balance_of_passes() -> None:
    """Means over passes of mean/max, not mean/max of sums: two opposite passes are not balanced."""
    ranks = [
        pass_sums([1, 2, 3], [4, 5], [8, 1], [0, 1], [0, 0]),
        pass_sums([2, 3, 4], [4, 5], [8, 3], [0, 0], [9, 9]),
        pass_sums([2, 3], []),
    ]
    found = pass_balance({0: ranks, 1: [pass_sums([2], [4, 5], [8, 8])]})
    assert found is not None and found.passes == 3
    assert found.layers == {4: (0.5 + 1) / 2, 5: pytest.approx((2 / 3 + 1) / 2)}
    assert str(found) == (
        "Expert balancedness, #pass: 3, mean/max of ranks: 0.79, lowest: 0.75 (layer 4)"
    )
    assert pass_balance({0: [pass_sums([3], [4], [0])]}) is None
    assert pass_balance({0: [pass_sums([], [4])]}) is None


@pytest.mark.parametrize("on_device", [False, True])
def test_sums_of_passes_are_read_once(on_device: bool) -> None:
    layers: Any = Layers(2, on_device)
    recorder = ExpertRecorder(layers, passes=4)
    recorder.start()
    run(layers, recorder, 1, 3)
    first = recorder.sums(0)
    assert first.numbers == [1, 2] and first.layers == [3, 4]
    assert np.frombuffer(first.sums, np.int64).reshape(2, 2).tolist() == [[3, 6], [6, 9]]
    assert recorder.sums(first.next).numbers == []
    run(layers, recorder, 3, 9)
    assert recorder.sums(first.next).numbers == [5, 6, 7, 8]


def test_rows_that_the_device_has_not_written_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """With events of a device that has done the first rows alone."""
    done = 0

    class Event:
        row = -1

        def record(self, stream: object) -> None:
            self.row = next(rows)

        def query(self) -> bool:
            return self.row < done

    rows = iter(range(1000))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    layers: Any = Layers(1, True)
    recorder = ExpertRecorder(layers, passes=6)
    events: Any = [Event() for _ in range(EVENTS)]
    recorder._events._events = events
    recorder.start()
    run(layers, recorder, 1, 4)
    state = recorder.state()
    assert (state.first, state.end, state.pending) == (1, 1, 3)
    assert passes_of(recorder).numbers == [] == recorder.sums(0).numbers
    done = 3
    assert passes_of(recorder).numbers == [1, 2] and recorder.state().pending == 1
    done = 100
    run(layers, recorder, 4, 24)
    assert passes_of(recorder).numbers == [18, 19, 20, 21, 22, 23]
    done = 22  # of 24 rows
    assert passes_of(recorder).numbers == [18, 19, 20, 21]
