"""Flags of parallelism, expert parallelism, balancing, overlap, elasticity and speculation."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from moesaic.config.flags import ONLY_DEFAULT, Flag

A2A_BACKENDS = ("none", "deepep", "mooncake", "mori", "flashinfer", "ascend_fuseep")
RUNNER_BACKENDS = (
    "auto",
    "triton",
    "triton_kernel",
    "deep_gemm",
    "cutlass",
    "flashinfer_trtllm",
    "flashinfer_cutlass",
    "flashinfer_mxfp4",
    "flashinfer_cutedsl",
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
    "deepseek",
    "deepseek_hierarchical",
    "elasticity_aware",
    "elasticity_aware_hierarchical",
)
TRANSFER_BACKENDS = ("mooncake", "nixl", "ascend", "fake", "mori", "mooncake_tcp")


@dataclass(frozen=True)
class ParallelArgs:
    GROUP: ClassVar[str] = "Parallelism"

    tp_size: Annotated[
        int,
        Flag(
            "Ranks that share a layer (tensor parallel).",
            aliases=("--tp", "--tensor-parallel-size"),
            at_least=1,
        ),
    ] = 1
    ep_size: Annotated[
        int,
        Flag(
            "Ranks over which the experts of a layer are laid.",
            aliases=("--ep", "--expert-parallel-size"),
            at_least=1,
        ),
    ] = 1
    dp_size: Annotated[
        int,
        Flag(
            "Data-parallel groups: of attention with --enable-dp-attention, else full replicas.",
            aliases=("--dp", "--data-parallel-size"),
            at_least=1,
        ),
    ] = 1
    pp_size: Annotated[
        int,
        Flag(
            "Pipeline stages.",
            aliases=("--pp", "--pipeline-parallel-size"),
            at_least=1,
        ),
    ] = 1
    enable_dp_attention: Annotated[
        bool, Flag("Split attention by request over --dp-size groups.")
    ] = False
    enable_dp_lm_head: Annotated[
        bool,
        Flag(
            "Compute logits in each attention group on its own; with --enable-dp-attention on CUDA "
            "it is on."
        ),
    ] = False
    enable_tp_lm_head_all_to_all: Annotated[
        bool | None,
        Flag("Exchange the parts of the logits by an all-to-all.", built=ONLY_DEFAULT),
    ] = None
    enable_dp_attention_local_control_broadcast: Annotated[
        bool,
        Flag("Send control messages within an attention group only.", built=ONLY_DEFAULT),
    ] = False
    load_balance_method: Annotated[
        str,
        Flag(
            "How requests are spread over data-parallel groups: in turn, or to the one with the "
            "fewest requests or tokens; auto: in turn.",
            choices=LOAD_BALANCE_METHODS,
            built=("auto", "round_robin", "total_requests", "total_tokens"),
        ),
    ] = "auto"
    nnodes: Annotated[int, Flag("Number of nodes.", at_least=1)] = 1
    node_rank: Annotated[int, Flag("Number of this node.", at_least=0)] = 0
    dist_init_addr: Annotated[
        str | None,
        Flag(
            "Where the nodes meet: an address of node 0 and a free port there; unset: MASTER_ADDR "
            "and MASTER_PORT of the environment.",
            aliases=("--nccl-init-addr",),
            metavar="HOST:PORT",
        ),
    ] = None
    dist_timeout: Annotated[
        float | None,
        Flag("Seconds that a rank waits for its peers in an operation; unset: 300.", above=0),
    ] = None


@dataclass(frozen=True)
class MoeArgs:
    GROUP: ClassVar[str] = "Mixture of experts"

    moe_a2a_backend: Annotated[
        str,
        Flag("How tokens travel to their experts.", choices=A2A_BACKENDS, open=True),
    ] = "none"
    moe_runner_backend: Annotated[
        str, Flag("How experts compute.", choices=RUNNER_BACKENDS, open=True)
    ] = "auto"
    moe_backend_module: Annotated[
        str | None,
        Flag("Python module that registers other backends for the two flags above.", metavar="M"),
    ] = None
    deepep_mode: Annotated[
        str,
        Flag(
            "normal for prefill, low_latency for decode, auto: the one that fits each step.",
            choices=("auto", "normal", "low_latency"),
        ),
    ] = "auto"
    deepep_config: Annotated[
        str | None,
        Flag("JSON, or a file with it: SMs that normal mode's kernels take at most, on CUDA."),
    ] = None
    deepep_dispatch_output_dtype: Annotated[
        str,
        Flag(
            "What is sent to the experts; auto: what the runner and the weights consume.",
            aliases=("--deepep-dispatcher-output-dtype",),
            choices=("auto", "bf16", "fp8", "int8", "nvfp4", "mxfp4"),
        ),
    ] = "auto"
    fuseep_mode: Annotated[
        int, Flag("Variant of the fused all-to-all.", choices=(1, 2), built=ONLY_DEFAULT)
    ] = 2
    moe_dense_tp_size: Annotated[
        int | None,
        Flag(
            "Tensor-parallel size of dense layers: 1 or --tp-size; unset: that, but 1 with "
            "--enable-dp-attention on CUDA.",
            at_least=1,
        ),
    ] = None
    moe_dp_size: Annotated[
        int,
        Flag(
            "Data-parallel groups of the MoE layers.",
            aliases=("--moe-data-parallel-size",),
            at_least=1,
            built=ONLY_DEFAULT,
        ),
    ] = 1
    dwdp_size: Annotated[
        int,
        Flag(
            "Ranks over which weights are spread while every rank computes its own tokens.",
            at_least=1,
            built=ONLY_DEFAULT,
        ),
    ] = 1
    flashinfer_mxfp4_moe_precision: Annotated[
        str,
        Flag(
            "Activations of the flashinfer_mxfp4 runner.",
            choices=("default", "bf16"),
            built=ONLY_DEFAULT,
        ),
    ] = "default"
    disable_flashinfer_cutlass_moe_fp4_allgather: Annotated[
        bool, Flag("Quantize to FP4 after the all-gather, not before it.", built=ONLY_DEFAULT)
    ] = False
    disable_shared_experts_fusion: Annotated[
        bool,
        Flag("Compute shared experts apart from the routed ones.", built=ONLY_DEFAULT),
    ] = False
    enforce_shared_experts_fusion: Annotated[
        bool, Flag("Compute shared experts as routed ones.", built=ONLY_DEFAULT)
    ] = False
    enable_waterfill: Annotated[
        bool,
        Flag("Send the shared expert's rows to the ranks with least to do.", built=ONLY_DEFAULT),
    ] = False


@dataclass(frozen=True)
class BalanceArgs:
    GROUP: ClassVar[str] = "Expert load balancing"

    enable_eplb: Annotated[
        bool, Flag("Move and replicate experts while serving.", built=ONLY_DEFAULT)
    ] = False
    eplb_algorithm: Annotated[
        str,
        Flag("How a placement is computed.", choices=EPLB_ALGORITHMS, built=ONLY_DEFAULT),
    ] = "auto"
    eplb_rebalance_num_iterations: Annotated[
        int, Flag("Forward passes between two rebalances.", at_least=1, built=ONLY_DEFAULT)
    ] = 1000
    eplb_rebalance_num_requests: Annotated[
        int | None,
        Flag("Finished requests between two rebalances.", at_least=1, built=ONLY_DEFAULT),
    ] = None
    eplb_rebalance_layers_per_chunk: Annotated[
        int | None,
        Flag("Layers moved in one pass; unset: all.", at_least=1, built=ONLY_DEFAULT),
    ] = None
    eplb_min_rebalancing_utilization_threshold: Annotated[
        float,
        Flag(
            "Rebalance only while mean/max load is below this.",
            at_least=0,
            at_most=1,
            built=ONLY_DEFAULT,
        ),
    ] = 1.0
    ep_num_redundant_experts: Annotated[
        int, Flag("Extra slots for replicas of experts.", at_least=0)
    ] = 0
    ep_dispatch_algorithm: Annotated[
        str | None,
        Flag(
            "How a token chooses among replicas.",
            choices=("static", "dynamic", "fake", "lp"),
            built=ONLY_DEFAULT,
        ),
    ] = None
    init_expert_location: Annotated[
        str,
        Flag(
            "First placement: trivial, or JSON or a recorder's dump to plan from.",
            built=ONLY_DEFAULT,
        ),
    ] = "trivial"
    expert_distribution_recorder_mode: Annotated[
        str | None,
        Flag(
            "What is recorded of the routing.",
            choices=("stat", "stat_approx", "per_pass", "per_token"),
            built=ONLY_DEFAULT,
        ),
    ] = None
    expert_distribution_recorder_buffer_size: Annotated[
        int | None,
        Flag(
            "Passes kept; -1: all; unset: the rebalancing period.",
            at_least=1,
            also=(-1,),
            built=ONLY_DEFAULT,
        ),
    ] = None
    enable_expert_distribution_metrics: Annotated[
        bool, Flag("Export expert load as metrics.", built=ONLY_DEFAULT)
    ] = False
    expert_balancedness_report_mode: Annotated[
        str,
        Flag(
            "Where mean/max load of the ranks is reported.",
            choices=("off", "server_log", "prometheus", "both"),
            built=ONLY_DEFAULT,
        ),
    ] = "off"


@dataclass(frozen=True)
class OverlapArgs:
    GROUP: ClassVar[str] = "Overlap of communication and computation"

    enable_two_batch_overlap: Annotated[
        bool, Flag("Compute one micro-batch while the other travels.", built=ONLY_DEFAULT)
    ] = False
    tbo_token_distribution_threshold: Annotated[
        float,
        Flag(
            "Split inside a sequence when splitting between two leaves one half less than this "
            "share of the tokens; 0: never.",
            at_least=0,
            at_most=0.5,
            built=ONLY_DEFAULT,
        ),
    ] = 0.48
    enable_single_batch_overlap: Annotated[
        bool, Flag("Compute shared experts while tokens travel.", built=ONLY_DEFAULT)
    ] = False


@dataclass(frozen=True)
class ElasticArgs:
    GROUP: ClassVar[str] = "Elastic expert parallelism"

    elastic_ep_backend: Annotated[
        str | None,
        Flag("Go on when ranks die or join.", choices=("mooncake", "nixl"), built=ONLY_DEFAULT),
    ] = None
    mooncake_ib_device: Annotated[
        str | None, Flag("InfiniBand devices, comma-separated; unset: found.", built=ONLY_DEFAULT)
    ] = None
    enable_elastic_expert_backup: Annotated[
        bool, Flag("Keep a copy of the experts in host memory.", built=ONLY_DEFAULT)
    ] = False
    elastic_ep_join_mode: Annotated[
        str | None,
        Flag(
            "Join a running service: as new ranks, or in place of dead ones.",
            choices=("scale", "recover"),
            built=ONLY_DEFAULT,
        ),
    ] = None
    elastic_ep_join_rank_offset: Annotated[
        int, Flag("First rank number of the joining ranks.", at_least=0, built=ONLY_DEFAULT)
    ] = 0
    elastic_ep_initial_size: Annotated[
        int | None, Flag("Ranks at the start of the service.", at_least=1, built=ONLY_DEFAULT)
    ] = None
    max_ep_size: Annotated[
        int | None,
        Flag("Most ranks to which the service may grow.", at_least=1, built=ONLY_DEFAULT),
    ] = None
    elastic_ep_scale_timeout: Annotated[
        float, Flag("Seconds that joining may take.", above=0, built=ONLY_DEFAULT)
    ] = 600.0
