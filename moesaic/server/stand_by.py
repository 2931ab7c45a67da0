"""A node that may lead the service: it serves, or stands by until the node that leads is lost."""

from __future__ import annotations

import logging
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Final

from moesaic.comm.launch.keeper_link import KeeperLink, Note
from moesaic.comm.supervise.address import family_of, numeric
from moesaic.comm.supervise.event_hook import EventHooks, event_of_loss
from moesaic.comm.supervise.service_spec import split_address
from moesaic.config import ServerArgs
from moesaic.core.stats import ServiceLoss
from moesaic.engine.frontend.core_client import serve_node
from moesaic.server.run import serve

logger = logging.getLogger(__name__)

# How long another node may take to answer whether it leads.
ANSWER_SECONDS: Final = 1.0
# How long a former supervisor of this node may take to end.
END_SECONDS: Final = 10.0


def heads_of(args: ServerArgs) -> list[tuple[str, int]]:
    """The addresses at which nodes lead, that of node 0 first."""
    return [split_address(one) for one in (args.dist_init_addr or "").split(",")]


def may_lead(args: ServerArgs) -> bool:
    """Whether another node may take this one's place, or this one another's."""
    return args.nnodes > 1 and args.node_rank < len(heads_of(args)) > 1


def bind_meeting(args: ServerArgs) -> socket.socket:
    """A socket that is bound to this node's address for other nodes, and does not listen yet. The
    keeper has it: once this node leads, it is refused to nobody while the keeper lives."""
    host, port = heads_of(args)[args.node_rank]
    found = socket.socket(family_of(numeric(host)), socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((numeric(host), port))
    except OSError as error:
        text = f"--dist-init-addr: node {args.node_rank} cannot listen at {host}:{port}"
        raise ValueError(f"{text}: {error.strerror or error}") from None
    return found


def serve_or_stand_by(args: ServerArgs, listener: socket.socket, keeper: KeeperLink) -> int:
    if not keeper.leads and (args.node_rank > 0 or _another_leads(args)):
        _refuse_connections(listener, keeper)
        if (former := keeper.find()) is not None:
            former.end(END_SECONDS, ask=True)
            former.close()
        found = serve_node(args, keeper)
        if isinstance(found, int):
            keeper.tell(Note(ended=True))
            return found
        loss = ServiceLoss("node", found.cause, time.time())
        keeper.losses.add(loss)
        keeper.tell(Note(loss=loss))
        EventHooks(asdict(args)).tell(event_of_loss(loss))
        keeper.lost, keeper.has_taken_over = time.monotonic(), True
    if not keeper.leads:
        keeper.leads = True
        keeper.tell(Note(leads=True))
    return serve(args, listener, keeper)


def _refuse_connections(listener: socket.socket, keeper: KeeperLink) -> None:
    """Until it leads again, if it did. The sockets stay bound."""
    with socket.socket(fileno=os.dup(keeper.meeting)) as meeting:
        for one in (listener, meeting):
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                one.shutdown(socket.SHUT_RDWR)


def _another_leads(args: ServerArgs) -> bool:
    """Whether one of the nodes that may have taken this one's place listens."""
    for node, (host, port) in enumerate(heads_of(args)):
        if node != args.node_rank:
            with suppress(OSError):
                socket.create_connection((host, port), ANSWER_SECONDS).close()
                logger.info("node %d leads the service: this one joins it", node)
                return True
    return False
