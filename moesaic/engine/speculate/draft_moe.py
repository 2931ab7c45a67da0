"""The MoE context of a draft model: the target's ranks and buffers, perhaps other backends."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from moesaic.comm.mesh import Mesh
from moesaic.config import ServerArgs
from moesaic.engine.setup.moe_setup import StepLimits, describe_backends
from moesaic.models.config import BuildContext, RawConfig
from moesaic.models.registry import build_model
from moesaic.moe.context import MoeContext
from moesaic.moe.layer import FusedMoE
from moesaic.moe.placement import redundant_slots
from moesaic.moe.quant.weights import WeightFormat
from moesaic.moe.registry import A2A_REGISTRY, MoeProblem

logger = logging.getLogger(__name__)

OWN_FLAGS = ("moe-runner-backend", "moe-a2a-backend")
"""Those that draft models have behind `--speculative-`, too."""


def may_move(args: ServerArgs) -> bool:
    """Whether a draft model's experts move as the target's do. With --elastic-ep-backend they stay:
    no rank takes over a lost one's, and no drafts are made until it is back."""
    return args.enable_eplb and args.elastic_ep_backend is None


def log_moves(args: ServerArgs, layers: Sequence[FusedMoE]) -> None:
    """Whether --enable-eplb moves the experts of these layers, the draft model's."""
    if not args.enable_eplb or not layers:
        return
    if not may_move(args):
        logger.info(
            "draft model: eplb: its experts keep their places: with --elastic-ep-backend no rank "
            "takes over those of a lost one"
        )
        return
    logger.info(
        "draft model: eplb: %d experts of %d layer%s move among %d slots",
        layers[0].config.num_experts,
        len(layers),
        "s" * (len(layers) != 1),
        layers[0].layout.num_slots,
    )


def is_as_target(args: ServerArgs, target: MoeContext, weights: WeightFormat) -> bool:
    """Whether experts with these weights, of a layer like the target's, are the target's in all
    but that. Those of elastic ranks move where the draft model's stay."""
    own = args.speculative_moe_runner_backend, args.speculative_moe_a2a_backend
    alike = args.elastic_ep_backend is None and weights == target.weight_format
    return alike and own == (None, None)


def draft_moe(
    args: ServerArgs,
    target: MoeContext,
    weights: WeightFormat,
    limits: StepLimits,
    mesh: Mesh,
    raw: RawConfig,
) -> MoeContext:
    """`weights`: of the draft model's experts, which are not as the target's. `raw`: the config of
    the model whose layers they are like. If they move they have redundant slots, as many as the
    target's or one for each expert that a rank lacks."""
    runner, a2a = args.speculative_moe_runner_backend, args.speculative_moe_a2a_backend
    problem = replace(
        target.resolved,
        a2a=a2a or args.moe_a2a_backend,
        mode=args.deepep_mode,
        runner=runner or args.moe_runner_backend,
        payload="auto",
        weights=weights,
    )
    asked = args.ep_num_redundant_experts if may_move(args) else 0
    problem, redundant = _sized(problem, target.dtype, raw, asked)
    context = replace(
        _make(target, problem, limits, mesh),
        comm=target.comm,
        workspace=target.workspace,
        redundant_experts=redundant,
        max_replicas=problem.redundant + 1 if may_move(args) else 0,
    )
    for reason in context.reasons:
        logger.info("draft model: moe: %s", reason)
    logger.info(
        "draft model: moe: a2a %(a2a)s (%(a2a_mode)s, %(a2a_provider)s), runner %(runner)s "
        "(%(runner_provider)s) on %(device)s, %(weights)s weights, %(payload)s sent",
        describe_backends(context),
    )
    return context


def _sized(
    problem: MoeProblem, dtype: torch.dtype, raw: RawConfig, asked: int
) -> tuple[MoeProblem, int]:
    """With the sizes of the draft model's experts; and how many of the `asked` redundant slots its
    layers have, beside those that an even distribution needs."""
    if not problem.experts:  # copies of all experts
        return problem, 0
    with torch.device("meta"):
        model = build_model(raw, BuildContext.single(dtype, 1))
    layer = next((m.config for m in model.modules() if isinstance(m, FusedMoE)), None)
    if layer is None:
        return problem, 0
    experts = layer.num_experts
    redundant = min(asked, experts * (problem.ep - 1))
    sized = replace(
        problem,
        experts=experts,
        redundant=redundant_slots(experts, redundant, problem.ep),
        hidden_size=layer.hidden_size,
        intermediate_size=layer.intermediate_size,
    )
    return sized, redundant


def _make(target: MoeContext, problem: MoeProblem, limits: StepLimits, mesh: Mesh) -> MoeContext:
    backend = A2A_REGISTRY.get(problem.a2a)  # MoeContext.make refuses an unknown name
    replicated = backend is not None and backend.takes_replicated and mesh.dp == 1
    sharers = 1 if replicated else mesh.attention_tp
    try:
        return MoeContext.make(
            problem,
            target.dtype,
            target.comm.group,
            timeout=target.comm.timeout,
            max_tokens=-(-limits.tokens // sharers),
            max_decode_tokens=-(-limits.decode_tokens // sharers),
            dispatch_algorithm=target.dispatch_algorithm,
            copies=target.copies,
            deterministic=target.deterministic,
            replicated=replicated,
            lanes=target.lanes,
            dispatch_programs=target.dispatch_programs,
            combine_programs=target.combine_programs,
        )
    except ValueError as error:
        message = str(error)
        for flag in OWN_FLAGS:  # the target's is right
            message = message.replace(f"--{flag}", f"--speculative-{flag}")
        raise ValueError(
            f"the draft model's experts have {problem.weights.name} weights "
            "(--speculative-moe-runner-backend and --speculative-moe-a2a-backend are the target's "
            f"unless given): {message}"
        ) from None
