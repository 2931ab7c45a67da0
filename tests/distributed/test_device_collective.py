"""Collectives of ranks on GPUs, as far as they can be had without one: the kernels' twins between
processes, and what surrounds NCCL over gloo."""

from __future__ import annotations

import os
import random
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from moesaic.comm.collectives import nccl_collective, nccl_errors
from moesaic.comm.collectives.collective import PartsDiffer, SingleRank
from moesaic.comm.collectives.device_collective import (
    DeviceCollective,
    device_collective,
    lanes_of,
)
from moesaic.comm.collectives.group import LOOPBACK, RankGroup, _gloo
from moesaic.comm.collectives.nccl_collective import NcclCollective
from moesaic.comm.errors import ConnectionLost, PeerTimeout, RankFailed, WindowAborted
from moesaic.comm.launch.mps import CROWD
from moesaic.comm.lifecycle import Membership
from moesaic.comm.mesh import Mesh
from moesaic.comm.supervise.control_page import ControlPage, StepRolledBack
from moesaic.comm.windows.device_window import CpuDeviceWindow
from moesaic.config.gpus import MAX_MPS_CLIENTS, processor_percent
from moesaic.engine.runner.graphs import GraphKey
from moesaic.engine.runner.peer_watchdog import PeerWatchdog
from moesaic.engine.setup.memory_plan import collective_bytes
from moesaic.engine.setup.moe_setup import StepLimits
from moesaic.engine.setup.rank_context import RankContext
from moesaic.kernels.a2a import DeviceStateWord
from tests.distributed.moe_ranks import Pools
from tests.distributed.test_collective import (
    DTYPES,
    LARGE,
    SECONDS,
    SMALL,
    check_columns,
    check_rows,
    check_sum,
    one_operation,
    part,
    run_every_operation,
    total,
)
from tests.e2e.test_gpu_runner import arguments, asynchronous, steps_of

PIECE = 16 * 1024
CPU = torch.device("cpu")


def small(group: RankGroup, nbytes: int) -> DeviceCollective:
    """Much goes in pieces."""
    specs = DeviceCollective.planes(group.size, nbytes, 2, 2048)
    window = CpuDeviceWindow.create(group, specs, SECONDS, DeviceCollective.channels(2))
    return DeviceCollective(window, nbytes, 2, 2048)


def large(group: RankGroup, timeout: float = SECONDS) -> DeviceCollective:
    return DeviceCollective.create(group, LARGE, timeout, CPU)


def every_operation(group: RankGroup, nbytes: int) -> int:
    comm = large(group) if nbytes == LARGE else small(group, nbytes)
    count = run_every_operation(comm, nbytes)
    comm.close()
    comm.close()
    return count


@pytest.mark.parametrize("size, nbytes", [(3, PIECE), (2, LARGE)])
def test_every_operation(size: int, nbytes: int, pools: Pools) -> None:
    assert pools(size).run(every_operation, nbytes) == [11 * len(DTYPES)] * size


def random_operations(group: RankGroup, count: int) -> list[int]:
    """Small and large ones in turn, and ranks that are late now and then."""
    comm = small(group, PIECE)
    chance, own = random.Random(6), random.Random(group.rank)
    for seed in range(count):
        if own.random() < 0.2:
            time.sleep(own.random() * 0.005)
        one_operation(comm, chance, seed)
    return comm.window.signals.state.tolist()


def test_random_operations_in_a_row(pools: Pools) -> None:
    states = pools(3).run(random_operations, 40)
    assert states == [states[0]] * 3
    first, _, second, _, posts, others = states[0][DeviceStateWord.CHANNELS :: 2]
    assert first > second > 0 and abs(posts - others) <= 1 and posts > 10


def restarted(group: RankGroup) -> list[str]:
    """A sum that a rank does not come to, another one that is not the same, and then good ones."""
    comm = large(group, 0.5)
    found = []
    check_sum(comm, 0, (2, 8), torch.float32, slice(None))
    group.barrier("one sum")
    try:
        if comm.rank != 1:
            comm.sum_rows(torch.ones(4, 8), slice(0, 0), "layer 3, dense sum")
    except PeerTimeout as error:
        found.append(str(error))
    for generation in (1, 2):
        group.barrier("abandoned")
        comm.restart(Membership(generation, tuple(range(comm.size))))
        group.barrier("restarted")
        check_sum(comm, 1, (2, 8), torch.float32, slice(None))
        check_rows(comm, 2, [1, 0, 5], 7, torch.uint8)
        if generation == 1:
            try:
                comm.sum_rows(torch.ones(3 if comm.rank == 1 else 2, 8), slice(None), "layer 4")
            except (PartsDiffer, PeerTimeout) as error:
                found.append(f"{type(error).__name__} {error}")
    check_columns(comm, 3, 5, [2, 2, 2], torch.bfloat16, slice(1, 4))
    return found


def test_what_went_wrong_is_said_and_forgotten(pools: Pools) -> None:
    """Ranks whose parts differ do not go on, and who waits for them hears of it or times out."""
    found = pools(3).run(restarted)
    sums = "layer 3, dense sum (sum_rows float32 32)"
    missing = f"rank 1 did not reach '{sums}' within 0.5 s (not seen before)"
    assert [texts[0] for texts in (found[0], found[2])] == [missing] * 2
    assert [len(texts) for texts in found] == [2, 1, 2]
    told = [texts[-1] for texts in found]
    parts = ("sum_rows float32 16", "sum_rows float32 24")
    differ = [
        f"PartsDiffer layer 4: rank {1 if mine == 0 else 0} is in another operation, this rank "
        f"({rank}) in {parts[mine]}"
        for rank, mine in ((0, 0), (1, 1), (2, 0))
    ]
    assert any(text == want for text, want in zip(told, differ, strict=True)), (told, differ)
    for text in told:
        assert text in differ or text.startswith("PeerTimeout rank"), text


class OverGloo(NcclCollective):
    """All of it but NCCL."""

    error = ""

    def _error(self) -> str:
        return self.error

    def _form(self, store: Store) -> Any:
        return _gloo(store, self.rank, self.size, SECONDS, LOOPBACK)


def over_gloo(group: RankGroup) -> int:
    comm = OverGloo(group, SECONDS, CPU)
    uneven = [(7, 0, 3)[rank] for rank in range(comm.size)]
    for generation in (1, 2):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            check_rows(comm, 2, uneven, 70, dtype)
            check_rows(comm, 3, [0] * comm.size, 70, dtype)
            check_rows(comm, 4, [2] * comm.size, 0, dtype)
            check_columns(comm, 5, 6, uneven, dtype, slice(1, 5))
            check_columns(comm, 6, 0, [9] * comm.size, dtype, slice(0, 0))
        check_sum(comm, 1, (9, 70), torch.int64, slice(comm.rank, comm.rank + 2))
        parts = [part(1, rank, (4, 8), torch.float32) for rank in range(comm.size)]
        found = comm.all_reduce(parts[comm.rank], "sum")
        assert torch.allclose(found, total(parts), atol=1e-5)
        assert comm.sum_rows(torch.ones(0, 8), slice(0, 0), "nothing").shape == (0, 8)
        group.barrier("abandoned")
        comm.restart(Membership(generation, tuple(range(comm.size))))
    return len(DTYPES)


def test_what_surrounds_nccl(pools: Pools) -> None:
    assert pools(3).run(over_gloo) == [len(DTYPES)] * 3


class Lost(OverGloo):
    """A network that loses everything from a time on."""

    is_lost = False

    def _form(self, store: Store) -> Any:
        return threading.Event().wait() if self.is_lost else super()._form(store)


def lost(group: RankGroup) -> list[str]:
    """What a rank is told whose connections are lost, and one that has just started."""
    comm, told = Lost(group, 1.0, CPU), []
    again = partial(comm.restart, Membership(1, tuple(range(comm.size))))
    Lost.is_lost = True
    with patch.object(nccl_collective, "CONNECT_SECONDS", 0.5):
        for connect in (again, partial(Lost, group, 1.0, CPU)):
            with pytest.raises(TimeoutError) as error:
                connect()
            told.append(str(error.value))
    Lost.is_lost = False
    return told


def test_ranks_that_nccl_does_not_connect_are_named(pools: Pools) -> None:
    """It tries for longer than anybody waits."""
    text = "NCCL has not connected rank 0 (127.0.0.1), rank 1 (127.0.0.1) within {} s: set NCCL_SO"
    for restarted, started in pools(2).run(lost):
        assert restarted.startswith(text.format("1.5")) and started.startswith(text.format("0.5"))


class LikeNccl:
    """gloo with the manners of NCCL on a GPU: an operation is queued and comes back, who wants the
    device idle waits for the queue, and `abort` ends what is in it but returns only when no graph
    holds the communicator.

    The abort is this class's own: gloo's ends nothing that is under way, and NCCL there is none
    without GPUs. So tests show when it is called and what then goes on, not that NCCL's works.
    """

    def __init__(self, gloo: Any) -> None:
        self._gloo, self._queue = gloo, list[Any]()
        self._told = threading.Event()
        self.graphs: dict[int, Any] = {}

    def allreduce(self, tensors: list[torch.Tensor]) -> LikeNccl:
        self._queue.append(self._gloo.allreduce(tensors))
        return self

    def wait(self) -> None:
        """For nothing, as streams do."""

    def synchronize(self) -> None:
        while self._queue and not self._told.wait(0.005):
            self._queue = [work for work in self._queue if not work.is_completed()]

    def abort(self) -> None:
        self._told.set()
        while self.graphs:
            time.sleep(0.005)


class Queued(OverGloo):
    def __init__(self, group: RankGroup, timeout: float) -> None:
        self.calls: list[str] = []
        super().__init__(group, timeout, CPU)

    def _form(self, store: Store) -> LikeNccl:
        self.error = ""  # of the communicator before
        self.queue = LikeNccl(_gloo(store, self.rank, self.size, SECONDS, LOOPBACK))
        return self.queue

    def abort(self, reason: str) -> None:
        self.calls.append("abandon")
        super().abort(reason)

    def synchronize(self, *_: object) -> None:
        self.calls.append("synchronize")
        self.queue.synchronize()

    def check_sum(self) -> None:
        found = self.all_reduce(torch.ones(4, 8), "sum")
        self.queue.synchronize()
        assert torch.equal(found, torch.full((4, 8), float(self.size)))
        self.check()

    def begin_alone(self) -> None:
        """A sum to which rank 1 does not come. What waits for the device then does not return."""
        if self.rank == 1:
            return
        self.all_reduce(torch.ones(4, 8), "layer 3, dense sum")
        waits = threading.Thread(target=self.queue.synchronize, daemon=True)
        waits.start()
        waits.join(0.5)
        assert waits.is_alive()


def abandoned(group: RankGroup) -> list[str]:
    """A runner whose device waits for a rank that never comes, and that holds a graph."""
    comm = Queued(group, 5.0)
    runner = asynchronous(arguments("qwen3_moe"))
    runner.watchdog = PeerWatchdog(group.lifecycle, None)
    runner.device = torch.device("cuda", 0)
    for generation in (1, 2):
        comm.check_sum()
        comm.begin_alone()
        comm.queue.graphs = graphs = steps_of(runner).graphs._graphs  # type: ignore[assignment]
        graphs[GraphKey(1)] = torch.nn.Identity()  # type: ignore[assignment]
        with (
            patch("torch.cuda.synchronize", comm.synchronize),
            patch("torch.cuda.empty_cache"),
        ):
            runner.abandon(f"step {generation} is abandoned")
        for use in (comm.check, comm.check_sum):
            with pytest.raises(WindowAborted, match=f"step {generation} is abandoned"):
                use()
        group.barrier("abandoned")
        comm.restart(Membership(generation, tuple(range(comm.size))))
    comm.check_sum()
    return comm.calls


def test_nccl_is_abandoned_before_the_device_is_waited_for(pools: Pools) -> None:
    """Also on the rank that did not come; the other one would wait until NCCL's own time is over,
    and so would all that wait for it to abandon its step."""
    calls = ["abandon", "synchronize", "abandon"]  # the last one by the restart, to no effect
    assert pools(2).run(abandoned) == [2 * calls] * 2


def called_back(group: RankGroup) -> float:
    """The supervisor calls while the device waits for a rank that never comes."""
    comm, page = Queued(group, 60.0), ControlPage.create(1)[0]
    status = page.status(0)
    watch = PeerWatchdog(group.lifecycle, status)
    comm.begin_alone()
    began = time.monotonic()
    threading.Timer(0.1, lambda: page.roll_back(0, 1)).start()
    comm.queue.synchronize()
    seconds = time.monotonic() - began
    until = time.monotonic() + 10.0
    while not comm.calls and time.monotonic() < until:
        time.sleep(0.005)
    with pytest.raises(WindowAborted, match="the supervisor rolls this rank back") as caught:
        watch.lifecycle.check()
    with pytest.raises(StepRolledBack):
        watch.raise_cause(caught.value)
    status.generation = 1
    group.barrier("abandoned")
    group.lifecycle.restart()
    comm.check_sum()
    return seconds


def test_nccl_is_abandoned_when_the_rank_is_called_back(pools: Pools) -> None:
    assert max(pools(2).run(called_back)) < 30.0  # the queue waits for 60 s


def cut_off(group: RankGroup) -> str:
    """NCCL notices that a connection is lost; its kernels wait on. Then all begin anew."""
    comm, page = Queued(group, 60.0), ControlPage.create(1)[0]
    watch = PeerWatchdog(group.lifecycle, page.status(0))
    comm.check_sum()
    comm.begin_alone()
    comm.error = "remote error: closed"
    comm.queue.synchronize()  # until the abort, where there is something to wait for
    until = time.monotonic() + 10.0
    while not comm.calls and time.monotonic() < until:
        time.sleep(0.005)
    with pytest.raises(WindowAborted) as told:
        watch.lifecycle.check()
    with pytest.raises(ConnectionLost):  # the supervisor does not know yet
        watch.raise_cause(told.value)
    assert comm.broken() == "", "it is known"
    group.barrier("all are told")
    comm.restart(Membership(1, tuple(range(comm.size))))
    comm.check_sum()
    return str(told.value)


def test_without_nccl(caplog: pytest.LogCaptureFixture) -> None:
    if "libnccl.so" in Path("/proc/self/maps").read_text():
        pytest.skip("torch has loaded it")
    nccl_errors._library.cache_clear()
    assert [nccl_errors.async_error(7) for _ in range(3)] == [""] * 3
    (told,) = caplog.messages
    assert told == "libnccl.so is not loaded: connections that it loses are not noticed"


def test_a_connection_that_nccl_has_lost(pools: Pools) -> None:
    assert pools(2).run(cut_off) == 2 * [
        "NCCL has failed between rank 0 (127.0.0.1), rank 1 (127.0.0.1): remote error: closed"
    ]


def held(group: RankGroup) -> str:
    """By a graph that nobody drops."""
    comm = Queued(group, 0.3)
    comm.queue.graphs[1] = "a graph"
    comm.abort("a step failed")
    with pytest.raises(TimeoutError) as error:
        comm.restart(Membership(1, tuple(range(comm.size))))
    comm.queue.graphs.clear()
    return str(error.value)


def failing(group: RankGroup) -> str:
    comm = Queued(group, 5.0)
    comm.queue.abort = lambda: 1 / 0  # type: ignore[assignment, method-assign]
    comm.abort("a step failed")
    with pytest.raises(ZeroDivisionError) as error:
        comm.restart(Membership(1, tuple(range(comm.size))))
    return str(error.value)


def test_a_communicator_that_does_not_end(pools: Pools) -> None:
    why = (
        "NCCL has not given up its communicator within 0.3 s: CUDA graphs may still hold "
        "operations of it"
    )
    assert pools(2).run(held) == [why] * 2
    assert pools(2).run(failing) == ["division by zero"] * 2


def test_what_is_chosen(pools: Pools) -> None:
    alone = RankGroup.alone()
    chosen = device_collective(alone, LARGE, 1.0, CPU, shares_gpu=True)
    assert isinstance(chosen, SingleRank)
    assert pools(2).run(chosen_kind) == ["DeviceCollective"] * 2
    with pytest.raises(RankFailed, match="0 bytes for a rank's part: give 1 or more"):
        pools(2).run(nothing)


def chosen_kind(group: RankGroup) -> str:
    comm = device_collective(group, LARGE, SECONDS, CPU, shares_gpu=True)
    assert isinstance(comm, DeviceCollective)
    assert comm.window.region_bytes == DeviceCollective.window_bytes(group.size, LARGE, CPU)
    crowded = DeviceCollective.create(group, LARGE, SECONDS, CPU, neighbours=8)
    told = DeviceCollective.window_bytes(group.size, LARGE, CPU, 8)
    assert crowded.window.region_bytes == told
    assert (crowded._planes.lanes, comm._planes.lanes) == (4, 32)
    return type(comm).__name__


def test_servers_on_one_daemon_leave_each_other_processors(pools: Pools) -> None:
    """A rank that may not be alone with its server's waits with one program."""
    assert pools(2).run(lanes_in_a_crowd) == [(32, 1)] * 2


def lanes_in_a_crowd(group: RankGroup) -> tuple[int, ...]:
    mesh, found = Mesh(tp=2), []
    context = RankContext(mesh=mesh, attention_peers=group)
    try:
        for crowd in (0, MAX_MPS_CLIENTS):
            os.environ[CROWD] = str(crowd)
            comm = context.computing_on(CPU, shares_gpu=True).on_device
            assert isinstance(comm, DeviceCollective)
            told = collective_bytes(mesh, StepLimits(64, 64), 64, torch.bfloat16, CPU)
            assert comm.window.region_bytes == told
            # As many as go in one kernel of one lane, one row more, and all that 32 lanes take.
            for rows in (16, 17, 64):
                x_TH = torch.full((rows, 2048), 1.0 + group.rank, dtype=torch.bfloat16)
                assert (comm.sum_rows(x_TH, slice(None), "crowd") == 3.0).all()
            found.append(comm._planes.lanes)
            comm.close()
    finally:
        del os.environ[CROWD]
    return tuple(found)


def nothing(group: RankGroup) -> None:
    DeviceCollective.create(group, 0, SECONDS, CPU)


def test_bytes_are_known_before() -> None:
    told = DeviceCollective.window_bytes(4, LARGE, CPU)
    lanes, lane_bytes = lanes_of(4)
    least = 2 * LARGE + lanes * 2 * 4 * lane_bytes
    assert least < told < least + 64 * 1024 + lanes * 2 * 4 * 128
    assert DeviceCollective.window_bytes(1, LARGE, CPU) == 0


def test_programs_that_wait_leave_room_for_a_peer() -> None:
    """All ranks but one wait, each program on a processor of its own: of an H200's 132 more than
    half are left, and some of those that the one may compute on, wherever the others are. And what
    goes in one kernel does not depend on the number of ranks."""
    for size in range(2, 9):
        lanes, lane_bytes = lanes_of(size)
        waiting, open_to_one = (size - 1) * lanes, int(1.32 * processor_percent(size))
        assert waiting < 132 / 2 and waiting <= open_to_one - 4
        assert lanes * lane_bytes == 64 * 2048 * 2
    assert [lanes_of(size)[0] for size in (2, 4, 8)] == [32, 16, 4]
    assert lanes_of(MAX_MPS_CLIENTS) == (1, 64 * 1024)


def test_tensors_of_another_device_are_refused() -> None:
    specs = DeviceCollective.planes(2, SMALL, 1, 2048)
    window = CpuDeviceWindow.between(2, specs, 1.0, 4)[0]
    comm = DeviceCollective(window, SMALL, 1, 2048)
    with pytest.raises(ValueError, match="a tensor on meta for ranks that compute on cpu"):
        comm.all_reduce(torch.ones(2, 2, device="meta"), "sum")
    with pytest.raises(ValueError, match=r"rows of ranks \[3, 3\]: .*, 4 for this one \(0\)"):
        comm.gather_rows(torch.ones(4, 2), [3, 3], "rows")
