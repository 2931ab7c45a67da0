"""Flags of the model, the scheduler, memory, kernels, logs and the HTTP server."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from moesaic.config.flags import Flag, not_built
from moesaic.core.chat import REASONING_PARSERS, TOOL_PARSERS

DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
DEVICES = ("auto", "cpu", "cuda", "npu")
QUANTIZATIONS = (
    "fp8",
    "w8a8_fp8",
    "w8a8_int8",
    "w4afp8",
    "mxfp4",
    "modelopt_fp8",
    "modelopt_fp4",
    "awq",
    "gptq",
    "compressed-tensors",
    "modelslim",
)
ATTENTION_BACKENDS = (
    "auto",
    "torch_native",
    "triton",
    "flashinfer",
    "fa3",
    "flashmla",
    "cutlass_mla",
    "trtllm_mla",
    "trtllm_mha",
    "ascend",
)


@dataclass(frozen=True)
class ModelArgs:
    GROUP: ClassVar[str] = "Model and tokenizer"

    model_path: Annotated[
        str,
        Flag(
            "Hugging Face folder with safetensors files; tiny:FAMILY creates a random toy model, "
            "shape:NAME has the sizes of a known model for --load-format dummy.",
            aliases=("--model",),
            metavar="DIR",
        ),
    ] = ""
    tokenizer_path: Annotated[
        str | None, Flag("Folder with the tokenizer; unset: the model's folder.", metavar="DIR")
    ] = None
    skip_tokenizer_init: Annotated[
        bool, Flag("Load no tokenizer: requests carry token ids and get token ids back.")
    ] = False
    load_format: Annotated[
        str,
        Flag(
            "How weights are read; dummy fills them with random numbers.",
            choices=("auto", "safetensors", "dummy"),
        ),
    ] = "auto"
    trust_remote_code: Annotated[
        bool, Flag("Accepted for compatibility; code from a checkpoint is never run.")
    ] = False
    context_length: Annotated[
        int | None, Flag("Longest sequence in tokens; unset: what the model declares.", at_least=1)
    ] = None
    dtype: Annotated[
        str, Flag("Type of weights and activations; auto: what the checkpoint has.", choices=DTYPES)
    ] = "auto"
    quantization: Annotated[
        str | None,
        Flag(
            "Weight quantization; unset: what the checkpoint declares. An unquantised checkpoint's "
            "experts are quantised while loading (fp8, w8a8_fp8, w8a8_int8, mxfp4, modelopt_*), "
            "and on CUDA by the fp8 ones its other projections.",
            choices=QUANTIZATIONS,
            built=tuple(name for name in QUANTIZATIONS if name not in ("w4afp8", "modelslim")),
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str,
        Flag(
            "Type of the KV cache; auto: the model's. The others are for --device cuda.",
            choices=("auto", "bfloat16", "fp8_e4m3", "fp8_e5m2"),
            built=("auto", "bfloat16", "fp8_e4m3"),
        ),
    ] = "auto"
    chat_template: Annotated[
        str | None, Flag("File with a Jinja chat template; unset: the model's own.", metavar="FILE")
    ] = None


@dataclass(frozen=True)
class ServeArgs:
    """Flags that only the HTTP server reads."""

    GROUP: ClassVar[str] = "HTTP server"

    host: Annotated[str, Flag("Address to listen on.", metavar="HOST")] = "127.0.0.1"
    port: Annotated[int, Flag("Port to listen on.", at_least=1, at_most=65535)] = 30000
    api_key: Annotated[
        str | None,
        Flag("Key that API requests must carry; unset: MOESAIC_API_KEY, or none.", secret=True),
    ] = None
    admin_api_key: Annotated[
        str | None,
        Flag(
            "Key that administrative requests must carry; unset: MOESAIC_ADMIN_API_KEY, or that of "
            "the API.",
            secret=True,
        ),
    ] = None
    served_model_name: Annotated[
        str | None, Flag("Model name that the API shows; unset: the model path.")
    ] = None
    tool_call_parser: Annotated[
        str | None,
        Flag(
            "Format in which the model calls tools; unset: what its family writes.",
            choices=TOOL_PARSERS,
        ),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        Flag(
            "Format in which the model marks its reasoning; unset: what its family writes.",
            choices=REASONING_PARSERS,
        ),
    ] = None
    grammar_backend: Annotated[
        str | None, Flag("Engine for structured output.", choices=("llguidance", "none"))
    ] = None
    skip_server_warmup: Annotated[
        bool, Flag("Skip the warm-up request and the compilation of GPU kernels at start.")
    ] = False
    enable_cache_report: Annotated[bool, Flag("Report cached tokens in usage.")] = False
    log_requests: Annotated[bool, Flag("Log every request.")] = False
    log_requests_level: Annotated[
        int,
        Flag(
            "0: metadata; 1: also sampling; 2: also shortened texts; 3: everything.",
            choices=(0, 1, 2, 3),
        ),
    ] = 2
    enable_metrics: Annotated[
        bool, Flag("Accepted for compatibility; metrics are always served.")
    ] = False
    drain_timeout: Annotated[
        float,
        Flag(
            "Seconds that open requests may take after SIGTERM before they fail.",
            at_least=0,
            at_most=86400,
        ),
    ] = 25.0


@dataclass(frozen=True)
class ScheduleArgs:
    GROUP: ClassVar[str] = "Memory and scheduling"

    mem_fraction_static: Annotated[
        float | None,
        Flag(
            "Share of memory for weights and KV cache, on CUDA of the GPU's; unset: chosen for the "
            "device.",
            above=0,
            below=1,
        ),
    ] = None
    max_running_requests: Annotated[
        int | None, Flag("Most requests in a batch; unset: 64 on CPU, 256 on CUDA.", at_least=1)
    ] = None
    max_queued_requests: Annotated[
        int | None,
        Flag("Most requests that may wait; unset: 4096 on the server, else no limit.", at_least=1),
    ] = None
    max_total_tokens: Annotated[
        int | None, Flag("Tokens in the KV cache; unset: what memory allows.", at_least=1)
    ] = None
    chunked_prefill_size: Annotated[
        int | None,
        Flag(
            "Most prompt tokens in one step; longer prompts are split; -1: never split; "
            "unset: 2048 on CPU, 8192 on CUDA.",
            at_least=1,
            also=(-1,),
        ),
    ] = None
    max_prefill_tokens: Annotated[
        int | None,
        not_built(
            "Most prompt tokens in one step.",
            at_least=1,
            instead="use --chunked-prefill-size, the token budget of a step",
        ),
    ] = None
    enable_mixed_chunk: Annotated[
        bool, Flag("Accepted for compatibility; prefill and decode always share a batch.")
    ] = False
    page_size: Annotated[int, Flag("Tokens in one page of the KV cache.", at_least=1)] = 16
    schedule_policy: Annotated[
        str,
        Flag(
            "Order of waiting requests: first come, or longest cached prefix first.",
            choices=("fcfs", "lpm"),
            built=("fcfs",),
        ),
    ] = "fcfs"
    schedule_conservativeness: Annotated[
        float,
        Flag("Above 1 admits fewer requests at once, below 1 more (and may preempt).", above=0),
    ] = 1.0
    disable_radix_cache: Annotated[bool, Flag("Do not reuse the KV cache of shared prefixes.")] = (
        False
    )
    disable_overlap_schedule: Annotated[
        bool, Flag("Do not schedule the next step while the device computes (CPU never does).")
    ] = False
    stream_interval: Annotated[int, Flag("Tokens between two pieces of a stream.", at_least=1)] = 1


@dataclass(frozen=True)
class RuntimeArgs:
    GROUP: ClassVar[str] = "Device, kernels and logs"

    device: Annotated[
        str,
        Flag(
            "Device to compute on; auto: MOESAIC_DEVICE, else cuda if there is a GPU "
            "for each rank and CUDA supports all flags given.",
            choices=DEVICES,
            built=("auto", "cpu", "cuda"),
        ),
    ] = "auto"
    num_threads: Annotated[
        int | None,
        Flag(
            "Threads of torch on CPU; unset: torch's choice, usually all cores.",
            at_least=1,
            at_most=1024,
        ),
    ] = None
    base_gpu_id: Annotated[int, Flag("First GPU to use on a node.", at_least=0)] = 0
    gpu_id_step: Annotated[
        int, not_built("Distance between two GPUs; 0: every rank on the first.", at_least=0)
    ] = 1
    random_seed: Annotated[
        int | None,
        Flag(
            "Seed of requests without one (unset: random) and of dummy weights (unset: 0).",
            at_least=0,
        ),
    ] = None
    attention_backend: Annotated[
        str,
        Flag(
            "Attention kernels: torch_native (torch's own) on CPU, triton on CUDA.",
            choices=ATTENTION_BACKENDS,
            built=("auto", "torch_native", "triton"),
        ),
    ] = "auto"
    sampling_backend: Annotated[
        str,
        Flag(
            "Sampling kernels: pytorch on CPU, triton on CUDA.",
            choices=("auto", "pytorch", "triton", "flashinfer"),
            built=("auto", "pytorch", "triton"),
        ),
    ] = "auto"
    enable_deterministic_inference: Annotated[
        bool, Flag("Bitwise equal results for any batch, mesh (TP, EP, DP, PP) and placement.")
    ] = False
    disable_cuda_graph: Annotated[bool, Flag("Capture no CUDA graphs (CPU has none).")] = False
    cuda_graph_bs: Annotated[
        tuple[int, ...] | None,
        Flag("Batch sizes to capture as CUDA graphs; unset: 1, 2, 4, 8, 16 and so on.", at_least=1),
    ] = None
    cuda_graph_max_bs: Annotated[
        int | None,
        Flag("Largest batch size to capture; unset: --max-running-requests.", at_least=1),
    ] = None
    enable_torch_compile: Annotated[bool, not_built("Compile the model with torch.compile.")] = (
        False
    )
    watchdog_timeout: Annotated[
        float,
        Flag("Seconds without progress after which a step of several ranks is aborted.", above=0),
    ] = 300.0
    log_level: Annotated[
        str, Flag("Least severe log line to show.", choices=("debug", "info", "warning", "error"))
    ] = "info"
    decode_log_interval: Annotated[int, Flag("Decode steps between two log lines.", at_least=1)] = (
        40
    )
