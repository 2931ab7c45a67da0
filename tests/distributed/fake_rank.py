"""Ranks without a model: they obey the supervisor, step together, and fail as they are told."""

from __future__ import annotations

import os
import time

import torch

from moesaic.comm.launch.rank_link import RankLink
from moesaic.comm.windows.factory import create_window
from moesaic.comm.windows.window import PlaneSpec
from moesaic.core.messages import (
    Abort,
    Asleep,
    Query,
    QueryReply,
    RequestDelta,
    StepOutput,
    Submit,
    Wake,
)
from moesaic.core.rank_state import RankState
from moesaic.core.request import FinishReason, NewRequest


class FakeRank:
    """Serves by echo: a request gets its prompt's tokens again, one a step, until max_new_tokens.

    Every step the ranks of a replica meet in a window, in which each says whether it has work.
    `config`: what goes wrong, where and when: {"rank": 1, "step": 3, "what": "raise"}.
    """

    def __init__(self, link: RankLink) -> None:
        self.link = link
        ranks = link.mesh.ranks_of_replica(link.place.replica)
        self.first = ranks[0]
        group = link.group(f"replica{link.place.replica}", ranks)
        plane = PlaneSpec("work", (1,), torch.int64)
        self.window = create_window(group, [plane], link.timeout)
        self.peers = range(len(ranks))
        self.open: dict[int, tuple[NewRequest, int]] = {}
        self.step = 0

    def run(self) -> None:
        while True:
            message = self.link.receive()
            if isinstance(message, Wake):
                assert message.round == self.step, (message.round, self.step)
                self.serve()
            else:
                self.take(message)

    def serve(self) -> None:
        """Steps until no rank has work."""
        while self.advance():
            pass
        if self.link.rank == self.first:
            self.link.send(Asleep(self.link.place.replica, self.step))

    def advance(self) -> bool:
        """One step; whether any rank had work in it."""
        while (message := self.link.receive(0)) is not None:
            self.take(message)
        self.link.status.begin_step(self.step)
        misbehave(self.link, self.step)
        self.window.plane("work")[0] = len(self.open)
        self.window.touch(self.window.plane("work"))
        self.window.barrier("count work")
        work = sum(int(self.window.plane("work", peer)) for peer in self.peers)
        self.window.barrier("counted work")
        self.step += 1
        self.emit()
        return work > 0

    def take(self, message: object) -> None:
        match message:
            case Submit(requests):
                self.open |= {request.request_no: (request, 0) for request in requests}
            case Abort(number) if number in self.open:
                del self.open[number]
                self.link.send(StepOutput([RequestDelta(number, [], finish=FinishReason("abort"))]))
            case Query():
                group = self.link.mesh.group_of(self.link.place)
                answer = {"what": message.what, "rank": self.link.rank}
                self.link.send(QueryReply(message.number, group, answer))

    def emit(self) -> None:
        output = StepOutput([])
        for number, (request, count) in list(self.open.items()):
            token = request.prompt_ids[count % len(request.prompt_ids)]
            self.open[number] = (request, count + 1)
            if count + 1 < request.max_new_tokens:
                output.numbers.append(number)
                output.tokens.append(token)
            else:
                finish = FinishReason("length", length=count + 1)
                output.deltas.append(RequestDelta(number, [token], finish=finish))
                del self.open[number]
        if output.numbers or output.deltas:
            self.link.send(output)
        time.sleep(0.001)


def misbehave(link: RankLink, step: int) -> None:
    """At the given rank and step (-1: at start), once."""
    config = link.config
    if config.get("rank") != link.rank or config.get("step") != step:
        return
    match config["what"]:
        case "raise":
            raise ValueError("as it was told to")
        case "exit":
            os._exit(7)
        case "sleep":
            link.status.enter(RankState.COMPUTING, "sleep for ever")
            time.sleep(3600)


def run(link: RankLink) -> None:
    misbehave(link, -1)
    rank = FakeRank(link)
    link.ready({"pid": os.getpid(), "threads": torch.get_num_threads()})
    rank.run()
