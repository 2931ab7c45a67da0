"""Sampling parameters of a request, with the names and defaults of SGLang."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Final, NamedTuple

from moesaic.core.foreign_fields import BadParameter as BadParameter
from moesaic.core.foreign_fields import drop_foreign
from moesaic.core.redact import LONGEST_WORD, shown

# vLLM's names.
ALIASES: Final = {"seed": "sampling_seed", "include_stop_str_in_output": "no_stop_trim"}
GREEDY_BELOW: Final = 1e-6
MAX_SEED: Final = 2**63
# Counts of tokens must fit into a message between processes.
MAX_COUNT: Final = 2**31
# Beyond these float32 would overflow or underflow.
MAX_BIAS: Final = 1e6
MIN_REPETITION_PENALTY: Final = 0.01
# Each of these is checked for every token.
MAX_STOPS: Final = 64
MAX_STOP_LENGTH: Final = 1024
MAX_STOP_IDS: Final = 1024
MAX_BIASES: Final = 1024
MAX_DIGITS: Final = 20
GRAMMARS: Final = ("json_schema", "regex", "ebnf", "lark")
MAX_GRAMMAR_BYTES: Final = 2**16


class Grammar(NamedTuple):
    """The format of an answer; `kind` is one of GRAMMARS."""

    kind: str
    text: str


class Limit(NamedTuple):
    """The values that a number may have."""

    type: type[int] | type[float]
    allows: Callable[[Any], bool]
    fix: str
    """What a message advises otherwise."""

    def checked(self, name: str, value: Any) -> int | float:
        value = _integer(name, value) if self.type is int else _number(name, value)
        if not self.allows(value):
            _refuse(name, value, self.fix)
        return value


_PENALTY: Final = Limit(float, lambda x: -2 <= x <= 2, "give a number in [-2, 2]; 0 is off")
LIMITS: Final = {
    "min_new_tokens": Limit(int, lambda n: n >= 0, "give 0 or more"),
    "n": Limit(int, lambda n: n >= 1, "give 1 or more"),
    "max_new_tokens": Limit(
        int, lambda n: n >= 0, "give 0 or more, or null (in Python None) for no limit"
    ),
    "temperature": Limit(float, lambda x: x >= 0, "give 0 (greedy) or more"),
    "top_p": Limit(float, lambda x: 0 < x <= 1, "give a number in (0, 1]; 1 keeps every token"),
    "min_p": Limit(float, lambda x: 0 <= x <= 1, "give a number in [0, 1]; 0 keeps every token"),
    "top_k": Limit(int, lambda k: k == -1 or k >= 1, "give 1 or more, or -1 to keep every token"),
    "frequency_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
    "repetition_penalty": Limit(
        float,
        lambda x: MIN_REPETITION_PENALTY <= x <= 2,
        f"give a number in [{MIN_REPETITION_PENALTY}, 2]; 1 is off",
    ),
    "sampling_seed": Limit(int, lambda n: 0 <= n < MAX_SEED, "give an integer in [0, 2**63)"),
}
OPTIONAL: Final = ("max_new_tokens", "sampling_seed")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Checked on construction; `from_dict` reads JSON and keyword arguments."""

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    n: int = 1
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    sampling_seed: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    lark: str | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "stop_regex"):
            _set(self, name, _strings(name, getattr(self, name)))
        _set(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        _set(self, "logit_bias", _bias(self.logit_bias))
        for name in ("ignore_eos", "skip_special_tokens", "no_stop_trim"):
            _boolean(name, getattr(self, name))
        for name, limit in LIMITS.items():
            value = getattr(self, name)
            if value is _DEFAULTS[name] or (value is None and name in OPTIONAL):
                continue
            _set(self, name, limit.checked(name, value))
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            fix = f"give at most max_new_tokens={self.max_new_tokens}, or raise that"
            _refuse("min_new_tokens", self.min_new_tokens, fix)
        self._check_grammar()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any] | None) -> SamplingParams:
        """Build from JSON-like values; None is the default, except for max_new_tokens."""
        known = _NAMES
        chosen: dict[str, Any] = {}
        for given, value in (values or {}).items():
            name = ALIASES.get(given, given)
            if name not in known:
                if not drop_foreign(given, value):
                    raise _unknown(given, known)
            elif name == "max_new_tokens" or not (value is None or _is_no_text(name, value)):
                if name in chosen:
                    names = [key for key in values or {} if ALIASES.get(key, key) == name]
                    text = f"{' and '.join(names)} are the same: give one of them"
                    raise BadParameter(given, text)
                chosen[name] = value
        return cls(**chosen)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without a random number."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def penalised(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before a token is drawn, other than by a grammar."""
        return self.penalised or bool(self.logit_bias) or self.min_new_tokens > 0

    @property
    def looks_back(self) -> bool:
        """Whether the next token depends on the tokens so far beyond the logits."""
        return self.penalised or self.min_new_tokens > 0 or self.grammar is not None

    @property
    def has_history(self) -> bool:
        """Whether sampling keeps state for the whole answer."""
        return self.adjusts or self.grammar is not None

    @property
    def grammar(self) -> Grammar | None:
        for kind in GRAMMARS:
            if (text := getattr(self, kind)) is not None:
                return Grammar(kind, text)
        return None

    def check_vocab(self, vocab_size: int) -> None:
        named = {"stop_token_ids": self.stop_token_ids, "logit_bias": tuple(self.logit_bias)}
        for name, ids in named.items():
            for token in ids:
                if token >= vocab_size:
                    _refuse(name, token, f"token ids of this model are in [0, {vocab_size})")

    def _check_grammar(self) -> None:
        given = [kind for kind in GRAMMARS if getattr(self, kind) is not None]
        if not given:
            return
        if len(given) > 1:
            text = f"{' and '.join(given)} exclude each other: give one of them"
            raise BadParameter(given[1], text)
        kind = given[0]
        _set(self, kind, _grammar_text(kind, getattr(self, kind)))
        if self.ignore_eos:
            _refuse("ignore_eos", True, "a structured answer ends where the grammar does")
        if self.min_new_tokens > 0:
            fix = "a structured answer ends where the grammar does: set its least size there"
            _refuse("min_new_tokens", self.min_new_tokens, fix)


_NAMES: Final = frozenset(field.name for field in fields(SamplingParams))
_DEFAULTS: Final = {field.name: field.default for field in fields(SamplingParams)}


def _set(params: SamplingParams, name: str, value: Any) -> None:
    object.__setattr__(params, name, value)


def _refuse(name: str, value: object, fix: str) -> None:
    raise BadParameter(name.partition("[")[0], f"{name}={shown(value)} is not possible: {fix}")


def _at_most(name: str, number: int, limit: int) -> None:
    if number > limit:
        raise BadParameter(name, f"{name} has {number} entries: give at most {limit}")


def _is_no_text(name: str, value: Any) -> bool:
    return value == "" and name in (*GRAMMARS, "stop", "stop_regex")


def _unknown(name: str, known: frozenset[str]) -> BadParameter:
    names = sorted(known | set(ALIASES))
    near = get_close_matches(str(name)[:LONGEST_WORD], names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}"
    plain = shown(name) == repr(name)
    field = name if plain else "sampling_params"
    return BadParameter(field, f"unknown sampling parameter {shown(name)}: {hint}")


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        _refuse(name, value, f"give an integer, not {type(value).__name__}")
    if name != "sampling_seed" and not -MAX_COUNT < value < MAX_COUNT:
        _refuse(name, value, f"give less than {MAX_COUNT}")
    return int(value)


def _boolean(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        _refuse(name, value, f"give true or false, not {type(value).__name__}")


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        _refuse(name, value, f"give a number, not {type(value).__name__}")
    if not math.isfinite(value):
        _refuse(name, value, "give a finite number")
    return float(value)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if value is None or value == ():
        return ()
    if not isinstance(value, str | list | tuple):
        _refuse(name, value, "give a string or a list of strings")
    strings = (value,) if isinstance(value, str) else tuple(value)
    _at_most(name, len(strings), MAX_STOPS)
    for string in strings:
        if not isinstance(string, str) or not string:
            _refuse(name, string, "each must be a string of at least one character")
        if any("\ud800" <= character <= "\udfff" for character in string):
            _refuse(name, string, "it holds half of a character (a lone surrogate)")
        if len(string) > MAX_STOP_LENGTH:
            _refuse(name, string, f"give at most {MAX_STOP_LENGTH} characters")
    return strings


def _grammar_text(kind: str, value: Any) -> str:
    """Check a grammar; messages never show it, as it may be long."""
    if kind == "json_schema" and isinstance(value, dict):
        try:
            value = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            fix = "it is not serialisable as JSON"
            raise BadParameter(kind, f"{kind} is not possible: {fix}") from error
    if not isinstance(value, str) or not value:
        what = "a JSON schema as text or dict" if kind == "json_schema" else "a text"
        raise BadParameter(kind, f"{kind} is not possible: give {what} that is not empty")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        fix = "it holds half of a character (a lone surrogate)"
        raise BadParameter(kind, f"{kind} is not possible: {fix}") from None
    if size > MAX_GRAMMAR_BYTES:
        fix = f"it has {size} bytes, give at most {MAX_GRAMMAR_BYTES}"
        raise BadParameter(kind, f"{kind} is not possible: {fix}")
    return value


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if value is None or value == ():
        return ()
    if not isinstance(value, list | tuple | set | frozenset):
        _refuse(name, value, "give a list of token ids")
    _at_most(name, len(value), MAX_STOP_IDS)
    # Checking many ids one by one would hold up the steps of a rank.
    if set(map(type, value)) == {int} and min(value) >= 0 and max(value) < MAX_COUNT:
        return tuple(value)
    ids = tuple(_integer(name, token) for token in value)
    for token in ids:
        if token < 0:
            _refuse(name, token, "token ids are 0 or more")
    return ids


def _bias(value: Any) -> dict[int, float]:
    """Biases by token id; keys may be strings, as in JSON."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        _refuse("logit_bias", value, "give a mapping from token id to bias")
    _at_most("logit_bias", len(value), MAX_BIASES)
    bias = {}
    for key, amount in value.items():
        text = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < MAX_DIGITS
        token = _integer("logit_bias", int(key) if text else key)
        if token < 0:
            _refuse("logit_bias", key, "token ids are 0 or more")
        bias[token] = _number(f"logit_bias[{token}]", amount)
        if abs(bias[token]) > MAX_BIAS:
            _refuse(f"logit_bias[{token}]", amount, f"give at most {MAX_BIAS:g} either way")
    return bias
