"""One token's bad numbers stay its own, and a step that was abandoned leaves no trace."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from moesaic.comm.collectives.collective import WindowCollective
from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.collectives.pipeline import Pipe, PipeSpec
from moesaic.comm.launch.local_ranks import LocalRanks
from moesaic.comm.lifecycle import Membership
from moesaic.comm.supervise.control_page import ControlPage, StepRolledBack
from moesaic.core.step import Step
from tests.distributed.conformance import covering
from tests.distributed.moe_ranks import DTYPES, Case, Combination
from tests.distributed.nodes import TWO, on_nodes

Pools = Callable[[int], LocalRanks]
CASE = Case("poison", (9, 0, 40, 3), Step(prefill=False))
ROW = 2
BAD = (torch.nan, torch.inf, -torch.inf)
ROUNDS = 24
# Every backend and mode, every payload with scales.
SOME = [
    Combination("none", "normal", "cutlass", "fp8", "fp16", "fp16", 4, 1, True),
    Combination("none", "replicated", "cutlass", "fp8", "fp8_channel", "fp32", 4, 1),
    Combination("deepep", "normal", "triton", "fp8", "int4_w4a16", "fp16", 4, 4, True),
    Combination("deepep", "auto", "triton", "int8", "int4_w4a16", "bf16", 4, 2),
    Combination("deepep", "low_latency", "triton_kernel", "mxfp4", "int8_w8a16", "fp32", 4, 4),
    Combination("mooncake", "low_latency", "deep_gemm", "bf16", "fp8_block", "fp32", 4, 4),
    Combination("mori", "normal", "cutlass", "fp8", "fp16", "fp16", 4, 2),
    Combination("flashinfer", "normal", "flashinfer_cutlass", "nvfp4", "nvfp4", "fp32", 4, 4),
    Combination("ascend_fuseep", "low_latency", "triton", "bf16", "int8_w8a8", "bf16", 4, 4),
]


def spread(group: RankGroup, combinations: list[Combination]) -> list[str]:
    """In which combinations rows beside a bad one change; the bad one is on rank 2."""
    found = []
    for combination in combinations:
        layer = combination.layer(group)
        source = 2 if combination.replicated else group.rank
        x_TH, topk = CASE.tokens(source, DTYPES[combination.dtype])
        wanted = layer(x_TH, topk, CASE.step)
        others = torch.arange(len(x_TH)) != ROW if source == 2 else slice(None)
        for value in BAD:
            poisoned = x_TH.clone()
            if source == 2:
                poisoned[ROW, 5] = value
            y_TH = layer(poisoned, topk, CASE.step)
            if not torch.equal(y_TH[others], wanted[others]):
                found.append(f"{combination}: {value} spreads")
            if value is torch.nan and source == 2 and bool(y_TH[ROW].isfinite().any()):
                found.append(f"{combination}: {value} is lost")
        group.barrier("next")
    return found


def test_bad_numbers_stay_in_their_row(pools: Pools):
    assert {c.a2a for c in SOME} == {
        *("none", "deepep", "mooncake", "mori", "flashinfer", "ascend_fuseep"),
    }
    assert pools(4).run(spread, SOME) == [[]] * 4


@pytest.mark.slow
def test_bad_numbers_stay_in_their_row_in_all_combinations(pools: Pools):
    combinations = [c for c in covering() if c.tp == 4]
    assert pools(4).run(spread, combinations) == [[]] * 4


class BreaksOffError(Exception):
    """On purpose."""


class Work:
    """What ranks do together, over and over; a rank may break off at a place of its choice."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self.comm = WindowCollective(group, 512, 30.0)
        spec = PipeSpec(8, 16, torch.float32, message_bytes=64, depth=2)
        self.pipe = Pipe(group, spec, 30.0)

    def do(self, key: int, breaks_off: int | None) -> None:
        parts = (self.gather, self.sum, self.pass_on, self.pass_on)
        for place, part in enumerate(parts):
            if place == breaks_off:
                raise BreaksOffError
            part(10 * key + place)

    def gather(self, key: int) -> None:
        rank, size = self.group.rank, self.group.size
        rows = [tensor_of(key + 1000 * peer, 3) for peer in range(size)]
        assert torch.equal(self.comm.gather_rows(rows[rank], [3] * size, "gather"), torch.cat(rows))

    def sum(self, key: int) -> None:
        """In several pieces."""
        rank, size = self.group.rank, self.group.size
        parts = [tensor_of(key + 1000 * peer, 40) for peer in range(size)]
        assert torch.equal(self.comm.all_reduce(parts[rank], "sum"), sum(parts))

    def pass_on(self, key: int) -> None:
        """Through all stages and back; each adds one."""
        pipe, x_TH, text = self.pipe, tensor_of(key, key % 9), str(key).encode() * (key % 40 + 1)
        if pipe.is_first:
            pipe.send(text, x_TH)
            assert pipe.take_reply() == text[::-1]
            return
        told, received = pipe.receive()
        assert told == text and torch.equal(received, x_TH + pipe.rank - 1)
        if pipe.is_last:
            pipe.reply(told[::-1])
        else:
            pipe.send(told, received + 1)


def tensor_of(key: int, rows: int) -> torch.Tensor:
    """Of whole numbers: sums of them are exact."""
    return torch.randint(-99, 99, (rows, 16), generator=torch.Generator().manual_seed(key)).float()


def broken_off(group: RankGroup, path: str, nodes: tuple[int, ...]) -> int:
    """Now and then a rank breaks off: all are called back, begin again in the next generation, and
    must get what is right. How many generations it took."""
    page = ControlPage.open(path, num_ranks=4)
    with on_nodes(group, nodes) if nodes else nullcontext():
        group.status = status = page.status(group.rank)
        try:
            work = Work(group)
            for number in range(ROUNDS):
                chance = random.Random(number)
                victim, last = chance.randrange(group.size), chance.randrange(4)
                place = chance.randrange(4) if victim == group.rank else None
                try:
                    # The others go on until they are called back, which may be in the next one.
                    for turn in range(last + 2):
                        work.do(100 * number + turn, place if turn == last else None)
                except BreaksOffError:
                    for rank in range(group.size):
                        page.roll_back(rank, number + 1)
                except StepRolledBack as recalled:
                    assert recalled.generation == number + 1
                status.generation = number + 1
                group.barrier("all have abandoned it")
                group.lifecycle.restart(Membership(status.generation, group.members))
            group.barrier("end")
        finally:
            group.status = None
    return status.generation


@pytest.mark.parametrize("nodes", [(), TWO], ids=["one node", "two nodes"])
def test_nothing_of_an_abandoned_step_is_taken_for_new(pools: Pools, nodes: tuple[int, ...]):
    page, descriptor = ControlPage.create(num_ranks=4)
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    assert pools(4).run(broken_off, path, nodes) == [ROUNDS] * 4
    assert page.epoch == 1
    os.close(descriptor)
