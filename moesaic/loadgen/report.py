"""The printed results, in the layout of SGLang's benchmarks."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from moesaic.loadgen.args import Load, ServeBenchArgs
from moesaic.loadgen.metrics import CLIENT_BOUND, LatencySummary, RunMetrics, as_json
from moesaic.loadgen.outcome import Outcome
from moesaic.loadgen.traffic import Run

WIDTH: Final = 50
SHOWN_ERRORS: Final = 3
# Larger deviations of lengths are reported.
TOLERANCE: Final = 0.05
PARTS: Final = {"Mean": "mean", "Median": "median", "P90": "p90", "P95": "p95", "P99": "p99"}
Cell = str | int | float


def head(title: str) -> str:
    return f"{f' {title} ':=^{WIDTH}}"


def line(label: str, value: Cell) -> str:
    return f"{label + ':':<40} {f'{value:.2f}' if isinstance(value, float) else value:<10}"


def serving_block(args: ServeBenchArgs, load: Load, figures: RunMetrics) -> str:
    rows: list[tuple[str, Cell]] = [
        ("Backend", args.backend),
        ("Traffic request rate", str(load.rate)),
        ("Max request concurrency", "not set" if load.limit is None else load.limit),
        ("Successful requests", figures.completed),
        ("Failed requests", figures.failed),
        ("Benchmark duration (s)", figures.duration),
        ("Total input tokens", figures.total_input),
        ("Total input text tokens", figures.total_input),
        ("Total input vision tokens", 0),
        ("Total generated tokens", figures.total_output),
    ]
    if figures.retokenized is not None:
        rows.append(("Total generated tokens (retokenized)", figures.retokenized))
    rows += [
        ("Request throughput (req/s)", figures.request_throughput),
        ("Input token throughput (tok/s)", figures.input_throughput),
        ("Output token throughput (tok/s)", figures.output_throughput),
        ("Peak output token throughput (tok/s)", figures.peak_output),
        ("Peak concurrent requests", figures.peak_concurrency),
        ("Total token throughput (tok/s)", figures.total_throughput),
        ("Concurrency", figures.concurrency),
        ("Client CPU (% of a core)", figures.client_cpu * 100),
    ]
    if figures.goodput is not None:
        share = 100 * (figures.good or 0) / max(figures.completed + figures.failed, 1)
        rows.append(("Request goodput (req/s)", figures.goodput))
        rows.append(("Requests within the limits (%)", share))
    lines = [head("Serving Benchmark Result"), *(line(label, value) for label, value in rows)]
    lines += _section("End-to-End Latency", "E2E Latency", figures.e2e)
    lines += _section("Time to First Token", "TTFT", figures.ttft)
    lines += _section("Time per Output Token (excl. 1st token)", "TPOT", figures.tpot)
    lines += _section("Inter-Token Latency", "ITL", figures.itl, longest=True)
    return "\n".join([*lines, "=" * WIDTH])


def _section(title: str, name: str, spread: LatencySummary, longest: bool = False) -> list[str]:
    """The lines of one latency; none if nothing was measured."""
    parts = PARTS | {"Max": "max"} if longest else PARTS
    values = [(label, getattr(spread, part)) for label, part in parts.items()]
    if spread.mean is None:
        return []
    return [f"{title:-^{WIDTH}}", *(line(f"{label} {name} (ms)", value) for label, value in values)]


def notes(args: ServeBenchArgs, figures: RunMetrics, run: Run) -> list[str]:
    """Warnings that belong to the figures."""
    found = []
    if run.cut:
        found.append(f"interrupted: {run.open} requests had not ended and are in no figure")
    if figures.failed:
        found.append(f"{figures.failed} requests failed and are in no latency:")
        common = sorted(figures.errors.items(), key=lambda item: -item[1])
        found += [f"  {number} x {message}" for message, number in common[:SHOWN_ERRORS]]
        if len(common) > SHOWN_ERRORS:
            found.append(f"  and {len(common) - SHOWN_ERRORS} other messages")
    if figures.client_bound:
        found.append(
            f"client-bound: this client took {figures.client_cpu:.0%} of its core, more than "
            f"{CLIENT_BOUND:.0%}, so it measured itself too: spread the load over several clients"
        )
    good = [outcome for outcome in run.outcomes if not outcome.error]
    return [*found, *_length_notes(args, good)]


def _length_notes(args: ServeBenchArgs, outcomes: Iterable[Outcome]) -> list[str]:
    asked_in = counted_in = asked_out = counted_out = 0
    for outcome in outcomes:
        if outcome.prompt.tokens and outcome.prompt_tokens is not None:
            asked_in += outcome.prompt.tokens
            counted_in += outcome.prompt_tokens
        asked_out += outcome.prompt.output_len
        counted_out += outcome.output_tokens or 0
    found = []
    if abs(counted_in - asked_in) > TOLERANCE * asked_in:
        found.append(
            f"prompts are not as long as asked: {asked_in} tokens asked, {counted_in} by the "
            "server's count: give its tokenizer by --tokenizer DIR"
        )
    if not args.disable_ignore_eos and counted_out < (1 - TOLERANCE) * asked_out:
        found.append(
            f"answers are shorter than asked: {counted_out} of {asked_out} tokens: does the server "
            "know ignore_eos, and are prompt and answer within its context?"
        )
    return found


def json_line(
    args: ServeBenchArgs, load: Load, figures: RunMetrics, run: Run, model: str
) -> dict[str, Any]:
    """One line of --output-file: the run's flags, then its figures."""
    return {
        "backend": args.backend,
        "model": model,
        "dataset_name": args.dataset_name,
        "num_prompts": args.num_prompts,
        "request_rate": load.rate if math.isfinite(load.rate) else "inf",
        "burstiness": load.burstiness,
        "max_concurrency": load.limit,
        "sharegpt_output_len": args.sharegpt_output_len,
        "random_input_len": args.random_input_len,
        "random_output_len": args.random_output_len,
        "random_range_ratio": args.random_range_ratio,
        "seed": args.seed,
        **as_json(figures),
        **(_details(run.outcomes) if args.output_details else {}),
    }


def _details(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    done = list(outcomes)
    return {
        "input_lens": [outcome.prompt_tokens for outcome in done],
        "output_lens": [outcome.output_tokens for outcome in done],
        "ttfts": [outcome.ttft for outcome in done],
        "itls": [outcome.itls() for outcome in done],
        "e2e_latencies": [outcome.latency for outcome in done],
        "generated_texts": [outcome.text for outcome in done],
        "errors": [outcome.error for outcome in done],
    }


def append_json(path: str, values: Mapping[str, Any]) -> None:
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps(values, ensure_ascii=False) + "\n")
