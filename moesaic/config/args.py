"""All flags of the engine and the server in one flat, frozen object."""

from dataclasses import dataclass
from typing import Any

from moesaic.config import flags
from moesaic.config.args_engine import ModelArgs, RuntimeArgs, ScheduleArgs, ServeArgs
from moesaic.config.args_parallel import (
    BalanceArgs,
    ElasticArgs,
    MoeArgs,
    OverlapArgs,
    ParallelArgs,
)
from moesaic.config.args_roles import DisaggregationArgs, SpeculativeArgs


# The bases stand last to first: dataclass collects fields from the end of the list.
@dataclass(frozen=True)
class ServerArgs(
    DisaggregationArgs,
    SpeculativeArgs,
    ElasticArgs,
    OverlapArgs,
    BalanceArgs,
    MoeArgs,
    ParallelArgs,
    RuntimeArgs,
    ScheduleArgs,
    ServeArgs,
    ModelArgs,
):
    """What the user asked for; `resolve` checks it and fills in what was left open."""

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> "ServerArgs":
        """From Python keywords: a field's name or an alias; values in the field's type."""
        return flags.from_kwargs(cls, kwargs)
