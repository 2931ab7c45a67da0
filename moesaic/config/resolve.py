"""Turns the given flags into those that run, or raises a ValueError that says what to change.

A value out of range is reported first, then all that is not built yet, then flags that contradict
each other: advice about a flag is for one that works.
"""

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import Any

from moesaic.config.args import ServerArgs
from moesaic.config.balance_rules import balance_contradictions
from moesaic.config.deepep import read_deepep_config
from moesaic.config.devices import (
    DEVICE_VARIABLE,
    cuda_missing,
    device_of,
    device_reason,
    expert_ranks,
    gpus_of,
    unsupported_on_cuda,
)
from moesaic.config.flags import check, convert, given, nearest, refuse_unbuilt, show, specs
from moesaic.config.gpus import crowding_warning
from moesaic.config.growth import grown, growth_problems
from moesaic.config.idle_balancing import idle_balancing
from moesaic.config.overlap import (
    asks_for_overlap,
    link_contradictions,
    overlap_contradictions,
    resolved_overlap,
)
from moesaic.config.roles import elastic_problems, role_problems
from moesaic.config.speculation import speculation_defaults
from moesaic.core.addresses import host_and_port, is_address

logger = logging.getLogger(__name__)

# Of graphs of decode steps and of steps with prompts: the switch, the sizes, the largest.
GRAPH_FLAGS = (
    ("disable_cuda_graph", "cuda_graph_bs", "cuda_graph_max_bs"),
    ("disable_prefill_cuda_graph", "cuda_graph_bs_prefill", "cuda_graph_max_bs_prefill"),
)

DTYPE_NAMES = {"half": "float16", "float": "float32"}
KV_TYPE_NAMES = {"bf16": "bfloat16"}
# Installed packages name their MoE backends here; moe/backends.py imports them.
BACKEND_ENTRY_POINTS = "moesaic.moe_backends"
DIST_TIMEOUT = 300.0
ATTENTION = {"cpu": "torch_native", "cuda": "triton"}
SAMPLING = {"cpu": "pytorch", "cuda": "triton"}
# Prompt tokens of a step: enough rows to keep the matrix units of the device busy.
CHUNKS = {"cpu": 2048, "cuda": 8192}
SHAPE_PREFIX = "shape:"
# The live ranks of a node are bits of one signed word of its control page.
MAX_RANKS_PER_NODE = 62


@dataclass(frozen=True)
class FlagChange:
    """The value that `resolve` gives a field, and why."""

    field: str
    value: Any
    reason: str


def resolve(args: ServerArgs) -> ServerArgs:
    """Check the arguments and fill in the unset ones; idempotent."""
    for spec in specs(ServerArgs).values():
        check(spec, convert(spec, getattr(args, spec.field)))
    refuse_unbuilt(args)
    args = _grown(args)
    problem = next(contradictions(args), None)
    if problem is not None:
        raise ValueError(problem)
    if args.trust_remote_code:
        logger.info("--trust-remote-code changes nothing: code from a checkpoint is never run")
    for change in _logged(args):
        logger.info("%s: %s", _shown(change), change.reason)
    if args.ep_dispatch_algorithm == "fake":
        logger.warning(
            "--ep-dispatch-algorithm fake: ALL ANSWERS ARE WRONG, tokens go to random experts; "
            "this is for benchmarks only"
        )
    if idle := idle_balancing(args):
        logger.warning("%s", idle)
    for note in _idle_values(args):
        logger.info("%s", note)
    if device_of(args) == "cuda" and (crowd := crowding_warning(gpus_of(args))):
        logger.warning("%s", crowd)
    return replace(args, **{change.field: change.value for change in flag_changes(args)})


def _grown(args: ServerArgs) -> ServerArgs:
    found = grown(args)
    if found is not args:
        logger.info(
            "--max-ep-size %d: laid out for --tp-size %d --ep-size %d --dp-size %d; ranks at the "
            "start: %d",
            found.tp_size,
            found.tp_size,
            found.ep_size,
            found.dp_size,
            args.tp_size,
        )
    return found


def problems(args: ServerArgs) -> Iterator[str]:
    """All reasons for which `resolve` would refuse these arguments."""
    try:
        refuse_unbuilt(args)
    except ValueError as error:
        yield str(error)
    yield from contradictions(args)


def flag_changes(args: ServerArgs) -> list[FlagChange]:
    """The changes that `resolve` makes to arguments that it accepts."""
    changes = [*_logged(args), *_defaults(args)]
    return [change for change in changes if getattr(args, change.field) != change.value]


def _idle_values(args: ServerArgs) -> Iterator[str]:
    """What to log about values that only choose how SGLang computes."""
    changed = {change.field for change in flag_changes(args)}
    for spec in specs(ServerArgs).values():
        if spec.field in changed and getattr(args, spec.field) in spec.flag.idle:
            yield f"{show(spec, getattr(args, spec.field))} needs nothing here: {spec.flag.why}"


def _shown(change: FlagChange) -> str:
    return f"{specs(ServerArgs)[change.field].name} is {change.value}"


def _logged(args: ServerArgs) -> Iterator[FlagChange]:
    """Changes that may surprise, so they are logged."""
    for spec in specs(ServerArgs).values():
        if (meant := spec.means(getattr(args, spec.field))) is not None:
            why = f"it does what {getattr(args, spec.field)} asks for"
            yield FlagChange(spec.field, meant, why)
    if expert_ranks(args) != args.ep_size:
        why = f"with --moe-a2a-backend {args.moe_a2a_backend} all tp ranks share the experts"
        yield FlagChange("ep_size", expert_ranks(args), f"{why} unless --ep-size is more than 1")
    if args.enable_dp_attention and args.dp_size == 1:
        why = "with --dp-size 1 there is one attention group"
        yield FlagChange("enable_dp_attention", False, why)
        if args.enable_dp_lm_head:
            yield FlagChange("enable_dp_lm_head", False, why)
    if args.device == "auto" and DEVICE_VARIABLE not in os.environ:
        yield FlagChange("device", device_of(args), device_reason(args))
    if device_of(args) == "cuda" and args.enable_dp_attention and args.dp_size > 1:
        if args.moe_dense_tp_size is None:
            why = "the default with --enable-dp-attention on CUDA"
            yield FlagChange("moe_dense_tp_size", 1, why)
        why = "on CUDA each attention group computes its own logits"
        yield FlagChange("enable_dp_lm_head", True, why)
    if device_of(args) == "cpu":
        for field in (name for names in GRAPH_FLAGS for name in names[1:]):
            if getattr(args, field) is not None:
                yield FlagChange(field, None, "there are no CUDA graphs on cpu")
    if args.model_path.startswith(SHAPE_PREFIX) and args.tokenizer_path is None:
        yield FlagChange(
            "skip_tokenizer_init", True, "a shape has no tokenizer: requests are token ids"
        )
    if args.enable_elastic_expert_backup:
        yield FlagChange("weight_cache_mode", "daemon", "--enable-elastic-expert-backup")
    overlap, why = resolved_overlap(args)
    if asks_for_overlap(args) and overlap != args.overlap:
        yield FlagChange("overlap", overlap, why)
    if _may_lose_groups(args):
        why = "with --elastic-ep-backend each attention group computes without the others"
        if args.moe_dense_tp_size is None:
            yield FlagChange("moe_dense_tp_size", 1, why)
        yield FlagChange("enable_dp_lm_head", True, why)
    if args.nnodes > 1 and args.dist_init_addr is None:
        yield FlagChange("dist_init_addr", master_address(), "MASTER_ADDR and MASTER_PORT say so")


def _may_lose_groups(args: ServerArgs) -> bool:
    groups = args.enable_dp_attention and args.dp_size > 1
    return args.elastic_ep_backend is not None and groups


def _defaults(args: ServerArgs) -> Iterator[FlagChange]:
    device, bare = device_of(args), args.model_path.startswith(SHAPE_PREFIX)
    if args.skip_tokenizer_init:
        yield FlagChange("tokenizer_path", None, "--skip-tokenizer-init")
    elif args.tokenizer_path is not None or not bare:
        tokenizer = args.tokenizer_path or args.model_path
        yield FlagChange("tokenizer_path", tokenizer, "the model's folder")
    yield FlagChange("dtype", DTYPE_NAMES.get(args.dtype, args.dtype), "its other name")
    kv_type = KV_TYPE_NAMES.get(args.kv_cache_dtype, args.kv_cache_dtype)
    yield FlagChange("kv_cache_dtype", kv_type, "its other name")
    if DEVICE_VARIABLE in os.environ:  # else it is logged
        yield FlagChange("device", device, device_reason(args))
    yield FlagChange("attention_backend", ATTENTION[device], f"the only one on {device}")
    if args.speculative_draft_attention_backend is not None:
        field = "speculative_draft_attention_backend"
        yield FlagChange(field, ATTENTION[device], f"the only one on {device}")
    yield FlagChange("sampling_backend", SAMPLING[device], f"the only one on {device}")
    if args.schedule_policy in specs(ServerArgs)["schedule_policy"].flag.idle:
        yield FlagChange("schedule_policy", "fcfs", "the only order")
    if args.trust_remote_code:
        yield FlagChange("trust_remote_code", False, "code from a checkpoint is never run")
    chunk, why = args.chunked_prefill_size or CHUNKS[device], f"the default on {device}"
    if args.max_prefill_tokens is not None and not 0 < chunk <= args.max_prefill_tokens:
        chunk, why = args.max_prefill_tokens, "--max-prefill-tokens"
    yield FlagChange("chunked_prefill_size", chunk, why)
    if device == "cpu" and args.max_step_ms is None:
        yield FlagChange("max_step_ms", 0.0, "the default on cpu")
    if not asks_for_overlap(args):  # else it is logged
        yield FlagChange("overlap", *resolved_overlap(args))
    if args.dist_timeout is None:
        yield FlagChange("dist_timeout", DIST_TIMEOUT, "the default")
    for change in speculation_defaults(args):
        yield FlagChange(*change)


def contradictions(args: ServerArgs) -> Iterator[str]:
    """What is wrong with these arguments in every version, the first cause first."""
    yield from _model(args)
    yield from _device(args)
    yield from _sizes(args)
    yield from _nodes(args)
    yield from _dp_attention(args)
    yield from _moe(args)
    yield from overlap_contradictions(args)
    yield from balance_contradictions(args)
    yield from link_contradictions(args)
    yield from elastic_problems(args)
    yield from growth_problems(args)
    yield from _graphs(args)
    yield from role_problems(args)
    yield from _https(args)
    if args.enable_mixed_chunk and args.disable_mixed_chunk:
        yield "--enable-mixed-chunk and --disable-mixed-chunk contradict each other: give one"
    if args.gc_threshold is not None and len(args.gc_threshold) not in (1, 2, 3):
        yield f"--gc-threshold has {len(args.gc_threshold)} numbers: give one, two or three"


def _model(args: ServerArgs) -> Iterator[str]:
    if not args.model_path and args.served_model_aliases:
        name, *_, last = (args.served_model_name or "", *args.served_model_aliases)
        yield (
            f"--model-path is missing: --served-model-name takes all words that follow it as names "
            f"of the model, so {last!r} is one. Put the model first (moesaic serve {last} "
            f"--served-model-name {name} …), or give --model-path {last}"
        )
    elif not args.model_path:
        yield "--model-path is missing: name a model folder, or tiny:qwen3_moe for a random toy"
    bare = args.model_path.startswith(SHAPE_PREFIX) and args.tokenizer_path is None
    if bare and args.chat_template is not None:
        yield (
            f"--chat-template {args.chat_template} needs a tokenizer, and {args.model_path} has "
            "none: give --tokenizer-path DIR"
        )
    elif args.skip_tokenizer_init:
        for typed in given(args, "tokenizer_path", "chat_template"):
            yield f"{typed} needs a tokenizer: leave out --skip-tokenizer-init"
    if args.model_path.startswith(SHAPE_PREFIX) and args.load_format != "dummy":
        yield f"--model-path {args.model_path} has no weights: give --load-format dummy"


def _device(args: ServerArgs) -> Iterator[str]:
    if not specs(ServerArgs)["device"].accepts(args.device):  # `refuse_unbuilt` reports it
        return
    device, typed = (
        device_of(args),
        specs(ServerArgs)["kv_cache_dtype"].accepts(args.kv_cache_dtype),
    )
    source = "--device cuda" if args.device == "cuda" else f"{DEVICE_VARIABLE}=cuda"
    if device == "cpu" and typed and args.kv_cache_dtype != "auto":
        yield f"--kv-cache-dtype {args.kv_cache_dtype} needs --device cuda: leave it out on cpu"
    elif device == "cuda" and (missing := cuda_missing()):
        yield f"{source} cannot work here: {missing}; give --device cpu"
    elif device == "cuda" and (beyond := unsupported_on_cuda(args)):
        yield f"{source} cannot do this: {beyond}; leave it out or give --device cpu"


def _sizes(args: ServerArgs) -> Iterator[str]:
    if args.ep_size > args.tp_size:
        yield (
            f"--ep-size is {args.ep_size} with --tp-size {args.tp_size}: experts are shared by "
            f"the tensor-parallel ranks, so raise --tp-size to {args.ep_size} or lower --ep-size"
        )
    elif args.tp_size % args.ep_size:
        yield (
            f"--ep-size is {args.ep_size}: give a divisor of --tp-size {args.tp_size}, "
            f"such as {largest_divisor(args.tp_size, args.ep_size)} or {args.tp_size}"
        )


def _nodes(args: ServerArgs) -> Iterator[str]:
    world = args.tp_size * args.pp_size
    replicas = 1 if args.enable_dp_attention else args.dp_size
    if args.node_rank >= args.nnodes:
        yield (
            f"--node-rank is {args.node_rank} with --nnodes {args.nnodes}: "
            f"nodes are numbered from 0 to {args.nnodes - 1}"
        )
    if args.nnodes > 1 and replicas > 1:
        yield (
            f"--dp-size {replicas} means {replicas} replicas of the model, which cannot span "
            f"--nnodes {args.nnodes}: give --enable-dp-attention, or start a server on each node"
        )
    elif world % args.nnodes:
        yield (
            f"--tp-size {args.tp_size} × --pp-size {args.pp_size} = {world} "
            f"rank{'s' * (world > 1)} cannot be "
            f"divided evenly by --nnodes {args.nnodes}: choose sizes whose product is a multiple "
            f"of it, or --nnodes {largest_divisor(world, args.nnodes)}"
        )
    elif world * replicas > MAX_RANKS_PER_NODE * args.nnodes:
        yield (
            f"{world * replicas} ranks on --nnodes {args.nnodes}: a node holds at most "
            f"{MAX_RANKS_PER_NODE}, so give more nodes or smaller sizes"
        )
    yield from _rendezvous(args)


def _rendezvous(args: ServerArgs) -> Iterator[str]:
    source, address = "--dist-init-addr", args.dist_init_addr
    if args.nnodes > 1 and address is None:
        source, address = "MASTER_ADDR:MASTER_PORT", master_address()
        if address is None:
            yield (
                f"--nnodes {args.nnodes} without a rendezvous address: give all nodes "
                "--dist-init-addr NODE0:PORT, an address of node 0 and a free port there "
                "(or MASTER_ADDR and MASTER_PORT in the environment)"
            )
    heads = [] if address is None else address.split(",")
    if len(heads) > 1 and (len(heads) > args.nnodes or args.elastic_ep_backend is None):
        yield (
            f"{source} names {len(heads)} nodes that may lead: that takes as many --nnodes, and "
            "--elastic-ep-backend"
        )
    if not all(map(is_address, heads)):
        yield (
            f"{source} is {address!r}: give HOST:PORT with a port from 1 to 65535, such as "
            "10.0.0.1:29500 or [fd00::1]:29500"
        )


def master_address() -> str | None:
    """The address of node 0 from the environment, as torchrun sets it."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not port:
        return None
    return host_and_port(host, port)


def _dp_attention(args: ServerArgs) -> Iterator[str]:
    if args.attn_dp_size not in (1, args.dp_size):
        yield (
            f"--attn-dp-size {args.attn_dp_size} with --dp-size {args.dp_size}: replicas that have "
            "attention groups each are not supported, so leave one of the two out"
        )
    if args.enable_dp_attention and args.tp_size % args.dp_size:
        yield (
            f"--enable-dp-attention with --tp-size {args.tp_size} and --dp-size {args.dp_size}: "
            f"--dp-size must divide --tp-size, such as "
            f"{largest_divisor(args.tp_size, args.dp_size)}"
        )
    if args.enable_dp_lm_head and not args.enable_dp_attention:
        yield (
            "--enable-dp-lm-head needs --enable-dp-attention: without it there is one attention "
            "group, so leave it out or give both"
        )


def _moe(args: ServerArgs) -> Iterator[str]:
    yield from _backend_names(args)
    yield from _deepep_config(args)
    if args.moe_dense_tp_size not in (None, 1, args.tp_size):
        yield (
            f"--moe-dense-tp-size is {args.moe_dense_tp_size}: "
            f"give 1 or the value of --tp-size ({args.tp_size})"
        )
    if args.moe_dp_size > 1 and args.tp_size % (args.ep_size * args.moe_dp_size):
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


def _deepep_config(args: ServerArgs) -> Iterator[str]:
    if args.deepep_config is None:
        return
    if args.moe_a2a_backend != "deepep" or args.deepep_mode == "low_latency":
        yield (
            "--deepep-config is for normal mode: give --moe-a2a-backend deepep, with --deepep-mode "
            "normal or auto, or leave it out"
        )
    elif device_of(args) == "cpu":
        yield "--deepep-config limits a GPU's SMs: leave it out on cpu"
    try:
        read_deepep_config(args.deepep_config)
    except ValueError as error:
        yield str(error)


def _backend_names(args: ServerArgs) -> Iterator[str]:
    """Unknown names, unless a module or an installed package may register them: then the registry
    decides once they are imported."""
    target = ("moe_a2a_backend", "moe_runner_backend")
    for field in (*target, *(f"speculative_{name}" for name in target)):
        spec, name = specs(ServerArgs)[field], getattr(args, field)
        known = [str(choice) for choice in spec.flag.choices]
        if (
            name is None
            or name in known
            or args.moe_backend_module
            or entry_points(group=BACKEND_ENTRY_POINTS)
        ):
            continue
        if name in spec.flag.refused:
            yield f"{spec.name} is {name!r}: {spec.flag.refused[name]}"
            continue
        yield (
            f"{spec.name} is {name!r}: choose one of {', '.join(known)}, or name the module that "
            f"registers it with --moe-backend-module{nearest(name, known)}"
        )


def _graphs(args: ServerArgs) -> Iterator[str]:
    for names in GRAPH_FLAGS:
        disabled, sizes, most = (getattr(args, name) for name in names)
        disable, *flags = ("--" + name.replace("_", "-") for name in names)
        if disabled and (sizes is not None or most is not None):
            yield f"{flags[sizes is None]} and {disable} exclude each other: keep one"
        if sizes and most is not None and max(sizes) > most:
            yield f"{flags[0]} has {max(sizes)}, more than {flags[1]} {most}: raise that"


def _https(args: ServerArgs) -> Iterator[str]:
    if args.ssl_certfile is None:
        for typed in given(args, "ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"):
            yield f"{typed} needs --ssl-certfile FILE"
        if args.enable_ssl_refresh:
            yield "--enable-ssl-refresh needs --ssl-certfile FILE"


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` up to `most`."""
    return max(d for d in range(1, min(number, most) + 1) if number % d == 0)
