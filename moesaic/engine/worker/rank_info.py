"""Describes ranks, and a service of one or many: backends, providers, experts and memory."""

from __future__ import annotations

import logging
import os
from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from moesaic.comm.mesh import Mesh
from moesaic.core.stats import MembershipStats, ServiceLosses
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.setup.memory_plan import collective_bytes, expert_bytes
from moesaic.engine.setup.moe_setup import describe_backends
from moesaic.engine.worker.kv_share import kv_shares

logger = logging.getLogger(__name__)

MIB: Final = 1 << 20
# The same on all ranks.
OF_ALL = ("providers", "overlap_choices", "kv_shares")
LOGGED_RANKS: Final = 16
# Figures of the serving groups that add up to those of the service.
SUMMED: Final = (
    "running",
    "waiting",
    "pages_used",
    "pages_cached",
    "pages_free",
    "retractions",
    "steps",
    "failed_steps",
)
# Those of ranks, in bytes.
MEMORY: Final = ("weight_bytes", "expert_bytes", "cache_bytes", "buffer_bytes")


def rank_info(runner: ModelRunner) -> dict[str, Any]:
    """Describes this rank. `weight_bytes` include `expert_bytes`; `buffer_bytes` are those of
    dispatchers and collectives; `experts`: the logical expert in each slot; `lasting_bytes`: of
    weights in memory that outlives the rank, of which `mapped_bytes` were there."""
    layers, config = runner.moe_layers, runner.model.config
    held = runner.weights.held or [layer.local_experts for layer in layers]
    buffers = runner.moe.buffers(layer.dispatcher.config for layer in layers).total
    gpu = runner.device if runner.kind == "cuda" else None
    sizes = (config.hidden_size, config.dtype, gpu)
    return {
        "pid": os.getpid(),
        "weight_bytes": runner.model.nbytes,
        "expert_bytes": sum(map(expert_bytes, layers)),
        "cache_bytes": runner.cache.num_bytes,
        "buffer_bytes": buffers + collective_bytes(runner.ranks.mesh, runner.limits, *sizes),
        "moe_layers": [layer.dispatcher.config.layer for layer in layers],
        "first_slot": layers[0].layout.first_slot if layers else 0,
        "experts": list(held[0]) if layers else [],
        **msgspec.to_builtins(runner.weights.facts),
        "providers": describe_backends(runner.moe),
        "overlap_choices": [choice.facts() for choice in runner.overlap_choices],
        "kv_shares": msgspec.to_builtins(kv_shares(runner)),
        **runner.steps.device_info(),
    }


def log_ranks(ranks: Sequence[Mapping[str, Any]], mesh: Mesh) -> None:
    """Logs the experts and the memory of every rank, at the end of a start."""
    for number, rank in enumerate(ranks[:LOGGED_RANKS]):
        log_rank(number, rank, mesh)
    if len(ranks) > LOGGED_RANKS:
        logger.info("and %d ranks more: see /server_info", len(ranks) - LOGGED_RANKS)


def log_rank(number: int, rank: Mapping[str, Any], mesh: Mesh) -> None:
    weights, experts, cache, buffers = (rank[key] / MIB for key in MEMORY)
    layers = len(rank["moe_layers"])
    logger.info(
        "%s: %s of %d MoE layer%s; weights %.1f MiB%s (experts %.1f MiB), KV cache %.1f MiB, "
        "buffers %.1f MiB; process %d",
        mesh.describe(number),
        describe_experts(rank["experts"]),
        layers,
        "" if layers == 1 else "s",
        weights,
        _kept(rank),
        experts,
        cache,
        buffers,
        rank["pid"],
    )


def _kept(rank: Mapping[str, Any]) -> str:
    """Where weights are, if they outlive the rank, and whether they were there."""
    if not rank["lasting_bytes"]:
        return ""
    mapped = rank["mapped_bytes"] / MIB
    found = f", {mapped:.1f} MiB of them found there" if mapped else ""
    return f" in memory that outlives ranks{found}"


def describe_experts(experts: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> experts 0-2, 5"""
    runs: list[list[int]] = []
    for expert in experts:
        if runs and expert == runs[-1][-1] + 1:
            runs[-1].append(expert)
        else:
            runs.append([expert])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"experts {', '.join(parts)}" if parts else "no experts"


def service_info(
    args: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    ranks: Sequence[Mapping[str, Any]],
    num_experts: int,
    membership: MembershipStats | None = None,
    losses: ServiceLosses | None = None,
) -> dict[str, Any]:
    """The resolved flags, the figures of all groups, and what the ranks hold. The placement's
    version is that of now; `experts_of_rank` are those of the start. `groups`: those that are
    not lost."""
    first = next((rank for rank in ranks if rank["experts"]), ranks[0])
    group = groups[0] if groups else dict.fromkeys((*SUMMED, "placement_version"), 0)
    return {
        **args,
        **group,
        **{key: sum(group[key] for group in groups) for key in SUMMED},
        "providers": first["providers"],
        "overlap_choices": ranks[0]["overlap_choices"],
        "placement": {
            "version": group["placement_version"],
            "num_experts": num_experts,
            "redundant_experts": len(first["experts"]) * args["ep_size"] - num_experts,
            "experts_of_rank": [rank["experts"] for rank in ranks],
        },
        "memory": {key: sum(rank[key] for rank in ranks) for key in MEMORY},
        "rooms": [room for group in groups for room in group.get("rooms", ())],
        "kv_transports": dict(ChainMap(*(group.get("kv_transports", {}) for group in groups))),
        "groups": list(groups),
        "membership": msgspec.to_builtins(membership),
        "losses": msgspec.to_builtins(losses),
        "ranks": [{k: v for k, v in rank.items() if k not in OF_ALL} for rank in ranks],
    }
