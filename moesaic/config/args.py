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


# Bases are listed last to first: dataclass collects fields from the end of the list.
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
    """The flags as given; `resolve` checks them and fills in the unset ones."""

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> "ServerArgs":
        """Build from Python keywords: field names or aliases."""
        return flags.from_kwargs(cls, kwargs)
