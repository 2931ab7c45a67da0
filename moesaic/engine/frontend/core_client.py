"""The client side of an engine whose ranks are other processes."""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

import msgspec

from moesaic.comm.launch.keeper_link import KeeperLink
from moesaic.comm.launch.service import Service, ServiceSpec, Timeouts, host_ranks
from moesaic.comm.mesh import Mesh, mesh_of
from moesaic.comm.network.node_secret import NO_SECRET, own_secret
from moesaic.comm.supervise.address import numeric
from moesaic.comm.supervise.event_hook import EventHooks
from moesaic.config import ServerArgs
from moesaic.config.devices import gpus_of
from moesaic.config.gpus import describe_shares, max_ranks_per_gpu
from moesaic.core import messages
from moesaic.core.disagg import KVShare
from moesaic.core.request import ABORTED, FinishReason, failure
from moesaic.core.stats import ServiceLosses
from moesaic.disagg.likeness import draft_digest, model_digest, prompt_digest
from moesaic.disagg.lobby import Lobby
from moesaic.engine.frontend.queries import (
    GROUP_QUERIES,
    SUPERVISOR_QUERIES,
    PendingQuery,
    QueryTimeout,
)
from moesaic.engine.frontend.supervisor_restart import SupervisorRestart
from moesaic.engine.schedule.request_state import RequestState
from moesaic.engine.setup.memory_plan import check_plan
from moesaic.engine.worker.planner import ModelFacts
from moesaic.engine.worker.rank_info import log_rank, log_ranks, service_info
from moesaic.models.locate import model_folder, with_local_folders
from moesaic.observe.spans import SpanKind, Spans

logger = logging.getLogger(__name__)

TARGET = "moesaic.engine.worker.worker:run"
# What ranks on GPUs may take to abandon a step whose waits have been ended.
ABANDON_SECONDS = 20.0
# What a server may take to stop after its open requests have ended.
STOP_SECONDS = 15.0


class CoreClient:
    """Replaces LocalCore: it sends requests to the ranks and receives their tokens. A request that
    ends here by a stop string is aborted on its rank, and surplus tokens are dropped."""

    on_failure: Callable[[str], None] | None = None
    slack = 0.0
    idle_timeout: float | None = None
    """After a fault the engine's thread waits for commands without a timeout."""

    def __init__(self, args: ServerArgs, service: Service, lobby: Lobby | None = None) -> None:
        self.args, self.service = args, service
        self.lobby = lobby
        """Where requests of a prefill instance wait for those that continue them."""
        self.facts = msgspec.convert(service.facts, ModelFacts)
        self.found_requests = msgspec.convert(service.facts.get("open_requests", 0), int)
        """Those of a former process that ranks computed when this one started."""
        self.first_request = msgspec.convert(service.facts.get("first_request", 0), int)
        """The number of the first request: above all that ranks may still answer."""
        if service.keeper is not None:
            self.first_request = max(self.first_request, service.keeper.first_number)
        self.states: dict[int, RequestState] = {}
        """The open requests, by number."""
        self.fault = ""
        self.rank_facts = msgspec.convert(service.facts["ranks"], list[dict[str, Any]])
        """What each rank has loaded."""
        self.providers: dict[str, Any] = self.rank_facts[0]["providers"]
        self.front = Spans()
        """Spans of this process."""
        self._restart: SupervisorRestart | None = None
        if args.elastic_ep_backend is not None:
            hooks = EventHooks(asdict(args))
            self._restart = SupervisorRestart(args.restart_limit, hooks, service.keeper)
        self._num_queries = 0 if service.keeper is None else service.keeper.first_number
        self._queries: dict[int, PendingQuery] = {}
        if lobby is not None:
            shares = [rank["kv_shares"] for rank in self.rank_facts]
            lobby.serve(msgspec.convert(shares, list[list[KVShare]]), self.wake)

    @property
    def has_work(self) -> bool:
        """True while the service lives: the engine's thread waits for messages in `step`."""
        return not self.fault

    def wake(self) -> None:
        self.service.wake()

    def idle(self) -> None:
        pass

    def close(self) -> None:
        if self.lobby is not None:
            self.lobby.close()
        self.service.close()

    def add(self, state: RequestState) -> None:
        request = state.request
        assert request.request_no not in self.states, f"number {request.request_no} is in use"
        self.states[request.request_no] = state
        if self.fault:
            self._finish(state, failure(self.fault))
        elif self.lobby is not None and request.room is not None:
            prompt = prompt_digest(request.token_ids, request.cache_namespace)
            self.lobby.enter(request.request_no, request.room.number, prompt)
        else:
            self._submit(state)

    def _submit(self, state: RequestState) -> None:
        if self.is_away:  # all open requests are submitted once it is back
            return
        state.held = time.monotonic() - state.request.created
        self.service.send(messages.Submit([state.request.submission()]))

    @property
    def is_away(self) -> bool:
        """Whether the service was lost and is not ready again."""
        return self._restart is not None and self._restart.is_away

    @property
    def losses(self) -> ServiceLosses | None:
        return None if self._restart is None else self._restart.losses

    def _leave_lobby(self, lobby: Lobby) -> None:
        """Submits requests that another instance continues, and ends those that none does."""
        for number, target, why in lobby.take():
            if (state := self.states.get(number)) is None:  # it has ended here already
                continue
            if target is not None and target.stop != len(state.request.token_ids):
                own = len(state.request.token_ids)
                why = f"its prompt has {own} tokens here and {target.stop} on the decode instance"
            if why or target is None:
                self._cancel(state, failure(why))
                continue
            state.request.kv_target = target
            self._submit(state)

    def abort(self, request_no: int) -> None:
        if (state := self.states.get(request_no)) is not None:
            self._cancel(state, FinishReason("abort", message=ABORTED))

    def fail_all(self, message: str) -> None:
        end = self._finish if self.fault else self._cancel
        for state in list(self.states.values()):
            try:
                end(state, failure(message))
            except Exception:
                logger.exception("request %s did not end cleanly", state.request.rid)
        for query in self._queries.values():
            query.answer.set_exception(RuntimeError(message))
        self._queries.clear()

    def ask(self, what: str, answer: Future[Any], options: Mapping[str, Any] | None = None) -> None:
        """Queries the leader of each serving group, or every rank. `answer` is set with the last
        reply; after a timeout, without the missing ones."""
        if self.fault or self.is_away:
            away = QueryTimeout("the supervisor was lost; it starts again, and all ranks with it")
            answer.set_exception(RuntimeError(self.fault) if self.fault else away)
            return
        self._num_queries += 1
        mesh, every = self.service.spec.mesh, what not in GROUP_QUERIES
        expected = mesh.world if every else mesh.num_groups
        if what in SUPERVISOR_QUERIES:
            every, expected = False, 0
        self._queries[self._num_queries] = PendingQuery(what, answer, every, expected)
        self.service.send(messages.Query(self._num_queries, what, every, dict(options or {})))

    def step(self) -> None:
        """Waits for one message, or to be woken."""
        if self._restart is not None and self._restart.is_waiting:
            self._start_again(self._restart)
            return
        message = self.service.receive(self._timeout())
        self._expire()
        if self.lobby is not None:
            self._leave_lobby(self.lobby)
        if isinstance(message, messages.StepOutput):
            begin = self.front.clock()
            self._take_tokens(message)
            for delta in message.deltas:
                self._apply(delta)
            num_tokens = len(message.numbers) + len(message.deltas)
            self.front.add(SpanKind.DETOKENISE, begin, tokens=num_tokens)
        elif isinstance(message, messages.QueryReply):
            self._reply(message)
        elif isinstance(message, messages.Attached):
            self._attach(message)
        elif isinstance(message, messages.Ready) and self._restart is not None:
            self._note_ready(message, self._restart)
        elif isinstance(message, messages.Fault):
            self._on_fault(message)

    def _attach(self, attached: messages.Attached) -> None:
        """Goes on with a request of a former process, which has begun it."""
        if (state := self.states.pop(attached.request_no, None)) is None:  # it has ended here
            self.service.send(messages.Abort(attached.former))
            return
        state.request.request_no = attached.former
        self.states[attached.former] = state

    def _on_fault(self, fault: messages.Fault) -> None:
        text, restart = fault.message, self._restart
        if fault.yields and self.service.keeper is not None:
            logger.warning("%s: this one ends its connections, and joins it", text)
            self.service.keeper.stand_by()
        if restart is not None and (fault.supervisor or restart.is_away):
            late = QueryTimeout(text)
            for query in self._queries.values():
                query.answer.set_exception(late)
            self._queries.clear()
            if not (text := restart.lose(self.service, text, len(self.states))):
                return
        self.fault = text
        if self.lobby is not None:  # decode instances need not wait for it
            self.lobby.close()
        logger.error("%s", text)
        if self.on_failure is not None:
            self.on_failure(text)
        self.fail_all(text)

    def _start_again(self, restart: SupervisorRestart) -> None:
        """Starts a service that was lost, when it is time."""
        if not restart.is_due:
            return
        try:
            self.service = restart.start(self.service)
        except (OSError, RuntimeError) as error:
            self._on_fault(messages.Fault(str(error), supervisor=True))

    def _note_ready(self, ready: messages.Ready, restart: SupervisorRestart) -> None:
        """Of a rank that was restarted, or of the service: then open requests go on there."""
        if not restart.is_away:
            self.rank_facts[ready.rank] = ready.facts
            log_rank(ready.rank, ready.facts, self.service.spec.mesh)
            return
        self.rank_facts = ready.facts["ranks"]
        log_ranks(self.rank_facts, self.service.spec.mesh)
        restart.note_ready(len(self.states))
        for state in self.states.values():
            self._submit_again(state)

    def _submit_again(self, state: RequestState) -> None:
        """A request whose ranks were lost, and with them what another instance has sent."""
        request = state.request
        if self.lobby is None:
            request.room = None
        elif request.room is not None and request.kv_target is None:  # it waits in the lobby
            return
        request.emitted = request.output_ids
        self._submit(state)

    def _take_tokens(self, output: messages.StepOutput) -> None:
        """Appends the tokens of the requests that got nothing else."""
        states, now = self.states, time.monotonic()
        for number, token_id in zip(output.numbers, output.tokens, strict=True):
            if (state := states.get(number)) is None:  # it has ended here already
                continue
            try:
                if (reason := state.accept(token_id, now)) is not None:
                    self._cancel(state, reason)
            except Exception as error:
                self._fail(state, error)

    def _apply(self, delta: messages.RequestDelta) -> None:
        state = self.states.get(delta.request_no)
        if state is None:  # it has ended here already
            return
        try:
            self._advance(state, delta)
        except Exception as error:
            self._fail(state, error)

    def _advance(self, state: RequestState, delta: messages.RequestDelta) -> None:
        request = state.request
        request.cached_tokens, request.retractions = delta.cached_tokens, delta.retractions
        request.draft_counts = delta.drafts
        if delta.queue_seconds is not None:
            request.queue_seconds = state.held + delta.queue_seconds
        request.input_logprobs += delta.input_logprobs
        request.input_top_logprobs += delta.input_top_logprobs
        if delta.routed:
            request.add_routed(delta.routed_first, delta.routed)
        if delta.unsent and self.lobby is not None:  # the other instance need not wait for it
            self.lobby.leave(delta.request_no, delta.unsent)
        reason = state.accept_all(delta)
        if delta.finish is not None:
            self._finish(state, reason or delta.finish)
        elif reason is not None:
            self._cancel(state, reason)

    def _reply(self, reply: messages.QueryReply) -> None:
        query = self._queries.get(reply.number)
        if query is None:
            return
        query.record(reply)
        if query.is_answered:
            del self._queries[reply.number]
            self._resolve(query)

    def _resolve(self, query: PendingQuery) -> None:
        if query.every:
            query.answer.set_result(query.by_rank())
            return
        values = [query.replies[group].value for group in sorted(query.replies)]
        if query.what in SUPERVISOR_QUERIES:
            query.answer.set_result(query.overview)
            return
        if query.what == "rooms":
            query.answer.set_result([room for rooms in values for room in rooms])
            return
        if query.what == "flush_cache":
            query.answer.set_result(sum(values))
            return
        facts = query.overview, self.facts.num_experts, query.membership, self.losses
        info = service_info(asdict(self.args), values, *facts)
        info["rooms"] += [] if self.lobby is None else self.lobby.state()
        query.answer.set_result(info)

    def _timeout(self) -> float | None:
        """Seconds until the first query expires."""
        if not self._queries:
            return None
        first = min(query.deadline for query in self._queries.values())
        return max(0.0, first - time.monotonic())

    def _expire(self) -> None:
        now = time.monotonic()
        late = [number for number, query in self._queries.items() if query.deadline <= now]
        for query in map(self._queries.pop, late):
            if query.what == "rooms" or (query.every and (query.replies or query.overview)):
                self._resolve(query)
                continue
            missing = query.expected - len(query.replies)
            kind = "ranks" if query.every else "serving groups"
            error = QueryTimeout(f"{missing} {kind} did not answer {query.what!r} in time")
            query.answer.set_exception(error)

    def _fail(self, state: RequestState, error: Exception) -> None:
        logger.exception("request %s failed", state.request.rid)
        self._cancel(state, failure(f"its token could not be processed: {error!r}"))

    def _cancel(self, state: RequestState, reason: FinishReason) -> None:
        """Ends a request that its rank still computes."""
        self._finish(state, reason)
        keep = reason.type != "abort"
        self.service.send(messages.Abort(state.request.request_no, keep))

    def _finish(self, state: RequestState, reason: FinishReason) -> None:
        del self.states[state.request.request_no]
        if self.lobby is not None:
            self.lobby.leave(state.request.request_no, _why_not(reason))
        state.finish(reason)


def _why_not(reason: FinishReason) -> str:
    """Why a request ended without an answer, or nothing."""
    return (reason.message or "it failed") if reason.type == "abort" else ""


def start_ranks(args: ServerArgs, mesh: Mesh, keeper: KeeperLink | None = None) -> CoreClient:
    """Returns once all ranks of all nodes can serve; those of a former process, if they live."""
    if keeper is None or keeper.is_start:  # ranks that live have the memory already
        check_plan(args)
    sizes = ("tp", "ep", "dp", "pp", "replicas", "nnodes")
    shape = [f"{name} {getattr(mesh, name)}" for name in sizes if getattr(mesh, name) > 1]
    logger.info("starting %d ranks: %s", mesh.world, ", ".join(shape) or "no parallelism")
    if args.device == "cuda":
        logger.info("%s", describe_shares(gpus_of(args)))
    lobby = make_lobby(args)
    spec = service_spec(args, mesh, keeper)
    core = CoreClient(args, Service.start(spec, keeper=keeper), lobby)
    log_ranks(core.rank_facts, mesh)
    return core


def make_lobby(args: ServerArgs) -> Lobby | None:
    """The bootstrap port of a prefill instance; ValueError if it cannot listen there."""
    if args.disaggregation_mode != "prefill":
        return None
    host, port = numeric(args.host), args.disaggregation_bootstrap_port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        text = f"--disaggregation-bootstrap-port {port}: cannot listen at {host}: {error.strerror}"
        raise ValueError(text) from None
    secret = own_secret(file=args.node_secret_file) or NO_SECRET
    return Lobby(listening, secret, model_digest(args), draft_digest(args))


def serve_node(args: ServerArgs, keeper: KeeperLink | None = None) -> int | messages.TakeOver:
    """Runs the ranks of a node that another one leads until that ends the service; an exit status.
    TakeOver: this node leads from now on. `keeper`: if it may."""
    args = with_local_folders(args, model_folder(args))
    patience = args.drain_timeout + STOP_SECONDS
    return host_ranks(Service(service_spec(args, mesh_of(args), keeper), keeper=keeper), patience)


def service_spec(args: ServerArgs, mesh: Mesh, keeper: KeeperLink | None = None) -> ServiceSpec:
    assert args.dist_timeout is not None, "resolve fills it in"
    timeouts = Timeouts(
        collective=args.dist_timeout,
        hang=args.watchdog_timeout,
        abandon=ABANDON_SECONDS if args.device == "cuda" else math.inf,
    )
    return ServiceSpec(
        mesh=mesh,
        target=TARGET,
        config=asdict(args),
        node_rank=args.node_rank,
        dist_init_addr=args.dist_init_addr,
        secret_file=args.node_secret_file,
        load_balance=args.load_balance_method,
        prefix_page=0 if args.disable_radix_cache else args.page_size,
        timeouts=timeouts,
        threads=args.num_threads or max(1, len(os.sched_getaffinity(0)) // mesh.ranks_per_node),
        preload=("moesaic.engine.worker.worker",),
        log_level=args.log_level,
        gpu_sharers=max_ranks_per_gpu(gpus_of(args)) if args.device == "cuda" else 0,
        elastic=args.elastic_ep_backend is not None,
        start_size=args.elastic_ep_initial_size,
        restart_limit=args.restart_limit,
        keeper=0 if keeper is None else keeper.pid,
        leads=None if keeper is None else keeper.leads,
        listening=-1 if keeper is None else keeper.meeting,
    )
