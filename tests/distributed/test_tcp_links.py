"""Links between nodes: who is refused, what is malformed, who is lost, and when waits end."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.errors import PeerLost, PeerTimeout, RankFailed
from moesaic.comm.launch.local_ranks import LocalRanks, PerRank
from moesaic.comm.network.handshake import GREETING, Role, introduce
from moesaic.comm.supervise.control_page import ControlPage, EpochChanged
from moesaic.comm.windows.factory import create_window
from moesaic.comm.windows.node_window import NodeWindow
from moesaic.comm.windows.tcp_links import HEAD, MARK, FrameKind, TcpLinks, frame
from moesaic.comm.windows.window import CHANNELS, PlaneSpec, control_bytes
from moesaic.core.rank_state import RankState
from tests.distributed.nodes import (
    SECRET,
    TWO,
    lonely_window,
    on_nodes,
    puts,
)

# A nonce, an identity and a proof.
ANSWER_BYTES = 32 + 16 + 32


def refused(group: RankGroup) -> tuple[str, str]:
    """Node 1 has another secret; then all have the same."""
    secret = SECRET if group.rank < 2 else b"of somebody else entirely"
    port = ""
    with on_nodes(group, TWO, secret) as links:
        port = f"127.0.0.{1 + group.rank // 2}:{links.port}"
        try:
            create_window(group, [], timeout=5)
            text = ""
        except RuntimeError as error:
            text = str(error)
    assert puts(group, TWO, 2) == []
    return text, port


def test_a_wrong_secret_is_refused(pools: Callable[[int], LocalRanks]):
    found = pools(4).run(refused)
    ports = [port for _, port in found]
    for text, _ in found:
        assert text == found[0][0]
        assert text.startswith("no shared window: rank 0: rank 2 of node 1 (127.0.0.2:")
        for port in ports:
            assert port in text
        assert text.count("does not know this node's secret: give all nodes the same") == 4


@pytest.mark.parametrize(
    ("address", "secret", "match"),
    [
        ("0.0.0.0", SECRET, "address '0.0.0.0'"),
        ("", SECRET, "address ''"),
        ("127.0.0.1", b"short", "the secret has 5 bytes: give 16 or more"),
    ],
)
def test_what_links_do_not_take(address: str, secret: bytes, match: str):
    with pytest.raises(ValueError, match=match):
        TcpLinks(0, 0, address, secret)


def test_no_links():
    group = RankGroup.alone()
    group.size, group.nodes = 2, (0, 5)
    with pytest.raises(ValueError, match=r"on nodes \[0, 5\]: give it links"):
        create_window(group, [], timeout=1)


def hear(port: int, said: bytes) -> bytes:
    """What a listener answers to somebody who says that; empty if it hangs up."""
    with socket.create_connection(("127.0.0.1", port), 5) as stranger:
        try:
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            return stranger.recv(1000)
        except OSError:  # it did not even listen to the end
            return b""


def strangers(group: RankGroup) -> list[str]:
    """Everybody's port is talked to by strangers while a window is in use."""
    generator = random.Random(group.rank)
    with on_nodes(group, TWO) as links:
        ports = group.all_gather_bytes(str(links.port).encode(), "ports")
        window = create_window(group, [PlaneSpec("x", (64,), torch.uint8)], timeout=20)
        wrong = []
        for turn in range(1, 30):
            junk = generator.randbytes(generator.randrange(1, 3000))
            if turn % 3 == 0:
                junk = GREETING + bytes([Role.LINK]) + junk.ljust(80, b"!")
            elif turn % 3 == 1:
                junk = frame(FrameKind.POST, 1, 0, 1 << 40, "lies", [(8192, 64)]) + junk
            if group.rank == 0:
                # Only the greeting is answered, if the stranger is still there to hear it.
                most = ANSWER_BYTES if turn % 3 == 0 else 0
                if len(hear(int(ports[0]), junk)) > most:
                    wrong.append(f"answer to {junk[:20]!r}")
            window.plane("x").fill_(turn)
            window.touch(window.plane("x"))
            window.signal(0, turn, "go on")
            window.wait(0, turn, "go on")
            if not bool((window.stacked("x") == turn).all()):
                wrong.append(f"turn {turn}")
            window.barrier("read")
    return wrong


def test_strangers_change_nothing(pools: Callable[[int], LocalRanks]):
    assert pools(4).run(strangers) == [[]] * 4


def replay(group: RankGroup) -> bool:
    """The proof that somebody gave once is worth nothing the next time."""
    assert group.size == 1
    links = TcpLinks(0, 0, "127.0.0.1", SECRET)
    other = TcpLinks(5, 1, "127.0.0.1", SECRET)
    said = bytearray()

    class Overheard:
        def __init__(self, connection: socket.socket) -> None:
            self._connection = connection

        def sendall(self, data: bytes) -> None:
            said.extend(data)
            self._connection.sendall(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._connection, name)

    with socket.create_connection(("127.0.0.1", links.port), 5) as connection:
        overheard: Any = Overheard(connection)
        introduce(overheard, Role.LINK, other.identity, SECRET, time.monotonic() + 5)
    answer = hear(links.port, bytes(said))
    links.close()
    other.close()
    return len(said) == 89 and len(answer) == ANSWER_BYTES


def test_a_proof_cannot_be_replayed():
    assert replay(RankGroup.alone())


LIES = {
    "beyond": frame(FrameKind.POST, 0, 0, 9, "x", [(1 << 30, 64)]),
    "negative": frame(FrameKind.POST, 0, 0, 9, "x", [((1 << 64) - 8, 64)]),
    "long": frame(FrameKind.POST, 0, 0, 9, "x", [(control_bytes(4, CHANNELS), 1 << 50)]),
    "control": frame(FrameKind.POST, 0, 0, 9, "x", [(0, 64)]) + b"\xff" * 64,
    "channel": frame(FrameKind.POST, 0, 17, 9, "x"),
    "epoch": frame(FrameKind.POST, 0, 0, -1, "x"),
    "kind": frame(FrameKind.CLOSE, 0)[:4] + b"\x09" + frame(FrameKind.CLOSE, 0)[5:],
    "window": frame(FrameKind.POST, 12345, 0, 9, "x"),
    "again": frame(FrameKind.OPEN, 0),
    "mark": b"\0" * 200,
    "cut": frame(FrameKind.POST, 0, 0, 9, "x", [(control_bytes(4, CHANNELS), 64)]) + b"\1" * 10,
    "huge": HEAD.pack(MARK, FrameKind.POST, 0, 0, (1 << 32) - 1, 0, 9),
}


def lied_to(group: RankGroup, lie: bytes) -> tuple[str, bool]:
    """Rank 3 sends this in place of its second signal; what a wait then says, and whether its
    window is as before."""
    with on_nodes(group, TWO):
        window = create_window(group, [PlaneSpec("x", (64,), torch.uint8)], timeout=20)
        assert isinstance(window, NodeWindow)
        window.signal(0, 1, "truth")
        window.wait(0, 1, "truth")
        if group.rank == 3:
            number = window._sender.window
            told = bytearray(lie)
            if lie.startswith(MARK):
                fields = list(HEAD.unpack(lie[: HEAD.size]))
                fields[5] = fields[5] or number
                told[: HEAD.size] = HEAD.pack(*fields)
            outlet = window._sender.routes[0].outlet
            outlet.send([bytes(told)], 5)
            outlet.close()
        text = ""
        if group.rank < 2:
            try:
                window.wait(0, 2, "lies", ranks=[3], timeout=15)
            except PeerTimeout as error:
                assert isinstance(error, PeerLost) and error.missing == (3,)
                text = str(error)
        group.barrier("heard")
        return text, bool((window.stacked("x") == 0).all())


@pytest.mark.parametrize("name", sorted(LIES))
def test_a_malformed_frame_ends_the_connection(name: str, pools: Callable[[int], LocalRanks]):
    found = pools(4).run(lied_to, LIES[name])
    for text, clean in found[:2]:
        assert text.startswith("rank 3 is lost in 'lies': rank 3 of node 1 (127.0.0.2:")
        said = "broke its connection" if name == "cut" else "sent "
        assert said in text and (clean or name == "cut")


def killed(group: RankGroup, victim: int) -> tuple[str, float, tuple[int, ...]]:
    """All wait for a rank that then dies."""
    with on_nodes(group, TWO):
        plane = PlaneSpec("t", (1,), torch.float64)
        window = create_window(group, [plane], timeout=15)
        window.barrier("start")
        if group.rank == victim:
            time.sleep(0.3)
            window.plane("t")[0] = time.monotonic()
            window.touch(window.plane("t"))
            window.signal(1, 1, "the last thing it does")
            os.kill(os.getpid(), signal.SIGKILL)
        window.signal(0, 1, "deepep dispatch, layer 3")
        try:
            window.wait(0, 1, "deepep dispatch, layer 3", timeout=5)
        except PeerTimeout as error:
            seconds = time.monotonic() - float(window.plane("t", victim)[0])
            # What it sent before it died is there, and is not an error.
            window.wait(1, 1, "its last signal", ranks=[victim])
            return str(error), seconds, error.missing
    return "", 0.0, ()


def test_a_killed_rank_of_another_node_is_named():
    with LocalRanks(4, timeout=60) as ranks:
        with pytest.raises(RankFailed, match="rank 3: process") as failed:
            ranks.run(killed, 3)
        for rank in (0, 1):
            text, seconds, missing = failed.value.results[rank]
            assert missing == (3,)
            assert text.startswith(
                "rank 3 is lost in 'deepep dispatch, layer 3': rank 3 of node 1 (127.0.0.2:"
            )
            assert "closed its connection (last seen: 'the last thing it does')" in text
            assert seconds < 4.5  # not after the timeout
        assert failed.value.results[2][2] == (3,)
        assert ranks.run(puts, TWO, 3) == [[]] * 4


def unreachable(group: RankGroup) -> str:
    """Node 1 listens no more: rank 0 cannot send to it, and says so when it waits for it. What
    concerns its own node only goes on."""
    with on_nodes(group, TWO) as links:
        window = create_window(group, [PlaneSpec("x", (1 << 20,), torch.uint8)], timeout=20)
        window.barrier("start")
        group.barrier("all have left it")
        if group.rank >= 2:
            links.close()
        group.barrier("closed")
        text = ""
        if group.rank < 2:
            for epoch in range(1, 20):
                window.touch(window.plane("x"))
                window.signal(0, epoch, "into the void")
                window.wait(0, epoch, "here", ranks=[0, 1])
            try:
                window.wait(0, 1, "there", timeout=15)
            except PeerLost as error:
                assert error.missing == (2, 3)
                text = str(error)
        group.barrier("end")
    return text


def test_a_node_that_cannot_be_reached(pools: Callable[[int], LocalRanks]):
    for text in pools(4).run(unreachable)[:2]:
        assert text.startswith("rank 2 is lost in 'there': rank 2 of node 1 (127.0.0.2:")
        assert "rank 3 is lost in 'there': rank 3 of node 1 (127.0.0.2:" in text


def test_sending_to_nobody_is_told():
    window, sender, _ = lonely_window([PlaneSpec("x", (64,), torch.uint8)], nodes=(0, 1, 1))
    for route in sender.routes:
        route.outlet._connection.close()
    window.signal(0, 1, "a step")
    with pytest.raises(PeerLost, match=r"rank 2 is lost in 'a step': node 1 \(rank 2\): rank 2 of"):
        window.wait(0, 1, "a step", ranks=[0, 2])


def test_who_takes_nothing_is_given_up():
    specs = [PlaneSpec("x", (1 << 24,), torch.uint8)]
    window, sender, silent = lonely_window(specs, nodes=(0, 1))
    sender.routes[0].outlet._connection.settimeout(0.05)
    window.touch(window.plane("x"))
    window.signal(0, 1, "a step")
    with pytest.raises(PeerLost, match=r"it has taken nothing for 1\.0 s"):
        window.wait(0, 1, "a step", ranks=[1])
    silent.close()


def new_epoch(group: RankGroup, nodes: tuple[int, ...]) -> tuple[str, int, float, list[str]]:
    """Rank 0 declares a new epoch while all but it sleep in a wait; what they then say, and how
    their num_ranks looked before and after."""
    path = b""
    if group.rank == 0:
        page, descriptor = ControlPage.create(num_ranks=4)
        path = f"/proc/{os.getpid()}/fd/{descriptor}".encode()
    path = group.all_gather_bytes(path, "page")[0]
    if group.rank:
        page = ControlPage.open(path.decode(), num_ranks=4)
    group.status = page.status(group.rank)
    try:
        with on_nodes(group, nodes):
            return waited_out(group, page)
    finally:
        group.status = None


def waited_out(group: RankGroup, page: ControlPage) -> tuple[str, int, float, list[str]]:
    window = create_window(group, [PlaneSpec("t", (1,), torch.float64)], timeout=20)
    group.barrier("start")
    seen, started, reason, epoch = [], 0.0, "", 0
    if group.rank == 0:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            states = [page.snapshot(rank) for rank in (1, 2, 3)]
            if all(status.state == RankState.WAITING for status in states):
                break
            time.sleep(0.01)
        seen = [f"{status.state.name} {status.operation}" for status in states]
        page.change(live=0b0111, reason="rank 3 is gone")
        started = time.monotonic()
    try:
        window.wait(0, 1, "deepep combine, layer 7")
    except EpochChanged as error:
        reason, epoch = str(error), error.epoch
    ended = time.monotonic()
    seen += [page.snapshot(group.rank).state.name]
    group.barrier("end")
    first = group.all_gather_bytes(str(started).encode(), "when")[0]
    return reason, epoch, ended - float(first), seen


@pytest.mark.parametrize("nodes", [(0, 0, 0, 0), TWO])
def test_a_new_epoch_ends_waits(nodes: tuple[int, ...], pools: Callable[[int], LocalRanks]):
    found = pools(4).run(new_epoch, nodes)
    for reason, epoch, seconds, seen in found:
        assert (reason, epoch) == ("rank 3 is gone", 2)
        assert seconds < 10  # 0.05 s where nothing else runs; the window waits for 20 s
        # Rank 0 found the epoch changed before it slept.
        assert seen[-1] in ("COMPUTING", "ABSENT")
    assert found[0][3][:3] == ["WAITING deepep combine, layer 7"] * 3
    assert [seen for _, _, _, seen in found[1:]] == [["COMPUTING"]] * 3


def stuck(group: RankGroup, nodes: tuple[int, ...], pids: list[int]) -> str:
    """Rank 1 is stopped; rank 0 sends it more than buffers hold, and hears of a new epoch."""
    page, _ = ControlPage.create(num_ranks=2)
    with on_nodes(group, nodes):
        group.status = page.status(group.rank)
        try:
            window = create_window(group, [PlaneSpec("x", (1 << 28,), torch.uint8)], timeout=30)
            window.barrier("start")
            if group.rank == 1:
                time.sleep(1)
                return ""
            os.kill(pids[1], signal.SIGSTOP)
            page.change(live=1, reason="rank 1 hangs")
            window.touch(window.plane("x"))
            try:
                window.signal(0, 1, "much")
            except EpochChanged as error:
                return str(error)
            finally:
                os.kill(pids[1], signal.SIGCONT)
        finally:
            group.status = None
    return "sent"


def test_a_new_epoch_ends_sending(pools: Callable[[int], LocalRanks]):
    ranks = pools(2)
    found = ranks.run(stuck, (0, 1), PerRank([ranks.pids] * 2))
    assert found[0] == "rank 1 hangs"
