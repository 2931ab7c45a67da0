"""Ranks of two nodes are killed, stopped and made to raise, and a whole node is lost: answers are
those of a run without faults."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import psutil
import pytest

from bench.fault_run import Run, wait_for
from bench.http_server import free_port
from moesaic import Engine
from moesaic.engine.frontend import core_client
from tests.e2e import interrupted_rank
from tests.e2e.namespaces import Node, NotAllowed, nodes
from tests.e2e.test_elastic import COMMON, SHORT, all_live, ask, during, info, scale
from tests.unit.test_draft_model import RANDOM

SECRET = "MOESAIC_SECRET", "a secret of some length"
FLAGS = COMMON | {"nnodes": 2, "speculative_algorithm": None, "ep_num_redundant_experts": 8}
# Long enough to be struck.
SHORTER = [one | {"max_new_tokens": 30, "regex": None} for one in SHORT]
NODE = f"""
import sys
from moesaic.engine.frontend import core_client
core_client.TARGET = {interrupted_rank.TARGET!r}
from moesaic.cli.main import main
sys.exit(main(["serve", *sys.argv[1:]]))
"""


class TwoNodes:
    """Node 0 in this process, and node 1 as the command line runs it, perhaps at another place."""

    def __init__(
        self,
        run: Run,
        place: Node | None = None,
        params: list[dict[str, Any]] = SHORT,
        **flags: Any,
    ) -> None:
        address = f"{'127.0.0.1' if place is None else place.bridge}:{free_port()}"
        self.run, self.place, self.params = run, place, params
        self.flags = FLAGS | {"dist_init_addr": address} | flags
        self.second = self.start_second()
        with run.marked(**dict([SECRET])):
            self.engine = Engine(**self.flags)
        self.wanted = self.ask()

    def start_second(self, **flags: Any) -> subprocess.Popen[bytes]:
        words = list[str]()
        for name, value in (self.flags | flags).items():
            values = () if value is True else (str(value),)
            words += [f"--{name.replace('_', '-')}", *values] if value is not None else []
        command = [sys.executable, "-c", NODE, *words, "--node-rank", "1"]
        with self.run.log.open("ab") as log:
            return subprocess.Popen(
                command if self.place is None else self.place.command(command),
                env=self.run.environment | dict([SECRET]),
                stderr=log,
            )

    def supervisor(self) -> int:
        """That of node 1."""
        children = psutil.Process(self.second.pid).children()
        return next(one.pid for one in children if one.name() == "moesaic-super")

    def kill(self, ranks: Sequence[int], number: int = signal.SIGKILL) -> None:
        pids = {one["rank"]: one["pid"] for one in info(self.engine)["ranks"]}
        for rank in ranks:
            os.kill(pids[rank], number)

    def ask(self) -> list[Any]:
        return ask(self.engine, self.params)

    def strike(self, strike: Any, *args: Any) -> None:
        """No answer is another one."""
        found = during(self.engine, self.run, partial(strike, *args), self.params)
        assert found == self.wanted

    def check(self, strike: Any, *args: Any) -> None:
        """Afterwards all ranks are back."""
        self.strike(strike, *args)
        self.await_all()

    def check_size(self, size: int) -> None:
        self.strike(scale, self.engine, size)
        wait_for(lambda: len(self.membership["live"]) == size, f"{size} ranks", self.run)
        assert self.ask() == self.wanted

    def await_all(self) -> None:
        wait_for(lambda: all_live(self.engine), "all ranks", self.run)

    @property
    def membership(self) -> dict[str, Any]:
        found: dict[str, Any] = info(self.engine)["membership"]
        return found


@contextmanager
def two_nodes(place: Node | None = None, **options: Any) -> Iterator[TwoNodes]:
    """At the end nothing is left of both."""
    run = Run()
    try:
        made = TwoNodes(run, place, **options)
        try:
            yield made
        finally:
            made.engine.shutdown()
        assert made.second.wait(60) == 0
        run.await_gone()
    finally:
        run.close()


@pytest.mark.timeout(400)
def test_answers_survive_the_loss_of_ranks_and_of_a_node() -> None:
    """Node 1 comes again by itself when its supervisor is lost."""
    with two_nodes(params=SHORTER) as made:
        made.check(made.kill, (0, 3))
        told = made.membership
        assert told["lost"] == told["returned"] >= 2
        made.check(lambda: os.kill(made.supervisor(), signal.SIGKILL))
        told = made.membership
        assert told["lost"] == told["returned"] >= 4 and told["live"] == [0, 1, 2, 3]
        assert told["moved_requests"] >= 1
        log = made.run.log.read_text()
        assert re.search(r"node 1 \(127.0.0.1\): rank 3 \([^)]*\) was killed by signal 9", log)
        assert "node 1 (127.0.0.1, ranks 2 to 3) is lost: " in log
        assert "node 1 starts again in 0.0 s" in log and log.count("node 1 is ready") >= 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_more_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few slots are left, a rank hangs or raises, and ranks of another node are removed.
    Weights are in memory of their node, where those that return find them."""
    monkeypatch.setattr(core_client, "TARGET", interrupted_rank.TARGET)
    with two_nodes(ep_num_redundant_experts=4, weight_cache_mode="daemon") as made:
        made.check(made.kill, (1, 2))
        assert "waits for its lost ranks: 2 ranks have 6 slots" in made.run.log.read_text()
        made.check(made.kill, (2,), signal.SIGSTOP)
        for point in ("accepted, not reported", "sent, not cleared"):
            made.check(made.kill, (3,), interrupted_rank.number_of(point))
        mapped = [one["mapped_bytes"] > 0 for one in info(made.engine)["ranks"]]
        assert mapped == [False, True, True, True]
        made.check(os.kill, made.supervisor(), signal.SIGSTOP)
        assert made.membership["lost"] == 7
        for size in (3, 4):
            made.check_size(size)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_service_grows_to_another_node() -> None:
    flags = {"tp_size": 2, "dp_size": 2, "ep_size": 2, "ep_num_redundant_experts": 8}
    with two_nodes(**flags, max_ep_size=4) as made:
        assert made.membership["live"] == [0, 1]
        for size in (4, 2, 4):
            made.check_size(size)
        made.check(made.kill, (2,))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_drafts_of_a_model_on_two_nodes() -> None:
    flags = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 1, "model_path": RANDOM}
    with two_nodes(**flags, disable_speculative_adaptive=True) as made:
        for ranks in ((0, 3), (2,)):
            made.check(made.kill, ranks)
        assert made.membership["returned"] == 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_other_node_follows_the_supervisor_of_node_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(*SECRET)
    with two_nodes() as made:
        number = made.engine._core.service.pid  # type: ignore[attr-defined]
        made.check(os.kill, number, signal.SIGKILL)
        made.check(made.kill, (1, 3))
        assert "node 0 (127.0.0.1:" in made.run.log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_node_that_an_operator_starts_again() -> None:
    """One with other flags is refused, and the service goes on."""
    with two_nodes() as made:

        def end() -> None:
            for one in [*psutil.Process(made.second.pid).children(), made.second]:
                one.kill()

        made.strike(end)
        assert made.second.wait(60) == -signal.SIGKILL
        made.second = made.start_second(page_size=4)
        assert made.second.wait(60) == 1
        assert "have different settings: --page-size is" in made.run.log.read_text()
        made.second = made.start_second()
        made.await_all()
        made.check(made.kill, (2,))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_network_that_is_cut_and_mended() -> None:
    """The other node is silent, and comes again when it can."""
    try:
        with nodes(1) as (far,), two_nodes(far) as made:
            made.strike(far.cut)
            assert made.membership["live"] == [0, 1]
            far.mend()
            made.await_all()
            assert made.ask() == made.wanted
            log = made.run.log.read_text()
            assert re.search(r"ranks 2 to 3\) is lost: silent for 3\.\d s", log)
            assert re.search(r"node 0 \([^)]*\) is lost: silent for", log)
    except NotAllowed as reason:
        pytest.skip(f"no network namespaces here: {reason}")
