"""Flags of the model, the scheduler, memory, kernels, logs and the HTTP server."""

from dataclasses import dataclass
from typing import ClassVar

from moesaic.config.flags import flag, not_built
from moesaic.core.chat import (
    OTHER_REASONING_PARSERS,
    OTHER_TOOL_PARSERS,
    REASONING_PARSERS,
    TOOL_PARSERS,
)

DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
DEVICES = ("auto", "cpu", "cuda", "npu", "xpu", "hpu", "musa", "mps")
QUANTIZATIONS_BUILT = tuple(
    "fp8 w8a8_fp8 w8a8_int8 mxfp4 modelopt_fp8 modelopt_fp4 awq gptq compressed-tensors".split()
)
QUANTIZATIONS = (
    *QUANTIZATIONS_BUILT,
    *"w4afp8 modelslim mxfp8 awq_marlin gptq_marlin bitsandbytes gguf modelopt modelopt_mixed "
    "nvfp4_online petit_nvfp4 moe_wna16 auto-round auto-round-int8 mxfp_w4a8 quark "
    "quark_int4fp8_moe quark_mxfp4 mlx_q4 mlx_q8 unquant humming".split(),
)
LOAD_FORMATS_BUILT = ("auto", "safetensors", "dummy")
LOAD_FORMATS = (
    *LOAD_FORMATS_BUILT,
    *"pt npcache gguf bitsandbytes mistral layered sharded_state presharded fastsafetensors "
    "instanttensor runai_streamer remote remote_instance flash_rl expert_pack private".split(),
)
KV_TYPES = tuple("auto bfloat16 bf16 fp8_e4m3 fp8_e5m2 mxfp8 nvfp4 fp4_mx_block16".split())
ATTENTION_BACKENDS = tuple(
    "auto torch_native triton flashinfer fa3 fa4 flashmla cutlass_mla trtllm_mla trtllm_mha "
    "cutedsl_mla tokenspeed_mla flex_attention hpc_ops dsa nsa qsa dsv4 compressed aiter wave "
    "intel_amx intel_xpu ascend llada2_cfg_flashinfer minicpm_flashattn "
    "minicpm_flashinfer".split()
)
# Kernels for the attention of any model; the others are for other devices, or change the results.
ATTENTION_KERNELS = tuple(
    "torch_native triton flashinfer fa3 fa4 flashmla cutlass_mla trtllm_mla trtllm_mha "
    "cutedsl_mla tokenspeed_mla flex_attention hpc_ops aiter wave intel_amx".split()
)
POLICIES = tuple(
    "fcfs lpm random dfs-weight lof priority routing-key hrrn shortest-prefill-first".split()
)
NO_SUCH_FORMAT = (
    "no served model writes this format: leave it out, and the model's family decides, or name one "
    "of "
)
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True)
class ModelArgs:
    GROUP: ClassVar[str] = "Model and tokenizer"

    model_path: str = flag(
        "",
        "Hugging Face folder with safetensors files, or the id of a model that was downloaded to "
        "the Hub's cache; tiny:FAMILY creates a random toy model, "
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
        choices=LOAD_FORMATS,
        built=LOAD_FORMATS_BUILT,
        why="weights are read from safetensors files",
    )
    dummy_router_zipf: float | None = flag(
        None,
        "With --load-format dummy: routers prefer some experts, by Zipf's law with this exponent, "
        "for benchmarks of balancing. Unset: all experts are about equally popular.",
        at_least=0,
        at_most=2,
    )
    trust_remote_code: bool = flag(
        False, "Accepted for compatibility; code from a checkpoint is never run."
    )
    revision: str | None = flag(
        None, "Branch, tag or commit of a model in the Hub's cache; unset: main."
    )
    download_dir: str | None = flag(
        None,
        "The Hub's cache; unset: HF_HUB_CACHE, or hub in HF_HOME, or ~/.cache/huggingface/hub. "
        "Nothing is downloaded.",
        metavar="DIR",
    )
    json_model_override_args: str = flag(
        "{}", "JSON object whose values replace those of config.json.", metavar="JSON", json=True
    )
    context_length: int | None = flag(
        None,
        "Longest sequence in tokens; unset: what the model declares.",
        at_least=1,
        suffixes=True,
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
        same={"awq_marlin": "awq", "gptq_marlin": "gptq"},
        built=QUANTIZATIONS_BUILT,
        why="there are no kernels for this format",
    )
    kv_cache_dtype: str = flag(
        "auto",
        "Type of the KV cache; auto: the model's. The others are for --device cuda.",
        choices=KV_TYPES,
        built=("auto", "bfloat16", "bf16", "fp8_e4m3"),
        why="attention does not read this type",
    )
    chat_template: str | None = flag(
        None, "File with a Jinja chat template; unset: the model's own.", metavar="FILE"
    )
    preferred_sampling_params: str | None = flag(
        None,
        "JSON object of sampling parameters for requests that leave them out.",
        metavar="JSON",
        json=True,
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
    ssl_certfile: str | None = flag(
        None, "Certificate, with which the server speaks HTTPS.", metavar="FILE"
    )
    ssl_keyfile: str | None = flag(
        None, "Key of the certificate; unset: it is in the certificate's file.", metavar="FILE"
    )
    ssl_keyfile_password: str | None = flag(None, "Password of the key.", secret=True)
    ssl_ca_certs: str | None = flag(
        None, "Certificates of authorities; clients need none of their own.", metavar="FILE"
    )
    enable_ssl_refresh: bool = flag(False, "Read the certificate again when its files change.")
    served_model_name: str | None = flag(
        None,
        "Model name that the API shows; unset: the model path. Further names after it are "
        "answered too.",
        rest="served_model_aliases",
    )
    served_model_aliases: tuple[str, ...] = flag((), "Further names of the model.")
    sampling_defaults: str = flag(
        "model",
        "Sampling parameters that a request leaves out: those of the model's "
        "generation_config.json, or OpenAI's.",
        choices=("model", "openai"),
    )
    default_chat_template_kwargs: str | None = flag(
        None,
        "JSON object of chat_template_kwargs for requests that leave them out.",
        metavar="JSON",
        json=True,
    )
    stream_response_default_include_usage: bool = flag(
        False, "End every stream of the OpenAI API with its usage."
    )
    tool_call_parser: str | None = flag(
        None,
        "Format in which the model calls tools; unset: what its family writes.",
        choices=TOOL_PARSERS,
        refused=dict.fromkeys(OTHER_TOOL_PARSERS, NO_SUCH_FORMAT + ", ".join(TOOL_PARSERS)),
        unset=("auto",),
    )
    reasoning_parser: str | None = flag(
        None,
        "Format in which the model marks its reasoning; unset: what its family writes.",
        choices=REASONING_PARSERS,
        refused=dict.fromkeys(
            OTHER_REASONING_PARSERS, NO_SUCH_FORMAT + ", ".join(REASONING_PARSERS)
        ),
        unset=("auto",),
    )
    grammar_backend: str | None = flag(
        None,
        "Engine for structured output.",
        choices=("llguidance", "none"),
        same={"xgrammar": "llguidance", "outlines": "llguidance"},
    )
    constrained_json_allow_additional_properties: bool = flag(
        False,
        "Objects of JSON schemas may have properties that the schema does not name, by the letter "
        "of the standard; otherwise only if it has additionalProperties.",
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
    log_requests_format: str = flag("text", "Form of these lines.", choices=("text", "json"))
    log_requests_target: tuple[str, ...] | None = flag(
        None,
        "Where these lines go: stdout, or folders, each with a file per day; unset: the log.",
    )
    enable_request_time_stats_logging: bool = flag(
        False, "Log the seconds that every request waited, took for its prompt, and decoded."
    )
    log_level_http: str | None = flag(
        None,
        "Least severe line of the HTTP server; info and debug log every HTTP request; unset: "
        "warning.",
        choices=LOG_LEVELS,
    )
    uvicorn_access_log_exclude_prefixes: tuple[str, ...] = flag(
        (), "Beginnings of paths whose requests --log-level-http does not log."
    )
    enable_metrics: bool = flag(False, "Accepted for compatibility; metrics are always served.")
    metric_names: str = flag(
        "moesaic",
        "Names in /metrics; sglang: SGLang's names beside our own, with the same values.",
        choices=("moesaic", "sglang"),
    )
    profile_dir: str | None = flag(
        None,
        "Folder of traces; a client may choose a folder in it. Unset: MOESAIC_PROFILER_DIR, or "
        "moesaic/profile in the user's cache folder.",
        metavar="DIR",
    )
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
        None, "Tokens in the KV cache; unset: what memory allows.", at_least=1, suffixes=True
    )
    chunked_prefill_size: int | None = flag(
        None,
        "Most prompt tokens in one step; longer prompts are split; -1: never split; "
        "unset: 2048 on CPU, 8192 on CUDA.",
        at_least=1,
        also=(-1,),
    )
    max_prefill_tokens: int | None = flag(
        None,
        "Most prompt tokens in one step, if --chunked-prefill-size is more or -1.",
        at_least=1,
        suffixes=True,
    )
    prefill_max_requests: int | None = flag(
        None, "Most requests whose prompts share a step; unset: no limit.", at_least=1
    )
    enable_mixed_chunk: bool = flag(
        False, "Accepted for compatibility: prompts and decodes share steps by default."
    )
    disable_mixed_chunk: bool = flag(
        False,
        "Compute prompts in steps of their own, for which decodes wait, as SGLang does without "
        "--enable-mixed-chunk.",
    )
    max_step_ms: float | None = flag(
        None,
        "Milliseconds that prompts may fill a step up to while requests decode; 0: no bound; "
        "unset: no bound on CPU, on CUDA 30 or, if more, 2 to 7.5 times what the step takes "
        "without them, by how many prompts wait. A chunk of a long prompt may exceed it.",
        at_least=0,
    )
    enable_prefill_delayer: bool = flag(
        False,
        "Hold new prompts back for some steps while other attention groups have none, so that "
        "groups begin prompts in the same steps.",
    )
    prefill_delayer_max_delay_passes: int = flag(
        30, "Most steps for which --enable-prefill-delayer holds a prompt back.", at_least=1
    )
    prefill_delayer_max_delay_ms: float | None = flag(
        None, "The same in milliseconds; unset: no limit.", at_least=0
    )
    prefill_delayer_token_usage_low_watermark: float | None = flag(
        None,
        "Used share of a group's KV cache below which it holds nothing back; unset: none.",
        at_least=0,
        at_most=1,
    )
    page_size: int = flag(16, "Tokens in one page of the KV cache.", at_least=1)
    schedule_policy: str = flag(
        "fcfs",
        "Order of waiting requests: first come. Orders that only reuse more of the cache are "
        "accepted.",
        choices=POLICIES,
        idle=("lpm", "dfs-weight"),
        built=("fcfs",),
        why="requests start in the order in which they come",
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
        why="there are no kernels for this device",
    )
    num_threads: int | None = flag(
        None,
        "Threads of torch on CPU; unset: torch's choice, usually all cores.",
        at_least=1,
        at_most=1024,
    )
    base_gpu_id: int = flag(0, "First GPU to use on a node.", at_least=0)
    gpu_id_step: int = not_built(
        1,
        "Distance between two GPUs; 0: every rank on the first.",
        at_least=0,
        why="ranks take GPUs one after the other, and CUDA_VISIBLE_DEVICES chooses which",
    )
    random_seed: int | None = flag(
        None,
        "Seed of requests without one (unset: random) and of dummy weights (unset: 0).",
        at_least=0,
    )
    attention_backend: str = flag(
        "auto",
        "Attention kernels: torch_native (torch's own) on CPU, triton on CUDA, whichever is named.",
        choices=ATTENTION_BACKENDS,
        idle=ATTENTION_KERNELS,
        built=("auto",),
        why="attention has kernels of its own, which the device decides",
    )
    sampling_backend: str = flag(
        "auto",
        "Sampling kernels: pytorch on CPU, triton on CUDA, whichever is named.",
        choices=("auto", "pytorch", "triton", "flashinfer", "ascend", "intel_xpu"),
        idle=("pytorch", "triton", "flashinfer"),
        built=("auto",),
        why="sampling has kernels of its own, which the device decides",
    )
    enable_deterministic_inference: bool = flag(
        False, "Bitwise equal results for any batch, mesh (TP, EP, DP, PP) and placement."
    )
    disable_cuda_graph: bool = flag(
        False, "Capture no CUDA graphs (CPU has none).", aliases=("--disable-decode-cuda-graph",)
    )
    cuda_graph_backend_decode: str | None = flag(
        None,
        "How decode steps are captured; disabled: the same as --disable-cuda-graph.",
        choices=("full", "breakable", "disabled"),
        built=("full", "disabled"),
        why="a decode step is captured as one graph",
    )
    cuda_graph_bs: tuple[int, ...] | None = flag(
        None,
        "Batch sizes to capture as CUDA graphs; unset: 1, 2, 4, 8, 16 and so on.",
        aliases=("--cuda-graph-bs-decode",),
        at_least=1,
    )
    cuda_graph_max_bs: int | None = flag(
        None,
        "Largest batch size to capture; unset: --max-running-requests.",
        aliases=("--cuda-graph-max-bs-decode",),
        at_least=1,
    )
    disable_prefill_cuda_graph: bool = flag(
        False,
        "Capture no CUDA graphs of steps with prompts: these are launched kernel by kernel.",
        aliases=("--disable-piecewise-cuda-graph",),
    )
    cuda_graph_backend_prefill: str | None = flag(
        None,
        "How steps with prompts are captured as CUDA graphs; unset: full; disabled: the same as "
        "--disable-prefill-cuda-graph.",
        choices=("full", "breakable", "disabled"),
        built=("full", "disabled"),
        why="a step with prompts is captured as one graph",
    )
    cuda_graph_bs_prefill: tuple[int, ...] | None = flag(
        None,
        "Numbers of tokens to capture as CUDA graphs of steps with prompts; unset: 64, 80, 96, "
        "112, 128, 160 and so on up to 9216.",
        aliases=("--piecewise-cuda-graph-tokens",),
        at_least=1,
    )
    cuda_graph_max_bs_prefill: int | None = flag(
        None,
        "Most tokens of such a graph; unset: 9216, or the largest step if that is less.",
        aliases=("--piecewise-cuda-graph-max-tokens",),
        at_least=1,
    )
    watchdog_timeout: float = flag(
        300.0, "Seconds without progress after which a step of several ranks is aborted.", above=0
    )
    gc_threshold: tuple[int, ...] | None = flag(
        None,
        "One to three thresholds of Python's garbage collector, as for gc.set_threshold; unset: "
        "Python's.",
        at_least=0,
    )
    crash_dump_folder: str | None = flag(
        None, "Folder for a file with the open requests if the engine fails.", metavar="DIR"
    )
    log_level: str = flag("info", "Least severe log line to show.", choices=LOG_LEVELS)
    decode_log_interval: int = flag(40, "Decode steps between two log lines.", at_least=1)
