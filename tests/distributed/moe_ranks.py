"""What the tests of MoE layers share: combinations, cases, poison, and layers on ranks.

T tokens · K chosen · H hidden · E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import lcm
from typing import Any

import torch
from torch import Tensor

from moesaic.comm.collectives.collective import Collective
from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.launch.local_ranks import LocalRanks
from moesaic.core.overlap import Overlap
from moesaic.core.step import Step
from moesaic.moe.context import MoeContext
from moesaic.moe.dispatch.device.exchange import DeviceExchange
from moesaic.moe.dispatch.device.side_streams import SideStreams
from moesaic.moe.dispatch.host.exchange import LANES, Exchange, Lanes
from moesaic.moe.formats import TopKOutput
from moesaic.moe.layer import FusedMoE
from moesaic.moe.quant.payload import PAYLOAD_FORMATS
from moesaic.moe.quant.weights import WEIGHT_FORMATS
from moesaic.moe.registry import MoeProblem
from moesaic.moe.runner.base import Workspace
from tests.moe_bounds import Numerics
from tests.moe_oracle import Experts, config_of, random_topk

EXPERTS, HIDDEN, TOP_K = 12, 128, 3
INNER = 128  # of each rank that shares an expert: the blocks of every format fit
MOST = 257
# Every dispatcher as it is registered, with the modes that it has.
A2A = (
    ("none", "normal"),
    ("none", "replicated"),
    ("deepep", "normal"),
    ("deepep", "low_latency"),
    ("deepep", "auto"),
    ("mooncake", "low_latency"),
    ("mori", "normal"),
    ("flashinfer", "normal"),
    ("ascend_fuseep", "low_latency"),
)
# Every backend as --moe-a2a-backend and --deepep-mode name it.
A2A_FLAGS = (
    ("none", "auto"),
    ("deepep", "normal"),
    ("deepep", "low_latency"),
    ("deepep", "auto"),
    ("mori", "normal"),
    ("mooncake", "low_latency"),
    ("flashinfer", "auto"),
    ("ascend_fuseep", "auto"),
)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PEER_SECONDS = 20.0
# Only ends a run that hangs, and after the time limit of most tests.
POOL_SECONDS = 280.0


@dataclass(frozen=True)
class Combination:
    """`mode` replicated: all ranks bring the same tokens (a2a `none` only). `device`: whose
    providers; without a GPU those of CUDA compute on CPU, by the twins of their kernels."""

    a2a: str
    mode: str
    runner: str
    payload: str
    weights: str
    dtype: str
    tp: int
    ep: int
    deterministic: bool = False
    device: str = "cpu"

    def __str__(self) -> str:
        parts = (self.a2a, self.mode, self.runner, self.payload, self.weights, self.dtype)
        bits = "-bits" if self.deterministic else ""
        device = "" if self.device == "cpu" else f"-{self.device}"
        return "-".join(parts) + f"-ep{self.ep}of{self.tp}{bits}{device}"

    @property
    def replicated(self) -> bool:
        return self.mode == "replicated"

    @property
    def problem(self) -> MoeProblem:
        return MoeProblem(
            a2a=self.a2a,
            mode="normal" if self.replicated else self.mode,
            runner=self.runner,
            payload=self.payload,
            weights=WEIGHT_FORMATS[self.weights],
            dtype=self.dtype,
            ep=self.ep,
            tp=self.tp,
            phases=("decode",),
            device=self.device,
            hidden_size=HIDDEN,
            intermediate_size=INNER * (self.tp // self.ep),
        )

    @property
    def numerics(self) -> Numerics:
        weights = WEIGHT_FORMATS[self.weights]
        return Numerics(
            weights=weights,
            payload=PAYLOAD_FORMATS[self.payload],
            activation=PAYLOAD_FORMATS[weights.activation] if weights.activation else None,
            dtype=DTYPES[self.dtype],
            ep=self.ep,
            moe_tp=self.tp // self.ep,
        )

    def context(self, group: RankGroup, **options: Any) -> MoeContext:
        # On a GPU ranks may wait for others that compile.
        timeout = 10.0 if self.where == "cpu" else 60.0
        options = {"max_tokens": MOST, "max_decode_tokens": MOST, "timeout": timeout} | options
        context = MoeContext.make(
            self.problem,
            DTYPES[self.dtype],
            group,
            deterministic=self.deterministic,
            replicated=self.replicated,
            **options,
        )
        return replace(context, workspace=Workspace(self.where))

    @property
    def where(self) -> str:
        """The device that computes."""
        return "cuda" if self.device == "cuda" and torch.cuda.is_available() else "cpu"

    @property
    def experts(self) -> Experts:
        return experts_for(self.tp // self.ep, num_experts(self.ep))

    def layer(self, group: RankGroup, **options: Any) -> FusedMoE:
        experts = self.experts
        with torch.device(self.where):
            layer = FusedMoE(config_of(experts, TOP_K), self.context(group, **options))
        experts.fill(layer)
        return layer


def num_experts(ep: int) -> int:
    """12 where they can be laid evenly on so many groups, else as many more."""
    return lcm(EXPERTS, ep)


@lru_cache
def experts_for(moe_tp: int, number: int = EXPERTS) -> Experts:
    return Experts.random(number, HIDDEN, INNER * moe_tp, seed=moe_tp)


@dataclass(frozen=True)
class Case:
    """Tokens of one step. `experts`: those that may be chosen; `first`: what all choose first."""

    name: str
    counts: tuple[int, ...]
    step: Step
    experts: range = range(EXPERTS)
    first: int | None = None
    masked: bool = False

    def tokens(self, rank: int, dtype: torch.dtype) -> tuple[Tensor, TopKOutput]:
        seed = 1000 * sum(map(ord, self.name)) + rank
        count = self.counts[rank]
        generator = torch.Generator().manual_seed(seed)
        x_TH = torch.randn(count, HIDDEN, generator=generator).to(dtype)
        topk = random_topk(count, len(self.experts), TOP_K, seed)
        ids_TK = topk.ids_TK + self.experts.start
        if self.first is not None:
            ids_TK = torch.where(ids_TK == self.first, ids_TK[:, :1], ids_TK)
            ids_TK[:, 0] = self.first
        if self.masked:
            ids_TK[torch.rand(count, TOP_K, generator=generator) < 0.3] = -1
            ids_TK[::7] = -1
        return x_TH, TopKOutput(ids_TK, topk.weights_TK)


def step(prefill: bool, lane: int, counts: tuple[int, ...]) -> Step:
    """The second lane of those that overlap."""
    overlap = Overlap.TBO if lane else Overlap.OFF
    return Step(prefill, lane, rows=max(counts), overlap=overlap)


def cases_for(tp: int, ep: int, replicated: bool = False) -> list[Case]:
    """Both lanes and both kinds of steps; every one of 0, 1, 63 and 257 tokens on some rank."""
    turns = [(257, 0, 63, 1), (1, 63, 0, 5), (63,), (0,)]
    chosen = turns if tp == 1 else turns[:2]
    number = num_experts(ep)
    every, others = range(number), range(number - (number // ep if ep > 1 else 1))
    cases = []
    for i, turn in enumerate(chosen):
        counts = (turn * tp)[:tp]
        now = step(i % 2 == 0, i % 2, counts)
        cases.append(Case(f"uneven {counts}", counts, now, every, masked=i % 2 == 1))
    cases += [
        Case("one expert takes all", (40,) * tp, step(False, 0, (40,)), every, first=number - 1),
        Case("the last rank takes none", (9,) * tp, step(True, 1, (9,)), others),
        Case("nobody has tokens", (0,) * tp, step(False, 1, (0,)), every),
        Case("masked", (33,) * tp, step(True, 0, (33,)), every, masked=True),
    ]
    if not replicated:
        return cases
    return [replace(case, counts=(max(case.counts),) * tp) for case in cases]


def slots_of(layer: FusedMoE, ids_TK: Tensor, step: Step) -> Tensor:
    """The slots of experts in this step, by the layer's choice among replicas."""
    return (layer.split_of(step) or layer.slot_map)(ids_TK)


def poison(context: MoeContext) -> None:
    """NaN in every buffer of this rank, also in what scales and weights travel in. Ids name real
    experts and counts are huge: what is stale and yet used shows."""
    for name, tensor in _buffers(context):
        plane = name.split()[0]
        if plane == "ids":
            tensor.fill_(1)
        elif plane in ("counts", "bases", "tags"):
            tensor.fill_(1 << 30)
        elif tensor.dtype.itemsize == 1:
            tensor.view(torch.uint8).fill_(0xFF)
        else:
            tensor.fill_(torch.nan)


def _buffers(context: MoeContext) -> Iterator[tuple[str, Tensor]]:
    for buffer in context.comm.buffers.values():
        if isinstance(buffer, Collective | SideStreams):
            continue
        assert isinstance(buffer, Lanes | DeviceExchange)
        own = buffer.window._own if isinstance(buffer, Lanes) else buffer.window._specs
        for name in own:
            yield name, buffer.window.plane(name)
        if isinstance(buffer, Exchange) and buffer.spec.inbox_rows:
            for inbox in map(buffer.inbox, range(LANES)):
                yield from inbox.items()
    for tensor in context.workspace._buffers.values():
        yield "workspace", tensor


def poison_all(group: RankGroup, context: MoeContext) -> None:
    """Nobody may still read, and nobody may write before all are done."""
    settle(context)
    group.barrier("before poison")
    poison(context)
    settle(context)
    group.barrier("after poison")


def settle(context: MoeContext) -> None:
    """What this rank has begun is done."""
    if context.workspace.device.type == "cuda":
        torch.cuda.synchronize()


Pools = Callable[[int], LocalRanks]


def rank_pools() -> Iterator[Pools]:
    """pools(n): n ranks, made when first asked for, all closed at the end."""
    made: dict[int, LocalRanks] = {}

    def pool(size: int) -> LocalRanks:
        if size not in made:
            made[size] = LocalRanks(size, timeout=POOL_SECONDS)
        return made[size]

    yield pool
    for ranks in made.values():
        ranks.close()
