"""Groups, windows and local ranks, on 1, 3 and 4 processes."""

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.errors import PeerTimeout, RankFailed
from moesaic.comm.launch.local_ranks import LocalRanks, PerRank
from moesaic.comm.network.handshake import Identity
from moesaic.comm.network.store import LocalStore
from moesaic.comm.windows.factory import create_window
from moesaic.comm.windows.window import PlaneSpec, window_bytes

ROWS, WIDTH = 24, 32
PEER_SECONDS = 5.0
FLOAT8 = torch.float8_e4m3fn
DTYPES = (torch.bfloat16, torch.float32, torch.int8, FLOAT8)


@pytest.fixture(scope="module")
def four() -> Iterator[LocalRanks]:
    with LocalRanks(4, timeout=30) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def three() -> Iterator[LocalRanks]:
    with LocalRanks(3, timeout=30, peer_timeout=PEER_SECONDS) as ranks:
        yield ranks


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> LocalRanks:
    return request.getfixturevalue(request.param)


def values(rank: int, peer: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank puts to a peer: [ROWS, WIDTH], known to both."""
    generator = torch.Generator().manual_seed(1000 * rank + peer)
    return torch.randint(-7, 8, (ROWS, WIDTH), generator=generator).to(dtype)


def choice(rank: int, peer: int) -> torch.Tensor:
    """The rows that a rank puts to a peer; none at all for one pair."""
    count = 0 if (rank, peer) == (0, 0) else ROWS // 4
    generator = torch.Generator().manual_seed(7 * rank + peer)
    return torch.randperm(ROWS, generator=generator)[:count]


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.float(), right.float())


def roundtrip(group: RankGroup) -> int:
    """Every rank puts rows to every rank, checks what came, and gets it back from the peers."""
    me, size = group.rank, group.size
    shape = (size * ROWS, WIDTH)
    specs = [PlaneSpec(str(dtype), shape, dtype) for dtype in DTYPES]
    window = create_window(group, specs, timeout=10)
    for dtype in DTYPES:
        for peer in range(size):
            sent = values(me, peer, dtype)
            window.put(str(dtype), peer, me * ROWS, sent, choice(me, peer))
    window.signal(3, 1, "put")
    window.wait(3, 1, "put")
    for dtype in DTYPES:
        for peer in range(size):
            rows = len(choice(peer, me))
            came = window.plane(str(dtype))[peer * ROWS : peer * ROWS + rows]
            assert same(came, values(peer, me, dtype)[choice(peer, me)])
            mine = choice(me, peer)
            back = window.plane(str(dtype), peer)[me * ROWS : me * ROWS + len(mine)]
            assert same(back, values(me, peer, dtype)[mine])
        assert window.stacked(str(dtype)).shape == (size, *shape)
        assert window.stacked(str(dtype))[size - 1].data_ptr() == (
            window.plane(str(dtype), size - 1).data_ptr()
        )
    window.barrier("done")
    return sum(spec.nbytes for spec in specs)


def test_roundtrip_alone():
    assert roundtrip(RankGroup.alone()) == ROWS * WIDTH * (2 + 4 + 1 + 1)


@pytest.mark.parametrize("pool", ["three", "four"], indirect=True)
def test_roundtrip(pool: LocalRanks):
    assert pool.run(roundtrip) == [pool.size * ROWS * WIDTH * (2 + 4 + 1 + 1)] * pool.size


def ping(group: RankGroup, epochs: int) -> int:
    """Two lanes in turn and no barrier: who has seen all of epoch n may overwrite epoch n - 1."""
    size, me = group.size, group.rank
    window = create_window(group, [PlaneSpec("x", (2 * size, 512), torch.int64)], timeout=10)
    nap = random.Random(me)
    stale = 0
    for epoch in range(1, epochs + 1):
        lane = epoch % 2 * size
        for peer in range(size):
            row = torch.full((1, 512), epoch * 100 + me)
            window.put("x", peer, lane + me, row, torch.arange(1))
        window.signal(0, epoch, "ping")
        if nap.random() < 0.3:
            time.sleep(nap.random() * 0.002)
        window.wait(0, epoch, "ping")
        wanted = epoch * 100 + torch.arange(size)[:, None]
        stale += int((window.plane("x")[lane : lane + size] != wanted).sum())
    return stale


@pytest.mark.parametrize("pool", ["three", "four"], indirect=True)
def test_no_stale_reads(pool: LocalRanks):
    assert pool.run(ping, 300) == [0] * pool.size


def barriers(group: RankGroup, count: int) -> tuple[int, int]:
    """How often a rank left a barrier before another came; and how many barriers took no longer
    than a rank that was woken."""
    window = create_window(group, [PlaneSpec("n", (1,), torch.int64)], timeout=10)
    mine, everyone = window.plane("n"), window.stacked("n")
    early = prompt = 0
    for number in range(1, count + 1):
        mine[0] = number
        started = time.monotonic()
        window.barrier("count")
        prompt += time.monotonic() - started < 0.04
        early += int((everyone < number).sum())
    return early, prompt


@pytest.mark.parametrize("pool", ["three", "four"], indirect=True)
def test_barriers(pool: LocalRanks):
    for early, prompt in pool.run(barriers, 1000):
        assert early == 0
        assert prompt > 700  # a rank whose wake is lost sleeps for 0.05 s


def absent(group: RankGroup) -> tuple[PeerTimeout | None, float]:
    """Rank 2 does not come to the second step."""
    window = create_window(group, [], timeout=10)
    window.signal(1, 1, "deepep combine, layer 2")
    window.wait(1, 1, "deepep combine, layer 2")
    error, started = None, time.monotonic()
    if group.rank != 2:
        window.signal(1, 2, "deepep dispatch, layer 3")
        window.wait(1, 2, "deepep dispatch, layer 3", ranks=[0, 1], timeout=5)
        try:
            window.wait(1, 2, "deepep dispatch, layer 3", timeout=0.3)
        except PeerTimeout as caught:
            error = caught
    seconds = time.monotonic() - started
    group.barrier("end")
    return error, seconds


def test_missing_rank_is_named(four: LocalRanks):
    for rank, (error, seconds) in enumerate(four.run(absent)):
        if rank == 2:
            assert error is None
            continue
        assert error is not None and error.missing == (2,) and error.seconds == 0.3
        assert str(error) == (
            "rank 2 did not reach 'deepep dispatch, layer 3' within 0.3 s "
            "(last seen: 'deepep combine, layer 2')"
        )
        assert 0.3 <= seconds < 9  # not the 10 s of the window


def test_window_is_counted_before_it_is_made():
    specs = [PlaneSpec("a", (3, 5), torch.bfloat16), PlaneSpec("b", (0, 4), torch.float32)]
    assert [spec.nbytes for spec in specs] == [30, 0]
    assert window_bytes(specs, 1) == 2 * 4096
    assert window_bytes([PlaneSpec("c", (4096,), torch.int8)], 8) - window_bytes([], 8) == 8 * 4096


def test_memory_is_taken_when_touched():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    before = resident()
    window = create_window(RankGroup.alone(), [PlaneSpec("x", (1 << 28,), torch.int8)], timeout=1)
    assert resident() - before < 1 << 26
    assert window.plane("x")[12345] == 0


def test_views_outlive_the_window():
    window = create_window(RankGroup.alone(), [PlaneSpec("x", (4,), torch.int32)], timeout=1)
    view = window.plane("x")
    with pytest.raises(ValueError, match=r"no plane 'y': this window has \['x'\]"):
        window.plane("y")
    del window
    gc.collect()
    view += 7
    assert view.tolist() == [7, 7, 7, 7]


def test_rows_that_do_not_fit_are_refused():
    window = create_window(RankGroup.alone(), [PlaneSpec("x", (4, 8), torch.float32)], timeout=1)
    window.plane("x").fill_(1)
    two = torch.arange(2)
    with pytest.raises(ValueError, match=r"rows of \(2, 9\)"):
        window.put("x", 0, 0, torch.zeros(2, 9), two)
    with pytest.raises(ValueError, match="bfloat16"):
        window.put("x", 0, 0, torch.zeros(2, 8).bfloat16(), two)
    with pytest.raises(RuntimeError):
        window.put("x", 0, 3, torch.zeros(2, 8), two)
    assert window.plane("x").sum() == 32


def different_planes(group: RankGroup) -> str:
    try:
        create_window(group, [PlaneSpec("x", (1 + group.rank // 2,), torch.int8)], timeout=1)
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_must_ask_for_the_same_planes(four: LocalRanks):
    assert (
        four.run(different_planes)
        == ["no shared window: ranks [2, 3] ask for other planes than rank 0"] * 4
    )


def collectives(group: RankGroup) -> None:
    """Every collective against what plain arithmetic says."""
    me, size = group.rank, group.size
    group.barrier("start")
    sent = [bytes([rank]) * (5 * rank) for rank in range(size)]
    assert group.all_gather_bytes(sent[me], "bytes") == sent
    assert group.all_gather_bytes(b"", "no bytes") == [b""] * size
    for dtype in DTYPES:
        gathered = group.all_gather(values(me, 0, dtype), "gather")
        for rank, part in enumerate(gathered):
            assert same(part, values(rank, 0, dtype))
    total = values(me, 1, torch.float32)
    group.all_reduce(total, "sum")
    assert torch.equal(total, sum(values(rank, 1, torch.float32) for rank in range(size)))
    copy = values(me, 2, FLOAT8)
    group.broadcast(copy, size - 1, "copy")
    assert same(copy, values(size - 1, 2, FLOAT8))
    for dtype in (torch.bfloat16, FLOAT8):
        exchange(group, dtype)
    nothing = torch.empty(0, WIDTH, dtype=torch.bfloat16)
    assert [len(part) for part in group.all_gather(nothing, "no rows")] == [0] * size
    group.all_to_all(nothing, nothing, [0] * size, [0] * size, "no rows")
    group.all_reduce(nothing, "no rows")
    group.broadcast(nothing, 0, "no rows")


def exchange(group: RankGroup, dtype: torch.dtype) -> None:
    """An all-to-all in which rank s sends (s + r) % 3 rows to rank r."""
    me, ranks = group.rank, range(group.size)
    into = [values(me, rank, dtype)[: (me + rank) % 3] for rank in ranks]
    wanted = [values(rank, me, dtype)[: (me + rank) % 3] for rank in ranks]
    splits = [len(part) for part in into]
    source = torch.cat([part.view(torch.uint8) for part in into]).view(dtype)
    out = torch.empty_like(source)
    group.all_to_all(out, source, splits, splits, "exchange")
    assert same(out, torch.cat([part.view(torch.uint8) for part in wanted]).view(dtype))


def test_collectives_alone():
    collectives(RankGroup.alone())


@pytest.mark.parametrize("pool", ["three", "four"], indirect=True)
def test_collectives(pool: LocalRanks):
    assert pool.run(collectives) == [None] * pool.size


def second_step(group: RankGroup, victim: int, die: bool) -> PeerTimeout | None:
    """The victim dies before it, or comes when the others have given up."""
    group.barrier("a first step")
    if group.rank == victim:
        if die:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(group.timeout + 1)
    try:
        group.all_reduce(torch.ones(1), "a second step")
    except PeerTimeout as error:
        return error
    return None


def test_collective_names_the_late_rank(three: LocalRanks):
    first, second, third = three.run(second_step, 1, False)
    for error in (first, third):
        assert error.missing == (1,) and error.seconds > PEER_SECONDS - 0.1
        assert "rank 1 did not reach 'a second step' within" in str(error)
        assert "(last seen: 'a first step')" in str(error)
    assert second.missing == () and "a peer gave up earlier" in str(second)
    # The group is broken for good; a pool that has seen it fail makes another.
    with pytest.raises(RankFailed, match="group 0, which has failed: form another"):
        three.run(collectives)
    assert three.run(collectives) == [None] * 3


def test_killed_rank_is_named_and_replaced(three: LocalRanks):
    before = three.pids
    shm = set(os.listdir("/dev/shm"))
    started = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 2: process \d+ died \(exit code -9\)") as failed:
        three.run(second_step, 2, True)
    assert time.monotonic() - started < PEER_SECONDS
    assert list(failed.value.failures) == [2]
    for rank in (0, 1):
        assert failed.value.results[rank].missing == (2,)
    assert three.run(roundtrip) == [3 * ROWS * WIDTH * 8] * 3
    assert [pid in before for pid in three.pids] == [True, True, False]
    assert soon(lambda: set(os.listdir("/dev/shm")) <= shm)


def listening() -> set[tuple[str, int]]:
    """(address, port) of the TCP sockets on which this process listens."""
    inodes = {
        os.readlink(link)[8:-1]
        for link in Path("/proc/self/fd").iterdir()
        if link.is_symlink() and os.readlink(link).startswith("socket:[")
    }
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                known = "127.0.0.1" if address == "0100007F" else address
                found.add((known, int(port, 16)))
    return found


def sockets_of(group: RankGroup) -> set[tuple[str, int]]:
    group.barrier("connected")
    return listening()


def test_only_loopback_listens(four: LocalRanks):
    assert listening() == set()  # the store of these ranks is a Unix socket of this user
    addresses = {address for found in four.run(sockets_of) for address, _ in found}
    assert addresses <= {"127.0.0.1"}


def test_forming_names_who_did_not_come(store: LocalStore):
    client = store.address.connect(5.0, Identity(0, 0))
    with pytest.raises(PeerTimeout, match="rank 2 did not reach 'form group g'") as error:
        threading.Thread(target=client.set, args=("g/joined/1", b"")).start()
        RankGroup.form(client, "g", 0, 3, timeout=0.3)
    assert error.value.missing == (2,)


def give(group: RankGroup, common: int, own: str) -> tuple[int, int, str]:
    return group.rank, common, own


def fail(group: RankGroup, victim: int) -> int:
    if group.rank == victim:
        raise KeyError("lost key")
    return group.rank


def sleep(group: RankGroup, victim: int) -> int:
    if group.rank == victim:
        time.sleep(60)
    return group.rank


def test_results_and_errors_of_ranks(four: LocalRanks):
    pids = four.pids
    assert four.run(give, 5, PerRank("abcd")) == [(r, 5, "abcd"[r]) for r in range(4)]
    with pytest.raises(RankFailed, match=r"rank 3: Traceback(.|\n)*lost key") as failed:
        four.run(fail, 3)
    assert list(failed.value.failures) == [3]
    assert failed.value.results == {0: 0, 1: 1, 2: 2}
    assert four.run(give, 6, PerRank("efgh"))[3] == (3, 6, "h")
    assert four.pids == pids


def soon(condition: Callable[[], bool]) -> bool:
    """Whether it comes true: processes take a while to end, and others have semaphores in /dev/shm
    for a moment."""
    deadline = time.monotonic() + 30
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def gone(pid: int) -> bool:
    return soon(lambda: not Path(f"/proc/{pid}").exists())


def test_nothing_is_left_after_close():
    shm = set(os.listdir("/dev/shm"))
    with LocalRanks(2, timeout=4.0) as ranks:
        with pytest.raises(RankFailed, match=r"rank 1: gave no answer within 4\.0 s"):
            ranks.run(sleep, 1)
        assert ranks.run(sleep, -1) == [0, 1]
        ranks.kill(0)
        pids = ranks.pids
    assert all(gone(pid) for pid in pids)
    assert soon(lambda: set(os.listdir("/dev/shm")) <= shm)
    with pytest.raises(ValueError, match="closed"):
        ranks.run(sleep, -1)


ORPHANS = """
import threading, time
from moesaic.comm.launch.local_ranks import LocalRanks

def busy(group):
    while True:
        time.sleep(1)

if __name__ == "__main__":
    ranks = LocalRanks(2)
    threading.Thread(target=ranks.run, args=(busy,), daemon=True).start()
    time.sleep(0.5)
    print(*ranks.pids, flush=True)
    time.sleep(60)
"""


def test_ranks_die_with_their_parent(tmp_path: Path):
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
    assert all(gone(pid) for pid in pids)


def test_a_group_of_one_opens_no_socket():
    before = len(os.listdir("/proc/self/fd"))
    group = RankGroup.alone()
    assert (group.rank, group.size) == (0, 1)
    group.barrier("nothing")
    assert len(os.listdir("/proc/self/fd")) == before
