"""Flags of the model, the scheduler, memory, kernels, logs and the HTTP server."""

from dataclasses import dataclass
from typing import ClassVar

from moesaic.config.flags import flag, not_built
from moesaic.core.chat import REASONING_PARSERS, TOOL_PARSERS

DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
DEVICES = ("auto", "cpu", "cuda", "npu")
QUANTIZATIONS = tuple(
    "fp8 w8a8_fp8 w8a8_int8 w4afp8 mxfp4 modelopt_fp8 modelopt_fp4 awq gptq compressed-tensors "
    "modelslim".split()
)
ATTENTION_BACKENDS = tuple(
    "auto torch_native triton flashinfer fa3 flashmla cutlass_mla trtllm_mla trtllm_mha "
    "ascend".split()
)


@dataclass(frozen=True)
class ModelArgs:
    GROUP: ClassVar[str] = "Model and tokenizer"

    model_path: str = flag(
        "",
        "Hugging Face folder with safetensors files; tiny:FAMILY creates a random toy model, "
        "shape:NAME has the sizes of a known model for --load-format dummy.",
        aliases=("--model",),
        metavar="DIR",
    )
    tokenizer_path: str | None = flag(
        None, "Folder with the tokenizer; unset: the model's folder.", metavar="DIR"
    )
    skip_tokenizer_init: bool = flag(
        False, "Load no tokenizer: requests carry token ids and get token ids back."
    )
    load_format: str = flag(
        "auto",
        "How weights are read; dummy fills them with random numbers.",
        choices=("auto", "safetensors", "dummy"),
    )
    trust_remote_code: bool = flag(
        False, "Accepted for compatibility; code from a checkpoint is never run."
    )
    context_length: int | None = flag(
        None, "Longest sequence in tokens; unset: what the model declares.", at_least=1
    )
    dtype: str = flag(
        "auto", "Type of weights and activations; auto: what the checkpoint has.", choices=DTYPES
    )
    quantization: str | None = flag(
        None,
        "Weight quantization; unset: what the checkpoint declares. An unquantised checkpoint's "
        "experts are quantised while loading (fp8, w8a8_fp8, w8a8_int8, mxfp4, modelopt_*), "
        "and on CUDA by the fp8 ones its other projections.",
        choices=QUANTIZATIONS,
        built=tuple(name for name in QUANTIZATIONS if name not in ("w4afp8", "modelslim")),
    )
    kv_cache_dtype: str = flag(
        "auto",
        "Type of the KV cache; auto: the model's. The others are for --device cuda.",
        choices=("auto", "bfloat16", "fp8_e4m3", "fp8_e5m2"),
        built=("auto", "bfloat16", "fp8_e4m3"),
    )
    chat_template: str | None = flag(
        None, "File with a Jinja chat template; unset: the model's own.", metavar="FILE"
    )


@dataclass(frozen=True)
class ServeArgs:
    """Flags that only the HTTP server reads."""

    GROUP: ClassVar[str] = "HTTP server"

    host: str = flag("127.0.0.1", "Address to listen on.", metavar="HOST")
    port: int = flag(30000, "Port to listen on.", at_least=1, at_most=65535)
    api_key: str | None = flag(
        None, "Key that API requests must carry; unset: MOESAIC_API_KEY, or none.", secret=True
    )
    admin_api_key: str | None = flag(
        None,
        "Key that administrative requests must carry; unset: MOESAIC_ADMIN_API_KEY, or that of "
        "the API.",
        secret=True,
    )
    served_model_name: str | None = flag(
        None, "Model name that the API shows; unset: the model path."
    )
    tool_call_parser: str | None = flag(
        None,
        "Format in which the model calls tools; unset: what its family writes.",
        choices=TOOL_PARSERS,
    )
    reasoning_parser: str | None = flag(
        None,
        "Format in which the model marks its reasoning; unset: what its family writes.",
        choices=REASONING_PARSERS,
    )
    grammar_backend: str | None = flag(
        None, "Engine for structured output.", choices=("llguidance", "none")
    )
    skip_server_warmup: bool = flag(
        False, "Skip the warm-up request and the compilation of GPU kernels at start."
    )
    enable_cache_report: bool = flag(False, "Report cached tokens in usage.")
    log_requests: bool = flag(False, "Log every request.")
    log_requests_level: int = flag(
        2,
        "0: metadata; 1: also sampling; 2: also shortened texts; 3: everything.",
        choices=(0, 1, 2, 3),
    )
    enable_metrics: bool = flag(False, "Accepted for compatibility; metrics are always served.")
    drain_timeout: float = flag(
        25.0,
        "Seconds that open requests may take after SIGTERM before they fail.",
        at_least=0,
        at_most=86400,
    )


@dataclass(frozen=True)
class ScheduleArgs:
    GROUP: ClassVar[str] = "Memory and scheduling"

    mem_fraction_static: float | None = flag(
        None,
        "Share of memory for weights and KV cache, on CUDA of the GPU's; unset: chosen for the "
        "device.",
        above=0,
        below=1,
    )
    max_running_requests: int | None = flag(
        None, "Most requests in a batch; unset: 64 on CPU, 256 on CUDA.", at_least=1
    )
    max_queued_requests: int | None = flag(
        None, "Most requests that may wait; unset: 4096 on the server, else no limit.", at_least=1
    )
    max_total_tokens: int | None = flag(
        None, "Tokens in the KV cache; unset: what memory allows.", at_least=1
    )
    chunked_prefill_size: int | None = flag(
        None,
        "Most prompt tokens in one step; longer prompts are split; -1: never split; "
        "unset: 2048 on CPU, 8192 on CUDA.",
        at_least=1,
        also=(-1,),
    )
    max_prefill_tokens: int | None = not_built(
        None,
        "Most prompt tokens in one step.",
        at_least=1,
        instead="use --chunked-prefill-size, the token budget of a step",
    )
    enable_mixed_chunk: bool = flag(
        False, "Accepted for compatibility; prefill and decode always share a batch."
    )
    page_size: int = flag(16, "Tokens in one page of the KV cache.", at_least=1)
    schedule_policy: str = flag(
        "fcfs",
        "Order of waiting requests: first come, or longest cached prefix first.",
        choices=("fcfs", "lpm"),
        built=("fcfs",),
    )
    schedule_conservativeness: float = flag(
        1.0, "Above 1 admits fewer requests at once, below 1 more (and may preempt).", above=0
    )
    disable_radix_cache: bool = flag(False, "Do not reuse the KV cache of shared prefixes.")
    disable_overlap_schedule: bool = flag(
        False, "Do not schedule the next step while the device computes (CPU never does)."
    )
    stream_interval: int = flag(1, "Tokens between two pieces of a stream.", at_least=1)


@dataclass(frozen=True)
class RuntimeArgs:
    GROUP: ClassVar[str] = "Device, kernels and logs"

    device: str = flag(
        "auto",
        "Device to compute on; auto: MOESAIC_DEVICE, else cuda if there is a GPU "
        "for each rank and CUDA supports all flags given.",
        choices=DEVICES,
        built=("auto", "cpu", "cuda"),
    )
    num_threads: int | None = flag(
        None,
        "Threads of torch on CPU; unset: torch's choice, usually all cores.",
        at_least=1,
        at_most=1024,
    )
    base_gpu_id: int = flag(0, "First GPU to use on a node.", at_least=0)
    gpu_id_step: int = not_built(
        1, "Distance between two GPUs; 0: every rank on the first.", at_least=0
    )
    random_seed: int | None = flag(
        None,
        "Seed of requests without one (unset: random) and of dummy weights (unset: 0).",
        at_least=0,
    )
    attention_backend: str = flag(
        "auto",
        "Attention kernels: torch_native (torch's own) on CPU, triton on CUDA.",
        choices=ATTENTION_BACKENDS,
        built=("auto", "torch_native", "triton"),
    )
    sampling_backend: str = flag(
        "auto",
        "Sampling kernels: pytorch on CPU, triton on CUDA.",
        choices=("auto", "pytorch", "triton", "flashinfer"),
        built=("auto", "pytorch", "triton"),
    )
    enable_deterministic_inference: bool = flag(
        False, "Bitwise equal results for any batch, mesh (TP, EP, DP, PP) and placement."
    )
    disable_cuda_graph: bool = flag(False, "Capture no CUDA graphs (CPU has none).")
    cuda_graph_bs: tuple[int, ...] | None = flag(
        None, "Batch sizes to capture as CUDA graphs; unset: 1, 2, 4, 8, 16 and so on.", at_least=1
    )
    cuda_graph_max_bs: int | None = flag(
        None, "Largest batch size to capture; unset: --max-running-requests.", at_least=1
    )
    enable_torch_compile: bool = not_built(False, "Compile the model with torch.compile.")
    watchdog_timeout: float = flag(
        300.0, "Seconds without progress after which a step of several ranks is aborted.", above=0
    )
    log_level: str = flag(
        "info", "Least severe log line to show.", choices=("debug", "info", "warning", "error")
    )
    decode_log_interval: int = flag(40, "Decode steps between two log lines.", at_least=1)
