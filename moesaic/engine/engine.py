"""The offline engine: `Engine(model_path=...).generate(...)`."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import queue
import random
import threading
import time
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Hashable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch

from moesaic.comm.mesh import mesh_of
from moesaic.config import ServerArgs, resolve
from moesaic.config.flags import without_secrets
from moesaic.core.redact import shown
from moesaic.core.sampling import Grammar, SamplingParams
from moesaic.core.stats import EngineStats
from moesaic.engine.errors import QueueFull as QueueFull
from moesaic.engine.frontend.admission import AdmissionGate, NoGate
from moesaic.engine.frontend.core_client import CoreClient, start_ranks
from moesaic.engine.frontend.inflight import InflightRequests
from moesaic.engine.frontend.inputs import (
    EngineLimits,
    GenerateInput,
    RequestSpec,
    check_logprobs,
    check_token_ids,
)
from moesaic.engine.frontend.output_queue import OutputQueue, OutputSender
from moesaic.engine.frontend.outputs import CallOutputs, RequestUpdate, Signal
from moesaic.engine.frontend.profiler import Profiler
from moesaic.engine.frontend.queries import CALLER_SECONDS, QueryTimeout, engine_stats
from moesaic.engine.frontend.request_state import Progress, RequestState
from moesaic.engine.text.detokenizer import IncrementalDetokenizer
from moesaic.engine.text.grammar_check import GrammarChecker
from moesaic.engine.text.grammar_child import GrammarSetup
from moesaic.engine.text.tokenizer import load_tokenizer
from moesaic.engine.worker.planner import EngineCore
from moesaic.engine.worker.rank_info import holdings, log_ranks
from moesaic.models.checkpoint import check_folder
from moesaic.models.tiny import materialise
from moesaic.observe.requests import RequestStats, RequestWatch
from moesaic.observe.spans import SpanKind

logger = logging.getLogger(__name__)

Core = EngineCore | CoreClient
Command = Callable[[Core], None]
Output = dict[str, Any]
# Longer prompts are made into tokens in a thread, so that an event loop is not held up.
LONG_PROMPT: Final = 2048


class Engine:
    """Serves one model. Keyword arguments are the server's flags with underscores.

    On one rank a thread of this process runs the model, unless it is to be `apart`; several ranks
    are always processes of their own, which end with this one. `generate` may be called from any
    number of threads and tasks at once, and their requests are batched together.
    """

    def __init__(self, *, apart: bool = False, **kwargs: Any) -> None:
        begun = time.monotonic()
        args = resolve(ServerArgs.from_kwargs(**kwargs))
        folder = materialise(args.model_path)
        tokenizer = folder if args.tokenizer_path == args.model_path else args.tokenizer_path
        self.args = replace(
            args,
            model_path=folder,
            tokenizer_path=tokenizer,
            served_model_name=args.served_model_name or args.model_path,
        )
        logging.getLogger("moesaic").setLevel(self.args.log_level.upper())
        check_folder(self.args.model_path, has_tensors=self.args.load_format != "dummy")
        if self.args.num_threads is not None:
            torch.set_num_threads(self.args.num_threads)
        self.tokenizer = load_tokenizer(self.args.tokenizer_path, self.args.chat_template)
        prepared = time.monotonic()
        self.mesh = mesh_of(self.args)
        self._core: Core = self._make_core(apart)
        self.startup_seconds = {
            "tokenizer": prepared - begun,
            "model": time.monotonic() - prepared,
        }
        eos_ids = frozenset[int]() if self.tokenizer is None else self.tokenizer.eos_ids
        facts = self._core.facts
        if self.tokenizer is not None:
            self.tokenizer.warn_beyond(facts.vocab_size)
        self._max_running = facts.max_running * self.mesh.num_groups
        self._limits = EngineLimits(
            vocab_size=facts.vocab_size,
            context_length=facts.context_length,
            cache_tokens=facts.cache_tokens,
            eos_ids=eos_ids or frozenset(facts.eos_ids),
            seeds=random.Random(self.args.random_seed),
            num_groups=self.mesh.num_groups,
            longest_token=0 if self.tokenizer is None else self.tokenizer.longest_token,
            grammars=self._grammar_checker(eos_ids or frozenset(facts.eos_ids)),
        )
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        # Re-entrant: the garbage collector may close an abandoned stream inside of it.
        self._lock = threading.RLock()
        self._watch = RequestWatch()
        self._posts: WeakKeyDictionary[asyncio.AbstractEventLoop, OutputSender] = (
            WeakKeyDictionary()
        )
        self._arrivals = count()
        self._closed = False
        self.spans = self._core.front
        self._desk = InflightRequests(
            self._tell, self._lock, self._max_running, self.args.max_queued_requests, self.spans
        )
        self._profiler = Profiler(self._ask, self.mesh, self.spans)
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="moesaic-engine", daemon=True)
        self._thread.start()
        atexit.register(self.shutdown)

    def _make_core(self, apart: bool) -> Core:
        """In this process, or on ranks of their own."""
        if self.args.node_rank > 0:
            raise ValueError(
                f"an Engine is made on node 0, not on --node-rank {self.args.node_rank}: run "
                "moesaic serve or moesaic generate with the same flags there"
            )
        args = without_secrets(self.args)
        if self.mesh.world == 1 and not apart:
            core = EngineCore(args)
            log_ranks([holdings(core.runner)], self.mesh)
            return core
        return start_ranks(args, self.mesh)

    def _grammar_checker(self, eos_ids: frozenset[int]) -> GrammarChecker:
        setup, folder = None, self.args.tokenizer_path
        if folder is not None:
            setup = GrammarSetup(folder, self._core.facts.vocab_size, sorted(eos_ids))
        return GrammarChecker(setup, self.args.grammar_backend)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        return_logprob: bool | list[bool] = False,
        logprob_start_len: int | list[int] = -1,
        top_logprobs_num: int | list[int] = 0,
        stream: bool = False,
        return_text_in_logprobs: bool = False,
        rid: str | list[str] | None = None,
        data_parallel_rank: int | list[int] | None = None,
    ) -> Output | list[Output] | Iterator[Output]:
        """Continues one prompt or a list of them; with `stream`, yields the growing answers."""
        call = GenerateInput(
            prompt,
            input_ids,
            sampling_params,
            return_logprob,
            logprob_start_len,
            top_logprobs_num,
            rid,
            data_parallel_rank,
        )
        signals: queue.SimpleQueue[Signal] = queue.SimpleQueue()
        jobs = self._prepare(call, lambda *signal: signals.put(signal), stream)
        call.check_grammars([job.request for job in jobs], self._limits.grammars)
        answers = self._answers(call, jobs, return_text_in_logprobs)
        pieces = self._stream(answers, signals)
        if stream:
            return pieces
        for _ in pieces:
            pass
        return answers.result()

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        return_logprob: bool | list[bool] = False,
        logprob_start_len: int | list[int] = -1,
        top_logprobs_num: int | list[int] = 0,
        stream: bool = False,
        return_text_in_logprobs: bool = False,
        rid: str | list[str] | None = None,
        data_parallel_rank: int | list[int] | None = None,
    ) -> Output | list[Output] | AsyncIterator[Output]:
        """`generate` for asyncio: await the answers, or with `stream` await an async iterator."""
        call = GenerateInput(
            prompt,
            input_ids,
            sampling_params,
            return_logprob,
            logprob_start_len,
            top_logprobs_num,
            rid,
            data_parallel_rank,
        )
        jobs, mailbox = await self._prepare_aside(call, stream)
        answers = self._answers(call, jobs, return_text_in_logprobs)
        pieces = self._async_stream(answers, mailbox)
        if stream:
            return pieces
        async for _ in pieces:
            pass
        return answers.result()

    async def follow(
        self, call: GenerateInput, stream: bool = True, gate: AdmissionGate | None = None
    ) -> AsyncGenerator[RequestUpdate, None]:
        """What becomes of the requests of a call, without the form that `generate` gives it: pieces
        as they grow (a slow reader gets larger ones), or without `stream` only the last of each.
        Closing it aborts what is not done. ValueError for what cannot be asked, QueueFull for what
        cannot be taken in, both before the first piece; a failure is a finish reason. Requests
        begin when the gate lets them."""
        jobs, mailbox = await self._prepare_aside(call, stream)
        check_logprobs([job.request for job in jobs])
        async with aclosing(self._signals(jobs, mailbox, gate)) as signals:
            async for number, progress in signals:
                yield RequestUpdate(number, progress, jobs[number].request)

    def abort(self, rid: str, client: object = None) -> int:
        """Ends what has exactly this id: a call, a prompt with all its samples, or one further
        sample; with `client` only what that client asked for. The number of requests, which is 0 if
        they are done already."""
        if not isinstance(rid, str):
            raise ValueError(f"rid must be the id of one request, not {shown(rid)}")
        return self._desk.abort(rid, client)

    def abort_all(self) -> int:
        """Ends whatever is in flight; the number of requests."""
        return self._desk.abort_all()

    async def check_grammar(self, grammar: Grammar, client: Hashable = None) -> None:
        """ValueError for a form that no answer can be held to. A new one waits in the client's
        line, and QueueFull means that there are too many."""
        SamplingParams(**{grammar.kind: grammar.text})  # type: ignore[arg-type]
        await self._limits.grammars.check_in_turn(grammar, client)

    def flush_cache(self) -> int:
        """Empties the prefix cache; the number of pages that became free."""
        return int(self._ask("flush_cache"))

    def get_server_info(self) -> dict[str, Any]:
        """What was resolved at start, and the state of scheduler and cache now."""
        info: dict[str, Any] = self._ask("info")
        return info

    def request_stats(self) -> RequestStats:
        """What became of requests since the start; asks nobody, and so never waits."""
        return self._watch.stats(len(self._desk))

    @property
    def providers(self) -> dict[str, Any]:
        """What carries tokens to experts and computes them, with nothing left open."""
        return self._core.providers

    def get_stats(self) -> EngineStats:
        """What was counted since the start, by serving group and rank. A rank that does not answer
        within seconds is there with what the supervisor sees of it."""
        return engine_stats(self._ask("stats"), self._core.facts.num_experts)

    def start_profile(
        self, output_dir: str | Path | None = None, num_steps: int | None = None
    ) -> None:
        """Records what every rank does, until `stop_profile` or for so many steps. The trace goes
        to `output_dir`; unless given, see `trace_folder`. ValueError if a recording is running."""
        self._profiler.start(output_dir, num_steps)

    def stop_profile(self) -> str:
        """Ends a recording and writes its trace; the path of the file. After a recording that ended
        by itself, that one's. ValueError if there was none."""
        return str(self._profiler.stop())

    @property
    def profiled_steps(self) -> int:
        """Steps in the trace that was written last, on all copies of the model together."""
        return self._profiler.steps

    @property
    def context_length(self) -> int:
        """Tokens of the longest sequence, prompt and answer."""
        return self._limits.context_length

    def check_token_ids(self, ids: Sequence[int]) -> None:
        """ValueError for one that the model does not have."""
        check_token_ids(ids, self._limits.vocab_size)

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    @property
    def max_running(self) -> int:
        """Requests that can be computed at once, on all ranks together."""
        return self._max_running

    @property
    def fault(self) -> str:
        """Why the engine cannot serve any more; empty while it can."""
        return self._core.fault

    def shutdown(self) -> None:
        """Ends running requests with an error and stops the engine's thread; may be repeated."""
        self._profiler.close()
        with self._lock:
            if not self._closed:
                self._closed = True
                self._inbox.put(None)
                self._core.wake()
        atexit.unregister(self.shutdown)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._limits.grammars.close()
        if self.tokenizer is not None:
            self.tokenizer.chat.close()

    def _prepare(
        self, call: GenerateInput, put: Callable[[int, Progress], None], stream: bool
    ) -> list[RequestState]:
        """Checks all but grammars; nothing is submitted before somebody listens."""
        begin = self.spans.clock()
        specs = call.specs(self.tokenizer, self._limits)
        self.spans.add(SpanKind.TOKENISE, begin, tokens=sum(len(spec.prompt_ids) for spec in specs))
        interval = self.args.stream_interval if stream else None
        return [
            self._job(spec, partial(self._signal, put, number), interval)
            for number, spec in enumerate(specs)
        ]

    async def _prepare_aside(
        self, call: GenerateInput, stream: bool
    ) -> tuple[list[RequestState], OutputQueue]:
        mailbox = OutputQueue(self._post(asyncio.get_running_loop()))
        work = partial(self._prepare, call, mailbox.put, stream)
        is_long = call.size > LONG_PROMPT or call.has_grammar
        jobs = await asyncio.to_thread(work) if is_long else work()
        requests = [job.request for job in jobs]
        await call.check_grammars_in_turn(requests, self._limits.grammars)
        return jobs, mailbox

    def _post(self, loop: asyncio.AbstractEventLoop) -> OutputSender:
        with self._lock:
            if loop not in self._posts:
                self._posts[loop] = OutputSender(loop)
            return self._posts[loop]

    def _answers(self, call: GenerateInput, jobs: list[RequestState], texts: bool) -> CallOutputs:
        single = call.is_single and len(jobs) == 1
        return CallOutputs(jobs, single, self.tokenizer if texts else None)

    def _signal(
        self, put: Callable[[int, Progress], None], number: int, progress: Progress
    ) -> None:
        if progress.finished:
            self._desk.ended(progress.rid)
        put(number, progress)

    def _job(
        self, spec: RequestSpec, listener: Callable[[Progress], None], interval: int | None
    ) -> RequestState:
        request = spec.to_request(next(self._arrivals))
        detokenizer = None
        if self.tokenizer is not None:
            detokenizer = IncrementalDetokenizer(self.tokenizer, spec.prompt_ids, spec.params)
        whose = spec.part_of, spec.client
        return RequestState(request, detokenizer, listener, interval, self._watch, *whose)

    def _stream(self, answers: CallOutputs, signals: queue.SimpleQueue[Signal]) -> Iterator[Output]:
        self._desk.submit(answers.jobs)
        try:
            while answers.pending:
                if (output := answers.take(signals.get())) is not None:
                    yield output
        finally:
            self._desk.leave(answers.jobs[number] for number in answers.pending)

    async def _async_stream(
        self, answers: CallOutputs, mailbox: OutputQueue
    ) -> AsyncGenerator[Output, None]:
        async with aclosing(self._signals(answers.jobs, mailbox)) as signals:
            async for signal in signals:
                if (output := answers.take(signal)) is not None:
                    yield output

    async def _signals(
        self, jobs: Sequence[RequestState], mailbox: OutputQueue, gate: AdmissionGate | None = None
    ) -> AsyncGenerator[Signal, None]:
        self._desk.hold(jobs, checked=gate is None)
        start = self._desk.begin if gate is None else self._desk.begin_or_end
        gate = gate or NoGate()
        mailbox.on_ended = gate.finished
        pending = set(range(len(jobs)))
        try:
            await gate.enter(len(jobs), partial(start, deque(jobs)))
            while pending:
                number, progress = await mailbox.get()
                if progress.finished:
                    pending.discard(number)
                yield number, progress
        finally:
            gate.leave()
            self._desk.leave(jobs[number] for number in pending)

    def _tell(self, command: Command) -> None:
        with self._lock:
            if os.getpid() != self._pid:
                raise RuntimeError(
                    f"this Engine was made in process {self._pid} and lives there: make one in "
                    f"this process, which must have been started by spawn and not by fork"
                )
            if self._closed:
                raise RuntimeError("the engine is shut down: make a new Engine")
            self._inbox.put(command)
            self._core.wake()

    def _ask(self, what: str, options: Mapping[str, Any] | None = None) -> Any:
        """The answer to a question that only the engine's thread, or ranks, may look up."""
        future: Future[Any] = Future()

        def answer(core: Core) -> None:
            try:
                core.ask(what, future, options)
            except Exception as error:
                future.set_exception(error)

        self._tell(answer)
        try:
            return future.result(CALLER_SECONDS)
        except TimeoutError:
            raise QueryTimeout(
                f"the engine did not answer {what!r} within {CALLER_SECONDS:g} s: it is in a long "
                "step, or its thread is held up"
            ) from None

    def _run(self) -> None:
        """An error that no single request is to blame for ends all of them, but not the engine."""
        core = self._core
        try:
            while self._obey():
                try:
                    core.step()
                except Exception as error:
                    logger.exception("the engine failed; all %d requests end", len(core.jobs))
                    core.fail_all(f"the engine failed: {error!r}")
        except BaseException as error:
            core.fault = core.fault or f"the engine's thread ended: {error!r}"
            raise
        finally:
            with self._lock:
                self._closed = True
            while not self._inbox.empty():
                self._carry_out(self._inbox.get())
            core.fail_all(core.fault or "the engine was shut down")
            core.close()

    def _obey(self) -> bool:
        """Carries out what was asked, waiting while there is nothing to compute; False: stop."""
        while not (self._inbox.empty() and self._core.has_work):
            try:
                command = self._inbox.get(timeout=self._core.patience)
            except queue.Empty:
                self._core.rest()
                continue
            if command is None:
                return False
            self._carry_out(command)
        return True

    def _carry_out(self, command: Command | None) -> None:
        """What goes wrong in one command concerns nobody else."""
        try:
            if command is not None:
                command(self._core)
        except Exception:
            logger.exception("a command to the engine failed")
