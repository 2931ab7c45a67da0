"""All flags of the engine and the server in one flat, frozen object."""

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

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
from moesaic.config.sglang import find_sglang_flag, notes, refuse

logger = logging.getLogger(__name__)


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

    TAKES_SGLANG_FLAGS: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Flags that are another way to give others take effect at once."""
        if self.attn_dp_size > 1 and self.dp_size == 1:
            object.__setattr__(self, "dp_size", self.attn_dp_size)
            object.__setattr__(self, "enable_dp_attention", True)
        if self.cuda_graph_backend_decode == "disabled":
            object.__setattr__(self, "disable_cuda_graph", True)
        if self.cuda_graph_backend_prefill == "disabled":
            object.__setattr__(self, "disable_prefill_cuda_graph", True)

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> "ServerArgs":
        """Build from Python keywords: names or aliases of fields, or SGLang's other flags."""
        fields = {key: find_sglang_flag(cls, key) for key in kwargs}
        own = flags.fields_of(cls, {key: kwargs[key] for key in kwargs if not fields[key]})
        args, wrong = flags.build_and_check(cls, own)
        theirs = {field: kwargs[key] for key, field in fields.items() if field}
        refuse(theirs, args, wrong)
        for note in notes(theirs):
            logger.info("%s", note)
        return args
