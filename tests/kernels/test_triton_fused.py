"""A whole layer of several ranks in one process: rows left where they are, read there by the first
product, results pulled; in Triton's interpreter or on a GPU.

P ranks · C rows of each · T tokens of one · K chosen · H hidden · E experts, e of each rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from moesaic.comm.windows.device_window import layout, new_state
from moesaic.comm.windows.window import PlaneSpec
from moesaic.kernels import a2a as twins
from moesaic.kernels import experts as contract
from moesaic.kernels.a2a import (
    NUM_FAILURE_WORDS,
    ChannelCall,
    DeviceStateWord,
    FailureWords,
    LocalTokens,
    ResultPlane,
    RowPlanes,
    SignalPlanes,
    SlotOwners,
)
from moesaic.kernels.experts import FeedForward, Matrices, RemoteRows, Rows
from moesaic.kernels.triton import a2a, experts, sort
from tests import moe_oracle
from tests.kernels.a2a_cases import Case, assert_same_memory
from tests.kernels.test_triton_a2a import both, send_all
from tests.kernels.test_triton_experts import BOUNDS, FP8, FP8_BOUND, NAMES, Layer, needs_gpu
from tests.kernels.triton_cases import DEVICE, compile_apart, relative_error

RANKS, ROWS, TOP_K = 3, 5, 2
ROW_CHANNEL, RESULT_CHANNEL = 0, 1
PAYLOADS = dict.fromkeys(FP8, "fp8")


@dataclass(frozen=True)
class Ranks:
    """`offsets`: of planes by name, the same in all regions."""

    all_signals: list[SignalPlanes]
    offsets: dict[str, int]
    planes: RowPlanes
    layer: Layer

    @classmethod
    def of(cls, layer: Layer) -> Ranks:
        """All that is in a region is NaN, but for the flags."""
        hidden, payload = layer.shape[1], PAYLOADS.get(layer.w13.format, NAMES[layer.dtype])
        kept = contract.operand(Rows(torch.zeros(ROWS, hidden, dtype=layer.dtype)), layer.w13)
        groups = 0 if kept.scales is None else kept.scales.shape[1]
        specs = [
            PlaneSpec("values", (ROWS, hidden), kept.values.dtype),
            PlaneSpec("scales", (ROWS, groups), torch.float32),
            PlaneSpec("ids", (RANKS * ROWS, TOP_K), torch.int32),
            PlaneSpec("results", (RANKS * ROWS * TOP_K, hidden), layer.dtype),
        ]
        offsets, nbytes = layout(specs, 2, RANKS)
        regions = torch.full((RANKS, nbytes), 0xFF, dtype=torch.uint8, device=DEVICE)
        regions[:, : offsets["values"]] = 0
        bases = torch.tensor([region.data_ptr() for region in regions], device=DEVICE)
        all_signals = []
        for rank in range(RANKS):
            state = new_state(2, range(RANKS), 5.0).to(DEVICE)
            failure = torch.zeros(NUM_FAILURE_WORDS, dtype=torch.int64, device=DEVICE)
            all_signals.append(
                SignalPlanes(rank, RANKS, regions.unbind(0), bases, 0, state, failure)
            )
        places = {name: offsets[name] for name in ("values", "scales", "ids")}
        sizes = (hidden * kept.values.element_size(), groups * 4)
        planes = RowPlanes(payload, *places.values(), -1, *sizes, local_rows=True)
        return cls(all_signals, offsets, planes, layer)

    @property
    def spread(self) -> SlotOwners:
        return SlotOwners(self.layer.shape[0] // RANKS)

    def part(self, matrices: Matrices, rank: int) -> Matrices:
        own = slice(rank * self.spread.slots, (rank + 1) * self.spread.slots)
        planes = {name: plane[own].contiguous() for name, plane in matrices.planes.items()}
        return replace(matrices, planes=planes, shape=(self.spread.slots, *matrices.shape[1:]))

    def rows(self, signals: SignalPlanes) -> Rows:
        """Of all ranks, as one of them sees them."""
        hidden, planes = self.layer.shape[1], self.planes
        dtype = torch.float8_e4m3fn if planes.payload == "fp8" else self.layer.dtype
        values = signals.plane(signals.rank, planes.values, (ROWS, hidden), dtype)
        scales = None
        if planes.scale_bytes:
            shape = (ROWS, planes.scale_bytes // 4)
            scales = signals.plane(signals.rank, planes.scales, shape, torch.float32)
        return Rows(values, scales, remote=RemoteRows(signals, ROWS, planes.values, planes.scales))

    def compute(self, signals: SignalPlanes) -> None:
        """The experts of a rank on everybody's rows."""
        shape, (_, hidden, inner) = (RANKS * ROWS, TOP_K), self.layer.shape
        ids_RK = signals.plane(signals.rank, self.planes.ids, shape, torch.int32)
        groups = sort.sort_pairs(ids_RK, self.spread.slots, 16)
        h = Rows(torch.empty(groups.num_places, inner, dtype=self.layer.dtype, device=DEVICE))
        place = self.offsets["results"]
        y_NH = signals.plane(signals.rank, place, (groups.num_places, hidden), self.layer.dtype)
        parts = (self.part(w, signals.rank) for w in (self.layer.w13, self.layer.w2))
        own = FeedForward(*parts, self.layer.activation)
        experts.gate_up_down(self.rows(signals), own, groups, None, h, y_NH)

    def step(self, tokens: list[LocalTokens]) -> list[Tensor]:
        """All ranks one after the other, so that nobody waits for long."""
        for signals, own in zip(self.all_signals, tokens, strict=True):
            a2a.send(own, ROWS, self.planes, self.spread, ChannelCall(signals, ROW_CHANNEL))
        for signals in self.all_signals:
            a2a.receive(ChannelCall(signals, ROW_CHANNEL), ROWS, TOP_K, self.planes.ids)
            self.compute(signals)
            a2a.signal(ChannelCall(signals, RESULT_CHANNEL))
        outs = []
        for signals, own in zip(self.all_signals, tokens, strict=True):
            call, out_TH = ChannelCall(signals, RESULT_CHANNEL), torch.empty_like(own.x_TH)
            results = ResultPlane(ROWS, self.offsets["results"], self.spread)
            outs.append(a2a.collect_pairs(out_TH, own, results, call))
        return outs


def draw_tokens(layer: Layer, counts: tuple[int, ...], seed: int = 0) -> list[LocalTokens]:
    """Of each rank; some pairs are nobody's."""
    torch.manual_seed(seed)
    found = []
    for rank, count in enumerate(counts):
        topk = moe_oracle.random_topk(count, layer.shape[0], TOP_K, 10 * seed + rank)
        ids_TK = topk.ids_TK.masked_fill(torch.rand(count, TOP_K) < 0.2, -1)
        x_TH = torch.randn(count, layer.shape[1]).to(layer.dtype)
        found.append(
            LocalTokens(x_TH.to(DEVICE), ids_TK.int().to(DEVICE), topk.weights_TK.to(DEVICE))
        )
    return found


def by_one_rank(layer: Layer, own: LocalTokens) -> Tensor:
    """All experts on tokens that are here, by torch."""
    count, (num_experts, hidden, inner) = len(own.x_TH), layer.shape
    groups = contract.sort_pairs.twin(own.ids_TK, num_experts, 16)
    h = Rows(torch.empty(groups.num_places, inner, dtype=layer.dtype, device=DEVICE))
    contract.gate_up.twin(Rows(own.x_TH), layer.w13, groups, layer.activation, h)
    y_NH = torch.empty(groups.num_places, hidden, device=DEVICE)
    contract.down.twin(h, layer.w2, groups, own.weights_TK, y_NH)
    return contract.sum_pairs.twin(y_NH, own.ids_TK, torch.empty(count, hidden, device=DEVICE))


def check(layer: Layer, ranks: Ranks, tokens: list[LocalTokens], outs: list[Tensor]) -> None:
    quantised = ranks.planes.payload == "fp8"
    bound = FP8_BOUND if quantised else BOUNDS[layer.dtype]
    for own, out_TH in zip(tokens, outs, strict=True):
        expected_TH = by_one_rank(layer, own)
        assert out_TH.shape == expected_TH.shape
        if len(out_TH):
            assert relative_error(out_TH, expected_TH) < bound
    for signals in ranks.all_signals:
        assert (
            signals.state[DeviceStateWord.BROKEN] == 0
            and signals.failure[FailureWords.FAILURE] == 0
        )


@pytest.mark.parametrize(
    "format, dtype",
    [
        ("fp32", torch.float32),
        ("fp8_block", torch.float16),
        pytest.param("bf16", torch.bfloat16, marks=(pytest.mark.gpu, needs_gpu)),
    ],
)
def test_steps_of_three_ranks(format: str, dtype: torch.dtype) -> None:
    """One of them without tokens, then another; what the last step left is not used again."""
    layer = Layer.random(2 * RANKS, 128, 32, format, dtype)
    ranks = Ranks.of(layer)
    for seed, counts in enumerate(((5, 0, 2), (0, 3, 1))):
        tokens = draw_tokens(layer, counts, seed)
        check(layer, ranks, tokens, ranks.step(tokens))


@pytest.mark.parametrize(
    "case",
    [
        Case(counts=(3, 0, 1), rows=3, local_rows=True),
        Case(counts=(2, 1), rows=3, payload="fp8", hidden=200, padded=True, local_rows=True),
    ],
    ids=str,
)
def test_what_is_left_at_home(case: Case) -> None:
    """The same bytes as by torch, and nothing besides: rows that are no tokens, or have no experts,
    are left as they were."""
    ours, theirs = both(case)
    send_all(case, ours, a2a.send)
    send_all(case, theirs, twins.send.twin)
    assert_same_memory(case, ours, theirs)
    for window in ours:
        written = (window.plane("values") != 0xFF).any(1).tolist()
        chosen = (case.tokens(window.rank).ids_TK[: case.counts[window.rank]] >= 0).any(1).tolist()
        assert written == chosen + [False] * (len(written) - len(chosen))
        assert any(written) == (case.counts[window.rank] > 0)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("format", ["bf16", "fp8_block"])
def test_a_graph_of_all_ranks(format: str) -> None:
    """Replayed with other tokens: nothing waits for the host."""
    layer = Layer.random(4 * RANKS, 2048, 768, format, torch.bfloat16)
    ranks = Ranks.of(layer)
    tokens = draw_tokens(layer, (5, 5, 5))
    check(layer, ranks, tokens, ranks.step(tokens))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = ranks.step(tokens)
    for seed in range(1, 20):
        for own, new in zip(tokens, draw_tokens(layer, (5, 5, 5), seed), strict=True):
            own.x_TH.copy_(new.x_TH)
            own.ids_TK.copy_(new.ids_TK)
            own.weights_TK.copy_(new.weights_TK)
        graph.replay()
        check(layer, ranks, tokens, outs)


def test_compiled_for_hopper() -> None:
    compile_apart("aot_remote_rows")


@pytest.mark.slow
def test_all_shapes_compiled_for_hopper() -> None:
    compile_apart("aot_remote_rows", "--all")
