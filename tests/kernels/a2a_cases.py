"""Ranks within one process whose kernels write into each other's regions: for tests of kernels.

P ranks · C rows of each · T tokens of one · K chosen · H hidden. Every case is computed twice, by
kernels and by their twins on CPU, in regions that held the same garbage before: so they must be the
same to the last byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.comm.windows.device_window import CpuDeviceWindow
from moesaic.comm.windows.window import PlaneSpec
from moesaic.core.link import EmulatedLink
from moesaic.kernels.a2a import NUM_FAILURE_WORDS, LocalTokens, RowPlanes, SignalPlanes, SlotOwners
from moesaic.moe.quant.payload import PAYLOAD_FORMATS
from tests.kernels.triton_cases import DEVICE

ROWS, RESULTS = 0, 1  # channels
TIMEOUT = 2.0


@dataclass(frozen=True)
class Case:
    """`counts`: tokens of each rank; as many rows are tensors as there are rows, and `num_tokens_1`
    says how many count, where `padded`."""

    counts: tuple[int, ...] = (2, 0, 3)
    rows: int = 3
    top_k: int = 3
    hidden: int = 96
    payload: str = "fp32"
    dtype: torch.dtype = torch.float32
    slots: int = 2
    width: int = 1
    everywhere: bool = False
    weights: bool = False
    padded: bool = False
    scale: float = 1.0
    local_rows: bool = False
    same_gpu: bool = False

    @property
    def size(self) -> int:
        return len(self.counts)

    @property
    def spread(self) -> SlotOwners:
        return SlotOwners(self.slots, self.width, self.everywhere)

    def specs(self) -> list[PlaneSpec]:
        rows, format = self.size * self.rows, PAYLOAD_FORMATS[self.payload]
        values = format.row_bytes(self.hidden) - self.scale_bytes
        return [
            PlaneSpec("values", (rows, values), torch.uint8),
            PlaneSpec("scales", (rows, max(1, self.scale_bytes)), torch.uint8),
            PlaneSpec("ids", (rows, self.top_k), torch.int32),
            PlaneSpec("weights", (rows, self.top_k), torch.float32),
            PlaneSpec("results", (rows, self.hidden), self.dtype),
            PlaneSpec("pairs", (rows * self.top_k, self.hidden), self.dtype),
        ]

    @property
    def scale_bytes(self) -> int:
        scales = PAYLOAD_FORMATS[self.payload].scales
        return scales.width(self.hidden) * scales.dtype.itemsize if scales else 0

    def planes(self, window: CpuDeviceWindow) -> RowPlanes:
        values, scales, ids, weights = map(window.offset, ("values", "scales", "ids", "weights"))
        value_bytes = PAYLOAD_FORMATS[self.payload].row_bytes(self.hidden) - self.scale_bytes
        weights = weights if self.weights else -1
        where = (values, scales, ids, weights, value_bytes, self.scale_bytes)
        return RowPlanes(self.payload, *where, self.scale, self.local_rows)

    def windows(self, device: str, link: EmulatedLink | None = None) -> list[CpuDeviceWindow]:
        made = CpuDeviceWindow.between(self.size, self.specs(), TIMEOUT, 2, link)
        first = min(made[0].offset(spec.name) for spec in self.specs())
        for window in made:
            window.signals.regions[window.rank][first:] = 0xFF  # NaN, whatever type it is
            window.plane("ids").fill_(0x55)
        return made if device == "cpu" else _moved(made, device, self.same_gpu)

    def tokens(self, rank: int, seed: int = 0) -> LocalTokens:
        """Some ids are -1, and one token has nothing else."""
        generator = torch.Generator().manual_seed(100 * seed + rank)
        count = self.rows if self.padded else self.counts[rank]
        x_TH = torch.randn(count, self.hidden, generator=generator)
        x_TH *= torch.logspace(-3, 3, self.hidden)
        slots = self.size // self.width * self.slots
        ids_TK = torch.rand(count, slots, generator=generator).topk(self.top_k, -1).indices
        ids_TK[torch.rand(count, self.top_k, generator=generator) < 0.2] = -1
        ids_TK[1:2] = -1
        weights_TK = torch.rand(count, self.top_k, generator=generator)
        tokens = torch.tensor([self.counts[rank]], dtype=torch.int32) if self.padded else None
        return LocalTokens(x_TH.to(self.dtype), ids_TK.int(), weights_TK, tokens)


def _moved(windows: list[CpuDeviceWindow], device: str, same_gpu: bool) -> list[CpuDeviceWindow]:
    regions = tuple(region.to(device) for region in windows[0].signals.regions)
    bases_P = torch.tensor([region.data_ptr() for region in regions], device=device)
    for window in windows:
        failure = torch.zeros(NUM_FAILURE_WORDS, dtype=torch.int64).pin_memory()
        state = window.signals.state.to(device)
        window.signals = SignalPlanes(
            window.rank, window.size, regions, bases_P, 0, state, failure, same_gpu,
            link=window.signals.link,
        )  # fmt: skip
    return windows


def on_device(tokens: LocalTokens) -> LocalTokens:
    moved = [tensor.to(DEVICE) for tensor in (tokens.x_TH, tokens.ids_TK, tokens.weights_TK)]
    num_tokens_1 = tokens.num_tokens_1
    return LocalTokens(*moved, None if num_tokens_1 is None else num_tokens_1.to(DEVICE))


def assert_same_memory(
    case: Case, out: list[CpuDeviceWindow], wanted: list[CpuDeviceWindow]
) -> None:
    """Regions, flags among them, what ranks count, and what lies on the desks."""
    for one, other in zip(out, wanted, strict=True):
        assert one.signals.state.tolist() == other.signals.state.tolist()
        assert one.signals.failure.tolist() == other.signals.failure.tolist()
        region, wanted_region = _region(case, one), _region(case, other)
        differ = (region != wanted_region).nonzero().flatten().tolist()
        assert not differ, f"rank {one.rank}: bytes {differ[:4]} of {_planes(one)}"


def _region(case: Case, window: CpuDeviceWindow) -> Tensor:
    """Of e4m3 a zero may lose its sign."""
    region = window.signals.regions[window.rank].cpu().clone()
    if case.payload == "fp8":
        first, nbytes = window.offset("values"), window.plane("values").numel()
        values = region[first : first + nbytes]
        values[values == 0x80] = 0
    return region


def _planes(window: CpuDeviceWindow) -> dict[str, int]:
    names = ("values", "scales", "ids", "weights", "results", "pairs")
    return {name: window.offset(name) for name in names}


def write_results(case: Case, windows: list[CpuDeviceWindow], seed: int) -> None:
    """Of rows and pairs that a rank has slots of; all others stay NaN."""
    for window in windows:
        generator = torch.Generator().manual_seed(1000 + 10 * seed + window.rank)
        has_RK = window.plane("ids").cpu() >= 0
        rows = has_RK.any(1)
        y_RH = torch.randn(len(rows), case.hidden, generator=generator).to(case.dtype)
        y_NH = torch.randn(has_RK.numel(), case.hidden, generator=generator).to(case.dtype)
        if case.everywhere:
            counts_R = torch.tensor(case.counts).repeat_interleave(case.rows)
            rows = torch.arange(case.rows).repeat(case.size) < counts_R
        _write(window.plane("results"), y_RH, rows)
        _write(window.plane("pairs"), y_NH, has_RK.flatten())


def _write(plane: Tensor, values: Tensor, mask: Tensor) -> None:
    plane[mask.to(plane.device)] = values[mask].to(plane.device)


def oracle(
    case: Case, windows: list[CpuDeviceWindow], rank: int, tokens: LocalTokens, pairs: bool
) -> Tensor:
    """In float64, pair by pair."""
    out_TH = torch.zeros(case.counts[rank], case.hidden, dtype=torch.float64)
    for token in range(case.counts[rank]):
        ids = tokens.ids_TK[token].tolist()
        groups = {slot // case.slots for slot in ids if slot >= 0}
        row = rank * case.rows + token
        for peer, window in enumerate(windows):
            if not pairs and (case.everywhere or peer // case.width in groups):
                out_TH[token] += window.plane("results")[row].double()
            for k, slot in enumerate(ids if pairs else ()):
                if slot >= 0 and slot // case.slots == peer // case.width:
                    y_H = window.plane("pairs")[row * case.top_k + k].double()
                    out_TH[token] += y_H * float(tokens.weights_TK[token, k])
    return out_TH
