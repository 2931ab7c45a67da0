"""transformers' model of the same sizes, with random weights on the same device.

Its experts are computed by each of its implementations and the fastest at a batch size counts. Two
ways to serve: a plain loop of decode steps over a cache of fixed size, and its own continuous
batching, `generate_batch`. It runs in a process of its own, which leaves nothing on the GPU.

    python -m bench.one_batch_peer FOLDER --batch-size 1 8 32 --out points.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")
STEPS, WARM_STEPS = 12, 3
# Of continuous batching.
TOKENS, PAGE, CHUNK = 20, 32, 8192
# For all of it: what a peer takes longer for is not worth the time of a GPU.
LIMIT_SECONDS = 240.0
LOOP, BATCHING = "transformers", "generate_batch"


@dataclass(frozen=True)
class PeerPoint:
    """`problem`: why it could not be measured."""

    name: str
    batch: int
    decode_ms: float | None = None
    prefill_tok_s: float | None = None
    detail: str = ""
    problem: str = ""


def run_apart(
    folder: str,
    batches: Sequence[int],
    input_len: int,
    device: str,
    seconds: float = LIMIT_SECONDS,
) -> list[PeerPoint]:
    """What was found before the process ended, or was ended, counts."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "points.jsonl")
        command = [sys.executable, "-m", "bench.one_batch_peer", folder, "--out", str(path)]
        command += ["--input-len", str(input_len), "--device", device, "--batch-size"]
        try:
            done = subprocess.run([*command, *map(str, batches)], check=False, timeout=seconds)
            problem = f"its process ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            problem = f"not done within {seconds:g} s"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    found = [PeerPoint(**json.loads(line)) for line in text.splitlines() if line.endswith("}")]
    known = {(point.name, point.batch) for point in found}
    return found + [
        PeerPoint(name, batch, problem=problem)
        for name in (LOOP, BATCHING)
        for batch in batches
        if (name, batch) not in known
    ]


def measure_transformers(
    folder: Path, batches: Sequence[int], input_len: int, device: torch.device
) -> Iterator[PeerPoint]:
    """The model is made once. All batches by the loop come first: continuous batching captures
    graphs, which may take longer than there is time."""
    begin = time.perf_counter()
    try:
        model = load(folder, device)
    except Exception as error:
        for name in (LOOP, BATCHING):
            yield from (PeerPoint(name, batch, problem=_words(error)) for batch in batches)
        return
    print(f"transformers: made the model in {time.perf_counter() - begin:.1f} s", flush=True)
    for name, run in ((LOOP, decode_loop), (BATCHING, continuous)):
        for batch in batches:
            try:
                yield run(model, batch, input_len, device)
            except Exception as error:
                yield PeerPoint(name, batch, problem=_words(error))


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def load(folder: Path, device: torch.device) -> Any:
    transformers: Any = import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    config = transformers.AutoConfig.from_pretrained(folder)
    with device:
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return made.eval()


@torch.inference_mode()
def decode_loop(model: Any, batch: int, input_len: int, device: torch.device) -> PeerPoint:
    transformers: Any = import_module("transformers")
    vocab, room = model.config.vocab_size, input_len + len(IMPLEMENTATIONS) * (STEPS + WARM_STEPS)
    cache = transformers.StaticCache(config=model.config, max_cache_len=room + 1)
    ids = torch.randint(0, vocab, (batch, input_len), device=device)
    model.set_experts_implementation("grouped_mm")  # others copy weights for every token
    _prefill(model, ids, transformers.StaticCache(config=model.config, max_cache_len=room + 1))
    _settle(device)
    begin = time.perf_counter()
    token = _prefill(model, ids, cache)
    _settle(device)
    prefill = time.perf_counter() - begin
    tried: dict[str, float] = {}
    position = input_len
    for name in IMPLEMENTATIONS:
        model.set_experts_implementation(name)
        # One that copies the weights of every token's experts may lack the memory.
        with suppress(RuntimeError, ValueError):
            tried[name] = _decode(model, token, position, cache, device)
        position += STEPS + WARM_STEPS
    best = min(tried, key=lambda name: tried[name])
    return PeerPoint(
        LOOP,
        batch,
        decode_ms=1e3 * tried[best],
        prefill_tok_s=batch * input_len / prefill,
        detail=", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in tried.items()),
    )


def _prefill(model: Any, ids: Tensor, cache: Any) -> Tensor:
    out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    token: Tensor = out.logits[:, -1:].argmax(-1)
    return token


def _decode(model: Any, token: Tensor, position: int, cache: Any, device: torch.device) -> float:
    """Seconds of a step, the median of some."""
    took = []
    for step in range(WARM_STEPS + STEPS):
        _settle(device)
        begin = time.perf_counter()
        at = torch.full_like(token, position + step)
        out = model(token, past_key_values=cache, use_cache=True, position_ids=at)
        token = out.logits[:, -1:].argmax(-1)
        _settle(device)
        took.append(time.perf_counter() - begin)
    return statistics.median(took[WARM_STEPS:])


def continuous(model: Any, batch: int, input_len: int, device: torch.device) -> PeerPoint:
    settings: Any = import_module("transformers.generation.configuration_utils")
    vocab = model.config.vocab_size
    prompts = torch.randint(0, vocab, (batch, input_len)).tolist()
    model.set_experts_implementation("grouped_mm")
    generation = settings.GenerationConfig(
        do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=TOKENS
    )
    try:
        for _ in range(2):  # once to warm up; what it has set up stays
            _settle(device)
            begin = time.perf_counter()
            answers = model.generate_batch(
                prompts,
                generation_config=generation,
                continuous_batching_config=batching(settings, batch, input_len),
                record_timestamps=True,
                persistent_manager=True,
            )
    finally:
        model.destroy_cached_continuous_batching_manager()
    told = [answer.timestamps for answer in answers.values()]
    # While the last of them answers, all do.
    last = max(told, key=lambda times: times[0])
    steps = [after - before for before, after in pairwise(last)]
    return PeerPoint(
        BATCHING,
        batch,
        decode_ms=1e3 * statistics.median(steps),
        prefill_tok_s=batch * input_len / (last[0] - begin),
        detail="grouped_mm",
    )


def batching(settings: Any, batch: int, input_len: int) -> Any:
    """Without these its cache takes most of the memory there is. A page has another name in every
    few versions of it."""
    kind = settings.ContinuousBatchingConfig
    page = next(one.name for one in fields(kind) if one.name in ("page_size", "block_size"))
    return kind(
        num_blocks=batch * ((input_len + TOKENS) // PAGE + 2),
        max_batch_tokens=min(CHUNK, batch * input_len),
        max_requests_per_batch=batch,
        allow_block_sharing=False,
        **{page: PAGE},
    )


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> int:
    parser = argparse.ArgumentParser("python -m bench.one_batch_peer")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found = measure_transformers(
        options.folder, options.batch_size, options.input_len, torch.device(options.device)
    )
    with options.out.open("w", encoding="utf-8") as out:
        for point in found:
            out.write(json.dumps(asdict(point)) + "\n")
            out.flush()
            print(point, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
