"""The limits that an engine sets to requests."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from moesaic.disagg.allowed_hosts import AllowedHosts
from moesaic.engine.text.grammar_check import GrammarChecker


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
