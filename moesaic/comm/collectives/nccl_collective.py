"""Collectives by NCCL, and the environment that it needs.

T tokens · H channels · R rows · V vocabulary · N elements of a rank's part.
"""

from __future__ import annotations

import ipaddress
import math
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from moesaic.comm.collectives.collective import Collective, check_counts, chosen_rows
from moesaic.comm.collectives.group import Peers
from moesaic.comm.collectives.nccl_errors import async_error
from moesaic.comm.errors import WindowAborted
from moesaic.comm.lifecycle import Membership
from moesaic.comm.supervise.address import interface_of

HOST_VARIABLE: Final = "NCCL_HOSTID"
INTERFACE_VARIABLE: Final = "NCCL_SOCKET_IFNAME"
CTAS_VARIABLE: Final = "NCCL_MAX_CTAS"
LOOPBACK_INTERFACE: Final = "lo"
ALWAYS: Final = {
    # torch's watchdogs would end the process: ours name the rank that is missing, and begin anew.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # A rank may run a step kernel by kernel while others replay its graph, so a captured operation
    # must not differ from a launched one.
    "NCCL_GRAPH_REGISTER": "0",
}
SHARED_GPU_CTAS: Final = "2"
# torch's own limit of an operation, in which another rank may compile or load.
OPERATION_LIMIT: Final = timedelta(days=1)
# How long NCCL may take to connect ranks that are all there.
CONNECT_SECONDS: Final = 120.0


def set_up_nccl(rank: int, node: int | None, address: str, shares_gpu: bool) -> None:
    """Sets the environment of NCCL, which reads it when the first communicator is formed. What the
    user has set stays. `node`, `address`: of this rank, where there are several nodes.

    NCCL refuses two ranks of one host on one GPU. So ranks that share one each have a host of their
    own, and few programs, as those of all of them wait on that GPU; and nodes on one machine, whose
    addresses are of loopback, are hosts.
    """
    chosen = dict(ALWAYS)
    if node is not None and ipaddress.ip_address(address).is_loopback:
        chosen[HOST_VARIABLE] = f"{socket.gethostname()} node {node}"
        chosen[INTERFACE_VARIABLE] = f"={interface_of(address) or LOOPBACK_INTERFACE}"
    if shares_gpu:
        chosen[HOST_VARIABLE] = f"{socket.gethostname()} node {node or 0} rank {rank}"
        chosen[CTAS_VARIABLE] = SHARED_GPU_CTAS
    for name, value in chosen.items():
        os.environ.setdefault(name, value)


class NcclCollective(Collective):
    """Ranks on several nodes, or with a GPU each.

    NCCL adds in its own order, in the type of the tensor, and rounds at every step: its sums differ
    from those of other collectives, and with the number of rows. Deterministic mode has no sums
    whose order matters. Ranks do not know which rows the others need, so all rows are summed.

    A missing rank is waited for until the operation is aborted, and so is one whose connection is
    lost, of which `broken` tells. Graphs hold addresses of the communicator, which lives as long as
    they do: they must be dropped between `abort` and `restart`.
    """

    keeps_graphs = False

    def __init__(self, group: Peers, timeout: float, device: torch.device) -> None:
        self.rank, self.size = group.rank, group.size
        self._timeout, self._device = timeout, device
        # A fresh prefix: keys of an earlier communicator of the group would be reused.
        own = f"{os.urandom(8).hex()} {group.host}"
        told = group.all_gather_bytes(own.encode(), "name a communicator")
        names, hosts = zip(*(text.decode().split() for text in told), strict=True)
        self._who = ", ".join(map("rank {} ({})".format, group.members, hosts))
        # torch does not keep a store alive whose methods are in Python.
        self._group_store = group.store
        self._store = PrefixStore(f"nccl {names[0]}", self._group_store)
        self._nccl = self._connect(self._store, CONNECT_SECONDS)
        self._lock = threading.Lock()
        self._reason = ""
        self._end: Future[Any] | None = None
        """The end of the communicator, once it is aborted for `_reason`."""
        self._is_isolated = False
        group.register(self)

    def sum_rows(self, x_NH: Tensor, rows: slice, operation: str) -> Tensor:
        chosen_rows(rows, len(x_NH))
        total = x_NH.detach().clone(memory_format=torch.contiguous_format)
        if total.numel():
            self._run(lambda nccl: nccl.allreduce([total]))
        return total[rows]

    def gather_rows(self, x_TH: Tensor, counts: Sequence[int], operation: str) -> Tensor:
        check_counts(self, counts, len(x_TH), "rows")
        if self._is_isolated and len(set(counts)) == 1:
            return torch.cat([x_TH.detach()] * self.size)
        if len(set(counts)) > 1 or not x_TH.numel():
            return torch.cat(self._gather(x_TH.detach(), counts))
        own = x_TH.detach().contiguous().view(torch.uint8)
        out = own.new_empty(self.size * len(own), *own.shape[1:])
        self._run(lambda nccl: nccl._allgather_base(out, own))
        return out.view(x_TH.dtype)

    def exchange_rows(self, x_NH: Tensor, operation: str) -> Tensor:
        """As in `WindowCollective`."""
        own = x_NH.detach().contiguous()
        if self._is_isolated:
            return own.clone()
        out = torch.empty_like(own)
        if own.numel():
            self._run(lambda nccl: nccl.alltoall_base(out, own, [], []))
        return out

    def gather_columns(
        self, x_RV: Tensor, widths: Sequence[int], rows: slice, operation: str
    ) -> Tensor:
        check_counts(self, widths, x_RV.shape[1], "columns")
        parts = self._gather(x_RV.detach().t(), widths)
        return torch.cat(parts).t()[rows].contiguous()

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Rows that are exchanged or gathered inside are this rank's own, as many as in earnest: to
        time what is computed with them, no rank waits for others. All ranks enter it together."""
        self._is_isolated = True
        try:
            yield
        finally:
            self._is_isolated = False

    def abort(self, reason: str) -> None:
        """Returns at once: NCCL waits until no graph holds its kernels, which the caller drops."""
        with self._lock:
            if self._end is None:
                # Before NCCL's kernels return, as what they leave is no result.
                self._reason, self._end = reason, Future()
                _in_thread(self._nccl.abort, self._end, "nccl abort")

    def restart(self, membership: Membership) -> None:
        """Forms a new communicator: ranks may have started different numbers of operations."""
        self.abort("it begins anew")
        assert self._end is not None
        try:
            self._end.result(self._timeout)
        except TimeoutError:
            raise TimeoutError(
                f"NCCL has not given up its communicator within {self._timeout:g} s: CUDA graphs "
                "may still hold operations of it"
            ) from None
        # Another rank may have waited for the end of its own.
        seconds = self._timeout + CONNECT_SECONDS
        self._nccl = self._connect(PrefixStore(str(membership.generation), self._store), seconds)
        with self._lock:
            self._reason, self._end = "", None

    def broken(self) -> str:
        """NCCL's kernels wait on when it has lost a connection."""
        with self._lock:
            error = "" if self._end is not None else self._error()
        return error and f"NCCL has failed between {self._who}: {error}"

    def check(self) -> None:
        """An aborted operation has no result. Other errors of NCCL are raised at a launch, if at
        all; `broken` finds those of connections."""
        if self._end is not None:
            raise WindowAborted(self._reason)

    def close(self) -> None:
        with self._lock:
            if self._end is None:
                self._reason, self._end = "it is closed", Future()
                self._nccl.shutdown()

    def _run(self, start: Callable[[Any], Any]) -> None:
        self.check()
        try:
            start(self._nccl).wait()
        except RuntimeError as error:
            if self._end is not None:  # NCCL reports an abort as another error
                raise WindowAborted(self._reason) from error
            raise

    def _connect(self, store: Store, seconds: float) -> Any:
        """Forms a communicator. NCCL may try for ever to reach a rank, which nothing ends."""
        device = torch.cuda.current_device() if self._device.type == "cuda" else None

        def form() -> Any:
            if device is not None:  # each thread has its own
                torch.cuda.set_device(device)
            return self._form(store)

        end: Future[Any] = Future()
        _in_thread(form, end, "nccl connect")
        try:
            return end.result(seconds)
        except TimeoutError:
            raise TimeoutError(
                f"NCCL has not connected {self._who} within {seconds:g} s: set NCCL_SOCKET_IFNAME "
                "to an interface by which they reach each other (see `moesaic doctor --cluster`)"
            ) from None

    def _form(self, store: Store) -> Any:
        """Connects at once, since a graph may be captured later."""
        factory: Any = torch.distributed.ProcessGroupNCCL
        options = factory.Options()
        options._timeout = OPERATION_LIMIT
        nccl = factory(store, self.rank, self.size, options)
        nccl.allreduce([torch.zeros(1, device=self._device)]).wait()
        self._comm = nccl._comm_ptr()
        return nccl

    def _error(self) -> str:
        return async_error(self._comm)

    def _gather(self, x_NH: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """The parts of all ranks, sent with as many rows as the longest."""
        most = max(counts)
        if not most * math.prod(x_NH.shape[1:]):
            return [x_NH.new_empty(count, *x_NH.shape[1:]) for count in counts]
        own = x_NH.new_empty(most, *x_NH.shape[1:])
        own[: len(x_NH)] = x_NH
        parts = [torch.empty_like(own) for _ in counts]
        wires = [part.view(torch.uint8) for part in parts]
        self._run(lambda nccl: nccl.allgather([wires], [own.view(torch.uint8)]))
        return [part[:count] for part, count in zip(parts, counts, strict=True)]


def _in_thread(work: Callable[[], Any], end: Future[Any], name: str) -> None:
    """Runs what may never return; the process does not wait for it at its end."""

    def run() -> None:
        try:
            end.set_result(work())
        except Exception as error:
            end.set_exception(error)

    threading.Thread(target=run, daemon=True, name=name).start()
