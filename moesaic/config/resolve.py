"""From what the user asked for to what will run, or a ValueError that says what to change.

Checked in the order of use to the reader: a value out of range, then flags that contradict each
other, then what is not built yet. A contradiction stays wrong in every version, so it comes first.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import entry_points

from moesaic.config.args import ServerArgs
from moesaic.config.flags import check, convert, nearest, refuse_unbuilt, specs

logger = logging.getLogger(__name__)

DTYPE_NAMES = {"half": "float16", "float": "float32"}
# Installed packages that bring MoE backends name them here; moe/backends.py imports them.
BACKEND_ENTRY_POINTS = "moesaic.moe_backends"


def resolve(args: ServerArgs) -> ServerArgs:
    """The same arguments, checked and with what was left open filled in; idempotent."""
    for spec in specs(ServerArgs).values():
        check(spec, convert(spec, getattr(args, spec.field)))
    problem = next(contradictions(args), None)
    if problem is not None:
        raise ValueError(problem)
    refuse_unbuilt(args)
    if args.trust_remote_code:
        logger.info("--trust-remote-code changes nothing: no code from a checkpoint is ever run")
    return _fill_in(args)


def _fill_in(args: ServerArgs) -> ServerArgs:
    tokenizer = None if args.skip_tokenizer_init else args.tokenizer_path or args.model_path
    return replace(
        args,
        tokenizer_path=tokenizer,
        dtype=DTYPE_NAMES.get(args.dtype, args.dtype),
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
    )


def contradictions(args: ServerArgs) -> Iterator[str]:
    """What is wrong with these arguments whatever is built, the first cause first."""
    yield from _model(args)
    yield from _sizes(args)
    yield from _dp_attention(args)
    yield from _moe(args)
    yield from _balance(args)
    yield from _elastic(args)
    yield from _graphs(args)
    yield from _roles(args)


def _model(args: ServerArgs) -> Iterator[str]:
    if not args.model_path:
        yield "--model-path is missing: name a model folder, or tiny:qwen3_moe for a random toy"
    if args.skip_tokenizer_init:
        for name, value in (
            ("--tokenizer-path", args.tokenizer_path),
            ("--chat-template", args.chat_template),
        ):
            if value is not None:
                yield f"{name} {value} needs a tokenizer: leave out --skip-tokenizer-init"


def _sizes(args: ServerArgs) -> Iterator[str]:
    if args.node_rank >= args.nnodes:
        yield (
            f"--node-rank is {args.node_rank} with --nnodes {args.nnodes}: "
            f"nodes are numbered from 0 to {args.nnodes - 1}"
        )
    world = args.tp_size * args.pp_size
    if world % args.nnodes:
        yield (
            f"--tp-size {args.tp_size} × --pp-size {args.pp_size} = {world} ranks cannot be shared "
            f"evenly by --nnodes {args.nnodes}: choose sizes whose product is a multiple of it"
        )
    if args.ep_size > args.tp_size:
        yield (
            f"--ep-size is {args.ep_size} with --tp-size {args.tp_size}: experts are laid over the "
            f"tensor-parallel ranks, so raise --tp-size to {args.ep_size} or lower --ep-size"
        )
    elif args.tp_size % args.ep_size:
        yield (
            f"--ep-size is {args.ep_size}: give a divisor of --tp-size {args.tp_size}, "
            f"such as {largest_divisor(args.tp_size, args.ep_size)} or {args.tp_size}"
        )


def _dp_attention(args: ServerArgs) -> Iterator[str]:
    if args.enable_dp_attention and args.tp_size % args.dp_size:
        yield (
            f"--enable-dp-attention with --tp-size {args.tp_size} and --dp-size {args.dp_size}: "
            f"--dp-size must divide --tp-size, such as "
            f"{largest_divisor(args.tp_size, args.dp_size)}"
        )
    if args.enable_dp_lm_head and not args.enable_dp_attention:
        yield "--enable-dp-lm-head needs --enable-dp-attention"


def _moe(args: ServerArgs) -> Iterator[str]:
    yield from _backend_names(args)
    if args.moe_dense_tp_size not in (None, 1, args.tp_size):
        yield (
            f"--moe-dense-tp-size is {args.moe_dense_tp_size}: "
            f"give 1 or the value of --tp-size ({args.tp_size})"
        )
    if args.tp_size % (args.ep_size * args.moe_dp_size):
        yield (
            f"--moe-dp-size {args.moe_dp_size} × --ep-size {args.ep_size} "
            f"must divide --tp-size {args.tp_size}"
        )
    if args.dwdp_size not in (1, args.tp_size):
        yield f"--dwdp-size is {args.dwdp_size}: give 1 or the value of --tp-size ({args.tp_size})"
    if args.disable_shared_experts_fusion and args.enforce_shared_experts_fusion:
        yield (
            "--disable-shared-experts-fusion and --enforce-shared-experts-fusion exclude each "
            "other: keep one"
        )
    if args.enable_waterfill and expert_ranks(args) == 1:
        yield "--enable-waterfill needs several expert ranks: give --ep-size 2 or more"


def _backend_names(args: ServerArgs) -> Iterator[str]:
    """Names that nobody can bring. Where a module or an installed package may bring one, the
    registry has the last word once they are imported."""
    for field in ("moe_a2a_backend", "moe_runner_backend"):
        spec, name = specs(ServerArgs)[field], getattr(args, field)
        known = [str(choice) for choice in spec.flag.choices]
        if name in known or args.moe_backend_module or entry_points(group=BACKEND_ENTRY_POINTS):
            continue
        yield (
            f"{spec.name} is {name!r}: choose one of {', '.join(known)}, or name the module that "
            f"brings it with --moe-backend-module{nearest(name, known)}"
        )


def _balance(args: ServerArgs) -> Iterator[str]:
    if args.enable_eplb and expert_ranks(args) == 1:
        yield "--enable-eplb has nothing to balance on one rank: give --ep-size 2 or more"
    passes = specs(ServerArgs)["eplb_rebalance_num_iterations"].default
    if args.eplb_rebalance_num_requests and args.eplb_rebalance_num_iterations != passes:
        yield (
            "--eplb-rebalance-num-iterations and --eplb-rebalance-num-requests both give the "
            "rebalancing period: keep one"
        )
    kept = args.expert_distribution_recorder_buffer_size or 0
    if args.enable_eplb and kept > args.eplb_rebalance_num_iterations:
        yield (
            f"--expert-distribution-recorder-buffer-size is {kept}: it would not be full after "
            f"--eplb-rebalance-num-iterations {args.eplb_rebalance_num_iterations}; lower it"
        )


def _elastic(args: ServerArgs) -> Iterator[str]:
    if args.elastic_ep_backend is None:
        for name, value in (
            ("--elastic-ep-join-mode", args.elastic_ep_join_mode),
            ("--elastic-ep-initial-size", args.elastic_ep_initial_size),
            ("--max-ep-size", args.max_ep_size),
        ):
            if value is not None:
                yield f"{name} {value} needs --elastic-ep-backend mooncake"
        return
    if args.pp_size > 1:
        yield f"--elastic-ep-backend works without a pipeline: --pp-size is {args.pp_size}, give 1"
    if args.max_ep_size is not None and args.max_ep_size < args.ep_size:
        yield f"--max-ep-size is {args.max_ep_size}: give at least --ep-size {args.ep_size}"
    if args.elastic_ep_join_mode == "scale" and args.elastic_ep_join_rank_offset == 0:
        yield (
            "--elastic-ep-join-mode scale needs --elastic-ep-join-rank-offset: "
            "the number of ranks that already run"
        )


def _graphs(args: ServerArgs) -> Iterator[str]:
    sizes, most = args.cuda_graph_bs, args.cuda_graph_max_bs
    if args.disable_cuda_graph and (sizes is not None or most is not None):
        name = "--cuda-graph-max-bs" if sizes is None else "--cuda-graph-bs"
        yield f"{name} and --disable-cuda-graph exclude each other: keep one"
    if sizes and most is not None and max(sizes) > most:
        yield f"--cuda-graph-bs has {max(sizes)}, more than --cuda-graph-max-bs {most}: raise that"


def _roles(args: ServerArgs) -> Iterator[str]:
    decode_cache = args.disaggregation_decode_enable_radix_cache
    if decode_cache and args.disaggregation_mode != "decode":
        yield (
            "--disaggregation-decode-enable-radix-cache needs --disaggregation-mode decode, "
            f"not {args.disaggregation_mode}"
        )
    if decode_cache and args.disable_radix_cache:
        yield (
            "--disaggregation-decode-enable-radix-cache and --disable-radix-cache exclude each "
            "other: keep one"
        )
    if args.disaggregation_mode == "prefill" and args.disaggregation_transfer_backend == "fake":
        yield "--disaggregation-transfer-backend fake sends nothing: prefill needs a real one"
    if args.speculative_algorithm is None and args.speculative_num_draft_tokens is not None:
        yield (
            f"--speculative-num-draft-tokens {args.speculative_num_draft_tokens} needs "
            "--speculative-algorithm"
        )


def expert_ranks(args: ServerArgs) -> int:
    """Ranks over which experts are laid: an all-to-all backend without --ep-size means all."""
    if args.ep_size == 1 and args.moe_a2a_backend != "none":
        return args.tp_size
    return args.ep_size


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of number that is at most `most`."""
    return max(d for d in range(1, min(number, most) + 1) if number % d == 0)
