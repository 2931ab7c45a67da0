"""Long sequences in rounds ("ant-moving"), as the variables of DeepEP on Ascend ask for it.

DEEPEP_NORMAL_LONG_SEQ_PER_ROUND_TOKENS  tokens of a rank in one round (8192)
DEEPEP_NORMAL_LONG_SEQ_ROUND             rounds at most (1)
DEEPEP_NORMAL_COMBINE_ENABLE_LONG_SEQ    1: results come back in rounds too (0)
HCCL_BUFFSIZE                            MiB that the buffers of a rank may take; rounds are made
                                         smaller, and more, until they fit
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from moesaic.moe.dispatch.base import DispatchConfig
from moesaic.moe.dispatch.host.rows import Rounds, RowsDispatcher

MIB = 1 << 20
PADDING_MIB = 20
DEFAULT_TOKENS = 8192
PER_ROUND = "DEEPEP_NORMAL_LONG_SEQ_PER_ROUND_TOKENS"
ROUNDS = "DEEPEP_NORMAL_LONG_SEQ_ROUND"
COMBINE = "DEEPEP_NORMAL_COMBINE_ENABLE_LONG_SEQ"
BUFFSIZE = "HCCL_BUFFSIZE"


@dataclass(frozen=True, slots=True)
class LongSequences:
    """The variables' values; None where one is not set."""

    per_round_tokens: int | None = None
    rounds: int | None = None
    combine: bool = False
    buffer_mib: int | None = None

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> LongSequences:
        return cls(
            per_round_tokens=_number(environment, PER_ROUND, 1),
            rounds=_number(environment, ROUNDS, 1),
            combine=bool(_number(environment, COMBINE, 0, most=1)),
            buffer_mib=_number(environment, BUFFSIZE, 1),
        )

    @property
    def enabled(self) -> bool:
        return self.per_round_tokens is not None or self.rounds is not None


def _number(
    environment: Mapping[str, str], name: str, least: int, most: int | None = None
) -> int | None:
    text = environment.get(name)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
        allowed = f"{least} or {most}" if most is not None else f"a whole number from {least} on"
        raise ValueError(f"{name} is {text!r}: give {allowed}")
    return int(text)


def formula_mib(tokens: int, hidden_size: int, top_k: int, in_rounds: bool) -> float:
    """What DeepEP on Ascend asks HCCL_BUFFSIZE to be at least: `tokens` are those of a round, or
    without rounds those of the whole sequence."""
    width = (3 if in_rounds else 2) * hidden_size
    return 2 * (102 + 4 + tokens * width * top_k / MIB) + PADDING_MIB


def rounds_from_environment(
    config: DispatchConfig, environment: Mapping[str, str] | None = None
) -> Rounds:
    asked = LongSequences.read(os.environ if environment is None else environment)
    tokens, most = config.max_tokens, 1
    if asked.enabled:
        tokens = min(asked.per_round_tokens or DEFAULT_TOKENS, config.max_tokens)
        needed = -(-config.max_tokens // tokens)
        if (asked.rounds or 1) < needed:
            raise ValueError(
                f"{ROUNDS} {asked.rounds or 1} of {PER_ROUND} {tokens} hold "
                f"{tokens * (asked.rounds or 1)} tokens, but a step may have {config.max_tokens}: "
                f"set {ROUNDS}={needed}, or lower --chunked-prefill-size"
            )
        most = needed
    rounds = Rounds(tokens, most, asked.combine)
    if asked.buffer_mib is not None:
        rounds = _fit(config, rounds, asked.buffer_mib)
    return rounds


def _fit(config: DispatchConfig, rounds: Rounds, budget_mib: int) -> Rounds:
    """Half the tokens and twice the rounds until a rank's buffers fit. Results must then come back
    in rounds too: their buffer would not shrink otherwise."""
    fitted = rounds
    while buffer_bytes(config, fitted) > budget_mib * MIB:
        if fitted.tokens == 1:
            raise ValueError(
                f"{BUFFSIZE} is {budget_mib}: rounds of one token already take "
                f"{buffer_bytes(config, fitted) / MIB:.1f} MiB a rank: raise it"
            )
        tokens = -(-fitted.tokens // 2)
        fitted = replace(fitted, tokens=tokens, most=fitted.most * 2, combine=True)
    return fitted


def buffer_bytes(config: DispatchConfig, rounds: Rounds) -> int:
    """One rank's bytes that other ranks access; its receive buffer does not shrink with rounds."""
    spec = replace(RowsDispatcher.buffer_spec(config, rounds), inbox_rows=0)
    return spec.nbytes(config.layout.size)


@dataclass(frozen=True, slots=True)
class Summary:
    text: str
    formula: float
    """MiB that DeepEP's formula asks for."""
    short: bool
    """Whether HCCL_BUFFSIZE is less than that."""


def summarise(
    config: DispatchConfig, environment: Mapping[str, str] | None = None
) -> Summary | None:
    """None where no variable is set."""
    environment = os.environ if environment is None else environment
    asked = LongSequences.read(environment)
    if asked == LongSequences():
        return None
    rounds = rounds_from_environment(config, environment)
    needed = formula_mib(
        rounds.tokens if asked.enabled else config.max_tokens,
        config.hidden_size,
        config.top_k,
        in_rounds=asked.enabled,
    )
    short = asked.buffer_mib is not None and asked.buffer_mib < needed
    given = "" if asked.buffer_mib is None else f", {BUFFSIZE} is {asked.buffer_mib}"
    text = (
        f"normal mode: up to {rounds.most} rounds of {rounds.tokens} tokens a rank, results "
        f"{'in rounds' if rounds.combine else 'at once'}, {buffer_bytes(config, rounds) / MIB:.1f} "
        f"MiB a rank that others reach (DeepEP on Ascend would ask for {needed:.0f} MiB{given})"
    )
    return Summary(text, needed, short)
