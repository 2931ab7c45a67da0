"""Looks whether another node leads the service already."""

from __future__ import annotations

import time
from collections.abc import Callable

from moesaic.comm.supervise.address import numeric_or_name
from moesaic.comm.supervise.poll_loop import PollLoop
from moesaic.comm.supervise.service_spec import ServiceSpec
from moesaic.comm.supervise.supervisor_links import Disconnected, LeadLink
from moesaic.core.messages import Beat


class LeadSearch:
    """Of a supervisor that waits for all nodes: one of them may have taken over. `on_found` gets
    the address. If two nodes wait for each other, the one with the lower number leads."""

    def __init__(
        self,
        spec: ServiceSpec,
        secret: bytes,
        loop: PollLoop,
        on_found: Callable[[tuple[str, int]], None],
    ) -> None:
        others = [(numeric_or_name(host), port) for host, port in spec.heads]
        del others[spec.node_rank]
        self._spec, self._loop, self._on_found = spec, loop, on_found
        self._link: LeadLink | None = None
        if others:
            self._link = LeadLink(spec.node_rank, others, secret)
            self._link.start(spec.timeouts.nodes)
            loop.add(self._link.inbox.wakeup_fd, self._on_event)

    def close(self) -> None:
        if self._link is not None:
            self._loop.remove(self._link.inbox.wakeup_fd)
            self._link.close()
            self._link = None

    def _on_event(self) -> None:
        link = self._link
        for event in [] if link is None else link.receive(time.monotonic()):
            assert link is not None
            match event:
                case Beat(node, serves=serves) if serves or node < self._spec.node_rank:
                    self._on_found(link.address)
                    return
                case Disconnected() if link.connected_at:
                    link.start(self._spec.timeouts.nodes)
