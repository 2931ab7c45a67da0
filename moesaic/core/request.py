"""A request and its progress: data only."""

from __future__ import annotations

import time
from enum import Enum
from typing import Any

import msgspec

from moesaic.core.disagg import KVTarget, Room, Ticket
from moesaic.core.sampling import SamplingParams

TopLogprobs = list[tuple[float, int]]
"""The most likely tokens of a position, then those of the request's `token_ids_logprob`."""


# The message of an abort that was asked for; others come from a service that ends.
ABORTED = "aborted by the caller"


class FinishReason(msgspec.Struct, frozen=True, array_like=True):
    """Why a request ended: `stop` (with what matched), `length` or `abort` (with a message)."""

    type: str
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None
    failed: bool = False

    def to_dict(self) -> dict[str, Any]:
        details = {"matched": self.matched, "length": self.length, "message": self.message}
        return {"type": self.type} | {k: v for k, v in details.items() if v is not None}


def failure(message: str) -> FinishReason:
    """The end of a request that could not be served."""
    return FinishReason("abort", message=message, failed=True)


class NewRequest(msgspec.Struct, array_like=True):
    """One sequence to continue, as it is submitted to a serving group."""

    rid: str
    """The caller's id; on ranks only logs show it."""
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    max_new_tokens: int
    request_no: int
    """The engine's own number, unlike `rid` never used again; older requests have lower ones."""
    eos_ids: frozenset[int] = frozenset()
    return_logprob: bool = False
    logprob_start: int = 0
    top_logprobs_num: int = 0
    group: int | None = None
    """The serving group that must take it; None: any."""
    emitted: list[int] = []
    """Tokens that it has from another serving group."""
    routed_start: int | None = None
    """The first position whose routed experts are requested; None: none are."""
    routed_row: int = 0
    """The bytes of one token's routed experts."""
    cache_namespace: str = ""
    """Only requests with the same one share pages of the prefix cache."""
    token_ids_logprob: tuple[int, ...] = ()
    """Tokens whose logprobs are reported at every position."""
    room: Room | None = None
    """Where another instance computes its prompt, or continues it."""
    kv_target: KVTarget | None = None
    """Where the KV cache of its prompt goes once it is computed."""
    key: str = ""
    """Names it and its client, who may ask for its answer again; empty: nobody will."""
    is_suspect: bool = False
    """What was done for it has failed once: if it fails again, it ends with the error."""


class RequestPhase(Enum):
    """Where the scheduler has a request."""

    WAITING = "waiting"
    """For pages, at first or after a retraction."""
    RUNNING = "running"
    FINISHED = "finished"


class ArrivingPrompt(msgspec.Struct):
    """The KV cache of a prompt that another instance computes: that of the tokens from `first` up
    to `stop` comes with `ticket`, which is None until the request has pages."""

    ticket: Ticket | None = None
    first: int = 0
    stop: int = 0
    is_here: bool = False


class Request(NewRequest, eq=False):
    """A request and its progress.

    `token_ids` holds the prompt and then every emitted token; the first `num_computed` of them have
    their keys and values in `pages`, or an in-flight step puts them there. `pending`: tokens that
    in-flight steps sample; the last but one of these may be computed already. `num_scored`: prompt
    logprobs that steps gave or are to give. `row`: its row of the ranks' page tables while it runs,
    whose first `pages_sent` entries earlier plans have set to its pages.
    A retracted request keeps its tokens and loses its pages and its row.
    """

    phase: RequestPhase = RequestPhase.WAITING
    token_ids: list[int] = []
    pages: list[int] = []
    pages_sent: int = 0
    row: int = -1
    num_computed: int = 0
    num_scored: int = 0
    pending: int = 0
    drafts: list[int] = []
    """A drafter's proposals for the next tokens, which the next step verifies."""
    draft_parents: list[int] = []
    """If they are a tree, of its first nodes (core/draft_tree.py); those that were taken away from
    the end of `drafts` may still be here."""
    may_draft: bool = True
    """False once a step with drafts of it has failed: if it fails without, drafts did not cause it.
    """
    verifying: bool = False
    """An in-flight step verifies drafts: how many tokens it yields is not known yet."""
    awaits_grammar: bool = False
    """A step computed all its tokens before its grammar was compiled."""
    draft_counts: tuple[int, int, int] = (0, 0, 0)
    """Drafts that steps have verified for it, the tokens of these, and those that were accepted."""
    cached_tokens: int = 0
    retractions: int = 0
    finish_reason: FinishReason | None = None
    created: float = msgspec.field(default_factory=time.monotonic)
    first_token: float | None = None
    finished: float | None = None
    queue_seconds: float | None = None
    """From its submission to its first step."""

    input_logprobs: list[float] = []
    input_top_logprobs: list[TopLogprobs] = []
    output_logprobs: list[float] = []
    output_top_logprobs: list[TopLogprobs] = []
    routed: bytearray = msgspec.field(default_factory=bytearray)
    """Experts of the tokens from `routed_start` on, [tokens, layers, top-k] of uint16."""

    waits_for_token: bool = False
    """The host samples its next token, and needs the one before for that."""
    sampling_sent: bool = False
    """A plan has told the ranks how its row of the page table is sampled."""
    arriving: ArrivingPrompt | None = None
    """Another instance computes its prompt; None once a step has moved that to its pages."""
    draft_computed: int = 0
    """The first tokens that a draft model on the ranks has computed, if it fills gaps."""
    kv_sent: int = 0
    """The tokens whose KV cache steps have sent, or are to send, to its `kv_target`."""

    def __post_init__(self) -> None:
        self.token_ids = [*self.prompt_ids, *self.emitted]
        on_host = self.return_logprob or self.params.grammar is not None
        self.waits_for_token = on_host and self.params.looks_back

    def submission(self) -> NewRequest:
        return NewRequest(*(getattr(self, name) for name in NewRequest.__struct_fields__))

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - len(self.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_ids) :]

    @property
    def failed(self) -> bool:
        return self.finish_reason is not None and self.finish_reason.failed

    @property
    def failure(self) -> str:
        assert self.finish_reason is not None
        return f"request {self.rid} failed: {self.finish_reason.message}"

    @property
    def remaining_tokens(self) -> int:
        return self.max_new_tokens + len(self.prompt_ids) - len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """With those that in-flight steps sample."""
        return len(self.token_ids) + self.pending

    @property
    def is_decoding(self) -> bool:
        """All tokens but the newest are computed, and that one was emitted, not given, or has been
        computed before."""
        tokens = len(self.token_ids) + self.pending
        is_new = tokens <= len(self.prompt_ids) and not self.awaits_grammar
        return not is_new and tokens - self.num_computed <= 1

    @property
    def is_plain(self) -> bool:
        """Steps give it tokens and nothing else, which depend on the logits alone."""
        is_asked = self.return_logprob or self.routed_start is not None
        return not is_asked and not self.params.has_history

    @property
    def awaits_prompt(self) -> bool:
        """Another instance computes its prompt, which is not here yet."""
        return self.arriving is not None and not self.arriving.is_here

    @property
    def can_run_ahead(self) -> bool:
        """Whether a step may sample its next token while the one before is in flight."""
        return (
            self.pending < self.max_new_tokens + len(self.prompt_ids) - len(self.token_ids)
            and not self.verifying
            and not self.waits_for_token
            and not (self.return_logprob and self.lacks_input_logprobs)
        )

    @property
    def next_routed(self) -> int:
        """The first position whose routed experts are still missing."""
        assert self.routed_start is not None
        return self.routed_start + len(self.routed) // self.routed_row

    def add_routed(self, first: int, rows: bytes) -> None:
        """Adds the experts of the tokens from `first` on. Known ones stay: a token that is computed
        again, after a retraction or on another rank, was emitted with those."""
        known = self.next_routed - first
        assert known >= 0, f"position {first} is routed before {self.next_routed}"
        self.routed += rows[known * self.routed_row :]

    @property
    def next_input_logprob(self) -> int:
        """The first prompt position whose successor's logprob is still missing."""
        return self.logprob_start + len(self.input_logprobs)

    @property
    def lacks_input_logprobs(self) -> bool:
        return self.return_logprob and self.next_input_logprob < self.prompt_len - 1
