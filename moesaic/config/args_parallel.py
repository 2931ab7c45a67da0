"""Flags of parallelism, expert parallelism, load balancing, overlap and elasticity."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from moesaic.config.flags import Flag, not_built

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
            "Ranks that share the experts of a layer (expert parallel).",
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
        int, Flag("Pipeline stages.", aliases=("--pp", "--pipeline-parallel-size"), at_least=1)
    ] = 1
    enable_dp_attention: Annotated[
        bool, Flag("Split attention by request over --dp-size groups.")
    ] = False
    enable_dp_lm_head: Annotated[
        bool,
        Flag(
            "Compute logits within each attention group; always on with --enable-dp-attention "
            "on CUDA."
        ),
    ] = False
    enable_tp_lm_head_all_to_all: Annotated[
        bool | None, not_built("Exchange the shards of the logits by an all-to-all.")
    ] = None
    enable_dp_attention_local_control_broadcast: Annotated[
        bool, not_built("Send control messages within an attention group only.")
    ] = False
    load_balance_method: Annotated[
        str,
        Flag(
            "How requests are assigned to data-parallel groups: in turn, or to the one with the "
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
            "Rendezvous address: an address of node 0 and a free port there; unset: MASTER_ADDR "
            "and MASTER_PORT.",
            aliases=("--nccl-init-addr",),
            metavar="HOST:PORT",
        ),
    ] = None
    dist_timeout: Annotated[
        float | None,
        Flag("Seconds that a rank waits for its peers in one operation; unset: 300.", above=0),
    ] = None


@dataclass(frozen=True)
class MoeArgs:
    GROUP: ClassVar[str] = "Mixture of experts"

    moe_a2a_backend: Annotated[
        str, Flag("How tokens are sent to their experts.", choices=A2A_BACKENDS, open=True)
    ] = "none"
    moe_runner_backend: Annotated[
        str, Flag("How experts compute.", choices=RUNNER_BACKENDS, open=True)
    ] = "auto"
    moe_backend_module: Annotated[
        str | None,
        Flag("Python module that registers more backends for the two flags above.", metavar="M"),
    ] = None
    deepep_mode: Annotated[
        str,
        Flag(
            "normal for prefill, low_latency for decode; auto: chosen for each step.",
            choices=("auto", "normal", "low_latency"),
        ),
    ] = "auto"
    deepep_config: Annotated[
        str | None, Flag("JSON, or a JSON file: most SMs that normal mode's kernels use on CUDA.")
    ] = None
    deepep_dispatch_output_dtype: Annotated[
        str,
        Flag(
            "Type sent to the experts; auto: what the runner and the weights consume.",
            aliases=("--deepep-dispatcher-output-dtype",),
            choices=("auto", "bf16", "fp8", "int8", "nvfp4", "mxfp4"),
        ),
    ] = "auto"
    fuseep_mode: Annotated[int, not_built("Variant of the fused all-to-all.", choices=(1, 2))] = 2
    moe_dense_tp_size: Annotated[
        int | None,
        Flag(
            "Tensor-parallel size of dense layers: 1 or --tp-size; unset: --tp-size, but 1 with "
            "--enable-dp-attention on CUDA.",
            at_least=1,
        ),
    ] = None
    moe_dp_size: Annotated[
        int,
        not_built(
            "Data-parallel groups of the MoE layers.",
            aliases=("--moe-data-parallel-size",),
            at_least=1,
        ),
    ] = 1
    dwdp_size: Annotated[
        int,
        not_built(
            "Ranks that share the weights while every rank computes its own tokens.", at_least=1
        ),
    ] = 1
    flashinfer_mxfp4_moe_precision: Annotated[
        str, not_built("Activations of the flashinfer_mxfp4 runner.", choices=("default", "bf16"))
    ] = "default"
    disable_flashinfer_cutlass_moe_fp4_allgather: Annotated[
        bool, not_built("Quantize to FP4 after the all-gather, not before it.")
    ] = False
    disable_shared_experts_fusion: Annotated[
        bool, not_built("Compute shared experts separately from the routed ones.")
    ] = False
    enforce_shared_experts_fusion: Annotated[
        bool, not_built("Compute shared experts as routed ones.")
    ] = False
    enable_waterfill: Annotated[
        bool, not_built("Send the shared expert's rows to the least loaded ranks.")
    ] = False


@dataclass(frozen=True)
class BalanceArgs:
    GROUP: ClassVar[str] = "Expert load balancing"

    enable_eplb: Annotated[bool, not_built("Move and replicate experts while serving.")] = False
    eplb_algorithm: Annotated[
        str, not_built("How a placement is computed.", choices=EPLB_ALGORITHMS)
    ] = "auto"
    eplb_rebalance_num_iterations: Annotated[
        int, not_built("Forward passes between two rebalances.", at_least=1)
    ] = 1000
    eplb_rebalance_num_requests: Annotated[
        int | None, not_built("Finished requests between two rebalances.", at_least=1)
    ] = None
    eplb_rebalance_layers_per_chunk: Annotated[
        int | None, not_built("Layers moved in one pass; unset: all.", at_least=1)
    ] = None
    eplb_min_rebalancing_utilization_threshold: Annotated[
        float, not_built("Rebalance only while mean/max load is below this.", at_least=0, at_most=1)
    ] = 1.0
    ep_num_redundant_experts: Annotated[
        int, Flag("Extra slots for replicas of experts.", at_least=0)
    ] = 0
    ep_dispatch_algorithm: Annotated[
        str | None,
        not_built(
            "How a token chooses among replicas.", choices=("static", "dynamic", "fake", "lp")
        ),
    ] = None
    init_expert_location: Annotated[
        str, not_built("First placement: trivial, or JSON or a recorder's dump to plan from.")
    ] = "trivial"
    expert_distribution_recorder_mode: Annotated[
        str | None,
        not_built(
            "What is recorded about the routing.",
            choices=("stat", "stat_approx", "per_pass", "per_token"),
        ),
    ] = None
    expert_distribution_recorder_buffer_size: Annotated[
        int | None,
        not_built("Passes kept; -1: all; unset: the rebalancing period.", at_least=1, also=(-1,)),
    ] = None
    enable_expert_distribution_metrics: Annotated[
        bool, not_built("Export expert load as metrics.")
    ] = False
    expert_balancedness_report_mode: Annotated[
        str,
        not_built(
            "Where the mean/max load of the ranks is reported.",
            choices=("off", "server_log", "prometheus", "both"),
        ),
    ] = "off"


@dataclass(frozen=True)
class OverlapArgs:
    GROUP: ClassVar[str] = "Overlap of communication and computation"

    enable_two_batch_overlap: Annotated[
        bool, not_built("Compute one micro-batch while the other communicates.")
    ] = False
    tbo_token_distribution_threshold: Annotated[
        float,
        not_built(
            "Split inside a sequence when splitting between two leaves one half less than this "
            "share of the tokens; 0: never.",
            at_least=0,
            at_most=0.5,
        ),
    ] = 0.48
    enable_single_batch_overlap: Annotated[
        bool, not_built("Compute shared experts while tokens are sent.")
    ] = False


@dataclass(frozen=True)
class ElasticArgs:
    GROUP: ClassVar[str] = "Elastic expert parallelism"

    elastic_ep_backend: Annotated[
        str | None, not_built("Continue when ranks fail or join.", choices=("mooncake", "nixl"))
    ] = None
    mooncake_ib_device: Annotated[
        str | None, not_built("InfiniBand devices, comma-separated; unset: detected.")
    ] = None
    enable_elastic_expert_backup: Annotated[
        bool, not_built("Keep a copy of the experts in host memory.")
    ] = False
    elastic_ep_join_mode: Annotated[
        str | None,
        not_built(
            "Join a running service: as new ranks, or in place of failed ones.",
            choices=("scale", "recover"),
        ),
    ] = None
    elastic_ep_join_rank_offset: Annotated[
        int, not_built("First rank number of the joining ranks.", at_least=0)
    ] = 0
    elastic_ep_initial_size: Annotated[
        int | None, not_built("Ranks at the start of the service.", at_least=1)
    ] = None
    max_ep_size: Annotated[
        int | None, not_built("Most ranks to which the service may grow.", at_least=1)
    ] = None
    elastic_ep_scale_timeout: Annotated[
        float, not_built("Timeout in seconds for joining.", above=0)
    ] = 600.0
