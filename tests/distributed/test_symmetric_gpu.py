"""Windows of ranks that share a GPU, under an MPS daemon of the test's own.

P ranks · C rows of a rank · K chosen · H hidden.
"""

from __future__ import annotations

import os
import signal as signals
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.errors import OutOfStep, PeerTimeout, RankFailed, WindowAborted
from moesaic.comm.launch.local_ranks import LocalRanks
from moesaic.comm.launch.mps import Mps, start_mps
from moesaic.comm.launch.mps_owner import PIPES, mps_processes
from moesaic.comm.lifecycle import Membership
from moesaic.comm.windows.device_window import DeviceWindow
from moesaic.comm.windows.factory import create_device_window, device_window_bytes
from moesaic.comm.windows.window import PlaneSpec
from moesaic.config.devices import cuda_missing
from moesaic.config.gpus import processor_percent
from moesaic.kernels.a2a import (
    LocalTokens,
    ResultPlane,
    RowPlanes,
    SlotOwners,
    collect_rows,
    receive,
    send,
    signal,
    wait,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(cuda_missing()), reason=f"needs a CUDA device: {cuda_missing()}"),
]

C, K, H, SLOTS = 4, 2, 64, 3
STEPS, VICTIM = 50, 1
NUMBERS = (PlaneSpec("x", (8,), torch.float32),)


@pytest.fixture(scope="module")
def mps() -> Iterator[Mps]:
    with start_mps() as daemon:
        yield daemon


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, mps: Mps) -> Iterator[LocalRanks]:
    with LocalRanks(request.param, timeout=100, peer_timeout=30.0) as pool:
        yield pool


def open_gpu(environment: dict[str, str]) -> torch.device:
    """The fork server that makes ranks has an older environment: a rank sets its own, before it
    opens CUDA."""
    os.environ.update(environment)
    return torch.device("cuda", 0)


def make(
    group: RankGroup, environment: dict[str, str], timeout: float = 20.0, channels: int = 2
) -> DeviceWindow:
    return create_device_window(group, NUMBERS, timeout, channels, open_gpu(environment))


def exchange(window: DeviceWindow, ranks: list[int], step: int) -> list[float]:
    """Every rank writes a number into everybody's plane; what it then finds in its own."""
    for rank in ranks:
        window.plane("x", rank)[window.rank] = float(100 * step + window.rank)
    found = []
    for channel in (0, 1):
        call = window.call(channel, f"step {step}", step)
        signal(call)
        wait(call)
        if not channel:
            found = [window.plane("x").clone()]
    torch.cuda.synchronize()
    window.check()
    return [float(found[0][rank]) for rank in ranks]


def steps(group: RankGroup, environment: dict[str, str]) -> list[list[float]]:
    window = make(group, environment)
    everyone = list(range(group.size))
    found = [exchange(window, everyone, step) for step in range(STEPS)]
    window.close()
    window.close()
    return found


def numbers(ranks: list[int], steps: range) -> list[list[float]]:
    return [[100.0 * step + rank for rank in ranks] for step in steps]


def test_numbers_between_ranks(ranks: LocalRanks, mps: Mps):
    wanted = numbers(list(range(ranks.size)), range(STEPS))
    for _ in range(2):
        assert ranks.run(steps, mps.for_ranks(ranks.size)) == [wanted] * ranks.size


def replay(group: RankGroup, environment: dict[str, str]) -> list[float]:
    """A graph in which every rank doubles a number at its neighbour: a value passes all ranks."""
    window = make(group, environment)
    neighbour = (group.rank + 1) % group.size
    source, target = window.plane("x"), window.plane("x", neighbour)
    source[0] = float(group.rank + 1)
    calls = [window.call(channel, "replay") for channel in (0, 1)]

    def run() -> None:
        number = source[:1] * 2
        signal(calls[0])
        wait(calls[0])
        target[:1].copy_(number)
        signal(calls[1])
        wait(calls[1])

    run()  # kernels are compiled outside of the graph
    torch.cuda.synchronize()
    group.barrier("all have compiled")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    found = []
    for _ in range(8):
        graph.replay()
        torch.cuda.synchronize()
        window.check()
        found.append(float(source[0]))
    return found


def test_a_graph_is_replayed(ranks: LocalRanks, mps: Mps):
    found = ranks.run(replay, mps.for_ranks(ranks.size))
    for rank in range(ranks.size):
        for step in range(8):
            origin = (rank - step - 2) % ranks.size
            assert found[rank][step] == (origin + 1) * 2.0 ** (step + 2)


def round_trip(group: RankGroup, environment: dict[str, str]) -> tuple[float, float]:
    """Tokens to the ranks that hold their slots, which multiply them by their number; the largest
    error of what comes back, and of what is expected the size."""
    device = open_gpu(environment)
    rows = group.size * C
    planes = (
        PlaneSpec("values", (rows, H), torch.bfloat16),
        PlaneSpec("ids", (rows, K), torch.int32),
        PlaneSpec("results", (rows, H), torch.bfloat16),
    )
    window = create_device_window(group, planes, 20.0, 2, device)
    offsets = {plane.name: window.offset(plane.name) for plane in planes}
    inbox = RowPlanes("bf16", offsets["values"], -1, offsets["ids"], -1, 2 * H, 0)
    spread = SlotOwners(SLOTS)
    worst, largest = 0.0, 0.0
    for step in range(20):
        generator = torch.Generator().manual_seed(step * group.size + group.rank)
        count = (step + group.rank) % (C + 1)
        x_TH = torch.randint(-8, 8, (C, H), generator=generator).bfloat16()
        ids_TK = torch.rand(C, group.size * SLOTS, generator=generator).argsort(1)[:, :K].int()
        num_1 = torch.tensor([count], dtype=torch.int32, device=device)
        weights_TK = torch.ones(C, K, device=device)
        tokens = LocalTokens(x_TH.to(device), ids_TK.to(device), weights_TK, num_1)
        send(tokens, C, inbox, spread, window.call(0, "send", step))
        receive(window.call(0, "send", step), C, K, offsets["ids"])
        here = (window.plane("ids") >= 0).any(1, keepdim=True)
        rows_RH = torch.where(here, window.plane("values") * (group.rank + 1), float("nan"))
        window.plane("results").copy_(rows_RH)
        call = window.call(1, "results", step)
        signal(call)
        out_TH = torch.zeros(C, H, dtype=torch.bfloat16, device=device)
        collect_rows(out_TH, tokens, ResultPlane(C, offsets["results"], spread), call)
        torch.cuda.synchronize()
        window.check()
        factors = [sum({int(slot) // SLOTS + 1 for slot in row}) for row in ids_TK]
        wanted_TH = x_TH.double() * torch.tensor(factors)[:, None]
        difference = out_TH.cpu().double() - wanted_TH
        worst = max(worst, *difference[:count].abs().flatten().tolist(), 0.0)
        largest = max(largest, *wanted_TH[:count].abs().flatten().tolist(), 0.0)
    return worst, largest


def test_tokens_go_and_come_back(ranks: LocalRanks, mps: Mps):
    for worst, largest in ranks.run(round_trip, mps.for_ranks(ranks.size)):
        assert worst == 0.0 and largest >= 8.0


def absent(group: RankGroup, environment: dict[str, str]) -> tuple[tuple[int, ...], str, float]:
    """The victim does not come; then all go on together."""
    window = make(group, environment, timeout=1.0)
    everyone = list(range(group.size))
    assert exchange(window, everyone, 1) == numbers(everyone, range(1, 2))[0]
    group.barrier("a good step")
    told: tuple[tuple[int, ...], str, float] = ((), "", 0.0)
    if group.rank != VICTIM:
        started = time.monotonic()
        with pytest.raises(PeerTimeout) as caught:
            exchange(window, everyone, 2)
        told = (caught.value.missing, str(caught.value), time.monotonic() - started)
    group.barrier("the victim comes back")
    window.restart(Membership(1, tuple(range(window.size))))
    group.barrier("all have restarted")
    assert exchange(window, everyone, 3) == numbers(everyone, range(3, 4))[0]
    return told


def test_a_rank_that_does_not_come_is_named(ranks: LocalRanks, mps: Mps):
    for rank, (missing, text, seconds) in enumerate(ranks.run(absent, mps.for_ranks(ranks.size))):
        if rank != VICTIM:
            assert missing == (VICTIM,)
            assert text == (
                f"rank {VICTIM} did not reach 'step 2' within 1.0 s (last seen: 'step 1')"
            )
            assert 1.0 <= seconds < 3.0


def another_layer(group: RankGroup, environment: dict[str, str]) -> str:
    window = make(group, environment, timeout=2.0)
    call = window.call(0, f"layer {group.rank}", group.rank)
    signal(call)
    torch.cuda.synchronize()
    group.barrier("all have signalled")
    wait(call)
    torch.cuda.synchronize()
    try:
        window.check()
    except (OutOfStep, PeerTimeout) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_ranks_in_different_layers(ranks: LocalRanks, mps: Mps):
    told = ranks.run(another_layer, mps.for_ranks(ranks.size))
    assert told[0] == "OutOfStep: layer 0: rank 1 is in layer 1, this rank in layer 0"
    assert all(told)


def aborted(group: RankGroup, environment: dict[str, str]) -> tuple[str, float]:
    """The host gives up a wait of a kernel under way."""
    window = make(group, environment, timeout=30.0)
    exchange(window, list(range(group.size)), 0)
    group.barrier("a good step")
    if group.rank == VICTIM:
        return "", 0.0
    timer = threading.Timer(0.3, window.abort, ("the step is called back",))
    timer.start()
    started = time.monotonic()
    with pytest.raises(WindowAborted) as caught:
        exchange(window, list(range(group.size)), 1)
    timer.join()
    return str(caught.value), time.monotonic() - started


def test_a_wait_is_given_up(ranks: LocalRanks, mps: Mps):
    for rank, (text, seconds) in enumerate(ranks.run(aborted, mps.for_ranks(ranks.size))):
        if rank != VICTIM:
            assert text == "the step is called back"
            assert 0.2 < seconds < 5.0


def too_large(group: RankGroup, environment: dict[str, str]) -> tuple[str, int]:
    planes = (PlaneSpec("x", (1 << 40,), torch.uint8),)
    device = open_gpu(environment)
    with pytest.raises(RuntimeError) as caught:
        create_device_window(group, planes, 1.0, 1, device)
    return str(caught.value), device_window_bytes(planes, group.size, 1, device)


def test_too_large_a_window_is_refused_on_all_ranks(ranks: LocalRanks, mps: Mps):
    told = ranks.run(too_large, mps.for_ranks(ranks.size))
    assert len(set(told)) == 1
    text, nbytes = told[0]
    assert nbytes > 1 << 40
    assert text.startswith(f"no window of {nbytes / (1 << 20):.1f} MiB a rank on the GPU: rank 0: ")
    assert text.count("MiB free: lower --mem-fraction-static") == ranks.size


def processors(group: RankGroup, environment: dict[str, str]) -> int:
    return torch.cuda.get_device_properties(open_gpu(environment)).multi_processor_count


def test_a_rank_sees_the_processors_that_it_may_compute_on(ranks: LocalRanks, mps: Mps):
    """By which kernels choose how many programs to have."""
    with LocalRanks(1, timeout=100) as one:
        (every,) = one.run(processors, mps.environment)
    wanted = every * processor_percent(ranks.size) / 100
    for found in ranks.run(processors, mps.for_ranks(ranks.size)):
        assert wanted - 2 <= found <= wanted


def memory(group: RankGroup, environment: dict[str, str]) -> int:
    """Bytes that are still gone after windows came and went."""
    device = open_gpu(environment)
    planes = (PlaneSpec("x", (64 << 20,), torch.uint8),)
    left = []
    for _ in range(3):
        window = create_device_window(group, planes, 5.0, 1, device)
        group.barrier("made")
        window.close()
        group.barrier("closed")
        left.append(torch.cuda.mem_get_info(device)[0])
    return left[0] - left[-1]


def test_a_closed_window_gives_its_memory_back(ranks: LocalRanks, mps: Mps):
    assert max(ranks.run(memory, mps.for_ranks(ranks.size))) < 64 << 20


def until_killed(group: RankGroup, environment: dict[str, str]) -> list[list[float]]:
    """The others name the victim and go on without it."""
    window = make(group, environment, timeout=2.0)
    everyone = list(range(group.size))
    exchange(window, everyone, 0)
    group.barrier("a good step")
    if group.rank == VICTIM:
        os.kill(os.getpid(), signals.SIGKILL)
    with pytest.raises(PeerTimeout) as caught:
        exchange(window, everyone, 1)
    assert caught.value.missing == (VICTIM,)
    others = [rank for rank in everyone if rank != VICTIM]
    time.sleep(1.0)  # all of them have given up
    window.restart(Membership(1, tuple(others)))
    time.sleep(1.0)  # and restarted
    return [exchange(window, others, step) for step in range(2, 6)]


def test_a_killed_rank_takes_nobody_along(ranks: LocalRanks, mps: Mps):
    """And a new process in its place meets those that have met before."""
    with pytest.raises(RankFailed, match=rf"rank {VICTIM}: process \d+ died") as failed:
        ranks.run(until_killed, mps.for_ranks(ranks.size))
    assert list(failed.value.failures) == [VICTIM]
    others = [rank for rank in range(ranks.size) if rank != VICTIM]
    for rank in others:
        assert failed.value.results[rank] == numbers(others, range(2, 6))
    wanted = numbers(list(range(ranks.size)), range(STEPS))
    assert ranks.run(steps, mps.for_ranks(ranks.size)) == [wanted] * ranks.size


def test_the_daemon_goes_and_leaves_nothing():
    with start_mps() as daemon:
        own, pipes = daemon.is_own, daemon.environment[PIPES]
        with LocalRanks(2, timeout=100, peer_timeout=30.0) as pool:
            pool.run(steps, daemon.environment)
        assert not own or any(mps_processes(pipes))
    if own:
        assert not any(mps_processes(pipes))
        assert not Path(pipes).exists()
