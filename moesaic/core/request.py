"""A request and its progress: data only."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from moesaic.core.sampling import SamplingParams

TopLogprobs = list[tuple[float, int]]


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


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to continue.

    `token_ids` holds the prompt and then every emitted token; the first `num_computed` of them have
    their keys and values in `pages`, or a step that is under way puts them there. `pending`: tokens
    that such steps sample; the last but one of these may be computed already. `num_scored`: prompt
    logprobs that steps gave or are to give.
    A retracted request keeps its tokens and loses its pages.
    """

    rid: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    max_new_tokens: int
    arrival: int
    eos_ids: frozenset[int] = frozenset()
    return_logprob: bool = False
    logprob_start: int = 0
    top_logprobs_num: int = 0
    group: int | None = None
    """The serving group that must take it; None: whichever."""

    token_ids: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_scored: int = 0
    pending: int = 0
    drafts: list[int] = field(default_factory=list)
    """A drafter's proposals for the next tokens, which the next step verifies."""
    verifying: bool = False
    """An in-flight step verifies drafts: how many tokens it yields is not known yet."""
    cached_tokens: int = 0
    retractions: int = 0
    finish_reason: FinishReason | None = None
    created: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    finished: float | None = None
    queue_seconds: float | None = None
    """From being taken in to the first step; known once it has begun."""

    input_logprobs: list[float] = field(default_factory=list)
    input_top_logprobs: list[TopLogprobs] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_top_logprobs: list[TopLogprobs] = field(default_factory=list)

    looks_back: bool = field(init=False)
    """As its parameters say; asked for every token."""

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.prompt_ids)
        self.looks_back = self.params.looks_back

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
        """What to tell of a request that failed."""
        assert self.finish_reason is not None
        return f"request {self.rid} failed: {self.finish_reason.message}"

    @property
    def remaining_tokens(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_new_tokens + len(self.prompt_ids) - len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """With those that steps under way sample."""
        return len(self.token_ids) + self.pending

    @property
    def is_decoding(self) -> bool:
        """All tokens but the newest are computed, and that one was emitted, not given."""
        tokens = len(self.token_ids) + self.pending
        return tokens > len(self.prompt_ids) and tokens - self.num_computed <= 1

    @property
    def can_run_ahead(self) -> bool:
        """Whether its next token can be asked for while the one before is under way."""
        return (
            self.pending < self.remaining_tokens
            and not self.verifying
            and not self.looks_back
            and not (self.return_logprob and self.wants_input_logprobs)
        )

    @property
    def next_input_logprob(self) -> int:
        """The first prompt position whose successor's logprob is still wanted."""
        return self.logprob_start + len(self.input_logprobs)

    @property
    def wants_input_logprobs(self) -> bool:
        return self.return_logprob and self.next_input_logprob < self.prompt_len - 1
