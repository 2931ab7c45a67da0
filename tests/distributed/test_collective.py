"""Collectives over windows and groups over a store, on 1 to 5 processes, bit for bit.

N rows or elements · H channels · R rows · V columns.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from moesaic.comm.collectives.collective import (
    BLOCK,
    HEAD_BYTES,
    Collective,
    PartsDiffer,
    SingleRank,
    WindowCollective,
)
from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.errors import PeerTimeout, RankFailed
from moesaic.comm.launch.local_ranks import LocalRanks
from moesaic.comm.lifecycle import Membership
from moesaic.comm.network.handshake import Identity
from moesaic.comm.network.rendezvous import StoreGroup
from moesaic.comm.network.store import LocalStore, StoreAddress
from moesaic.comm.supervise.control_page import ControlPage, EpochChanged
from moesaic.comm.windows.window import window_bytes

Pools = Callable[[int], LocalRanks]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int64, torch.uint8)
SMALL, LARGE, SECONDS = 1000, 1 << 20, 30.0
SIZES = (2, 3, 5)
OBSERVER = Identity(-1, 0)


def part(seed: int, rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """What a rank brings, known to all."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        return torch.randn(*shape, generator=generator).to(dtype)
    return torch.randint(0, 200, tuple(shape), generator=generator, dtype=dtype)


def total(parts: Sequence[Tensor]) -> Tensor:
    """The definition: in rank order, floats in float32, rounded once."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype.is_floating_point else dtype
    result = parts[0].to(wide)
    for other in parts[1:]:
        result = result + other.to(wide)
    return result.to(dtype)


def check_sum(
    comm: Collective, seed: int, shape: Sequence[int], dtype: torch.dtype, rows: slice
) -> Tensor:
    parts = [part(seed, rank, shape, dtype) for rank in range(comm.size)]
    found = comm.sum_rows(parts[comm.rank], rows, f"sum {seed}")
    assert found.dtype == dtype
    assert torch.equal(found, total(parts)[rows]), (seed, shape, dtype, rows)
    return found


def check_rows(
    comm: Collective, seed: int, counts: Sequence[int], width: int, dtype: torch.dtype
) -> Tensor:
    parts = [part(seed, rank, (count, width), dtype) for rank, count in enumerate(counts)]
    found = comm.gather_rows(parts[comm.rank], counts, f"rows {seed}")
    assert found.dtype == dtype
    assert torch.equal(found, torch.cat(parts)), (seed, counts, width, dtype)
    return found


def check_columns(
    comm: Collective,
    seed: int,
    height: int,
    widths: Sequence[int],
    dtype: torch.dtype,
    rows: slice,
) -> Tensor:
    parts = [part(seed, rank, (height, width), dtype) for rank, width in enumerate(widths)]
    found = comm.gather_columns(parts[comm.rank], widths, rows, f"columns {seed}")
    assert found.dtype == dtype
    assert torch.equal(found, torch.cat(parts, 1)[rows]), (seed, height, widths, dtype, rows)
    return found


def check_exchange(
    comm: WindowCollective, seed: int, rows: int, width: int, dtype: torch.dtype
) -> None:
    parts = [part(seed, rank, (comm.size * rows, width), dtype) for rank in range(comm.size)]
    found = comm.exchange_rows(parts[comm.rank], f"exchange {seed}")
    mine = slice(comm.rank * rows, (comm.rank + 1) * rows)
    assert torch.equal(found, torch.cat([given[mine] for given in parts])), (seed, rows, width)


def every_operation(group: RankGroup, nbytes: int) -> int:
    comm = WindowCollective(group, nbytes, SECONDS)
    for dtype in DTYPES:
        for rows, width in ((1, 40), (7, 70), (0, 5), (3, 1500)):
            check_exchange(comm, 20 + rows, rows, width, dtype)
    return run_every_operation(comm, nbytes)


def run_every_operation(comm: Collective, nbytes: int) -> int:
    """Each with each type; what was returned first must not change by what follows."""
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(found: Tensor) -> None:
        kept.append((found, found.clone()))

    uneven = [(7, 0, 3, 1, 12)[rank] for rank in range(comm.size)]
    height = 250 if nbytes == LARGE else 50  # large enough for a sum in shares, or for many pieces
    with torch.inference_mode():
        check_sum(comm, 0, (3, 40), torch.bfloat16, slice(None))
    for dtype in DTYPES:
        keep(check_sum(comm, 1, (9, 70), dtype, slice(0, 9)))
        keep(check_sum(comm, 2, (9, 70), dtype, slice(comm.rank, comm.rank + 2)))
        keep(check_sum(comm, 3, (9, 70), dtype, slice(0, 9 if comm.rank == 1 else 0)))
        keep(check_sum(comm, 4, (0, 70), dtype, slice(0, 0)))
        keep(check_sum(comm, 5, (height, 800), dtype, slice(3, height - comm.rank)))
        keep(check_rows(comm, 6, uneven, 70, dtype))
        keep(check_rows(comm, 7, [0] * comm.size, 70, dtype))
        keep(check_rows(comm, 8, [0] * (comm.size - 1) + [1], 1500, dtype))
        keep(check_columns(comm, 9, 6, [10 * count for count in uneven], dtype, slice(1, 5)))
        keep(check_columns(comm, 10, 3, [900] * comm.size, dtype, slice(comm.rank % 3, 2)))
        keep(check_columns(comm, 11, 0, [900] * comm.size, dtype, slice(0, 0)))
    with torch.inference_mode():
        check_rows(comm, 12, uneven, 7, torch.float64)
    assert all(torch.equal(found, copy) for found, copy in kept)
    return len(kept)


@pytest.mark.parametrize("nbytes", [SMALL, LARGE], ids=["in pieces", "whole"])
@pytest.mark.parametrize("size", SIZES)
def test_every_operation(size: int, nbytes: int, pools: Pools):
    assert pools(size).run(every_operation, nbytes) == [11 * len(DTYPES)] * size


@dataclass(frozen=True)
class Traffic:
    """Rounds that a sum took, and the bits it gave."""

    rounds: int
    data: bytes


def two_ways(group: RankGroup, count: int, cut: bool) -> Traffic:
    """All of a sum on every rank at once, or each row by itself."""
    comm = WindowCollective(group, LARGE, SECONDS)
    x_NH = part(1, comm.rank, (count, 512), torch.bfloat16)
    if cut:
        rows = [comm.sum_rows(row[None], slice(0, 1), "a row") for row in x_NH]
        return Traffic(comm._round, torch.cat(rows).view(torch.uint8).numpy().tobytes())
    whole = comm.all_reduce(x_NH, "all rows")
    return Traffic(comm._round, whole.view(torch.uint8).numpy().tobytes())


def test_shares_and_cuts_give_the_same_bits(pools: Pools):
    """Small sums are read from all ranks, large ones summed in shares, which takes two rounds."""
    size, rows = 3, 256
    assert rows * 512 > BLOCK
    whole = pools(size).run(two_ways, rows, False)
    in_rows = pools(size).run(two_ways, rows, True)
    assert [one.rounds for one in whole] == [2] * size
    assert [one.rounds for one in in_rows] == [rows] * size
    assert {one.data for one in whole} == {one.data for one in in_rows}
    assert len({one.data for one in whole}) == 1


def scattered(group: RankGroup) -> int:
    """Every rank wants rows of its own: nothing is to be gained by a second round."""
    comm = WindowCollective(group, LARGE, SECONDS)
    per = 384 // comm.size
    check_sum(comm, 1, (384, 1024), torch.bfloat16, slice(comm.rank * per, (comm.rank + 1) * per))
    return comm._round


def test_rows_of_their_own_take_one_round(pools: Pools):
    assert pools(3).run(scattered) == [1] * 3


def one_operation(comm: Collective, chance: random.Random, seed: int) -> None:
    """The same on all ranks, except which rows a rank wants."""
    dtype = chance.choice(DTYPES)
    kind = chance.randrange(3)
    height, width = chance.choice((0, 1, 2, 17, 90)), chance.choice((1, 8, 100, 600, 3000))
    counts = [chance.choice((0, 1, 5, 40)) for _ in range(comm.size)]
    bounds = [sorted(chance.choices(range(height + 1), k=2)) for _ in range(comm.size)]
    rows = slice(*bounds[comm.rank]) if chance.random() < 0.5 else slice(None)
    if kind == 0:
        check_sum(comm, seed, (height, width), dtype, rows)
    elif kind == 1:
        check_rows(comm, seed, counts, width, dtype)
    else:
        check_columns(comm, seed, height, counts, dtype, rows)


def random_operations(group: RankGroup, count: int, nbytes: int) -> int:
    comm = WindowCollective(group, nbytes, SECONDS)
    chance, own = random.Random(5), random.Random(group.rank)
    for seed in range(count):
        if own.random() < 0.2:
            time.sleep(own.random() * 0.01)
        one_operation(comm, chance, seed)
    return comm._round


@pytest.mark.parametrize("nbytes", [4096, LARGE])
def test_random_operations_in_a_row(nbytes: int, pools: Pools):
    rounds = pools(3).run(random_operations, 200, nbytes)
    assert len(set(rounds)) == 1
    assert rounds[0] > 100


def subgroups(group: RankGroup, address: StoreAddress, count: int) -> list[int]:
    """Ranks 0 1 | 2 3, ranks 0 2 | 1 3 and all four in turn, met at a store only."""
    store = address.connect(SECONDS, Identity(group.rank, 0))
    pairs = (group.rank // 2, group.rank % 2), (group.rank % 2, group.rank // 2)
    comms = [
        WindowCollective(StoreGroup(store, f"{way}/{name}", rank, 2, SECONDS), SMALL, SECONDS)
        for way, (name, rank) in enumerate(pairs)
    ]
    comms.append(WindowCollective(StoreGroup(store, "all", group.rank, 4, SECONDS), SMALL, SECONDS))
    # Which of them is next must be the same on all ranks that meet: on all, to be simple.
    order, own = random.Random(1), random.Random(group.rank)
    chances = [random.Random(10 * way) for way in range(3)]
    for seed in range(count):
        way = order.randrange(3)
        if own.random() < 0.1:
            time.sleep(own.random() * 0.01)
        one_operation(comms[way], chances[way], seed)
    return [comm._round for comm in comms]


def test_collectives_of_several_groups_interleave(pools: Pools, store: LocalStore):
    rounds = pools(4).run(subgroups, store.address, 60)
    assert rounds == [rounds[0]] * 4
    assert min(rounds[0]) > 10
    # Windows were agreed on in two operations of a group: the second one's keys stay.
    assert store.address.connect(SECONDS, OBSERVER).count() <= 3 * 4


def absent(group: RankGroup, victim: int, kind: str) -> PeerTimeout | None:
    """A sum that works, then one in which a rank does not take part."""
    comm = WindowCollective(group, LARGE, 0.5)
    group.barrier("made")
    check_sum(comm, 0, (2, 8), torch.float32, slice(None))
    group.barrier("one sum")
    if comm.rank == victim:
        return None
    x_NH = torch.ones(4, 8)
    try:
        if kind == "sum":
            comm.sum_rows(x_NH, slice(0, 0), "layer 3, dense sum")
        elif kind == "rows":
            comm.gather_rows(x_NH, [4] * comm.size, "layer 3, dense sum")
        else:
            comm.gather_columns(x_NH, [8] * comm.size, slice(0, 0), "layer 3, dense sum")
    except PeerTimeout as error:
        return error
    return None


@pytest.mark.parametrize("kind", ["sum", "rows", "columns"])
def test_a_missing_rank_is_named(kind: str, pools: Pools):
    """Also by a rank that wants nothing of the others."""
    found = pools(3).run(absent, 1, kind)
    assert found[1] is None
    for error in (found[0], found[2]):
        assert error.missing == (1,)
        assert str(error) == (
            "rank 1 did not reach 'layer 3, dense sum' within 0.5 s (last seen: 'sum 0')"
        )


def out_of_step(group: RankGroup) -> str:
    comm = WindowCollective(group, LARGE, SECONDS)
    try:
        comm.sum_rows(torch.ones(3 if comm.rank == 1 else 2, 8), slice(None), "layer 3")
    except PartsDiffer as error:
        return str(error)
    return ""


def long_run(group: RankGroup) -> list[float]:
    """Sums before and after a restart that comes after more rounds than 32 bits can count."""
    comm = WindowCollective(group, LARGE, SECONDS)
    comm._round = 2**32 + 9
    found = []
    for generation in (1, 2):
        found.append(float(comm.all_reduce(torch.ones(1, 2), "sum")[0, 0]))
        comm.restart(Membership(generation, tuple(range(comm.size))))
        group.barrier("all have restarted")
    found.append(float(comm.all_reduce(torch.ones(1, 2), "sum")[0, 0]))
    return found


def test_restarts_after_a_long_run(pools: Pools):
    assert pools(2).run(long_run) == [[2.0] * 3] * 2


def without_one(group: RankGroup) -> list[list[int]]:
    """What ranks gather of each other, all of them, without rank 1, and all again."""
    comm, found = WindowCollective(group, LARGE, SECONDS), []
    own, lost = torch.full((2, 3), comm.rank + 1), comm.rank == 1
    for generation, active in enumerate([(0, 1, 2), (0, 2), (0, 1, 2)], 1):
        if comm.rank in active:
            comm.restart(Membership(generation, active))
        group.barrier("they have restarted")
        if comm.rank in active:
            for _ in range(3):  # both halves have what rank 1 gave before
                rows = comm.gather_rows(own, [2, 2, 2], "gather")
            found.append(rows[:, 0].tolist())
        if len(active) == 2 and not lost:
            with pytest.raises(AssertionError, match="sum: ranks are lost"):
                comm.all_reduce(own, "sum")
            assert comm.all_reduce(own[:0], "an idle step").shape == (0, 3)
        group.barrier("they have gathered")
    return found


def test_a_lost_rank_gives_zeros(pools: Pools):
    whole, holed = [1, 1, 2, 2, 3, 3], [1, 1, 0, 0, 3, 3]
    assert pools(3).run(without_one) == [
        [whole, holed, whole],
        [whole, whole],
        [whole, holed, whole],
    ]


def test_parts_that_differ_are_refused(pools: Pools):
    first, second, third = pools(3).run(out_of_step)
    assert first == (
        "layer 3: rank 1 is in sum_rows float32 24, this rank (0) in sum_rows float32 16"
    )
    assert second.startswith("layer 3: rank 0 is in sum_rows float32 16, this rank (1)")
    assert third.startswith("layer 3: rank 1 is in")


def test_one_rank_is_alone():
    alone, x_NH = SingleRank(), torch.randn(4, 8)
    assert alone.all_reduce(x_NH, "sum").data_ptr() == x_NH.data_ptr()
    assert alone.gather_rows(x_NH, [4], "rows") is x_NH
    comm = WindowCollective(RankGroup.alone(), LARGE, 1.0)
    for one in (alone, comm):
        assert torch.equal(one.sum_rows(x_NH, slice(1, 3), "sum"), x_NH[1:3])
        assert torch.equal(one.gather_columns(x_NH, [8], slice(0, 2), "columns"), x_NH[:2])
    assert WindowCollective.window_bytes(1, LARGE) == 0
    with pytest.raises(ValueError, match=r"rows of ranks \[3\]: .*, 4 for this one \(0\)"):
        comm.gather_rows(x_NH, [3], "rows")
    with pytest.raises(ValueError, match=r"columns of ranks \[8, 8\]: .* each of 1 ranks, 8"):
        comm.gather_columns(x_NH, [8, 8], slice(0, 2), "columns")


def mapped(group: RankGroup, nbytes: int) -> int:
    """Bytes by which the mappings of this process grow."""

    def count() -> int:
        with open("/proc/self/maps") as lines:
            spans = [line.split()[0].split("-") for line in lines if "moesaic-window" in line]
        return sum(int(stop, 16) - int(start, 16) for start, stop in spans)

    before = count()
    comm = WindowCollective(group, nbytes, SECONDS)
    grown = count() - before
    del comm
    assert count() == before
    return grown


def test_bytes_are_known_before(pools: Pools):
    told = WindowCollective.window_bytes(3, 100_000)
    assert 3 * 2 * 100_000 < told < 3 * 2 * 100_000 + 3 * 2 * 2 * HEAD_BYTES + 2 * 4096
    assert pools(3).run(mapped, 100_000) == [told] * 3
    assert window_bytes([], 3, 1) < told


def on_threads(
    address: StoreAddress, size: int, work: Callable[[StoreGroup], object]
) -> list[object]:
    """work(group) on so many threads, each with a connection of its own; what they gave."""
    results: list[object] = [None] * size

    def run(rank: int) -> None:
        store = address.connect(SECONDS, Identity(rank, 0))
        try:
            results[rank] = work(StoreGroup(store, "g", rank, size, SECONDS))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def meet_often(group: StoreGroup) -> int:
    own = random.Random(group.rank)
    for turn in range(30):
        mine = bytes([group.rank, turn]) * (turn * group.rank)
        found = group.all_gather_bytes(mine, f"turn {turn}")
        assert found == [bytes([r, turn]) * (turn * r) for r in range(group.size)]
        if own.random() < 0.2:
            time.sleep(own.random() * 0.005)
    group.barrier("end")
    return 30


def test_a_group_at_a_store(store: LocalStore):
    """Bytes of any length, also none; and what has been read by all is taken away."""
    assert on_threads(store.address, 3, meet_often) == [30] * 3
    client = store.address.connect(SECONDS, OBSERVER)
    assert sum(client.has([f"g/{turn}/{rank}"]) for turn in range(31) for rank in range(3)) == 0
    assert all(client.has([f"g/31/{rank}"]) for rank in range(3))


def test_a_group_of_one_needs_no_store():
    group = StoreGroup(None, "alone", 0, 1, 1.0)
    assert group.all_gather_bytes(b"mine", "nothing") == [b"mine"]
    group.barrier("nothing")
    with pytest.raises(ValueError, match="group g of 2 ranks: give the store"):
        StoreGroup(None, "g", 0, 2, 1.0)
    with pytest.raises(ValueError, match=r"rank 2 of group g: give one of 0\.\.1"):
        StoreGroup(None, "g", 2, 2, 1.0)
    with pytest.raises(ValueError, match=r"nodes \[0\] of group g: give 2, one for each rank"):
        StoreGroup(None, "g", 0, 2, 1.0, nodes=[0])


def test_a_group_names_who_did_not_come(store: LocalStore):
    def once(group: StoreGroup) -> None:
        group.timeout = 0.5
        group.barrier("first")
        if group.rank != 1:
            group.barrier("second")

    found = on_threads(store.address, 3, once)
    assert found[1] is None
    for error in (found[0], found[2]):
        assert isinstance(error, PeerTimeout)
        assert error.missing == (1,)
        assert str(error) == "rank 1 did not reach 'second' within 0.5 s (last seen: 'first')"


def test_a_new_epoch_ends_the_wait(store: LocalStore):
    page, descriptor = ControlPage.create(num_ranks=2)
    status = page.status(0)
    group = StoreGroup(store.address.connect(SECONDS, OBSERVER), "g", 0, 2, 60.0)
    group.status = status
    timer = threading.Timer(0.2, page.change, (1, "rank 1 died"))
    timer.start()
    started = time.monotonic()
    with pytest.raises(EpochChanged, match="rank 1 died") as changed:
        group.barrier("together")
    assert changed.value.epoch == 2
    assert time.monotonic() - started < 30
    timer.join()
    os.close(descriptor)


def with_status(group: RankGroup, path: str, address: StoreAddress) -> int | None:
    """Rank 0 waits in a collective for rank 1, which never comes; a new epoch ends it."""
    status = ControlPage.open(path, num_ranks=2).status(group.rank)
    store = address.connect(SECONDS, Identity(group.rank, 0))
    peers = StoreGroup(store, "g", group.rank, 2, SECONDS)
    peers.status = status
    comm = WindowCollective(peers, SMALL, 60.0)
    if group.rank == 1:
        store.set("ready", b"")
        return None
    try:
        comm.all_reduce(torch.ones(2, 2), "layer 1")
    except EpochChanged as changed:
        return changed.epoch
    return -1


def test_a_new_epoch_ends_a_collective(pools: Pools, store: LocalStore):
    page, descriptor = ControlPage.create(num_ranks=2)

    def declare() -> None:
        store.address.connect(SECONDS, OBSERVER).wait(["ready"], SECONDS)
        page.change(1, "rank 1 died")

    thread = threading.Thread(target=declare)
    thread.start()
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    assert pools(2).run(with_status, path, store.address) == [2, None]
    thread.join()
    os.close(descriptor)


def test_a_store_that_is_gone(store: LocalStore):
    client = store.address.connect(5.0, OBSERVER)
    group = StoreGroup(client, "g", 0, 2, 5.0)
    store.close()
    with pytest.raises(PeerTimeout, match="a peer gave up earlier, or a connection broke") as error:
        group.barrier("together")
    assert error.value.missing == ()


def wrong(group: RankGroup) -> None:
    WindowCollective(group, 0, SECONDS)


def test_no_bytes_is_refused(pools: Pools):
    with pytest.raises(RankFailed, match="0 bytes for a rank's part: give 1 or more"):
        pools(2).run(wrong)
