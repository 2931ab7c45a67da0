"""What an engine counts while it serves: totals since its start, and what is so now. Data only."""

from __future__ import annotations

import msgspec


class TrafficStats(msgspec.Struct, array_like=True):
    """Of one dispatcher on one rank, added up over its layers; seconds are those in which the rank
    could do nothing else."""

    dispatches: int = 0
    dispatch_rows: int = 0
    dispatch_bytes: int = 0
    dispatch_seconds: float = 0.0
    combines: int = 0
    combine_rows: int = 0
    combine_bytes: int = 0
    combine_seconds: float = 0.0


class RankStats(msgspec.Struct, array_like=True):
    """`traffic`: by dispatcher. `layers`: numbers of the MoE layers that this rank has, and for
    each, `experts`: the logical expert in each slot of this rank, and `expert_tokens`: how many
    tokens this rank's slots have computed. Of ranks that share experts by slices only the first has
    these three: sums over ranks count each pair of token and expert once. `state`: when it was
    asked, from the control page; a rank that did not answer in time has nothing else but its steps
    and seconds. `runner_seconds`: of a fused dispatcher, with the waits inside."""

    rank: int
    place: str
    steps: int = 0
    compute_seconds: float = 0.0
    wait_seconds: float = 0.0
    runner_seconds: float = 0.0
    traffic: dict[str, TrafficStats] = {}
    layers: list[int] = []
    experts: list[list[int]] = []
    expert_tokens: list[list[int]] = []
    state: str = "computing"
    state_age: float = 0.0
    pid: int = 0


class GroupStats(msgspec.Struct, array_like=True):
    """Of one serving group: a scheduler with its requests and cache."""

    group: int
    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_total: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prompt_tokens: int = 0
    """Computed ones; those found in the prefix cache are `cached_tokens`."""
    cached_tokens: int = 0
    generated_tokens: int = 0
    retractions: int = 0
    failed_steps: int = 0


class EngineStats(msgspec.Struct):
    """Groups whose leader did not answer in time are missing. `num_experts`: logical ones of a
    layer. `when`: seconds since the epoch."""

    when: float
    groups: list[GroupStats]
    ranks: list[RankStats]
    num_experts: int = 0
