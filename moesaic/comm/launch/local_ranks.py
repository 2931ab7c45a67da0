"""Runs functions on N processes of this machine that form a group."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Final

import torch

from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.errors import RankFailed
from moesaic.comm.lifecycle import Lifecycle, Membership
from moesaic.comm.network.handshake import Identity
from moesaic.comm.network.store import LocalStore, StoreAddress
from moesaic.comm.supervise.child_process import die_with_fork_server
from moesaic.comm.supervise.run_folder import RunFolder
from moesaic.core.process import keep_freed_memory

EXIT_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class PerRank:
    """An argument of `LocalRanks.run` that differs between ranks: values[rank]."""

    values: Sequence[Any]


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    pipe: Connection


class LocalRanks:
    """A pool of processes, one per rank, for tests, benchmarks and work on backends.

        with LocalRanks(4) as ranks:
            results = ranks.run(function, *args)

    calls `function(group, *args)` on every rank and returns the results in rank order. The function
    must be importable by its name: it, its arguments and its result are pickled over a private pipe
    between this process and its own children, and nowhere else.

    Processes live on between runs. After a failure the next run gets a new group, and new processes
    for those that died.
    """

    def __init__(self, size: int, timeout: float = 60.0, *, peer_timeout: float = 20.0) -> None:
        if size < 1:
            raise ValueError(f"{size} ranks: give 1 or more")
        self.size = size
        self.timeout = timeout
        self._peer_timeout = peer_timeout
        self._groups = 0
        self._folder = RunFolder.create()
        self._store = LocalStore(self._folder.path)
        self._context = multiprocessing.get_context("forkserver")
        # Loaded once in the fork server: a rank then starts in 0.1 s instead of 3 s.
        self._context.set_forkserver_preload(["moesaic.comm.launch.local_ranks"])
        self._workers = [self._start(rank) for rank in range(size)]

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid or 0 for worker in self._workers]

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls function(group, *args) on every rank; RankFailed if it raises or dies on any."""
        tasks = [pickle.dumps((function, _args_of(rank, args))) for rank in range(self.size)]
        self._replace_dead()
        failures: dict[int, str] = {}
        for rank, task in enumerate(tasks):
            try:
                self._workers[rank].pipe.send_bytes(str(self._groups).encode())
                self._workers[rank].pipe.send_bytes(task)
            except OSError:
                failures[rank] = self._describe_end(rank)
        results = self._collect(failures)
        if failures:
            self._groups += 1
            raise RankFailed(failures, results)
        return [results[rank] for rank in range(self.size)]

    def kill(self, rank: int) -> None:
        self._workers[rank].process.kill()
        self._workers[rank].process.join()

    def close(self) -> None:
        """Ends all ranks, by force if needed. May be repeated."""
        for worker in self._workers:
            worker.pipe.close()
        deadline = time.monotonic() + EXIT_SECONDS
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            worker.process.kill()
            worker.process.join()
        self._workers = []
        self._store.close()
        self._folder.remove()

    def _start(self, rank: int) -> _Worker:
        ours, theirs = self._context.Pipe()
        join = partial(_join, self._store.address, rank, self.size, self._peer_timeout)
        process = self._context.Process(
            target=_serve, args=(theirs, join), name=f"rank{rank}", daemon=True
        )
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def _replace_dead(self) -> None:
        if not self._workers:
            raise ValueError("these ranks are closed: make another LocalRanks")
        for rank, worker in enumerate(self._workers):
            if not worker.process.is_alive():
                worker.pipe.close()
                self._workers[rank] = self._start(rank)
                self._groups += 1

    def _collect(self, failures: dict[int, str]) -> dict[int, Any]:
        """Results by rank; errors are added to `failures` in the order of detection."""
        results: dict[int, Any] = {}
        deadline = time.monotonic() + self.timeout
        pending = {w.pipe: r for r, w in enumerate(self._workers) if r not in failures}
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pending.pop(pipe)
                try:
                    ok, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    ok, value = False, self._describe_end(rank)
                (results if ok else failures)[rank] = value
        for rank in pending.values():
            self.kill(rank)
            failures[rank] = f"gave no answer within {self.timeout:.1f} s and was killed"
        return results

    def _describe_end(self, rank: int) -> str:
        process = self._workers[rank].process
        process.join(EXIT_SECONDS)
        return f"process {process.pid} died (exit code {process.exitcode})"


def _args_of(rank: int, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(arg.values[rank] if isinstance(arg, PerRank) else arg for arg in args)


def _serve(pipe: Connection, join: Callable[[str], RankGroup]) -> None:
    """Runs the tasks that arrive through the pipe until it closes."""
    die_with_fork_server()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    keep_freed_memory()
    group: RankGroup | None = None
    with contextlib.suppress(EOFError, OSError):
        while True:
            name = pipe.recv_bytes().decode()
            task = pipe.recv_bytes()
            try:
                if group is None or group.name != name:
                    group = join(name)
                # A task must not restart what an earlier one left behind.
                group.lifecycle = Lifecycle(Membership(0, group.members))
                function, args = pickle.loads(task)
                answer = pickle.dumps((True, function(group, *args)))
            except Exception:
                answer = pickle.dumps((False, traceback.format_exc()))
            pipe.send_bytes(answer)


def _join(address: StoreAddress, rank: int, size: int, timeout: float, name: str) -> RankGroup:
    if size == 1:
        return RankGroup.alone(name, timeout)
    store = address.connect(timeout, Identity(rank, 0))
    return RankGroup.form(store, name, rank, size, timeout)
