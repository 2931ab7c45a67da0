"""Resolves flags and a checkpoint's config to the MoE context."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch

from moesaic.comm.mesh import Mesh
from moesaic.config import ServerArgs
from moesaic.config.deepep import read_deepep_config
from moesaic.config.overlap import link_of
from moesaic.core.overlap import Overlap, schedules_of
from moesaic.engine.setup.first_placement import first_placements
from moesaic.engine.setup.rank_context import RankContext
from moesaic.models.blocks import CausalLM
from moesaic.moe.backends import load_backends
from moesaic.moe.context import DTYPE_NAMES, MoeContext
from moesaic.moe.dispatch.host.exchange import LANES
from moesaic.moe.dispatch.long_sequences import MIB, summarise
from moesaic.moe.layer import FusedMoE
from moesaic.moe.placement import Placement, redundant_slots
from moesaic.moe.quant.weights import WEIGHT_FORMATS, WeightFormat
from moesaic.moe.registry import (
    A2A_REGISTRY,
    PHASES,
    RUNNER_REGISTRY,
    MoeProblem,
    modes_of,
    provider_name,
)
from moesaic.moe.replicas import DYNAMIC, FAKE, LP

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The most tokens of a step."""

    tokens: int
    decode_tokens: int
    graph_tokens: int = 0
    """Of a step with prompts that is captured as a CUDA graph."""
    drafts: int = 0
    """How many of the decode tokens are drafts."""

    @property
    def running(self) -> int:
        """The most requests at once."""
        return self.decode_tokens - self.drafts

    @property
    def chunk_tokens(self) -> int:
        """The most prompt tokens."""
        return self.tokens - self.decode_tokens


# `--quantization` of an unquantised checkpoint: the weight format that loading produces.
ONLINE = {
    "fp8": "fp8_block",
    "w8a8_fp8": "fp8_channel",
    "modelopt_fp8": "fp8_tensor",
    "w8a8_int8": "int8_w8a8",
    "modelopt_fp4": "nvfp4",
    "mxfp4": "mxfp4",
}
# `--quantization` of a quantised checkpoint: the method that its config may name.
METHODS = {"modelopt_fp8": "modelopt", "modelopt_fp4": "modelopt", "w8a8_fp8": "fp8"}


def weight_format(
    asked: str | None, method: str, declared: WeightFormat | None
) -> WeightFormat | None:
    """The experts' format: the checkpoint's, or that of `--quantization`; None is unquantised."""
    if asked is None:
        return declared
    if method == "none":
        if asked not in ONLINE:
            raise ValueError(
                f"--quantization {asked}: the checkpoint is not quantised, and loading can only "
                f"quantise experts as {', '.join(ONLINE)}; for other formats make a checkpoint "
                "with moesaic quantize"
            )
        return WEIGHT_FORMATS[ONLINE[asked]]
    if method not in (asked, METHODS.get(asked)):
        raise ValueError(
            f"--quantization {asked}: the checkpoint is quantised as {method}; leave the flag out"
        )
    return declared


def kind_of(args: ServerArgs) -> str:
    """cpu or cuda."""
    return "cuda" if args.device == "cuda" else "cpu"


def moe_problem(
    args: ServerArgs, dtype: torch.dtype, weights: WeightFormat | None, model: CausalLM, mesh: Mesh
) -> MoeProblem:
    """`model` gives the sizes and may be on the meta device."""
    name = DTYPE_NAMES[dtype]
    role = args.disaggregation_mode
    layers = [module.config for module in model.modules() if isinstance(module, FusedMoE)]
    experts = layers[0].num_experts if layers else 0
    shared = layers[0].num_shared if layers else 0
    routed, asked = experts - shared, redundant_experts(args, model, mesh)
    most = routed * (mesh.ep - 1)  # an expert on every rank
    if experts and mesh.ep > 1 and asked > most:
        raise ValueError(
            f"--ep-num-redundant-experts is {asked}: with {most} each of {mesh.ep} ranks has all "
            f"{routed} experts; give at most that"
        )
    _log_slots(routed, shared, asked, mesh.ep)
    return MoeProblem(
        a2a=args.moe_a2a_backend,
        mode=args.deepep_mode,
        runner=args.moe_runner_backend,
        payload=args.deepep_dispatch_output_dtype,
        weights=weights or WEIGHT_FORMATS[name],
        dtype=name,
        ep=mesh.ep,
        tp=mesh.tp,
        phases=(role,) if role in PHASES else PHASES,
        device=kind_of(args),
        hidden_size=layers[0].hidden_size if layers else 0,
        intermediate_size=layers[0].intermediate_size if layers else 0,
        experts=experts,
        redundant=redundant_slots(routed, asked, mesh.ep) + shared * (mesh.ep - 1),
    )


def redundant_experts(args: ServerArgs, model: CausalLM, mesh: Mesh) -> int:
    """Those of all ranks. A service that starts with fewer is given those of these, and each rank
    that joins has as many slots."""
    start, asked = args.elastic_ep_initial_size, args.ep_num_redundant_experts
    layers = [module.config for module in model.modules() if isinstance(module, FusedMoE)]
    if start is None or not layers:
        return asked
    routed = layers[0].num_experts - layers[0].num_shared
    return (routed + redundant_slots(routed, asked, start)) // start * mesh.ep - routed


def moe_context(
    args: ServerArgs,
    dtype: torch.dtype,
    weights: WeightFormat | None,
    limits: StepLimits,
    model: CausalLM,
    ranks: RankContext,
) -> MoeContext:
    """`weights` is None for unquantised experts; see `moe_problem` for `model`."""
    load_backends([args.moe_backend_module] if args.moe_backend_module is not None else [])
    mesh, deterministic = ranks.mesh, args.enable_deterministic_inference
    # Sums over sharded experts depend on the sharding.
    copies = mesh.moe_tp if deterministic else 1
    if copies > 1:
        logger.info("moe: deterministic: experts are not sharded, %d ranks hold each", copies)
    if args.enable_waterfill:
        _check_shared(model)
    problem = moe_problem(args, dtype, weights, model, mesh)
    algorithm = args.ep_dispatch_algorithm or (LP if args.enable_waterfill else DYNAMIC)
    if args.ep_dispatch_algorithm is not None:
        _log_algorithm(algorithm, problem.redundant > 0 or copies > 1)
    if copies > 1:  # placement() places the copies
        problem = replace(problem, ep=mesh.tp, experts=0, redundant=0)
    a2a = A2A_REGISTRY.get(problem.a2a)  # MoeContext.make refuses an unknown name
    # With one attention group all ranks of the stage have the same tokens.
    replicated = a2a is not None and a2a.takes_replicated and mesh.dp == 1
    sharers = 1 if replicated else mesh.attention_tp
    context = MoeContext.make(
        problem,
        dtype,
        ranks.stage_peers,
        timeout=ranks.timeout,
        link=link_of(args),
        overlaps=Overlap.SBO in schedules_of(args.overlap),
        max_tokens=-(-limits.tokens // sharers),
        max_decode_tokens=-(-limits.decode_tokens // sharers),
        redundant_experts=redundant_experts(args, model, mesh),
        dispatch_algorithm=algorithm,
        waterfill=args.enable_waterfill,
        # All redundant slots may go to one expert.
        max_replicas=problem.redundant + 1 if _moves_experts(args, mesh) else 0,
        copies=copies,
        deterministic=deterministic,
        replicated=replicated,
        lanes=_lanes(args),
        **_programs(args),
    )
    _log_choice(context)
    return replace(context, placements=_placements(args, model, context))


def _moves_experts(args: ServerArgs, mesh: Mesh) -> bool:
    """Whether a layer's placement may change. Ranks that share experts wait for each other."""
    return args.enable_eplb or (args.elastic_ep_backend is not None and mesh.moe_tp == 1)


def _placements(args: ServerArgs, model: CausalLM, context: MoeContext) -> dict[int, Placement]:
    """The first placements, of the layers that do not have the default one."""
    layers = [module for module in model.modules() if isinstance(module, FusedMoE)]
    if not layers:
        return {}
    experts, shared = layers[0].config.num_experts, layers[0].config.num_shared
    slots = len(context.placement(experts, num_shared=shared).slots)
    numbers = [layer.dispatcher.config.layer for layer in layers]
    try:
        return first_placements(args, numbers, len(model.model.layers), experts, slots)
    except ValueError as error:
        if not shared:
            raise
        raise ValueError(
            f"{error} (--enable-waterfill: the last {shared} of {experts} experts are shared)"
        ) from None


def _check_shared(model: CausalLM) -> None:
    """ValueError where no shared expert is among the routed ones."""
    layers = [module for module in model.modules() if isinstance(module, FusedMoE)]
    if not any(layer.config.num_shared for layer in layers):
        raise ValueError(
            "--enable-waterfill: this model has no shared experts, or some with biases, which "
            "cannot be among the routed ones: leave it out"
        )


def _log_slots(experts: int, shared: int, asked: int, ep: int) -> None:
    redundant = redundant_slots(experts, asked, ep)
    if experts and redundant > asked:
        logger.info(
            "moe: %d experts and %d redundant slots do not divide evenly over ep %d: slots added: "
            "%d, a rank has %d",
            experts,
            asked,
            ep,
            redundant - asked,
            (experts + redundant) // ep,
        )
    if shared:
        logger.info("moe: waterfill: slots that each rank has for shared experts: %d", shared)


def _log_algorithm(algorithm: str, has_replicas: bool) -> None:
    if algorithm == FAKE:
        logger.warning("moe: fake routing: tokens go to random experts, answers are wrong")
    elif not has_replicas:
        logger.info("moe: %s has nothing to choose: no expert has a replica", algorithm)
    elif algorithm == LP:
        logger.info("moe: lp splits steps with prompts by the counts of all ranks, others evenly")


def _lanes(args: ServerArgs) -> int:
    """Kernels of one batch write into one lane; ranks on CPU have two anyway."""
    is_split = Overlap.TBO in schedules_of(args.overlap)
    return LANES if is_split or kind_of(args) == "cpu" else 1


def _programs(args: ServerArgs) -> dict[str, int]:
    """Kernel programs of --deepep-config; one program occupies at most one multiprocessor."""
    if args.deepep_config is None:
        return {}
    config = read_deepep_config(args.deepep_config)
    if config.ignored:
        logger.warning(
            "--deepep-config: nothing is sent in chunks here: %s", ", ".join(config.ignored)
        )
    return {"dispatch_programs": config.dispatch, "combine_programs": config.combine}


def describe_backends(context: MoeContext) -> dict[str, Any]:
    """The backends of a rank, and why they were chosen."""
    choice = context.resolved
    a2a, runner = A2A_REGISTRY[choice.a2a], RUNNER_REGISTRY[choice.runner]
    return {
        "device": choice.device,
        "a2a": choice.a2a,
        "a2a_mode": choice.mode,
        "a2a_provider": provider_name(a2a.providers[choice.device]),
        "runner": choice.runner,
        "runner_provider": provider_name(runner.providers[choice.device]),
        "payload": choice.payload,
        "weights": choice.weights.name,
        "emulated_link": "" if context.comm.link is None else str(context.comm.link),
        "reasons": list(context.reasons),
    }


def _log_choice(context: MoeContext) -> None:
    for reason in context.reasons:
        logger.info("moe: %s", reason)
    logger.info(
        "moe: a2a %(a2a)s (%(a2a_mode)s, %(a2a_provider)s), runner %(runner)s "
        "(%(runner_provider)s) on %(device)s, %(weights)s weights, %(payload)s sent",
        describe_backends(context),
    )
    if context.comm.link is not None:
        logger.warning(
            "moe: dispatch and combine arrive as over an emulated link of %s: times are those of "
            "such a cluster, not of this machine",
            context.comm.link,
        )


def report_buffers(context: MoeContext, model: CausalLM) -> int:
    """Logs the sizes of the dispatchers' buffers and returns their total bytes."""
    layers = (module for module in model.modules() if isinstance(module, FusedMoE))
    configs = [layer.dispatcher.config for layer in layers]
    report = context.buffers(configs)
    for number, layer_buffers in report.layers.items():
        logger.debug("moe: layer %d: %s", number, layer_buffers)
    if report.total:
        rows = sorted({f"{b.payload} ({b.row_bytes} bytes)" for b in report.layers.values()})
        logger.info(
            "moe: buffers of %.1f MiB a rank for %d layers, rows sent as %s",
            report.total / MIB,
            len(report.layers),
            ", ".join(rows),
        )
    in_rounds = set(A2A_REGISTRY[context.resolved.a2a].modes_in_rounds)
    in_rounds &= set(modes_of(context.resolved))
    summary = summarise(configs[0]) if configs and in_rounds else None
    if summary is not None:
        logger.log(logging.WARNING if summary.short else logging.INFO, "moe: %s", summary.text)
    return report.total
