"""`ascend_fuseep` of a GPU between ranks, by the torch twins of its kernels: rows are read where
their ranks keep them.

T tokens · H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.launch.local_ranks import LocalRanks
from moesaic.core.step import Step
from moesaic.moe.dispatch.ascend_fuseep import DeviceFusedRows, DeviceFuseEP, DevicePending
from moesaic.moe.formats import StandardDispatchOutput
from moesaic.moe.runner.base import RunContext
from moesaic.moe.runner.device.sorted_pairs import pre_permute_pairs
from tests.distributed.conformance import check_all
from tests.distributed.moe_ranks import EXPERTS, HIDDEN, MOST, TOP_K, Combination
from tests.moe_oracle import random_topk

Pools = Callable[[int], LocalRanks]
PLAIN = Combination(
    "ascend_fuseep", "low_latency", "triton", "bf16", "bf16", "bf16", 2, 2, device="cuda"
)
FP8 = replace(PLAIN, weights="fp8_block")
COPIED = (
    replace(PLAIN, weights="int4_w4a16"),
    replace(PLAIN, weights="int8_w8a8", deterministic=True),
)
CHECKED = (
    PLAIN,
    FP8,
    replace(PLAIN, runner="cutlass"),
    replace(FP8, weights="fp8_channel", payload="fp16", deterministic=True),
    replace(PLAIN, weights="fp32", dtype="fp32", payload="bf16", ep=1),
    *COPIED,
)
THREE = (replace(PLAIN, tp=3, ep=3), replace(FP8, tp=3, ep=3, deterministic=True))


@pytest.mark.parametrize("chosen", [CHECKED, THREE], ids=["two ranks", "three ranks"])
def test_against_the_oracle(chosen: tuple[Combination, ...], pools: Pools) -> None:
    by_rank = pools(chosen[0].tp).run(check_all, list(chosen))
    told = [
        f"{combination}, rank {rank}: {text}"
        for rank, verdicts in enumerate(by_rank)
        for combination, verdict in zip(chosen, verdicts, strict=True)
        for text in verdict.complaints
    ]
    assert not told, "\n".join(told)
    assert all(verdict.error > 0 for verdicts in by_rank for verdict in verdicts)


def where_rows_are(group: RankGroup, combination: Combination, count: int) -> tuple[bool, bool]:
    """Of a step with so many tokens on each rank: whether its first product reads rows at other
    ranks, and whether this rank's plane holds none but its own."""
    layer = combination.layer(group)
    dispatcher = layer.dispatcher
    assert isinstance(dispatcher, DeviceFuseEP)
    x_TH = torch.randn(count, HIDDEN).to(layer.context.dtype)
    topk = random_topk(count, EXPERTS, TOP_K, seed=group.rank)
    pending: DevicePending = dispatcher.dispatch(x_TH, topk, Step(False, rows=count)).handle
    carrier = pending.dispatcher.rows
    assert isinstance(carrier, DeviceFusedRows)
    received = carrier._dispatch_b(pending.sent)
    assert isinstance(received, StandardDispatchOutput)
    runner = layer.runner
    context = RunContext(runner.config, runner.core, layer.weights, layer.context.workspace)
    inputs = pre_permute_pairs(received, context)
    far = received.remote
    assert far is not None and far.count == count
    plane = carrier.exchange.window.plane("values 0")
    stays = len(plane) == carrier.config.max_decode_tokens
    if plane.dtype == x_TH.dtype:
        stays = stays and torch.equal(plane[:count], x_TH)
    return inputs.x.remote is not None, stays


@pytest.mark.parametrize(
    "combination, count, is_far",
    [(PLAIN, 5, True), (FP8, 5, True), (PLAIN, MOST, False), *((c, 5, False) for c in COPIED)],
    ids=str,
)
def test_rows_stay_where_they_are(
    combination: Combination, count: int, is_far: bool, pools: Pools
) -> None:
    """In small steps, of weights whose kernels take rows from anywhere."""
    assert pools(2).run(where_rows_are, combination, count) == [(is_far, True)] * 2


def test_weights_in_fp8_take_rows_of_half_the_bytes() -> None:
    """What others read has been quantised once, by their rank."""
    specs = []
    for combination in (PLAIN, FP8):
        context = combination.context(RankGroup.alone())
        config = context.dispatch_config(context.layout(EXPERTS), TOP_K, HIDDEN, layer=0)
        specs.append(DeviceFusedRows.buffer_spec(config))
    assert [spec.payload for spec in specs] == ["bf16", "fp8"]
    assert all(spec.home_rows == MOST and spec.rows == 2 * MOST for spec in specs)
    nbytes = [sum(plane.nbytes for plane in spec.planes()) for spec in specs]
    rows = 2 * MOST  # of two lanes
    assert nbytes[0] - nbytes[1] == rows * (HIDDEN * 2 - (HIDDEN + HIDDEN // 128 * 4))
