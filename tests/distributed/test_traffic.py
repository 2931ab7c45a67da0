"""What each dispatcher moves, to the byte, against counts taken from the ids by plain loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import pytest
import torch

from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.launch.local_ranks import LocalRanks
from moesaic.core.stats import TrafficStats
from moesaic.core.step import Step
from moesaic.moe.context import MoeContext
from moesaic.moe.formats import TopKOutput
from moesaic.moe.layer import FusedMoE
from moesaic.moe.quant.weights import WEIGHT_FORMATS
from moesaic.moe.registry import MoeProblem
from tests.distributed.moe_ranks import DTYPES
from tests.moe_oracle import Experts, config_of, random_topk

EXPERTS, HIDDEN, INNER, TOP_K, STEPS = 12, 160, 64, 3, 2
COUNTS = (13, 0, 30, 6)
# Bytes of a row: values, and scales per 128 channels, per token, per 16 and per 32.
ROW_BYTES = {
    "bf16": 160 * 2,
    "fp16": 160 * 2,
    "fp32": 160 * 4,
    "fp8": 160 + 2 * 4,
    "int8": 160 + 4,
    "nvfp4": 80 + 10,
    "mxfp4": 80 + 5,
}
Ids = list[list[int]]


@dataclass(frozen=True)
class Setting:
    a2a: str
    mode: str = "auto"
    payload: str = "bf16"
    dtype: str = "bf16"
    tp: int = 4
    ep: int = 4
    deterministic: bool = False
    replicated: bool = False

    @property
    def width(self) -> int:
        return self.tp // self.ep

    def group_of(self, expert: int) -> int:
        return expert // (EXPERTS // self.ep)

    def ranks_of(self, group: int) -> range:
        return range(group * self.width, (group + 1) * self.width)


def ids_of(rank: int, replicated: bool) -> tuple[torch.Tensor, TopKOutput]:
    count = COUNTS[2] if replicated else COUNTS[rank]
    seed = 0 if replicated else rank
    topk = random_topk(count, EXPERTS, TOP_K, seed)
    topk.ids_TK[::5, 1] = -1
    topk.ids_TK[::9] = -1
    x_TH = torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return x_TH, topk


def moved(group: RankGroup, settings: list[Setting]) -> list[dict[str, dict[str, int]]]:
    """The counters of this rank after some steps, for each setting."""
    experts = Experts.random(EXPERTS, HIDDEN, INNER)
    found = []
    for setting in settings:
        problem = MoeProblem(
            a2a=setting.a2a,
            mode=setting.mode,
            payload=setting.payload,
            weights=WEIGHT_FORMATS[setting.dtype],
            dtype=setting.dtype,
            tp=setting.tp,
            ep=setting.ep,
            phases=("decode",),
        )
        context = MoeContext.make(
            problem,
            DTYPES[setting.dtype],
            group,
            timeout=20.0,
            max_tokens=64,
            max_decode_tokens=64,
            deterministic=setting.deterministic,
            replicated=setting.replicated,
        )
        layer = FusedMoE(config_of(experts, TOP_K), context)
        experts.fill(layer)
        x_TH, topk = ids_of(group.rank, setting.replicated)
        for number in range(STEPS):
            layer(x_TH.to(context.dtype), topk, Step(prefill=number == 0, lane=number % 2))
        found.append({name: counted(moved) for name, moved in context.comm.traffic.items()})
    return found


def counted(traffic: TrafficStats) -> dict[str, int]:
    """Without the times."""
    found = msgspec.structs.asdict(traffic)
    return {name: value for name, value in found.items() if not name.endswith("_seconds")}


def tokens_of(setting: Setting, rank: int) -> Ids:
    return ids_of(rank, setting.replicated)[1].ids_TK.tolist()


def groups_of(setting: Setting, token: list[int]) -> set[int]:
    return {setting.group_of(expert) for expert in token if expert >= 0}


def dispatched(setting: Setting, rank: int) -> int:
    """Rows that come to a rank from others in one step; for flashinfer, that it puts there."""
    if setting.replicated:
        return 0
    if setting.a2a == "flashinfer":
        return once_per_rank_back(setting, rank)
    own_group = rank // setting.width
    rows = 0
    for source in range(setting.tp):
        for token in tokens_of(setting, source):
            if source == rank:
                continue
            pairs = [e for e in token if e >= 0 and setting.group_of(e) == own_group]
            if setting.a2a == "none":
                rows += 1
            elif by_rank(setting):
                rows += bool(pairs)
            else:
                rows += len(pairs)
    return rows


def by_rank(setting: Setting) -> bool:
    return setting.a2a in ("mori", "flashinfer") or setting.mode == "normal"


def once_per_rank_back(setting: Setting, rank: int) -> int:
    """Other ranks that a rank's tokens have anything to do with, summed over tokens."""
    return sum(
        target != rank
        for token in tokens_of(setting, rank)
        for group in groups_of(setting, token)
        for target in setting.ranks_of(group)
    )


def combined(setting: Setting, rank: int) -> int:
    """Rows of results that a rank gets from others in one step."""
    tokens = tokens_of(setting, rank)
    pairs = sum(
        target != rank
        for token in tokens
        for expert in token
        if expert >= 0
        for target in setting.ranks_of(setting.group_of(expert))
    )
    if setting.deterministic:
        return pairs
    if setting.a2a == "none":
        return len(tokens) * (setting.tp - 1)
    return once_per_rank_back(setting, rank) if by_rank(setting) else pairs


NAMES = {("deepep", "normal"): "deepep_normal", ("deepep", "low_latency"): "deepep_low_latency"}
A2A = (
    ("none", "normal"),
    ("deepep", "normal"),
    ("deepep", "low_latency"),
    ("mooncake", "low_latency"),
    ("mori", "normal"),
    ("flashinfer", "normal"),
    ("ascend_fuseep", "low_latency"),
)


def check(pool: LocalRanks, settings: list[Setting]) -> None:
    by_rank_found = pool.run(moved, settings)
    for number, setting in enumerate(settings):
        name = NAMES.get((setting.a2a, setting.mode), setting.a2a)
        for rank, found in enumerate(by_rank_found):
            rows, back = STEPS * dispatched(setting, rank), STEPS * combined(setting, rank)
            item = DTYPES[setting.dtype].itemsize
            assert found[number][name] == {
                "dispatch_rows": rows,
                "dispatch_bytes": rows * ROW_BYTES[setting.payload],
                "combine_rows": back,
                "combine_bytes": back * HIDDEN * item,
                "dispatches": STEPS,
                "combines": STEPS,
            }, (setting, rank)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("ep", [4, 2, 1])
def test_bytes_of_every_dispatcher(
    ep: int, deterministic: bool, pools: Callable[[int], LocalRanks]
):
    settings = [Setting(a2a, mode, ep=ep, deterministic=deterministic) for a2a, mode in A2A]
    check(pools(4), settings)


def test_bytes_follow_the_payload(pools: Callable[[int], LocalRanks]):
    settings = [
        Setting(a2a, mode, payload, dtype)
        for a2a, mode in A2A
        for payload, dtype in [*((name, "bf16") for name in ROW_BYTES), ("fp32", "fp32")]
        if (a2a, payload) != ("mori", "nvfp4")
        and (a2a != "ascend_fuseep" or payload in ("bf16", "fp16", "fp32"))
    ]
    check(pools(4), settings)


@pytest.mark.parametrize("deterministic", [False, True])
def test_replicated_tokens_do_not_travel(deterministic: bool, pools: Callable[[int], LocalRanks]):
    settings = [
        Setting("none", "normal", ep=ep, replicated=True, deterministic=deterministic)
        for ep in (4, 2, 1)
    ]
    check(pools(4), settings)


def test_counts_of_the_oracle():
    """Three tokens of rank 0 by hand, on two ranks of six experts: the loops above can be wrong."""
    setting = Setting("deepep", "normal", tp=2, ep=2)
    assert [setting.group_of(e) for e in (0, 5, 6, 11)] == [0, 0, 1, 1]
    assert groups_of(setting, [0, 5, -1]) == {0} and groups_of(setting, [-1, -1, -1]) == set()
    ids = tokens_of(setting, 0)
    assert once_per_rank_back(setting, 0) == sum(any(e >= 6 for e in token) for token in ids)
    low_latency = Setting("deepep", "low_latency", tp=2, ep=2)
    assert combined(low_latency, 0) == sum(e >= 6 for token in ids for e in token)
    assert combined(low_latency, 0) > combined(setting, 0) > 0


def test_one_rank_moves_nothing(pools: Callable[[int], LocalRanks]):
    settings = [Setting(a2a, mode, tp=1, ep=1) for a2a, mode in A2A]
    for found in pools(1).run(moved, settings)[0]:
        for traffic in found.values():
            rows = {name: value for name, value in traffic.items() if name.endswith("_rows")}
            assert rows == {"dispatch_rows": 0, "combine_rows": 0}
            assert traffic["dispatches"] == STEPS


def test_auto_counts_each_mode(pools: Callable[[int], LocalRanks]):
    """One step prefills, the next does not."""
    for found in pools(4).run(moved, [Setting("deepep", "auto")]):
        counted = {name: traffic["dispatches"] for name, traffic in found[0].items()}
        assert counted == {"deepep_normal": 1, "deepep_low_latency": 1}
