"""Flags of `moesaic bench`, with the names of SGLang's and vLLM's benchmarks."""

import math
from dataclasses import dataclass
from typing import ClassVar

from moesaic.config.flags import flag, not_built
from moesaic.loadgen.endpoints import ENDPOINTS

DATASETS = ("random", "random-ids", "sharegpt", "custom", "generated-shared-prefix")
NO_ADAPTERS = "leave it out; the engine has no LoRA adapters"


@dataclass(frozen=True)
class Load:
    """How requests arrive."""

    rate: float  # requests a second; may be infinite
    limit: int | None  # requests at once
    burstiness: float = 1.0
    seconds: float = math.inf  # after which no request is sent


@dataclass(frozen=True)
class DatasetArgs:
    GROUP: ClassVar[str] = "Prompts"

    dataset_name: str = flag(
        "random", "Where prompts come from; random needs no file.", choices=DATASETS
    )
    dataset_path: str | None = flag(
        None, "File of sharegpt (JSON) or custom (one JSON object a line).", metavar="FILE"
    )
    num_prompts: int = flag(1000, "Number of requests.", aliases=("--num-prompt",), at_least=1)
    random_input_len: int = flag(
        1024, "Tokens of a random prompt.", aliases=("--random-input",), at_least=1
    )
    random_output_len: int = flag(
        1024, "Tokens of an answer to a random prompt.", aliases=("--random-output",), at_least=1
    )
    random_range_ratio: float = flag(
        0.0,
        "Lengths are drawn between this share of the length and the length.",
        at_least=0,
        at_most=1,
    )
    sharegpt_output_len: int | None = flag(
        None, "Tokens of every answer; unset: as in the file.", at_least=1
    )
    sharegpt_context_len: int | None = flag(
        None, "Skip conversations with more tokens.", at_least=4
    )
    custom_output_len: int = flag(
        256, "Tokens of an answer if a line of the file has no output_len.", at_least=1
    )
    gsp_num_groups: int = flag(64, "Number of shared prefixes.", at_least=1)
    gsp_prompts_per_group: int = flag(16, "Requests with the same prefix.", at_least=1)
    gsp_system_prompt_len: int = flag(2048, "Tokens of a shared prefix.", at_least=1)
    gsp_question_len: int = flag(128, "Tokens after a shared prefix.", at_least=1)
    gsp_output_len: int = flag(256, "Tokens of an answer to such a prompt.", at_least=1)
    seed: int = flag(1, "Seed of prompts, lengths and arrivals.", at_least=0)


@dataclass(frozen=True)
class TargetArgs:
    GROUP: ClassVar[str] = "Server"

    backend: str = flag(
        "sglang", "Kind of server, which determines the route.", choices=tuple(ENDPOINTS)
    )
    base_url: str | None = flag(
        None, "Address of the server, instead of --host and --port.", metavar="URL"
    )
    host: str = flag("127.0.0.1", "Host of the server.", metavar="HOST")
    port: int = flag(30000, "Port of the server.", at_least=1, at_most=65535)
    model: str | None = flag(
        None, "Model to name in requests; unset: the first that the server lists."
    )
    tokenizer: str | None = flag(
        None,
        "Folder with tokenizer.json, or tiny:FAMILY; unset: that of --model or of a server on "
        "this machine, else prompts are plain words.",
        metavar="DIR",
    )
    header: tuple[str, ...] | None = flag(None, "Headers of every request.", metavar="NAME=VALUE")
    api_key: str | None = flag(
        None, "Key of the server; unset: that in OPENAI_API_KEY.", secret=True
    )
    extra_request_body: str | None = flag(
        None, "Merged into the body of every request.", metavar="JSON"
    )
    disable_stream: bool = flag(False, "Request whole answers; TTFT is not measured.")
    disable_ignore_eos: bool = flag(False, "Let answers end before their full length.")
    tokenize_prompt: bool = flag(False, "Send token ids instead of texts (not for chat).")
    lora_name: tuple[str, ...] | None = not_built(None, "LoRA adapters.", instead=NO_ADAPTERS)


@dataclass(frozen=True)
class ServeBenchArgs(DatasetArgs, TargetArgs):
    GROUP: ClassVar[str] = "Load and report"

    request_rate: str = flag(
        "inf",
        "Requests a second, in a Poisson process; inf: all at once; a list such as 1,2,4,8 is "
        "measured one by one.",
        metavar="X[,X…]",
    )
    burstiness: float = flag(1.0, "1: Poisson; below 1: burstier; above 1: more even.", above=0)
    max_concurrency: str | None = flag(
        None,
        "Most requests at once; a list such as 1,16,64 is measured one by one.",
        metavar="N[,N…]",
    )
    warmup_requests: int = flag(1, "Short requests before the measurement.", at_least=0)
    flush_cache: bool = flag(False, "Flush the server's prefix cache before the measurement.")
    profile: bool = flag(False, "Profile the server during the measurement.")
    goodput: tuple[str, ...] | None = flag(
        None, "Report requests a second within these limits (ttft, tpot, e2el).", metavar="NAME:MS"
    )
    output_file: str | None = flag(None, "Append the figures as a line of JSON.", metavar="FILE")
    output_details: bool = flag(False, "Include the figures of every request.")
    plot: str | None = flag(None, "Draw latency and throughput over load.", metavar="FILE.png")
    disable_tqdm: bool = flag(False, "Show no progress bar.")

    def loads(self) -> list[Load]:
        """The loads to measure in order; ValueError if a flag is invalid."""
        rates = [_rate(word) for word in self.request_rate.split(",")]
        limits = [_limit(word) for word in (self.max_concurrency or "").split(",")]
        if len(rates) > 1 and len(limits) > 1:
            raise ValueError(
                f"--request-rate {self.request_rate} and --max-concurrency {self.max_concurrency} "
                "are both lists: vary one and fix the other"
            )
        return [Load(rate, limit, self.burstiness) for rate in rates for limit in limits]

    def url(self) -> str:
        return (self.base_url or f"http://{self.host}:{self.port}").rstrip("/")


def _rate(word: str) -> float:
    try:
        rate = float(word)
    except ValueError:
        rate = math.nan
    if not rate > 0:
        raise ValueError(f"--request-rate is {word!r}: give numbers above 0, or inf")
    return rate


def _limit(word: str) -> int | None:
    if not word:
        return None
    if not (word.isascii() and word.isdecimal() and int(word) > 0):
        raise ValueError(f"--max-concurrency is {word!r}: give whole numbers above 0")
    return int(word)


@dataclass(frozen=True)
class ThroughputArgs(DatasetArgs):
    GROUP: ClassVar[str] = "Run and report"

    skip_warmup: bool = flag(False, "Measure the first requests too.")
    disable_ignore_eos: bool = flag(False, "Let answers end before their full length.")
    output_file: str | None = flag(
        None,
        "Append the figures as a line of JSON.",
        aliases=("--result-filename", "--output-json"),
        metavar="FILE",
    )


@dataclass(frozen=True)
class LatencyArgs:
    GROUP: ClassVar[str] = "Batch"

    batch_size: tuple[int, ...] = flag(
        (1,), "Requests at once; several are measured one by one.", at_least=1
    )
    input_len: tuple[int, ...] = flag((1024,), "Tokens of a prompt.", at_least=1)
    output_len: tuple[int, ...] = flag((16,), "Tokens of an answer.", at_least=1)
    num_iters: int = flag(10, "Measurements of each batch.", at_least=1)
    warmup: int = flag(
        2, "Iterations before the measurement.", aliases=("--num-iters-warmup",), at_least=0
    )
    seed: int = flag(1, "Seed of the prompts.", at_least=0)
    output_file: str | None = flag(
        None,
        "Append the figures as lines of JSON.",
        aliases=("--result-filename", "--output-json"),
        metavar="FILE",
    )
