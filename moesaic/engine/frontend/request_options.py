"""Checks single arguments of a request."""

from __future__ import annotations

import hashlib
import operator
from typing import Any, Final

from moesaic.core.foreign_fields import BadParameter
from moesaic.core.redact import shown

# Also of `token_ids_logprob`.
MAX_TOP_LOGPROBS: Final = 1024
# Characters of `extra_key` and of `cache_salt`.
MAX_CACHE_KEY: Final = 256


def integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise BadParameter(name, f"{name} must be made of integers, not {shown(value)}")
    return operator.index(value)


def only_nulls(value: Any) -> bool:
    """Whether a list with a value for each prompt has none; it is then as good as left out."""
    return isinstance(value, list) and bool(value) and all(item is None for item in value)


def tokens_to_score(given: Any, vocab_size: int) -> tuple[int, ...]:
    """`token_ids_logprob` of one prompt."""
    name = "token_ids_logprob"
    if given is None:
        return ()
    if not isinstance(given, list | tuple):
        raise BadParameter(name, f"{name} must be a list of token ids, not {shown(given)}")
    if len(given) > MAX_TOP_LOGPROBS:
        text = f"{name} has {len(given)} entries: give at most {MAX_TOP_LOGPROBS}"
        raise BadParameter(name, text)
    ids = tuple(integer(name, token) for token in given)
    for token in ids:
        if not 0 <= token < vocab_size:
            text = f"{name} has {shown(token)}: token ids of this model are in [0, {vocab_size})"
            raise BadParameter(name, text)
    return ids


def cache_namespace(extra_key: Any, cache_salt: Any) -> str:
    """A text of one length for each pair of keys; empty without any."""
    for name, value in (("extra_key", extra_key), ("cache_salt", cache_salt)):
        if not isinstance(value, str | None):
            raise BadParameter(name, f"{name} must be a text, not {shown(value)}")
        if value is not None and len(value) > MAX_CACHE_KEY:
            text = f"{name} has {len(value)} characters: give at most {MAX_CACHE_KEY}"
            raise BadParameter(name, text)
    if not (extra_key or cache_salt):
        return ""
    pair = repr((extra_key or "", cache_salt or ""))
    return hashlib.sha256(pair.encode()).hexdigest()
