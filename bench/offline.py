"""Tokens per second of the engine beside transformers' batched generate and continuous batching.

    python -m bench.offline                       # 1.3 B Qwen3-MoE, 16 and 64 mixed requests
    python -m bench.offline --size small --requests 16 --repeats 5

All run on the same random checkpoint with the same threads. Repetitions are interleaved, so that a
noisy neighbour hits everybody; the best of each is the fairest figure on a shared machine. Only
tokens that were asked for count: batched generate also computes padding, up to its longest row.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench.common import (
    SIZES,
    Range,
    Request,
    Size,
    machine,
    median_and_best,
    mixed_workload,
    print_table,
    size_json,
    write_checkpoint,
    write_json,
)
from moesaic import Engine

PAGE = 32
Runner = Callable[[list[Request]], None]


@dataclass
class Contender:
    name: str
    run: Runner
    detail: str = ""
    problem: str = ""
    seconds: list[float] = field(default_factory=list)


def engine_runner(engine: Engine) -> Runner:
    def run(requests: list[Request]) -> None:
        # A prefix cache that remembers the last repetition would skip the prompts.
        engine.flush_cache()
        answers = engine.generate(
            input_ids=[request.prompt for request in requests],
            sampling_params=[
                {"temperature": 0, "max_new_tokens": r.output_len, "ignore_eos": True}
                for r in requests
            ],
        )
        assert isinstance(answers, list)
        for request, answer in zip(requests, answers, strict=True):
            assert len(answer["output_ids"]) == request.output_len

    return run


def load_transformers(folder: Path) -> Any:
    transformers: Any = import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def batched_generate(model: Any, requests: list[Request], length: int) -> None:
    width = max(len(request.prompt) for request in requests)
    ids = torch.zeros(len(requests), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(requests):
        ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
        mask[row, width - len(request.prompt) :] = 1
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=length, do_sample=False, pad_token_id=0
        )
    assert out.shape == (len(requests), width + length)


def generate_runner(model: Any) -> Runner:
    return lambda requests: batched_generate(
        model, requests, max(request.output_len for request in requests)
    )


def choose_implementation(model: Any, requests: list[Request]) -> tuple[str, dict[str, float]]:
    """Try transformers' attention and experts implementations; keep the fastest.

    The best of two runs with a few dozen tokens each: prefill and decode have different winners.
    """
    batched_generate(model, requests[:2], length=2)
    names = ["sdpa+grouped_mm", "sdpa+eager", "eager+grouped_mm"]
    tried = dict.fromkeys(names, float("inf"))
    for name in tqdm(names * 2, desc="transformers implementations"):
        use_implementation(model, name)
        started = time.perf_counter()
        batched_generate(model, requests, length=40)
        tried[name] = min(tried[name], time.perf_counter() - started)
    best = min(tried, key=lambda name: tried[name])
    use_implementation(model, best)
    return best, tried


def use_implementation(model: Any, name: str) -> None:
    attention, experts = name.split("+")
    model.set_attn_implementation(attention)
    model.set_experts_implementation(experts)


def continuous_runner(model: Any, chunk: int) -> Runner:
    """transformers' ContinuousBatchingManager with a cache that holds everything."""
    settings: Any = import_module("transformers.generation.configuration_utils")

    def run(requests: list[Request]) -> None:
        longest = max(len(r.prompt) + r.output_len for r in requests)
        pages = len(requests) * (longest // PAGE + 2)
        config = settings.ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=pages,
            max_batch_tokens=chunk,
            max_requests_per_batch=len(requests),
        )
        generation = settings.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        with model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=config, warmup=False
        ) as manager:
            wanted = {
                manager.add_request(r.prompt, max_new_tokens=r.output_len): r.output_len
                for r in requests
            }
            collect(manager, wanted)

    return run


def collect(manager: Any, wanted: dict[str, int]) -> None:
    left = dict(wanted)
    while left:
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("its generation thread ended early")
        elif result.error is not None:
            raise RuntimeError(f"a request failed: {result.error}")
        elif result.is_finished():
            assert len(result.generated_tokens) == left.pop(result.request_id)


def warm_up(contenders: list[Contender], requests: list[Request]) -> None:
    """One short run each; whoever cannot run here says why and is left out."""
    short = [Request(r.prompt[:32], 4) for r in requests]
    for contender in contenders:
        try:
            contender.run(short)
        except Exception as error:
            contender.problem = f"{type(error).__name__}: {error}"


def measure(contenders: list[Contender], requests: list[Request], repeats: int) -> None:
    ready = [c for c in contenders if not c.problem]
    total = repeats * len(ready)
    with tqdm(total=total, desc=f"{len(requests)} requests", unit="run") as bar:
        for _ in range(repeats):
            for contender in ready:
                bar.set_postfix_str(contender.name)
                started = time.perf_counter()
                contender.run(requests)
                contender.seconds.append(time.perf_counter() - started)
                bar.update()


def report(contenders: list[Contender], requests: list[Request]) -> list[dict[str, Any]]:
    """Print one table; ratios are the engine's speed over the other's."""
    outputs = sum(r.output_len for r in requests)
    engine_median, engine_best = median_and_best(contenders[0].seconds)
    rows: list[list[str]] = []
    results: list[dict[str, Any]] = []
    for c in contenders:
        if c.problem:
            rows.append([c.name, "does not run here", "", "", "", c.problem])
            results.append({"name": c.name, "problem": c.problem})
            continue
        median, best = median_and_best(c.seconds)
        ratios = median / engine_median, best / engine_best
        rates = outputs / median, outputs / best
        cells = [f"{rates[0]:.1f}", f"{rates[1]:.1f}"]
        rows.append([c.name, *cells, f"{ratios[0]:.2f}x", f"{ratios[1]:.2f}x", c.detail])
        results.append(
            {
                "name": c.name,
                "detail": c.detail,
                "seconds": c.seconds,
                "output_tokens_per_s": {"median": rates[0], "best": rates[1]},
                "engine_speedup": {"median": ratios[0], "best": ratios[1]},
            }
        )
    prompts = sum(len(r.prompt) for r in requests)
    print(f"\n{len(requests)} requests, {prompts} prompt tokens, {outputs} output tokens")
    header = ["", "tok/s median", "tok/s best", "engine, median", "engine, best", "how"]
    print_table(header, rows)
    return results


def make_contenders(
    args: argparse.Namespace, folder: Path, sample: list[Request]
) -> tuple[Engine, list[Contender], dict[str, float]]:
    engine = Engine(
        model_path=str(folder),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_running_requests=max(args.requests),
        chunked_prefill_size=args.chunk,
        max_total_tokens=max(args.requests) * (args.prompt[1] + args.output[1] + PAGE),
        num_threads=args.threads,
    )
    contenders = [Contender("moesaic", engine_runner(engine))]
    tried: dict[str, float] = {}
    if not args.engine_only:
        model = load_transformers(folder)
        chosen, tried = choose_implementation(model, sample)
        contenders.append(Contender("transformers generate", generate_runner(model), chosen))
        continuous = continuous_runner(model, args.chunk)
        contenders.append(Contender("transformers continuous batching", continuous, chosen))
    return engine, contenders, tried


def run(args: argparse.Namespace, folder: Path, size: Size) -> dict[str, Any]:
    prompts, outputs = Range(*args.prompt), Range(*args.output)
    workloads = {
        count: mixed_workload(count, size.vocab, prompts, outputs, args.seed)
        for count in args.requests
    }
    sample = workloads[min(args.requests)]
    engine, contenders, tried = make_contenders(args, folder, sample)
    results: dict[str, Any] = {}
    with engine:
        warm_up(contenders, sample)
        for count, requests in workloads.items():
            for contender in contenders:
                contender.seconds = []
            gc.collect()
            measure(contenders, requests, args.repeats)
            results[str(count)] = report(contenders, requests)
    return {
        "machine": machine(args.threads),
        "model": size_json(size),
        "prompt_len": args.prompt,
        "output_len": args.output,
        "chunk": args.chunk,
        "seed": args.seed,
        "transformers_short_run_seconds": tried,
        "results": results,
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m bench.offline", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--size", choices=SIZES, default="mid")
    parser.add_argument("--model-path", type=Path, help="a checkpoint that --size wrote before")
    parser.add_argument("--requests", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--prompt", type=int, nargs=2, default=[16, 256], metavar=("MIN", "MAX"))
    parser.add_argument("--output", type=int, nargs=2, default=[16, 128], metavar=("MIN", "MAX"))
    parser.add_argument("--chunk", type=int, default=2048, help="prompt tokens in a step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine-only", action="store_true", help="leave transformers out")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    size = SIZES[args.size]
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.model_path or write_checkpoint(Path(temporary), size)
        payload = run(args, folder, size)
    write_json(f"offline-{args.size}", payload)


if __name__ == "__main__":
    main()
