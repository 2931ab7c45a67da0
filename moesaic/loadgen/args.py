"""Flags of `moesaic bench`, with the names of SGLang's and vLLM's benchmarks."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from moesaic.config.flags import ONLY_DEFAULT, Flag
from moesaic.loadgen.endpoints import ENDPOINTS

DATASETS = ("random", "random-ids", "sharegpt", "custom", "generated-shared-prefix")
NO_ADAPTERS = "leave it out; the engine has no LoRA adapters"


@dataclass(frozen=True)
class Load:
    """How requests arrive."""

    rate: float  # requests a second; may be infinite
    limit: int | None  # requests at once
    burstiness: float = 1.0


@dataclass(frozen=True)
class DatasetArgs:
    GROUP: ClassVar[str] = "Prompts"

    dataset_name: Annotated[
        str, Flag("Where prompts come from; random needs no file.", choices=DATASETS)
    ] = "random"
    dataset_path: Annotated[
        str | None,
        Flag("File of sharegpt (JSON) or custom (one JSON object a line).", metavar="FILE"),
    ] = None
    num_prompts: Annotated[
        int, Flag("Number of requests.", aliases=("--num-prompt",), at_least=1)
    ] = 1000
    random_input_len: Annotated[
        int, Flag("Tokens of a random prompt.", aliases=("--random-input",), at_least=1)
    ] = 1024
    random_output_len: Annotated[
        int,
        Flag("Tokens of an answer to a random prompt.", aliases=("--random-output",), at_least=1),
    ] = 1024
    random_range_ratio: Annotated[
        float,
        Flag(
            "Lengths are drawn between this share of the length and the length.",
            at_least=0,
            at_most=1,
        ),
    ] = 0.0
    sharegpt_output_len: Annotated[
        int | None, Flag("Tokens of every answer; unset: as in the file.", at_least=1)
    ] = None
    sharegpt_context_len: Annotated[
        int | None, Flag("Skip conversations with more tokens.", at_least=4)
    ] = None
    custom_output_len: Annotated[
        int, Flag("Tokens of an answer if a line of the file has no output_len.", at_least=1)
    ] = 256
    gsp_num_groups: Annotated[int, Flag("Number of shared prefixes.", at_least=1)] = 64
    gsp_prompts_per_group: Annotated[int, Flag("Requests with the same prefix.", at_least=1)] = 16
    gsp_system_prompt_len: Annotated[int, Flag("Tokens of a shared prefix.", at_least=1)] = 2048
    gsp_question_len: Annotated[int, Flag("Tokens after a shared prefix.", at_least=1)] = 128
    gsp_output_len: Annotated[int, Flag("Tokens of an answer to such a prompt.", at_least=1)] = 256
    seed: Annotated[int, Flag("Seed of prompts, lengths and arrivals.", at_least=0)] = 1


@dataclass(frozen=True)
class TargetArgs:
    GROUP: ClassVar[str] = "Server"

    backend: Annotated[
        str, Flag("Kind of server, which determines the route.", choices=tuple(ENDPOINTS))
    ] = "sglang"
    base_url: Annotated[
        str | None, Flag("Address of the server, instead of --host and --port.", metavar="URL")
    ] = None
    host: Annotated[str, Flag("Host of the server.", metavar="HOST")] = "127.0.0.1"
    port: Annotated[int, Flag("Port of the server.", at_least=1, at_most=65535)] = 30000
    model: Annotated[
        str | None, Flag("Model to name in requests; unset: the first that the server lists.")
    ] = None
    tokenizer: Annotated[
        str | None,
        Flag(
            "Folder with tokenizer.json, or tiny:FAMILY; unset: that of --model or of a server on "
            "this machine, else prompts are plain words.",
            metavar="DIR",
        ),
    ] = None
    header: Annotated[
        tuple[str, ...] | None, Flag("Headers of every request.", metavar="NAME=VALUE")
    ] = None
    api_key: Annotated[
        str | None, Flag("Key of the server; unset: that in OPENAI_API_KEY.", secret=True)
    ] = None
    extra_request_body: Annotated[
        str | None, Flag("Merged into the body of every request.", metavar="JSON")
    ] = None
    disable_stream: Annotated[bool, Flag("Request whole answers; TTFT is not measured.")] = False
    disable_ignore_eos: Annotated[bool, Flag("Let answers end before their full length.")] = False
    tokenize_prompt: Annotated[bool, Flag("Send token ids instead of texts (not for chat).")] = (
        False
    )
    lora_name: Annotated[
        tuple[str, ...] | None, Flag("LoRA adapters.", built=ONLY_DEFAULT, instead=NO_ADAPTERS)
    ] = None


@dataclass(frozen=True)
class ServeBenchArgs(DatasetArgs, TargetArgs):
    GROUP: ClassVar[str] = "Load and report"

    request_rate: Annotated[
        str,
        Flag(
            "Requests a second, in a Poisson process; inf: all at once; a list such as 1,2,4,8 is "
            "measured one by one.",
            metavar="X[,X…]",
        ),
    ] = "inf"
    burstiness: Annotated[
        float, Flag("1: Poisson; below 1: burstier; above 1: more even.", above=0)
    ] = 1.0
    max_concurrency: Annotated[
        str | None,
        Flag(
            "Most requests at once; a list such as 1,16,64 is measured one by one.",
            metavar="N[,N…]",
        ),
    ] = None
    warmup_requests: Annotated[int, Flag("Short requests before the measurement.", at_least=0)] = 1
    flush_cache: Annotated[
        bool, Flag("Flush the server's prefix cache before the measurement.")
    ] = False
    profile: Annotated[bool, Flag("Profile the server during the measurement.")] = False
    goodput: Annotated[
        tuple[str, ...] | None,
        Flag("Report requests a second within these limits (ttft, tpot, e2el).", metavar="NAME:MS"),
    ] = None
    output_file: Annotated[
        str | None, Flag("Append the figures as a line of JSON.", metavar="FILE")
    ] = None
    output_details: Annotated[bool, Flag("Include the figures of every request.")] = False
    plot: Annotated[
        str | None, Flag("Draw latency and throughput over load.", metavar="FILE.png")
    ] = None
    disable_tqdm: Annotated[bool, Flag("Show no progress bar.")] = False

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

    skip_warmup: Annotated[bool, Flag("Measure the first requests too.")] = False
    disable_ignore_eos: Annotated[bool, Flag("Let answers end before their full length.")] = False
    output_file: Annotated[
        str | None,
        Flag(
            "Append the figures as a line of JSON.",
            aliases=("--result-filename", "--output-json"),
            metavar="FILE",
        ),
    ] = None


@dataclass(frozen=True)
class LatencyArgs:
    GROUP: ClassVar[str] = "Batch"

    batch_size: Annotated[
        tuple[int, ...], Flag("Requests at once; several are measured one by one.", at_least=1)
    ] = (1,)
    input_len: Annotated[tuple[int, ...], Flag("Tokens of a prompt.", at_least=1)] = (1024,)
    output_len: Annotated[tuple[int, ...], Flag("Tokens of an answer.", at_least=1)] = (16,)
    num_iters: Annotated[int, Flag("Measurements of each batch.", at_least=1)] = 10
    warmup: Annotated[
        int, Flag("Iterations before the measurement.", aliases=("--num-iters-warmup",), at_least=0)
    ] = 2
    seed: Annotated[int, Flag("Seed of the prompts.", at_least=0)] = 1
    output_file: Annotated[
        str | None,
        Flag(
            "Append the figures as lines of JSON.",
            aliases=("--result-filename", "--output-json"),
            metavar="FILE",
        ),
    ] = None
