"""Flags of parallelism, expert parallelism, load balancing, overlap and elasticity."""

from dataclasses import dataclass
from typing import ClassVar

from moesaic.config.flags import flag, not_built

A2A_BACKENDS = ("none", "deepep", "mooncake", "mori", "flashinfer", "ascend_fuseep")
RUNNER_BACKENDS = tuple(
    "auto triton triton_kernel deep_gemm cutlass flashinfer_trtllm flashinfer_cutlass "
    "flashinfer_mxfp4 flashinfer_cutedsl".split()
)
LOAD_BALANCE_METHODS = (
    "auto",
    "round_robin",
    "follow_bootstrap_room",
    "total_requests",
    "total_tokens",
)
EPLB_ALGORITHMS = (
    "auto",
    "incremental",
    "deepseek",
    "deepseek_hierarchical",
    "deepseek_vec",
    "deepseek_vec_hierarchical",
    "elasticity_aware",
    "elasticity_aware_hierarchical",
)
OVERLAPS = ("off", "auto", "sbo", "tbo")
# SGLang's other backends.
OTHER_A2A_BACKENDS = ("nixl", "megamoe", "deepep_v2", "pplx", "ascend_tp", "flashinfer_megamoe")
OTHER_RUNNER_BACKENDS = tuple(
    "experimental_sgl_trtllm flashinfer_trtllm_routed flashinfer_megamoe aiter marlin humming "
    "experimental_sgl_marlin hpc_ops megamoe intel_xpu".split()
)
LORA_RUNNER_BACKENDS = ("lora_cutedsl", "lora_triton", "lora_marlin")
REGISTER = "or name the module that registers it with --moe-backend-module"
REFUSED_A2A_BACKENDS = dict.fromkeys(
    OTHER_A2A_BACKENDS, "it is not built, and all give the same answers: give deepep, " + REGISTER
)
REFUSED_RUNNER_BACKENDS = dict.fromkeys(
    OTHER_RUNNER_BACKENDS, "it is not built: leave it out, and the weights decide, " + REGISTER
) | dict.fromkeys(LORA_RUNNER_BACKENDS, "LoRA adapters are not served: leave it out")
TRANSFER_BACKENDS = ("auto", "shm", "cuda_ipc", "tcp", "nixl", "fake")
# SGLang's others, by what does the same here.
OTHER_TRANSFER_BACKENDS = dict.fromkeys(("mooncake", "ascend", "mori"), "auto") | {
    "mooncake_tcp": "tcp"
}
# The only device of some.
TRANSFER_DEVICES = {"shm": "cpu", "cuda_ipc": "cuda", "nixl": "cpu"}


@dataclass(frozen=True)
class ParallelArgs:
    GROUP: ClassVar[str] = "Parallelism"

    tp_size: int = flag(
        1,
        "Ranks that share a layer (tensor parallel).",
        aliases=("--tp", "--tensor-parallel-size"),
        at_least=1,
    )
    ep_size: int = flag(
        1,
        "Ranks that share the experts of a layer (expert parallel).",
        aliases=("--ep", "--expert-parallel-size"),
        at_least=1,
    )
    dp_size: int = flag(
        1,
        "Data-parallel groups: of attention with --enable-dp-attention, else full replicas.",
        aliases=("--dp", "--data-parallel-size"),
        at_least=1,
    )
    pp_size: int = flag(
        1, "Pipeline stages.", aliases=("--pp", "--pipeline-parallel-size"), at_least=1
    )
    enable_dp_attention: bool = flag(False, "Split attention by request over --dp-size groups.")
    attn_dp_size: int = flag(
        1,
        "Attention groups: the same as --dp-size with --enable-dp-attention.",
        aliases=("--attention-data-parallel-size",),
        at_least=1,
    )
    enable_dp_lm_head: bool = flag(
        False,
        "Compute logits within each attention group; always on with --enable-dp-attention on CUDA.",
    )
    enable_tp_lm_head_all_to_all: bool | None = not_built(
        None,
        "Exchange the shards of the logits by an all-to-all.",
        why="the shards of the logits are gathered",
    )
    enable_dp_attention_local_control_broadcast: bool = not_built(
        False,
        "Send control messages within an attention group only.",
        why="control messages go to all ranks",
    )
    load_balance_method: str = flag(
        "auto",
        "How requests are assigned to data-parallel groups: in turn, or to the one with the "
        "fewest requests or tokens; auto: the one with the least to compute, which prefers a "
        "group that has the beginning of the prompt cached.",
        choices=LOAD_BALANCE_METHODS,
        same={"minimum_tokens": "total_tokens", "shortest_queue": "total_requests"},
        built=("auto", "round_robin", "total_requests", "total_tokens"),
        why="a decode instance finds a request by its room, whichever group has it",
    )
    nnodes: int = flag(1, "Number of nodes.", at_least=1)
    node_rank: int = flag(0, "Number of this node.", at_least=0)
    dist_init_addr: str | None = flag(
        None,
        "Rendezvous address: an address of node 0 and a free port there; unset: MASTER_ADDR "
        "and MASTER_PORT. With --elastic-ep-backend further ones, separated by commas, of node 1, "
        "2, …: these take its place if it is lost.",
        aliases=("--nccl-init-addr",),
        metavar="HOST:PORT",
    )
    node_secret_file: str | None = flag(
        None,
        "File with the secret that all nodes share, of 16 bytes or more, which no other user can "
        "read; unset: MOESAIC_SECRET. Several nodes need one unless they meet on loopback.",
        metavar="FILE",
    )
    use_ray: bool = flag(
        False,
        "Start the other nodes on a Ray cluster, of which this machine is a part; without "
        "--nnodes all of it.",
    )
    dist_timeout: float | None = flag(
        None, "Seconds that a rank waits for its peers in one operation; unset: 300.", above=0
    )


@dataclass(frozen=True)
class MoeArgs:
    GROUP: ClassVar[str] = "Mixture of experts"

    moe_a2a_backend: str = flag(
        "none",
        "How tokens are sent to their experts.",
        choices=A2A_BACKENDS,
        open=True,
        refused=REFUSED_A2A_BACKENDS,
    )
    moe_runner_backend: str = flag(
        "auto",
        "How experts compute.",
        choices=RUNNER_BACKENDS,
        open=True,
        refused=REFUSED_RUNNER_BACKENDS,
    )
    moe_backend_module: str | None = flag(
        None, "Python module that registers more backends for the two flags above.", metavar="M"
    )
    deepep_mode: str = flag(
        "auto",
        "normal for prefill, low_latency for decode; auto: chosen for each step.",
        choices=("auto", "normal", "low_latency"),
    )
    deepep_config: str | None = flag(
        None, "JSON, or a JSON file: most SMs that normal mode's kernels use on CUDA."
    )
    deepep_dispatch_output_dtype: str = flag(
        "auto",
        "Type sent to the experts; auto: what the runner and the weights consume.",
        aliases=("--deepep-dispatcher-output-dtype",),
        choices=("auto", "bf16", "fp8", "int8", "nvfp4", "mxfp4"),
    )
    fuseep_mode: int = not_built(
        2,
        "Variant of the fused all-to-all.",
        choices=(1, 2),
        why="ascend_fuseep has one variant here",
    )
    moe_dense_tp_size: int | None = flag(
        None,
        "Tensor-parallel size of dense layers: 1 or --tp-size; unset: --tp-size, but 1 with "
        "--enable-dp-attention on CUDA.",
        at_least=1,
    )
    moe_dp_size: int = not_built(
        1,
        "Data-parallel groups of the MoE layers.",
        why="all ranks share the experts",
        aliases=("--moe-data-parallel-size",),
        at_least=1,
    )
    dwdp_size: int = not_built(
        1,
        "Ranks that share the weights while every rank computes its own tokens.",
        at_least=1,
        why="tokens go to the weights, not weights to the tokens",
    )
    flashinfer_mxfp4_moe_precision: str = not_built(
        "default",
        "Activations of the flashinfer_mxfp4 runner.",
        choices=("default", "bf16", "fp8"),
        why="the weights decide the type of the activations",
    )
    disable_flashinfer_cutlass_moe_fp4_allgather: bool = not_built(
        False,
        "Quantize to FP4 after the all-gather, not before it.",
        why="--deepep-dispatch-output-dtype bf16 sends unquantised tokens",
    )
    disable_shared_experts_fusion: bool = flag(
        False,
        "Accepted for compatibility; without --enable-waterfill shared experts are computed "
        "separately from the routed ones.",
    )
    enforce_shared_experts_fusion: bool = not_built(
        False,
        "Compute shared experts as routed ones.",
        why="only --enable-waterfill computes them together",
    )
    enable_waterfill: bool = flag(
        False,
        "Send the shared expert's rows of steps with prompts to the least loaded ranks, as "
        "--ep-dispatch-algorithm lp does for replicas.",
    )


@dataclass(frozen=True)
class BalanceArgs:
    GROUP: ClassVar[str] = "Expert load balancing"
    WHY: ClassVar[str] = "/metrics counts the load of experts"

    enable_eplb: bool = flag(False, "Move and replicate experts while serving.")
    eplb_algorithm: str = flag(
        "auto",
        "How a placement is computed; auto keeps most experts where they are.",
        choices=EPLB_ALGORITHMS,
    )
    eplb_rebalance_num_iterations: int = flag(
        1000, "Forward passes between two rebalances.", at_least=1
    )
    eplb_rebalance_num_requests: int | None = flag(
        None, "Finished requests between two rebalances, instead of passes.", at_least=1
    )
    eplb_rebalance_layers_per_chunk: int | None = flag(
        None,
        "Layers whose placement changes at once; each takes memory to stage its experts. Unset: 1.",
        at_least=1,
    )
    eplb_min_rebalancing_utilization_threshold: float = flag(
        1.0, "Rebalance only while mean/max load is at most this.", at_least=0, at_most=1
    )
    eplb_max_bytes_per_step: int | None = flag(
        None,
        "Bytes of experts that a rank copies in one pass while they move. Unset: 4 MiB on CPU and "
        "between nodes, 64 MiB on CUDA.",
        at_least=1024,
    )
    ep_num_redundant_experts: int = flag(
        0,
        "Extra slots for replicas of experts; more are added where slots would not divide evenly "
        "by --ep-size.",
        at_least=0,
    )
    ep_dispatch_algorithm: str | None = flag(
        None,
        "How a token chooses among the replicas of its expert: the nearest (static), evenly by "
        "row (dynamic; unset: this), or in steps with prompts so as to spare the fullest rank "
        "(lp); fake chooses experts at random, for benchmarks.",
        choices=("static", "dynamic", "fake", "lp"),
    )
    init_expert_location: str = flag(
        "trivial",
        "First placement: trivial, or a file or JSON with physical_to_logical_map, or with "
        "logical_count to plan from.",
    )
    expert_distribution_recorder_mode: str | None = flag(
        None,
        "What /start_expert_distribution_record records: the counts of all ranks (stat; "
        "stat_approx is the same, as all counts are exact), or a file for each rank with the "
        "counts of each pass (per_pass) and the experts of each token (per_token).",
        choices=("stat", "stat_approx", "per_pass", "per_token"),
    )
    expert_distribution_recorder_buffer_size: int | None = flag(
        None,
        "Forward passes that the recorder keeps; -1: as many as 256 MiB of a rank and 4 GiB of all "
        "ranks hold; unset: 1000, or --eplb-rebalance-num-iterations if that is more.",
        at_least=1,
        also=(-1,),
    )
    enable_expert_distribution_metrics: bool = flag(
        False, "Accepted for compatibility; /metrics always has the load of the experts."
    )
    expert_balancedness_report_mode: str = flag(
        "off",
        "Where mean/max of the ranks' rows in recent passes is reported, every 5 seconds: in the "
        "log, in /metrics, or both.",
        choices=("off", "server_log", "prometheus", "both"),
    )


@dataclass(frozen=True)
class OverlapArgs:
    GROUP: ClassVar[str] = "Overlap of communication and computation"

    overlap: str | None = flag(
        None,
        "What is computed while tokens travel: tbo, the other of two micro-batches; sbo, the "
        "shared experts; auto, what costs least, chosen for each step; unset: what the two "
        "switches below say, else off.",
        choices=OVERLAPS,
    )
    enable_two_batch_overlap: bool = flag(False, "The same as --overlap tbo.")
    tbo_token_distribution_threshold: float = flag(
        0.48,
        "Split inside a sequence when splitting between two leaves one half less than this "
        "share of the tokens; 0: never.",
        at_least=0,
        at_most=0.5,
    )
    enable_single_batch_overlap: bool = flag(False, "The same as --overlap sbo.")
    emulate_link: str | None = flag(
        None,
        "Deliver what ranks dispatch and combine as late as a network would, such as "
        "gbps=50,us=5: 50 gigabytes a second (400 Gbit/s) for each rank, and 5 microseconds; on "
        "CPU, and on CUDA for ranks that share a GPU.",
        metavar="gbps=N,us=N",
    )


@dataclass(frozen=True)
class ElasticArgs:
    GROUP: ClassVar[str] = "Elastic expert parallelism"
    WHY: ClassVar[str] = "the number of ranks is fixed"

    elastic_ep_backend: str | None = flag(
        None,
        "Go on without ranks that are lost, and restart them; the name does not choose how.",
        choices=("mooncake", "nixl"),
        unset=("none",),
    )
    restart_limit: int = flag(
        10,
        "With --elastic-ep-backend: how often in a row a rank may be lost within a second of its "
        "return, or before it, until the service ends; so may the HTTP process and the supervisor. "
        "0: no limit.",
        at_least=0,
    )
    elastic_event_command: str | None = flag(
        None,
        "With --elastic-ep-backend: a command to run for each loss and return of a process, with "
        "the event as JSON on its standard input, for up to 10 s.",
        metavar="COMMAND",
    )
    elastic_event_url: str | None = flag(
        None,
        "The same as a POST to this URL.",
        metavar="URL",
    )
    weight_cache_mode: str = flag(
        "off",
        "Where weights of ranks are: daemon keeps them in memory of the supervisor, so that a rank "
        "that is started again, or one that takes over its experts, finds them there and reads "
        "nothing from the checkpoint.",
        choices=("off", "daemon", "client"),
        built=("off", "daemon"),
        why="no process keeps weights when the service has ended",
    )
    mooncake_ib_device: str | None = not_built(
        None, "InfiniBand devices, comma-separated; unset: detected."
    )
    enable_elastic_expert_backup: bool = flag(
        False, "Experts of a lost rank are found in memory: --weight-cache-mode daemon."
    )
    elastic_ep_join_mode: str | None = not_built(
        None,
        "Join a running service: as new ranks, or in place of failed ones.",
        aliases=("--ep-join-mode",),
        choices=("scale", "recover"),
    )
    elastic_ep_join_rank_offset: int = not_built(
        0,
        "First rank number of the joining ranks.",
        aliases=("--ep-join-rank-offset",),
        at_least=0,
    )
    elastic_ep_initial_size: int | None = flag(
        None,
        "With --elastic-ep-backend: ranks at the start, if fewer than --ep-size, to which "
        "/scale_elastic_ep grows the service. --ep-num-redundant-experts are those of this many.",
        at_least=1,
    )
    max_ep_size: int | None = flag(
        None,
        "With --elastic-ep-backend: most ranks to which /scale_elastic_ep may grow the service, "
        "of which --tp-size run at the start.",
        at_least=1,
    )
    elastic_ep_scale_timeout: float = not_built(600.0, "Timeout in seconds for joining.", above=0)
