"""Messages between processes: msgpack by msgspec, each tagged with its type."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import reduce
from typing import Any, Final, get_args

import msgspec

from moesaic.core.rank_state import RankSnapshot
from moesaic.core.request import FinishReason, NewRequest, TopLogprobs
from moesaic.core.stats import MembershipStats


class Message(msgspec.Struct, tag=True, tag_field="_", array_like=True):
    """The base of all types below."""


class Submit(Message):
    requests: list[NewRequest]


class PassedRequest(NewRequest):
    """A request in a process that only passes it on: its parameters stay encoded."""

    params: msgspec.Raw  # type: ignore[assignment]


class PassedSubmit(Submit, tag="Submit"):
    requests: list[PassedRequest]  # type: ignore[assignment]


class Abort(Message):
    """`keep`: the client's process has ended it, by a stop string say, and its answer is good."""

    request_no: int
    keep: bool = False


class Attached(Message):
    """To the client: a request that it has submitted continues one of a former client's, whose
    number it has from now on. A StepOutput with all of its answer so far follows."""

    request_no: int
    former: int


class Runnable(Message):
    """From a leader: a request no longer waits for another instance."""

    request_no: int


class Query(Message):
    """A question to the leaders of all serving groups, or to `every` rank. The supervisor adds a
    reply of group -1 to info and stats: its own view of the ranks."""

    number: int
    what: str
    every: bool = False
    options: dict[str, Any] = {}


class QueryReply(Message):
    number: int
    group: int
    value: Any
    rank: int = -1
    lost: bool = False
    """There is no value: the rank or group is lost, or the rank cannot answer."""
    membership: MembershipStats | None = None
    """From the supervisor, with its own view."""


class RequestDelta(msgspec.Struct, array_like=True, gc=False):
    """A request's progress since the last delta; logprobs only if it asks for them."""

    request_no: int
    token_ids: list[int]
    logprobs: Sequence[float] = ()
    top_logprobs: Sequence[TopLogprobs] = ()
    input_logprobs: Sequence[float] = ()
    input_top_logprobs: Sequence[TopLogprobs] = ()
    cached_tokens: int = 0
    retractions: int = 0
    finish: FinishReason | None = None
    queue_seconds: float | None = None
    routed_first: int = 0
    routed: bytes = b""
    """Experts of the tokens from `routed_first` on, if the request asks for them."""
    drafts: tuple[int, int, int] = (0, 0, 0)
    """As Request.draft_counts."""
    unsent: str = ""
    """Why the instance that continues the request does not get all of it, if that is known."""


class StepOutput(Message):
    """From a leader, once a step. Most requests get one token and nothing else: their `numbers` and
    `tokens` come before the `deltas`, in which a request with such a token may end."""

    deltas: list[RequestDelta]
    numbers: list[int] = []
    tokens: list[int] = []


class Ready(Message):
    """From a rank once it can serve, and from the supervisor once all can."""

    rank: int
    facts: dict[str, Any]


class Wake(Message):
    """To all ranks of a replica: start stepping at this round."""

    round: int


class Asleep(Message):
    """From the first rank of a replica: its ranks stop before this round and wait for a Wake."""

    replica: int
    round: int


class StepFailed(Message):
    """From a rank that raised in a step of this generation and waits for the rollback. `lost_link`:
    as a connection to another node is lost, although no rank is known to be."""

    rank: int
    generation: int
    step: int
    error: str
    lost_link: bool = False


class RollbackStep(Message):
    """To all ranks of a replica: abandon the step. `error`: why `step` failed, and where. `ranks`:
    those that live, for the supervisors of other nodes. `ends_links`: their connections between
    nodes end, and live ranks make others when they go on."""

    replica: int
    generation: int
    step: int
    error: str
    ranks: list[int] = []
    ends_links: bool = False


class StepAbandoned(Message):
    """From a rank that waits for the others. `suspects`: sets of requests that its group tries."""

    rank: int
    generation: int
    step: int
    suspects: int = 0


class ResumeSteps(Message):
    """To all ranks of a replica once all have abandoned their step: continue from this round.
    `suspects`: those of each serving group; while there are any, one group steps at a time.
    `active`: the live ranks of the replica. `epoch` grows when these change. `reset`: serving
    groups whose requests are submitted anew, as one of their ranks is or was lost."""

    generation: int
    round: int
    suspects: list[int]
    active: list[int] = []
    epoch: int = 1
    reset: list[int] = []


class MembersAdopted(Message):
    """From a rank that has adopted the live ranks of an epoch. `experts`: how many it has read into
    slots of replicas, as no other rank had them, of `nbytes` in all; `from_memory` of them from
    what lost ranks have left, the others from the checkpoint."""

    rank: int
    epoch: int
    experts: int = 0
    nbytes: int = 0
    from_memory: int = 0
    seconds: float = 0.0


class SlowStep(Message):
    """From the first rank of a replica: a step took much longer than such steps usually do."""

    replica: int
    step: int
    seconds: float
    usual: float


class Failed(Message):
    """From a rank that cannot go on. `waited`: its wait for other ranks timed out, so that one of
    them is more likely at fault. `request_no`: the request that may be the cause; -1: none."""

    rank: int
    error: str
    waited: bool = False
    request_no: int = -1


class Fault(Message):
    """From the supervisor: the service and its open requests end. `ranks`: those at fault.
    `supervisor`: it is at fault itself, and another one could serve. `yields`: one does, of another
    node."""

    message: str
    ranks: list[int] = []
    supervisor: bool = False
    yields: bool = False


class Stop(Message):
    """End now; a rank answers by exiting with status 0. `reason`: why, from a client."""

    reason: str = "its program has ended it"


class Hello(Message):
    """The first message of a client or a node to the supervisor, and of node 0 to a node that it
    admits. `node`: 0 for the client. `facts`: what all nodes must have in common; the pid of a
    client; to a node, whether the service `serves` already."""

    node: int = 0
    facts: dict[str, Any] = {}


class Relay(Message):
    """Between nodes: an encoded message from a rank, or to it."""

    rank: int
    data: bytes


class Beat(Message):
    """Sent between nodes several times a second; `ranks`: what the sender's ranks do. `serves`: it
    leads the service, and does not wait for others."""

    node: int
    ranks: dict[int, RankSnapshot] = {}
    serves: bool = False


class MirrorOpen(Message):
    """To the node that mirrors the journal: an open request. `submit`: an encoded Submit of it as
    it was submitted. `told`: what its client got, if it may ask for it by its `key`."""

    submit: bytes
    emitted: list[int]
    key: str = ""
    is_aborted: bool = False
    told: RequestDelta | None = None


class MirrorKept(Message):
    """The same: an answer that has ended, for which its client may ask for `seconds` more."""

    key: str
    number: int
    data: bytes
    seconds: float


class MirrorBegin(Message):
    """The same: the journal is complete with this. `facts`: those of each rank.
    `store`: what ranks have exchanged. `generations`: of each replica."""

    number: int
    facts: list[dict[str, Any]]
    store: dict[str, bytes]
    generations: list[int]


class MirrorStep(Message):
    """The same: an encoded message that changes the journal."""

    number: int
    data: bytes


class MirrorStore(Message):
    """The same: a value that a rank has set in the store."""

    key: str
    value: bytes


class Mirrored(Message):
    """The answer: all up to the message of this number is mirrored."""

    number: int


class TakeOver(Message):
    """To the client of a node that stood by: its supervisor leads the service from now on, for this
    reason."""

    cause: str


class StartRank(Message):
    """From node 0 to the node of a rank that is to be started again."""

    rank: int


class EndRank(Message):
    """From node 0 to the node of a rank that is lost or removed: end its process."""

    rank: int


class RankEnded(Message):
    """The answer to EndRank: what this process has sent came before."""

    rank: int


class RanksLost(Message):
    """From another node to node 0: these ranks have died or hung, and their processes are gone."""

    ranks: list[int]
    cause: str


AnyMessage = (
    Submit
    | Abort
    | Attached
    | Runnable
    | Query
    | QueryReply
    | StepOutput
    | Ready
    | Wake
    | Asleep
    | StepFailed
    | RollbackStep
    | StepAbandoned
    | ResumeSteps
    | MembersAdopted
    | SlowStep
    | Failed
    | Fault
    | Stop
    | Hello
    | Relay
    | Beat
    | MirrorOpen
    | MirrorKept
    | MirrorBegin
    | MirrorStep
    | MirrorStore
    | Mirrored
    | TakeOver
    | StartRank
    | EndRank
    | RankEnded
    | RanksLost
)

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(AnyMessage)
_PASSED: Final = [PassedSubmit, *(kind for kind in get_args(AnyMessage) if kind is not Submit)]
_passing_decoder: Final = msgspec.msgpack.Decoder[AnyMessage](reduce(operator.or_, _PASSED))


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


class NoMessage(ValueError):
    """Bytes that are not a message of a known type and shape."""


def decode(data: bytes | memoryview, *, passing: bool = False) -> AnyMessage:
    """`passing`: requests are decoded as a PassedRequest."""
    try:
        return (_passing_decoder if passing else _decoder).decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise NoMessage(str(error)) from error
