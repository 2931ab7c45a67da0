"""The limits that an engine sets to requests."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from moesaic.comm.mesh import mesh_of
from moesaic.config import ServerArgs
from moesaic.config.flags import json_object
from moesaic.core.sampling import SamplingParams
from moesaic.disagg.allowed_hosts import AllowedHosts, bootstrap_hosts
from moesaic.engine.frontend import routed_experts
from moesaic.engine.text.grammar_check import GrammarChecker
from moesaic.engine.text.grammar_child import GrammarSetup
from moesaic.engine.text.tokenizer import Tokenizer
from moesaic.engine.worker.planner import ModelFacts


class PromptTooLong(ValueError):
    """The prompt does not fit into the context or the KV cache."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    vocab_size: int
    context_length: int
    cache_tokens: int
    eos_ids: frozenset[int]
    seeds: random.Random
    """The source of seeds for requests without one."""
    grammars: GrammarChecker
    num_groups: int = 1
    routed_row: int = 0
    """The bytes of one token's routed experts."""
    longest_token: int = 0
    """In characters; 0 without a tokenizer."""
    request_numbers: Iterator[int] = field(default_factory=count)
    preferred: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters that requests may leave out."""
    role: str = "null"
    """--disaggregation-mode."""
    bootstrap_hosts: AllowedHosts = field(default_factory=lambda: AllowedHosts(()))

    @classmethod
    def of(
        cls, args: ServerArgs, facts: ModelFacts, tokenizer: Tokenizer | None, first_number: int
    ) -> EngineLimits:
        """`first_number`: of the first request."""
        folder, eos_ids, setup = args.tokenizer_path, frozenset(facts.eos_ids), None
        if tokenizer is not None:
            tokenizer.warn_beyond(facts.vocab_size)
            eos_ids = tokenizer.eos_ids or eos_ids
        if folder is not None:
            open_objects = args.constrained_json_allow_additional_properties
            setup = GrammarSetup(folder, facts.vocab_size, sorted(eos_ids), open_objects)
        return cls(
            vocab_size=facts.vocab_size,
            context_length=facts.context_length,
            cache_tokens=facts.cache_tokens,
            eos_ids=eos_ids,
            seeds=random.Random(args.random_seed),
            num_groups=mesh_of(args).num_groups,
            routed_row=routed_experts.row_bytes(facts),
            longest_token=0 if tokenizer is None else tokenizer.longest_token,
            grammars=GrammarChecker(setup, args.grammar_backend),
            preferred=_preferred_params(args),
            role=args.disaggregation_mode,
            request_numbers=count(first_number),
            bootstrap_hosts=AllowedHosts(bootstrap_hosts(args)),
        )

    @property
    def max_sequence(self) -> int:
        return min(self.context_length, self.cache_tokens)

    def check_chars(self, number: int) -> None:
        """PromptTooLong for a text that cannot fit, before time is spent on its tokens."""
        most = self.max_sequence * self.longest_token
        if number > most:
            raise PromptTooLong(
                f"the text has {number} characters; {self.max_sequence} tokens fit, which are at "
                f"most {most} characters: shorten it"
            )

    def check_tokens(self, number: int) -> None:
        if number >= self.context_length:
            raise PromptTooLong(
                f"the prompt has {number} tokens; the context holds {self.context_length}, "
                "including at least one output token: shorten the prompt, or raise "
                "--context-length if the model allows it"
            )
        if number >= self.cache_tokens:
            raise PromptTooLong(
                f"the prompt has {number} tokens; the KV cache holds {self.cache_tokens}: shorten "
                "the prompt, or raise --max-total-tokens or --mem-fraction-static"
            )


def _preferred_params(args: ServerArgs) -> dict[str, Any]:
    found = json_object(args, "preferred_sampling_params")
    try:
        SamplingParams.from_dict(found)
    except ValueError as error:
        raise ValueError(f"--preferred-sampling-params: {error}") from None
    return found
