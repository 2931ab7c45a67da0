"""The flags of `moesaic balance`."""

from dataclasses import dataclass
from typing import ClassVar

from moesaic.config.flags import flag


@dataclass(frozen=True)
class RoutingArgs:
    GROUP: ClassVar[str] = "Generated routing"

    num_layers: int = flag(8, "MoE layers.", at_least=1)
    num_experts: int | None = flag(
        None,
        "Experts of a layer; unset: 256, or those that LOADS has. A trace may not have met the "
        "last ones.",
        at_least=1,
    )
    top_k: int = flag(8, "Experts of a token.", at_least=1)
    tokens: int = flag(4096, "Tokens of a step.", at_least=1)
    steps: int = flag(32, "Steps to plan from, and as many to judge by.", at_least=1, at_most=4096)
    zipf: float = flag(0.7, "Exponent of the popularity; 0: all alike.", at_least=0, at_most=10)
    drift: float = flag(
        0.3, "Sigma of the lognormal change since the current placement.", at_least=0, at_most=10
    )
    noise: float = flag(0.4, "Sigma of the lognormal change of a step.", at_least=0, at_most=10)
    domain_switch: float = flag(
        0.0, "Share of experts that trade popularity with others.", at_least=0, at_most=1
    )
    seed: int = flag(0, "Of the generator.", at_least=0)


@dataclass(frozen=True)
class PlacementArgs:
    GROUP: ClassVar[str] = "Placement"

    ep_size: int = flag(8, "Ranks.", aliases=("--ep",), at_least=1)
    redundant: tuple[int, ...] | None = flag(
        None, "Redundant slots of a layer; several are compared; unset: 0.", at_least=0
    )
    algorithms: tuple[str, ...] | None = flag(
        None,
        "incremental, deepseek, deepseek_vec, elasticity_aware, each but the first also with "
        "_hierarchical; auto chooses and says why; unset: auto deepseek deepseek_vec.",
        metavar="NAME",
    )
    num_groups: int = flag(1, "Groups of experts that the router chooses by.", at_least=1)
    nnodes: int = flag(1, "Nodes of the ranks.", at_least=1)
    current: str | None = flag(
        None,
        "File with the current placement; unset: slot i holds expert i, or with generated routing "
        "the plan before the drift.",
        metavar="FILE",
    )
    windows: int = flag(
        1,
        "Windows that the steps to plan from are divided into: times of unlike load, long enough "
        "that noise evens out.",
        at_least=1,
    )
    objective: str = flag(
        "tokens",
        "What incremental evens out: rows, or distinct experts read (decode bound by memory).",
        choices=("tokens", "experts"),
    )
    target: float = flag(1.03, "Max/mean at which incremental stops.", at_least=1)
    max_fetches: int | None = flag(
        None, "Slots of a layer that incremental may fetch; unset: while it pays.", at_least=0
    )
    step_tokens: int = flag(16, "Tokens of a .npz trace that make a step.", at_least=1)


@dataclass(frozen=True)
class HardwareArgs:
    GROUP: ClassVar[str] = "Hardware"

    hidden_size: int = flag(7168, "Of the model.", at_least=1)
    intermediate_size: int = flag(2048, "Of one expert.", at_least=1)
    weight_bytes: float = flag(1.0, "Bytes of a weight: 1 for fp8, 2 for bf16.", above=0)
    tflops: float = flag(700.0, "Arithmetic of a rank, TFLOP/s.", above=0)
    memory_gb_s: float = flag(3200.0, "Memory of a rank, GB/s.", above=0)
    link_gb_s: float = flag(50.0, "Link of a rank, GB/s, by which experts are fetched.", above=0)
    horizon: int = flag(1000, "Steps until the next plan, over which a move must pay.", at_least=1)


@dataclass(frozen=True)
class OutputArgs:
    GROUP: ClassVar[str] = "Output"

    out: str | None = flag(
        None,
        "Write the plan that takes the least time over --horizon, moves included, as SGLang's "
        "--init-expert-location reads it: .json.",
        metavar="FILE",
    )
    plot: str | None = flag(None, "Draw the load of ranks before and after: a PNG.", metavar="FILE")
    json: str | None = flag(None, "Write the table as JSON.", metavar="FILE")
    disable_tqdm: bool = flag(False, "No progress bar.")


@dataclass(frozen=True)
class BalanceCommandArgs(OutputArgs, HardwareArgs, PlacementArgs, RoutingArgs):
    """All flags of the command."""
