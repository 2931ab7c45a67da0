"""Statistics of an engine: totals since its start, and its current state. Data only."""

from __future__ import annotations

from typing import Final

import msgspec

KEPT_LOSSES: Final = 64


class TrafficStats(msgspec.Struct, array_like=True):
    """One dispatcher on one rank, summed over layers: rows received from or put to other ranks, and
    the bytes of their values and scales. Seconds are those in which it blocked the rank.

    On a GPU only the device knows how many rows move: rows and bytes stay 0, seconds are those of
    the launches, and steps that replay a graph are not counted."""

    dispatches: int = 0
    dispatch_rows: int = 0
    dispatch_bytes: int = 0
    dispatch_seconds: float = 0.0
    combines: int = 0
    combine_rows: int = 0
    combine_bytes: int = 0
    combine_seconds: float = 0.0

    def clear(self) -> None:
        for field in msgspec.structs.fields(self):
            setattr(self, field.name, field.default)


class MoveStats(msgspec.Struct, array_like=True):
    """Experts that a rank has received while serving."""

    rebalances: int = 0
    aborted: int = 0
    """Rebalances that were dropped, with some layers or none moved."""
    bytes: int = 0
    seconds: float = 0.0
    """From the beginning of each rebalance to its end; steps go on meanwhile."""


class RankStats(msgspec.Struct, array_like=True):
    """A rank that does not answer in time has only its state, steps and seconds."""

    rank: int
    place: str
    steps: int = 0
    compute_seconds: float = 0.0
    wait_seconds: float = 0.0
    runner_seconds: float = 0.0
    """For a fused dispatcher these include its waits."""
    traffic: dict[str, TrafficStats] = {}
    """By dispatcher."""
    layers: list[int] = []
    """The rank's MoE layers, then those of a draft model. If ranks share experts by slices, only
    the first has this and the two fields below, so that sums over ranks count each pair of token
    and expert once."""
    experts: list[list[int]] = []
    """For each layer, the logical expert in each slot; where experts move, then all experts, for
    the tokens of earlier slots."""
    expert_tokens: list[list[int]] = []
    """For each layer, the tokens that each slot has computed."""
    state: str = "computing"
    """From the control page, at the time of the query."""
    state_age: float = 0.0
    pid: int = 0
    moves: MoveStats = msgspec.field(default_factory=MoveStats)
    held: list[list[int]] = []
    """For each MoE layer of the rank, the logical expert in each slot now."""


class GroupStats(msgspec.Struct, array_like=True):
    """One serving group: a scheduler with its requests and cache."""

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
    """Computed tokens; those found in the prefix cache are `cached_tokens`."""
    cached_tokens: int = 0
    generated_tokens: int = 0
    retractions: int = 0
    failed_steps: int = 0
    page_size: int = 0
    """Tokens of a page."""
    waiting_tokens: int = 0
    """Prompt tokens of the requests that wait."""
    verified: int = 0
    """Drafts that steps have verified: chains, of one request and step each."""
    drafted_tokens: list[int] = []
    """The tokens of these at each position."""
    accepted_tokens: list[int] = []
    """Those that were accepted."""
    num_drafts: int = 0
    """The most tokens of a draft in the next step."""
    prompts_arrived: int = 0
    """Prompts that other instances have computed."""
    prompts_recomputed: int = 0
    """Those that did not arrive, and are computed here."""
    prefill_schedules: dict[str, int] = {}
    """The number of prefill steps with each schedule of --overlap: off, sbo or tbo."""
    decode_schedules: dict[str, int] = {}
    """The same of the decode steps."""


class MembershipChange(msgspec.Struct):
    """A loss or a return of ranks. Seconds count from when it was noticed."""

    epoch: int
    kind: str
    """lost, returned or removed."""
    ranks: list[int]
    cause: str
    when: float
    """Seconds since the epoch of the clock."""
    live: list[int]
    """The ranks of the replica that live from then on."""
    moved_requests: int = 0
    experts: int = 0
    """Those that live ranks read again, as no other rank had them."""
    nbytes: int = 0
    from_memory: int = 0
    """Those of the experts that were in memory which outlived their ranks."""
    abandoned_seconds: float | None = None
    """Until all live ranks had abandoned their step."""
    seconds: float | None = None
    """Until all of them had adopted the epoch; None: they have not."""


class MembershipStats(msgspec.Struct):
    """Which ranks of an elastic service live, and what their losses and returns took."""

    live: list[int]
    lost: int = 0
    """How often a rank was lost since the start."""
    returned: int = 0
    moved_requests: int = 0
    experts: int = 0
    nbytes: int = 0
    from_memory: int = 0
    seconds: float = 0.0
    """Of all changes together."""
    changes: list[MembershipChange] = []
    """The last ones, and those in progress."""


class ServiceLoss(msgspec.Struct):
    """A loss of the HTTP process or of the supervisor, which was started again, or of the node
    whose place this one has taken."""

    process: str
    """http, supervisor or node."""
    cause: str
    when: float
    """Seconds since the epoch of the clock."""
    requests: int = 0
    """Those that were open and go on."""
    seconds: float | None = None
    """Until they went on; None: they have not."""


class ServiceLosses(msgspec.Struct):
    """What happened to the HTTP process and the supervisor of an elastic service."""

    http: int = 0
    """How often it was lost since the start."""
    supervisor: int = 0
    node: int = 0
    """How often another node led the service before."""
    seconds: float = 0.0
    """Until requests went on, of all losses together."""
    last: list[ServiceLoss] = []

    def add(self, loss: ServiceLoss) -> None:
        setattr(self, loss.process, getattr(self, loss.process) + 1)
        self.last = [*self.last, loss][-KEPT_LOSSES:]
        self.seconds += loss.seconds or 0.0

    def note_return(self, process: str, requests: int, seconds: float) -> list[ServiceLoss]:
        """It is here again, and so many requests go on; returns the losses that this completes."""
        found = [one for one in self.last if one.process == process and one.seconds is None]
        for loss in found:
            loss.requests, loss.seconds = requests, seconds
            self.seconds += seconds
        return found


class EngineStats(msgspec.Struct):
    when: float
    """Seconds since the epoch."""
    groups: list[GroupStats]
    """Without groups whose leader did not answer in time."""
    ranks: list[RankStats]
    num_experts: int = 0
    """Logical experts of a layer."""
    membership: MembershipStats | None = None
    """Where ranks may be lost."""
    losses: ServiceLosses | None = None
    """Where the HTTP process and the supervisor may be lost."""
