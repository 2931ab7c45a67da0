"""Statistics of the server and its engine, for /metrics and the page."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moesaic import __version__
from moesaic.comm.mesh import Mesh
from moesaic.core.stats import EngineStats
from moesaic.engine.engine import Engine
from moesaic.observe.expert_load import LayerLoad, expert_loads
from moesaic.observe.metric_types import LAG_BOUNDS, ServerStats, Snapshot
from moesaic.observe.requests import Distribution, Histogram, RequestStats

logger = logging.getLogger(__name__)

# The least time between two queries of the ranks, and if requests have ended since; and the longest
# wait for their answer.
POLL_SECONDS: Final = 1.0
ENDED_SECONDS: Final = 0.1
POLL_TIMEOUT: Final = 2.0
LAG_SECONDS: Final = 0.02
SAMPLE_SECONDS: Final = 1.0
KEPT_SAMPLES: Final = 300
# Samples over which the page shows latencies.
WINDOW: Final = 60
# Samples over which the page shows rates: prompts come in bursts.
RATE_WINDOW: Final = 5
STALE_SECONDS: Final = 5.0
# The key of a request's scope that holds its route.
ROUTE: Final = "moesaic.route"
OTHER: Final = "other"


class EnginePoll:
    """The latest statistics of schedulers and ranks, which answer between steps.
    `ranks_per_expert`: how many ranks compute a part of the same expert."""

    def __init__(self, query: Callable[[], EngineStats], ranks_per_expert: int = 1) -> None:
        self._query, self._ranks_per_expert = query, ranks_per_expert
        self.stats = EngineStats(time.time(), [], [])
        self.experts: list[LayerLoad] = []
        self.batch = 0.0
        self.throughputs: dict[int, float] = {}
        """By group: tokens generated per second, between the last two readings."""
        self._totals: dict[int, tuple[int, int]] = {}
        self._when = self.stats.when
        self._polled_at, self._ended = float("-inf"), 0
        self._task: asyncio.Task[None] | None = None

    @property
    def age(self) -> float:
        return max(0.0, time.time() - self.stats.when)

    async def refresh(self, ended: int | None = None) -> None:
        """Updates the statistics, or keeps the old ones after POLL_TIMEOUT. They know of all
        requests that have `ended`, if it says how many."""
        if self._task is not None:  # it may have begun before some of these ended
            await asyncio.wait({self._task}, timeout=POLL_TIMEOUT)
            if self._task is not None:
                return
        is_behind = ended is not None and ended != self._ended
        if is_behind:
            await asyncio.sleep(self._polled_at + ENDED_SECONDS - time.monotonic())
        due = is_behind or time.monotonic() - self._polled_at >= POLL_SECONDS
        if self._task is None and due:
            self._polled_at, self._ended = time.monotonic(), ended or self._ended
            self._task = asyncio.create_task(self._poll())
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=POLL_TIMEOUT)

    async def _poll(self) -> None:
        try:
            self.stats, self.experts = await asyncio.to_thread(self._read)
            self._compare()
        except RuntimeError as error:  # the engine is shutting down, which /health reports
            logger.debug("the engine gave no statistics: %s", error)
        finally:
            self._task = None

    def _read(self) -> tuple[EngineStats, list[LayerLoad]]:
        """Runs in a thread: the sums over thousands of experts take milliseconds."""
        stats = self._query()
        return stats, expert_loads(stats, self._ranks_per_expert)

    def _compare(self) -> None:
        """Means since the last reading: tokens generated per step, and by each group per second."""
        tokens = steps = 0
        seconds = max(self.stats.when - self._when, 1e-3)
        self._when, self.throughputs = self.stats.when, {}
        for group in self.stats.groups:
            now = (group.generated_tokens, group.prefill_steps + group.decode_steps)
            before = self._totals.get(group.group, (0, 0))
            self._totals[group.group] = now
            self.throughputs[group.group] = (now[0] - before[0]) / seconds
            tokens, steps = tokens + now[0] - before[0], steps + now[1] - before[1]
        self.batch = tokens / steps if steps > 0 else 0.0


class LagMonitor:
    """Measures how late the event loop runs its timers: what blocks it delays all clients."""

    def __init__(self) -> None:
        self._histogram = Histogram(LAG_BOUNDS)
        self._latest: deque[tuple[int, float]] = deque(maxlen=60)

    async def run(self) -> None:
        while True:
            due = time.monotonic() + LAG_SECONDS
            await asyncio.sleep(LAG_SECONDS)
            self._record(max(0.0, time.monotonic() - due), int(due))

    def _record(self, lag: float, second: int) -> None:
        self._histogram.add(lag)
        if self._latest and self._latest[-1][0] == second:
            lag = max(lag, self._latest.pop()[1])
        self._latest.append((second, lag))

    @property
    def distribution(self) -> Distribution:
        return self._histogram.copy()

    @property
    def max(self) -> float:
        """The largest lag of the last minute."""
        return max((lag for _, lag in self._latest), default=0.0)


class Sample(msgspec.Struct, frozen=True):
    """One second of history."""

    when: float
    prompt_tokens: float
    """Per second, a mean over five seconds; so are `generated_tokens`."""
    generated_tokens: float
    open: int
    answering: int
    latency: dict[str, tuple[float | None, float | None]]
    """P50 and P95 of the last minute."""
    running: int | None = None
    """None if no client has polled the schedulers lately; so are the fields below."""
    waiting: int | None = None
    pages_used: float | None = None


class History:
    """Samples of the last minutes, so that a fresh page has curves at once."""

    def __init__(self) -> None:
        self._past: deque[tuple[float, RequestStats]] = deque(maxlen=WINDOW + 1)
        self.samples: deque[Sample] = deque(maxlen=KEPT_SAMPLES)

    def record(self, now: RequestStats, poll: EnginePoll) -> None:
        when = time.time()
        if self._past:
            self.samples.append(self._sample(when, now, poll))
        self._past.append((when, now))

    def _sample(self, when: float, now: RequestStats, poll: EnginePoll) -> Sample:
        (before, last) = self._past[-min(RATE_WINDOW, len(self._past))]
        _, first = self._past[0]
        seconds = max(when - before, 1e-3)
        groups = poll.stats.groups if poll.age < STALE_SECONDS else []
        total = sum(group.pages_total for group in groups)
        used = sum(group.pages_used for group in groups)
        return Sample(
            when=when,
            prompt_tokens=(now.prompt_tokens - last.prompt_tokens) / seconds,
            generated_tokens=(now.generated_tokens - last.generated_tokens) / seconds,
            open=now.open,
            answering=now.answering,
            latency={
                "ttft": _quantiles(now.time_to_first_token, first.time_to_first_token),
                "itl": _quantiles(now.inter_token, first.inter_token),
                "e2e": _quantiles(now.end_to_end, first.end_to_end),
            },
            running=sum(group.running for group in groups) if groups else None,
            waiting=sum(group.waiting for group in groups) if groups else None,
            pages_used=used / total if total else None,
        )


def _quantiles(now: Distribution, before: Distribution) -> tuple[float | None, float | None]:
    recent = now.since(before)
    return recent.quantile(0.5), recent.quantile(0.95)


class LiveStats:
    """The statistics of one server. Everything runs in the event loop's thread."""

    def __init__(self, engine: Engine, queued: Callable[[], int]) -> None:
        self._engine, self._queued = engine, queued
        self.poll = EnginePoll(engine.get_stats, _ranks_per_expert(engine))
        self.lag, self.history = LagMonitor(), History()
        self.http: Counter[tuple[str, int]] = Counter()
        self.info = engine_info(engine)
        self._model_name = engine.args.served_model_name or engine.args.model_path
        self._leaders = {
            str(n): leader_labels(engine.mesh, n) for n in range(engine.mesh.num_groups)
        }

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(work) for work in (self.lag.run(), self._record_history())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _record_history(self) -> None:
        while True:
            self.history.record(self._engine.request_stats(), self.poll)
            await asyncio.sleep(SAMPLE_SECONDS)

    async def snapshot(self) -> Snapshot:
        requests = self._engine.request_stats()
        await self.poll.refresh(sum(requests.ended.values()))
        server = ServerStats(
            http=dict(self.http),
            queued=self._queued(),
            loop_lag=self.lag.distribution,
            loop_lag_max=self.lag.max,
            startup=self._engine.startup_seconds,
            info=self.info,
            overlap=self._engine.overlap_choices,
            model_name=self._model_name,
            leaders=self._leaders,
        )
        return Snapshot(
            engine=self.poll.stats,
            experts=self.poll.experts,
            engine_age=self.poll.age,
            requests=self._engine.request_stats(),
            server=server,
            batch=self.poll.batch,
            throughputs=self.poll.throughputs,
            balance=self._engine.balancedness.exported,
        )


def _ranks_per_expert(engine: Engine) -> int:
    """In deterministic mode experts are not sharded over ranks."""
    return 1 if engine.args.enable_deterministic_inference else engine.mesh.moe_tp


def leader_labels(mesh: Mesh, group: int) -> dict[str, str]:
    """SGLang's labels for the rank that leads a group."""
    place = mesh.place(mesh.leader(group))
    return {
        "tp_rank": str(place.tp_rank),
        "pp_rank": str(place.stage),
        "moe_ep_rank": str(place.ep_rank),
        "dp_rank": str(group),
    }


def engine_info(engine: Engine) -> dict[str, str]:
    """The configuration that was resolved at start, in words."""
    args, mesh, providers = engine.args, engine.mesh, engine.providers
    sizes = ("tp", "ep", "dp", "pp", "replicas", "nnodes")
    parts = [f"{name} {getattr(mesh, name)}" for name in sizes if getattr(mesh, name) > 1]
    return {
        "version": __version__,
        "model": args.served_model_name or Path(args.model_path).name,
        "mesh": ", ".join(parts) or "one rank",
        "a2a_backend": providers["a2a"],
        "mode": providers["a2a_mode"],
        "runner_backend": providers["runner"],
        "emulated_link": providers["emulated_link"],
    }


class CountResponses:
    """Counts responses by route and status; an exception without a response counts as 500."""

    def __init__(self, app: ASGIApp, stats: LiveStats) -> None:
        self._app, self._http = app, stats.http

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answered = False

        async def count(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                answered = True
                self._http[scope.get(ROUTE, OTHER), message["status"]] += 1
            await send(message)

        try:
            await self._app(scope, receive, count)
        except Exception:
            if not answered:
                self._http[scope.get(ROUTE, OTHER), 500] += 1
            raise
