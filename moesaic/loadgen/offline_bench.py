"""`bench throughput` and `bench latency`: the engine in this process, without HTTP."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from moesaic.loadgen.args import DatasetArgs, LatencyArgs, ThroughputArgs
from moesaic.loadgen.datasets import DatasetSpec, draw_prompts
from moesaic.loadgen.outcome import BenchPrompt
from moesaic.loadgen.report import WIDTH, append_json, head, line
from moesaic.loadgen.texts import IdTexts, Texts, TokenTexts

if TYPE_CHECKING:
    from moesaic.engine.engine import Engine

WARMUP = 16, 256, 16  # requests, tokens of a prompt, tokens of an answer


def texts_of(engine: Engine) -> Texts:
    if engine.tokenizer is not None:
        return TokenTexts(engine.tokenizer, chat=False)
    return IdTexts(engine.limits.vocab_size)


def throughput_bench(engine: Engine, args: ThroughputArgs) -> int:
    texts = texts_of(engine)
    is_random = args.dataset_name in ("random", "random-ids")
    prompts = draw_prompts(DatasetSpec(args, texts, args.seed, args.num_prompts, ids=is_random))
    if not args.skip_warmup:
        number, tokens, output_len = WARMUP
        short = DatasetArgs(
            num_prompts=number,
            random_input_len=min(tokens, args.random_input_len),
            random_output_len=min(output_len, args.random_output_len),
            random_range_ratio=1.0,
        )
        warmups = draw_prompts(DatasetSpec(short, texts, args.seed + 1, number, ids=True))
        _answer(engine, warmups, ignore_eos=True)
    result = _throughput(engine, prompts, not args.disable_ignore_eos)
    print(throughput_block(result))
    if args.output_file:
        append_json(args.output_file, result)
    return 0 if result["successful_requests"] else 1


def _answer(engine: Engine, prompts: list[BenchPrompt], ignore_eos: bool) -> list[dict[str, Any]]:
    texts = [prompt.text for prompt in prompts]
    ids = [prompt.ids or [] for prompt in prompts]
    answers = engine.generate(
        prompt=None if prompts[0].ids else texts,
        input_ids=ids if prompts[0].ids else None,
        sampling_params=[
            {"temperature": 0, "max_new_tokens": prompt.output_len, "ignore_eos": ignore_eos}
            for prompt in prompts
        ],
    )
    assert isinstance(answers, list)
    return answers


def _throughput(engine: Engine, prompts: list[BenchPrompt], ignore_eos: bool) -> dict[str, Any]:
    started = time.perf_counter()
    answers = _answer(engine, prompts, ignore_eos)
    seconds = time.perf_counter() - started
    metas = [answer["meta_info"] for answer in answers]
    good = [meta for meta in metas if meta["finish_reason"]["type"] != "abort"]
    inputs = sum(meta["prompt_tokens"] for meta in good)
    outputs = sum(meta["completion_tokens"] for meta in good)
    return {
        "backend": "engine",
        "successful_requests": len(good),
        "failed_requests": len(metas) - len(good),
        "total_latency": seconds,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / seconds,
        "input_throughput": inputs / seconds,
        "output_throughput": outputs / seconds,
        "total_throughput": (inputs + outputs) / seconds,
    }


THROUGHPUT_LABELS = {
    "backend": "Backend",
    "successful_requests": "Successful requests",
    "failed_requests": "Failed requests",
    "total_latency": "Benchmark duration (s)",
    "total_input_tokens": "Total input tokens",
    "total_output_tokens": "Total generated tokens",
    "request_throughput": "Request throughput (req/s)",
    "input_throughput": "Input token throughput (tok/s)",
    "output_throughput": "Output token throughput (tok/s)",
    "total_throughput": "Total token throughput (tok/s)",
}


def throughput_block(result: dict[str, Any]) -> str:
    lines = [line(label, result[key]) for key, label in THROUGHPUT_LABELS.items()]
    return "\n".join([head("Offline Throughput Benchmark Result"), *lines, "=" * WIDTH])


@dataclass(frozen=True)
class BatchTimes:
    """Seconds of one batch."""

    prefill: float  # until every request has its first token
    steps: list[float]
    total: float


def latency_bench(engine: Engine, args: LatencyArgs) -> int:
    rng, texts = random.Random(args.seed), texts_of(engine)
    for batch, inputs, outputs in product(args.batch_size, args.input_len, args.output_len):
        rounds = args.warmup + args.num_iters
        times = []
        for _ in tqdm(range(rounds), desc=f"batch {batch}, {inputs} + {outputs} tokens"):
            # New prompts every time: the prefix cache holds the old ones.
            ids = [texts.draw_ids(rng, inputs) for _ in range(batch)]
            times.append(one_batch(engine, ids, outputs))
        result = latency_result(times[args.warmup :], batch, inputs, outputs)
        print(latency_block(result))
        if args.output_file:
            append_json(args.output_file, result)
    return 0


def one_batch(engine: Engine, ids: list[list[int]], output_len: int) -> BatchTimes:
    sampling = {"temperature": 0, "max_new_tokens": output_len, "ignore_eos": True}
    started = time.perf_counter()
    pieces = engine.generate(input_ids=ids, sampling_params=sampling, stream=True)
    assert isinstance(pieces, Iterator)
    # When the last request reached this many tokens.
    reached = [started] * (output_len + 1)
    for piece in pieces:
        meta = piece["meta_info"]
        if meta["finish_reason"] and meta["finish_reason"]["type"] == "abort":
            raise RuntimeError(f"a request failed: {meta['finish_reason'].get('message')}")
        reached[meta["completion_tokens"]] = time.perf_counter()
    steps = [after - before for before, after in pairwise(reached[1:])]
    return BatchTimes(reached[1] - started, steps, reached[-1] - started)


def latency_result(
    times: list[BatchTimes], batch: int, inputs: int, outputs: int
) -> dict[str, Any]:
    prefill = median(time.prefill for time in times)
    steps = [step for time in times for step in time.steps]
    totals = [time.total for time in times]
    result: dict[str, Any] = {
        "batch_size": batch,
        "input_len": inputs,
        "output_len": outputs,
        "num_iters": len(times),
        "prefill_latency": prefill,
        "prefill_throughput": batch * inputs / prefill,
        "median_decode_latency": median(steps) if steps else None,
        "median_decode_throughput": batch / median(steps) if steps else None,
        "avg_latency": fmean(totals),
        "total_latency": median(totals),
        "overall_throughput": batch * (inputs + outputs) / median(totals),
    }
    percents = (10, 25, 50, 75, 90, 99)
    values = np.percentile(totals, percents)
    result["percentiles"] = {str(p): float(v) for p, v in zip(percents, values, strict=True)}
    return result


LATENCY_ROWS = (  # label, key, factor
    ("Batch size", "batch_size", 1),
    ("Input length (tokens)", "input_len", 1),
    ("Output length (tokens)", "output_len", 1),
    ("Iterations", "num_iters", 1),
    ("Prefill latency (ms)", "prefill_latency", 1000),
    ("Prefill throughput (tok/s)", "prefill_throughput", 1),
    ("Decode median latency (ms)", "median_decode_latency", 1000),
    ("Decode median throughput (tok/s)", "median_decode_throughput", 1),
    ("Total latency (ms)", "total_latency", 1000),
    ("Total throughput (tok/s)", "overall_throughput", 1),
    ("Mean latency (ms)", "avg_latency", 1000),
)


def latency_block(result: dict[str, Any]) -> str:
    """The printed figures; answers of one token have no decode step to show."""
    known = [row for row in LATENCY_ROWS if result[row[1]] is not None]
    lines = [line(label, result[key] * factor) for label, key, factor in known]
    spread = result["percentiles"].items()
    lines += [line(f"P{name} latency (ms)", seconds * 1000) for name, seconds in spread]
    return "\n".join([head("Offline Latency Benchmark Result"), *lines, "=" * WIDTH])
