"""What contradicts itself in the flags of balancing."""

from __future__ import annotations

from collections.abc import Iterator

from moesaic.config.args import ServerArgs
from moesaic.config.devices import expert_ranks
from moesaic.config.flags import given, specs


def balance_contradictions(args: ServerArgs) -> Iterator[str]:
    yield from _balance(args)
    yield from _replicas(args)
    yield from _waterfill(args)


def _balance(args: ServerArgs) -> Iterator[str]:
    if args.dummy_router_zipf is not None and args.load_format != "dummy":
        yield "--dummy-router-zipf changes routers: give it with --load-format dummy only"
    if args.enable_eplb and expert_ranks(args) == 1:
        yield "--enable-eplb has nothing to balance with --ep-size 1: give 2 or more"
    whole = args.enable_deterministic_inference and expert_ranks(args) != args.tp_size
    if whole and (args.enable_eplb or args.init_expert_location != "trivial"):
        yield (
            "--enable-deterministic-inference does not shard experts, and with --ep-size below "
            f"--tp-size {args.tp_size} copies of them have fixed places: leave out --enable-eplb "
            f"and --init-expert-location, or give --ep-size {args.tp_size}"
        )
    passes = specs(ServerArgs)["eplb_rebalance_num_iterations"].default
    if args.eplb_rebalance_num_requests and args.eplb_rebalance_num_iterations != passes:
        yield (
            "--eplb-rebalance-num-iterations and --eplb-rebalance-num-requests both give the "
            "rebalancing period: keep one"
        )
    if not (args.enable_eplb or args.expert_distribution_recorder_mode):
        for typed in given(args, "expert_distribution_recorder_buffer_size"):
            yield f"{typed} needs --expert-distribution-recorder-mode stat, per_pass or per_token"


def _replicas(args: ServerArgs) -> Iterator[str]:
    algorithm = args.ep_dispatch_algorithm
    if algorithm not in ("static", "lp"):
        return
    if expert_ranks(args) == 1:
        yield (
            f"--ep-dispatch-algorithm {algorithm} needs --ep-size 2 or more: it chooses between "
            "ranks, and one has all experts; leave it out"
        )
    groups = args.dp_size if args.enable_dp_attention else 1
    if algorithm == "static" and args.moe_a2a_backend == "none" and groups == 1:
        yield (
            "--ep-dispatch-algorithm static needs --moe-a2a-backend deepep or another one: with "
            "none and one attention group all ranks have all tokens, and no replica is nearer to "
            "them than others; give dynamic"
        )


def _waterfill(args: ServerArgs) -> Iterator[str]:
    if not args.enable_waterfill:
        return
    if args.disable_shared_experts_fusion:
        yield (
            "--enable-waterfill computes shared experts as routed ones: leave "
            "--disable-shared-experts-fusion out"
        )
    if expert_ranks(args) == 1:
        yield "--enable-waterfill needs several expert ranks: give --ep-size 2 or more"
    if args.ep_dispatch_algorithm not in (None, "lp"):
        yield (
            f"--enable-waterfill with --ep-dispatch-algorithm {args.ep_dispatch_algorithm}: the "
            "shared expert's rows are split as by lp; leave --ep-dispatch-algorithm out, or give lp"
        )
