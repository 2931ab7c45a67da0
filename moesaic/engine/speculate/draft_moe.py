"""The MoE context of a draft model: the target's ranks and buffers, perhaps other backends."""

from __future__ import annotations

import logging
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


def is_as_target(args: ServerArgs, target: MoeContext, weights: WeightFormat) -> bool:
    """Whether experts with these weights, of a layer like the target's, are the target's in all
    but that: they have redundant slots and move as those do. Others have none, and stay, as do
    all of them with --elastic-ep-backend: no rank takes over a lost one's, and no drafts are made
    until it is back."""
    own = args.speculative_moe_runner_backend, args.speculative_moe_a2a_backend
    can_move = args.elastic_ep_backend is None
    return can_move and own == (None, None) and weights == target.weight_format


def draft_moe(
    args: ServerArgs,
    target: MoeContext,
    weights: WeightFormat,
    limits: StepLimits,
    mesh: Mesh,
    raw: RawConfig | None = None,
) -> MoeContext:
    """`weights`: of the draft model's experts, which are not as the target's. `raw`: the draft
    model's config, if it is another model."""
    runner, a2a = args.speculative_moe_runner_backend, args.speculative_moe_a2a_backend
    problem = replace(
        target.resolved,
        a2a=a2a or args.moe_a2a_backend,
        mode=args.deepep_mode,
        runner=runner or args.moe_runner_backend,
        payload="auto",
        weights=weights,
    )
    problem = _sized(problem, target.dtype, raw)
    context = replace(
        _make(target, problem, limits, mesh), comm=target.comm, workspace=target.workspace
    )
    for reason in context.reasons:
        logger.info("draft model: moe: %s", reason)
    logger.info(
        "draft model: moe: a2a %(a2a)s (%(a2a_mode)s, %(a2a_provider)s), runner %(runner)s "
        "(%(runner_provider)s) on %(device)s, %(weights)s weights, %(payload)s sent",
        describe_backends(context),
    )
    return context


def _sized(problem: MoeProblem, dtype: torch.dtype, raw: RawConfig | None) -> MoeProblem:
    """Without redundant slots, but for those that an even distribution needs."""
    if not problem.experts:  # copies of all experts
        return problem
    if raw is not None:
        with torch.device("meta"):
            model = build_model(raw, BuildContext.single(dtype, 1))
        layer = next((m.config for m in model.modules() if isinstance(m, FusedMoE)), None)
        if layer is None:
            return problem
        problem = replace(
            problem,
            experts=layer.num_experts,
            hidden_size=layer.hidden_size,
            intermediate_size=layer.intermediate_size,
        )
    return replace(problem, redundant=redundant_slots(problem.experts, 0, problem.ep))


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
