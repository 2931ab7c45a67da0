"""Dispatch and combine of every a2a backend, without experts, against gloo and a plain copy.

    python -m bench.a2a                                  # 4 ranks, 128 tokens, H 2048, top-8
    python -m bench.a2a --ranks 2 --tokens 1 32 128 --payload fp8
    python -m bench.a2a --device cuda --help             # on a GPU: bench/a2a_gpu.py

Experts are replaced by the identity, so that what is left is moving rows and adding them up; the
weighted sum is counted, wherever a backend does it. gloo sends the same rows as `deepep` in normal
mode by all_to_all, counts first, and adds them up in float32; the copy moves as many bytes as that
in this process's own memory. All take turns on the same ranks; a round starts when all ranks are
there. Seconds are those of the slowest rank, CPU seconds those of a rank on average.

bench/results/a2a-4ranks-bf16.json, so named after --ranks and --payload, is replaced by each run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from bench import a2a_gpu
from bench.common import (
    RESULTS,
    Distinct,
    check_out,
    device_option,
    machine,
    parse_on_cpu,
    positive,
    print_table,
    write_json,
)
from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.launch.local_ranks import LocalRanks
from moesaic.comm.windows.factory import create_window
from moesaic.comm.windows.window import SharedWindow
from moesaic.core.step import DECODE, PREFILL
from moesaic.kernels.cpu.rows import Terms, sum_rows
from moesaic.moe.backends import load_backends
from moesaic.moe.context import MoeContext
from moesaic.moe.dispatch.base import BaseDispatcher
from moesaic.moe.formats import (
    CombineInput,
    FusedDispatchOutput,
    LowLatencyCombineInput,
    LowLatencyDispatchOutput,
    RowsCombineInput,
    StandardDispatchOutput,
    TopKOutput,
)
from moesaic.moe.permute import POOL
from moesaic.moe.quant.weights import WEIGHT_FORMATS, ExpertMatrix
from moesaic.moe.registry import MoeProblem, supports
from moesaic.moe.runner.base import (
    ExpertWeights,
    MoeRunnerConfig,
    MoeRunnerCore,
    RunContext,
    RunnerInput,
    RunnerOutput,
    Workspace,
)
from moesaic.moe.runner.host.layouts import GroupedInput

BARRIERS = 100
BACKENDS = {
    "none": ("none", "auto"),
    "deepep normal": ("deepep", "normal"),
    "deepep low_latency": ("deepep", "low_latency"),
    "mooncake": ("mooncake", "auto"),
    "mori": ("mori", "auto"),
    "flashinfer": ("flashinfer", "auto"),
    "ascend_fuseep": ("ascend_fuseep", "auto"),
}


@dataclass(frozen=True)
class Load:
    tokens: int
    hidden: int
    experts: int
    top_k: int
    payload: str


@dataclass(frozen=True)
class Sample:
    """One round of one rank."""

    seconds: float
    cpu_seconds: float


class Identity(MoeRunnerCore):
    def run(
        self, inputs: RunnerInput, weights: ExpertWeights, workspace: Workspace
    ) -> RunnerOutput:
        assert isinstance(inputs, GroupedInput) and inputs.y_YH is not None
        return RunnerOutput(inputs.y_YH.copy_(inputs.x_YH))


def route(load: Load, seed: int) -> tuple[Tensor, TopKOutput]:
    generator = torch.Generator().manual_seed(seed)
    x_TH = torch.randn(load.tokens, load.hidden, generator=generator).bfloat16()
    scores = torch.rand(load.tokens, load.experts, generator=generator)
    weights, ids = scores.topk(load.top_k, dim=1)
    return x_TH, TopKOutput(ids, weights / weights.sum(1, keepdim=True))


def problem_of(name: str, load: Load, ranks: int) -> MoeProblem:
    a2a, mode = BACKENDS[name]
    return MoeProblem(
        a2a=a2a,
        mode=mode,
        ep=ranks,
        tp=ranks,
        payload=load.payload if a2a != "ascend_fuseep" else "bf16",
        phases=("decode",),
        hidden_size=load.hidden,
        experts=load.experts,
    )


def usable(load: Load, ranks: int) -> list[str]:
    """Backends that an engine would take; SystemExit where `none`, which takes all payloads, is not
    among them."""
    load_backends()
    if load.top_k > load.experts:
        raise SystemExit(f"error: --top-k {load.top_k}: give at most --experts {load.experts}")
    found = {name: supports(problem_of(name, load, ranks)) for name in BACKENDS}
    if not found["none"].ok:
        raise SystemExit(f"error: {ranks} ranks, H {load.hidden}: {found['none'].reason}")
    for name, support in found.items():
        if not support.ok:
            print(f"{name} is left out: {support.reason}")
    return [name for name, support in found.items() if support.ok]


class Backend:
    """Dispatch and combine of one backend with the identity in between."""

    def __init__(self, name: str, load: Load, group: RankGroup) -> None:
        self.context = MoeContext.make(
            problem_of(name, load, group.size),
            torch.bfloat16,
            group,
            max_tokens=load.tokens,
            max_decode_tokens=load.tokens,
        )
        layout = self.context.layout(load.experts)
        config = self.context.dispatch_config(layout, load.top_k, load.hidden, 0)
        self.dispatcher: BaseDispatcher = self.context.make_dispatcher(config)
        runner = MoeRunnerConfig(layout.slots_per_rank, load.hidden, 1, load.top_k, torch.bfloat16)
        matrix = ExpertMatrix(WEIGHT_FORMATS["bf16"], 1, 1, 1, 1, torch.bfloat16)
        weights = ExpertWeights(matrix, matrix)
        self.run_context = RunContext(runner, Identity(runner), weights, self.context.workspace)
        self.step = PREFILL if BACKENDS[name][1] == "normal" else DECODE

    def round(
        self, x_TH: Tensor, topk: TopKOutput, wait: Callable[[], None]
    ) -> tuple[Sample, Tensor]:
        wait()
        watch = Stopwatch()
        rows = self.dispatcher.dispatch(x_TH, topk, self.step)
        if isinstance(rows, FusedDispatchOutput):
            fused = POOL.fused_func("ascend_fuseep", "triton")
            assert fused is not None
            results: CombineInput = fused(rows, self.run_context)
        elif isinstance(rows, LowLatencyDispatchOutput):
            # A runner writes its results there; copying them is none of the backend's work.
            watch.pause()
            results = fill(rows)
            wait()
            watch.resume()
        else:
            assert isinstance(rows, StandardDispatchOutput)
            results = weighted(rows)
        y_TH = self.dispatcher.combine(results)
        return watch.stop(), y_TH


class Stopwatch:
    def __init__(self) -> None:
        self.seconds = self.cpu_seconds = 0.0
        self.resume()

    def resume(self) -> None:
        self.started, self.cpu_started = time.perf_counter(), time.process_time()

    def pause(self) -> None:
        self.seconds += time.perf_counter() - self.started
        self.cpu_seconds += time.process_time() - self.cpu_started

    def stop(self) -> Sample:
        self.pause()
        return Sample(self.seconds, self.cpu_seconds)


def fill(rows: LowLatencyDispatchOutput) -> CombineInput:
    """Results as if every expert gave back what it got."""
    for slot, count in enumerate(rows.masked_m):
        part = rows.x.select(torch.tensor([slot])).dense(torch.bfloat16)[0, :count]
        rows.y_eMH[slot, :count] = part
    return LowLatencyCombineInput(rows.handle, rows.y_eMH)


def weighted(rows: StandardDispatchOutput) -> CombineInput:
    """The same; the sum over a rank's own experts, which post-permute does, is counted."""
    x_RH = rows.x.dense(torch.bfloat16)
    valid_RK = rows.ids_RK >= 0
    numbers_RK = torch.arange(len(x_RH)).unsqueeze(1).expand_as(valid_RK)
    terms = Terms(None, torch.where(valid_RK, numbers_RK, -1), rows.weights_RK)
    out = None if rows.y_OH is None else rows.y_OH[: len(x_RH)]
    return RowsCombineInput(rows.handle, sum_rows(x_RH, terms, out=out)[0])


class Gloo:
    """all_to_all of the rows that each rank needs, and back; results added up in float32."""

    def __init__(self, load: Load, group: RankGroup) -> None:
        self.load, self.group = load, group

    def round(
        self, x_TH: Tensor, topk: TopKOutput, wait: Callable[[], None]
    ) -> tuple[Sample, Tensor]:
        size, each = self.group.size, self.load.experts // self.group.size
        wait()
        watch = Stopwatch()
        wanted_TP = torch.zeros(len(x_TH), size, dtype=torch.bool)
        wanted_TP.scatter_(1, topk.ids_TK // each, True)
        ranks, tokens = wanted_TP.t().nonzero(as_tuple=True)
        sent = wanted_TP.sum(0)
        received = torch.empty_like(sent)
        self.group.all_to_all(received, sent, [1] * size, [1] * size, "counts")
        outgoing, incoming = sent.tolist(), received.tolist()
        rows = torch.empty(sum(incoming), x_TH.shape[1], dtype=x_TH.dtype)
        self.group.all_to_all(rows, x_TH.index_select(0, tokens), incoming, outgoing, "rows")
        share_TP = torch.zeros(len(x_TH), size)
        share_TP.scatter_add_(1, topk.ids_TK // each, topk.weights_TK)
        share = share_TP[tokens, ranks]
        back = torch.empty(len(tokens), x_TH.shape[1], dtype=x_TH.dtype)
        self.group.all_to_all(back, rows, outgoing, incoming, "results")
        y_TH = torch.zeros(x_TH.shape).index_add_(0, tokens, back.float() * share.unsqueeze(1))
        return watch.stop(), y_TH.bfloat16()


class Copy:
    """As many bytes as the ranks' rows take there and back, copied in one's own memory."""

    def __init__(self, load: Load, group: RankGroup) -> None:
        self.experts_each = load.experts // group.size

    def round(
        self, x_TH: Tensor, topk: TopKOutput, wait: Callable[[], None]
    ) -> tuple[Sample, Tensor]:
        owners = topk.ids_TK // self.experts_each
        rows = sum(len(token.unique()) for token in owners)
        source = torch.ones(rows, x_TH.shape[1], dtype=x_TH.dtype)
        target = torch.zeros_like(source)
        wait()
        start, cpu = time.perf_counter(), time.process_time()
        target.copy_(source)
        source.copy_(target)
        return Sample(time.perf_counter() - start, time.process_time() - cpu), x_TH


def barriers(group: RankGroup, window: SharedWindow, blocks: int) -> dict[str, list[float]]:
    """Seconds of one of many barriers in a row, by block; both kinds take turns."""
    seconds: dict[str, list[float]] = {"window": [], "gloo": []}
    for _ in range(blocks):
        for name, barrier in (("window", window.barrier), ("gloo", group.barrier)):
            window.barrier("start")
            start = time.perf_counter()
            for _ in range(BARRIERS):
                barrier("measured")
            seconds[name].append((time.perf_counter() - start) / BARRIERS)
    return seconds


def work(group: RankGroup, names: list[str], load: Load, rounds: int) -> dict[str, Any]:
    window = create_window(group, [], timeout=60.0)
    runs: dict[str, Any] = {name: Backend(name, load, group) for name in names}
    runs |= {"gloo": Gloo(load, group), "copy": Copy(load, group)}
    samples: dict[str, list[Sample]] = {name: [] for name in runs}
    for number in range(rounds + 2):
        x_TH, topk = route(load, number * group.size + group.rank)
        for name, run in runs.items():
            sample, y_TH = run.round(x_TH, topk, lambda: window.barrier("round"))
            if number >= 2:
                samples[name].append(sample)
            # The weights of a token add up to one, so the identity gives the token back.
            worst = float((y_TH.float() - x_TH.float()).abs().max())
            assert worst < {"bf16": 0.05, "fp8": 0.4, "int8": 0.1}.get(load.payload, 2.0), name
    moved = {
        name: sum(t.dispatch_bytes + t.combine_bytes for t in run.context.comm.traffic.values())
        / (rounds + 2)
        for name, run in runs.items()
        if isinstance(run, Backend)
    }
    return {
        "samples": {name: [asdict(s) for s in found] for name, found in samples.items()},
        "moved": moved,
        "barriers": barriers(group, window, 10),
    }


def summarise(results: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of the slowest rank in each round; CPU as a mean over ranks."""
    summary = {}
    for name in results[0]["samples"]:
        per_rank = [result["samples"][name] for result in results]
        rounds = list(zip(*per_rank, strict=True))
        seconds = [max(sample["seconds"] for sample in row) for row in rounds]
        cpu = [statistics.mean(sample["cpu_seconds"] for sample in row) for row in rounds]
        moved = [result["moved"].get(name, 0.0) for result in results]
        summary[name] = {
            "median_ms": statistics.median(seconds) * 1e3,
            "best_ms": min(seconds) * 1e3,
            "cpu_ms": statistics.median(cpu) * 1e3,
            "moved_mb": statistics.mean(moved) / 1e6,
        }
    for kind in ("window", "gloo"):
        slowest = [max(row) for row in zip(*(r["barriers"][kind] for r in results), strict=True)]
        summary[f"{kind} barrier"] = {"median_ms": statistics.median(slowest) * 1e3}
    return summary


def show(load: Load, summary: dict[str, dict[str, float]]) -> None:
    gloo, copy = summary["gloo"], summary["copy"]
    rows = [
        [
            name,
            f"{row['median_ms']:.2f}",
            f"{row['cpu_ms']:.2f}",
            f"{row['moved_mb']:.2f}" if row["moved_mb"] else "",
            f"{gloo['median_ms'] / row['median_ms']:.2f}x",
            f"{row['cpu_ms'] / gloo['cpu_ms']:.2f}",
            f"{row['median_ms'] / copy['median_ms']:.2f}",
        ]
        for name, row in summary.items()
        if "barrier" not in name
    ]
    print(f"\n{load}")
    header = ["", "ms", "CPU ms a rank", "MB got a rank", "over gloo", "CPU of gloo", "of copy"]
    print_table(header, rows)
    fast, slow = summary["window barrier"]["median_ms"], summary["gloo barrier"]["median_ms"]
    print(f"barrier: {fast * 1e3:.0f} us, gloo {slow * 1e3:.0f} us: {slow / fast:.1f}x")


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m bench.a2a",
        description=__doc__.splitlines()[0],
        parents=[device_option("a2a")],
        allow_abbrev=False,
    )
    parser.add_argument("--ranks", type=positive, default=4)
    parser.add_argument("--tokens", type=positive, nargs="+", action=Distinct, default=[128])
    parser.add_argument("--hidden", type=positive, default=2048)
    parser.add_argument("--experts", type=positive, default=128)
    parser.add_argument("--top-k", type=positive, default=8)
    parser.add_argument(
        "--payload", default="bf16", choices=["bf16", "fp8", "int8", "nvfp4", "mxfp4"]
    )
    parser.add_argument("--rounds", type=positive, default=30)
    return parse_on_cpu(parser, words)


def main(words: Sequence[str] | None = None) -> int:
    chosen, rest = device_option("a2a").parse_known_args(words)
    if chosen.device == "cuda":
        return a2a_gpu.main(rest, "python -m bench.a2a --device cuda")
    on_cpu(rest)
    return 0


def on_cpu(words: Sequence[str]) -> None:
    args = parse(words)
    first, *_ = loads = [
        Load(tokens, args.hidden, args.experts, args.top_k, args.payload) for tokens in args.tokens
    ]
    names = usable(first, args.ranks)
    out = f"a2a-{args.ranks}ranks-{args.payload}"
    check_out(RESULTS / f"{out}.json")
    points = []
    with LocalRanks(args.ranks, timeout=600) as ranks:
        for load in tqdm(loads, desc="tokens", disable=None, leave=False):
            results = ranks.run(work, names, load, args.rounds)
            summary = summarise(results)
            show(load, summary)
            points.append({"load": asdict(load), "summary": summary})
    payload = {
        "command": f"python -m bench.a2a --ranks {args.ranks} --payload {args.payload} "
        f"--tokens {' '.join(map(str, args.tokens))} --rounds {args.rounds}",
        "machine": machine(threads=1),
        "ranks": args.ranks,
        "points": points,
    }
    write_json(out, payload)


if __name__ == "__main__":
    sys.exit(main())
