"""`bench serve`: measures a server over HTTP, under one load or several."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from moesaic.loadgen import picture, report
from moesaic.loadgen.args import Load, ServeBenchArgs
from moesaic.loadgen.client import Client, reason, session, unreachable
from moesaic.loadgen.datasets import DatasetSpec, draw_prompts
from moesaic.loadgen.endpoints import ENDPOINTS, RequestOptions, parse_extra_body
from moesaic.loadgen.metrics import measure, parse_goodput
from moesaic.loadgen.outcome import BenchPrompt
from moesaic.loadgen.texts import TINY, Texts, TokenTexts, WordTexts, load_tokenizer
from moesaic.loadgen.traffic import Run, TrafficSource

WARMUP_TOKENS = 32
INTERRUPTED = 130
Result = TypeVar("Result")


def serve_bench(args: ServeBenchArgs) -> int:
    """Exit status: 0, 1 if every request failed, 130 if interrupted."""
    plan = BenchPlan.of(args)
    raise_file_limit()
    return run_loop(_Bench(plan).run())


@dataclass(frozen=True)
class BenchPlan:
    """The flags, checked before anything is sent."""

    args: ServeBenchArgs
    loads: list[Load]
    limits: dict[str, float]
    extra: dict[str, Any]
    headers: dict[str, str]

    @classmethod
    def of(cls, args: ServeBenchArgs) -> BenchPlan:
        if args.tokenize_prompt and ENDPOINTS[args.backend].chat:
            raise ValueError(f"--tokenize-prompt: --backend {args.backend} takes texts only")
        for path in (args.plot, args.output_file):
            if path is not None and not Path(path).absolute().parent.is_dir():
                raise ValueError(f"{path}: there is no such folder")
        extra = parse_extra_body("--extra-request-body", args.extra_request_body)
        return cls(args, args.loads(), parse_goodput(args.goodput), extra, _headers(args))


def _headers(args: ServeBenchArgs) -> dict[str, str]:
    headers = {}
    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    if key:
        headers["Authorization"] = f"Bearer {key}"
    for word in args.header or ():
        mark = min((m for m in "=:" if m in word), key=word.index, default="")
        name, _, value = word.partition(mark) if mark else ("", "", "")
        if not name.strip():
            raise ValueError(f"--header is {word!r}: give NAME=VALUE")
        headers[name.strip()] = value.strip()
    return headers


class _Bench:
    def __init__(self, plan: BenchPlan) -> None:
        self.plan, self.args = plan, plan.args
        self.url = plan.args.url()
        self.points: list[picture.Point] = []

    async def run(self) -> int:
        args = self.args
        async with session(self.plan.headers) as self.session:
            info = await self._query_server()
            self.model = args.model or info.model
            self.emulated_link = info.emulated_link
            self.texts = self._texts(info)
            stream = not args.disable_stream
            ignore_eos = not args.disable_ignore_eos
            options = RequestOptions(self.model, stream, ignore_eos, self.plan.extra)
            self.client = Client(self.session, self.url, ENDPOINTS[args.backend], options)
            cut = False
            for number, load in enumerate(self.plan.loads):
                cut = cut or await self._measure(number, load)
        if args.plot:
            name = Path(self.model).name if Path(self.model).is_dir() else self.model
            picture.draw(args.plot, self.points, f"{name} · {args.backend} · {args.dataset_name}")
            print(f"wrote {args.plot}")
        if cut:
            return INTERRUPTED
        return 0 if any(figures.completed for _, figures in self.points) else 1

    async def _measure(self, number: int, load: Load) -> bool:
        """Measure one load, with new prompts: the server may have cached the last ones. Returns
        whether it was interrupted."""
        args = self.args
        prompts, warmups = self._prompts(args.seed + number)
        if number == 0:
            await self._warm_up(warmups)
        if args.flush_cache:
            await self._post("/flush_cache")
        if args.profile:
            await self._post("/start_profile")
        traffic = TrafficSource(self.client, load, args.seed + number, not args.disable_tqdm)
        run = await traffic.run(prompts)
        if args.profile:
            await self._post("/stop_profile")
        self._report(load, run)
        return run.cut

    def _prompts(self, seed: int) -> tuple[list[BenchPrompt], list[BenchPrompt]]:
        """Prompts to measure, and others for the warm-up if there are enough."""
        args, warm = self.args, self.args.warmup_requests
        number = args.num_prompts + warm
        prompts = draw_prompts(DatasetSpec(args, self.texts, seed, number, args.tokenize_prompt))
        if args.dataset_name == "generated-shared-prefix":
            return prompts, prompts[:warm]
        return prompts[: args.num_prompts], (prompts[args.num_prompts :] or prompts)[:warm]

    async def _warm_up(self, prompts: list[BenchPrompt]) -> None:
        short = [replace(p, output_len=min(p.output_len, WARMUP_TOKENS)) for p in prompts]
        outcomes = await asyncio.gather(*map(self.client.ask, short))
        for outcome in outcomes:
            if outcome.error:
                raise RuntimeError(
                    f"a warm-up request failed, so nothing was measured: {outcome.error}"
                )

    def _report(self, load: Load, run: Run) -> None:
        args = self.args
        count = self.texts.count_answer if isinstance(self.texts, TokenTexts) else None
        for outcome in run.outcomes:
            if outcome.output_tokens is None:  # the server reports no usage
                outcome.output_tokens = count(outcome.text) if count else len(outcome.arrivals)
        figures = measure(run, self.plan.limits, count)
        self.points.append((load, figures))
        print(report.serving_block(args, load, figures))
        for note in report.notes(args, figures, run):
            print(note, file=sys.stderr)
        if args.output_file:
            line = report.json_line(args, load, figures, run, self.model)
            if self.emulated_link:
                line["emulated_link"] = self.emulated_link
            report.append_json(args.output_file, line)
        sys.stdout.flush()

    def _texts(self, info: _Info) -> Texts:
        """Texts with the given tokenizer, or with one that can be found."""
        chat, args = ENDPOINTS[self.args.backend].chat, self.args
        if args.tokenizer is not None:
            return TokenTexts(load_tokenizer(args.tokenizer), chat)
        for name in (args.model, info.tokenizer, info.model):
            if name and (name.startswith(TINY) or (Path(name) / "tokenizer.json").is_file()):
                return TokenTexts(load_tokenizer(name), chat)
        print(
            "no tokenizer is known, so random prompts are words, and lengths are about what was "
            "asked: give --tokenizer DIR to have them exact",
            file=sys.stderr,
        )
        return WordTexts()

    async def _query_server(self) -> _Info:
        """What the server reports about itself; neither route is required."""
        try:
            models = await self._get("/v1/models")
            about = await self._get("/server_info")
        except (aiohttp.ClientError, OSError) as error:
            raise unreachable(self.url, error, str(error)) from None
        names = [entry.get("id") for entry in models.get("data") or [] if isinstance(entry, dict)]
        name = names[0] if names else about.get("served_model_name") or about.get("model_path")
        tokenizer = about.get("tokenizer_path") or about.get("model_path")
        link = str(about.get("emulate_link") or "")
        return _Info(str(name or "default"), str(tokenizer or ""), link)

    async def _get(self, path: str) -> dict[str, Any]:
        async with self.session.get(self.url + path) as response:
            with suppress(aiohttp.ContentTypeError, ValueError):
                content = await response.json()
                if response.status == 200 and isinstance(content, dict):
                    return content
        return {}

    async def _post(self, path: str) -> None:
        """Call an administrative route, which must succeed for the figures to be valid."""
        async with self.session.post(self.url + path, json={}) as response:
            if response.status != 200:
                text = reason(await response.read())
                raise RuntimeError(f"{path}: status {response.status}: {text}")


@dataclass(frozen=True)
class _Info:
    model: str
    tokenizer: str
    emulated_link: str = ""
    """What it says that its ranks exchange over, if that is emulated."""


def raise_file_limit() -> None:
    """Allow many sockets: each open request has one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run_loop(work: Coroutine[Any, Any, Result]) -> Result:
    """Run on uvloop if installed, so the client is not the bottleneck."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)
