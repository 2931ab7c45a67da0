"""The algorithms by name, and the function that DeepSeek's users know.

An algorithm is a pure function from a `BalanceProblem` to the expert of each slot [L, P], and one
registration. L layers · E experts · P slots · X replicas of an expert at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moesaic.balance import deepseek
from moesaic.balance.incremental import incremental
from moesaic.balance.problem import BalanceProblem, Ints, check_placement, replica_table

if TYPE_CHECKING:
    from torch import Tensor

AUTO = "auto"


@dataclass(frozen=True)
class Algorithm:
    name: str
    summary: str
    plan: Callable[[BalanceProblem], Ints]
    takes_dead_ranks: bool = False
    takes_steps: bool = False
    """Whether it looks at every step, and not at windows of many."""


@dataclass(frozen=True)
class Plan:
    """`reason`: of the choice of the algorithm, where it was `auto`."""

    algorithm: str
    reason: str
    slots_LP: Ints


@dataclass(frozen=True)
class AutoRule:
    name: str
    reason: str
    applies: Callable[[BalanceProblem], bool]


ALGORITHMS: dict[str, Algorithm] = {}


def register_algorithm(algorithm: Algorithm) -> Algorithm:
    if not algorithm.name.isidentifier() or algorithm.name == AUTO:
        raise ValueError(f"algorithm {algorithm.name!r}: give a name like my_algorithm")
    if algorithm.name in ALGORITHMS:
        raise ValueError(f"algorithm {algorithm.name!r} is registered twice")
    ALGORITHMS[algorithm.name] = algorithm
    return algorithm


for _algorithm in (
    Algorithm(
        "incremental",
        "few moves from the current placement, while they pay",
        incremental,
        takes_dead_ranks=True,
    ),
    Algorithm("deepseek", "DeepSeek's greedy over all ranks", deepseek.deepseek),
    Algorithm(
        "deepseek_hierarchical",
        "DeepSeek's greedy: groups of experts to nodes first",
        deepseek.deepseek_hierarchical,
    ),
    Algorithm(
        "deepseek_vec",
        "replicas chosen by the worst of every step",
        deepseek.deepseek_vec,
        takes_steps=True,
    ),
    Algorithm(
        "deepseek_vec_hierarchical",
        "the same, groups of experts to nodes first",
        deepseek.deepseek_vec_hierarchical,
        takes_steps=True,
    ),
    Algorithm(
        "elasticity_aware",
        "DeepSeek's greedy over the ranks that live",
        deepseek.elasticity_aware,
        takes_dead_ranks=True,
    ),
    Algorithm(
        "elasticity_aware_hierarchical",
        "the same, by groups and nodes while all ranks live",
        deepseek.elasticity_aware_hierarchical,
        takes_dead_ranks=True,
    ),
):
    register_algorithm(_algorithm)


def _has_dead_ranks(problem: BalanceProblem) -> bool:
    return not problem.active.all()


def _has_groups_on_nodes(problem: BalanceProblem) -> bool:
    several = problem.num_nodes > 1 and problem.num_groups > 1
    return several and problem.num_groups % problem.num_nodes == 0


AUTO_RULES = (
    AutoRule(
        "incremental",
        "ranks are dead, and those that live keep the experts they have",
        lambda problem: _has_dead_ranks(problem) and problem.current_LP is not None,
    ),
    AutoRule("elasticity_aware", "ranks are dead and nothing is placed yet", _has_dead_ranks),
    AutoRule(
        "deepseek_hierarchical",
        "groups of experts can stay whole on nodes, which keeps tokens on fewer nodes",
        _has_groups_on_nodes,
    ),
    AutoRule(
        "incremental",
        "it fetches the fewest experts from the current placement",
        lambda problem: problem.current_LP is not None,
    ),
    AutoRule("incremental", "nothing is placed yet: it refines DeepSeek's greedy", lambda _: True),
)


def choose_algorithm(name: str, problem: BalanceProblem) -> tuple[Algorithm, str]:
    """The algorithm and the reason; ValueError for one that is unknown or does not fit."""
    if name == AUTO:
        rule = next(rule for rule in AUTO_RULES if rule.applies(problem))
        return ALGORITHMS[rule.name], rule.reason
    if name not in ALGORITHMS:
        from moesaic.config.flags import nearest  # not above: it triples the imports of a planner

        known = ", ".join((AUTO, *ALGORITHMS))
        hint = nearest(name, ALGORITHMS)
        raise ValueError(f"algorithm {name!r} is not known: choose one of {known}{hint}")
    found = ALGORITHMS[name]
    if _has_dead_ranks(problem) and not found.takes_dead_ranks:
        fit = ", ".join(one.name for one in ALGORITHMS.values() if one.takes_dead_ranks)
        raise ValueError(f"{name} would place experts on dead ranks: choose one of {fit}")
    return found, "as asked"


def make_plan(name: str, problem: BalanceProblem) -> Plan:
    """A placement that holds every expert, by the named algorithm or `auto`."""
    algorithm, reason = choose_algorithm(name, problem)
    slots_LP = algorithm.plan(problem)
    live_LP = slots_LP[:, deepseek.live_slots(problem)]
    check_placement(live_LP, problem.num_layers, problem.num_experts, live_LP.shape[1])
    return Plan(algorithm.name, reason, slots_LP)


def rebalance_experts(
    weight: Tensor, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[Tensor, Tensor, Tensor]:
    """DeepSeek's function: (phy2log [L, P], log2phy [L, E, X] padded by -1, logcnt [L, E]) of loads
    [L, E]. By groups and nodes where groups can be laid evenly over nodes, else over all GPUs."""
    import torch  # not above: a process that only plans need not load it

    load_LE = weight.detach().to("cpu", torch.float32).numpy()
    grouped = num_groups % num_nodes == 0
    groups, nodes = (num_groups, num_nodes) if grouped else (1, 1)
    problem = BalanceProblem(load_LE[None], num_replicas, num_gpus, groups, nodes)
    slots_LP, replica_LP = deepseek.hierarchical(problem, groups, nodes)
    table_LEX, count_LE = replica_table(slots_LP, problem.num_experts, replica_LP)
    return torch.from_numpy(slots_LP), torch.from_numpy(table_LEX), torch.from_numpy(count_LE)
