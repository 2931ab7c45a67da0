"""The offline engine: `Engine(model_path=...).generate(...)`."""

from __future__ import annotations

import asyncio
import atexit
import gc
import logging
import queue
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Iterator, Sequence
from contextlib import aclosing
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Unpack

import torch

from moesaic.comm.launch.keeper_link import KeeperLink
from moesaic.comm.mesh import mesh_of
from moesaic.config import ServerArgs, resolve
from moesaic.config.flags import without_secrets
from moesaic.core.redact import shown
from moesaic.core.request import Request
from moesaic.core.sampling import Grammar, SamplingParams
from moesaic.core.stats import EngineStats
from moesaic.engine.errors import QueueFull as QueueFull
from moesaic.engine.frontend import routed_experts
from moesaic.engine.frontend.admission import CallAdmission
from moesaic.engine.frontend.balancedness import BalancednessReport
from moesaic.engine.frontend.core_client import start_ranks
from moesaic.engine.frontend.crash_dump import CrashDump
from moesaic.engine.frontend.engine_limits import EngineLimits
from moesaic.engine.frontend.engine_thread import Core, EngineThread
from moesaic.engine.frontend.expert_records import ExpertRecords
from moesaic.engine.frontend.inflight import InflightRequests
from moesaic.engine.frontend.input_checks import check_logprobs, check_token_ids
from moesaic.engine.frontend.inputs import (
    GenerateInput,
    GenerateOptions,
    PromptIds,
)
from moesaic.engine.frontend.output_queue import DirectDelivery, OutputQueue, OutputSenders
from moesaic.engine.frontend.outputs import (
    CallOutputs,
    IndexedProgress,
    OutputFormat,
    RequestUpdate,
)
from moesaic.engine.frontend.profiler import Profiler
from moesaic.engine.frontend.queries import engine_stats
from moesaic.engine.frontend.rebalance import REBALANCE_SECONDS, Rebalances
from moesaic.engine.schedule.request_state import Progress, RequestState
from moesaic.engine.sglang_engine import (
    MISSING_METHODS,
    TokenizerManager,
    TransformersTokenizer,
)
from moesaic.engine.text.detokenizer import IncrementalDetokenizer
from moesaic.engine.text.tokenizer import load_tokenizer
from moesaic.engine.worker.local_core import LocalCore
from moesaic.engine.worker.rank_info import log_ranks
from moesaic.models.checkpoint import check_folder
from moesaic.models.locate import changed_folder, own_folder, with_local_folders, with_own_folder
from moesaic.observe.requests import RequestStats, RequestWatch
from moesaic.observe.spans import SpanKind

Prompt = str | list[str] | None
InputIds = list[int] | list[list[int]] | None
SamplingOptions = dict[str, Any] | list[dict[str, Any]] | None
Output = dict[str, Any]
# Longer prompts are tokenised in a thread, because they would block the event loop.
LONG_PROMPT: Final = 2048


class Engine:
    """Serves one model. Keyword arguments are the server's flags with underscores. A single rank
    runs in a thread of this process unless `apart` asks for a process; several ranks are always
    processes, which end with this one. Any thread or task may call `generate` at any time."""

    def __init__(
        self, *, apart: bool = False, keeper: KeeperLink | None = None, **kwargs: Any
    ) -> None:
        """`keeper`: of a server's process that may be lost and started again."""
        started = time.monotonic()
        given = resolve(ServerArgs.from_kwargs(**kwargs))
        own = own_folder(given)
        self.args = with_local_folders(given, changed_folder(given, own))
        self.server_args = with_own_folder(self.args, given, own)
        """The resolved flags to show: the model's own folder, not one with a changed config."""
        logging.getLogger("moesaic").setLevel(self.args.log_level.upper())
        check_folder(self.args.model_path, has_tensors=self.args.load_format != "dummy")
        dump = CrashDump(self.args) if self.args.crash_dump_folder else None
        if self.args.num_threads is not None:
            torch.set_num_threads(self.args.num_threads)
        if self.args.gc_threshold is not None:
            gc.set_threshold(*self.args.gc_threshold)
        self.tokenizer = load_tokenizer(self.args.tokenizer_path, self.args.chat_template)
        prepared = time.monotonic()
        self.mesh = mesh_of(self.args)
        self._keeper = keeper
        self._core: Core = self._make_core(apart)
        self.startup_seconds = {
            "tokenizer": prepared - started,
            "model": time.monotonic() - prepared,
        }
        first_number = self._core.first_request
        self.limits = EngineLimits.of(self.args, self._core.facts, self.tokenizer, first_number)
        self.max_running = self._core.facts.max_running * self.mesh.num_groups
        """The most requests that run at once, on all ranks together."""
        self._watch = RequestWatch()
        self._senders = OutputSenders()
        self.spans = self._core.front
        self._thread = EngineThread(self._core)
        self._inflight = InflightRequests(
            self._thread, self.max_running, self.args.max_queued_requests, self.spans
        )
        self._inflight.lobby = self._core.lobby
        if dump is not None:
            self._core.on_failure = lambda reason: dump.write(reason, self._inflight.requests())
        mesh = self.mesh
        self._rebalances = Rebalances(self._thread.query, range(0, mesh.world, mesh.tp))
        self._profiler = Profiler(self._thread.query, self.mesh, self.spans, self.args.profile_dir)
        num_layers = self._core.facts.num_layers
        self._records = ExpertRecords(self._thread.query, self.args, self.mesh, num_layers)
        mode = self.args.expert_balancedness_report_mode
        self.balancedness = BalancednessReport(self._thread.query, self.mesh, mode)
        atexit.register(self.shutdown)

    def _make_core(self, apart: bool) -> Core:
        """A core in this process, or one whose ranks are processes."""
        if self.args.node_rank > 0 and not (self._keeper and self._keeper.leads):
            raise ValueError(
                f"an Engine runs on node 0, not on --node-rank {self.args.node_rank}: run "
                "moesaic serve or moesaic generate with the same flags there"
            )
        args = without_secrets(self.args)
        if self.mesh.world == 1 and not apart and args.disaggregation_mode == "null":
            core = LocalCore(args)
            log_ranks(core.rank_facts, self.mesh)
            return core
        return start_ranks(args, self.mesh, self._keeper)

    def note_serving(self) -> None:
        """Tells the keeper, if there is one, that requests may come."""
        if self._keeper is not None:
            self._keeper.note_ready(self._core.found_requests)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def generate(
        self,
        prompt: Prompt = None,
        sampling_params: SamplingOptions = None,
        input_ids: InputIds = None,
        **options: Unpack[GenerateOptions],
    ) -> Output | list[Output] | Iterator[Output]:
        """Continues one prompt or a list of prompts; with `stream`, yields the growing outputs."""
        call = GenerateInput.from_arguments(prompt, sampling_params, input_ids, options)
        signals: queue.SimpleQueue[IndexedProgress] = queue.SimpleQueue()
        states = self._prepare(call, partial(self._notify, signals))
        call.check_grammars([state.request for state in states], self.limits.grammars)
        outputs = self._call_outputs(call, states)
        stream = self._stream(outputs, signals)
        if call.stream:
            return stream
        for _ in stream:
            pass
        return outputs.result()

    async def async_generate(
        self,
        prompt: Prompt = None,
        sampling_params: SamplingOptions = None,
        input_ids: InputIds = None,
        **options: Unpack[GenerateOptions],
    ) -> Output | list[Output] | AsyncIterator[Output]:
        """`generate` for asyncio: await the outputs, or with `stream` await an async iterator."""
        call = GenerateInput.from_arguments(prompt, sampling_params, input_ids, options)
        states, output_queue = await self._prepare_async(call)
        outputs = self._call_outputs(call, states)
        stream = self._async_stream(outputs, output_queue)
        if call.stream:
            return stream
        async for _ in stream:
            pass
        return outputs.result()

    async def stream(
        self,
        call: GenerateInput,
        admission: CallAdmission | None = None,
        direct: DirectDelivery | None = None,
    ) -> AsyncGenerator[RequestUpdate, None]:
        """Yields the updates of a call's requests: increments as they come (larger ones for a slow
        reader), or without `call.stream` only the last of each. ValueError and QueueFull come
        before the first update; a later failure is a finish reason. Closing the generator aborts
        unfinished requests. Requests start when `admission` allows it. `direct` takes updates that
        arrive while the generator waits for them."""
        states, output_queue = await self._prepare_async(call)
        requests = [state.request for state in states]
        check_logprobs(requests)
        routed_experts.check_size(requests)
        if direct is not None:
            direct.requests, direct.queue = requests, output_queue
        async with aclosing(self._progress(states, output_queue, admission)) as found:
            async for number, progress in found:
                yield RequestUpdate(number, progress, states[number].request)

    def abort(self, rid: str, client: object = None) -> int:
        """Aborts the call, the prompt with all its samples, or the sample with this id, with
        `client` only if it is that client's; returns the number of open requests."""
        if not isinstance(rid, str):
            raise ValueError(f"rid must be the id of one request, not {shown(rid)}")
        return self._inflight.abort(rid, client)

    def abort_all(self) -> int:
        """Aborts all requests and returns their number."""
        return self._inflight.abort_all()

    async def check_grammar(self, grammar: Grammar, client: Hashable = None) -> None:
        """ValueError if no output can follow it, QueueFull if too many new grammars wait."""
        SamplingParams(**{grammar.kind: grammar.text})  # type: ignore[arg-type]
        await self.limits.grammars.check_in_turn(grammar, client)

    @cached_property
    def tokenizer_manager(self) -> TokenizerManager:
        """As SGLang's programs use it: `engine.tokenizer_manager.tokenizer`."""
        tokenizer = self.tokenizer
        folder = self.server_args.tokenizer_path or ""
        view = None if tokenizer is None else TransformersTokenizer(tokenizer, folder)
        return TokenizerManager(view, self.server_args)

    def get_tokenizer(self) -> TransformersTokenizer | None:
        """The tokenizer, with the names of transformers; None with `skip_tokenizer_init`."""
        return self.tokenizer_manager.tokenizer

    if not TYPE_CHECKING:  # a checker would allow every name

        def __getattr__(self, name: str) -> Any:
            if name in MISSING_METHODS:
                raise AttributeError(f"Engine.{name} is not supported: {MISSING_METHODS[name]}")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def flush_cache(self) -> int:
        """Empties the prefix cache and returns the number of pages that became free."""
        return int(self._thread.query("flush_cache"))

    def get_server_info(self) -> dict[str, Any]:
        """The resolved flags, and the present state of scheduler and cache."""
        info: dict[str, Any] = self._thread.query("info")
        shown = self.server_args
        return info | {"model_path": shown.model_path, "tokenizer_path": shown.tokenizer_path}

    def get_rooms(self) -> list[dict[str, Any]]:
        """The open requests that two instances share, with their phases and peers; also those of
        which the ranks do not tell in time."""
        if self._inflight.lobby is not None:
            return self._inflight.lobby.state()
        found: list[dict[str, Any]] = self._thread.query("rooms")
        return found + self._inflight.rooms_except({one["room"] for one in found})

    def request_stats(self) -> RequestStats:
        """Counts of requests since the start; it never waits."""
        return self._watch.stats(len(self._inflight))

    @property
    def queued(self) -> tuple[int, int]:
        """Requests that wait in front of the schedulers, and the tokens of their prompts."""
        return self._inflight.waiting()

    @property
    def providers(self) -> dict[str, Any]:
        """The resolved all-to-all and MoE runner backends."""
        return self._core.providers

    @property
    def overlap_choices(self) -> list[dict[str, Any]]:
        """What --overlap auto has measured and chosen at start."""
        found: list[dict[str, Any]] = self._core.rank_facts[0]["overlap_choices"]
        return found

    def routing_info(self, stats: EngineStats | None = None) -> dict[str, Any]:
        """The sizes of an answer's routed experts, and for each rank its MoE layers and the logical
        experts that it holds in each of them, by `stats`, or now; none for a rank that is late."""
        facts = self._core.facts
        held = {rank.rank: rank.held for rank in (stats or self.get_stats()).ranks}
        return {
            "num_layers": facts.num_layers,
            "top_k": facts.top_k,
            "ranks": [
                {"layers": rank["moe_layers"], "experts": held.get(number, [])}
                for number, rank in enumerate(self._core.rank_facts)
            ],
        }

    def get_stats(self) -> EngineStats:
        """Counters since the start; for a rank that is late, the supervisor's view of it."""
        stats = engine_stats(self._thread.query("stats"), self._core.facts.num_experts)
        stats.losses = self._core.losses
        return stats

    def rebalance(
        self, dry_run: bool = False, timeout: float = REBALANCE_SECONDS
    ) -> list[dict[str, Any]]:
        """Moves experts between ranks by the tokens since the last time, as `enable_eplb` does from
        time to time, and waits for it. A dry run shows the predicted gain and cost. One state for
        each stage with experts of each copy of the model; ValueError without `enable_eplb`."""
        return self._rebalances.run(dry_run, timeout)

    def hold_rebalances(self) -> None:
        """No rebalance becomes due before `forget_load`."""
        self._thread.query("hold_rebalances")

    def forget_load(self) -> None:
        """No rebalance plans from the tokens up to now, as if they had not been computed."""
        self._thread.query("forget_load")

    def scale_elastic_ep(self, size: int | None = None) -> dict[str, Any]:
        """Ends ranks, or starts those that were ended, until there are `size`, beside requests;
        returns at once, with the state that a call without `size` shows. ValueError if that cannot
        be done."""
        if self.args.elastic_ep_backend is None or self.mesh.world == 1:
            raise ValueError(
                "the number of ranks is fixed: start several with --elastic-ep-backend mooncake"
            )
        options = {} if size is None else {"size": size}
        state: dict[str, Any] = self._thread.query("scaling", options)
        if refused := state.pop("refused"):
            raise ValueError(refused)
        return state

    def rebalance_state(self) -> list[dict[str, Any]]:
        """What was moved last, and what moves now: the states that `rebalance` returns."""
        return self._rebalances.states()

    def start_profile(
        self, output_dir: str | Path | None = None, num_steps: int | None = None
    ) -> None:
        """Records what every rank does, for `num_steps` steps or until `stop_profile`. The trace is
        written to `output_dir`, or to `trace_folder`. ValueError while another recording runs."""
        self._profiler.start(output_dir, num_steps)

    def stop_profile(self) -> str:
        """Ends the recording and returns the path of its trace, once also after `num_steps` ended
        it; ValueError without one."""
        return str(self._profiler.stop())

    @property
    def profiled_steps(self) -> int:
        """Steps in the last trace, of all replicas together."""
        return self._profiler.steps

    def start_expert_distribution_record(self) -> None:
        """Records which experts take the tokens of each forward pass, from now on. ValueError
        without `expert_distribution_recorder_mode`."""
        self._records.start()

    def stop_expert_distribution_record(self) -> None:
        """Ends the recording; what was recorded waits for a dump."""
        self._records.stop()

    def dump_expert_distribution_record(self) -> dict[str, Any]:
        """Writes what was recorded since the start or the last dump; returns `files` and how many
        `passes` they have."""
        return self._records.dump().as_dict()

    @property
    def context_length(self) -> int:
        """The most tokens of a sequence, prompt and output."""
        return self.limits.context_length

    def check_token_ids(self, ids: Sequence[int]) -> None:
        """ValueError for an id that the model does not have."""
        check_token_ids(ids, self.limits.vocab_size)

    @property
    def fault(self) -> str:
        """Why the engine can no longer serve; empty while it can."""
        return self._core.fault

    def shutdown(self) -> None:
        """Fails running requests and stops the engine's thread. Repeated calls do nothing."""
        self._profiler.close()
        self.balancedness.close()
        atexit.unregister(self.shutdown)
        self._thread.close()
        self.limits.grammars.close()
        if self.tokenizer is not None:
            self.tokenizer.chat.close()

    def _prepare(
        self, call: GenerateInput, put: Callable[[int, Progress], None]
    ) -> list[RequestState]:
        """Validates everything but grammars; submits nothing."""
        begin = self.spans.clock()
        found = call.requests(self.tokenizer, self.limits)
        tokens = sum(request.prompt_len for request, _ in found)
        self.spans.add(SpanKind.TOKENISE, begin, tokens=tokens)
        return [
            self._make_state(call, request, ids, partial(put, number))
            for number, (request, ids) in enumerate(found)
        ]

    async def _prepare_async(self, call: GenerateInput) -> tuple[list[RequestState], OutputQueue]:
        output_queue = self._senders.new_queue()
        output_queue.on_finished = self._inflight.release
        work = partial(self._prepare, call, output_queue.put)
        is_long = call.size > LONG_PROMPT or call.has_grammar
        states = await asyncio.to_thread(work) if is_long else work()
        requests = [state.request for state in states]
        await call.check_grammars_in_turn(requests, self.limits.grammars)
        return states, output_queue

    def _make_state(
        self,
        call: GenerateInput,
        request: Request,
        ids: PromptIds,
        listener: Callable[[Progress], None],
    ) -> RequestState:
        detokenizer = None
        if self.tokenizer is not None:
            detokenizer = IncrementalDetokenizer(self.tokenizer, request.prompt_ids, request.params)
        interval = self.args.stream_interval if call.stream else None
        return RequestState(request, detokenizer, listener, interval, self._watch, ids, call.client)

    def _call_outputs(self, call: GenerateInput, states: list[RequestState]) -> CallOutputs:
        single = call.is_single and len(states) == 1
        texts = self.tokenizer if call.return_text_in_logprobs else None
        return CallOutputs(states, single, OutputFormat(texts, call.return_prompt_token_ids))

    def _notify(
        self, signals: queue.SimpleQueue[IndexedProgress], number: int, progress: Progress
    ) -> None:
        if progress.finished:
            self._inflight.release(progress.rid)
        signals.put((number, progress))

    def _stream(
        self, outputs: CallOutputs, signals: queue.SimpleQueue[IndexedProgress]
    ) -> Iterator[Output]:
        self._inflight.submit(outputs.states)
        try:
            while outputs.pending:
                if (output := outputs.update(signals.get())) is not None:
                    yield output
        finally:
            self._inflight.abandon(outputs.states[number] for number in outputs.pending)

    async def _async_stream(
        self, outputs: CallOutputs, output_queue: OutputQueue
    ) -> AsyncGenerator[Output, None]:
        async with aclosing(self._progress(outputs.states, output_queue)) as found:
            async for update in found:
                if (output := outputs.update(update)) is not None:
                    yield output

    async def _progress(
        self,
        states: Sequence[RequestState],
        output_queue: OutputQueue,
        admission: CallAdmission | None = None,
    ) -> AsyncGenerator[IndexedProgress, None]:
        self._inflight.reserve(states, check_queue=admission is None)
        waiting, errors_as_outputs = deque(states), admission is not None
        admission = admission or CallAdmission()
        output_queue.on_ended = admission.finished
        pending = set(range(len(states)))
        try:
            start = partial(self._inflight.start, waiting, errors_as_outputs=errors_as_outputs)
            await admission.enter(len(states), start)
            while pending:
                number, progress = await output_queue.get()
                if progress.finished:
                    pending.discard(number)
                yield number, progress
        finally:
            admission.leave()
            self._inflight.abandon(states[number] for number in pending)
