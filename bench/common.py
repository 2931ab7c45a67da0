"""Shared parts of the benchmarks: a random checkpoint, a mixed workload, tables and JSON files."""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import re
import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from safetensors.torch import save_file
from tqdm import tqdm

from moesaic.cli.common import add_model
from moesaic.config.args import ServerArgs
from moesaic.config.args_engine import ServeArgs
from moesaic.config.parser import FlagParser
from moesaic.evals.data import check_target

RESULTS = Path(__file__).parent / "results"
T = TypeVar("T")


@dataclass(frozen=True)
class Size:
    """Shape of a random Qwen3-MoE."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    topk: int
    moe_intermediate: int
    vocab: int
    max_positions: int = 8192


SIZES = {
    "tiny": Size(2, 64, 4, 2, 16, 8, 2, 32, 512),
    "small": Size(4, 512, 8, 2, 64, 32, 4, 256, 8192),
    "mid": Size(12, 1024, 16, 4, 64, 64, 8, 512, 32768),
}


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    output_len: int


@dataclass(frozen=True)
class Range:
    low: int
    high: int


def mixed_workload(
    count: int, vocab: int, prompts: Range, outputs: Range, seed: int
) -> list[Request]:
    """Requests with prompt and output lengths drawn uniformly, the same for the same seed."""
    rng = random.Random(seed)
    return [
        Request(
            [rng.randrange(vocab) for _ in range(rng.randint(prompts.low, prompts.high))],
            rng.randint(outputs.low, outputs.high),
        )
        for _ in range(count)
    ]


def config_json(size: Size) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "intermediate_size": size.moe_intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": size.max_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "num_experts": size.experts,
        "num_experts_per_tok": size.topk,
        "moe_intermediate_size": size.moe_intermediate,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": None,
    }


def layer_shapes(size: Size, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    prefix = f"model.layers.{layer}."
    q, kv = size.heads * size.head_dim, size.kv_heads * size.head_dim
    yield prefix + "input_layernorm.weight", (size.hidden,)
    yield prefix + "post_attention_layernorm.weight", (size.hidden,)
    yield prefix + "self_attn.q_norm.weight", (size.head_dim,)
    yield prefix + "self_attn.k_norm.weight", (size.head_dim,)
    yield prefix + "self_attn.q_proj.weight", (q, size.hidden)
    yield prefix + "self_attn.k_proj.weight", (kv, size.hidden)
    yield prefix + "self_attn.v_proj.weight", (kv, size.hidden)
    yield prefix + "self_attn.o_proj.weight", (size.hidden, q)
    yield prefix + "mlp.gate.weight", (size.experts, size.hidden)
    for expert in range(size.experts):
        name = f"{prefix}mlp.experts.{expert}."
        yield name + "gate_proj.weight", (size.moe_intermediate, size.hidden)
        yield name + "up_proj.weight", (size.moe_intermediate, size.hidden)
        yield name + "down_proj.weight", (size.hidden, size.moe_intermediate)


def random_tensor(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    # Unit-variance activations at every depth, so that routing spreads over the experts.
    noise = torch.randn(shape, dtype=torch.bfloat16, generator=generator)
    return noise.mul_(shape[-1] ** -0.5)


def write_checkpoint(folder: Path, size: Size, seed: int = 0) -> Path:
    """Write a random Qwen3-MoE in bfloat16, one shard a layer, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    table = (size.vocab, size.hidden)
    shards: list[dict[str, tuple[int, ...]]] = [
        {"model.embed_tokens.weight": table, "lm_head.weight": table}
    ]
    shards[0]["model.norm.weight"] = (size.hidden,)
    shards += [dict(layer_shapes(size, layer)) for layer in range(size.layers)]
    weight_map: dict[str, str] = {}
    total = 0
    for index, shapes in enumerate(tqdm(shards, desc="random checkpoint", unit="shard")):
        name = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        tensors = {key: random_tensor(shape, generator) for key, shape in shapes.items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(t.nbytes for t in tensors.values())
    index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_json))
    (folder / "config.json").write_text(json.dumps(config_json(size), indent=2))
    return folder


def parameters(size: Size) -> int:
    per_layer = sum(torch.Size(shape).numel() for _, shape in layer_shapes(size, 0))
    return size.layers * per_layer + 2 * size.vocab * size.hidden + size.hidden


def median_and_best(seconds: Sequence[float]) -> tuple[float, float]:
    return statistics.median(seconds), min(seconds)


def machine(threads: int) -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "threads": threads,
        "torch": str(torch.__version__),  # a class of its own
        "python": platform.python_version(),
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def device_name(device: str) -> str:
    """Asked of the driver's program: CUDA in this process would take memory from the ranks."""
    if device == "cpu":
        return cpu_name() or "cpu"
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return (told.splitlines() or ["cuda"])[0].strip()


def engine_flags(module: str, rest: Sequence[str]) -> dict[str, Any]:
    """What a benchmark's command line says about the engine, by the names of its arguments."""
    usage = f"python -m bench.{module}"
    flags = FlagParser(usage, f"{usage} [flags]", "")
    add_model(flags)
    flags.add_flags(ServerArgs, leave_out=(ServeArgs.GROUP,))
    return flags.parse(rest)


def positive(word: str) -> int:
    """Type of an argument."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is no whole number above 0")
    return int(word)


def node_shape(word: str) -> str:
    """Type of an argument: nodes, and ranks on each."""
    if not re.fullmatch("[1-9][0-9]*x[1-9][0-9]*", word):
        raise argparse.ArgumentTypeError(f"{word!r}: give NODESxRANKS such as 2x2")
    return word


def above_zero(word: str) -> float:
    """Type of an argument."""
    try:
        number = float(word)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{word!r} is no number above 0")
    return number


class Distinct(argparse.Action):
    """Of several values, each once."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        setattr(namespace, self.dest, list(dict.fromkeys(values)))


@contextmanager
def complaints_in_a_line() -> Iterator[None]:
    """As the commands have them."""
    try:
        yield
    except (ValueError, OSError, NotImplementedError) as error:
        raise SystemExit(f"error: {error}") from error


def check_out(path: Path) -> None:
    """Before anything is measured: SystemExit where the file could not be written."""
    with complaints_in_a_line():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--out {path}: {error.filename}: {error.strerror}") from None
        check_target("--out", str(path))


def device_option(module: str) -> argparse.ArgumentParser:
    """Read before all else, as on CUDA a benchmark is another program."""
    chooser = argparse.ArgumentParser(
        f"python -m bench.{module}", add_help=False, allow_abbrev=False
    )
    how = "cuda has flags of its own: --device cuda --help"
    chooser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=how)
    return chooser


def parse_on_cpu(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """What is left over may be a flag of the benchmark on CUDA."""
    args, rest = parser.parse_known_args(words)
    if rest:
        others = "--device cuda has flags of its own, see --device cuda --help"
        parser.error(f"unrecognized arguments: {' '.join(rest)} ({others})")
    return args


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, ["-" * w for w in widths], *rows]:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)]
        print("  ".join(cells))


def show_table(header: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool) -> None:
    """`markdown`: as docs have it."""
    if not markdown:
        print_table(header, rows)
        return
    for row in [header, ["---"] * len(header), *rows]:
        print("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")


def write_json(name: str, payload: dict[str, Any] | list[Any]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(payload, indent=2) + "\n")
    print(f"wrote {path}")
    return path


def read_rows(path: Path, kind: type[T]) -> list[T]:
    """Those that a JSON list has, each a `kind`, which is a dataclass; SystemExit where there are
    none, or others."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
        known = {one.name for one in fields(kind)}  # type: ignore[arg-type]
        if unknown := sorted({name for row in found for name in row} - known):
            raise ValueError(f"unknown fields {', '.join(unknown)}")
        return msgspec.convert(found, list[kind])  # type: ignore[valid-type]
    except (OSError, ValueError, msgspec.DecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise SystemExit(f"{path} cannot be read: {why}; measure first, or name --out") from None


def merge(path: Path, rows: Sequence[Any], tell: bool = True) -> None:
    """Rows that have the `key` of new ones are replaced; others stay. All are of one dataclass.
    `tell`: says where they are."""
    new, kind = {row.key for row in rows}, type(rows[0])
    kept = [row for row in read_rows(path, kind) if row.key not in new] if path.exists() else []
    made = [asdict(row) for row in sorted([*kept, *rows], key=lambda row: row.key)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    if tell:
        print(f"wrote {path}")


def spare_larger(path: Path, number: int, measured: Callable[[Any], int], again: bool) -> None:
    """SystemExit where a file would be lost to a smaller run. `measured`: of its content, how many
    problems it is of."""
    if again or not path.exists():
        return
    try:
        before = measured(json.loads(path.read_bytes()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise SystemExit(
            f"{path} is there and not of this benchmark: name another --out, or give --again to "
            "replace it"
        ) from None
    if before > number:
        raise SystemExit(
            f"{path} is of {before} problems and this run of {number}: name another --out, or give "
            "--again to replace it"
        )


def size_json(size: Size) -> dict[str, Any]:
    return {**asdict(size), "parameters": parameters(size)}
