"""What a metric reads: series of samples from a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from moesaic.core.stats import GroupStats, MembershipStats, RankStats, ServiceLosses
from moesaic.observe.metric_types import GROUP, Labels, MetricSource, Sample, Series, Snapshot
from moesaic.observe.requests import Distribution, RequestStats


def requests(
    value: Callable[[RequestStats], float | Distribution], buckets: tuple[float, ...] = ()
) -> Series:
    return Series(MetricSource.REQUESTS, lambda s: [((), value(s.requests))], buckets=buckets)


def groups(value: Callable[[GroupStats], float], hidden: Labels = (GROUP,)) -> Series:
    def read(snapshot: Snapshot) -> Iterator[Sample]:
        for group in snapshot.engine.groups:
            yield (str(group.group),), value(group)

    return Series(MetricSource.SCHEDULERS, read, (GROUP,), hidden)


def drafting(value: Callable[[GroupStats], float]) -> Series:
    """Of schedulers that may plan drafts."""

    def read(snapshot: Snapshot) -> Iterator[Sample]:
        for group in snapshot.engine.groups:
            if group.drafted_tokens:
                yield (str(group.group),), value(group)

    return Series(MetricSource.SCHEDULERS, read, (GROUP,), hidden=(GROUP,))


def positions(value: Callable[[GroupStats], Sequence[int]]) -> Series:
    def read(snapshot: Snapshot) -> Iterator[Sample]:
        for group in snapshot.engine.groups:
            for position, number in enumerate(value(group), 1):
                yield (str(group.group), str(position)), number

    return Series(MetricSource.SCHEDULERS, read, (GROUP, "position"), hidden=(GROUP,))


def phases(prefill: str, decode: str) -> Series:
    def read(snapshot: Snapshot) -> Iterator[Sample]:
        for group in snapshot.engine.groups:
            for phase, name in (("prefill", prefill), ("decode", decode)):
                yield (str(group.group), phase), getattr(group, name)

    return Series(MetricSource.SCHEDULERS, read, (GROUP, "phase"), hidden=(GROUP,))


def schedules(snapshot: Snapshot) -> Iterator[Sample]:
    for group in snapshot.engine.groups:
        kinds = (("prefill", group.prefill_schedules), ("decode", group.decode_schedules))
        for phase, steps in kinds:
            for schedule, number in sorted(steps.items()):
                yield (str(group.group), phase, schedule), number


def ranks(value: Callable[[RankStats], float]) -> Series:
    def read(snapshot: Snapshot) -> Iterator[Sample]:
        for rank in snapshot.engine.ranks:
            yield (str(rank.rank),), value(rank)

    return Series(MetricSource.RANKS, read, ("rank",))


def traffic(quantity: str) -> Series:
    def read(snapshot: Snapshot) -> Iterator[Sample]:
        for rank in snapshot.engine.ranks:
            for backend, traffic in rank.traffic.items():
                for direction in ("dispatch", "combine"):
                    amount = getattr(traffic, f"{direction}_{quantity}")
                    yield (str(rank.rank), backend, direction), amount

    return Series(MetricSource.RANKS, read, ("rank", "backend", "direction"), hidden=("rank",))


def membership(value: Callable[[MembershipStats], float]) -> Series:
    """Of services that go on without ranks that are lost."""

    def read(snapshot: Snapshot) -> Iterator[Sample]:
        if snapshot.engine.membership is not None:
            yield (), value(snapshot.engine.membership)

    return Series(MetricSource.RANKS, read)


def losses(value: Callable[[ServiceLosses], float]) -> Series:
    """Of services that go on without their HTTP process or their supervisor."""

    def read(snapshot: Snapshot) -> Iterator[Sample]:
        if snapshot.engine.losses is not None:
            yield (), value(snapshot.engine.losses)

    return Series(MetricSource.RANKS, read)


def server(value: Callable[[Snapshot], float]) -> Series:
    return Series(MetricSource.SERVER, lambda s: [((), value(s))])


def labelled(
    label: str, source: MetricSource, values: Callable[[Snapshot], Mapping[str, float]]
) -> Series:
    return Series(source, lambda s: [((name,), n) for name, n in values(s).items()], (label,))


def states(snapshot: Snapshot) -> Iterator[Sample]:
    for rank in snapshot.engine.ranks:
        yield (str(rank.rank), rank.place, rank.state), 1


def expert_tokens(snapshot: Snapshot) -> Iterator[Sample]:
    for load in snapshot.experts:
        for rank, tokens in load.ranks.items():
            yield (str(load.layer), str(rank)), tokens


def balancedness(snapshot: Snapshot) -> Iterator[Sample]:
    for load in snapshot.experts:
        if load.balancedness is not None:
            yield (str(load.layer),), load.balancedness


def layer_balance(snapshot: Snapshot) -> Iterator[Sample]:
    if snapshot.balance is not None:
        for layer, share in snapshot.balance.layers.items():
            yield (str(layer),), share


def pass_balance(snapshot: Snapshot) -> Iterator[Sample]:
    if snapshot.balance is not None:
        yield (), snapshot.balance.mean


def hidden_ratios(snapshot: Snapshot) -> Iterator[Sample]:
    for one in snapshot.server.overlap:
        chosen = one["chosen"]
        yield (one["kind"], str(one["tokens"]), chosen), one["hidden_ratio"][chosen]


def throughputs(snapshot: Snapshot) -> Iterator[Sample]:
    for group, tokens in snapshot.throughputs.items():
        yield (str(group),), tokens


def hit_ratio(cached: int, total: int) -> float:
    return cached / total if total else 0.0


def kv_usage(group: GroupStats) -> float:
    return group.pages_used / group.pages_total if group.pages_total else 0.0


def refused(snapshot: Snapshot) -> float:
    return sum(n for (_, status), n in snapshot.server.http.items() if status == 429)


def http(snapshot: Snapshot) -> Iterator[Sample]:
    for (route, status), number in sorted(snapshot.server.http.items()):
        yield (route, str(status)), number
