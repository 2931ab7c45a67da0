"""The offline engine: `Engine(model_path=...).generate(...)`."""

from __future__ import annotations

import asyncio
import atexit
import logging
import queue
import random
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch

from moesaic.config import ServerArgs, resolve
from moesaic.engine.answers import Answers, Signal
from moesaic.engine.core import EngineCore, Job, Progress
from moesaic.engine.detokenizer import IncrementalDetokenizer
from moesaic.engine.inputs import GenerateInput, Limits, RequestSpec
from moesaic.engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")
Command = Callable[[EngineCore], None]
Output = dict[str, Any]


class Engine:
    """Serves one model in this process. Keyword arguments are the server's flags with underscores.

    A thread of its own runs the model; `generate` may be called from any number of threads and
    tasks at once, and their requests are batched together.
    """

    def __init__(self, **kwargs: Any) -> None:
        self.args = resolve(ServerArgs.from_kwargs(**kwargs))
        if not Path(self.args.model_path).is_dir():
            raise ValueError(
                f"--model-path {self.args.model_path} is not a folder: give a Hugging Face folder "
                "with config.json, safetensors and tokenizer.json"
            )
        if self.args.num_threads is not None:
            torch.set_num_threads(self.args.num_threads)
        self.tokenizer = _load_tokenizer(self.args)
        self._core = EngineCore(self.args)
        eos_ids = frozenset[int]() if self.tokenizer is None else self.tokenizer.eos_ids
        self._limits = Limits(
            vocab_size=self._core.runner.vocab_size,
            context_length=self._core.runner.context_length,
            cache_tokens=self._core.runner.num_pages * self.args.page_size,
            eos_ids=eos_ids or self._core.runner.eos_ids,
            seeds=random.Random(self.args.random_seed),
        )
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._arrivals = count()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="moesaic-engine", daemon=True)
        self._thread.start()
        atexit.register(self.shutdown)

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
    ) -> Output | list[Output] | Iterator[Output]:
        """Continues one prompt or a list of them; with `stream`, yields the growing answers."""
        call = GenerateInput(
            prompt,
            input_ids,
            sampling_params,
            return_logprob,
            logprob_start_len,
            top_logprobs_num,
        )
        signals: queue.SimpleQueue[Signal] = queue.SimpleQueue()
        answers = self._start(call, signals.put, stream, return_text_in_logprobs)
        if stream:
            return self._stream(answers, signals)
        try:
            while answers.pending:
                answers.take(signals.get())
        finally:
            self._abort(answers)
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
    ) -> Output | list[Output] | AsyncIterator[Output]:
        """`generate` for asyncio: await the answers, or with `stream` await an async iterator."""
        call = GenerateInput(
            prompt,
            input_ids,
            sampling_params,
            return_logprob,
            logprob_start_len,
            top_logprobs_num,
        )
        loop = asyncio.get_running_loop()
        signals: asyncio.Queue[Signal] = asyncio.Queue()

        def put(signal: Signal) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(signals.put_nowait, signal)

        answers = self._start(call, put, stream, return_text_in_logprobs)
        if stream:
            return self._async_stream(answers, signals)
        try:
            while answers.pending:
                answers.take(await signals.get())
        finally:
            self._abort(answers)
        return answers.result()

    def abort(self, rid: str) -> None:
        """Ends a request by the id in its `meta_info`; nothing happens if it is done already."""
        self._tell(lambda core: core.abort(rid))

    def flush_cache(self) -> int:
        """Empties the prefix cache; the number of pages that became free."""
        return self._ask(lambda core: core.kv.flush())

    def get_server_info(self) -> dict[str, Any]:
        """What was resolved at start, and the state of scheduler and cache now."""
        return self._ask(lambda core: core.info())

    def shutdown(self) -> None:
        """Ends running requests with an error and stops the engine's thread; may be repeated."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._inbox.put(None)
        atexit.unregister(self.shutdown)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _start(
        self, call: GenerateInput, put: Callable[[Signal], None], stream: bool, texts: bool
    ) -> Answers:
        """Checks every request before the first is submitted."""
        specs = call.specs(self.tokenizer, self._limits)
        self._check_queue(len(specs))
        interval = self.args.stream_interval if stream else None
        jobs = [
            self._job(spec, partial(_signal, put, number), interval)
            for number, spec in enumerate(specs)
        ]

        def add(core: EngineCore) -> None:
            for job in jobs:
                core.add(job)

        self._tell(add)
        single = call.is_single and len(jobs) == 1
        return Answers(jobs, single, self.tokenizer if texts else None)

    def _check_queue(self, number: int) -> None:
        limit, waiting = self.args.max_queued_requests, len(self._core.scheduler.waiting)
        if limit is not None and waiting + number > limit:
            raise QueueFull(
                f"{waiting} requests wait and {number} more would pass --max-queued-requests "
                f"{limit}: try again later"
            )

    def _job(
        self, spec: RequestSpec, listener: Callable[[Progress], None], interval: int | None
    ) -> Job:
        request = spec.to_request(uuid.uuid4().hex, next(self._arrivals))
        detokenizer = None
        if self.tokenizer is not None:
            detokenizer = IncrementalDetokenizer(self.tokenizer, spec.prompt_ids, spec.params)
        return Job(request, detokenizer, listener, interval)

    def _stream(self, answers: Answers, signals: queue.SimpleQueue[Signal]) -> Iterator[Output]:
        try:
            while answers.pending:
                if (output := answers.take(signals.get())) is not None:
                    yield output
        finally:
            self._abort(answers)

    async def _async_stream(
        self, answers: Answers, signals: asyncio.Queue[Signal]
    ) -> AsyncIterator[Output]:
        try:
            while answers.pending:
                if (output := answers.take(await signals.get())) is not None:
                    yield output
        finally:
            self._abort(answers)

    def _abort(self, answers: Answers) -> None:
        """Whoever stops listening stops the work too."""
        for rid in answers.pending_rids():
            with suppress(RuntimeError):
                self.abort(rid)

    def _tell(self, command: Command) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError("the engine is shut down: make a new Engine")
            self._inbox.put(command)

    def _ask(self, question: Callable[[EngineCore], T]) -> T:
        """The answer to a question that only the engine's thread may look up."""
        answer: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._tell(lambda core: answer.put(question(core)))
        return answer.get()

    def _run(self) -> None:
        try:
            while self._obey():
                self._core.step()
        except BaseException:
            logger.exception("the engine stops")
        finally:
            with self._lock:
                self._closed = True
            while not self._inbox.empty():
                if (command := self._inbox.get()) is not None:
                    command(self._core)
            self._core.fail_all("the engine was shut down")

    def _obey(self) -> bool:
        """Carries out what was asked, waiting while there is nothing to compute; False: stop."""
        while not (self._inbox.empty() and self._core.has_work):
            if (command := self._inbox.get()) is None:
                return False
            command(self._core)
        return True


class QueueFull(RuntimeError):
    """More requests than --max-queued-requests allows."""


def _signal(put: Callable[[Signal], None], number: int, progress: Progress) -> None:
    put((number, progress))


def _load_tokenizer(args: ServerArgs) -> Tokenizer | None:
    if args.tokenizer_path is None:
        return None
    template = None if args.chat_template is None else Path(args.chat_template).read_text("utf-8")
    return Tokenizer.from_folder(Path(args.tokenizer_path), chat_template=template)
